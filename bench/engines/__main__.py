"""A real vLLM on the CPU: without a store, with ours, vLLM's own offloading and LMCache.

The same small model runs in a process each; they serve prompts of ``data/traces`` in turns. Figures
are medians of the rounds' ratios. Needs the environment of ``make vllm-env``; the first run makes
LMCache's. A small model computes little for each byte of KV, so the overhead of a store is largest
here.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import TypeAlias

from bench.engines.hangs import DEAD_KEYS, HANG_KEYS, measure_dead_server, measure_hangs
from bench.engines.sides import (
    CHUNK_TOKENS,
    LMCACHE,
    OFFLOAD,
    OURS,
    PLAIN,
    Prompt,
    Result,
    Side,
    Sides,
    Turn,
    chats,
    tokens,
    turns,
)
from bench.lib.processes import PeerSkippedError
from bench.lib.report import Report, median_of, parser_of
from bench.lib.vllm import PYTHON, make_model

WARM_UP = 2
"""Rounds that do not count."""
FEWEST = 4
"""Least number of rounds for a median."""
NEW, AGAIN = "new", "again"
"""A prompt without stored tokens; one whose chunks are all stored."""
MODEL_SCALE = 2
ROUNDS, TURNS_S = 40, 150.0
"""Limits of single prompts."""
HITS = 3
"""Hits in a round."""
PAIRS, PAIRS_S = 120, 100.0
"""Limits of new prompts, with our store and without."""
BATCHES_S, BATCHES_ALONE_S = 130.0, 240.0
BATCH, BATCH_TOKENS, GENERATED = 8, 512, 32
_MOST_ROUNDS, _MANY = 1000, 1 << 12
"""The latter exceeds the number of rounds."""
STORE_KEY = "store_overhead"
KEYS = (
    "tokens_identical", "ttft_hit_vs_recompute", "ttft_hit_vs_lmcache", "ttft_hit_vs_vllm_offload",
    "miss_overhead", STORE_KEY, *DEAD_KEYS,
)  # fmt: skip

Bounds: TypeAlias = tuple[int, int]
"""Least and most."""


def in_turn(sides: Sequence[Side], number: int) -> Sequence[Side]:
    """Return *sides* rotated by *number*, so that no position favours one."""
    first = number % len(sides)
    return [*sides[first:], *sides[:first]]


@dataclass(slots=True)
class Samples:
    """Seconds by side and kind of request, then by round; failed hits are left out."""

    seconds: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    is_same: bool = True
    """Whether all sides generated the same tokens."""

    def take(self, side: Side, kind: str, number: int, result: Result, bounds: Bounds) -> None:
        """Record a request of round *number* if its cached tokens are within *bounds*."""
        if side.has_store and not bounds[0] <= result.cached <= bounds[1]:
            self.lost[side.name] += 1
            return
        self.seconds.setdefault((side.name, kind), {})[number] = result.took_s

    def request(
        self, sides: Sequence[Side], kind: str, number: int,
        prompts: Sequence[Prompt], bounds: Bounds, generated: int = 1,
    ) -> None:  # fmt: skip
        """Send the same prompts to all *sides*, then clear the engines' caches."""
        outputs = []
        for side in in_turn(sides, number):
            result = side.generate(prompts, generated)
            self.take(side, kind, number, result, bounds)
            outputs.append(result.tokens)
            side.clear()
        self.is_same &= all(one == outputs[0] for one in outputs)

    def ratios(self, kind: str, theirs: str) -> list[float]:
        """Return ours over *theirs* in each round that has both, which run under the same load.

        Raises PeerSkippedError if there are too few.
        """
        mine, other = (self.seconds.get((name, kind), {}) for name in (OURS, theirs))
        ratios = [mine[n] / other[n] for n in mine if n >= WARM_UP and n in other]
        if len(ratios) < FEWEST:
            raise PeerSkippedError(f"{len(ratios)} rounds with {OURS}: fewer than {FEWEST}")
        return ratios

    def _ms(self, name: str, kind: str) -> str:
        seconds = self.seconds[name, kind]
        return f"{name} {1e3 * median(seconds[n] for n in seconds if n >= WARM_UP):.1f} ms"

    def add(self, report: Report, key: str, kind: str, theirs: str) -> None:
        """Report a ratio and its interval; an overhead is the part above 1."""
        try:
            ratios = self.ratios(kind, theirs)
        except PeerSkippedError as error:
            report.skip([key], str(error))
            return
        base = key.endswith("overhead")
        middle, low, high = (one - base for one in median_of(ratios))
        report.add(key, middle, self._ms(OURS, kind), self._ms(theirs, kind))
        interval = f"95 % interval of {len(ratios)} rounds"
        report.note(f"  {key}", f"{low:.3f} to {high:.3f}", interval)


