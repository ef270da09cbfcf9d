"""The suite that every EvictionPolicy passes. Subclass PolicyContract and say how to make one."""

from __future__ import annotations

import random
import tracemalloc
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice, product

import numpy as np
import pytest
from contracts.chunks import make_info
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore.proto.key_table import NO_ROW
from kvstore.proto.types import ROOT, ChainDigest, ChunkInfo, ChunkKey, KVLayout
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.policy import EvictionPolicy, Rows

ALL = 1 << 60
"""More bytes, or chunks, than there are."""

Tree = dict[int, int]
"""The parent's row of each known row."""

NODE_BYTES = 200
"""What a policy, with all that is remembered for it, may take for a chunk."""

TABLE_BYTES = 8 << 20
"""What it may take besides."""

_LAYOUT = make_info(1, 1).layout
_TREE = 14
_SIZES = (1, 100, 4096, 1 << 34)
_TIMES = (0.0, -5.0, 3.0, 3.25, 1e3, 1e9, -1e9)
"""A clock that stands, and jumps both ways."""
_HINTS = (0, 1, 2)
_ROOM = 60


def digest(number: int) -> ChainDigest:
    return ChainDigest((number + 1).to_bytes(16, "big"))


def key(number: int) -> ChunkKey:
    return ChunkKey(bytes(16) + digest(number))


def info(
    number: int, parent: int | None = None, size_bytes: int = 100, layout: KVLayout = _LAYOUT
) -> ChunkInfo:
    """Return a chunk of one namespace by its number and that of the chunk it continues."""
    above = ROOT if parent is None else digest(parent)
    return ChunkInfo(key(number), above, layout, 0, size_bytes)


def row(number: int) -> int:
    """Return the row that stands for a chunk by its number; row 0 stands for none."""
    return number + 1


