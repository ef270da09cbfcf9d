"""Plans against every plan there is: never slower than computing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.plans import LoadPlan, PrefillModel
from kvstore.server.store.plans import MAX_STRETCHES, plan_loads

ENGINE = PrefillModel(0.01, 1e-4, 1e-8)


class PlanQuestion(NamedTuple):
    tokens: Sequence[int]
    load_s: Sequence[float]
    decode_s: Sequence[float]
    chunks: int
    total_tokens: int


def question(
    load_s: Sequence[float],
    tokens: int = 256,
    missing: int = 0,
    tail: int = 10,
    decode_s: float = 0,
) -> PlanQuestion:
    count = len(load_s)
    total = tokens * (count + missing) + tail
    return PlanQuestion([tokens] * count, load_s, [decode_s] * count, count + missing, total)


def simulate(asked: PlanQuestion, prefill: PrefillModel, picks: Sequence[bool]) -> float:
    """Play a plan chunk by chunk: one link, one engine, each chunk computed behind all before."""
    lag_s = max(map(min, asked.load_s, asked.decode_s), default=0.0)
    link_s = ready_s = engine_s = 0.0
    done = run = 0
    for tokens, load, decode, is_loaded in zip(
        asked.tokens, asked.load_s, asked.decode_s, picks, strict=True
    ):
        if is_loaded:
            if run:
                engine_s = max(engine_s, ready_s) + prefill.seconds(run, done)
                done, run = done + run, 0
            link_s += max(load, decode)
            ready_s = link_s + lag_s
            done += tokens
        else:
            run += tokens
    rest = asked.total_tokens - done - run
    if run or rest:
        return max(engine_s, ready_s) + prefill.seconds(run + rest, done)
    return max(engine_s, ready_s) + prefill.seconds(1, max(0, done - 1))


def fastest(asked: PlanQuestion, prefill: PrefillModel) -> float:
    plans = product((False, True), repeat=len(asked.tokens))
    return min(simulate(asked, prefill, picks) for picks in plans)


def picks_of(plan: LoadPlan, ready: int) -> list[bool]:
    return [at in set(plan.loaded) for at in range(ready)]


def check(plan: LoadPlan, asked: PlanQuestion, prefill: PrefillModel) -> None:
    """Hold a plan to what it says."""
    ends = [0, *(one.stop for one in plan.ranges)]
    assert [one.first for one in plan.ranges] == ends[:-1]
    assert ends[-1] == asked.chunks
    assert all(a.load != b.load for a, b in zip(plan.ranges, plan.ranges[1:], strict=False))
    assert all(one.ms >= 0 and one.first < one.stop for one in plan.ranges)
    assert all(at < len(asked.tokens) for at in plan.loaded)
    assert plan.plan_ms <= plan.recompute_ms
    played_s = simulate(asked, prefill, picks_of(plan, len(asked.tokens)))
    assert plan.plan_ms == pytest.approx(1000 * played_s)
    nothing_s = prefill.seconds(max(1, asked.total_tokens), 0)
    assert plan.recompute_ms == pytest.approx(1000 * nothing_s)


def test_a_fast_tier_is_loaded_and_a_slow_one_is_not() -> None:
    fast = plan_loads(*question([0.001] * 8), ENGINE)
    assert fast.loaded == list(range(8))
    slow = plan_loads(*question([9.0] * 8), ENGINE)
    assert slow.loaded == []
    assert slow.plan_ms == slow.recompute_ms


def test_the_head_is_computed_while_what_is_behind_it_loads() -> None:
    # A chunk computes in 25.6 ms, ten more for a start, and loads in 20: the first few win.
    plan = plan_loads(*question([0.020] * 10), ENGINE)
    first, second, *_ = plan.ranges
    assert (first.load, second.load) == (False, True)
    assert plan.plan_ms < 1000 * (10 * 0.020 + ENGINE.seconds(10, 2560))


def test_a_slow_stretch_between_fast_ones_is_computed() -> None:
    loads = [0.0001] * 20 + [5.0] * 4 + [0.0001] * 20
    plan = plan_loads(*question(loads), ENGINE)
    assert plan.loaded == [*range(20), *range(24, 44)]


def test_chunks_that_are_nowhere_are_computed() -> None:
    plan = plan_loads(*question([0.001] * 4, missing=3), ENGINE)
    assert [(one.first, one.stop, one.load) for one in plan.ranges] == [(0, 4, True), (4, 7, False)]
    nothing = plan_loads(*question([], missing=3), ENGINE)
    assert [(one.first, one.stop, one.load) for one in nothing.ranges] == [(0, 3, False)]
    assert nothing.plan_ms == nothing.recompute_ms


def test_decoding_runs_beside_the_next_load_and_counts_once_at_the_end() -> None:
    plan = plan_loads(*question([0.002] * 4, decode_s=0.001), ENGINE)
    (load, *_) = plan.ranges
    assert load.ms == pytest.approx(4 * 2 + 1)
    slow = plan_loads(*question([0.002] * 4, decode_s=9.0), ENGINE)
    assert slow.loaded == []


def test_a_prompt_that_is_here_whole_still_computes_its_last_token() -> None:
    plan = plan_loads(*question([0.001] * 4, tail=0), ENGINE)
    assert plan.plan_ms == pytest.approx(4 + 1000 * ENGINE.seconds(1, 1023))


def test_an_empty_prompt_has_an_empty_plan() -> None:
    assert plan_loads(*PlanQuestion([], [], [], 0, 0), ENGINE).ranges == ()


SECONDS = st.floats(0, 0.5)
ENGINES = st.builds(PrefillModel, st.floats(0, 0.1), st.floats(0, 1e-3), st.floats(0, 1e-6))


@given(st.integers(0, 9), SECONDS, SECONDS, st.integers(0, 300), st.integers(0, 2), ENGINES)
def test_no_plan_is_faster_for_chunks_that_load_alike(
    count: int, load: float, decode: float, tail: int, missing: int, prefill: PrefillModel
) -> None:
    asked = question([load] * count, tail=tail, missing=missing, decode_s=decode)
    plan = plan_loads(*asked, prefill)
    check(plan, asked, prefill)
    assert plan.plan_ms == pytest.approx(1000 * fastest(asked, prefill))


@given(
    st.lists(st.tuples(st.integers(1, 512), SECONDS, SECONDS), max_size=MAX_STRETCHES),
    st.integers(0, 300),
    ENGINES,
)
def test_no_plan_is_faster_for_a_few_chunks_whatever_they_are(
    chunks: list[tuple[int, float, float]], tail: int, prefill: PrefillModel
) -> None:
    tokens, loads, decodes = zip(*chunks, strict=True) if chunks else ((), (), ())
    asked = PlanQuestion(tokens, loads, decodes, len(chunks), sum(tokens) + tail)
    plan = plan_loads(*asked, prefill)
    check(plan, asked, prefill)
    assert plan.plan_ms == pytest.approx(1000 * fastest(asked, prefill))


@given(
    st.lists(st.tuples(st.integers(1, 512), SECONDS, SECONDS), max_size=40),
    st.integers(0, 300),
    st.integers(0, 5),
    ENGINES,
)
def test_no_plan_is_slower_than_computing_everything(
    chunks: list[tuple[int, float, float]], tail: int, missing: int, prefill: PrefillModel
) -> None:
    tokens, loads, decodes = zip(*chunks, strict=True) if chunks else ((), (), ())
    count = len(chunks) + missing
    asked = PlanQuestion(tokens, loads, decodes, count, sum(tokens) + tail + missing)
    check(plan_loads(*asked, prefill), asked, prefill)
