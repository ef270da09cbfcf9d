"""Cost of a dead server to the requests of an engine (the first, and later ones), and of a server
that hangs between a lookup and its load, by transport.

A hanging server is stopped after the lookup, before the first byte of the load. Over the Unix
socket the kernel reports whether it hangs; over gRPC and tcp the client sends a request to find
out. Prompts are short and alternate with an engine without a store, whose time is subtracted: the
noise of a long prefill would hide milliseconds.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median

from bench.engines.sides import CHUNK_TOKENS, STORE_BYTES, Prompt, Side, Sides, tokens
from bench.lib.processes import free_port
from bench.lib.report import Report
from bench.lib.vllm import make_model
from bench.lib.workload import serving

DEAD_KEYS = ("dead_server_once_ms", "dead_server_after_ms")
CYCLES = 4
AFTER = 40
"""Requests after the first; the client retries the store within them."""
BACK_S = 30.0
PROMPT_TOKENS = CHUNK_TOKENS + 32


class Pair:
    """An engine without a store and ours; both get the same new prompts."""

    _numbers = count(1)

    def __init__(self, plain: Side, ours: Side) -> None:
        self._plain, self._ours = plain, ours

    def _prompt(self) -> Prompt:
        return tokens([(1, PROMPT_TOKENS)], next(self._numbers))

    def extra_ms(self) -> float:
        """Return the extra milliseconds of ours for a new prompt."""
        prompt = self._prompt()
        plain_s, ours_s = (_drained_s(side, prompt) for side in (self._plain, self._ours))
        return 1e3 * (ours_s - plain_s)

    def await_store(self) -> None:
        """Repeat until a prompt is stored and found. Raises RuntimeError after BACK_S."""
        deadline = time.monotonic() + BACK_S
        while time.monotonic() < deadline:
            prompt = self._prompt()
            self._ours.generate([prompt])
            self._ours.clear()
            found = self._ours.generate([prompt]).cached
            self._ours.clear()
            if found:
                return
            time.sleep(0.1)
        raise RuntimeError(f"the server is back, but not used within {BACK_S:g} s")

    def gone(self, once: list[float], after: list[float]) -> None:
        """Measure requests without a server: the first, and later ones."""
        once.append(self.extra_ms())
        after += [self.extra_ms() for _ in range(AFTER)]

    def hang_ms(self, pid: int) -> float:
        """Return the extra milliseconds of a request if the server, *pid*, hangs before the load.

        Raises RuntimeError if the prompt was not found, or was loaded.
        """
        prompt, ours = self._prompt(), self._ours
        ours.generate([prompt])
        ours.clear()
        alone_s = _drained_s(self._plain, prompt)
        lost = _lost(ours)
        ours.engine.request("stop_before_load", pid=pid)
        try:
            took_s = ours.generate([prompt]).took_s
        finally:
            os.kill(pid, signal.SIGCONT)
        if _lost(ours) == lost:
            raise RuntimeError("the prompt was not found, or was loaded from a stopped server")
        ours.clear()
        return 1e3 * (took_s - alone_s)


def _drained_s(side: Side, prompt: Prompt) -> float:
    took_s = side.generate([prompt]).took_s
    side.engine.request("drain")
    return took_s


def _lost(ours: Side) -> int:
    return int(ours.engine.request("counts").get("worker_lost_chunks", 0))


def measure_dead_server(report: Report, folder: Path, starts: Sides, plain: Side) -> None:
    """Measure a stopped and a killed server, CYCLES times each; the worse is reported."""
    port = free_port()
    flags = ("--listen", f"127.0.0.1:{port}", "--tiers", "cpu", "--cpu", str(STORE_BYTES))
    path = ("--socket", str(folder / "kv.sock"))
    pair = Pair(plain, starts.ours(f"127.0.0.1:{port}"))
    hung: tuple[list[float], list[float]] = ([], [])
    killed: tuple[list[float], list[float]] = ([], [])
    for _ in range(CYCLES):
        with serving(*flags, *path) as (_, pid):
            pair.await_store()
            for _ in range(AFTER):  # as many as without a server
                pair.extra_ms()
            os.kill(pid, signal.SIGSTOP)
            pair.gone(*hung)
            os.kill(pid, signal.SIGCONT)
            pair.await_store()
            os.kill(pid, signal.SIGKILL)
            pair.gone(*killed)
    for key, one, other in zip(DEAD_KEYS, hung, killed, strict=True):
        worst = max(median(one), median(other))
        report.add(key, worst, summary("hung", one), summary("killed", other))


def summary(name: str, found: list[float]) -> str:
    ordered = sorted(found)
    return f"{name} {median(found):.1f} ms, worst {ordered[-1]:.1f} of {len(found)}"


TRANSPORTS = ("shm", "tcp", "grpc")
HANG_KEYS = tuple(f"hang_{transport}_ms" for transport in TRANSPORTS)
HANGS = 9
LOOKUP_MS = 2000
PACE_S = 6.0
"""Heartbeats re-measure the server's latency, which the starting engines raised."""


def measure_hangs(report: Report, folder: Path) -> None:
    """Start an engine without a store and one for each transport; then stop the server."""
    make_model(folder / "model")
    with ExitStack() as stack:
        sides = Sides(stack, folder)
        plain = sides.plain()
        flags = ("--tiers", "cpu", "--cpu", str(STORE_BYTES), "--bulk", f"127.0.0.1:{free_port()}")
        address, pid = stack.enter_context(serving(*flags))
        # On a busy machine a late lookup would be a miss without a load.
        options = {"lookup_deadline_ms": LOOKUP_MS}
        pairs = [Pair(plain, sides.ours(address, transport=one, **options)) for one in TRANSPORTS]
        for pair in pairs:
            pair.await_store()
        time.sleep(PACE_S)
        for key, pair in zip(HANG_KEYS, pairs, strict=True):
            found = []
            for _ in range(HANGS):
                pair.await_store()
                found.append(pair.hang_ms(pid))
            report.add(key, median(found), summary("extra", found), "without a store")
