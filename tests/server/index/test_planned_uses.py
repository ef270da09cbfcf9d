"""Announced uses: what is kept for a batch, until when, and never more than the limit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing

from hypothesis import given
from hypothesis import strategies as st
from simulation.clock import FakeClock
from simulation.core import Core, keys_of, prompt
from simulation.universe import Version, make_version

from kvstore.proto.keys import tokens_le32
from kvstore.proto.types import ROOT, ChainDigest, ChunkKey
from kvstore.server.index.holds import MAX_ANNOUNCED, MAX_BATCHES, PlannedUses
from kvstore.server.security.sessions import Session
from kvstore.server.store.plans import plan_batch

MEMORY_CHUNKS = 12


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


def end(uses: PlannedUses, session_id: int) -> None:
    uses.drop(lambda batch: batch.session_id == session_id)


def expire(uses: PlannedUses, now: float) -> None:
    uses.drop(lambda batch: batch.until <= now)


# --- the table


def test_a_chunk_is_kept_until_its_last_use() -> None:
    uses = PlannedUses(1000)
    uses.announce(1, {key(1): 2}, 10.0)
    assert uses.keep(key(1), 100)
    uses.used([key(1)])
    assert key(1) in uses.kept
    uses.used([key(1)])
    assert key(1) not in uses.kept
    assert (uses.kept_bytes, bool(uses.batches)) == (0, False)


def test_what_is_over_the_limit_is_not_kept_and_what_nobody_needs_costs_nothing() -> None:
    uses = PlannedUses(150)
    uses.announce(1, {key(1): 1, key(2): 1}, 10.0)
    assert [uses.keep(key(n), 100) for n in (1, 2, 3)] == [True, False, True]
    assert [key(n) in uses.kept for n in (1, 2, 3)] == [True, False, False]
    assert uses.kept_bytes == 100


def test_an_announcement_ends_with_its_time_or_its_session() -> None:
    uses = PlannedUses(1000)
    uses.announce(1, {key(1): 1}, 10.0)
    uses.announce(2, {key(1): 1, key(2): 1}, 20.0)
    assert all(uses.keep(key(n), 10) for n in (1, 2))
    expire(uses, 10.0)
    assert key(1) in uses.kept
    end(uses, 2)
    assert not uses.batches
    assert uses.kept_bytes == 0


def test_uses_count_against_the_asker_s_own_announcement_first() -> None:
    uses = PlannedUses(1000)
    for session in (1, 2):
        uses.announce(session, {key(1): 1}, 10.0)
    uses.keep(key(1), 10)
    uses.used([key(1)], 2)
    end(uses, 1)
    assert key(1) not in uses.kept


def test_announcements_beyond_the_limit_are_cut() -> None:
    uses = PlannedUses(1 << 60)
    uses.announce(1, {key(n): 1 for n in range(MAX_ANNOUNCED + 5)}, 10.0)
    assert sum(uses.keep(key(n), 1) and key(n) in uses.kept for n in (0, MAX_ANNOUNCED + 1)) == 1


def test_so_many_announcements_stand_at_once_and_no_more() -> None:
    uses = PlannedUses(1 << 60)
    for number in range(MAX_BATCHES + 1):
        uses.announce(1, {key(number): 1}, 10.0)
    kept = [uses.keep(key(n), 1) and key(n) in uses.kept for n in (0, MAX_BATCHES - 1, MAX_BATCHES)]
    assert kept == [True, True, False]


@given(st.lists(st.tuples(st.sampled_from("audgex"), st.integers(0, 3), st.integers(0, 3))))
def test_bytes_are_those_of_the_chunks_kept(steps: list[tuple[str, int, int]]) -> None:
    uses = PlannedUses(25)
    for what, one, two in steps:
        if what == "a":
            uses.announce(one, {key(one): 1 + two, key(two): 1}, 10.0 + two)
        elif what == "u":
            uses.used([key(one), key(two)], two)
        elif what == "d":
            uses.gone(key(one))
        elif what == "g":
            uses.keep(key(one), 10)
        elif what == "e":
            end(uses, one)
        else:
            expire(uses, 9.0 + one)
        assert uses.kept_bytes == 10 * sum(key(n) in uses.kept for n in range(4)) <= 25
    expire(uses, 100.0)
    assert (uses.kept_bytes, bool(uses.batches)) == (0, False)


# --- through the store


def tree(groups: int, leaves: int, length: int = 4, shared: int = 2) -> list[list[Version]]:
    """Return prompts of *length* of which each group shares the first ones."""
    return [
        fork(group, group * leaves + leaf, length, shared)
        for group in range(groups)
        for leaf in range(leaves)
    ]


def fork(group: int, leaf: int, length: int, shared: int) -> list[Version]:
    parent, versions = ROOT, []
    for at in range(length):
        name = 1 + (1000 * group + at if at < shared else 100_000 + 1000 * leaf + at)
        versions.append(make_version("red", parent, tokens_le32([name] * 60), name))
        parent = ChainDigest(versions[-1].info.key[16:])
    return versions


def serve(core: Core, session: Session, versions: Sequence[Version]) -> int:
    """Serve one prompt as an engine does; return how many chunks were found."""
    match = core.store.lookup(session, keys_of(versions), core.later(), lease=True)
    core.put(session, versions[match.ready :])
    core.store.release(session, match.lease_id)
    return match.ready


def test_a_batch_in_order_finds_what_an_endless_cache_does() -> None:
    prompts = tree(groups=6, leaves=5)
    random.Random(7).shuffle(prompts)
    everything = sum(map(len, prompts))
    chunks = len({k for versions in prompts for k in keys_of(versions)})
    found = {}
    for is_planned in (False, True):
        with closing(Core(slabs=2, clock=FakeClock())) as core:  # six chunks
            session = core.open_session()
            order = list(range(len(prompts)))
            if is_planned:
                chains = [keys_of(versions) for versions in prompts]
                batch, kept = core.store.plan(session, chains, 60.0)
                order = list(batch.order)
                assert (kept, batch.peak_chunks) == (0, 4)
            found[is_planned] = sum(serve(core, session, prompts[at]) for at in order)
            assert not core.catalog.state.holds.uses.batches
    assert found[True] == everything - chunks
    assert found[False] < found[True]


def test_announced_chunks_stay_while_others_come() -> None:
    with closing(Core(clock=FakeClock())) as core:
        session, other = core.open_session(), core.open_session()
        versions = prompt(3)
        core.put(session, versions)
        batch, kept = core.store.plan(session, [keys_of(versions)] * 2, 60.0)
        assert (kept, set(batch.uses.values())) == (3, {2})
        for seed in range(5, 10):
            core.put(other, prompt(8, seed=seed))
        assert serve(core, session, versions) == 3
        core.put(other, prompt(8, seed=20))
        assert serve(core, session, versions) == 3
        for seed in range(30, 33):
            core.put(other, prompt(8, seed=seed))
        assert serve(core, session, versions) == 0, "nothing is kept past its last use"


def test_a_session_that_ends_and_time_that_passes_free_what_was_announced() -> None:
    for ending in ("session", "time"):
        clock = FakeClock()
        with closing(Core(clock=clock)) as core:
            session = core.open_session()
            versions = prompt(3)
            core.put(session, versions)
            core.store.plan(session, [keys_of(versions)], 60.0)
            if ending == "session":
                core.sessions.close(session.session_id)
            else:
                clock.advance(61)
                core.store.tick()
            assert not core.catalog.state.holds.uses.batches
            assert core.catalog.state.holds.uses.kept_bytes == 0


def test_a_plan_for_no_time_keeps_nothing() -> None:
    with closing(Core(clock=FakeClock())) as core:
        session = core.open_session()
        core.put(session, prompt(3))
        _, kept = core.store.plan(session, [keys_of(prompt(3))], 0.0)
        assert kept == 0
        assert not core.catalog.state.holds.uses.batches


def test_announcing_everything_leaves_room_for_others_and_is_counted() -> None:
    with closing(Core(clock=FakeClock(), pin_share=2)) as core:
        greedy, other = core.open_session(), core.open_session()
        versions = prompt(MEMORY_CHUNKS)
        core.store.plan(greedy, [keys_of(versions)] * 100, 60.0)
        core.put(greedy, versions)
        core.store.tick()
        assert core.counters["unkept_chunks"] > 0
        assert core.catalog.state.holds.uses.kept_bytes <= core.cpu.capacity_bytes // 2
        results = core.put(other, prompt(4, seed=3))
        assert {result.reason for result in results} == {""}


def test_a_chunk_that_is_deleted_is_kept_no_more() -> None:
    with closing(Core(clock=FakeClock())) as core:
        session = core.open_session()
        core.put(session, prompt(1))
        core.store.plan(session, [keys_of(prompt(1))] * 2, 60.0)
        core.catalog.forget("cpu", keys_of(prompt(1))[0])
        assert core.catalog.state.holds.uses.kept_bytes == 0
        assert plan_batch([keys_of(prompt(1))]).peak_chunks == 1
