"""A real vLLM on this machine's CPU: without a store, with ours, vLLM's own offloading and LMCache.

The same small model in a process each, asked in turns about prompts of ``data/traces``; medians of
the rounds' ratios. Needs the environment of ``make vllm-env``; LMCache's is made by the first run.
For each byte of KV a small model computes far less than a large one, so what a store adds weighs
more here than anywhere else.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import TypeAlias

from bench.engines_dead import DEAD_KEYS, measure_dead_server
from bench.engines_prompts import Prompt, Turn, turns
from bench.engines_samples import AGAIN, CPU, NEW, TURN, WARM_UP, Bounds, Samples, in_turn
from bench.engines_sides import (
    CHUNK_TOKENS,
    LMCACHE,
    OFFLOAD,
    OURS,
    PLAIN,
    Field,
    Side,
)
from bench.engines_stores import STORE_KEY, measure_batches
from bench.peer_process import PeerSkippedError
from bench.report import Report, parse_flags
from bench.vllm_engine import PYTHON, make_model

MODEL_SCALE = 2
ROUNDS, TURNS_S = 40, 150.0
"""Of prompts alone, as many as the seconds allow."""
HITS = 3
"""Times a round asks for what is stored: it takes little."""
PAIRS, PAIRS_S = 120, 100.0
"""Of prompts that nobody knows, with our store and without."""
BATCHES_S = 130.0

KEYS = (
    "tokens_identical", "ttft_hit_vs_recompute", "ttft_hit_vs_lmcache", "ttft_hit_vs_vllm_offload",
    "miss_overhead", STORE_KEY, *DEAD_KEYS,
)  # fmt: skip
_MANY = 1 << 12
"""More than there are rounds."""
Asked: TypeAlias = tuple[str, Prompt, Bounds]
"""A kind of request, its prompt, and how many tokens of it are stored."""


def one_turn(samples: Samples, sides: Sequence[Side], turn: Turn, number: int) -> None:
    """Have all answer a prompt, the turn that follows on it, and that as far as it is stored.

    One token more than that: every engine computes the last one itself.
    """
    earlier, prompt = turn.prompts(number)
    whole = (len(prompt) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    shared = turn.history_tokens // CHUNK_TOKENS * CHUNK_TOKENS
    stored: Asked = (AGAIN, prompt[: whole + 1], (whole - CHUNK_TOKENS, whole))
    for kind, asked, wanted in (
        (NEW, earlier, (0, 0)),
        (TURN, prompt, (shared - CHUNK_TOKENS, whole)),
        stored,
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
    if number >= WARM_UP:
        more_hits(samples, [side for side in sides if side.has_store], stored, number)


def more_hits(samples: Samples, sides: Sequence[Side], stored: Asked, number: int) -> None:
    """Have the stores answer once more what is stored: nobody computes, so it takes little."""
    kind, asked, wanted = stored
    for again in range(1, HITS):
        for side in in_turn(sides, number + again):
            samples.take(side, kind, again * _MANY + number, side.ask([asked]), wanted)
            side.fresh()


def measure_misses(report: Report, sides: Sequence[Side]) -> bool:
    """Prompts that nobody knows, by turns with our store and without; return whether tokens were
    the same. The one that goes first changes: AB, BA, AB.
    """
    samples = Samples()
    prompts = cycle(turns(PAIRS // 4))
    began = time.monotonic()
    for number, turn in enumerate(islice(prompts, PAIRS + WARM_UP)):
        prompt, _ = turn.prompts(2 * ROUNDS + number)
        answers = []
        for side in in_turn(sides, number):
            taken = side.ask([prompt])
            samples.take(side, NEW, number, taken, (0, 0))
            answers.append(taken.tokens)
            side.fresh()
        samples.is_same &= answers[0] == answers[1]
        if time.monotonic() - began > PAIRS_S:
            break
    samples.add(report, KEYS[4], (OURS, NEW), (PLAIN, NEW))
    samples.note(report, (OURS, NEW + CPU), (PLAIN, NEW + CPU))
    return samples.is_same


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
    report.note("  rounds", str(number + 1 - WARM_UP), "")
    for side in sides[1:]:
        for kind in (NEW, NEW + CPU, f"{TURN} chat", f"{TURN} document", AGAIN):
            samples.note(report, (side.name, kind), (PLAIN, kind))
        report.note(f"  lost hits, {side.name}", str(samples.lost[side.name]), "")
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
    is_same &= measure_misses(report, sides[:2])
    return measure_batches(report, sides, BATCHES_S) and is_same


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
        report.skip(KEYS, "no vLLM: run make vllm-env")
    report.print(only_json=only_json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
