"""Placement in the server: what each admission writes, and what it costs when a tier is slow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from simulation.clock import FakeClock
from simulation.core import Core, frames_of, keys_of, prompt
from simulation.tiers import SimDisk, no_faults
from simulation.universe import Version

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import EngineTerms, PrefillModel
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.reuse_statistics import ReuseForecast
from kvstore.server.index.hints import ChunkMetadata
from kvstore.server.security.sessions import Session
from kvstore.server.store.reads import ReadTerms
from kvstore.server.tiering.placement import MAX_ENGINES

DISK_BYTES = 2 << 20
SLOW_ENGINE = PrefillModel(0.0, 1.0)
FAST_ENGINE = PrefillModel(0.0, 1e-12)


def make_core(
    rule: str,
    clock: FakeClock | None = None,
    *,
    exclusive: bool = False,
    disk: SimDisk | None = None,
) -> Core:
    history = AccessHistory()
    metadata = ChunkMetadata(history, forecast=ReuseForecast(history))
    return Core(
        [disk or SimDisk(DISK_BYTES, no_faults())],
        admissions={"disk": rule},
        exclusive=("disk",) if exclusive else (),
        metadata=metadata,
        clock=clock or FakeClock(),
    )


@pytest.fixture(params=["through", "evict", "selective", "auto"])
def core(request: pytest.FixtureRequest) -> Iterator[Core]:
    with closing(make_core(request.param)) as core:
        yield core


def look(core: Core, session: Session, versions: list[Version]) -> int:
    match = core.store.lookup(session, keys_of(versions), core.later(), lease=False)
    return match.ready


def on_disk(core: Core, versions: list[Version]) -> int:
    return sum("disk" in core.tiers_of(version) for version in versions)


def ask(core: Core, session: Session, versions: list[Version]) -> None:
    """Look a prompt up and put what is missing of it."""
    core.put(session, versions[look(core, session, versions) :])
    core.settle()


def test_each_rule_writes_at_its_moment() -> None:
    for rule, stored, asked, evicted in [
        ("through", 3, 3, 3),
        ("evict", 0, 0, 3),
        ("selective", 0, 3, 3),
        ("auto", 0, 0, 3),
    ]:
        with closing(make_core(rule)) as core:
            session = core.open_session()
            versions = prompt(3)
            ask(core, session, versions)
            assert on_disk(core, versions) == stored
            ask(core, session, versions)
            assert on_disk(core, versions) == asked
            core.put(session, prompt(12, seed=9))
            assert on_disk(core, versions) == evicted


def test_auto_learns_to_write_what_comes_again_and_not_what_does_not() -> None:
    clock = FakeClock()
    with closing(make_core("auto", clock)) as core:
        session = core.open_session()
        for at in range(150):  # whole prompts come twice, and a third time never
            clock.advance(10)
            versions = prompt(6, seed=at)
            ask(core, session, versions)
            clock.advance(1)
            ask(core, session, versions)
        written = core.counters["copied_chunks"]
        for at in range(150, 170):
            clock.advance(10)
            versions = prompt(6, seed=at)
            ask(core, session, versions)
            clock.advance(1)
            ask(core, session, versions)
        assert core.counters["copied_chunks"] - written < 20 * 6 / 4


def test_a_clean_victim_is_not_written_again() -> None:
    with closing(make_core("evict")) as core:
        session = core.open_session()
        versions = prompt(3)
        ask(core, session, versions)
        ask(core, session, prompt(12, seed=8))
        core.get(session, keys_of(versions))
        copied = core.counters["copied_chunks"]
        assert copied == 3 + 3, "the chunks, and what went for them to come up again"
        ask(core, session, prompt(12, seed=9))
        assert core.counters["copied_chunks"] == copied + 12 - 3
        assert [core.tiers_of(version) for version in versions] == [["disk"]] * 3


def test_nothing_is_written_where_a_load_takes_as_long_as_computing(core: Core) -> None:
    session = core.open_session()
    fast = EngineTerms(FAST_ENGINE)
    core.store.lookup(session, keys_of(prompt(1)), core.later(), lease=False, engine=fast)
    for seed in range(4):
        ask(core, session, prompt(6, seed=seed))
        ask(core, session, prompt(6, seed=seed))
    assert core.slot("disk").tier.stats().chunks == 0


def test_no_chunk_is_left_without_what_it_continues(core: Core) -> None:
    session = core.open_session()
    trunk = prompt(9)
    for turn in range(24):
        ask(core, session, trunk[: 1 + turn * 5 % 9])
        ask(core, session, prompt(4, seed=30 + turn % 3))
        here = set(keys_of([v for v in trunk if core.tiers_of(v)]))
        for parent, child in zip(keys_of(trunk), keys_of(trunk)[1:], strict=False):
            assert child not in here or parent in here


def test_an_exclusive_tier_gives_a_chunk_up_once_nobody_reads_it() -> None:
    with closing(make_core("evict", exclusive=True)) as core:
        session = core.open_session()
        versions = prompt(3)
        ask(core, session, versions)
        ask(core, session, prompt(12, seed=9))
        match = core.store.lookup(session, keys_of(versions), core.later(), lease=True)
        results = core.store.reads.get(keys_of(versions), ReadTerms(session, core.later()))
        assert [a.data.tobytes() for a in results] == frames_of(versions)
        core.store.tick()
        assert on_disk(core, versions) == 3, "it may be read where it is"
        core.store.release(session, match.lease_id)
        core.store.tick()
        core.settle()
        assert [core.tiers_of(version) for version in versions] == [["cpu"]] * 3
        assert core.counters["left_copies"] == 3
        ask(core, session, prompt(12, seed=8))
        assert on_disk(core, versions) == 3


def test_an_exclusive_tier_takes_no_durable_puts() -> None:
    with closing(make_core("evict", exclusive=True)) as core:
        assert core.store.durable is None
        with pytest.raises(InvalidRequestError, match="durable"):
            core.put(core.open_session(), prompt(1), durable=True)


def test_engines_beyond_a_limit_are_forgotten() -> None:
    with closing(make_core("auto")) as core:
        placement = core.moves.placement
        for number in range(MAX_ENGINES + 5):
            placement.note_engine(number.to_bytes(16, "big"), SLOW_ENGINE)  # type: ignore[arg-type]
        assert len(placement._engines) == MAX_ENGINES
