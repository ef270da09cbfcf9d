"""Two tiers: what is found, what is written, and that no chunk is left without its parents."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from bench.tier_replay import LoadModel, TierReplay, TierTerms
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.reuse_statistics import ReuseForecast
from kvstore.server.tiering.admission import (
    ADMISSIONS,
    BY_VALUE,
    TierAdmission,
)


def make_replay(
    fast: int, slow: int, rule: str | TierAdmission = "through", *, exclusive: bool = False
) -> TierReplay:
    admission = ADMISSIONS[rule] if isinstance(rule, str) else rule
    terms = TierTerms(fast, slow, exclusive)
    return TierReplay(
        LruEviction(), LruEviction(), terms, admission, ReuseForecast(AccessHistory())
    )


def sessions(count: int, seed: int = 1) -> list[tuple[float, list[int]]]:
    """Return conversations that grow by a few blocks a turn, and long prompts that come once."""
    random_ = random.Random(seed)
    requests, number = [], 100_000
    open_: list[list[int]] = []
    for at in range(count):
        if open_ and random_.random() < 0.4:
            chain = open_[random_.randrange(len(open_))]
        else:
            chain, is_kept = [1], random_.random() < 0.3
            open_ = [*open_[-30:], chain] if is_kept else open_
            chain += [] if is_kept else range(number + 10, number + 30)
        chain += range(number, number + random_.randrange(2, 6))
        number += 50
        requests.append((float(at), list(chain)))
    return requests


def test_write_through_writes_every_block_once_and_finds_it_on_the_slow_tier() -> None:
    replay = make_replay(2, 10)
    assert replay.request([1, 2], 0.0) == (0, 0)
    assert replay.request([3, 4], 1.0) == (0, 0)
    assert replay.counts.written == 4
    assert replay.request([1, 2], 2.0) == (0, 2)
    assert replay.request([1, 2], 3.0) == (2, 0)
    assert replay.counts.written == 4, "a clean copy is free"


def test_write_back_writes_victims_only() -> None:
    replay = make_replay(2, 10, "evict")
    replay.request([1, 2], 0.0)
    assert replay.counts.written == 0
    replay.request([3, 4], 1.0)
    assert replay.counts.written == 2
    assert replay.request([1, 2], 2.0) == (0, 2)


def test_exclusive_tiers_write_again_what_came_up_in_between() -> None:
    inclusive, exclusive = (make_replay(2, 10, "evict", exclusive=e) for e in (False, True))
    for at in range(6):
        for replay in (inclusive, exclusive):
            replay.request([1, 2] if at % 2 else [3, 4], float(at))
    assert (inclusive.counts.written, exclusive.counts.written) == (4, 10)


def test_selective_writes_at_the_second_asking() -> None:
    replay = make_replay(2, 10, "selective")
    replay.request([1, 2], 0.0)
    replay.request([1, 2], 1.0)
    assert replay.counts.written == 2
    replay.request([3, 4], 2.0)
    assert replay.counts.written == 2


def test_a_prompt_larger_than_the_fast_tier_is_stored_as_far_as_it_goes() -> None:
    replay = make_replay(2, 0)
    replay.request([1, 2, 3], 0.0)
    assert replay.request([1, 2, 3], 1.0) == (2, 0)
    assert make_replay(0, 0).request([1], 0.0) == (0, 0)


def test_the_value_rule_writes_less_than_write_through_and_finds_as_much() -> None:
    requests = sessions(3000)
    counts = {}
    for rule in ("through", "auto"):
        replay = make_replay(100, 400, rule)
        for now_s, rows in requests:
            replay.request(rows, now_s)
        counts[rule] = replay.counts
    assert counts["auto"].written < 0.88 * counts["through"].written
    assert counts["auto"].hit_rate >= counts["through"].hit_rate


def test_bytes_written_fall_as_the_price_rises() -> None:
    written = []
    for price in (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0):
        replay = make_replay(100, 400, replace(BY_VALUE, least_value=price))
        for now_s, rows in sessions(1500):
            replay.request(rows, now_s)
        written.append(replay.counts.written)
    assert written == sorted(written, reverse=True)
    assert written[0] > 2 * written[-1]


def test_the_same_trace_gives_the_same_counts() -> None:
    runs = []
    for _ in range(2):
        replay = make_replay(50, 200, "auto")
        runs.append([replay.request(rows, now_s) for now_s, rows in sessions(500)])
    assert runs[0] == runs[1]


@given(
    rule=st.sampled_from(list(ADMISSIONS)),
    exclusive=st.booleans(),
    sizes=st.tuples(st.integers(1, 12), st.integers(0, 12)),
    paths=st.lists(st.tuples(st.integers(1, 60), st.floats(0, 100)), max_size=60),
)
def test_no_block_is_on_a_tier_while_an_ancestor_is_on_none(
    rule: str, exclusive: bool, sizes: tuple[int, int], paths: list[tuple[int, float]]
) -> None:
    replay = make_replay(*sizes, rule, exclusive=exclusive)
    for leaf, now_s in paths:  # the binary tree of row // 2
        chain = [leaf >> shift for shift in range(leaf.bit_length())][::-1]
        replay.request(chain, now_s)
        assert replay.orphans() == []


def test_a_hit_spares_computing_and_costs_a_load() -> None:
    model = LoadModel()
    nothing, fast, slow = (model.seconds(1024, *found) for found in ((0, 0), (2, 0), (0, 2)))
    assert fast < slow < nothing
    assert model.mean_s([]) == 0.0
    assert model.mean_s([1.0, 2.0]) == 1.5


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="slow_blocks"):
        TierTerms(1, -1)
