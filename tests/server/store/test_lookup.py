"""Tiers that other nodes use: what lookups ask them, and what they lost is copied again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
from contracts.policy import key
from simulation.clock import FakeClock
from simulation.core import BREAKER_RETRY_S, Core, keys_of, prompt
from simulation.tiers import SimRedis, no_faults
from simulation.universe import Version

from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.types import (
    DIGEST_BYTES,
    ChunkInfo,
    ChunkKey,
    Component,
    DType,
    KVLayout,
    LayerKind,
    Namespace,
)
from kvstore.server.cluster.refill import CHECK_S, MAX_COPIES
from kvstore.server.index.chunk_index import ResumeRequirements
from kvstore.server.index.holds import LeaseTerms
from kvstore.server.node import TICK_S
from kvstore.server.store.lookup import MAX_NEGATIVE_KEYS, NEGATIVE_TTL_S
from kvstore.server.tiering.admission import WRITE_BACK

TIER_BYTES = 2 << 20
VERSIONS = prompt(4)
KEYS = keys_of(VERSIONS)


@pytest.fixture
def redis(monkeypatch: pytest.MonkeyPatch) -> SimRedis:
    redis = SimRedis(TIER_BYTES, no_faults())
    monkeypatch.setattr(redis, "find", Mock(wraps=redis.find))
    return redis


def asked_of(redis: SimRedis) -> list[list[ChunkKey]]:
    """The keys of each question."""
    return [list(call.args[0]) for call in redis.find.call_args_list]  # type: ignore[attr-defined]


@pytest.fixture
def core(redis: SimRedis, clock: FakeClock) -> Iterator[Core]:
    with closing(Core([redis], clock=clock)) as core:
        yield core


def test_what_a_shared_tier_just_did_not_have_is_not_asked_for_again(
    core: Core, redis: SimRedis, clock: FakeClock
) -> None:
    for _ in range(3):
        assert core.look_up(VERSIONS).missing == 4
    assert asked_of(redis) == [KEYS]
    assert core.counters["spared_questions"] == 2
    clock.advance(NEGATIVE_TTL_S)
    core.look_up(VERSIONS)
    assert asked_of(redis) == [KEYS, KEYS]


def test_a_state_that_another_node_put_takes_the_place_of_a_chunk_without(
    core: Core, redis: SimRedis
) -> None:
    catalog, info = core.store.catalog, VERSIONS[0].info
    catalog.needs_ends(Namespace(info.key[:DIGEST_BYTES]), ResumeRequirements(state=True))
    state = Component(LayerKind.state, DType.uint8, 1, 1, 40, 1, info.layout.tokens)
    richer = replace(info, layout=KVLayout((*info.layout.components, state)), size_bytes=900)
    redis.others_put(richer, np.zeros(900, np.uint8))
    core.put(VERSIONS[:1])
    assert catalog.copies(KEYS[0])["cpu"].layout == info.layout
    match = core.look_up(VERSIONS)
    assert (match.ready, match.tiers, match.shared) == (1, ("redis",), 1)
    assert catalog.copies(KEYS[0])["redis"].layout == richer.layout
    assert redis.find(KEYS[:1]) == [richer]


@pytest.mark.parametrize(("there", "asked"), [(15, [16]), (16, [16, 4]), (20, [16, 4])])
def test_a_long_chain_is_asked_for_in_two_steps_and_its_end_once(
    core: Core, redis: SimRedis, there: int, asked: list[int]
) -> None:
    versions = prompt(20)
    for version in versions[:there]:
        redis.others_put(version.info, version.frame)
    for _ in range(2):
        assert core.look_up(versions).ready == there
        assert list(map(len, asked_of(redis))) == asked
    assert core.counters["spared_questions"] == (there < 20)


def test_no_more_absent_chunks_are_remembered_than_the_limit_and_the_oldest_go(
    core: Core, redis: SimRedis
) -> None:
    keys = [key(number) for number in range(MAX_NEGATIVE_KEYS + 2)]
    for one in [*keys, keys[-1], keys[2], keys[1]]:
        core.store.lookup(core.session, [one], core.later(), lease=False)
    assert asked_of(redis) == [[one] for one in [*keys, keys[1]]]


def test_what_this_node_puts_is_ready_at_once_and_a_deletion_asks_whatever_was_missed(
    core: Core, redis: SimRedis
) -> None:
    assert core.look_up(VERSIONS).ready == 0
    core.put(VERSIONS[:2])
    assert core.look_up(VERSIONS).ready == 2
    assert asked_of(redis) == [KEYS, KEYS[2:]], "the chain is now missing at another chunk"
    for version in VERSIONS[2:]:
        redis.others_put(version.info, version.frame)
    assert core.store.delete(KEYS, core.later()) == (4, 0)
    assert redis.stats().chunks == 0


def test_a_shared_tier_that_does_not_answer_makes_no_lookup_fail_and_is_asked_again(
    core: Core, redis: SimRedis, clock: FakeClock
) -> None:
    core.put(VERSIONS[:1])
    redis.faults.fail = 1.0
    for _ in range(5):
        match = core.look_up(VERSIONS)
        assert (match.ready, match.missing) == (1, 3)
    assert redis.faults.raised == 3, "then it is left alone"
    assert core.counters["unanswered_lookups"] == 3
    assert core.counters["spared_questions"] == 0
    redis.faults.end()
    redis.others_put(VERSIONS[1].info, VERSIONS[1].frame)
    clock.advance(BREAKER_RETRY_S)
    assert core.look_up(VERSIONS).ready == 2
    for _ in range(3):
        core.slot("redis").breaker.fail("frozen")
    assert core.look_up(VERSIONS).ready == 1, "what it alone holds is left out"


def test_a_chunk_that_goes_between_lookup_and_lease_leaves_no_lease_behind(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.put(VERSIONS[:1])
    grant = core.catalog.grant

    def late(keys: list[ChunkKey], terms: LeaseTerms) -> object:
        core.store.delete(KEYS[:1], core.later())
        return grant(keys, terms)

    monkeypatch.setattr(core.catalog, "grant", late)
    match = core.look_up(VERSIONS[:1], lease=True)
    assert (match.ready, match.lease_id, match.missing) == (0, 0, 1)
    assert len(core.catalog.leases) == 0


# --- what a shared tier lost is copied to it again, within bounds


ALL = {"redis": "through"}


def test_a_part_of_a_shared_tier_that_is_lost_does_not_set_the_tier_aside(core: Core) -> None:
    slot = core.slot("redis")

    def fail(*, is_partial: bool) -> bool:
        raise TierUnavailableError("redis", "a master is down", is_partial=is_partial)

    for is_partial in (True, False):
        for _ in range(5):
            with pytest.raises(TierUnavailableError):
                slot.guarded(partial(fail, is_partial=is_partial))
        assert slot.breaker.is_open is not is_partial


@contextmanager
def emptied(count: int) -> Iterator[tuple[Core, SimRedis, list[Version]]]:
    """A core whose chunks went to the shared tier too, which somebody emptied since."""
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock(), slabs=48, admissions=ALL)) as core:
        versions = prompt(count)
        core.put(versions)
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


def test_a_chunk_kept_out_by_a_spent_budget_is_not_counted_each_time_it_is_put_again() -> None:
    redis = SimRedis(TIER_BYTES, no_faults())
    with closing(Core([redis], clock=FakeClock(), slabs=48, admissions=ALL)) as core:
        versions = prompt(8)
        core.moves.placement.set_terms(WRITE_BACK, {"redis": 24})
        core.put(versions)
        core.settle()
        assert (redis.stats().chunks, core.counters["over_budget_copies"]) == (1, 7)
        for _ in range(5):
            core.put(versions)
            ticks(core, CHECK_S)
        assert (redis.stats().chunks, core.counters["over_budget_copies"]) == (1, 7)


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
