"""Caches of recurrent states: the tree, eviction, ghosts; a replay."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
from bench.policy.state_cache import STATE_CLASSES, GhostLimits, StateCache, state_class
from bench.policy.state_tree import HYBRID_7B, CheckpointTree, HybridModel, Node, Tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule


def nodes(tree: CheckpointTree) -> Iterator[Node]:
    """Yield every node but the root."""
    left = list(tree.root.children)
    while left:
        node = left.pop()
        left.extend(node.children)
        yield node


def edge(node: Node) -> list[int]:
    """Return the tokens from the parent to *node*."""
    tokens: list[int] = np.frombuffer(node.edge, np.int32).tolist()
    return tokens


def recounted_bytes(tree: CheckpointTree) -> int:
    """Return the expected ``size_bytes``: states, and KV of edges above them."""
    model, kept = tree.model, {one for node in nodes(tree) if node.held for one in node.path_up()}
    tokens = sum(len(edge(node)) for node in kept)
    states = sum(node.held for node in nodes(tree))
    return model.state_bytes * states + model.kv_bytes_per_token * tokens


SMALL = HybridModel(1, 1, 8, 4)
STATE, KV = SMALL.state_bytes, SMALL.kv_bytes_per_token
Prefix = tuple[int, ...]


def ids(*values: int) -> Tokens:
    return np.array(values, np.int32)


def insert(tree: CheckpointTree, *values: int) -> tuple[Node, Node]:
    sequence = ids(*values)
    return tree.extend(tree.match(sequence), sequence)


def prefixes(sequence: Prefix) -> set[Prefix]:
    return {sequence[:end] for end in range(1, len(sequence) + 1)}


class TreeMachine(RuleBasedStateMachine):
    """The tree against a set of known positions and a set of those with states."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = CheckpointTree(SMALL)
        self.known: set[Prefix] = set()
        self.held: set[Prefix] = set()

    def node(self, at: Prefix) -> Node:
        path = self.tree.match(ids(*at)).path
        assert path[-1].depth == len(at)
        return path[-1]

    def children(self, at: Prefix) -> set[int]:
        return {one[len(at)] for one in self.known if one[: len(at)] == at and len(one) > len(at)}

    sequences = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)

    @rule(sequence=sequences)
    def insert(self, sequence: Prefix) -> None:
        leaves, end = insert(self.tree, *sequence)
        shared = prefixes(sequence) & {p for one in self.known for p in prefixes(one)}
        at = max(shared, key=len, default=())
        assert leaves.depth == len(at)
        assert end.depth == len(sequence)
        self.known |= {sequence, at} - {()}

    @precondition(lambda self: self.known - self.held)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(sorted(self.known - self.held)))
        self.tree.hold(self.node(at))
        self.held.add(at)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(sorted(self.held)))
        self.tree.drop(self.node(at))
        self.held.remove(at)

    @precondition(lambda self: self.known - self.held)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(sorted(self.known - self.held)))
        if len(self.children(at)) <= 1:
            self.tree.forget(self.node(at))
            self.known.remove(at)

    @rule(prompt=sequences)
    def match(self, prompt: Prefix) -> None:
        path = self.tree.match(ids(*prompt)).path
        assert [node.depth for node in path] == sorted(map(len, self.known & prefixes(prompt)))
        with_state = [node.depth for node in path if node.held]
        assert with_state == sorted(map(len, self.held & prefixes(prompt)))

    @invariant()
    def sizes_are_exact(self) -> None:
        kept = {p for one in self.held for p in prefixes(one)}
        everything = {p for one in self.known for p in prefixes(one)}
        assert self.tree.size_bytes == len(self.held) * STATE + len(kept) * KV
        assert (self.tree.kept_tokens, self.tree.tokens) == (len(kept), len(everything))
        assert (self.tree.nodes, len(self.tree.held)) == (len(self.known), len(self.held))
        assert recounted_bytes(self.tree) == self.tree.size_bytes

    @invariant()
    def nodes_say_what_each_state_is_worth(self) -> None:
        assert {node.depth for node in self.tree.held} == set(map(len, self.held))
        for at in self.held:
            node = self.node(at)
            above = max((len(one) for one in self.held & prefixes(at) - {at}), default=0)
            others = {p for one in self.held - {at} for p in prefixes(one)}
            assert node.marginal == len(at) - above
            assert node.alone == len(prefixes(at) - others)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_sizes_of_the_hybrid_model_are_the_published_ones() -> None:
    assert (HYBRID_7B.state_bytes, HYBRID_7B.kv_bytes_per_token) == (26_787_840, 65_536)


def words(text: str) -> Tokens:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def test_a_cold_cache_learns_which_class_is_requested_again() -> None:
    """Conversations with a second turn, among documents requested once."""
    capacity = 99 * STATE + 1000 * KV
    cache = StateCache(SMALL, capacity, GhostLimits(1000, 10**6), warm=False)
    talks = " ".join(f"{a}{a}>1 {a}{a}1>2 {a}{a}12>3" for a in "abcdefghijklmnopqrstuvwxyz" * 2)
    for at, request in enumerate((talks + " QQ>1 RR>1 RR1>2").split()):
        prompt, _, answer = request.partition(">")
        cache.request(words(prompt + answer), len(prompt), float(at))
    fresh, continued = (cache.tree.match(words(text)).path[-1] for text in ("QQ1", "RR12"))
    worth = cache.worth([fresh, continued], 160.0)
    assert state_class(fresh) != state_class(continued)
    assert worth[0] > worth[1]  # first turns are requested again, third ones are not


