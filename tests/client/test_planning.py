"""What is worth loading: plans against all possible ones, the costs, what a link gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from helpers.prompts import keys_of
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import Client
from kvstore.client.planning import (
    MISSING,
    RECOMPUTE,
    SAMPLES_KEPT,
    Fetch,
    LevelledChunk,
    LinkEstimate,
    LinkMeter,
    PlanTerms,
    PrefillModel,
    Progress,
    chunks_worth_loading,
)
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import EngineTerms

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
    for seed in range(200):
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
    assert in_time > 75


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
    """And what is called in time is, and no later than computing everything."""
    found, wanted = progress.plan(link), progress.terms
    if found.is_in_time:
        assert found.ready_s <= wanted.deadline_s
        assert wanted.prefill is None or found.ready_s <= wanted.compute_s(progress.chunks)
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
    assert bases == sorted(bases, reverse=progress.is_concurrent)


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


def test_what_is_not_decoded_yet_delays_what_is_loaded_and_not_the_engine_beside_it() -> None:
    wanted = PlanTerms(9.0, PrefillModel(0.0, 1e-4), 600 / 0.13, loads_first=False)
    levels = (RECOMPUTE,) * 4 + (MISSING,) * 8 + (0,) * 4
    progress = Progress([make_chunk()] * 16, wanted, levels, 0.1, 0.1)
    assert progress.plan(at(1e9)).actions.count(RECOMPUTE) < 12
    found = replace(progress, undecoded_bytes=4 * 600).plan(at(1e9))
    assert found.actions.count(RECOMPUTE) == 12
    assert found.ready_s == pytest.approx(0.1 + 4 * 0.13)


def test_the_cautious_estimate_decides_how_fine_a_plan_is() -> None:
    chunks = [make_chunk((100, 200)), make_chunk((100, 200))]
    progress = new(chunks, terms(0.35, None))
    found = progress.plan(LinkEstimate(1e9, 1e3))
    assert found.actions == (1, 0)
    assert progress.next_batch(found, [0, 0], 250) == [
        Fetch(0, 0, 0, 100), Fetch(1, 0, 0, 100), Fetch(0, 1, 100, 200),
    ]  # fmt: skip


def test_what_cannot_be_is_refused_by_name() -> None:
    makers: list[Callable[[], object]] = [
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
    ]
    for make in makers:
        with pytest.raises(InvalidRequestError, match="="):
            make()
    wrong: list[tuple[int, ...]] = [(), (MISSING, MISSING), (3,), (MISSING - 1,)]
    for levels in wrong:
        with pytest.raises(InvalidRequestError, match="a level of each chunk"):
            Progress([make_chunk()], terms(1.0), levels)


INSTANT = PrefillModel(0.0, 1e-12)


def test_a_prompt_s_length_that_cannot_be_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="prompt_tokens"):
        client.lookup(keys=keys_of(client, 1, 1), engine=EngineTerms(INSTANT, -1))


CURVED = PrefillModel(0.01, 1e-4, 1e-8)


def spans(count: int, tokens: int = 256) -> list[tuple[int, int]]:
    return [(at * tokens, (at + 1) * tokens) for at in range(count)]


def test_prefill_has_a_start_a_linear_and_a_context_term() -> None:
    assert CURVED.seconds(0, 10**6) == 0
    assert CURVED.seconds(100, 1000) == pytest.approx(0.01 + 0.01 + 0.001)


@given(st.lists(st.integers(0, 10**6), max_size=12), st.integers(0, 300))
def test_no_other_count_ends_sooner(loads: list[int], more: int) -> None:
    total = 256 * len(loads) + more
    if not total:
        return

    def ends_s(count: int) -> float:
        rest = max(1, total - 256 * count) if count else total
        return sum(loads[:count]) / 1e6 + CURVED.seconds(rest, total - rest)

    found = chunks_worth_loading(loads, spans(len(loads)), total, CURVED)
    best = min(map(ends_s, range(len(loads) + 1)))
    assert ends_s(found) == pytest.approx(best)


def test_a_link_is_what_was_told_until_it_was_measured() -> None:
    meter = LinkMeter(1e9)
    assert meter.estimate().mean_bytes_per_s == meter.estimate().p20_bytes_per_s == 1e9
    meter.observe(0, 1.0)
    assert meter.estimate().mean_bytes_per_s == 1e9
    meter.observe(1000, 1.0)
    assert meter.estimate().mean_bytes_per_s == pytest.approx(1000)
    meter = LinkMeter(1.0)
    meter.observe(10**6, 0.0)
    assert meter.estimate().p20_bytes_per_s >= 1e12, "it took no time"


def test_four_out_of_five_transfers_were_as_fast_as_the_cautious_estimate() -> None:
    meter, draw = LinkMeter(1.0), random.Random(1)
    seen = [draw.uniform(1e6, 1e9) for _ in range(3 * SAMPLES_KEPT)]
    for speed in seen:
        meter.observe(int(speed), 1.0)
    last = seen[-SAMPLES_KEPT:]
    estimate = meter.estimate()
    slower = sum(speed < estimate.p20_bytes_per_s - 1 for speed in last)
    assert 0.15 * SAMPLES_KEPT <= slower <= 0.2 * SAMPLES_KEPT
    assert min(last) < estimate.mean_bytes_per_s < max(last)
