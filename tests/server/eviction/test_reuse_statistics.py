"""The DensityTable against the formula written out, and AgeSlots against counting everybody."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.server.eviction.reuse_statistics import (
    AGE_BINS,
    EDGES_S,
    WIDTHS_S,
    AgeSlots,
    DensityTable,
    bins_of,
    gittins,
)

COARSE = np.array([0, 1, 0, 1, 1])
CLASSES = len(COARSE)


def u16(*classes: int) -> NDArray[np.uint16]:
    return np.array(classes, np.uint16)


def test_bins_are_three_an_octave_from_one_second() -> None:
    for age_s, bin_ in [
        (-5.0, 0),
        (0.0, 0),
        (1.0, 0),
        (1.01, 1),
        (1.9, 3),
        (2.1, 4),
        (1e9, 39),
        (np.inf, 39),
    ]:
        assert bins_of(np.array([age_s])) == bin_
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


def test_a_chunk_whose_class_was_corrected_is_counted_where_it_belongs() -> None:
    table = DensityTable(COARSE)
    table.wait(u16(0, 0, 1), 5.0)
    table.moved(u16(0), u16(3), np.array([5.0]), 9.0)
    table.refresh(50.0, CLASSES)
    _, ends = table.counts(50.0, CLASSES)
    assert ends.sum(axis=1).tolist() == [1, 1, 0, 1, 0]


def test_events_are_counted_before_there_are_too_many() -> None:
    table = DensityTable(COARSE)
    for step in range(5_000):
        table.wait(u16(0), float(step))
    table.settle(5_000.0)
    assert table.counts(5_000.0, CLASSES)[1].sum() == 5_000


def test_of_many_classes_a_refresh_works_out_a_part() -> None:
    limit = 600
    table = DensityTable(np.zeros(limit, np.intp))
    before = table.values.copy()
    table.wait(np.arange(limit, dtype=np.uint16), 0.0)
    changed = []
    for turn in range(5):
        table.refresh(60.0 + turn, limit)
        changed.append(int((table.values != before).any(axis=1).sum()))
    assert changed[0] == 128
    assert changed[-1] == limit


# --- slots of age


def by_bin(slots: AgeSlots, now_s: float) -> NDArray[np.float64]:
    return slots.by_bin(now_s, EDGES_S, 2)


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
    assert by_bin(slots, now_s).sum(axis=1).tolist() == [0, len(came)]
    exact = np.bincount(bins_of(now_s - np.array(came)), minlength=AGE_BINS)
    assert np.abs(np.cumsum(by_bin(slots, now_s).sum(0) - exact)).max() < 0.05 * len(came)


def test_the_age_behind_which_a_count_came_is_that_of_the_stack() -> None:
    slots = AgeSlots()
    for now_s in range(1, 2001):
        slots.open(float(now_s))
        slots.add(u16(0), np.array([float(now_s)]), 1)
    for count in (10, 100, 500, 1500):
        assert slots.age_s(2000.0, count) == pytest.approx(count, rel=0.06, abs=2)
    assert slots.age_s(2000.0, 2000) == np.inf
    assert AgeSlots().age_s(5.0, 1) == np.inf


def test_a_clock_that_stands_or_leaps_ahead_keeps_the_counts() -> None:
    slots = AgeSlots()
    for now_s in (0.0, 0.0, 1e12, 1e12, 2e12):
        slots.open(now_s)
        slots.add(u16(0), np.array([now_s]), 1)
    assert slots.by_bin(2e12, EDGES_S, 1).sum() == 5
    assert len(slots._starts_s) < 300


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
