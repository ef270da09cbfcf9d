"""The store over a tier that other nodes put into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

import pytest
from simulation.clock import FakeClock
from simulation.core import Core, frames_of, keys_of, prompt
from simulation.tiers import SimRedis, no_faults
from simulation.universe import Version

from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.types import ChunkInfo, ChunkKey, PutOutcome
from kvstore.server.cluster.refill import CHECK_S, MAX_COPIES
from kvstore.server.index import queries
from kvstore.server.index.holds import LeaseTerms
from kvstore.server.node import TICK_S
from kvstore.server.tiering.admission import WRITE_BACK

TIER_BYTES = 2 << 20
ALL = {"redis": "through"}


def test_a_lookup_finds_what_other_nodes_put() -> None:
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(4)
        core.put(session, versions[:1])
        for version in versions[1:3]:
            redis.others_put(version.info, version.frame)
        match = core.store.lookup(session, keys_of(versions), core.later(), lease=True)
        assert (match.ready, match.missing) == (3, 1)
        assert match.tiers == ("cpu", "redis", "redis")
        assert core.get(session, keys_of(versions)) == frames_of(versions[:3])


def test_a_shared_tier_that_does_not_answer_makes_no_lookup_fail() -> None:
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(3)
        core.put(session, versions[:1])
        redis.faults.fail = 1.0
        for _ in range(5):
            match = core.store.lookup(session, keys_of(versions), core.later(), lease=False)
            assert (match.ready, match.missing) == (1, 2)
        assert redis.faults.raised == 3, "then it is left alone"
        assert core.counters["unanswered_lookups"] == 3


def test_a_part_of_a_shared_tier_that_is_lost_does_not_set_the_tier_aside() -> None:
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock())) as core:
        slot = core.slot("redis")

        def fail(*, is_partial: bool) -> bool:
            raise TierUnavailableError("redis", "a master is down", is_partial=is_partial)

        for is_partial in (True, False):
            for _ in range(5):
                with pytest.raises(TierUnavailableError):
                    slot.guarded(partial(fail, is_partial=is_partial))
            assert slot.breaker.is_open is not is_partial


def test_what_is_being_deleted_is_not_found_again_in_a_shared_tier() -> None:
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock())) as core:
        session = core.open_session()
        (version,) = prompt(1)
        redis.others_put(version.info, version.frame)
        core.store.lookup(session, [version.info.key], core.later(), lease=False)
        core.store.delete([version.info.key], core.clock())
        assert redis.stats().chunks == 1, "its time was up before the tier was asked"
        match = core.store.lookup(session, [version.info.key], core.later(), lease=True)
        assert match.ready == 0


def test_a_delete_reaches_copies_in_a_shared_tier_that_this_node_never_saw() -> None:
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(3)
        for version in versions[::2]:
            redis.others_put(version.info, version.frame)
        assert core.store.delete(keys_of(versions), core.later()) == (2, 0)
        assert redis.stats().chunks == 0
        assert core.store.lookup(session, keys_of(versions), core.later(), lease=False).ready == 0


def test_what_a_shared_tier_held_at_the_start_makes_room_for_what_comes() -> None:
    versions = prompt(6)
    room_bytes = SimRedis(TIER_BYTES, no_faults()).allocated_bytes(versions[0].info.size_bytes)
    redis = SimRedis(3 * room_bytes, no_faults())
    for version in versions[:3]:
        redis.others_put(version.info, version.frame)
    with closing(Core([redis], clock=FakeClock(), write="through")) as core:
        core.store.recover()
        while core.work_queue.step():
            pass
        session = core.open_session()
        core.put(session, versions[3:])
        while core.work_queue.step():
            pass
        assert core.counters["copied_chunks"] == 3
        assert core.counters["failed_copies"] == 0
        assert redis.stats().used_bytes <= redis.capacity_bytes


def test_a_copy_that_a_tier_cannot_take_is_counted() -> None:
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock(), write="through")) as core:
        redis.faults.fail = 1.0
        core.put(core.open_session(), prompt(2))
        while core.work_queue.step():
            pass
        assert core.counters["failed_copies"] == 2


def test_a_lookup_leaves_out_what_only_a_tier_set_aside_holds() -> None:
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(2)
        core.put(session, versions[:1])
        redis.others_put(versions[1].info, versions[1].frame)
        keys = keys_of(versions)
        assert core.store.lookup(session, keys, core.later(), lease=False).ready == 2
        for _ in range(3):
            core.slot("redis").breaker.fail("frozen")
        assert core.store.lookup(session, keys, core.later(), lease=False).ready == 1


def test_a_chunk_that_goes_between_lookup_and_lease_leaves_no_lease_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(Core([SimRedis(TIER_BYTES, no_faults())], clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(1)
        core.put(session, versions)
        grant = core.catalog.grant

        def late(keys: list[ChunkKey], terms: LeaseTerms) -> object:
            core.store.delete(keys_of(versions), core.later())
            return grant(keys, terms)

        monkeypatch.setattr(core.catalog, "grant", late)
        match = core.store.lookup(session, keys_of(versions), core.later(), lease=True)
        assert (match.ready, match.lease_id, match.missing) == (0, 0, 1)
        assert len(core.catalog.leases) == 0


@contextmanager
def emptied(count: int) -> Iterator[tuple[Core, SimRedis, list[Version]]]:
    """A core whose chunks went to the shared tier too, which somebody emptied since."""
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock(), slabs=48, admissions=ALL)) as core:
        versions = prompt(count)
        core.put(core.open_session(), versions)
        core.settle()
        assert redis.stats().chunks == count
        for version in versions:
            redis.delete(version.info.key)
        yield core, redis, versions


def ticks(core: Core, seconds: float) -> None:
    for _ in range(round(seconds / TICK_S)):
        assert isinstance(core.clock, FakeClock)
        core.clock.advance(TICK_S)
        core.store.tick()
        core.settle()


def test_what_is_put_again_is_copied_again_to_a_shared_tier_that_lost_it() -> None:
    with emptied(4) as (core, redis, versions):
        results = core.put(core.open_session(), versions[:1])
        assert [result.outcome for result in results] == [PutOutcome.exists]
        ticks(core, TICK_S)
        assert redis.find(keys_of(versions[:1])) != [None]


def test_a_shared_tier_that_was_emptied_is_filled_again_though_nobody_puts() -> None:
    with emptied(40) as (core, redis, versions):
        ticks(core, CHECK_S)
        some = redis.stats().chunks
        assert 0 < some <= MAX_COPIES, "others' copies go ahead"
        ticks(core, 40 / MAX_COPIES * TICK_S + TICK_S)
        assert None not in redis.find(keys_of(versions))
        copied = core.counters["copied_chunks"]
        ticks(core, 10 * CHECK_S)
        assert core.counters["copied_chunks"] == copied == 80


def test_a_shared_tier_that_is_full_is_left_alone_between_attempts_to_fill_it_again() -> None:
    with emptied(8) as (core, redis, versions):
        redis.capacity_bytes = redis.max_frame_bytes = 0
        ticks(core, CHECK_S + 2 * TICK_S)
        failed = core.counters["failed_copies"]
        assert failed == 1
        ticks(core, CHECK_S - 3 * TICK_S)
        assert core.counters["failed_copies"] == failed
        redis.capacity_bytes = redis.max_frame_bytes = TIER_BYTES
        ticks(core, CHECK_S)
        assert None not in redis.find(keys_of(versions))


def finds_of(redis: SimRedis, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys each question from now on is for."""
    find, asked = redis.find, []

    def counted(keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        asked.append(len(keys))
        return find(keys)

    monkeypatch.setattr(redis, "find", counted)
    return asked


def test_what_admission_keeps_out_of_a_shared_tier_is_not_taken_for_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock(), slabs=48, admissions={"redis": "evict"})) as core:
        session = core.open_session()
        there, kept_out = prompt(2), prompt(4, seed=1)
        core.put(session, [*there, *kept_out])
        for version in there:
            core.copy_down(version, "redis")
        core.moves.placement.set_terms(WRITE_BACK, {"redis": 1})
        asked = finds_of(redis, monkeypatch)
        minutes = 2
        for _ in range(round(60 * minutes / TICK_S)):
            core.put(session, kept_out)
            ticks(core, TICK_S)
        assert len(asked) == 60 * minutes / CHECK_S
        assert set(asked) == {len(there)}
        assert redis.stats().chunks == len(there)


