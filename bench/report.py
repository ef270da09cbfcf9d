"""How a benchmark reports: a table of rows for people, then one JSON line for machines."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(slots=True)
class Report:
    """Values of one benchmark by key, with what each was compared to."""

    bench: str
    values: dict[str, float] = field(default_factory=dict)
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, value: float, measured: str, against: str = "") -> None:
        """Add one value; *measured* and *against* say what it is made of."""
        self.values[key] = round(value, 4)
        self.rows.append((key, f"{value:.3f}", measured, against))

    def note(self, name: str, figure: str, measured: str) -> None:
        """Add a row to the table alone."""
        self.rows.append((name, figure, measured, ""))

    def skip(self, keys: Sequence[str], reason: str) -> None:
        """Leave *keys* out of the values, saying why."""
        for key in keys:
            self.skipped[key] = reason
            self.rows.append((key, "skipped", reason, ""))

    def print(self, *, only_json: bool) -> None:
        """Print the table (unless *only_json*), then the JSON line."""
        if not only_json:
            print(f"{self.bench} on {platform.processor() or platform.machine()}")
            rows = [("key", "value", "measured", "against"), *self.rows]
            widths = [max(len(row[i]) for row in rows) for i in range(4)]
            for row in rows:
                print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)))
        line: dict[str, object] = {"bench": self.bench, "values": self.values}
        if self.skipped:
            line["skipped"] = self.skipped
        print(json.dumps(line))


def parse_flags(argv: Sequence[str] | None, text: str) -> bool:
    """Return whether ``--json`` was given: the JSON line alone."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    options: bool = parser.parse_args(argv).json
    return options


def cpu_s(work: Callable[[], object]) -> float:
    """Return the processor seconds of *work*, those of all threads of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def best_s(work: Callable[[], object], repeats: int) -> float:
    """Return the shortest of *repeats* runs, in seconds."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def paired(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int
) -> tuple[float, float]:
    """Return the best seconds of both, run in turns so that a busy machine hits both alike."""
    best = [float("inf"), float("inf")]
    for _ in range(repeats):
        for which, work in enumerate((ours, theirs)):
            started = time.perf_counter()
            work()
            best[which] = min(best[which], time.perf_counter() - started)
    return best[0], best[1]


def in_turns(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> tuple[float, float, float]:
    """Run both *rounds* times in turns; each returns the seconds it took.

    Return the median of theirs / ours over the rounds, which a machine that is busy now and
    then cannot move far, and the best seconds of each.
    """
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    ratio = median(their_s / our_s for our_s, their_s in pairs)
    return ratio, min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
