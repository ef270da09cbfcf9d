"""The suite that every EvictionPolicy passes. Subclass PolicyContract and say how to make one."""

from __future__ import annotations

import random
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

import pytest
from contracts.chunks import make_info
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore.proto.types import ROOT, ChainDigest, ChunkInfo, ChunkKey
from kvstore.server.policy.base import EvictionPolicy

ALL = 1 << 60
"""More bytes, or chunks, than there are."""

_LAYOUT = make_info(1, 1).layout
_TREE = 14


def digest(number: int) -> ChainDigest:
    return ChainDigest((number + 1).to_bytes(16, "big"))


def key(number: int) -> ChunkKey:
    return ChunkKey(bytes(16) + digest(number))


def info(number: int, parent: int | None = None, size_bytes: int = 100) -> ChunkInfo:
    """Return a chunk of one namespace by its number and that of the chunk it continues."""
    above = ROOT if parent is None else digest(parent)
    return ChunkInfo(key(number), above, _LAYOUT, 0, size_bytes)


def tree_info(number: int) -> ChunkInfo:
    """Return a chunk of a tree in which each but the first two has a parent before it."""
    return info(number, None if number < 2 else (number - 2) // 2, 10 + 7 * number)


def keep_none(_: ChunkKey) -> bool:
    return False


def may_go(infos: dict[ChunkKey, ChunkInfo], kept: Collection[ChunkKey]) -> set[ChunkKey]:
    """Return what can be evicted at all: nothing that is kept or continued by what is."""
    blocked = set(kept) & set(infos)
    for chunk in list(blocked):
        above = infos[chunk].parent_key
        while above is not None and above in infos:
            blocked.add(above)
            above = infos[above].parent_key
    return set(infos) - blocked


def check_victims(
    policy: EvictionPolicy,
    infos: dict[ChunkKey, ChunkInfo],
    kept: Collection[ChunkKey],
    need_bytes: int,
    limit: int,
) -> list[ChunkKey]:
    """Ask for victims and hold the answer to every promise of the interface."""
    asked: list[ChunkKey] = []

    def keep(chunk: ChunkKey) -> bool:
        asked.append(chunk)
        return chunk in kept

    victims = policy.victims(need_bytes, keep, limit)
    assert policy.victims(need_bytes, keep, limit) == victims, "asking changed the answer"
    assert len(policy) == len(infos)
    assert set(asked) <= set(infos), "an unknown chunk was considered"
    assert len(set(victims)) == len(victims) <= limit
    assert set(victims) <= may_go(infos, kept)
    freed_bytes = [infos[victim].size_bytes for victim in victims]
    enough = sum(freed_bytes) >= need_bytes
    assert enough or len(victims) == limit or set(victims) == may_go(infos, kept)
    assert sum(freed_bytes[:-1]) < max(need_bytes, 1), "more was evicted than asked for"
    for at, victim in enumerate(victims):
        later = {infos[other].parent_key for other in victims[at:]}
        assert victim not in later, "a chunk was to go before what continues it"
    return victims


class PolicyMachine(RuleBasedStateMachine):
    """Insert, touch and remove in any order, parents before children or after."""

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.infos: dict[ChunkKey, ChunkInfo] = {}

    @rule(number=st.integers(0, _TREE - 1))
    def insert(self, number: int) -> None:
        chunk = tree_info(number)
        self.policy.insert(chunk)
        self.infos[chunk.key] = chunk

    @rule(numbers=st.lists(st.integers(0, _TREE - 1), max_size=4))
    def touch(self, numbers: list[int]) -> None:
        self.policy.touch([key(number) for number in numbers])

    @rule(number=st.integers(0, _TREE - 1))
    def remove(self, number: int) -> None:
        self.policy.remove(key(number))
        self.infos.pop(key(number), None)

    @rule(
        need_bytes=st.integers(0, 900),
        kept=st.sets(st.integers(0, _TREE - 1)),
        limit=st.integers(0, _TREE),
    )
    def ask(self, need_bytes: int, kept: set[int], limit: int) -> None:
        check_victims(self.policy, self.infos, [key(n) for n in kept], need_bytes, limit)

    @rule(need_bytes=st.integers(0, 900))
    def evict(self, need_bytes: int) -> None:
        for victim in check_victims(self.policy, self.infos, (), need_bytes, ALL):
            self.policy.remove(victim)
            del self.infos[victim]

    @invariant()
    def everything_can_go(self) -> None:
        assert set(self.policy.victims(ALL, keep_none, ALL)) == set(self.infos)


class PolicyContract(ABC):
    """What server/policy/base.py promises, sentence by sentence."""

    @abstractmethod
    def make_policy(self) -> EvictionPolicy:
        """Return a policy that knows nothing yet."""

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return self.make_policy()

    def test_new_policy_knows_nothing_and_names_nobody(self, policy: EvictionPolicy) -> None:
        assert len(policy) == 0
        assert policy.victims(1, keep_none, 10) == []

    def test_nothing_is_named_when_nothing_is_needed(self, policy: EvictionPolicy) -> None:
        policy.insert(info(1))
        assert policy.victims(0, keep_none, 10) == []
        assert policy.victims(-5, keep_none, 10) == []
        assert policy.victims(1, keep_none, 0) == []

    def test_unknown_chunks_are_touched_and_removed_without_a_trace(
        self, policy: EvictionPolicy
    ) -> None:
        policy.touch([key(7)])
        policy.remove(key(7))
        assert len(policy) == 0
        policy.insert(info(1))
        policy.touch([key(7), key(1), key(8)])
        assert policy.victims(1, keep_none, 10) == [key(1)]

    def test_a_chunk_inserted_twice_is_known_once(self, policy: EvictionPolicy) -> None:
        policy.insert(info(1))
        policy.insert(info(1))
        assert len(policy) == 1
        policy.remove(key(1))
        assert policy.victims(ALL, keep_none, ALL) == []

    def test_a_kept_chunk_keeps_all_it_continues_and_nothing_else(
        self, policy: EvictionPolicy
    ) -> None:
        infos = {tree_info(n).key: tree_info(n) for n in range(_TREE)}
        for chunk in infos.values():
            policy.insert(chunk)
        for number in range(_TREE):
            victims = check_victims(policy, infos, [key(number)], ALL, ALL)
            assert set(victims) == may_go(infos, [key(number)])

    def test_parents_that_come_late_still_go_after_what_continues_them(
        self, policy: EvictionPolicy
    ) -> None:
        for number in (2, 1, 0):
            policy.insert(info(number, number - 1 if number else None))
        assert policy.victims(ALL, keep_none, ALL) == [key(2), key(1), key(0)]

    def test_a_parent_that_left_first_leaves_children_that_can_go(
        self, policy: EvictionPolicy
    ) -> None:
        for number in range(3):
            policy.insert(info(number, number - 1 if number else None))
        policy.remove(key(1))
        assert set(policy.victims(ALL, keep_none, ALL)) == {key(0), key(2)}
        policy.insert(info(1, 0))
        victims = policy.victims(ALL, keep_none, ALL)
        assert victims == [key(2), key(1), key(0)]

    @pytest.mark.parametrize("length", [1, 2, 3, 5])
    @pytest.mark.parametrize("seed", range(4))
    def test_a_circle_of_parents_can_be_evicted_all_the_same(
        self, policy: EvictionPolicy, length: int, seed: int
    ) -> None:
        """Whoever puts chunks says what their parents are, and may lie."""
        numbers = list(range(length))
        random.Random(seed).shuffle(numbers)
        policy.insert(info(90, 0))
        for number in numbers:
            policy.insert(info(number, (number + 1) % length))
        known = {key(number) for number in (*numbers, 90)}
        assert set(policy.victims(ALL, keep_none, ALL)) == known
        for chunk in policy.victims(ALL, keep_none, ALL):
            policy.remove(chunk)
        assert len(policy) == 0
        assert policy.victims(ALL, keep_none, ALL) == []

    def test_a_circle_can_be_left_and_closed_again(self, policy: EvictionPolicy) -> None:
        for _ in range(3):
            for number in range(3):
                policy.insert(info(number, (number + 1) % 3))
            assert len(policy.victims(ALL, keep_none, ALL)) == 3
            for number in (1, 0, 2):
                policy.remove(key(number))
            assert len(policy) == 0

    def test_any_order_of_events_keeps_every_promise(self) -> None:
        run_state_machine_as_test(
            lambda: PolicyMachine(self.make_policy()),  # type: ignore[arg-type]
            settings=settings(max_examples=150, stateful_step_count=40, deadline=None),
        )

    def test_memory_does_not_grow_with_use(self, policy: EvictionPolicy) -> None:
        for number in range(100):
            policy.insert(info(number, number - 1 if number % 10 else None))
        chains = [[key(n) for n in range(start, start + 10)] for start in range(0, 100, 10)]
        grown = _growth(lambda: [policy.touch(chain) for chain in chains for _ in range(1_000)])
        assert grown < 64 << 10
        assert len(policy.victims(ALL, keep_none, ALL)) == 100

    def test_memory_is_given_back_with_the_chunks(self, policy: EvictionPolicy) -> None:
        def come_and_go() -> None:
            for number in range(10_000):
                policy.insert(info(number, number - 1 if number % 10 else None))
                policy.touch([key(number)])
                if number >= 50:
                    policy.remove(key(number - 50))

        come_and_go()
        for number in range(10_000):
            policy.remove(key(number))
        assert _growth(come_and_go) < 64 << 10


def _growth(work: Callable[[], object]) -> int:
    """Return how many more bytes are alive after *work*."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
