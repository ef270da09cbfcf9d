"""How near a blend is to a full prefill, by selector and ratio, case by case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bench.blend_cases import Case
from bench.blend_designed import answered
from kvstore.client.blend.engine import BlendResult
from kvstore.client.blend.gate import compare
from kvstore.client.blend.selectors import SELECTORS

RATIOS = (0.05, 0.10, 0.15, 0.30, 0.50, 1.0)
RESAMPLES = 2000

Key = tuple[str, float]
NAIVE: Key = ("naive", 0.0)
WHOLE: Key = ("all", 1.0)


@dataclass(frozen=True, slots=True)
class Mark:
    """What one blend is worth: KL a scored token, the same likeliest token, right answers."""

    divergence: float
    agreement: float
    exact_match: float
    rows: float
    """Rows computed, of all rows of all layers."""


@dataclass(slots=True)
class Marks:
    """Marks of all cases, in their order, by selector and ratio."""

    by_key: dict[Key, list[Mark]] = field(default_factory=dict)

    def of(self, key: Key, name: str) -> NDArray[np.float64]:
        """Return one figure of every case."""
        return np.array([getattr(mark, name) for mark in self.by_key[key]])

    def mean(self, key: Key, name: str) -> float:
        """Return its mean."""
        return float(self.of(key, name).mean())


def keys() -> list[Key]:
    """Return what is measured: no rows at all, and each selector at each ratio."""
    chosen = [(name, ratio) for name in SELECTORS for ratio in RATIOS if ratio < 1]
    return [NAIVE, *chosen, WHOLE]


def measure(cases: Iterable[Case], judge: Callable[[Case, BlendResult], Mark]) -> Marks:
    """Return the marks of *cases*."""
    marks = Marks()
    for case in cases:
        for name, ratio in keys():
            selector = name if name in SELECTORS else "hybrid"
            plan = case.plan(ratio, selector)
            result = case.engine.blender.blend(plan, case.source)
            if result.report.failure:
                raise RuntimeError(result.report.failure)
            marks.by_key.setdefault((name, ratio), []).append(judge(case, result))
    return marks


def judge_riddle(case: Case, result: BlendResult) -> Mark:
    """Score the rows that have to answer: no answer is in the prompt."""
    full = case.full.logits[-len(case.question) :]
    shadow = compare(full[1::2], result.logits[1::2])
    right = answered(result.logits, case.riddle)
    return Mark(shadow.divergence, shadow.agreement, sum(right) / len(right), _rows(case, result))


def judge_text(case: Case, result: BlendResult) -> Mark:
    """Score the tokens behind the question, which no selector saw."""
    wanted, found = case.after(case.full), case.after(result)
    shadow = compare(wanted, found)
    is_right = found.argmax(-1).tolist() == list(case.scored)
    return Mark(shadow.divergence, shadow.agreement, float(is_right), _rows(case, result))


def _rows(case: Case, result: BlendResult) -> float:
    rows = result.report.rows
    return sum(rows) / len(rows) / len(case.tokens)


def difference(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> Sequence[float]:
    """Return the mean of ours - theirs over the cases, and its paired 95 % interval."""
    return _interval(lambda pick: float((ours[pick] - theirs[pick]).mean()), len(ours))


def quotient(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> Sequence[float]:
    """Return the mean of ours over the mean of theirs, and its paired 95 % interval."""
    least = np.finfo(np.float64).tiny
    return _interval(
        lambda pick: float(ours[pick].mean() / max(theirs[pick].mean(), least)), len(ours)
    )


def _interval(value: Callable[[NDArray[np.int64]], float], count: int) -> Sequence[float]:
    rng = np.random.default_rng(0)
    picks = rng.integers(0, count, (RESAMPLES, count))
    drawn = np.array([value(pick) for pick in picks])
    low, high = np.quantile(drawn, [0.025, 0.975])
    return value(np.arange(count)), float(low), float(high)


def table(title: str, marks: Marks, columns: Sequence[tuple[str, str, float]]) -> list[str]:
    """Return lines of a table: one for each selector and ratio. *columns*: name, field, unit."""
    lines = [
        title,
        "  " + "selector".ljust(18) + "ratio  " + "  ".join(c[0].rjust(10) for c in columns),
    ]
    for key in keys():
        cells = "  ".join(f"{marks.mean(key, name) * unit:10.3f}" for _, name, unit in columns)
        lines.append(f"  {key[0]:18s}{key[1]:4.0%}   {cells}")
    return lines
