"""Plans against every plan there is, never slower than computing; and those a lookup makes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.core import TOKENS, Core, keys_of, prompt
from simulation.tiers import SimDisk, no_faults

from kvstore.proto.plans import EngineTerms, LoadPlan, PrefillModel
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


# --- of a lookup, from what the server measured of its tiers

SLOW_ENGINE = PrefillModel(0.001, 1e-4)
"""A chunk of 60 tokens takes 6 ms."""


def plan_of(core: Core, chunks: int, tokens: int = 0) -> LoadPlan:
    keys = keys_of(prompt(chunks))
    terms = EngineTerms(SLOW_ENGINE, tokens)
    match = core.store.lookup(core.session, keys, core.later(), lease=False, engine=terms)
    assert match.plan is not None
    return match.plan


def shape(plan: LoadPlan) -> list[tuple[int, int, bool]]:
    return [(one.first, one.stop, one.load) for one in plan.ranges]


def test_what_is_in_memory_is_loaded_and_what_is_nowhere_computed(core: Core) -> None:
    nothing = plan_of(core, 0, 10)
    assert shape(nothing) == []
    assert nothing.plan_ms == nothing.recompute_ms > 0
    core.put(prompt(4))
    plan = plan_of(core, 6, 6 * TOKENS + 7)
    assert shape(plan) == [(0, 4, True), (4, 6, False)]
    assert plan.recompute_ms == pytest.approx(1000 * SLOW_ENGINE.seconds(6 * TOKENS + 7, 0))
    left = SLOW_ENGINE.seconds(2 * TOKENS + 7, 4 * TOKENS)
    assert plan.plan_ms == pytest.approx(1000 * left, rel=0.01)
    shorter = plan_of(core, 4, 1)  # than its chunks: it is as long as they are
    assert shorter.recompute_ms == pytest.approx(1000 * SLOW_ENGINE.seconds(4 * TOKENS, 0))


def test_a_disk_that_has_become_slow_is_left_alone_and_decoding_counts_as_it_was_measured(
    core: Core,
) -> None:
    core.put(prompt(6))
    core.put(prompt(12, seed=9))
    quick = plan_of(core, 6, 400)
    assert shape(quick) == [(0, 6, True)]
    core.slot("disk").note_decode(1000, 0.002)
    slower = plan_of(core, 6, 400)
    assert quick.plan_ms < slower.plan_ms <= slower.recompute_ms
    for _ in range(100):
        core.slot("disk").note_load(1000, 1.0)
    slow = plan_of(core, 6, 400)
    assert shape(slow) == [(0, 6, False)]
    assert slow.plan_ms == slow.recompute_ms


def test_a_frame_that_is_decoded_tells_its_speed() -> None:
    with closing(Core([SimDisk(1 << 20, no_faults())], codec="lossless")) as core:
        core.put(prompt(4))
        core.put(prompt(12, seed=9))
        assert core.slot("disk").decode_s_per_byte == 0
        core.get(prompt(4))
        assert core.slot("disk").decode_s_per_byte > 0


def test_a_slow_stretch_between_fast_ones_is_computed() -> None:
    loads = [0.0001] * 20 + [5.0] * 4 + [0.0001] * 20
    plan = plan_loads(*question(loads), ENGINE)
    assert plan.loaded == [*range(20), *range(24, 44)]
