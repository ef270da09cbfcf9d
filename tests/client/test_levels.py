"""Levels: plans against all possible ones, on moving links, and what none of them may do."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean

import pytest
from client_levels.oracle import best
from client_levels.replay import Outcome, Replay, Trace, cachegen, ours
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.levels import (
    MISSING,
    RECOMPUTE,
    Fetch,
    LevelledChunk,
    LinkEstimate,
    Plan,
    PlanTerms,
    Progress,
    plan,
)
from kvstore.client.prefill import PrefillModel
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Accuracy

BOUNDED = Accuracy.bounded
SLOW_ENGINE = PrefillModel(0.005, 1e-2)


def make_chunk(
    sizes: tuple[int, ...] = (100, 150, 225),
    distortion: tuple[float, ...] = (0.9, 0.3, 0.1),
    tokens: int = 256,
) -> LevelledChunk:
    return LevelledChunk(tokens, 600, sizes, (BOUNDED,) * len(sizes), distortion)


def terms(deadline_s: float, prefill: PrefillModel = SLOW_ENGINE) -> PlanTerms:
    return PlanTerms(deadline_s, prefill, 1e9, BOUNDED)


def at(bytes_per_s: float) -> LinkEstimate:
    return LinkEstimate(bytes_per_s, bytes_per_s)


# --- against the best of all plans


def random_case(seed: int, *, equal: bool) -> tuple[list[LevelledChunk], PlanTerms, float]:
    draw = random.Random(seed)
    chunks = []
    usual = draw.uniform(1e6, 5e7)
    for _ in range(draw.randint(1, 6)):
        levels = 0 if draw.random() < 0.05 else draw.randint(1, 3)
        base = usual if equal else usual * draw.uniform(0.2, 3)
        ends: list[int] = []
        for level in range(levels):
            ends.append((ends or [0])[-1] + int(base * (draw.uniform(0.5, 0.9) if level else 1)))
        loss = sorted((draw.random() for _ in range(levels)), reverse=True)
        tokens = 256 if equal else draw.randint(16, 512)
        chunks.append(
            LevelledChunk(tokens, int(6 * base), tuple(ends), (BOUNDED,) * levels, tuple(loss))
        )
    prefill = PrefillModel(draw.uniform(0, 0.01), draw.uniform(1e-5, 1e-3), draw.uniform(0, 1e-8))
    deadline_s, decode = 10 ** draw.uniform(-2, 1), 10 ** draw.uniform(8.5, 11)
    wanted = PlanTerms(deadline_s, prefill, decode, BOUNDED, spares_engine=False)
    return chunks, wanted, 10 ** draw.uniform(7, 10)


def largest_jump(chunks: list[LevelledChunk]) -> float:
    return max((c.tokens * c.distortion[0] for c in chunks if c.distortion), default=0.0)


@pytest.mark.parametrize("equal", [True, False])
def test_plans_are_near_the_best_of_all_plans(equal: bool) -> None:
    """The bound: one and a half times the worst loss of one chunk."""
    missed = feasible = 0
    for seed in range(600):
        chunks, wanted, speed = random_case(seed, equal=equal)
        optimum = best(chunks, wanted, speed)
        found = plan(chunks, Progress((MISSING,) * len(chunks)), wanted, at(speed))
        assert found.ready_s >= optimum.soonest_s * (1 - 1e-9)
        if optimum.distortion is None:
            assert not found.is_in_time
            assert found.ready_s <= optimum.soonest_s * (1 + 1e-9 if equal else 2.1)
            continue
        feasible += 1
        missed += not found.is_in_time
        if found.is_in_time:
            regret = found.distortion - optimum.distortion
            assert -1e-9 <= regret <= 1.5 * largest_jump(chunks) + 1e-9
    assert feasible > 200
    assert missed <= (0 if equal else feasible // 100)


# --- on moving links


def many(replay: Replay, wanted: PlanTerms, count: int = 40) -> tuple[float, float, float]:
    """Return the share of late requests, the mean loss a token, and chunks computed."""
    outcomes: list[Outcome] = [
        replay(CONTEXT, wanted, Trace.uniform(seed)) for seed in range(count)
    ]
    tokens = sum(chunk.tokens for chunk in CONTEXT)
    return (
        mean(outcome.ready_s > wanted.deadline_s for outcome in outcomes),
        mean(outcome.distortion / tokens for outcome in outcomes),
        mean(outcome.recomputed for outcome in outcomes),
    )


# Six chunks of 1500 tokens of an 8B model with grouped heads, at 2.1, 3.6 and 5.2 bits a value.
_TOKENS, _TOKEN_BYTES = 1500, 32 * 2 * 8 * 128 * 2
CONTEXT = [
    LevelledChunk(
        _TOKENS,
        _TOKENS * _TOKEN_BYTES,
        tuple(int(_TOKENS * _TOKEN_BYTES * bits / 16) for bits in (2.1, 3.6, 5.2)),
        (BOUNDED,) * 3,
        (0.13, 0.018, 0.002),
    )
] * 6
ENGINE = PrefillModel(0.005, 1e-4, 3e-9)


@pytest.mark.parametrize("deadline_s", [0.5, 0.75, 1.0, 1.5])
def test_on_the_links_of_cachegens_artifact_fewer_are_late_and_less_is_lost(
    deadline_s: float,
) -> None:
    """Both have the same levels and engine; theirs knows the bandwidth, ours has measured it."""
    wanted = PlanTerms(deadline_s, ENGINE, 20e9, BOUNDED)
    late, loss, computed = many(ours, wanted)
    their_late, their_loss, their_computed = many(cachegen, wanted)
    assert late <= their_late
    assert loss < their_loss
    assert computed <= their_computed
    assert late <= 0.15


def test_what_an_engine_computes_beside_the_loads_lowers_the_loss() -> None:
    spared = PlanTerms(0.75, ENGINE, 20e9, BOUNDED)
    late, loss, computed = many(ours, replace(spared, spares_engine=False))
    usual_late, usual_loss, usual_computed = many(ours, spared)
    assert late <= usual_late
    assert loss < usual_loss
    assert computed > usual_computed


# --- what plans never do


@st.composite
def levelled(draw: st.DrawFn) -> LevelledChunk:
    steps = draw(st.lists(st.integers(1, 10**8), max_size=4))
    ends = tuple(sum(steps[: at + 1]) for at in range(len(steps)))
    accuracy = sorted(
        draw(st.lists(st.sampled_from(Accuracy), min_size=len(ends), max_size=len(ends)))
    )
    loss = draw(st.lists(st.floats(0, 1), min_size=len(ends), max_size=len(ends)))
    return LevelledChunk(
        draw(st.integers(1, 4096)), draw(st.integers(1, 10**9)), ends, tuple(accuracy),
        tuple(sorted(loss, reverse=True)),
    )  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[LevelledChunk], Progress, PlanTerms, LinkEstimate]:
    chunks = draw(st.lists(levelled(), min_size=1, max_size=7))
    held = tuple(draw(st.integers(MISSING, len(chunk.end_bytes) - 1)) for chunk in chunks)
    prefill = PrefillModel(
        draw(st.floats(0, 1)), draw(st.floats(0, 1e-2)), draw(st.floats(0, 1e-6))
    )
    deadline_s, decode = draw(st.floats(1e-3, 100)), draw(st.floats(1e6, 1e12))
    least, spares = draw(st.sampled_from(Accuracy)), draw(st.booleans())
    p20 = draw(st.floats(1e5, 1e10))
    return (
        chunks,
        Progress(held, draw(st.floats(0, 50)), draw(st.floats(0, 50))),
        PlanTerms(deadline_s, prefill, decode, least, spares),
        LinkEstimate(p20 * draw(st.floats(1, 10)), p20),
    )


Request = tuple[list[LevelledChunk], Progress, PlanTerms, LinkEstimate]


@given(requests())
def test_no_plan_is_below_the_minimum_accuracy_nor_leaves_a_gap(request: Request) -> None:
    chunks, progress, wanted, _ = request
    found = plan(*request)
    for chunk, action, has in zip(chunks, found.actions, progress.levels, strict=True):
        assert action in (RECOMPUTE, *range(len(chunk.end_bytes))), "every chunk comes to something"
        if action >= 0:
            assert chunk.accuracy[action] >= wanted.least
            assert action >= has
        if has == RECOMPUTE:
            assert action == RECOMPUTE


@given(requests())
def test_following_a_plan_brings_what_is_needed_in_order_and_then_refines(
    request: Request,
) -> None:
    chunks, progress, _, _ = request
    found = plan(*request)
    levels = [
        RECOMPUTE if action == RECOMPUTE else has
        for action, has in zip(found.actions, progress.levels, strict=True)
    ]
    fetched: list[Fetch] = []
    while (fetch := found.next_fetch(chunks, levels)) is not None:
        has = levels[fetch.chunk]
        assert fetch.start == (chunks[fetch.chunk].end_bytes[has] if has >= 0 else 0)
        assert fetch.stop == chunks[fetch.chunk].end_bytes[fetch.level]
        assert has < fetch.level <= found.actions[fetch.chunk]
        levels[fetch.chunk] = fetch.level
        fetched.append(fetch)
        assert len(fetched) <= sum(len(chunk.end_bytes) for chunk in chunks)
    assert tuple(levels) == found.actions
    floors = [fetch.level <= found.floors[fetch.chunk] for fetch in fetched]
    assert floors == sorted(floors, reverse=True), "refinements last"
    needed = [fetch.chunk for fetch, is_floor in zip(fetched, floors, strict=True) if is_floor]
    assert needed == sorted(needed)


@given(requests())
def test_a_plan_in_time_is_in_time_by_the_cautious_estimate_or_the_mean(request: Request) -> None:
    found = plan(*request)
    assert found.is_in_time == (found.ready_s <= request[2].deadline_s)
    assert found.distortion >= 0


@given(requests(), st.floats(0, 100))
def test_time_that_passed_never_refines_more(request: Request, later_s: float) -> None:
    chunks, progress, wanted, link = request
    wanted = replace(wanted, least=Accuracy.approximate)
    chunks = [chunk for chunk in chunks if chunk.end_bytes] or [make_chunk()]
    bases = Progress((0,) * len(chunks), progress.elapsed_s, progress.engine_until_s)
    now = plan(chunks, bases, wanted, link)
    late = plan(chunks, replace(bases, elapsed_s=bases.elapsed_s + later_s), wanted, link)
    assert late.distortion >= now.distortion - 1e-9 or not late.is_in_time or not now.is_in_time


def test_deadline_pressure_stops_refining_and_nothing_else() -> None:
    chunks = [make_chunk() for _ in range(4)]
    bases = Progress((0,) * 4)
    assert plan(chunks, bases, terms(10.0), at(1e6)).actions == (2, 2, 2, 2)
    some = plan(chunks, bases, terms(0.18), at(1e3)).actions
    assert 0 in some
    assert max(some) > 0
    late = plan(chunks, replace(bases, elapsed_s=0.1799), terms(0.18), at(1e3))
    assert late.actions == (0, 0, 0, 0)
    assert late.next_fetch(chunks, bases.levels) is None


def test_a_slow_link_has_the_first_chunks_computed_while_the_last_ones_load() -> None:
    chunks = [make_chunk((1000,), (0.5,)) for _ in range(10)]
    engine = PrefillModel(0.0, 0.5 / 256)
    found = plan(chunks, Progress((MISSING,) * 10), terms(2.6, engine), at(2e3))
    assert found.actions == (RECOMPUTE,) * 5 + (0,) * 5
    assert found.is_in_time
    slowest = plan(chunks, Progress((MISSING,) * 10), terms(0.1, engine), at(2e3))
    assert not slowest.is_in_time
    assert slowest.ready_s == pytest.approx(2.5, abs=0.01), "all that is left is to be soon"


def test_a_chunk_that_is_not_stored_well_enough_is_computed() -> None:
    chunks = [make_chunk(), LevelledChunk(16, 100), make_chunk()]
    assert plan(chunks, Progress((MISSING,) * 3), terms(10), at(1e6)).actions == (2, RECOMPUTE, 2)
    exact = replace(terms(10), least=Accuracy.exact)
    assert set(plan(chunks, Progress((MISSING,) * 3), exact, at(1e6)).actions) == {RECOMPUTE}


def test_slack_goes_where_a_byte_spares_most_and_the_cautious_estimate_decides() -> None:
    chunks = [make_chunk((100, 200), (0.5, 0.4)), make_chunk((100, 200), (0.9, 0.1))]
    found = plan(chunks, Progress((MISSING,) * 2), terms(0.35), LinkEstimate(1e9, 1e3))
    assert found.actions == (0, 1)
    assert found.next_fetch(chunks, (0, 0)) == Fetch(1, 1, 100, 200)


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_chunk((100, 100), (0.5, 0.1)),
        lambda: make_chunk((100, 200), (0.1, 0.5)),
        lambda: make_chunk((100,), (-0.1,)),
        lambda: make_chunk((0,), (0.1,)),
        lambda: make_chunk((100,), (float("nan"),)),
        lambda: make_chunk((100, 200), (0.5,)),
        lambda: make_chunk(tokens=0),
        lambda: terms(0.0),
        lambda: replace(terms(1.0), decode_bytes_per_s=-1.0),
        lambda: PrefillModel(-1.0, 0.0),
        lambda: PrefillModel(0.0, float("inf")),
        lambda: LinkEstimate(0.0, 1.0),
        lambda: LinkEstimate(1.0, float("nan")),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: object) -> None:
    with pytest.raises(InvalidRequestError, match="="):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("levels", [(), (MISSING, MISSING), (3,), (MISSING - 1,)])
def test_progress_of_other_chunks_is_refused(levels: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="a level of each chunk"):
        plan([make_chunk()], Progress(levels), terms(1.0), at(1e6))


def test_a_plan_of_many_chunks_counts_every_one() -> None:
    chunks = [make_chunk() for _ in range(200)]
    found: Plan = plan(chunks, Progress((MISSING,) * 200), terms(1e3), at(1e6))
    assert found.actions == (2,) * 200
    assert found.distortion == pytest.approx(200 * 256 * 0.1)
