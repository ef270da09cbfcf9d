"""A real vLLM on this machine's CPU: without a store, with ours, vLLM's own offloading and LMCache.

The same small model in a process each, asked in turns about prompts of ``data/traces``; medians of
the rounds' ratios. Needs the environment of ``make vllm-env``; LMCache's is made by the first run.
For each byte of KV a small model computes far less than a large one, so what a store adds weighs
more here than anywhere else.
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
    Field,
    Prompt,
    Side,
    Taken,
    Turn,
    chats,
    tokens,
    turns,
)
from bench.lib.processes import PeerSkippedError
from bench.lib.report import Report, median_of, parser_of
from bench.lib.vllm import PYTHON, make_model

WARM_UP = 2
"""Rounds that do not count: first requests wait for what is made once."""
FEWEST = 4
"""Rounds of which there is a median."""
NEW, AGAIN = "new", "again"
"""A prompt that nobody knows; one of which all is stored."""
MODEL_SCALE = 2
ROUNDS, TURNS_S = 40, 150.0
"""Of prompts alone, as many as the seconds allow."""
HITS = 3
"""Times a round asks for what is stored: it takes little."""
PAIRS, PAIRS_S = 120, 100.0
"""Of prompts that nobody knows, with our store and without."""
BATCHES_S, BATCHES_ALONE_S = 130.0, 240.0
BATCH, BATCH_TOKENS, GENERATED = 8, 512, 32
_MOST_ROUNDS, _MANY = 1000, 1 << 12
"""The latter: more than there are rounds."""
STORE_KEY = "store_overhead"
KEYS = (
    "tokens_identical", "ttft_hit_vs_recompute", "ttft_hit_vs_lmcache", "ttft_hit_vs_vllm_offload",
    "miss_overhead", STORE_KEY, *DEAD_KEYS,
)  # fmt: skip

Bounds: TypeAlias = tuple[int, int]
"""At least, and at most."""


def in_turn(sides: Sequence[Side], number: int) -> Sequence[Side]:
    """Return *sides* in an order whose first changes with *number*: no one profits from another."""
    first = number % len(sides)
    return [*sides[first:], *sides[:first]]


@dataclass(slots=True)
class Samples:
    """Seconds by contestant and kind of request, then by round; of hits that did not come none."""

    seconds: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    is_same: bool = True
    """Whether all answered alike."""

    def take(self, side: Side, kind: str, number: int, taken: Taken, wanted: Bounds) -> None:
        """Add a request of round *number*, if it found as many tokens as *wanted* says."""
        if side.has_store and not wanted[0] <= taken.cached <= wanted[1]:
            self.lost[side.name] += 1
            return
        self.seconds.setdefault((side.name, kind), {})[number] = taken.took_s

    def ask(
        self, sides: Sequence[Side], kind: str, number: int,
        asked: Sequence[Prompt], wanted: Bounds, generated: int = 1,
    ) -> None:  # fmt: skip
        """Have all *sides* answer the same, then forget what they cached."""
        answers = []
        for side in in_turn(sides, number):
            taken = side.ask(asked, generated)
            self.take(side, kind, number, taken, wanted)
            answers.append(taken.tokens)
            side.fresh()
        self.is_same &= all(one == answers[0] for one in answers)

    def ratios(self, kind: str, theirs: str) -> list[float]:
        """Return ours over *theirs* in each round that has both: what is slow for a while is slow
        for both. Raises PeerSkippedError of too few.
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
        """Report a ratio, and between what it lies; an overhead is what it is above 1."""
        try:
            ratios = self.ratios(kind, theirs)
        except PeerSkippedError as error:
            report.skip([key], str(error))
            return
        base = key.endswith("overhead")
        middle, low, high = (one - base for one in median_of(ratios))
        report.add(key, middle, self._ms(OURS, kind), self._ms(theirs, kind))
        words = f"with 95 % of what {len(ratios)} rounds might have been"
        report.note(f"  {key}", f"{low:.3f} to {high:.3f}", words)


