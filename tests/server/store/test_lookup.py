"""Lookups over tiers that other nodes use: what is asked, and what is not asked again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from contracts.policy import key
from simulation.clock import FakeClock
from simulation.core import Core, frames_of, keys_of, prompt
from simulation.tiers import SimRedis, no_faults
from typing_extensions import override

from kvstore.proto.types import (
    DIGEST_BYTES,
    ChunkInfo,
    ChunkKey,
    Component,
    DType,
    KVLayout,
    LayerKind,
    Match,
    Namespace,
)
from kvstore.server.index.chunk_index import ResumeRequirements
from kvstore.server.security.sessions import Session
from kvstore.server.store.lookup import MAX_NEGATIVE_KEYS, NEGATIVE_TTL_S

TIER_BYTES = 2 << 20
VERSIONS = prompt(4)
KEYS = keys_of(VERSIONS)


class AskedRedis(SimRedis):
    """Remembers which keys it was asked for."""

    def __init__(self) -> None:
        super().__init__(TIER_BYTES, no_faults())
        self.asked: list[list[ChunkKey]] = []

    @override
    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        self.asked.append(list(keys))
        return super().find(keys)


@pytest.fixture
def redis() -> AskedRedis:
    return AskedRedis()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def core(redis: AskedRedis, clock: FakeClock) -> Iterator[Core]:
    with closing(Core([redis], clock=clock)) as core:
        yield core


def look_up(
    core: Core, session: Session, keys: Sequence[ChunkKey] = KEYS, *, lease: bool = False
) -> Match:
    return core.store.lookup(session, keys, core.later(), lease=lease)


def test_what_a_shared_tier_just_did_not_have_is_not_asked_for_again(
    core: Core, session: Session, redis: AskedRedis, clock: FakeClock
) -> None:
    for _ in range(3):
        assert look_up(core, session).missing == 4
    assert redis.asked == [KEYS]
    assert core.counters["spared_questions"] == 2
    clock.advance(NEGATIVE_TTL_S)
    look_up(core, session)
    assert redis.asked == [KEYS, KEYS]


def test_what_another_node_puts_is_found_a_moment_after_it_was_missed(
    core: Core, session: Session, redis: AskedRedis, clock: FakeClock
) -> None:
    assert look_up(core, session).ready == 0
    for version in VERSIONS:
        redis.others_put(version.info, version.frame)
    clock.advance(NEGATIVE_TTL_S)
    match = look_up(core, session, lease=True)
    assert (match.ready, match.tiers) == (4, ("redis",) * 4)
    assert core.get(session, KEYS) == frames_of(VERSIONS)


def test_what_this_node_puts_is_ready_at_once(
    core: Core, session: Session, redis: AskedRedis
) -> None:
    assert look_up(core, session).ready == 0
    core.put(session, VERSIONS[:2])
    assert look_up(core, session).ready == 2
    assert redis.asked == [KEYS, KEYS[2:]], "the chain is now missing at another chunk"


def test_a_chain_that_goes_on_in_a_shared_tier_is_asked_for_once(
    core: Core, session: Session, redis: AskedRedis
) -> None:
    for version in VERSIONS[:2]:
        redis.others_put(version.info, version.frame)
    assert [look_up(core, session).ready for _ in range(3)] == [2, 2, 2]
    assert redis.asked == [KEYS], "the answer to the first question was the end of the chain too"


def test_a_state_that_another_node_put_takes_the_place_of_a_chunk_without(
    core: Core, session: Session, redis: AskedRedis
) -> None:
    catalog, info = core.store.catalog, VERSIONS[0].info
    catalog.needs_ends(Namespace(info.key[:DIGEST_BYTES]), ResumeRequirements(state=True))
    state = Component(LayerKind.state, DType.uint8, 1, 1, 40, 1, info.layout.tokens)
    richer = replace(info, layout=KVLayout((*info.layout.components, state)), size_bytes=900)
    redis.others_put(richer, np.zeros(900, np.uint8))
    core.put(session, VERSIONS[:1])
    assert catalog.copies(KEYS[0])["cpu"].layout == info.layout
    match = look_up(core, session)
    assert (match.ready, match.tiers, match.shared) == (1, ("redis",), 1)
    assert catalog.copies(KEYS[0])["redis"].layout == richer.layout
    assert redis.find(KEYS[:1]) == [richer]


@pytest.mark.parametrize(("there", "asked"), [(0, [16]), (15, [16]), (16, [16, 4]), (20, [16, 4])])
def test_a_long_chain_is_asked_for_in_two_steps(
    core: Core, session: Session, redis: AskedRedis, there: int, asked: list[int]
) -> None:
    versions = prompt(20)
    for version in versions[:there]:
        redis.others_put(version.info, version.frame)
    for _ in range(2):
        assert look_up(core, session, keys_of(versions)).ready == there
        assert list(map(len, redis.asked)) == asked
    assert core.counters["spared_questions"] == (there < 20)


def test_a_tier_that_did_not_answer_is_asked_again(
    core: Core, session: Session, redis: AskedRedis
) -> None:
    redis.faults.fail = 1.0
    assert look_up(core, session).ready == 0
    redis.faults.fail = 0.0
    redis.others_put(VERSIONS[0].info, VERSIONS[0].frame)
    assert look_up(core, session).ready == 1
    assert core.counters["unanswered_lookups"] == 1
    assert core.counters["spared_questions"] == 0


def test_a_deletion_asks_whatever_was_missed_before(
    core: Core, session: Session, redis: AskedRedis
) -> None:
    assert look_up(core, session).ready == 0
    for version in VERSIONS:
        redis.others_put(version.info, version.frame)
    assert core.store.delete(KEYS, core.later()) == (4, 0)


def test_the_lease_of_a_lookup_begins_when_the_shared_tier_has_answered(
    core: Core, session: Session, redis: AskedRedis, clock: FakeClock
) -> None:
    core.put(session, VERSIONS[:1])
    find = redis.find

    def slowly(keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        clock.advance(5.0)
        return find(keys)

    redis.find = slowly  # type: ignore[method-assign]
    match = look_up(core, session, lease=True)
    assert match.ready == 1
    lease = core.catalog.leases.get(match.lease_id, session.session_id, core.clock())
    assert lease.deadline == clock.now + match.lease_ttl_ms / 1000


def test_slower_holders_are_said_to_take_longer(core: Core, session: Session) -> None:
    core.put(session, VERSIONS[:1])
    core.catalog.note_sealed("redis", VERSIONS[1].info)
    match = look_up(core, session)
    assert match.tiers == ("cpu", "redis")
    assert match.load_us[0] < match.load_us[1]
    assert match.sources == bytes([0, 1])


def test_no_more_absent_chunks_are_remembered_than_the_limit_and_the_oldest_go(
    core: Core, session: Session, redis: AskedRedis
) -> None:
    keys = [key(number) for number in range(MAX_NEGATIVE_KEYS + 2)]
    for one in [*keys, keys[-1], keys[2], keys[1]]:
        look_up(core, session, [one])
    assert redis.asked == [[one] for one in [*keys, keys[1]]]
