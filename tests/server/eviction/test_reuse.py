"""What is remembered of accesses, the classes of chunks, and the chance of another access."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import (
    MAX_CLASSES,
    MAX_GROUPS,
    NO_INFO,
    AccessHistory,
    ChunkClasses,
    InsertInfo,
    RefreshReport,
    SteadyClock,
)
from kvstore.server.eviction.reuse_statistics import (
    AGE_BINS,
    EDGES_S,
    WIDTHS_S,
    AgeSlots,
    DensityTable,
    ReuseForecast,
    bins_of,
    gittins,
    reuse_chance,
)

CHUNK_TOKENS = 512


def these(*numbers: int) -> NDArray[np.intp]:
    return np.array(numbers, np.intp)


def prompt(
    history: AccessHistory, *numbers: int, at_s: float = 0.0, facts: InsertInfo = NO_INFO
) -> None:
    """Look a prompt up and store what is not known of it, as a store does."""
    known = [row for row in numbers if history.hits_of(row)]
    history.requested(these(*known), len(numbers), at_s)
    fresh = [row for row in numbers if row not in known]
    history.seen_chain(these(*fresh), known[-1] if known else NO_ROW, facts, at_s)


def test_the_first_sight_is_an_asking_and_storing_again_is_none() -> None:
    history = AccessHistory()
    prompt(history, 1, 2, at_s=5.0)
    assert (history.hits_of(1), history.last_s[1]) == (1, 5.0)
    history.seen_chain(np.array([1]), NO_ROW, NO_INFO, 7.0)
    assert (history.hits_of(1), history.last_s[1]) == (1, 5.0)
    prompt(history, 1, 2, 3, at_s=9.0)
    assert [history.hits_of(row) for row in (1, 2, 3, 4, 9_999)] == [2, 2, 1, 0, 0]
    assert history.last_s[3] == 9.0


def test_a_prompt_that_begins_with_all_of_another_is_its_next_turn() -> None:
    for second, turn in [
        ((1, 2, 3, 4, 5, 6), 1),  # all of the first, and more
        ((1, 2, 3, 7, 8), 1),  # all but its end, which filled no chunk
        ((1, 2, 7, 8), 0),  # something else from the middle on
        ((1, 7), 0),
        ((7, 8), 0),
        ((1, 2, 3, 4), 1),  # the same again
    ]:
        history = AccessHistory()
        prompt(history, 1, 2, 3, 4, facts=InsertInfo(tokens_full=False))
        prompt(history, *second, at_s=1.0)
        assert {history.turns[row] for row in second} == {turn}
        assert {history.chunks[row] for row in second} == {len(second)}


def class_of(kinds: ChunkClasses, own: int, hits: int, context: int) -> int:
    return kinds.of(np.array([own], np.uint8), np.array([hits], np.uint8), context).item()


def test_classes_tell_apart_what_they_are_said_to() -> None:
    kinds = ChunkClasses(CHUNK_TOKENS)

    def of(own: int = 0, hits: int = 1, turn: int = 0, chunks: int = 3) -> int:
        return class_of(kinds, own, hits, kinds.context(turn, chunks))

    base = of()
    assert of(hits=2) != base
    assert of(hits=3) == of(hits=200) != of(hits=2)
    assert [of(turn=turn) == of(turn=3) for turn in (2, 4, 5, 6)] == [False, True, True, False]
    assert of(turn=6) == of(turn=255)
    assert of(chunks=1) != base == of(chunks=31) != of(chunks=32)
    assert len({of(own=own) for own in range(12)}) == 12
    assert kinds.count < 18 + 30


def test_where_numbers_run_out_a_chunk_is_of_its_coarser_class() -> None:
    kinds = ChunkClasses(CHUNK_TOKENS)
    contexts = [kinds.context(turn, chunks) for turn in (0, 1, 2, 3, 6) for chunks in (1, 9, 99)]
    found = {
        (own, hits, context): class_of(kinds, own, hits, context)
        for own in range(60)
        for hits in (1, 2, 3)
        for context in contexts
    }
    assert kinds.count == MAX_CLASSES
    assert max(found.values()) == MAX_CLASSES - 1
    (own, hits, _), number = list(found.items())[-1]
    assert number == own % 6 * 3 + hits - 1
    assert all(kinds.coarse[kinds.coarse] == kinds.coarse)


def test_groups_beyond_the_limit_are_one() -> None:
    kinds = ChunkClasses(CHUNK_TOKENS)
    numbers = [kinds.group(group) for group in range(100, 100 + 2 * MAX_GROUPS)]
    assert numbers == [*range(1, MAX_GROUPS + 1), *[MAX_GROUPS + 1] * MAX_GROUPS]
    assert kinds.group(0) == 0
    assert kinds.group(100) == 1


def test_a_hint_changes_the_class_and_followers_hear_of_it_once() -> None:
    history, heard = AccessHistory(), []
    history.on_hint.append(lambda changed: heard.append(changed.tolist()))
    prompt(history, 1, 2, 3)
    before = history.classes[2]
    history.hint(these(2, 3, 77), 1)
    history.hint(these(2, 3), 1)
    assert heard == [[2, 3]]
    assert history.classes[2] != before == history.classes[1]
    assert [history.reuse_of(row) for row in (1, 2, 77)] == [0, 1, 0]
    history.hint(these(2), 0)
    assert history.classes[2] == before


def test_what_was_forgotten_is_met_as_new() -> None:
    history = AccessHistory()
    prompt(history, 1, 2, facts=InsertInfo(flops=5.0, group=2, reuse=2))
    prompt(history, 1, 2, at_s=10.0)
    history.forget_all(np.array([2]))
    history.forget_all(np.array([2]))
    assert not history.hits_of(2)
    assert (history.flops_of(2), history.reuse_of(2), history.hits_of(2)) == (0.0, 0, 0)
    prompt(history, 2, at_s=11.0)
    assert history.hits_of(2) == 1
    history.table.refresh(12.0, history.kinds.count)
    asked, ends = history.table.counts(12.0, history.kinds.count)
    assert asked.sum() == 2
    assert ends.sum() == 3  # two wait, and one was forgotten while it did


def test_everybody_known_waits_in_just_one_class_whatever_happened() -> None:
    draw = np.random.default_rng(3)
    history = AccessHistory()
    for step in range(600):
        numbers = draw.integers(1, 60, 6)
        match step % 4:
            case 0 | 1:
                prompt(history, *dict.fromkeys(numbers.tolist()), at_s=float(draw.normal(step, 9)))
            case 2:
                history.requested(numbers, 6, float(step))  # some twice, some unknown
                history.hint(numbers, int(draw.integers(3)))
            case 3:
                history.forget_all(numbers[:2])
    history.table.settle(700.0)
    history.table.refresh(700.0, history.kinds.count)
    _, ends = history.table.counts(700.0, history.kinds.count)
    known = np.flatnonzero(history.hits)
    waiting = ends - history.table._forgotten[: len(ends)]
    counted = np.bincount(history.classes[known], minlength=len(ends))
    assert waiting.sum(axis=1).tolist() == counted.tolist()


def test_watchers_are_told_what_was_asked_for_since_the_last_refresh() -> None:
    history, reports = AccessHistory(), list[RefreshReport]()
    history.on_refresh.append(reports.append)
    for step in range(20):
        prompt(history, 1, 2 + step, at_s=40.0 * step)
    assert len(reports) == 2
    assert sum(report.requests for report in reports) == 20
    assert sum(report.chunks for report in reports) == 40
    assert set(reports[1].rows.tolist()) == {1}
    assert set(reports[1].ages_s.tolist()) == {40.0}


def test_a_steady_clock_stands_while_the_callers_goes_back() -> None:
    clock = SteadyClock()
    assert [clock.time_s(at) for at in (5.0, 7.0, 1.0, 1.5, 2.0)] == [5.0, 7.0, 7.0, 7.5, 8.0]


COARSE = np.array([0, 1, 0, 1, 1])
CLASSES = len(COARSE)


def u16(*classes: int) -> NDArray[np.uint16]:
    return np.array(classes, np.uint16)


def test_bins_are_three_an_octave_from_one_second() -> None:
    ages_s = np.array([-5.0, 0.0, 1.0, 1.01, 1.9, 2.1, 1e9, np.inf])
    assert bins_of(ages_s).tolist() == [0, 0, 0, 1, 3, 4, 39, 39]
    assert WIDTHS_S[:-1].sum() == pytest.approx(EDGES_S[-1])


def plain_gittins(hazards: list[float], widths_s: list[float]) -> list[float]:
    """For each age the best horizon, by trying all: hits to be had over time to be spent."""
    best = []
    for age in range(len(hazards)):
        waiting, hits, time_s, ratios = 1.0, 0.0, 0.0, []
        for ahead in range(age, len(hazards)):
            hits += waiting * hazards[ahead]
            time_s += waiting * widths_s[ahead] * (1 - hazards[ahead] / 2)
            waiting *= 1 - hazards[ahead]
            ratios.append(hits / time_s)
        best.append(max(ratios))
    return best


def test_the_index_is_the_best_ratio_of_hits_to_time() -> None:
    for seed in range(5):
        draw = np.random.default_rng(seed)
        hazards = draw.random((4, AGE_BINS)) ** 3
        hazards[0, 5:] = 0.0
        hazards[1, 7] = 1.0
        expected = [plain_gittins(row, WIDTHS_S.tolist()) for row in hazards.tolist()]
        assert np.allclose(gittins(hazards, WIDTHS_S), expected, rtol=1e-9)


def plain_hazards(
    asked: NDArray[np.float64], ends: NDArray[np.float64], strength: float = 100.0
) -> NDArray[np.float64]:
    """h = (asked + k h_coarser) / (at risk + k), from the class to the coarser one to all."""

    def shrunk(events: float, at_risk: float, told: float) -> float:
        return (events + strength * told) / (at_risk + strength)

    out = np.zeros((CLASSES, AGE_BINS))
    for kind in range(CLASSES):
        alike = COARSE[kind] == COARSE
        for age in range(AGE_BINS):
            first = 0.01 if age else 0.01 / (2 ** (1 / 3) - 1)
            pooled = shrunk(asked[:, age].sum(), ends[:, age:].sum(), first)
            coarser = shrunk(asked[alike, age].sum(), ends[alike, age:].sum(), pooled)
            out[kind, age] = shrunk(asked[kind, age], ends[kind, age:].sum(), coarser)
    return out


def test_the_table_is_what_the_formula_says_of_all_that_happened() -> None:
    for seed in range(2):
        draw = np.random.default_rng(seed)
        table = DensityTable(COARSE)
        waiting: list[tuple[int, float]] = []
        asked, gone = np.zeros((CLASSES, AGE_BINS)), np.zeros((CLASSES, AGE_BINS))
        now_s = 0.0
        for step in range(400):
            now_s += float(draw.exponential(3.0))
            kinds = draw.integers(0, CLASSES, 6)
            table.wait(kinds.astype(np.uint16), now_s)
            waiting += [(int(kind), now_s) for kind in kinds]
            draw.shuffle(waiting)
            left, waiting = waiting[:4], waiting[4:]
            how = table.forgotten if step % 5 == 0 else table.requested
            how(u16(*(kind for kind, _ in left)), np.array([since for _, since in left]), now_s)
            for kind, since_s in left:
                (gone if step % 5 == 0 else asked)[kind, bins_of(np.array([now_s - since_s]))] += 1
            if step % 50 == 0:
                table.refresh(now_s, CLASSES)
        table.refresh(now_s, CLASSES)
        # Those that wait still are counted by age up to a few percent: here they are as counted.
        counted, ends = table.counts(now_s, CLASSES)
        assert (counted == asked).all()
        still = ends - gone
        assert still.sum() == len(waiting)
        expected = plain_hazards(asked, asked + ends)
        assert np.allclose(
            table.values, [plain_gittins(row, WIDTHS_S.tolist()) for row in expected.tolist()]
        )
        exact = np.zeros((CLASSES, AGE_BINS))
        for kind, since_s in waiting:
            exact[kind, bins_of(np.array([now_s - since_s]))] += 1
        later = np.cumsum((still - exact).sum(0))
        assert np.abs(later).max() < 0.06 * len(waiting)


def test_slots_are_few_and_lose_nobody_however_long_it_goes_on() -> None:
    draw = np.random.default_rng(1)
    slots, came, now_s = AgeSlots(), [], 0.0
    for step in range(3_000):
        now_s += float(draw.exponential(20.0))
        slots.open(now_s)
        slots.add(u16(1), np.array([now_s]), 1)
        came.append(now_s)
        if step % 3 == 2:
            gone = came.pop(int(draw.integers(len(came))))
            slots.add(u16(1), np.array([gone]), -1)
        assert len(slots._starts_s) < 300
    counted = slots.by_bin(now_s, EDGES_S, 2)
    assert counted.sum(axis=1).tolist() == [0, len(came)]
    exact = np.bincount(bins_of(now_s - np.array(came)), minlength=AGE_BINS)
    assert np.abs(np.cumsum(counted.sum(0) - exact)).max() < 0.05 * len(came)


def test_the_age_behind_which_a_count_came_is_that_of_the_stack() -> None:
    slots = AgeSlots()
    for now_s in range(1, 2001):
        slots.open(float(now_s))
        slots.add(u16(0), np.array([float(now_s)]), 1)
    for count in (10, 100, 500, 1500):
        assert slots.age_s(2000.0, count) == pytest.approx(count, rel=0.06, abs=2)
    assert slots.age_s(2000.0, 2000) == np.inf
    assert AgeSlots().age_s(5.0, 1) == np.inf


def test_a_refresh_in_steps_changes_nothing_before_its_last_and_ends_in_the_same() -> None:
    coarse = np.zeros(100, np.intp)
    whole, steps = DensityTable(coarse), DensityTable(coarse)
    kinds = np.arange(100, dtype=np.uint16)
    for table in (whole, steps):
        table.wait(kinds, 1.0)
        table.requested(kinds[::2], np.ones(50), 9.0)
    whole.refresh(10.0, 100)
    before = steps.values.copy()
    done = steps.refreshing(10.0, 100)
    count = 0
    for _ in done:
        count += 1
        np.testing.assert_array_equal(steps.values, before)
    assert count == 5
    np.testing.assert_array_equal(steps.values, whole.values)
    assert (steps.values != before).any()


@pytest.mark.parametrize(
    ("requests", "hits", "hit_age_s", "ages_s", "least", "most"),
    [
        (1000, 1000, 5, (0.0,), 0.99, 1.0),  # it always comes again
        (1000, 0, 5, (0.0,), 0.0, 0.01),
        (1000, 500, 5, (0.0,), 0.49, 0.51),
        (1000, 500, 5, (100.0,), 0.0, 0.01),  # it has waited past the usual age
        (100, 100, 1000, (0.0, 10.0), 0.0, 0.02),  # the tier gives it up before that
        (100, 100, 1000, (0.0, 5000.0), 0.98, 1.0),
    ],
)
def test_a_chance_is_of_hits_that_are_still_to_come_while_the_chunk_stays(
    requests: int, hits: int, hit_age_s: float, ages_s: tuple[float, ...], least: float, most: float
) -> None:
    found = np.zeros(AGE_BINS)
    found[bins_of(np.array([float(hit_age_s)]))] = hits
    assert least <= reuse_chance(requests, found, *ages_s) <= most


@given(
    st.lists(st.integers(0, 9), min_size=AGE_BINS, max_size=AGE_BINS),
    st.integers(0, 400),
    st.floats(-10, 1e9),
    st.floats(0, 1e9),
)
def test_a_chance_is_one_whatever_was_counted(
    counts: list[int], requests: int, age_s: float, stay_s: float
) -> None:
    found = np.array(counts, np.float64)
    assert 0.0 <= reuse_chance(requests, found, age_s, age_s + stay_s) <= 1.0
    assert 0.0 <= reuse_chance(requests, found, age_s) <= 1.0


def ask(forecast: ReuseForecast, rows: list[int], now_s: float) -> None:
    """Look a prompt up and store what is missing of it, whose last chunk is not full."""
    history = forecast.history
    new = next((at for at, row in enumerate(rows) if not forecast.history.hits_of(row)), len(rows))
    known = np.array(rows[:new], np.intp)
    forecast.requested(known, len(rows), now_s)
    history.requested(known, len(rows), now_s)
    parent = rows[new - 1] if new else NO_ROW
    for row in rows[new:]:
        facts = InsertInfo(tokens_full=row != rows[-1])
        history.seen_chain(np.array([row]), parent, facts, now_s)
        forecast.seen(row, parent, facts, now_s)
        parent = row


def test_a_forecast_learns_that_prompts_are_continued_but_their_ends_are_not() -> None:
    forecast = ReuseForecast(AccessHistory())
    for at in range(200):
        body = [10 * at + 1, 10 * at + 2]
        ask(forecast, [*body, 10 * at + 3], 10.0 * at)
        ask(forecast, [*body, 10 * at + 4], 10.0 * at + 5)
    ask(forecast, [9001, 9002, 9003], 3000.0)
    assert forecast.chance(9001, 3000.0) > 0.9
    assert forecast.chance(9003, 3000.0) < 0.1
    assert (forecast.history.hits_of(1), forecast.history.hits_of(9001)) == (2, 1)


@given(st.lists(st.tuples(st.lists(st.integers(1, 9), max_size=5, unique=True), st.floats(-9, 9))))
def test_clocks_that_jump_leave_chances(prompts: list[tuple[list[int], float]]) -> None:
    forecast = ReuseForecast(AccessHistory())
    for rows, now_s in prompts:
        ask(forecast, rows, now_s)
        assert all(0.0 <= forecast.chance(row, -now_s) <= 1.0 for row in range(10))
        forecast.evicted(1, now_s)
    assert math.isfinite(forecast.chance(1, 0.0))
