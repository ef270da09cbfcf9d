"""What policies learned, over a restart: the file, who writes it, and what a damaged one does."""

from __future__ import annotations

import os
import struct
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ServerMaker
from contracts.policy import info, key
from golden.history_samples import PATH, saved
from hypothesis import given
from hypothesis import strategies as st
from local_server import LocalServer
from prompts import store
from simulation.clock import FakeClock
from simulation.core import Core, prompt
from simulation.core import keys_of as names_of
from simulation.tiers import SimDisk, no_faults

from kvstore.proto.buffers import as_bytes, checksum
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.plans import Hints
from kvstore.proto.types import Fidelity
from kvstore.server.eviction.registry import make_policy
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.hints import ChunkMetadata, PutInfo
from kvstore.server.index.holds import Leases
from kvstore.server.index.saved_history import (
    CHUNK,
    FILE_NAME,
    MAX_CHUNKS,
    HistoryState,
    SavedHistory,
    read_history,
    write_history,
)
from kvstore.server.store.saved_state import SAVE_EVERY_S, HistoryKeeper
from kvstore.server.telemetry.metrics import Counters

CHAIN = [key(number) for number in range(8)]


def make_catalog(clock: FakeClock, evicted_limit: int = 100) -> Catalog:
    metadata = ChunkMetadata(evicted_limit=evicted_limit)
    policy = make_policy("hit_density", metadata.history)
    return Catalog({"cpu": policy}, Leases(9, lambda: 1), 1_000, clock, metadata)


def taught(clock: FakeClock) -> Catalog:
    """Return a catalog that was asked for a chain at three times, and has half of it left."""
    catalog = make_catalog(clock)
    origin = PutInfo("acme", Hints(category="batch"))
    for number in range(8):
        flops = replace(info(number, number - 1 if number else None), prefill_flops=1e9 * number)
        catalog.note_sealed("cpu", flops, origin)
    for at in range(3):
        clock.advance(10 + at)
        catalog.match(CHAIN[: 8 - at], Fidelity.exact, ["cpu"])
    for number in range(7, 3, -1):
        catalog.forget("cpu", key(number))
    clock.advance(5)
    return catalog


def same(one: SavedHistory, other: SavedHistory) -> bool:
    return (list(one.groups), one.state.groups) == (list(other.groups), other.state.groups) and all(
        np.array_equal(getattr(one.state, name), getattr(other.state, name))
        for name in ("classes", "chunks")
    )


# --- bytes


def test_a_file_is_read_as_it_was_written() -> None:
    assert same(SavedHistory.unpack(saved().pack()), saved())


def test_the_golden_file_is_read_and_written_as_ever() -> None:
    data = PATH.read_bytes()
    assert same(SavedHistory.unpack(data), saved())
    assert saved().pack() == data


@pytest.mark.parametrize("at", range(0, PATH.stat().st_size, 37))
def test_a_file_with_a_byte_changed_is_refused(at: int) -> None:
    data = bytearray(PATH.read_bytes())
    data[at] ^= 0x40
    with pytest.raises(InvalidFrameError):
        SavedHistory.unpack(bytes(data))


@given(st.binary(max_size=400), st.integers(0, 1_283))
def test_whatever_the_bytes_are_they_are_refused_by_name(noise: bytes, cut: int) -> None:
    for data in (noise, PATH.read_bytes()[:cut], sealed(noise), sealed(PATH.read_bytes()[:cut])):
        with pytest.raises(InvalidFrameError):
            SavedHistory.unpack(data)


def sealed(body: bytes) -> bytes:
    """Return *body* with the checksum that it would have."""
    return body + struct.pack("<Q", checksum(as_bytes(body)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("age_s", -1.0),
        ("age_s", np.nan),
        ("flops", np.inf),
        ("left_s", -0.5),
        ("own", 60),
        ("hits", 0),
    ],
)
def test_numbers_that_nobody_counted_are_refused(name: str, value: float) -> None:
    spoilt = saved()
    spoilt.state.chunks[name][2] = value
    with pytest.raises(InvalidFrameError):
        SavedHistory.unpack(spoilt.pack())


def test_a_version_from_the_future_is_refused() -> None:
    body = bytearray(PATH.read_bytes()[:-8])
    body[4] += 2
    with pytest.raises(InvalidFrameError, match="not this version"):
        SavedHistory.unpack(sealed(bytes(body)))


def test_of_more_chunks_than_fit_those_that_left_longest_ago_are_not_kept() -> None:
    chunks = np.zeros(MAX_CHUNKS + 3, CHUNK)
    chunks["hits"] = 1
    chunks["age_s"] = np.arange(len(chunks))
    one = saved()
    many = SavedHistory((), HistoryState((), one.state.classes, chunks))
    kept = SavedHistory.unpack(many.pack()).state.chunks
    assert (len(kept), kept["age_s"][0]) == (MAX_CHUNKS, 3.0)


# --- over a restart