def measure_batches(report: Report, sides: Sequence[Side], seconds: float) -> bool:
    """Measure the throughput cost of storing: batches of new prompts, with our store and without.

    Return whether all tokens were the same.
    """
    samples, prompts, began = Samples(), cycle(chats(BATCH_TOKENS)), time.monotonic()
    for number in range(_MOST_ROUNDS):
        batch = [tokens(one, number) for one in islice(prompts, BATCH)]
        samples.request(sides, NEW, number, batch, (0, 0), GENERATED)
        if time.monotonic() - began > seconds:
            break
    samples.add(report, STORE_KEY, NEW, PLAIN)
    return samples.is_same


def one_turn(samples: Samples, sides: Sequence[Side], turn: Turn, number: int) -> None:
    """Send a prompt, its next turn, and the stored part of that; repeat the last on stores.

    The stored part has one token more, as an engine computes the last token itself.
    """
    earlier, prompt = turn.prompts(number)
    whole = (len(prompt) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    shared = turn.history_tokens // CHUNK_TOKENS * CHUNK_TOKENS
    stored, bounds = prompt[: whole + 1], (whole - CHUNK_TOKENS, whole)
    samples.request(sides, NEW, number, [earlier], (0, 0))
    samples.request(sides, "turn", number, [prompt], (shared - CHUNK_TOKENS, whole))
    samples.request(sides, AGAIN, number, [stored], bounds)
    stores = [side for side in sides if side.has_store]
    for again in range(1, HITS if number >= WARM_UP else 1):
        for side in in_turn(stores, number + again):
            samples.take(side, AGAIN, again * _MANY + number, side.generate([stored]), bounds)
            side.clear()


def measure_misses(report: Report, sides: Sequence[Side]) -> bool:
    """Measure new prompts with our store and without, in the order AB, BA, AB.

    Return whether tokens were the same.
    """
    samples, prompts, began = Samples(), cycle(turns(PAIRS // 4)), time.monotonic()
    for number, turn in enumerate(islice(prompts, PAIRS + WARM_UP)):
        samples.request(sides, NEW, number, [turn.prompts(2 * ROUNDS + number)[0]], (0, 0))
        if time.monotonic() - began > PAIRS_S:
            break
    samples.add(report, KEYS[4], NEW, PLAIN)
    return samples.is_same


def measure_turns(report: Report, sides: Sequence[Side]) -> bool:
    """Measure hits and misses of single prompts; return whether all tokens were the same."""
    samples, began = Samples(), time.monotonic()
    for number, turn in enumerate(turns(WARM_UP + ROUNDS)):
        one_turn(samples, sides, turn, number)
        if time.monotonic() - began > TURNS_S:
            break
    for key, theirs in zip(KEYS[1:4], (PLAIN, LMCACHE, OFFLOAD), strict=True):
        samples.add(report, key, AGAIN, theirs)
    for side in sides[1:]:
        report.note(f"  lost hits, {side.name}", str(samples.lost[side.name]), "")
    return samples.is_same


def measure_stores(report: Report, plain: Side, starts: Sides) -> bool:
    """Start the stores and their engines and compare; return whether tokens were the same."""
    # A deadline that a busy machine does not reach: late lookups show in the times.
    sides = [plain, starts.ours(starts.server(), lookup_deadline_ms=2000), starts.offload()]
    try:
        sides.append(starts.lmcache())
    except PeerSkippedError as error:
        report.note("  LMCache", "skipped", str(error))
    is_same = measure_turns(report, sides)
    is_same &= measure_misses(report, sides[:2])
    return measure_batches(report, sides[:2], BATCHES_S) and is_same


def measure(report: Report, folder: Path) -> None:
    make_model(folder / "model", MODEL_SCALE)
    with ExitStack() as stack:
        plain = Sides(stack, folder).plain()
        with ExitStack() as others:
            is_same = measure_stores(report, plain, Sides(others, folder))
        report.add(KEYS[0], float(is_same), "all outputs of all engines", "no store")
        measure_dead_server(report, folder, Sides(stack, folder), plain)


def measure_stores_alone(report: Report, folder: Path) -> None:
    """Measure the cost of storing on throughput for BATCHES_ALONE_S."""
    make_model(folder / "model", MODEL_SCALE)
    with ExitStack() as stack:
        starts = Sides(stack, folder)
        sides = [starts.plain(), starts.ours(starts.server(), lookup_deadline_ms=2000)]
        if not measure_batches(report, sides, BATCHES_ALONE_S):
            raise RuntimeError("the tokens of both sides differ")


PARTS = {
    "all": (measure, KEYS),
    "stores": (measure_stores_alone, (STORE_KEY,)),
    "hang": (measure_hangs, HANG_KEYS),
}
"""Parts of ``--only`` and their keys; the default is ``all``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=PARTS, default="all", help="a part of the figures")
    flags = parser.parse_args(argv)
    report, (work, keys) = Report("engines"), PARTS[flags.only]
    if PYTHON.exists():
        with tempfile.TemporaryDirectory() as folder:
            work(report, Path(folder))
    else:
        report.skip(keys, "no vLLM: run make vllm-env")
    report.print(only_json=flags.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
