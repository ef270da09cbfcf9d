"""What storing takes of an engine's throughput: batches by turns with our store and without it.

``python -m bench.engines_stores`` measures that figure of ``bench.engines`` alone, of as many pairs
of batches as SECONDS allow. Needs the environment of ``make vllm-env``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path

from bench.engines_prompts import MOST_TOKENS, Prompt, chats, tokens
from bench.engines_samples import AGAIN, CPU, NEW, WARM_UP, Samples, in_turn
from bench.engines_sides import CHUNK_TOKENS, OURS, PLAIN, Field, Side
from bench.report import Report, parse_flags
from bench.vllm_engine import PYTHON, make_model

STORE_KEY = "store_overhead"
MODEL_SCALE = 2
SECONDS = 240.0
BATCH, BATCH_TOKENS, GENERATED = 8, 512, 32
PEER_ROUNDS = 4 + WARM_UP
"""Rounds, the first ones, that have peers and hits in them: only what storing costs is a key."""
_MOST_ROUNDS = 1000


def one_batch(
    samples: Samples, sides: Sequence[Side], batch: Sequence[Prompt], number: int, kinds: str
) -> None:
    """Have all answer some prompts at once, which nobody knows, and stores the same once more if
    that is among *kinds*.
    """
    whole = min(len(one) for one in batch) // CHUNK_TOKENS * CHUNK_TOKENS
    bounds = {NEW: (0, 0), AGAIN: (whole - CHUNK_TOKENS, MOST_TOKENS)}
    answers = []
    for kind in kinds.split():
        for side in in_turn(sides, number):
            if side.has_store or kind != AGAIN:
                taken = side.ask(batch, GENERATED)
                samples.take(side, kind, number, taken, bounds[kind])
                answers.append(taken.tokens)
                side.fresh()
    samples.is_same &= all(one == answers[0] for one in answers)


def measure_batches(report: Report, sides: Sequence[Side], seconds: float) -> bool:
    """Several prompts at once: what storing takes of the throughput, and what hits give to it.

    *sides* begin with the one without a store and ours; the others take part in a few rounds.
    Return whether all tokens were the same.
    """
    samples = Samples()
    prompts = cycle(chats(BATCH_TOKENS))
    began = time.monotonic()
    for number in range(_MOST_ROUNDS):
        batch = [tokens(one, number) for one in islice(prompts, BATCH)]
        if number < PEER_ROUNDS:
            one_batch(samples, sides, batch, number, f"{NEW} {AGAIN}")
        else:
            one_batch(samples, sides[:2], batch, number, NEW)
        if time.monotonic() - began > seconds:
            break
    samples.add(report, STORE_KEY, (OURS, NEW), (PLAIN, NEW))
    report.note("  batches", str(number + 1 - WARM_UP), f"{BATCH} prompts, {GENERATED} tokens each")
    for side in sides[1:]:
        for kind, against in ((NEW, NEW), (NEW + CPU, NEW + CPU), (AGAIN, NEW)):
            samples.note(report, (side.name, kind), (PLAIN, against))
    return samples.is_same


def measure(report: Report, folder: Path) -> None:
    """Start an engine without a store and one with ours, and compare them."""
    make_model(folder / "model", MODEL_SCALE)
    with ExitStack() as stack:
        field = Field(stack, folder)
        sides = [field.plain(), field.ours(field.server(), lookup_deadline_ms=2000)]
        if not measure_batches(report, sides, SECONDS):
            raise RuntimeError("the tokens of the two differ")


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; return the exit status."""
    only_json = parse_flags(argv, __doc__ or "")
    report = Report("engines_stores")
    if PYTHON.exists():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o700)
            measure(report, Path(folder))
    else:
        report.skip([STORE_KEY], "no vLLM: run make vllm-env")
    report.print(only_json=only_json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
