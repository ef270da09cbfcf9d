"""LMCache 0.5.6: its own benchmarks, its multiprocess server, and a client.

``lmcache bench l2`` drives an L2 adapter inside one process. ``lmcache bench server --mode cpu``
drives the server from a second process, which shares its KV memory with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.lib.processes import (
    LineProcess,
    PeerSkippedError,
    free_port,
    last_line,
    line_process,
    make_venv,
    run,
    serving_peer,
)

VERSION = "LMCache 0.5.6"
CLIENT = Path(__file__).parent / "lmcache_client.py"
TORCH = ("torch==2.13.0",)
"""Installed before its pins."""
REQUEST_SHAPE = "(2,1024,16,8,128):float16:8"
"""Eight layers: 512 tokens are 16.8 MB, one request of its benchmark."""
Adapter = Mapping[str, str | int]
"""Passed to its command line as JSON."""
QUIET = (
    "env", "LMCACHE_DISABLE_BANNER=1", "LMCACHE_LOG_LEVEL=WARNING", "LMCACHE_TRACK_USAGE=false",
)  # fmt: skip
_L2_ROUND = re.compile(r"\[(Store|Load)\] Round (\d+): ([\d.]+) ms, \w+=(\d+)/(\d+)")
_REQUEST_STEP = re.compile(r"/(cold|warm)\] (STORE: stored|RETRIEVE: retrieved) .*?([\d.]+) ms")


def parse_l2(text: str) -> tuple[list[float], list[float]]:
    """Return the seconds of the stores and loads that ``lmcache bench l2`` printed.

    The first round of each is a warm-up. Raises PeerSkippedError.
    """
    seconds: dict[str, list[float]] = {"Store": [], "Load": []}
    for name, number, ms, done, count in _L2_ROUND.findall(text):
        if done != count:
            raise PeerSkippedError(f"its {name.lower()} did {done} of {count} keys")
        if number != "1":
            seconds[name].append(float(ms) / 1e3)
    if not all(seconds.values()):
        raise PeerSkippedError(f"cannot parse its report: {last_line(text)}")
    return seconds["Store"], seconds["Load"]


def parse_server(text: str) -> tuple[list[float], list[float]]:
    """Return the seconds of the stores and retrieves that ``lmcache bench server`` printed.

    Raises PeerSkippedError, also if a checksum differs.
    """
    seconds: dict[str, list[float]] = {}
    for kind, step, ms in _REQUEST_STEP.findall(text):
        seconds.setdefault(f"{kind} {step.partition(':')[0]}", []).append(float(ms) / 1e3)
    steps = [seconds.get(name, []) for name in ("cold STORE", "warm RETRIEVE")]
    if not all(steps):
        raise PeerSkippedError(f"cannot parse its report: {last_line(text)}")
    if any(len(step) != text.count("CHECKSUM MATCH OK") for step in steps):
        raise PeerSkippedError("its checksums do not match")
    return steps[0], steps[1]


@dataclass(frozen=True, slots=True)
class LMCache:
    """An installed LMCache and a scratch *folder* for its logs and files."""

    python: Path
    folder: Path

    @classmethod
    def install(cls, venvs: Path, folder: Path) -> LMCache:
        """Make its virtual environment if necessary. Raises PeerSkippedError."""
        return cls(make_venv(venvs, "lmcache", TORCH), folder)

    def bench_l2(
        self, adapter: Adapter, count: int, object_bytes: int
    ) -> tuple[list[float], list[float]]:
        """Run ``lmcache bench l2``: *count* objects in one submit, a warm-up and three rounds.

        Returns the seconds of its stores and loads. Raises PeerSkippedError.
        """
        flags = (
            "--l2-adapter", json.dumps(dict(adapter)), "--num-keys", str(count),
            "--data-size-kb", str(object_bytes >> 10), "--rounds", "3", "--warmup-rounds", "1",
        )  # fmt: skip
        return parse_l2(run([*self.command("bench", "l2"), *flags], 120))

    @contextmanager
    def server(self, cpu_gib: float, adapter: Adapter | None) -> Iterator[Server]:
        port, http = free_port(), free_port()
        flags = [] if adapter is None else ["--l2-adapter", json.dumps(dict(adapter))]
        with self._serving(cpu_gib, port, http, *flags):
            yield Server(self, f"tcp://localhost:{port}", f"http://localhost:{http}")

    @contextmanager
    def engine_server(self, memory_bytes: int, chunk_tokens: int) -> Iterator[int]:
        """Run its server for a vLLM on this host; yield its port.

        The engine shares memory with the server.
        """
        port, http = free_port(), free_port()
        flags = (
            "--host", "127.0.0.1", "--http-host", "127.0.0.1", "--chunk-size", str(chunk_tokens),
            "--supported-transfer-mode", "auto", "--shm-name", f"lmcache-{port}",
        )  # fmt: skip
        with self._serving(memory_bytes / (1 << 30), port, http, *flags):
            yield port

    def _serving(
        self, gib: float, port: int, http: int, *more: str
    ) -> AbstractContextManager[None]:
        flags = (
            "--port", str(port), "--http-port", str(http), "--l1-size-gb", str(gib),
            "--no-l1-use-lazy", "--disable-observability", "--eviction-policy", "LRU",
        )  # fmt: skip
        log = self.folder / "lmcache-server.log"
        return serving_peer([*self.command("server"), *flags, *more], [port, http], log)

    def command(self, *arguments: str) -> list[str]:
        return [*QUIET, str(self.python.with_name("lmcache")), *arguments]


@dataclass(frozen=True, slots=True)
class Server:
    peer: LMCache
    url: str
    http_url: str

    def bench(self, first: int, count: int) -> tuple[list[float], list[float]]:
        """Run ``lmcache bench server``: *count* requests of 16.8 MB, numbered from *first*."""
        flags = (
            "--rpc-url", self.url, "--url", self.http_url, "--mode", "cpu",
            "--transfer-mode", "lmcache_driven", "--kvcache-shape-spec", REQUEST_SHAPE,
            "--start", str(first), "--end", str(first + count), "--interval", "0.01",
        )  # fmt: skip
        return parse_server(run([*self.peer.command("bench", "server"), *flags], 120))

    @contextmanager
    def client(self, instance: int) -> Iterator[LineProcess]:
        command = [*QUIET, str(self.peer.python), "-P", str(CLIENT), self.url, str(instance)]
        with line_process(command, self.peer.folder / f"lmcache-client-{instance}.log") as program:
            yield program
