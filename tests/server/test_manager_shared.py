"""The manager over a tier that other nodes put into."""

from __future__ import annotations

from contextlib import closing

from simulation.clock import FakeClock
from simulation.core import Core, frames_of, keys_of, prompt
from simulation.tiers import SimRedis, no_faults

TIER_BYTES = 2 << 20


def test_a_lookup_finds_what_other_nodes_put() -> None:
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(4)
        core.put(session, versions[:1])
        for version in versions[1:3]:
            redis.others_put(version.info, version.frame)
        match = core.manager.lookup(session, keys_of(versions), core.later(), lease=True)
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
            match = core.manager.lookup(session, keys_of(versions), core.later(), lease=False)
            assert (match.ready, match.missing) == (1, 2)
        assert redis.faults.raised == 3, "then it is left alone"
        assert core.counters["unanswered_lookups"] == 3


def test_what_is_being_deleted_is_not_found_again_in_a_shared_tier() -> None:
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock())) as core:
        session = core.open_session()
        (version,) = prompt(1)
        redis.others_put(version.info, version.frame)
        core.manager.lookup(session, [version.info.key], core.later(), lease=False)
        core.manager.delete([version.info.key], core.clock())
        assert redis.stats().chunks == 1, "its time was up before the tier was asked"
        match = core.manager.lookup(session, [version.info.key], core.later(), lease=True)
        assert match.ready == 0


def test_a_delete_reaches_copies_in_a_shared_tier_that_this_node_never_saw() -> None:
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock())) as core:
        session = core.open_session()
        versions = prompt(3)
        for version in versions[::2]:
            redis.others_put(version.info, version.frame)
        assert core.manager.delete(keys_of(versions), core.later()) == (2, 0)
        assert redis.stats().chunks == 0
        assert core.manager.lookup(session, keys_of(versions), core.later(), lease=False).ready == 0
