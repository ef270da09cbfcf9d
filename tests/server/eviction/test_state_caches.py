"""Caches of states and their replay: the examples of the specification, and random traces."""

from __future__ import annotations

import numpy as np
import pytest
from bench.policy.hybrid import HYBRID_POLICIES, StateRequest, make_states, play
from contracts.states import recounted_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.states.cache import NO_GHOSTS, GhostLimits, StateCache
from kvstore.server.eviction.states.ranks import LruRank
from kvstore.server.eviction.states.tree import HybridModel

SMALL = HybridModel("small", 1, 1, 1, 8, 4)
PLENTY = 10**15

Request = tuple[list[int], list[int], float]


def trace(requests: list[Request]) -> list[StateRequest]:
    return [
        StateRequest(np.array([*prompt, *answer], np.int32), len(prompt), ts_s)
        for prompt, answer, ts_s in requests
    ]


def run(policy: str, requests: list[Request], capacity: int = PLENTY) -> list[int]:
    """Return the tokens hit of each prompt."""
    return play(trace(requests), make_states(policy, SMALL, capacity))


def documents(count: int) -> list[Request]:
    """One document of 100 tokens, asked about with questions that differ from the first token."""
    return [([*range(100), 1000 + at], [7], float(at)) for at in range(count)]


def test_the_first_reuse_of_a_document_makes_its_state_and_the_second_hits() -> None:
    for policy in HYBRID_POLICIES:
        states = make_states(policy, SMALL, PLENTY)

        assert play(trace(documents(4)), states) == [0, 0, 100, 100]


def test_the_next_turn_starts_after_the_last_decoded_token() -> None:
    for policy in HYBRID_POLICIES:
        hits = run(policy, [([1, 2, 3], [4, 5], 0.0), ([1, 2, 3, 4, 5, 6], [7], 1.0)])

        assert hits == [0, 5]


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


def test_more_prompt_than_tokens_and_times_that_are_no_numbers_are_refused() -> None:
    states = make_states("lru", SMALL, PLENTY)
    with pytest.raises(InvalidRequestError, match="prompt_tokens=4"):
        states.request(np.zeros(3, np.int32), 4, 0.0)
    with pytest.raises(InvalidRequestError, match="now_s=inf"):
        states.request(np.zeros(3, np.int32), 3, float("inf"))


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


def test_a_policy_without_a_form_for_states_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(InvalidRequestError, match=r"policy='learned'.*lru, sglang.*hit_density"):
        make_states("learned", SMALL, 1)


def test_a_capacity_below_zero_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="capacity_bytes=-1"):
        make_states("lru", SMALL, -1)