def above(number: int) -> int:
    """Return the row of the parent of a chunk of the tree."""
    return NO_ROW if number < 2 else row((number - 2) // 2)


def rows(numbers: Collection[int]) -> Rows:
    return np.array([row(number) for number in numbers], np.intp)


def keep_none(_: int) -> bool:
    return False


def everyone(policy: EvictionPolicy) -> list[int]:
    return list(policy.victims(keep_none, 0.0))


def tell(history: AccessHistory, number: int, now_s: float, flops: float) -> None:
    """Let the history know that a chunk of the tree is stored."""
    facts = InsertInfo(tokens_full=number % 3 > 0, flops=flops, group=number % 2, reuse=0)
    history.seen_chain(np.array([row(number)]), above(number), facts, now_s)


def may_go(tree: Tree, kept: Collection[int]) -> set[int]:
    """Return what can be evicted at all: nothing that is kept or continued by what is."""
    blocked = set(kept) & set(tree)
    for chunk in list(blocked):
        parent = tree[chunk]
        while parent in tree:
            blocked.add(parent)
            parent = tree[parent]
    return set(tree) - blocked


def check_victims(
    policy: EvictionPolicy, tree: Tree, kept: Collection[int], limit: int, now_s: float = 0.0
) -> list[int]:
    """Ask for victims and hold the answer to every promise of the interface."""
    asked: list[int] = []

    def keep(chunk: int) -> bool:
        asked.append(chunk)
        return chunk in kept

    victims = list(islice(policy.victims(keep, now_s), limit))
    assert list(islice(policy.victims(keep, now_s), limit)) == victims, "asking changed the answer"
    assert len(policy) == len(tree)
    assert set(asked) <= set(tree), "an unknown chunk was considered"
    assert len(set(victims)) == len(victims)
    assert set(victims) <= may_go(tree, kept)
    assert len(victims) == limit or set(victims) == may_go(tree, kept)
    for at, victim in enumerate(victims):
        later = {tree[other] for other in victims[at:]}
        assert victim not in later, "a chunk was to go before what continues it"
    return victims


class PolicyMachine(RuleBasedStateMachine):
    """Insert, touch and remove in any order, parents before children or after.

    The history is told of what the policy is told of, first, as the catalog does it.
    """

    def __init__(self, policy: EvictionPolicy, history: AccessHistory) -> None:
        super().__init__()
        self.policy = policy
        self.history = history
        self.now_s = 0.0
        self.tree: Tree = {}

    @rule(now_s=st.sampled_from(_TIMES))
    def jump(self, now_s: float) -> None:
        self.now_s = now_s

    @rule(
        number=st.integers(0, _TREE - 1),
        size_bytes=st.sampled_from(_SIZES),
        flops=st.sampled_from([0.0, 1.0, 1e12]),
    )
    def insert(self, number: int, size_bytes: int, flops: float) -> None:
        tell(self.history, number, self.now_s, flops)
        self.policy.insert(row(number), above(number), size_bytes, self.now_s)
        self.tree[row(number)] = above(number)

    @rule(numbers=st.lists(st.integers(0, _TREE - 1), max_size=4))
    def touch(self, numbers: list[int]) -> None:
        self.history.requested(rows(numbers), len(numbers) + 1, self.now_s)
        self.policy.touch(rows(numbers), self.now_s)

    @rule(numbers=st.lists(st.integers(0, _TREE - 1), max_size=4), reuse=st.sampled_from(_HINTS))
    def hint(self, numbers: list[int], reuse: int) -> None:
        self.history.hint(rows(numbers), reuse)

    @rule(number=st.integers(0, _TREE - 1))
    def remove(self, number: int) -> None:
        self.policy.remove(row(number))
        self.tree.pop(row(number), None)

    @rule(kept=st.sets(st.integers(0, _TREE - 1)), limit=st.integers(0, _TREE))
    def ask(self, kept: set[int], limit: int) -> None:
        check_victims(self.policy, self.tree, [row(n) for n in kept], limit, self.now_s)

    @rule(limit=st.integers(0, _TREE))
    def evict(self, limit: int) -> None:
        for victim in check_victims(self.policy, self.tree, (), limit, self.now_s):
            self.policy.remove(victim)
            del self.tree[victim]

    @invariant()
    def everything_can_go(self) -> None:
        assert set(everyone(self.policy)) == set(self.tree)


def evicted_by(
    policy: EvictionPolicy, history: AccessHistory, seed: int, hints: Sequence[int]
) -> list[int]:
    """Return whom 400 requests evict, when there is room for 60 chunks, then all that are left.

    *hints* are those of reuse that are drawn from.
    """
    draw = random.Random(seed)
    here: dict[int, None] = {}
    evicted: list[int] = []
    for now_s in range(400):
        start = 1 + draw.randrange(40) * 16
        chain = list(range(start, start + draw.randrange(17)))
        known = next((at for at, one in enumerate(chain) if one not in here), len(chain))
        found = np.array(chain[:known], np.intp)
        history.requested(found, len(chain), now_s)
        policy.touch(found, now_s)
        history.hint(found, draw.choice(hints))
        for at in range(known, len(chain)):
            while len(here) >= _ROOM:
                victim = next(policy.victims(chain.__contains__, now_s))
                policy.remove(victim)
                del here[victim]
                evicted.append(victim)
            parent = chain[at - 1] if at else NO_ROW
            facts = InsertInfo(flops=1e9 * at, reuse=draw.choice(hints))
            history.seen_chain(np.array([chain[at]]), parent, facts, now_s)
            policy.insert(chain[at], parent, 100, now_s)
            here[chain[at]] = None
    everything = list(policy.victims(keep_none, 400.0))
    assert sorted(everything) == sorted(here)
    return evicted + everything


def fuzz(policy: EvictionPolicy, history: AccessHistory, seed: int, events: int) -> None:
    """Let anything happen to 300 rows with any parents, and compare who is here with a set."""
    draw = random.Random(seed)
    here: set[int] = set()
    now_s = 0.0
    for event in range(events):
        now_s += draw.choice([0.0, 0.1, 1.0, 60.0, -1.0, 1e6, -1e6])
        chunk, parent = draw.randrange(1, 300), draw.randrange(300)
        chain = np.array([draw.randrange(1, 300) for _ in range(draw.randrange(6))], np.intp)
        match draw.randrange(8):
            case 0 | 1:
                facts = InsertInfo(flops=draw.choice([0.0, 1e9, 1e12]), reuse=draw.randrange(3))
                history.seen_chain(np.array([chunk]), parent, facts, now_s)
                policy.insert(chunk, parent, draw.choice(_SIZES), now_s)
                here.add(chunk)
            case 2:
                history.seen_chain(chain, parent, InsertInfo(flops=1e9 * event), now_s)
                policy.insert_chain(chain, parent, draw.choice(_SIZES), now_s)
                here.update(chain.tolist())
            case 3 | 4:
                history.requested(chain, len(chain) + draw.randrange(3), now_s)
                policy.touch(chain, now_s)
            case 5:
                history.hint(chain, draw.randrange(3))
            case 6:
                policy.remove(chunk)
                here.discard(chunk)
                if draw.random() < 0.5:
                    history.forget_all(np.array([chunk]))
            case 7:
                kept = {draw.randrange(1, 300) for _ in range(draw.randrange(20))}
                gone = list(islice(policy.victims(kept.__contains__, now_s), draw.randrange(12)))
                assert here.issuperset(gone)
                assert kept.isdisjoint(gone)
                deque(map(policy.remove, gone), maxlen=0)
                here.difference_update(gone)
        assert len(policy) == len(here)
        if event % 500 == 0:
            assert sorted(policy.victims(keep_none, now_s)) == sorted(here)
    assert sorted(policy.victims(keep_none, now_s)) == sorted(here)


class PolicyContract(ABC):
    """What server/eviction/policy.py promises, sentence by sentence."""

    @abstractmethod
    def make_policy(self) -> EvictionPolicy:
        """Return a policy that knows nothing yet."""

    def make_pair(self) -> tuple[EvictionPolicy, AccessHistory]:
        """Return a policy and the history it looks at, if it looks at one."""
        return self.make_policy(), AccessHistory()

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return self.make_policy()

    def test_a_circle_of_parents_can_be_evicted_all_the_same(self) -> None:
        """Whoever puts chunks says what their parents are, and may lie."""
        for length, seed in product((1, 2, 3, 5), range(4)):
            policy, numbers = self.make_policy(), list(range(length))
            random.Random(seed).shuffle(numbers)
            if seed % 2:
                policy.insert(row(90), row(0), 100, 0.0)
            for number in numbers:
                policy.insert(row(number), row((number + 1) % length), 100, 0.0)
            policy.insert(row(90), row(0), 100, 0.0)
            assert set(everyone(policy)) == {row(number) for number in (*numbers, 90)}
            for chunk in everyone(policy):
                policy.remove(chunk)
            assert len(policy) == 0
            assert everyone(policy) == []

    def test_any_order_of_events_keeps_every_promise(self) -> None:
        run_state_machine_as_test(
            lambda: PolicyMachine(*self.make_pair()),  # type: ignore[arg-type]
            settings=settings(max_examples=60, stateful_step_count=40, deadline=None),
        )

    def test_memory_does_not_grow_with_use(self, policy: EvictionPolicy) -> None:
        for chunk in range(1, 101):
            policy.insert(chunk, chunk - 1 if chunk % 10 != 1 else NO_ROW, 100, 0.0)

        def use() -> None:
            for start in range(1, 101, 10):
                for _ in range(1_000):
                    policy.touch(np.arange(start, start + 10), 0.0)

        use()  # what is recorded has a limit, which is reached here
        assert _growth(use) < 64 << 10
        assert len(everyone(policy)) == 100

    def test_memory_is_given_back_with_the_chunks(self, policy: EvictionPolicy) -> None:
        def come_and_go() -> None:
            for chunk in range(1, 10_001):
                policy.insert(chunk, chunk - 1 if chunk % 10 != 1 else NO_ROW, 100, 0.0)
                policy.touch(np.array([chunk]), 0.0)
                if chunk > 50:
                    policy.remove(chunk - 50)

        come_and_go()
        for chunk in range(1, 10_001):
            policy.remove(chunk)
        assert _growth(come_and_go) < 64 << 10

    def test_a_chain_inserted_at_once_is_the_same_as_one_by_one(self) -> None:
        for seed in range(8):
            self.check_chains(random.Random(seed))

    def check_chains(self, draw: random.Random) -> None:
        (one, first), (other, second) = self.make_pair(), self.make_pair()
        for now_s in range(40):
            numbers = draw.sample(range(_TREE * 3), draw.randrange(6))
            if draw.random() < 0.5:
                for policy in (one, other):
                    policy.touch(rows(numbers), now_s)
                continue
            # As a request brings them: what is known is touched, and the rest continues it.
            parent, size_bytes = draw.choice([NO_ROW, row(99), row(3)]), draw.choice(_SIZES)
            for number in numbers:
                tell(first, number, now_s, 1e9 * number)
                tell(second, number, now_s, 1e9 * number)
            one.insert_chain(rows(numbers), parent, size_bytes, now_s)
            for number in numbers:
                other.insert(row(number), parent, size_bytes, now_s)
                parent = row(number)
            victims = list(one.victims(keep_none, now_s))
            assert victims == list(other.victims(keep_none, now_s))
            for victim in victims[: draw.randrange(4)]:
                one.remove(victim)
                other.remove(victim)

    def test_the_same_events_lead_to_the_same_victims_and_no_hint_keeps_anything(self) -> None:
        for hints in (_HINTS, *((reuse,) for reuse in _HINTS)):
            first, second = (evicted_by(*self.make_pair(), 7, hints) for _ in range(2))
            assert first == second
            assert len(first) > 500

    def test_after_many_events_it_knows_who_a_set_knows(self) -> None:
        fuzz(*self.make_pair(), seed=1, events=3_000)

    def test_a_chunk_takes_no_more_than_its_bytes(self) -> None:
        policy, history = self.make_pair()

        def fill(first: int, last: int) -> None:
            for start in range(first, last, 40):
                chain = np.arange(start, start + 40)
                history.seen_chain(chain, NO_ROW, InsertInfo(flops=1e9 * start), start)
                policy.insert_chain(chain, NO_ROW, 100, start)
                history.requested(chain, 40, start + 1.0)
                policy.touch(chain, start + 1.0)
            list(islice(policy.victims(keep_none, 0.0), 1_000))

        # What is taken once, for tables, comes with the first chunks.
        assert _growth(lambda: fill(1, 2_000)) < TABLE_BYTES
        assert _growth(lambda: fill(2_001, 22_000)) < NODE_BYTES * 20_000


def _growth(work: Callable[[], object]) -> int:
    """Return how many more bytes are alive after *work*."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
