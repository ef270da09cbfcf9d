"""Which state each rank gives up: examples by hand."""

from __future__ import annotations

import zlib

import numpy as np
from contracts.states import spelt

from kvstore.server.eviction.states.cache import GhostLimits, MakeRank, StateCache
from kvstore.server.eviction.states.ranks import (
    STATE_CLASSES,
    HitDensityRank,
    LeafLruRank,
    LruRank,
    MarconiRank,
    read_prior,
    state_class,
)
from kvstore.server.eviction.states.tree import CheckpointTree, HybridModel, Node, Tokens

PRIOR_CRC32 = 252386292
"""Of its numbers as little-endian uint16: a change has to be meant."""

SMALL = HybridModel("small", 1, 1, 1, 8, 4)


def words(text: str) -> Tokens:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def serve(make_rank: MakeRank, requests: str, states: int = 99) -> StateCache:
    """Serve prompts like ``ab>c`` (the answer behind the sign), one a second."""
    kv = 1000 * SMALL.kv_bytes_per_token
    cache = StateCache(SMALL, states * SMALL.state_bytes + kv, GhostLimits(1000, 10**6), make_rank)
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


def test_alpha_keeps_the_state_that_saves_more_flops_per_byte() -> None:
    requests = "a>1 " + "b" * 200 + ">1 cc>1"

    by_recency = victims(serve(lambda tree: MarconiRank(tree, 0.0), requests), 9.0)
    by_flops = victims(serve(lambda tree: MarconiRank(tree, 2.0), requests), 9.0)

    assert by_recency[0] == "a1"
    assert by_recency[1].startswith("bbb")
    assert by_flops == ["a1", "cc1", by_recency[1]]


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


def test_of_one_class_and_age_more_tokens_for_the_bytes_are_worth_more() -> None:
    cache = serve(cold, "")
    cache.request(words("a" * 9), 8, 0.0)
    cache.request(words("b" * 99), 98, 0.0)

    assert victims(cache, 5.0)[0] == "a" * 9


def test_the_clock_may_jump_without_changing_what_is_remembered() -> None:
    cache = serve(HitDensityRank, "ax>1 by>1")
    cache.request(words("cc1"), 2, 1e12)
    cache.request(words("dd1"), 2, -1e12)
    cache.request(words("ax12"), 3, -1e12 + 1.0)

    assert len(victims(cache, 2e12)) == 5


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


def test_the_prior_is_the_one_that_was_measured() -> None:
    tables = read_prior()

    assert tables.shape == (2, STATE_CLASSES, 40)
    assert zlib.crc32(tables.astype("<u2").tobytes()) == PRIOR_CRC32


def test_the_prior_gives_way_to_what_is_seen() -> None:
    """Whatever it says of first turns, in a thousand of them it is learnt what they are."""
    cache = serve(HitDensityRank, "aa>1")
    rank = cache.rank
    assert isinstance(rank, HitDensityRank)
    before = rank.table.values[0, 20]

    for at in range(3000):
        cache.request(np.array([at, at, 1], np.int32), 2, 100.0 + at)
    rank.table.refresh(1e6, STATE_CLASSES)

    assert rank.table.values[0, 20] < before / 2
