"""Levels: plans against all possible ones, CacheGen's controller, and what no plan may do."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from statistics import mean

import pytest
from bench.slo import Outcome, Replay, Request, Trace, controlled
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.planning import (
    MISSING,
    RECOMPUTE,
    Fetch,
    LevelledChunk,
    LinkEstimate,
    LinkMeter,
    PlanTerms,
    PrefillModel,
    Progress,
)
from kvstore.proto.errors import InvalidRequestError

SLOW_ENGINE = PrefillModel(0.005, 1e-2)


def make_chunk(sizes: tuple[int, ...] = (100, 150, 225), tokens: int = 256) -> LevelledChunk:
    return LevelledChunk(tokens, 600, sizes)


def terms(deadline_s: float, prefill: PrefillModel | None = SLOW_ENGINE) -> PlanTerms:
    return PlanTerms(deadline_s, prefill, 1e9)


def at(bytes_per_s: float) -> LinkEstimate:
    return LinkEstimate(bytes_per_s, bytes_per_s)


def new(chunks: list[LevelledChunk], wanted: PlanTerms) -> Progress:
    return Progress(chunks, wanted, (MISSING,) * len(chunks))


# --- against all plans


def ready_s(
    chunks: list[LevelledChunk], wanted: PlanTerms, actions: tuple[int, ...], speed: float
) -> float:
    """When all is there: link, decoder and engine by themselves, each in the chunks' order."""
    assert wanted.prefill is not None
    link_s = decoded_s = engine_s = there_s = 0.0
    context = 0
    for chunk, action in zip(chunks, actions, strict=True):
        if action == RECOMPUTE:
            engine_s = max(engine_s, there_s) + wanted.prefill.seconds(chunk.tokens, context)
            there_s = max(there_s, engine_s)
        else:
            link_s += chunk.end_bytes[action] / speed
            decoded_s = max(link_s, decoded_s) + chunk.raw_bytes / wanted.decode_bytes_per_s
            there_s = max(there_s, decoded_s)
        context += chunk.tokens
    return there_s


def random_case(seed: int) -> tuple[list[LevelledChunk], PlanTerms, float]:
    draw = random.Random(seed)
    chunks = []
    usual = draw.uniform(1e6, 5e7)
    for _ in range(draw.randint(1, 5)):
        base = usual * draw.uniform(0.2, 3)
        ends = [int(base)]
        for _ in range(draw.randint(0, 2)):
            ends.append(ends[-1] + int(base * draw.uniform(0.5, 0.9)))
        chunks.append(LevelledChunk(draw.randint(16, 512), int(6 * base), tuple(ends)))
    prefill = PrefillModel(draw.uniform(0, 0.01), draw.uniform(1e-5, 1e-3), draw.uniform(0, 1e-8))
    deadline_s, decode = 10 ** draw.uniform(-2, 1), 10 ** draw.uniform(8.5, 11)
    wanted = PlanTerms(deadline_s, prefill, decode, loads_first=draw.random() < 0.5)
    return chunks, wanted, 10 ** draw.uniform(7, 10)


def test_of_all_plans_in_time_the_one_that_computes_least_is_taken() -> None:
    """And where none is, the soonest of those that load a prefix, or all behind one."""
    in_time = 0
    for seed in range(400):
        chunks, wanted, speed = random_case(seed)
        due_s = min(wanted.deadline_s, wanted.compute_s(chunks))
        found = new(chunks, wanted).plan(at(speed))
        assert found.ready_s == pytest.approx(ready_s(chunks, wanted, found.actions, speed))
        possible = []
        for count in range(len(chunks) + 1):
            levels = [range(len(chunk.end_bytes)) for chunk in chunks]
            computed = [range(RECOMPUTE, 0)] * count
            levels = (
                [*levels[: len(chunks) - count], *computed]
                if wanted.loads_first
                else [*computed, *levels[count:]]
            )
            possible += [(one, ready_s(chunks, wanted, one, speed)) for one in product(*levels)]
        good = [actions for actions, found_s in possible if found_s <= due_s]
        assert found.is_in_time == bool(good), seed
        if not good:
            continue
        in_time += 1
        least = min(actions.count(RECOMPUTE) for actions in good)
        assert found.actions.count(RECOMPUTE) == least
        rises = [
            (level + 1, index)
            for index, level in enumerate(found.actions)
            if 0 <= level < len(chunks[index].end_bytes) - 1
        ]
        if rises:  # one more of the lowest would be late
            level, index = min(rises)
            assert (*found.actions[:index], level, *found.actions[index + 1 :]) not in good
    assert in_time > 150


# --- on moving links, beside CacheGen's controller

