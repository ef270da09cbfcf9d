"""What a server that is gone costs the requests of an engine: the first of them, and those after;
and one that hangs between a lookup and its load, by transport.

Of the latter the engine has been promised a prefix, and the server is stopped before the first byte
of it. Over the Unix socket the kernel tells whether it hangs, over gRPC and tcp the server may be
anywhere and is asked. Short prompts, in turns with an engine without a store, whose time is taken
off: the noise of a long prefill would hide a cost of milliseconds.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median

from bench.engines.sides import CHUNK_TOKENS, STORE_BYTES, Field, Prompt, Side, tokens
from bench.lib.processes import free_port
from bench.lib.report import Report
from bench.lib.vllm import make_model
from bench.lib.workload import serving

DEAD_KEYS = ("dead_server_once_ms", "dead_server_after_ms")
CYCLES = 4
AFTER = 40
"""Requests after the first: long enough that the store is asked about again meanwhile."""
BACK_S = 30.0
PROMPT_TOKENS = CHUNK_TOKENS + 32


class Pair:
    """An engine without a store and ours, asked the same prompts, which no pair has had before."""

    _numbers = count(1)

    def __init__(self, plain: Side, ours: Side) -> None:
        self._plain, self._ours = plain, ours

    def _prompt(self) -> Prompt:
        return tokens([(1, PROMPT_TOKENS)], next(self._numbers))

    def extra_ms(self) -> float:
        """Return what ours took more for a prompt that nobody knows."""
        prompt = self._prompt()
        plain_s, ours_s = (_drained_s(side, prompt) for side in (self._plain, self._ours))
        return 1e3 * (ours_s - plain_s)

    def await_store(self) -> None:
        """Ask until a prompt is stored and found again. Raises RuntimeError after BACK_S."""
        deadline = time.monotonic() + BACK_S
        while time.monotonic() < deadline:
            prompt = self._prompt()
            self._ours.ask([prompt])
            self._ours.fresh()
            found = self._ours.ask([prompt]).cached
            self._ours.fresh()
            if found:
                return
            time.sleep(0.1)
        raise RuntimeError(f"the server is back, and not used within {BACK_S:g} s")

    def gone(self, once: list[float], after: list[float]) -> None:
        """Take the requests of a time without a server: the first, and those after."""
        once.append(self.extra_ms())
        after += [self.extra_ms() for _ in range(AFTER)]

    def hang_ms(self, pid: int) -> float:
        """Return what a request takes more whose server, process *pid*, hangs before its load.

        Raises RuntimeError if nothing was found, or the server is not used again.
        """
        prompt, ours = self._prompt(), self._ours
        ours.ask([prompt])
        ours.fresh()
        alone_s = _drained_s(self._plain, prompt)
        lost = _lost(ours)
        ours.engine.request("stop_before_load", pid=pid)
        try:
            took_s = ours.ask([prompt]).took_s
        finally:
            os.kill(pid, signal.SIGCONT)
        if _lost(ours) == lost:
            raise RuntimeError("the prompt was not found, or loaded from a server that is stopped")
        ours.fresh()
        return 1e3 * (took_s - alone_s)


def _drained_s(side: Side, prompt: Prompt) -> float:
    took_s = side.ask([prompt]).took_s
    side.engine.request("drain")
    return took_s


def _lost(ours: Side) -> int:
    return int(ours.engine.request("counts").get("worker_lost_chunks", 0))


def measure_dead_server(report: Report, folder: Path, starts: Field, plain: Side) -> None:
    """A server that hangs and one that is killed, some times each; the worse is reported."""
    port = free_port()
    flags = ("--listen", f"127.0.0.1:{port}", "--tiers", "cpu", "--cpu", str(STORE_BYTES))
    path = ("--socket", str(folder / "kv.sock"))
    pair = Pair(plain, starts.ours(f"127.0.0.1:{port}"))
    hung: tuple[list[float], list[float]] = ([], [])
    killed: tuple[list[float], list[float]] = ([], [])
    for _ in range(CYCLES):
        with serving(*flags, *path) as (_, pid):
            pair.await_store()
            for _ in range(AFTER):  # as long as without a server
                pair.extra_ms()
            os.kill(pid, signal.SIGSTOP)
            pair.gone(*hung)
            os.kill(pid, signal.SIGCONT)
            pair.await_store()
            os.kill(pid, signal.SIGKILL)
            pair.gone(*killed)
    for key, one, other in zip(DEAD_KEYS, hung, killed, strict=True):
        worst = max(median(one), median(other))
        report.add(key, worst, words("hung", one), words("killed", other))


def words(name: str, found: list[float]) -> str:
    ordered = sorted(found)
    return f"{name} {median(found):.1f} ms, worst {ordered[-1]:.1f} of {len(found)}"


TRANSPORTS = ("shm", "tcp", "grpc")
HANG_KEYS = tuple(f"hang_{transport}_ms" for transport in TRANSPORTS)
HANGS = 9
LOOKUP_MS = 2000
PACE_S = 6.0
"""How soon a server answers is known anew at each heartbeat: engines that start make it slow."""


def measure_hangs(report: Report, folder: Path) -> None:
    """Start an engine without a store and one for each transport, and have the server hang."""
    make_model(folder / "model")
    with ExitStack() as stack:
        field = Field(stack, folder)
        plain = field.plain()
        flags = ("--tiers", "cpu", "--cpu", str(STORE_BYTES), "--bulk", f"127.0.0.1:{free_port()}")
        address, pid = stack.enter_context(serving(*flags))
        # A lookup that is late on a busy machine would be a miss, and no load would follow.
        patience = {"lookup_deadline_ms": LOOKUP_MS}
        pairs = [Pair(plain, field.ours(address, transport=one, **patience)) for one in TRANSPORTS]
        for pair in pairs:
            pair.await_store()
        time.sleep(PACE_S)
        for key, pair in zip(HANG_KEYS, pairs, strict=True):
            found = []
            for _ in range(HANGS):
                pair.await_store()
                found.append(pair.hang_ms(pid))
            report.add(key, median(found), words("more", found), "without a store")