def measure_batches(report: Report, sides: Sequence[Side], seconds: float) -> bool:
    """Several prompts at once that nobody knows, without a store and with ours: what storing takes
    of the throughput. Return whether all tokens were the same.
    """
    samples, prompts, began = Samples(), cycle(chats(BATCH_TOKENS)), time.monotonic()
    for number in range(_MOST_ROUNDS):
        batch = [tokens(one, number) for one in islice(prompts, BATCH)]
        samples.ask(sides, NEW, number, batch, (0, 0), GENERATED)
        if time.monotonic() - began > seconds:
            break
    samples.add(report, STORE_KEY, NEW, PLAIN)
    return samples.is_same


def one_turn(samples: Samples, sides: Sequence[Side], turn: Turn, number: int) -> None:
    """Have all answer a prompt, the turn that follows on it, and that as far as it is stored; the
    stores the last some times more: nobody computes, so it takes little.

    One token more than that: every engine computes the last one itself.
    """
    earlier, prompt = turn.prompts(number)
    whole = (len(prompt) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    shared = turn.history_tokens // CHUNK_TOKENS * CHUNK_TOKENS
    stored, bounds = prompt[: whole + 1], (whole - CHUNK_TOKENS, whole)
    samples.ask(sides, NEW, number, [earlier], (0, 0))
    samples.ask(sides, "turn", number, [prompt], (shared - CHUNK_TOKENS, whole))
    samples.ask(sides, AGAIN, number, [stored], bounds)
    stores = [side for side in sides if side.has_store]
    for again in range(1, HITS if number >= WARM_UP else 1):
        for side in in_turn(stores, number + again):
            samples.take(side, AGAIN, again * _MANY + number, side.ask([stored]), bounds)
            side.fresh()


def measure_misses(report: Report, sides: Sequence[Side]) -> bool:
    """Prompts that nobody knows, by turns with our store and without; return whether tokens were
    the same. The one that goes first changes: AB, BA, AB.
    """
    samples, prompts, began = Samples(), cycle(turns(PAIRS // 4)), time.monotonic()
    for number, turn in enumerate(islice(prompts, PAIRS + WARM_UP)):
        samples.ask(sides, NEW, number, [turn.prompts(2 * ROUNDS + number)[0]], (0, 0))
        if time.monotonic() - began > PAIRS_S:
            break
    samples.add(report, KEYS[4], NEW, PLAIN)
    return samples.is_same


def measure_turns(report: Report, sides: Sequence[Side]) -> bool:
    """Prompts alone: what a hit and a miss take. Return whether all tokens were the same."""
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


def measure_stores(report: Report, plain: Side, starts: Field) -> bool:
    """Start the stores and their engines, and compare them; return whether tokens were the same."""
    # No deadline that a busy machine runs into: a late answer is to be seen in the times.
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
        plain = Field(stack, folder).plain()
        with ExitStack() as others:
            is_same = measure_stores(report, plain, Field(others, folder))
        report.add(KEYS[0], float(is_same), "every answer of every engine", "no store")
        measure_dead_server(report, folder, Field(stack, folder), plain)


def measure_stores_alone(report: Report, folder: Path) -> None:
    """What storing takes of the throughput, of as many batches as the seconds allow."""
    make_model(folder / "model", MODEL_SCALE)
    with ExitStack() as stack:
        field = Field(stack, folder)
        sides = [field.plain(), field.ours(field.server(), lookup_deadline_ms=2000)]
        if not measure_batches(report, sides, BATCHES_ALONE_S):
            raise RuntimeError("the tokens of the two differ")


PARTS = {
    "all": (measure, KEYS),
    "stores": (measure_stores_alone, (STORE_KEY,)),
    "hang": (measure_hangs, HANG_KEYS),
}
"""What ``--only`` names, and the keys of each: ``all`` is what runs unless something is named."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run it all; return the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=PARTS, default="all", help="some figures alone")
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
