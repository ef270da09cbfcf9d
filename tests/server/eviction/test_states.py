"""Caches of recurrent states: the tree, whom each rank gives up, what is remembered; a replay."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from bench.policy.hybrid import HYBRID_POLICIES, StateRequest, make_states, play
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.states.cache import (
    NO_GHOSTS,
    GhostLimits,
    Ghosts,
    MakeRank,
    StateCache,
)
from kvstore.server.eviction.states.ranks import (
    STATE_CLASSES,
    HitDensityRank,
    LeafLruRank,
    LruRank,
    MarconiRank,
    state_class,
)
from kvstore.server.eviction.states.tree import HYBRID_7B, CheckpointTree, HybridModel, Node, Tokens


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


def spelt(node: Node) -> list[int]:
    """Return all tokens up to *node*."""
    return [token for one in reversed(list(node.path_up())) for token in edge(one)]


def recounted_bytes(tree: CheckpointTree) -> int:
    """Return what ``size_bytes`` has to be: states, and KV of edges above any of them."""
    model, kept = tree.model, {one for node in nodes(tree) if node.held for one in node.path_up()}
    tokens = sum(len(edge(node)) for node in kept)
    states = sum(node.held for node in nodes(tree))
    return model.state_bytes * states + model.kv_bytes_per_token * tokens


SMALL = HybridModel("small", 1, 1, 1, 8, 4)
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
    """The tree beside a set of known positions and a set of those with states."""

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
        assert (self.tree.nodes, self.tree.resident) == (len(self.known), len(self.held))
        assert recounted_bytes(self.tree) == self.tree.size_bytes

    @invariant()
    def nodes_say_what_each_state_is_worth(self) -> None:
        assert {node.depth for node in self.tree.held()} == set(map(len, self.held))
        for at in self.held:
            node = self.node(at)
            above = max((len(one) for one in self.held & prefixes(at) - {at}), default=0)
            others = {p for one in self.held - {at} for p in prefixes(one)}
            below = [one for one in self.held if at in prefixes(one) - {one}]
            assert node.marginal == len(at) - above
            assert node.alone == len(prefixes(at) - others)
            assert node.branches == len({one[len(at)] for one in below})


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_flops_are_the_sum_over_layers_of_the_published_formulas() -> None:
    count, wide, states = 1000, 4096, 128
    attention = 8 * count * wide**2 + 4 * count**2 * wide
    mlp = 16 * count * wide**2
    mamba = 12 * count * wide**2 + 16 * count * wide * states + 10 * count * wide
    assert HYBRID_7B.flops(count) == 4 * attention + 28 * mlp + 24 * mamba
    assert HYBRID_7B.flops(0) == 0
    assert (HYBRID_7B.state_bytes, HYBRID_7B.kv_bytes_per_token) == (26_787_840, 65_536)


def words(text: str) -> Tokens:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def serve(make_rank: MakeRank, requests: str) -> StateCache:
    """Serve prompts like ``ab>c`` (the answer behind the sign), one a second."""
    capacity = 99 * SMALL.state_bytes + 1000 * SMALL.kv_bytes_per_token
    cache = StateCache(SMALL, capacity, GhostLimits(1000, 10**6), make_rank)
    for at, request in enumerate(requests.split()):
        prompt, _, answer = request.partition(">")
        cache.request(words(prompt + answer), len(prompt), float(at))
    return cache


def victims(cache: StateCache, now_s: float) -> list[str]:
    """Everything the rank gives up, in its order."""
    order = []
    while (node := cache.rank.victim(None, now_s)) is not None:
        order.append("".join(map(chr, spelt(node))))
        cache.tree.drop(node)
    return order


def test_ranks_by_recency_evict_in_this_order() -> None:
    for make_rank, requests, order in [
        (LruRank, "ax>1 by>1 cz>1", ["ax1", "by1", "cz1"]),
        # The state that was started from is younger than that of the second.
        (LruRank, "ax>1 by>1 ax1>2", ["by1", "ax1", "ax12"]),
        # A state between two others (one child) may go first; for SGLang+ only leaves may.
        (LruRank, "ax>1 ax1>2 by>1", ["ax1", "ax12", "by1"]),
        (LeafLruRank, "ax>1 ax1>2 by>1", ["ax12", "ax1", "by1"]),
        # Where two resident sequences part is no candidate until one of them went.
        (LruRank, "abx>1 aby>1 cc>c", ["abx1", "ab", "aby1", "ccc"]),
        # Started from, "ab" is younger than both; for SGLang+ it is one leaf more at last.
        (LruRank, "abx>1 aby>1 abz>1", ["abx1", "aby1", "ab", "abz1"]),
        (LeafLruRank, "abx>1 aby>1 abz>1", ["abx1", "aby1", "abz1", "ab"]),
        (MarconiRank, "ax>1 by>1 ax1>2", ["by1", "ax1", "ax12"]),
    ]:
        assert victims(serve(make_rank, requests), 100.0) == order


def cold(tree: CheckpointTree) -> HitDensityRank:
    return HitDensityRank(tree, warm=False)


def test_hit_density_learns_which_class_is_asked_for_again() -> None:
    """Conversations whose second turn comes, among documents that nobody asks for twice."""
    talks = " ".join(f"{a}{a}>1 {a}{a}1>2 {a}{a}12>3" for a in "abcdefghijklmnopqrstuvwxyz" * 2)
    cache = serve(cold, talks + " QQ>1 RR>1 RR1>2")
    fresh, continued = cache.tree.match(words("QQ1")).path[-1], cache.tree.match(words("RR12"))
    scores = cache.rank.scores([fresh, continued.path[-1]], 160.0)
    assert state_class(fresh) != state_class(continued.path[-1])
    assert scores[0] > scores[1]  # first turns are asked for again, third ones are not


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
Request = tuple[list[int], list[int], float]


def trace(requests: list[Request]) -> list[StateRequest]:
    return [
        StateRequest(np.array([*prompt, *answer], np.int32), len(prompt), ts_s)
        for prompt, answer, ts_s in requests
    ]


def documents(count: int) -> list[Request]:
    """One document of 100 tokens, asked about with questions that differ from the first token."""
    return [([*range(100), 1000 + at], [7], float(at)) for at in range(count)]


def test_a_document_is_found_by_what_is_remembered_of_requests_that_went() -> None:
    one, ghosts = SMALL.state_bytes + 102 * SMALL.kv_bytes_per_token, GhostLimits(99, 10**4)
    other: Request = ([5000 + at for at in range(100)], [1], 0.5)
    reused = {}
    for name, limits in (("with", ghosts), ("without", NO_GHOSTS)):
        cache = StateCache(SMALL, one + SMALL.state_bytes, limits, LruRank)
        requests = [documents(3)[0], other, *documents(3)[1:]]
        reused[name] = [cache.request(r.tokens, r.prompt_tokens, 0.0) for r in trace(requests)]
    assert reused["with"] == [0, 0, 0, 100]
    assert reused["without"] == [0, 0, 0, 0]


def test_a_sequence_larger_than_the_capacity_is_refused_and_takes_nothing_with_it() -> None:
    for policy in HYBRID_POLICIES:
        small: Request = ([1, 2, 3], [4], 0.0)
        capacity = SMALL.state_bytes * 3 + 50 * SMALL.kv_bytes_per_token
        states = make_states(policy, SMALL, capacity)
        play(trace([small, ([9] * 400, [8], 1.0)]), states)
        assert states.refused == 1
        assert states.request(np.array([1, 2, 3, 4, 5, 6], np.int32), 5, 2.0) == 4


def test_what_no_cache_can_serve_is_refused_by_name() -> None:
    states = make_states("lru", SMALL, PLENTY)
    with pytest.raises(InvalidRequestError, match="prompt_tokens=4"):
        states.request(np.zeros(3, np.int32), 4, 0.0)
    with pytest.raises(InvalidRequestError, match="now_s=inf"):
        states.request(np.zeros(3, np.int32), 3, float("inf"))
    with pytest.raises(InvalidRequestError, match=r"policy='learned'.*lru, sglang.*hit_density"):
        make_states("learned", SMALL, 1)
    with pytest.raises(InvalidRequestError, match="capacity_bytes=-1"):
        make_states("lru", SMALL, -1)


random_requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=8),
        st.lists(st.integers(0, 2), max_size=3),
        st.floats(-1e12, 1e12),
    ),
    max_size=40,
)


@pytest.mark.parametrize("policy", HYBRID_POLICIES)
@settings(max_examples=40, deadline=None)
@given(requests=random_requests, room=st.integers(0, 12))
def test_sizes_stay_exact_and_below_the_capacity_whatever_comes(
    policy: str, requests: list[Request], room: int
) -> None:
    capacity = room * SMALL.state_bytes // 2
    states = make_states(policy, SMALL, capacity)
    for one in trace(requests):
        reused = states.request(*one)
        tree = states.tree
        assert tree.size_bytes == recounted_bytes(tree) <= capacity
        assert 0 <= reused <= one.prompt_tokens


@settings(max_examples=60, deadline=None)
@given(requests=random_requests)
def test_without_evictions_every_policy_hits_what_a_list_of_positions_says(
    requests: list[Request],
) -> None:
    states = {policy: make_states(policy, SMALL, PLENTY) for policy in HYBRID_POLICIES}
    seen: list[tuple[int, ...]] = []
    kept: set[tuple[int, ...]] = set()
    for prompt, answer, ts_s in requests:
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
        (one,) = trace([(prompt, answer, ts_s)])
        for policy, cache in states.items():
            assert cache.request(one.tokens, len(prompt), ts_s) == expected, policy


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same


class Remembered:
    """A tree with ghosts, and what was forgotten of it."""

    def __init__(self, nodes: int, tokens: int = 1000) -> None:
        self.tree = CheckpointTree(SMALL)
        self.ghosts = Ghosts(self.tree, GhostLimits(nodes, tokens))
        self.forgotten: list[Node] = []

    def see(self, *values: int) -> Node:
        sequence: Tokens = np.array(values, np.int32)
        match = self.tree.match(sequence)
        leaves, end = self.tree.extend(match, sequence)
        self.tree.tick += 1
        self.ghosts.touch([*match.path, leaves, end])
        return end

    def trim(self) -> None:
        self.ghosts.trim(self.forgotten.append)

    def knows(self, *values: int) -> bool:
        path = self.tree.match(np.array(values, np.int32)).path
        return bool(path) and path[-1].depth == len(values)


def test_the_sequence_that_was_seen_longest_ago_is_forgotten_first() -> None:
    one = Remembered(nodes=2)
    for sequence in ((1, 1), (2, 2), (1, 1), (3, 3)):
        one.see(*sequence)
    one.trim()
    assert not one.knows(2, 2)
    assert one.knows(1, 1)
    assert one.knows(3, 3)
    assert len(one.forgotten) == 1


def test_limits_hold_whatever_comes() -> None:
    for limit in [1, 7, 50]:
        one = Remembered(limit, tokens=4 * limit)
        rng = np.random.default_rng(limit)
        for _ in range(500):
            one.see(*rng.integers(0, 3, rng.integers(1, 9)).tolist())
            one.trim()
            branches = sum(len(node.children) > 1 for node in nodes(one.tree))
            assert one.tree.nodes - branches <= limit
            assert len(one.ghosts._queue) <= one.tree.nodes
        assert one.forgotten
