"""Plans against every plan there is: never slower than computing. And the plans of batches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.plans import LoadPlan, PrefillModel
from kvstore.server.store.plans import MAX_STRETCHES, plan_batch, plan_loads

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


Names = tuple[object, ...]
CHAINS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=30)


def chain(path: Iterable[object]) -> list[Names]:
    """Return the chain along a path: each name stands for all before it, too."""
    path = tuple(path)
    return [path[: at + 1] for at in range(len(path))]


def replay(
    chains: Sequence[Sequence[Names]],
    order: Sequence[int],
    uses: dict[Names, int],
) -> tuple[int, int]:
    """Ask for chains through a cache that drops a chunk after its last use; hits and peak."""
    left, hits, peak = dict(uses), 0, 0
    here: set[Names] = set()
    for number in order:
        hits += sum(name in here for name in chains[number])
        here.update(chains[number])
        peak = max(peak, len(here))
        for name in chains[number]:
            left[name] -= 1
            if not left[name]:
                here.discard(name)
    assert not here, "something was kept past its last use"
    return hits, peak


def test_uses_count_the_chains_that_a_chunk_is_in() -> None:
    plan = plan_batch([chain("ab"), chain("ac"), chain("ab")])
    assert plan.uses == {("a",): 3, ("a", "b"): 2, ("a", "c"): 1}


def test_chains_that_share_a_prefix_go_together() -> None:
    chains = [chain("abx"), chain("cd"), chain("aby"), chain("ce"), chain("ab")]
    assert plan_batch(chains).order == (4, 0, 2, 1, 3)


@given(CHAINS)
def test_every_chain_comes_once_and_the_peak_is_the_longest_of_them(
    paths: list[list[int]],
) -> None:
    chains = [chain(path) for path in paths]
    plan = plan_batch(chains)
    assert sorted(plan.order) == list(range(len(chains)))
    assert plan.uses == dict(Counter(name for one in chains for name in one))
    assert plan.peak_chunks == max(map(len, chains), default=0)


@given(CHAINS)
def test_a_cache_of_the_peak_finds_what_an_endless_one_does(paths: list[list[int]]) -> None:
    chains = [chain(path) for path in paths]
    plan = plan_batch(chains)
    hits, peak = replay(chains, plan.order, plan.uses)
    everything = sum(map(len, chains))
    assert hits == everything - len(plan.uses)
    assert peak == plan.peak_chunks


def test_another_order_needs_a_larger_cache() -> None:
    chains = [chain((group, leaf)) for group in range(20) for leaf in range(20)]
    random.Random(1).shuffle(chains)
    plan = plan_batch(chains)
    assert plan.peak_chunks == 2
    assert replay(chains, range(len(chains)), plan.uses)[1] > 10


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=12))
def test_chains_that_contradict_each_other_are_ordered_somehow(chains: list[list[int]]) -> None:
    plan = plan_batch(chains)
    assert sorted(plan.order) == list(range(len(chains)))
    assert all(1 <= uses <= len(chains) for uses in plan.uses.values())


def test_a_chain_of_thousands_needs_no_stack() -> None:
    assert plan_batch([list(range(20_000))]).peak_chunks == 20_000