def test_a_new_run_remembers_chunks_classes_and_ages() -> None:
    clock = FakeClock()
    old = taught(clock)
    data = old.save().pack()
    later = FakeClock(77.0)
    new = make_catalog(later)
    assert new.restore(SavedHistory.unpack(data)) == 8
    assert (new.evicted_count(), len(new)) == (8, 0)
    again, was = new.save(), old.save()
    by_key = [np.sort(one.state.chunks, order="key") for one in (again, was)]
    for name in ("key", "flops", "hits", "turns", "own", "chunks"):
        assert np.array_equal(by_key[0][name], by_key[1][name]), name
    assert np.allclose(by_key[0]["age_s"], by_key[1]["age_s"])
    counted = [one.state.classes["asked"].sum() for one in (again, was)]
    assert counted[0] == counted[1] > 0
    assert list(again.groups) == [("acme", "batch")]


def test_a_chunk_that_comes_back_is_known_for_what_it_was() -> None:
    clock = FakeClock()
    data = taught(clock).save()
    new = make_catalog(FakeClock(1.0))
    new.restore(data)
    new.note_sealed("cpu", info(0))
    assert new.match(CHAIN, Fidelity.exact, ["cpu"]).evicted == 7
    new.drain(0)
    history, row = new.state.metadata.history, new.state.index.row(key(0))
    assert history.hits_of(row) == 5
    assert new.evicted_count() == 7


def test_no_more_ghosts_come_back_than_there_may_be() -> None:
    new = make_catalog(FakeClock(), evicted_limit=5)
    assert new.restore(taught(FakeClock()).save()) == 5
    assert new.evicted_count() == 5


# --- the keeper


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def make_keeper(
    catalog: Catalog, folder: Path, clock: FakeClock, wall_s: float = 0.0
) -> tuple[HistoryKeeper, Counters]:
    counters = Counters()
    wall = FakeClock(wall_s)
    return HistoryKeeper(catalog, folder, counters, clock, wall), counters


def test_the_file_is_written_when_it_is_due(tmp_path: Path, clock: FakeClock) -> None:
    keeper, _ = make_keeper(taught(clock), tmp_path, clock)
    assert not keeper.save_if_due()
    clock.advance(SAVE_EVERY_S)
    assert keeper.save_if_due()
    assert not keeper.save_if_due()
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_ages_go_on_while_no_server_runs(tmp_path: Path, clock: FakeClock) -> None:
    old = taught(clock)
    make_keeper(old, tmp_path, clock)[0].save()
    os.utime(tmp_path / FILE_NAME, (5_000, 5_000))
    for wall_s, older_s in ((5_060.0, 60.0), (4_000.0, 0.0)):
        new = make_catalog(clock)
        assert make_keeper(new, tmp_path, clock, wall_s)[0].load() == 8
        ages = [one.save().state.chunks["age_s"].max() for one in (new, old)]
        assert ages[0] == pytest.approx(ages[1] + older_s)


@pytest.mark.parametrize("data", [b"", b"KVHS", PATH.read_bytes()[:-1], bytes(500)])
def test_a_damaged_file_is_counted_and_the_server_begins_anew(
    tmp_path: Path, clock: FakeClock, data: bytes
) -> None:
    (tmp_path / FILE_NAME).write_bytes(data)
    catalog = make_catalog(clock)
    keeper, counters = make_keeper(catalog, tmp_path, clock)
    assert (keeper.load(), catalog.evicted_count()) == (0, 0)
    assert counters["unusable_histories"] == 1
    assert keeper.save()
    assert read_history(tmp_path) is not None


def test_without_a_file_there_is_nothing_to_count(tmp_path: Path, clock: FakeClock) -> None:
    keeper, counters = make_keeper(make_catalog(clock), tmp_path, clock)
    assert (keeper.load(), counters["unusable_histories"]) == (0, 0)


def test_a_folder_that_cannot_be_written_to_costs_the_file_only(
    tmp_path: Path, clock: FakeClock
) -> None:
    (tmp_path / "history.kvh.new").mkdir()
    assert not make_keeper(taught(clock), tmp_path, clock)[0].save()


# --- hints over a restart


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(1 << 20, no_faults())


def test_time_to_live_and_priority_survive_with_the_chunk(
    disk: SimDisk, clock: FakeClock, tmp_path: Path
) -> None:
    versions = prompt(2)
    with closing(Core([disk], clock=clock)) as core:
        session = core.open_session()
        core.put(session, versions[:1], durable=True, hints=Hints(priority=9))
        core.put(session, versions[1:], durable=True, hints=Hints(ttl_ms=60_000))
        write_history(tmp_path, core.catalog.save())
    clock.advance(50)
    found = read_history(tmp_path)
    assert found is not None
    with closing(Core([disk], clock=clock)) as core:
        core.catalog.restore(found)
        assert core.store.recover() == 2
        session = core.open_session()

        def ready() -> int:
            keys = names_of(versions)
            return core.store.lookup(session, keys, core.later(), lease=False).ready

        clock.advance(59)
        assert ready() == 2
        clock.advance(1)
        assert ready() == 1, "it had sixty seconds left, and they are over"


def test_a_server_that_is_stopped_begins_with_what_it_knew(make_server: ServerMaker) -> None:
    first: LocalServer = make_server()
    client = first.connect("grpc")
    keys = store(client, 1, 4)
    assert client.lookup(keys).ready == 4
    folder = first.config.disk.path
    first.stop()
    kept = read_history(folder)
    assert kept is not None
    assert len(kept.state.chunks) == 4
    assert (kept.state.chunks["hits"] == 2).all()