def known(tree: CheckpointTree, text: str) -> Node:
    return tree.extend(tree.match(words(text)), words(text))[1]


def test_classes_are_turns_of_ends_and_the_children_of_others() -> None:
    tree = CheckpointTree(SMALL)
    node = known(tree, "a")
    ends = []
    for turn in (0, 1, 2, 3, 5, 6, 60, 600):
        node.next_turn = turn + 1
        ends.append(state_class(node) // 3)
    known(tree, "ab")
    one_child = state_class(node)
    known(tree, "ac")
    node.hits = 7
    assert ends == [0, 1, 2, 3, 3, 4, 4, 4]
    assert one_child == 15
    assert state_class(node) == STATE_CLASSES - 1


PLENTY = 10**15


def test_a_document_is_found_by_the_ghosts_of_evicted_requests() -> None:
    capacity = 2 * STATE + 102 * KV
    requested = [ids(*range(100), 1000 + at, 7) for at in range(3)]
    other = ids(*range(5000, 5100), 1)
    found = {}
    for limits in (GhostLimits(99, 10**4), GhostLimits(0, 0)):
        cache = StateCache(SMALL, capacity, limits, warm=False)
        sequences = (requested[0], other, *requested[1:])
        found[limits.nodes] = [
            cache.request(one, len(one) - 1, 1e3 * at) for at, one in enumerate(sequences)
        ]
    assert found == {99: [0, 0, 0, 100], 0: [0, 0, 0, 0]}


def test_a_sequence_larger_than_the_capacity_is_refused_and_takes_nothing_with_it() -> None:
    cache = StateCache(SMALL, STATE * 3 + 50 * KV)
    cache.request(ids(1, 2, 3, 4), 3, 0.0)
    cache.request(ids(*[9] * 400, 8), 400, 1.0)
    assert cache.request(ids(1, 2, 3, 4, 5, 6), 5, 2.0) == 4


random_requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=8),
        st.lists(st.integers(0, 2), max_size=3),
        st.floats(0, 1e12),
    ),
    max_size=40,
).map(lambda found: sorted(found, key=lambda one: one[2]))
Request = tuple[list[int], list[int], float]


@settings(max_examples=100, deadline=None)
@given(requests=random_requests, capacity=st.integers(0, 12))
def test_sizes_stay_exact_and_below_the_capacity_whatever_comes(
    requests: list[Request], capacity: int
) -> None:
    cache = StateCache(SMALL, capacity * STATE // 2)
    for prompt, answer, now_s in requests:
        reused = cache.request(ids(*prompt, *answer), len(prompt), now_s)
        assert cache.tree.size_bytes == recounted_bytes(cache.tree) <= cache.capacity_bytes
        assert 0 <= reused <= len(prompt)


@settings(max_examples=60, deadline=None)
@given(requests=random_requests)
def test_without_evictions_every_hit_is_what_a_list_of_positions_says(
    requests: list[Request],
) -> None:
    cache = StateCache(SMALL, PLENTY)
    seen: list[Prefix] = []
    kept: set[Prefix] = set()
    for prompt, answer, now_s in requests:
        whole = (*prompt, *answer)
        starts = [one for one in kept if tuple(prompt[: len(one)]) == one]
        expected = max(map(len, starts), default=0)
        shared = max((common(whole, one) for one in seen), default=0)
        parts = any(common(whole, one) == shared < len(one) for one in seen)
        if shared < len(whole) and parts and shared > expected:
            kept.add(whole[:shared])
        seen.append(whole)
        if whole:
            kept.add(whole)
        assert cache.request(ids(*whole), len(prompt), now_s) == expected


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same


def test_the_least_recent_sequence_is_forgotten_first() -> None:
    cache = StateCache(SMALL, 0, GhostLimits(2, 1000))
    for at, token in enumerate((1, 2, 1, 3)):
        cache.request(ids(token, token), 2, float(at))
    assert [bool(cache.tree.match(ids(token)).into) for token in (1, 2, 3)] == [True, False, True]


def test_ghosts_stay_within_their_limits_and_the_table_is_updated() -> None:
    for limit in [1, 7, 50]:
        cache, rng = StateCache(SMALL, 3 * STATE, GhostLimits(limit, 4 * limit)), random.Random(1)
        for at in range(500):
            sequence = ids(*(rng.randrange(3) for _ in range(rng.randrange(1, 9))))
            cache.request(sequence, len(sequence), float(at))
            tree = cache.tree
            branches = sum(len(node.children) > 1 for node in nodes(tree) if not node.held)
            assert tree.nodes - len(tree.held) - branches <= limit
        table, waiting = cache.table, [node for node in nodes(tree) if node.last_s is not None]
        table.settle(500.0)
        ends, forgotten = table.counts(500.0, STATE_CLASSES)[1], table.ended(STATE_CLASSES)[1]
        assert ends.sum() - forgotten.sum() == len(waiting), "what was forgotten waits no more"