def test_a_chunk_kept_out_by_a_spent_budget_is_not_counted_each_time_it_is_put_again() -> None:
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock(), slabs=48, admissions=ALL)) as core:
        session, versions = core.open_session(), prompt(8)
        core.moves.placement.set_terms(WRITE_BACK, {"redis": 24})
        core.put(session, versions)
        core.settle()
        assert (redis.stats().chunks, core.counters["over_budget_copies"]) == (1, 7)
        for _ in range(5):
            core.put(session, versions)
            ticks(core, CHECK_S)
        assert (redis.stats().chunks, core.counters["over_budget_copies"]) == (1, 7)


def test_what_was_to_be_asked_for_while_a_shared_tier_fails_over_is_asked_for_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queries, "HELD_ROWS", 2)  # the last is not walked by soon
    with emptied(5) as (core, redis, versions):
        for version in versions[1:4]:
            redis.others_put(version.info, version.frame)
        core.put(core.open_session(), versions[4:])
        redis.faults.fail = 1.0
        ticks(core, CHECK_S)
        assert redis.faults.raised == 1, "it is left alone for a while"
        ticks(core, CHECK_S)
        assert redis.faults.raised == 2, "the first was asked for, too"
        redis.faults.end()
        ticks(core, 3 * TICK_S)
        assert None not in redis.find(keys_of(versions))


def test_what_was_missing_when_a_shared_tier_failed_over_is_copied_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with emptied(4) as (core, redis, versions):
        find = redis.find

        def then_fail(keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
            found = find(keys)
            redis.faults.fail = 1.0
            return found

        with monkeypatch.context() as patched:
            patched.setattr(redis, "find", then_fail)
            ticks(core, CHECK_S)
        assert core.counters["failed_copies"] == 1
        ticks(core, 3 * CHECK_S)
        assert redis.stats().chunks == 0
        redis.faults.end()
        ticks(core, 2 * CHECK_S)
        assert None not in redis.find(keys_of(versions))
        assert core.counters["lost_chunks"] == 4


def test_what_only_a_shared_tier_has_is_not_asked_for_and_stays_known() -> None:
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock())) as core:
        session, (version,) = core.open_session(), prompt(1)
        redis.others_put(version.info, version.frame)
        core.store.lookup(session, [version.info.key], core.later(), lease=False)
        redis.delete(version.info.key)
        ticks(core, 3 * CHECK_S)
        assert core.tiers_of(version) == ["redis"]
