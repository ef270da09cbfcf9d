"""What engines took, by contestant, kind of request and round, and how it compares."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from bench.engines_sides import Side, Taken
from bench.peer_process import PeerSkippedError
from bench.report import Report

WARM_UP = 2
"""Rounds that do not count: first requests wait for what is made once."""
FEWEST = 4
"""Rounds of which there is a median."""
CPU = ", CPU"
NEW, TURN, AGAIN = "new", "turn", "again"
"""A prompt that nobody knows; one whose beginning is stored; one of which all is stored."""

Bounds: TypeAlias = tuple[int, int]
"""At least, and at most."""
Kind: TypeAlias = tuple[str, str]
"""A contestant, and the kind of request."""

_DRAWS, _SEED, _TAIL = 1000, 20_26, 0.025


def in_turn(sides: Sequence[Side], number: int) -> Sequence[Side]:
    """Return *sides* in an order whose first changes with *number*: no one profits from another."""
    first = number % len(sides)
    return [*sides[first:], *sides[:first]]


def interval(found: Sequence[float]) -> tuple[float, float]:
    """Return between what the median lies with 95 %, by drawing as many again and again.

    Efron, Bootstrap methods: another look at the jackknife, 1979, section 2; percentiles.
    """
    draw = random.Random(_SEED)
    medians = sorted(median(draw.choices(found, k=len(found))) for _ in range(_DRAWS))
    at = round(_TAIL * _DRAWS)
    return medians[at], medians[-1 - at]


@dataclass(slots=True)
class Samples:
    """Seconds by contestant and kind of request, then by round; of hits that did not come none."""

    seconds: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    is_same: bool = True

    def take(self, side: Side, kind: str, number: int, taken: Taken, wanted: Bounds) -> None:
        """Add a request of round *number* that has to have found as many tokens as *wanted* says.

        The CPU's seconds are kept beside those of the clock.
        """
        if side.has_store and not wanted[0] <= taken.cached <= wanted[1]:
            self.lost[side.name] += 1
            return
        for name, took_s in ((kind, taken.took_s), (kind + CPU, taken.cpu_s)):
            self.seconds.setdefault((side.name, name), {})[number] = took_s

    def ratios(self, ours: Kind, theirs: Kind) -> list[float]:
        """Return the ratio of each round that has both. Raises PeerSkippedError of too few."""
        mine, other = (self.seconds.get(one, {}) for one in (ours, theirs))
        ratios = [mine[n] / other[n] for n in mine if n >= WARM_UP and n in other]
        if len(ratios) < FEWEST:
            raise PeerSkippedError(f"{len(ratios)} rounds with {ours[0]}: fewer than {FEWEST}")
        return ratios

    def ratio(self, ours: Kind, theirs: Kind) -> float:
        """Return the median of the rounds' ratios: what is slow for a while is slow for both.

        Raises PeerSkippedError when too few rounds have both.
        """
        return median(self.ratios(ours, theirs))

    def ms(self, kind: Kind) -> str:
        """Return the median of a contestant, in words."""
        found = [s for number, s in self.seconds.get(kind, {}).items() if number >= WARM_UP]
        return f"{kind[0]} {1e3 * median(found):.1f} ms" if found else f"{kind[0]} never"

    def add(self, report: Report, key: str, ours: Kind, theirs: Kind) -> None:
        """Report a ratio, and between what it lies; an overhead is what it is above 1."""
        try:
            ratios = self.ratios(ours, theirs)
        except PeerSkippedError as error:
            report.skip([key], str(error))
            return
        base = key.endswith("overhead")
        report.add(key, median(ratios) - base, self.ms(ours), self.ms(theirs))
        low, high = (one - base for one in interval(ratios))
        words = f"with 95 % of what {len(ratios)} rounds might have been"
        report.note(f"  {key}", f"{low:.3f} to {high:.3f}", words)

    def note(self, report: Report, ours: Kind, theirs: Kind) -> None:
        """Add a ratio to the table alone."""
        try:
            value = f"{self.ratio(ours, theirs):.3f}"
        except PeerSkippedError as error:
            value = str(error)
        report.note(f"  {ours[1]}, {ours[0]}", value, f"{self.ms(ours)}, {self.ms(theirs)}")
