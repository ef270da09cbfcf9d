"""What a server that is gone costs the requests of an engine: the first of them, and those after.

Short prompts, in turns with an engine without a store, whose time is taken off: the noise of a long
prefill would hide a cost of milliseconds.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median

from bench.engines_prompts import tokens
from bench.engines_sides import CHUNK_TOKENS, STORE_BYTES, Field, Side
from bench.peer_process import free_port
from bench.report import Report
from bench.workload import serving

DEAD_KEYS = ("dead_server_once_ms", "dead_server_after_ms")
CYCLES = 4
AFTER = 40
"""Requests after the first: long enough that the store is asked about again meanwhile."""
BACK_S = 30.0
PROMPT_TOKENS = CHUNK_TOKENS + 32


@dataclass(slots=True)
class Extra:
    """Milliseconds that requests took beyond those of an engine without a store."""

    once: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)


class Pair:
    """An engine without a store and ours, asked the same prompts that nobody knows."""

    def __init__(self, plain: Side, ours: Side) -> None:
        self._plain, self._ours = plain, ours
        self._numbers = count(1)

    def extra_ms(self) -> float:
        """Return what ours took more, in ms."""
        number = next(self._numbers)
        prompt = tokens([(1, PROMPT_TOKENS)], number)
        took = []
        for side in (self._plain, self._ours):
            took.append(side.ask([prompt]).took_s)
            side.engine.ask("drain")
        return 1e3 * (took[1] - took[0])

    def await_store(self) -> None:
        """Ask until a prompt is stored and found again. Raises RuntimeError after BACK_S."""
        deadline = time.monotonic() + BACK_S
        while time.monotonic() < deadline:
            prompt = tokens([(1, PROMPT_TOKENS)], next(self._numbers))
            self._ours.ask([prompt])
            self._ours.fresh()
            found = self._ours.ask([prompt]).cached
            self._ours.fresh()
            if found:
                return
            time.sleep(0.1)
        raise RuntimeError(f"the server is back, and not used within {BACK_S:g} s")

    def gone(self, extra: Extra) -> None:
        """Take the requests of a time without a server."""
        extra.once.append(self.extra_ms())
        extra.after += [self.extra_ms() for _ in range(AFTER)]


def measure_dead_server(report: Report, folder: Path, starts: Field, plain: Side) -> None:
    """A server that hangs and one that is killed, some times each; the worse is reported."""
    port = free_port()
    flags = ("--listen", f"127.0.0.1:{port}", "--tiers", "cpu", "--cpu", str(STORE_BYTES))

    def server() -> AbstractContextManager[tuple[str, int]]:
        return serving(*flags, disk=folder / "disk")

    pair = Pair(plain, starts.ours(f"127.0.0.1:{port}"))
    hung, killed = Extra(), Extra()
    for _ in range(CYCLES):
        with server() as (_, pid):
            pair.await_store()
            alive = [pair.extra_ms() for _ in range(AFTER)]
            os.kill(pid, signal.SIGSTOP)
            pair.gone(hung)
            os.kill(pid, signal.SIGCONT)
            pair.await_store()
            os.kill(pid, signal.SIGKILL)
            pair.gone(killed)
    for key, name in zip(DEAD_KEYS, ("once", "after"), strict=True):
        worst = max((getattr(one, name) for one in (hung, killed)), key=median)
        report.add(key, median(worst), words("hung", getattr(hung, name)),
                   words("killed", getattr(killed, name)))  # fmt: skip
    report.note("  a server that is there", f"{median(alive):.3f}", words("ms more", alive))


def words(name: str, found: list[float]) -> str:
    """Return a median and what is beyond it."""
    ordered = sorted(found)
    return f"{name} {median(found):.1f} ms, worst {ordered[-1]:.1f} of {len(found)}"
