"""Caches of recurrent states: the tree, whom each rank gives up, what is remembered; a replay."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from bench.policy.hybrid import HYBRID_POLICIES, StateRequest, make_states, play
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.states.cache import (
    NO_GHOSTS,
    GhostLimits,
    MakeRank,
    StateCache,
)
from kvstore.server.eviction.states.ranks import (
    LeafLruRank,
    LruRank,
)
from kvstore.server.eviction.states.tree import CheckpointTree, HybridModel, Node, Tokens


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


SMALL = HybridModel("small", 1, 1, 8, 4)


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
    ]:
        assert victims(serve(make_rank, requests), 100.0) == order


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


def remembering(limits: GhostLimits) -> StateCache:
    """A cache without room for a state, so that all it knows is of requests that went."""
    return StateCache(SMALL, 0, limits, LruRank)


def test_the_sequence_that_was_seen_longest_ago_is_forgotten_first() -> None:
    cache = remembering(GhostLimits(2, 1000))
    for word in ("aa", "bb", "aa", "cc"):
        cache.request(words(word), 2, 0.0)
    known = [spelt(node) for node in nodes(cache.tree)]
    assert sorted(known) == [[ord("a")] * 2, [ord("c")] * 2]


@pytest.mark.parametrize("limit", [1, 7, 50])
def test_no_more_is_remembered_than_the_limits(limit: int) -> None:
    cache, draw = remembering(GhostLimits(limit, 4 * limit)), np.random.default_rng(limit)
    most = 0
    for _ in range(500):
        cache.request(draw.integers(0, 3, draw.integers(1, 9)).astype(np.int32), 0, 0.0)
        branches = sum(len(node.children) > 1 for node in nodes(cache.tree))
        most = max(most, cache.tree.nodes - branches)
    assert 0 < most <= limit
