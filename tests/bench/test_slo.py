"""bench.slo: the client's get with a deadline over changing links, and the report."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from bench.lib.report import Report
from bench.slo import (
    COST_S,
    GBPS,
    OURS,
    Levels,
    Request,
    Trace,
    compare,
    controlled,
    load_all,
    recompute,
    requests,
    run,
)

from kvstore.client.planning import RECOMPUTE, PlanTerms, PrefillModel

LEVELS = Levels((2.1, 3.6, 5.2), 10.7)
TOP = 2


def steady(gbps: float) -> Trace:
    return Trace([(1.0, gbps * GBPS)])


def random_requests(seed: int, *, loads_first: bool, exact: bool) -> list[Request]:
    """Return five prompts of up to 24 chunks for engines of random speed."""
    draw = random.Random(seed)
    engine = PrefillModel(draw.uniform(0, 0.005), 10 ** draw.uniform(-4.5, -2.5))
    found = []
    for number in range(5):
        tokens = draw.choice([64, 256])
        chunk = LEVELS.chunk(tokens, exact=exact)
        terms = PlanTerms(
            10 ** draw.uniform(-1, 1), engine, 10 ** draw.uniform(9.5, 11),
            loads_first=loads_first, tail_tokens=draw.randint(1, 256),
        )  # fmt: skip
        found.append(Request(number + draw.random(), (chunk,) * draw.randint(1, 24), terms))
    return found


@pytest.mark.parametrize("loads_first", [False, True], ids=["beside", "loads first"])
@pytest.mark.parametrize("exact", [False, True], ids=["levels", "exact"])
def test_no_request_is_later_than_without_a_store_by_more_than_a_decision_costs(
    loads_first: bool, exact: bool
) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        steps = [(draw.uniform(0.02, 1), 10 ** draw.uniform(-2, 1) * GBPS) for _ in range(64)]
        trace, replay = Trace(steps), controlled()
        for request in random_requests(seed, loads_first=loads_first, exact=exact):
            found = replay(request, trace)
            alone_s = request.terms.compute_s(request.chunks)
            # Plus the last decode, and a start of each engine run.
            chunk_s = request.chunks[0].raw_bytes / request.terms.decode_bytes_per_s
            assert request.terms.prefill is not None
            more_s = 2 * chunk_s + 5 * request.terms.prefill.start_s
            late_s = found.ttft_s - alone_s - request.terms.later_s(request.chunks)
            assert late_s < COST_S + more_s, (seed, request.terms)


def test_a_fast_link_brings_every_chunk_at_its_finest_level() -> None:
    replay, (first, *others) = controlled(), requests(LEVELS, 1, 5, exact=False)
    replay(first, steady(100))  # before it the link is unmeasured
    for request in others:
        found = replay(request, steady(100))
        assert set(found.levels) == {TOP}
        assert found.ttft_s < request.terms.deadline_s


@pytest.mark.parametrize("loads_first", [False, True], ids=["beside", "loads first"])
def test_a_link_that_was_slow_is_tried_again(loads_first: bool) -> None:
    replay = controlled()
    (first, *_) = requests(LEVELS, 1, 1, exact=False)
    request = replace(first, terms=replace(first.terms, loads_first=loads_first))
    for number in range(8):
        late = replay(replace(request, at_s=float(number)), steady(0.01))
    assert sum(level >= 0 for level in late.levels) <= 1
    found = replay(replace(request, at_s=60.0), steady(50))
    assert sum(level >= 0 for level in found.levels) > len(request.chunks) / 2


def test_loads_before_an_engine_that_is_in_time_by_itself_never_make_it_late() -> None:
    (one, *_) = requests(LEVELS, 1, 1, exact=False)
    terms = replace(one.terms, deadline_s=0.75, loads_first=True)
    for fast_s in [0.03, 0.06, 0.1]:
        request = Request(0.0, one.chunks[:1] * 24, terms)
        trace = Trace([(fast_s, 6 * GBPS), (60.0, 0.3 * GBPS)])
        assert recompute(request, trace).ttft_s < 0.75
        assert controlled()(request, trace).ttft_s < 0.75


def test_an_engine_beside_a_link_that_stops_began_early_enough_to_be_in_time() -> None:
    (one, *_) = requests(LEVELS, 1, 1, exact=False)
    request = Request(0.0, one.chunks[:1] * 55, replace(one.terms, deadline_s=1.0))
    stops, replay = Trace([(0.25, 6 * GBPS), (0.9, 0.1 * GBPS), (5, 6 * GBPS)]), controlled()
    replay(request, steady(6))  # before it the link is unmeasured
    assert replay(request, stops).ttft_s < 1.0 < recompute(request, stops).ttft_s


def test_over_a_slow_link_the_engine_computes_the_first_chunks_and_the_link_brings_the_last() -> (
    None
):
    (request, *_) = requests(LEVELS, 2, 1, exact=True)
    found = controlled()(request, steady(4))
    assert 0 < found.levels.count(RECOMPUTE) < len(found.levels)
    assert list(found.levels) == sorted(found.levels)
    assert found.ttft_s < recompute(request, steady(4)).ttft_s
    assert found.ttft_s < load_all(0)(request, steady(4)).ttft_s


@pytest.mark.parametrize("gbps", [1, 3, 10])
def test_the_queue_of_a_slow_decoder_limits_loads(gbps: float) -> None:
    replay = controlled()
    for one in requests(LEVELS, 1, 20, exact=False):
        terms = replace(one.terms, decode_bytes_per_s=0.25e9)
        found = replay(replace(one, terms=terms), steady(gbps))
        latest_s = terms.compute_s(one.chunks) + terms.later_s(one.chunks)
        assert found.ttft_s < latest_s + COST_S, terms


def test_bytes_arrive_when_the_link_has_given_them() -> None:
    trace = Trace([(0.5, 100.0), (0.25, 1000.0)])
    assert trace.arrival_s(50, 0.0) == 0.5
    assert trace.arrival_s(100, 0.25) == pytest.approx(0.575)
    for at_s in (0.0, 0.3, 0.6, 2.1):
        half_s = trace.arrival_s(617, at_s)
        assert trace.arrival_s(617, half_s) == pytest.approx(trace.arrival_s(1234, at_s))


def test_a_run_has_every_key_and_the_same_figures_again() -> None:
    reports = [Report("slo"), Report("slo")]
    for report in reports:
        run(report, LEVELS, [steady(1)], [[Trace.jumping(1, 2.0), Trace.jumping(2, 2.0)]], 6)
    values = reports[0].values
    assert values == reports[1].values
    assert values.keys() == {
        "violations_vs_best_fixed", "mean_ttft_vs_best_fixed", "worse_than_recompute",
    }  # fmt: skip
    assert values["worse_than_recompute"] == 0
    assert {*OURS, "recompute", "level 0"} < compare(LEVELS, steady(1), 2, exact=False).keys()