# Six chunks of 1500 tokens of an 8B model with grouped heads, at 2.1, 3.6 and 5.2 bits a value.
_TOKENS, _TOKEN_BYTES = 1500, 32 * 2 * 8 * 128 * 2
LOSS = (0.13, 0.018, 0.002)
CONTEXT = (
    LevelledChunk(
        _TOKENS,
        _TOKENS * _TOKEN_BYTES,
        tuple(int(_TOKENS * _TOKEN_BYTES * bits / 16) for bits in (2.1, 3.6, 5.2)),
    ),
) * 6
ENGINE = PrefillModel(0.005, 1e-4, 3e-9)


def cachegen(request: Request, trace: Trace) -> Outcome:
    """The artifact's ``config_selection``: it knows the bandwidth, shares the deadline equally
    and takes the best level that fits a share, else the engine. One thing after another.
    """
    chunks, wanted = request.chunks, request.terms
    at_s, context, levels = request.at_s, 0, []
    share_s = wanted.deadline_s / len(chunks)
    for chunk in chunks:
        now = (trace.passed_bytes(at_s, at_s + 1e-3)) / 1e-3
        fits = (k for k in reversed(range(3)) if chunk.end_bytes[k] / now < share_s)
        levels.append(next(fits, RECOMPUTE))
        if levels[-1] == RECOMPUTE:
            at_s += ENGINE.seconds(chunk.tokens, context)
        else:
            at_s = trace.arrival_s(chunk.end_bytes[levels[-1]], at_s)
        context += chunk.tokens
    decode_s = chunks[-1].raw_bytes / wanted.decode_bytes_per_s
    return Outcome(at_s - request.at_s + decode_s, tuple(levels))


def many(replay: Replay, wanted: PlanTerms, count: int = 40) -> tuple[float, float]:
    """Return the share of late requests, and the mean loss a chunk."""
    request = Request(0.0, CONTEXT, wanted)
    outcomes = [replay(request, Trace.uniform(seed)) for seed in range(count)]
    return (
        mean(found.ttft_s > wanted.deadline_s for found in outcomes),
        mean(sum(LOSS[level] for level in found.levels if level >= 0) / 6 for found in outcomes),
    )


@pytest.mark.parametrize("deadline_s", [0.5, 0.75, 1.0, 1.5])
def test_on_the_links_of_cachegens_artifact_fewer_are_late_and_less_is_lost(
    deadline_s: float,
) -> None:
    """Both have the same levels and engine; theirs knows the bandwidth, ours has measured it.

    Within half a second it computes most, loses less for it, and is late at most of the links.
    """
    wanted = PlanTerms(deadline_s, ENGINE, 20e9, loads_first=False)

    def ours(request: Request, trace: Trace) -> Outcome:
        return controlled(lambda clock: LinkMeter(5.05e9 / 8, clock))(request, trace)

    late, loss = many(ours, wanted)
    their_late, their_loss = many(cachegen, wanted)
    assert late <= their_late
    assert loss < their_loss or (late < 0.05 and their_late > 0.5)
    assert late <= 0.15


# --- what plans never do


@st.composite
def progresses(draw: st.DrawFn) -> Progress:
    chunks = []
    for _ in range(draw(st.integers(1, 7))):
        steps = draw(st.lists(st.integers(1, 10**8), max_size=4))
        ends = tuple(sum(steps[: at + 1]) for at in range(len(steps)))
        chunks.append(LevelledChunk(draw(st.integers(1, 4096)), draw(st.integers(1, 10**9)), ends))
    begun = draw(st.integers(0, len(chunks)))
    levels = [
        RECOMPUTE if at < begun else draw(st.sampled_from([MISSING, *range(len(chunk.end_bytes))]))
        for at, chunk in enumerate(chunks)
    ]
    engine = st.builds(PrefillModel, st.floats(0, 1), st.floats(0, 1e-2), st.floats(0, 1e-6))
    wanted = PlanTerms(
        draw(st.floats(1e-3, 100)),
        draw(st.one_of(st.none(), engine)),
        draw(st.floats(1e6, 1e12)),
        loads_first=draw(st.booleans()),
    )
    times = draw(st.floats(0, 50)), draw(st.floats(0, 50))
    return Progress(chunks, wanted, tuple(levels), *times)


links = st.builds(
    lambda p20, more: LinkEstimate(p20 * more, p20), st.floats(1e5, 1e10), st.floats(1, 10)
)


@given(progresses(), links)
def test_every_chunk_comes_to_a_level_that_it_has_or_is_computed_and_what_came_stays(
    progress: Progress, link: LinkEstimate
) -> None:
    found = progress.plan(link)
    first_unloadable = next(
        (
            at
            for at, chunk in enumerate(progress.chunks)
            if not chunk.end_bytes and progress.levels[at] != RECOMPUTE
        ),
        len(progress.chunks),
    )
    for at, action in enumerate(found.actions):
        assert action in (RECOMPUTE, *range(len(progress.chunks[at].end_bytes)))
        if action >= 0:
            assert progress.levels[at] <= action
            assert progress.levels[at] != RECOMPUTE
            assert at < first_unloadable, "no chunk behind one that cannot be loaded"


