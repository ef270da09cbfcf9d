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

from bench.engines_dead import DEAD_KEYS, measure_dead_server
from bench.engines_prompts import MOST_TOKENS, Prompt, Turn, chats, tokens, turns
from bench.engines_sides import (
    CHUNK_TOKENS,
    LMCACHE,
    OFFLOAD,
    OURS,
    PLAIN,
    Field,
    Side,
    Taken,
)
from bench.peer_process import PeerSkippedError
from bench.report import Report, parse_flags
from bench.vllm_engine import PYTHON, make_model

MODEL_SCALE = 2
ROUNDS, TURNS_S = 40, 180.0
"""Of prompts alone, as many as the seconds allow."""
BATCHES, BATCHES_S = 16, 120.0
BATCH, BATCH_TOKENS, GENERATED = 8, 512, 32
WARM_UP = 2
"""Rounds that do not count: first requests wait for what is made once."""
EVERY = 2
"""One round in so many has the peers in it, where only what storing costs is a key."""
FEWEST = 4
"""Rounds of which there is a median."""

KEYS = (
    "tokens_identical", "ttft_hit_vs_recompute", "ttft_hit_vs_lmcache", "ttft_hit_vs_vllm_offload",
    "miss_overhead", "store_overhead", *DEAD_KEYS,
)  # fmt: skip
CPU = ", CPU"
NEW, TURN, AGAIN = "new", "turn", "again"
"""A prompt that nobody knows; one whose beginning is stored; one of which all is stored."""

Bounds: TypeAlias = tuple[int, int]
"""At least, and at most."""
Kind: TypeAlias = tuple[str, str]
"""A contestant, and the kind of request."""


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

    def ratio(self, ours: Kind, theirs: Kind) -> float:
        """Return the median of the rounds' ratios: what is slow for a while is slow for both.

        Raises PeerSkippedError when too few rounds have both.
        """
        mine, other = (self.seconds.get(one, {}) for one in (ours, theirs))
        ratios = [mine[n] / other[n] for n in mine if n >= WARM_UP and n in other]
        if len(ratios) < FEWEST:
            raise PeerSkippedError(f"{len(ratios)} rounds with {ours[0]}: fewer than {FEWEST}")
        return median(ratios)

    def ms(self, kind: Kind) -> str:
        """Return the median of a contestant, in words."""
        found = [s for number, s in self.seconds.get(kind, {}).items() if number >= WARM_UP]
        return f"{kind[0]} {1e3 * median(found):.1f} ms" if found else f"{kind[0]} never"

    def add(self, report: Report, key: str, ours: Kind, theirs: Kind) -> None:
        """Report a ratio; an overhead is what it is above 1."""
        try:
            value = self.ratio(ours, theirs) - key.endswith("overhead")
        except PeerSkippedError as error:
            report.skip([key], str(error))
        else:
            report.add(key, value, self.ms(ours), self.ms(theirs))

    def note(self, report: Report, ours: Kind, theirs: Kind) -> None:
        """Add a ratio to the table alone."""
        try:
            value = f"{self.ratio(ours, theirs):.3f}"
        except PeerSkippedError as error:
            value = str(error)
        report.note(f"  {ours[1]}, {ours[0]}", value, f"{self.ms(ours)}, {self.ms(theirs)}")


def in_turn(sides: Sequence[Side], number: int) -> Sequence[Side]:
    """Return *sides* in an order whose first changes with *number*: no one profits from another."""
    first = number % len(sides)
    return [*sides[first:], *sides[:first]]


