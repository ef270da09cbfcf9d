"""What a server that hangs between a lookup and its load costs the request, by transport.

``python -m bench.engines_hang``: the engine has been promised a prefix, and the server is stopped
before the first byte of it. Over the Unix socket the kernel tells whether it hangs, over gRPC and
tcp the server may be anywhere and is asked. Short prompts, beside an engine without a store, whose
time is taken off. Needs the environment of ``make vllm-env``.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from bench.engines_dead import BACK_S, PROMPT_TOKENS, words
from bench.engines_prompts import tokens
from bench.engines_sides import STORE_BYTES, Field, Side
from bench.peer_process import free_port
from bench.report import Report, parse_flags
from bench.vllm_engine import PYTHON, make_model
from bench.workload import serving

TRANSPORTS = ("shm", "tcp", "grpc")
KEYS = tuple(f"hang_{transport}_ms" for transport in TRANSPORTS)
HANGS = 9
LOOKUP_MS = 2000
PACE_S = 6.0
"""How soon a server answers is known anew at each heartbeat: engines that start make it slow."""


def hang_ms(plain: Side, ours: Side, pid: int, number: int) -> float:
    """Return what a request takes more whose server, process *pid*, hangs before its load.

    Raises RuntimeError if nothing was found, or the server is not used again.
    """
    prompt = tokens([(1, PROMPT_TOKENS)], number)
    ours.ask([prompt])
    ours.fresh()
    alone_s = plain.ask([prompt]).took_s
    plain.engine.ask("drain")
    lost = _lost(ours)
    ours.engine.ask("stop_before_load", pid=pid)
    try:
        took_s = ours.ask([prompt]).took_s
    finally:
        os.kill(pid, signal.SIGCONT)
    if _lost(ours) == lost:
        raise RuntimeError("the prompt was not found, or loaded from a server that is stopped")
    ours.fresh()
    return 1e3 * (took_s - alone_s)


def _lost(ours: Side) -> int:
    return int(ours.engine.ask("counts").get("worker_lost_chunks", 0))


def await_store(ours: Side, number: int) -> None:
    """Ask until a prompt is found. Raises RuntimeError after BACK_S."""
    deadline = time.monotonic() + BACK_S
    while time.monotonic() < deadline:
        prompt = tokens([(1, PROMPT_TOKENS)], number)
        ours.ask([prompt])
        ours.fresh()
        if ours.ask([prompt]).cached:
            ours.fresh()
            return
        ours.fresh()
        time.sleep(0.1)
    raise RuntimeError(f"the server is not used within {BACK_S:g} s")


def measure(report: Report, folder: Path) -> None:
    """Start an engine without a store and one for each transport, and have the server hang."""
    make_model(folder / "model")
    with ExitStack() as stack:
        field = Field(stack, folder)
        plain = field.plain()
        flags = ("--tiers", "cpu", "--cpu", str(STORE_BYTES), "--bulk", f"127.0.0.1:{free_port()}")
        address, pid = stack.enter_context(serving(*flags, disk=folder / "disk"))
        # A lookup that is late on a busy machine would be a miss, and no load would follow.
        patience = {"lookup_deadline_ms": LOOKUP_MS}
        engines = [field.ours(address, transport=one, **patience) for one in TRANSPORTS]
        numbers = iter(range(1, 1_000_000))
        for ours in engines:
            await_store(ours, next(numbers))
        time.sleep(PACE_S)
        for key, ours in zip(KEYS, engines, strict=True):
            found = []
            for _ in range(HANGS):
                await_store(ours, next(numbers))
                found.append(hang_ms(plain, ours, pid, next(numbers)))
            report.add(key, median(found), words("more", found), "without a store")


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; return the exit status."""
    only_json = parse_flags(argv, __doc__ or "")
    report = Report("engines_hang")
    if PYTHON.exists():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o700)
            measure(report, Path(folder))
    else:
        report.skip(list(KEYS), "no vLLM: run make vllm-env")
    report.print(only_json=only_json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