@given(progresses(), links)
def test_following_a_plan_brings_bases_in_order_and_then_level_by_level(
    progress: Progress, link: LinkEstimate
) -> None:
    found, levels = progress.plan(link), list(progress.levels)
    arrived = [
        chunk.end_bytes[has] if has >= 0 else 0
        for chunk, has in zip(progress.chunks, levels, strict=True)
    ]
    fetched = progress.next_batch(found, arrived, float("inf"))
    for fetch in fetched:
        has, ends = levels[fetch.chunk], progress.chunks[fetch.chunk].end_bytes
        assert fetch.start == (ends[has] if has >= 0 else 0)
        assert fetch.stop == ends[fetch.level]
        levels[fetch.chunk] = fetch.level
    for action, has in zip(found.actions, levels, strict=True):
        assert action in (has, RECOMPUTE)
    order = [fetch.level for fetch in fetched]
    assert order == sorted(order), "what is needed at least comes first"
    bases = [fetch.chunk for fetch in fetched if not fetch.level]
    assert bases == sorted(bases, reverse=progress.is_beside)


@given(progresses(), links)
def test_a_plan_in_time_is_no_later_than_the_deadline_and_than_computing_everything(
    progress: Progress, link: LinkEstimate
) -> None:
    found, wanted = progress.plan(link), progress.terms
    if found.is_in_time:
        assert found.ready_s <= wanted.deadline_s
        assert wanted.prefill is None or found.ready_s <= wanted.compute_s(progress.chunks)


def test_deadline_pressure_stops_refining_and_nothing_else() -> None:
    chunks = [make_chunk() for _ in range(4)]
    bases = Progress(chunks, terms(10.0), (0,) * 4)
    assert bases.plan(at(1e6)).actions == (2, 2, 2, 2)
    short = replace(bases, terms=terms(0.18))
    some = short.plan(at(1e3)).actions
    assert 0 in some
    assert max(some) > 0
    late = replace(short, elapsed_s=0.1799)
    assert late.plan(at(1e3)).actions == (0, 0, 0, 0)
    assert late.next_batch(late.plan(at(1e3)), [100] * 4, 1e9) == []


def test_a_slow_link_has_the_first_chunks_computed_while_the_last_ones_load() -> None:
    chunks = [make_chunk((1000,)) for _ in range(10)]
    engine = PrefillModel(0.0, 0.5 / 256)
    beside = replace(terms(2.6, engine), loads_first=False)
    found = new(chunks, beside).plan(at(2e3))
    assert found.actions == (RECOMPUTE,) * 5 + (0,) * 5
    assert found.is_in_time
    slowest = new(chunks, replace(beside, deadline_s=0.1)).plan(at(2e3))
    assert not slowest.is_in_time
    assert slowest.ready_s == pytest.approx(2.5, abs=0.01), "all that is left is to be soon"


def test_a_chunk_that_cannot_be_loaded_ends_what_is_loaded() -> None:
    chunks = [make_chunk(), LevelledChunk(16, 100), make_chunk()]
    assert new(chunks, terms(10)).plan(at(1e6)).actions == (2, RECOMPUTE, RECOMPUTE)


def test_the_cautious_estimate_decides_how_fine_a_plan_is() -> None:
    chunks = [make_chunk((100, 200)), make_chunk((100, 200))]
    progress = new(chunks, terms(0.35, None))
    found = progress.plan(LinkEstimate(1e9, 1e3))
    assert found.actions == (1, 0)
    assert progress.next_batch(found, [0, 0], 250) == [
        Fetch(0, 0, 0, 100), Fetch(1, 0, 0, 100), Fetch(0, 1, 100, 200),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_chunk((100, 100)),
        lambda: make_chunk((0,)),
        lambda: make_chunk(tokens=0),
        lambda: terms(0.0),
        lambda: replace(terms(1.0), decode_bytes_per_s=-1.0),
        lambda: replace(terms(1.0), tail_tokens=-1),
        lambda: PrefillModel(-1.0, 0.0),
        lambda: PrefillModel(0.0, float("inf")),
        lambda: LinkEstimate(0.0, 1.0),
        lambda: LinkEstimate(1.0, float("nan")),
        lambda: new([make_chunk()], PlanTerms(1.0)),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: object) -> None:
    with pytest.raises(InvalidRequestError, match="="):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("levels", [(), (MISSING, MISSING), (3,), (MISSING - 1,)])
def test_progress_of_other_chunks_is_refused(levels: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="a level of each chunk"):
        Progress([make_chunk()], terms(1.0), levels)


def test_a_plan_of_many_chunks_counts_every_one() -> None:
    chunks = [make_chunk() for _ in range(200)]
    assert new(chunks, terms(1e3)).plan(at(1e6)).actions == (2,) * 200