def one_turn(samples: Samples, sides: Sequence[Side], turn: Turn, number: int) -> None:
    """Have all answer a prompt, the turn that follows on it, and that as far as it is stored.

    One token more than that: every engine computes the last one itself.
    """
    earlier, prompt = turn.prompts(number)
    whole = (len(prompt) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    shared = turn.history_tokens // CHUNK_TOKENS * CHUNK_TOKENS
    for kind, asked, wanted in (
        (NEW, earlier, (0, 0)),
        (TURN, prompt, (shared - CHUNK_TOKENS, whole)),
        (AGAIN, prompt[: whole + 1], (whole - CHUNK_TOKENS, whole)),
    ):
        answers = []
        for side in in_turn(sides, number):
            taken = side.ask([asked])
            samples.take(side, kind, number, taken, wanted)
            if kind == TURN:
                samples.take(side, f"{kind} {turn.kind}", number, taken, wanted)
            answers.append(taken.tokens)
            side.fresh()
        samples.is_same &= all(one == answers[0] for one in answers)


def one_batch(
    samples: Samples, sides: Sequence[Side], batch: Sequence[Prompt], number: int
) -> None:
    """Have all answer some prompts at once, which nobody knows, and stores the same once more."""
    whole = min(len(one) for one in batch) // CHUNK_TOKENS * CHUNK_TOKENS
    answers = []
    for kind, wanted in ((NEW, (0, 0)), (AGAIN, (whole - CHUNK_TOKENS, MOST_TOKENS))):
        for side in in_turn(sides, number):
            if side.has_store or kind != AGAIN:
                taken = side.ask(batch, GENERATED)
                samples.take(side, kind, number, taken, wanted)
                answers.append(taken.tokens)
                side.fresh()
    samples.is_same &= all(one == answers[0] for one in answers)


def measure_turns(report: Report, sides: Sequence[Side]) -> bool:
    """Prompts alone: what a hit and a miss take. Return whether all tokens were the same."""
    samples = Samples()
    began = time.monotonic()
    for number, turn in enumerate(turns(WARM_UP + ROUNDS)):
        one_turn(samples, sides, turn, number)
        if time.monotonic() - began > TURNS_S:
            break
    ours, plain = (OURS, AGAIN), (PLAIN, AGAIN)
    samples.add(report, KEYS[1], ours, plain)
    samples.add(report, KEYS[2], ours, (LMCACHE, AGAIN))
    samples.add(report, KEYS[3], ours, (OFFLOAD, AGAIN))
    samples.add(report, KEYS[4], (OURS, NEW), (PLAIN, NEW))
    report.note("  rounds", str(number + 1 - WARM_UP), "")
    for side in sides[1:]:
        for kind in (NEW, NEW + CPU, f"{TURN} chat", f"{TURN} document", AGAIN):
            samples.note(report, (side.name, kind), (PLAIN, kind))
        report.note(f"  lost hits, {side.name}", str(samples.lost[side.name]), "")
    return samples.is_same


def measure_batches(report: Report, sides: Sequence[Side]) -> bool:
    """Several prompts at once: what storing takes of the throughput, and what hits give to it.

    Peers take part in some rounds only. Return whether all tokens were the same.
    """
    samples = Samples()
    prompts = cycle(chats(BATCH_TOKENS))
    began = time.monotonic()
    for number in range(WARM_UP + BATCHES):
        batch = [tokens(one, number) for one in islice(prompts, BATCH)]
        one_batch(samples, sides if number % EVERY == 0 else sides[:2], batch, number)
        if time.monotonic() - began > BATCHES_S:
            break
    samples.add(report, KEYS[5], (OURS, NEW), (PLAIN, NEW))
    report.note("  batches", str(number + 1 - WARM_UP), f"{BATCH} prompts, {GENERATED} tokens each")
    for side in sides[1:]:
        for kind, against in ((NEW, NEW), (NEW + CPU, NEW + CPU), (AGAIN, NEW)):
            samples.note(report, (side.name, kind), (PLAIN, against))
    return samples.is_same


def measure_stores(report: Report, plain: Side, starts: Field) -> bool:
    """Start the stores and their engines, and compare them; return whether tokens were the same."""
    address = starts.server()
    # No deadline that a busy machine runs into: a late answer is to be seen in the times.
    sides = [plain, starts.ours(address, lookup_deadline_ms=2000), starts.offload()]
    try:
        sides.append(starts.lmcache())
    except PeerSkippedError as error:
        report.note("  LMCache", "skipped", str(error))
    is_same = measure_turns(report, sides)
    return measure_batches(report, sides) and is_same


def measure(report: Report, folder: Path) -> None:
    """Start the stores and the engines, and compare them."""
    make_model(folder / "model", MODEL_SCALE)
    with ExitStack() as stack:
        plain = Field(stack, folder).plain()
        with ExitStack() as others:
            is_same = measure_stores(report, plain, Field(others, folder))
        report.add(KEYS[0], float(is_same), "every answer of every engine", "no store")
        measure_dead_server(report, folder, Field(stack, folder), plain)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it all; return the exit status."""
    only_json = parse_flags(argv, __doc__ or "")
    report = Report("engines")
    if PYTHON.exists():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o700)
            measure(report, Path(folder))
    else:
        report.skip(KEYS, "no build/vllm: run make vllm-env")
    report.print(only_json=only_json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
