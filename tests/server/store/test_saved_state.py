"""What a server learned, over a restart: the file, who writes it, and what a damaged one does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contracts.policy import info, key
from golden.history_samples import GATES, OLDER, PATH, VARIANTS, models, packed, saved, sections
from helpers.documents import (
    make_content_index,
)
from helpers.prompts import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.clock import FakeClock
from simulation.core import Core, prompt
from simulation.tiers import SimDisk, no_faults

from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.plans import Hints
from kvstore.proto.types import DIGEST_BYTES, ROOT, Accuracy, ChunkKey, Namespace
from kvstore.server.blending.content_index import MAX_LEARNED, Measured, Named
from kvstore.server.blending.gates import TRIALS, Shadow
from kvstore.server.eviction.access_history import SavedHistory
from kvstore.server.eviction.policy import make_policy
from kvstore.server.index import catalog as catalog_module
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.hints import ChunkMetadata, PutInfo
from kvstore.server.index.holds import Leases
from kvstore.server.index.known_models import MAX_SPACES, ModelNamespace, ModelRegistry
from kvstore.server.settings.values import MAX_RATIO
from kvstore.server.store import saved_state
from kvstore.server.store.saved_state import (
    FILE_NAME,
    GATES_FILE_NAME,
    RETRY_GATES_S,
    SAVE_EVERY_S,
    SavedState,
    pack_models,
    pack_sections,
    unpack_gates,
    unpack_history,
    unpack_models,
    unpack_sections,
    unpack_variants,
)

CHAIN = [key(number) for number in range(8)]


def make_catalog(clock: FakeClock, evicted_limit: int = 100) -> Catalog:
    metadata = ChunkMetadata(evicted_limit=evicted_limit)
    policy = make_policy("hit_density", metadata.history)
    return Catalog({"cpu": policy}, Leases(9, lambda: 1), 1_000, clock, metadata)


def taught(clock: FakeClock, catalog: Catalog | None = None) -> Catalog:
    """Return a catalog that was asked for a chain at three times, and has half of it left."""
    catalog = make_catalog(clock) if catalog is None else catalog
    origin = PutInfo("acme", Hints(category="batch"))
    for number in range(8):
        flops = replace(info(number, number - 1 if number else None), prefill_flops=1e9 * number)
        catalog.note_sealed("cpu", flops, origin)
    for at in range(3):
        clock.advance(10 + at)
        catalog.match(CHAIN[: 8 - at], Accuracy.exact, ["cpu"])
    for number in range(7, 3, -1):
        catalog.forget("cpu", key(number))
    clock.advance(5)
    return catalog


def same(one: SavedHistory, other: SavedHistory) -> bool:
    names = [(list(each.names), list(each.groups)) for each in (one, other)]
    arrays = [(each.classes, each.chunks) for each in (one, other)]
    return names[0] == names[1] and all(map(np.array_equal, *arrays))


def gate_rows(gates: list[Any]) -> list[tuple[object, ...]]:
    return [
        (*name, gate.model, gate.ratio, gate.agreement, gate.divergence, gate.speedup)
        for name, gate in gates
    ]


# --- bytes


def is_all_read(data: bytes) -> bool:
    found = unpack_sections(data)
    return (
        same(unpack_history(found), saved())
        and unpack_models(found) == models()
        and gate_rows(unpack_gates(found)) == gate_rows(GATES)
        and unpack_variants(found) == VARIANTS
    )


def test_a_file_is_read_as_it_was_written_and_the_golden_file_for_ever() -> None:
    assert is_all_read(packed())
    assert is_all_read(PATH.read_bytes())
    assert all(gate.is_open and gate.is_calibrated for _, gate in unpack_gates(sections()))


def test_another_version_is_refused() -> None:
    data = bytearray(packed())
    data[4] += 1
    for other in (bytes(data), OLDER.read_bytes()):
        with pytest.raises(InvalidFrameError, match="not this version"):
            unpack_sections(other)


PARTS: dict[str, Callable[[Any], object]] = {
    "history": unpack_history,
    "models": unpack_models,
    "gates": unpack_gates,
    "variants": unpack_variants,
}


def lost_of(data: bytes) -> list[str]:
    """Return the parts that cannot be read, all of them if the file cannot."""
    try:
        found = unpack_sections(data)
    except InvalidFrameError:
        return list(PARTS)
    lost = []
    for name, unpack in PARTS.items():
        try:
            unpack(found)
        except InvalidFrameError:
            lost.append(name)
    return lost


@settings(max_examples=300, deadline=None)
@given(st.integers(0, PATH.stat().st_size - 1), st.integers(1, 255))
def test_a_byte_changed_costs_one_section_or_the_file(at: int, change: int) -> None:
    data = bytearray(PATH.read_bytes())
    data[at] ^= change
    assert len(lost_of(bytes(data))) == (1 if at >= 8 + 6 * 24 + 8 else len(PARTS))


IMPOSSIBLE = {
    "age_s": (-1.0, np.nan), "flops": (np.inf,), "left_s": (-0.5,), "own": (60,), "hits": (0,)
}  # fmt: skip
IMPOSSIBLE_TEXT = [
    ("gates", b"0.225", b"NaN"),
    ("gates", b"0.225", b"-1.0"),
    ("gates", b"0.225", str(MAX_RATIO + 0.1).encode()),
    ("gates", b"0.97", b"1.1"),
    ("gates", b"rag", b"r\\n"),
    ("gates", b"rag", b"r" * 65),
    ("variants", b"0.625", b"NaN"),
    ("variants", b"-1.0", b"-2.0"),
    ("variants", b"48,1.5", b"48,-1.5"),
    ("variants", b"48,1.5", b"0,1.5"),
    ("variants", b"3.0", b"1e10"),
    ("groups", b"[40,", b"[41,"),
    ("groups", b"[1,2]", b"[1,-2]"),
    ("classes", b"@@", b"@"),
]


def test_rows_that_cannot_be_are_refused() -> None:
    for name, values in IMPOSSIBLE.items():
        for value in values:
            spoilt = saved()
            spoilt.chunks[name][2] = value
            with pytest.raises(InvalidFrameError):
                unpack_history({**sections(), "chunks": spoilt.chunks.tobytes()})
    for name, was, becomes in IMPOSSIBLE_TEXT:
        data = sections()
        assert was in data[name]
        data[name] = data[name].replace(was, becomes, 1)
        part = "history" if name in ("groups", "classes") else name
        assert lost_of(pack_sections(data)) == [part], (was, becomes)


def space(number: int, client: str = "engine") -> ModelNamespace:
    return ModelNamespace(Namespace(number.to_bytes(16, "little")), "acme", client, SMALL)


def test_no_more_models_are_written_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [space(number) for number in range(MAX_SPACES + 5)]
    assert unpack_models({"models": pack_models(many)}) == many[5:]
    monkeypatch.setattr(saved_state, "MAX_MODEL_BYTES", 250)
    larger = replace(SMALL, model_id="x" * 250)
    kept = pack_models([replace(space(1), representation=larger), space(2)])
    assert unpack_models({"models": kept}) == [space(2)]
    spaces = ModelRegistry()
    spaces.restore(many)
    assert spaces.all() == many[:4:-1]


# --- what policies learned


def test_no_more_chunks_are_kept_and_come_back_than_may_and_those_that_left_last_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = taught(FakeClock())
    everything = old.save().chunks
    new = make_catalog(FakeClock(), evicted_limit=5)
    assert new.restore(old.save()) == new.evicted_count() == 5
    monkeypatch.setattr(catalog_module, "MAX_CHUNKS", 3)
    assert np.array_equal(old.save().chunks, everything[-3:])


# --- when it is saved


@pytest.fixture
def make_core(clock: FakeClock) -> Iterator[Callable[[], Core]]:
    cores: list[Core] = []

    def make() -> Core:
        policy = lambda tier, metadata: make_policy("hit_density", metadata.history)  # noqa: E731
        metadata = ChunkMetadata(evicted_limit=100)
        cores.append(Core(clock=clock, policy=policy, metadata=metadata))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


def saved_state_of(core: Core, folder: Path, wall_s: float = 0.0) -> SavedState:
    return SavedState(core.store, folder, FakeClock(wall_s))


def open_gate(core: Core) -> None:
    gates = core.store.blends.gates
    for _ in range(TRIALS):
        gates.record((b"s" * 16, "rag"), Shadow(0.0, 1.0, 64, gates.terms.ratio))


def close_gate(core: Core) -> None:
    gates = core.store.blends.gates
    for _ in range(TRIALS):
        if gates.views()[0].is_open:
            gates.record((b"s" * 16, "rag"), Shadow(9.0, 0.0, 64, gates.views()[0].ratio))
    assert not gates.views()[0].is_open


def test_the_file_is_written_when_it_is_due(
    tmp_path: Path, clock: FakeClock, make_core: Callable[[], Core]
) -> None:
    saved, path = saved_state_of(core := make_core(), tmp_path), tmp_path / FILE_NAME

    def is_written(after_s: float) -> bool:
        path.unlink(missing_ok=True)
        clock.advance(after_s)
        saved.save_if_due()
        return path.exists()

    assert not is_written(SAVE_EVERY_S - 1)
    assert is_written(1)
    open_gate(core)
    assert not is_written(SAVE_EVERY_S - 1)  # a gate does not have all written
    assert is_written(1)
    assert {one.name for one in tmp_path.iterdir()} == {FILE_NAME, GATES_FILE_NAME}


def test_a_gate_is_saved_as_soon_as_it_changed_and_again_after_a_failure(
    tmp_path: Path, clock: FakeClock, make_core: Callable[[], Core]
) -> None:
    saved = saved_state_of(core := make_core(), tmp_path)

    def saved_gates() -> list[bool]:
        saved.save_if_due()
        saved_state_of(again := make_core(), tmp_path).load()
        return [one.is_open for one in again.store.blends.gates.views()]

    assert saved_gates() == []
    open_gate(core)
    assert saved_gates() == [True]
    blocker = tmp_path / f"{GATES_FILE_NAME}.new"
    blocker.mkdir()
    close_gate(core)
    assert saved_gates() == [True]
    blocker.rmdir()
    clock.advance(RETRY_GATES_S - 1)
    assert saved_gates() == [True]
    clock.advance(1)
    assert saved_gates() == []


def test_a_new_process_knows_what_the_last_one_saved(
    tmp_path: Path, clock: FakeClock, make_core: Callable[[], Core]
) -> None:
    core = make_core()
    taught(clock, core.catalog)
    open_gate(core)
    core.store.spaces.restore(models())
    core.store.blends.contents.recall(VARIANTS)
    assert saved_state_of(core, tmp_path).save()
    again = make_core()
    saved_state_of(again, tmp_path, time.time()).load()
    assert (again.catalog.evicted_count(), len(again.catalog)) == (8, 0)
    new, was = again.catalog.save(), core.catalog.save()
    by_key = [np.sort(one.chunks, order="key") for one in (new, was)]
    for name in ("key", "flops", "hits", "turns", "own", "chunks"):
        assert np.array_equal(by_key[0][name], by_key[1][name]), name
    assert new.classes["asked"].sum() == was.classes["asked"].sum() > 0
    assert list(new.names) == [("acme", "batch")]
    assert again.store.spaces.all() == core.store.spaces.all()
    assert again.store.blends.contents.learned() == VARIANTS
    assert [(one.tag, one.is_open) for one in again.store.blends.gates.views()] == [("rag", True)]
    assert again.counters["unusable_histories"] == 0


def test_ages_go_on_while_no_server_runs(
    tmp_path: Path, clock: FakeClock, make_core: Callable[[], Core]
) -> None:
    old = make_core()
    taught(clock, old.catalog)
    assert saved_state_of(old, tmp_path).save()
    os.utime(tmp_path / FILE_NAME, (5_000, 5_000))
    for wall_s, older_s in ((5_060.0, 60.0), (4_000.0, 0.0)):
        new = make_core()
        saved_state_of(new, tmp_path, wall_s).load()
        ages = [one.catalog.save().chunks["age_s"].max() for one in (new, old)]
        assert ages[0] == pytest.approx(ages[1] + older_s)


@pytest.mark.parametrize(
    ("data", "is_kept"),
    [
        (b"", False),
        (OLDER.read_bytes(), False),
        (PATH.read_bytes()[:-1], True),
        (pack_sections({**sections(), "chunks": bytes(64)}), True),
    ],
    ids=["empty", "older", "without variants", "without history"],
)
def test_what_is_damaged_is_counted_and_the_rest_is_kept(
    tmp_path: Path, make_core: Callable[[], Core], data: bytes, is_kept: bool
) -> None:
    (tmp_path / FILE_NAME).write_bytes(data)
    known = unpack_models(sections()) if is_kept else []
    saved = saved_state_of(core := make_core(), tmp_path)
    saved.load()
    assert len(core.store.spaces.all()) == len(known)
    assert core.counters["unusable_histories"] == 1
    assert saved.save()
    saved_state_of(again := make_core(), tmp_path).load()
    assert again.store.spaces.all() == core.store.spaces.all()
    assert again.counters["unusable_histories"] == 0


def test_a_folder_that_cannot_be_written_to_costs_the_file_only(
    tmp_path: Path, make_core: Callable[[], Core]
) -> None:
    (tmp_path / f"{FILE_NAME}.new").mkdir()
    assert not saved_state_of(make_core(), tmp_path).save()


# --- over a restart


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(1 << 20, no_faults())


def test_time_to_live_and_priority_survive_with_the_chunk(
    disk: SimDisk, clock: FakeClock, tmp_path: Path
) -> None:
    versions = prompt(2)
    with closing(Core([disk], clock=clock)) as core:
        core.put(versions[:1], durable=True, hints=Hints(priority=9))
        core.put(versions[1:], durable=True, hints=Hints(ttl_ms=60_000))
        assert saved_state_of(core, tmp_path).save()
    clock.advance(50)
    with closing(Core([disk], clock=clock)) as core:
        saved_state_of(core, tmp_path).load()
        assert core.store.recover() == 2

        clock.advance(59)
        assert core.look_up(versions).ready == 2
        clock.advance(1)
        assert core.look_up(versions).ready == 1, "its sixty seconds are over"


def named(number: int) -> Named:
    key = ChunkKey(bytes(DIGEST_BYTES) + number.to_bytes(DIGEST_BYTES, "big"))
    return Named(key, ROOT, number.to_bytes(DIGEST_BYTES, "little"), 16, 0)


def test_what_is_learned_is_bounded_and_of_the_latest() -> None:
    index = make_content_index(MAX_LEARNED + 10)
    for number in range(1, MAX_LEARNED + 4):
        index.note(named(number))
        index.report(named(number).key, Measured(1.0, (), 0.0))
    found = index.learned()
    assert len(found) == MAX_LEARNED
    assert (found[0].key, found[-1].key) == (named(4).key, named(MAX_LEARNED + 3).key)
    index.forget(named(4).key)
    assert named(4).key not in {one.key for one in index.learned()}
