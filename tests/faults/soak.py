"""A real server under mixed load with every fault on: what it delivers is verified and counted.

Run ``python tests/faults/soak.py --minutes 10`` with src and tests on PYTHONPATH; `make soak`
does. It prints a table and a line of JSON, and fails on wrong bytes or on what was left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from faults.proxy import FaultProxy, Trouble
from faults.soak_client import CHUNKS, PROMPTS
from faults.tools import anonymous_bytes, descriptor_count, largest_file, thread_count
from faults.trend import Sampler, trend
from helpers.prompts import SMALL, chunks_of, keys_of
from helpers.redis_process import RedisProcess
from helpers.server_process import ServerProcess

from kvstore.client import Client, ClientOptions
from kvstore.proto.errors import KVStoreError
from kvstore.proto.frame import MAGIC

RESTART_SHARE = 0.05
"""Of the run, after which the server is killed and started again."""
WARM_UP_SHARE = 0.4
"""Of the run, before which memory is not looked at: what is bounded fills meanwhile. After it the
server's own memory is, each second: slabs and files are not counted, they are allocated in full."""
MALLOC = {"MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
"""The server has two arenas of malloc and its threads keep nothing freed of their own. Of eight
arenas a core each keeps what it once needed, and each of 60 threads up to 0.2 MB: both are bounded,
but look like growth for longer than a soak."""
FAULT_EVERY_S = 0.7
CLIENTS = ("shm", "grpc", "grpc", "shm")
"""The third goes through a proxy of its own."""
BEHIND_PROXY = 2
FLAGS = (
    *("--tiers", "cpu,disk,redis", "--cpu", "16MiB", "--disk", "64MiB:disk"),
    *("--redis-size", "64MiB", "--redis-timeout-ms", "200", "--limits", "breaker_retry_ms=200"),
    *("--scrub-bytes-per-s", "2MiB", "--scrub-tiers", "cpu,disk,redis", "--log-level", "error"),
)


class Worker:
    """A client process and what it has counted; a killed one's counts are kept."""

    def __init__(self, address: str, transport: str, seed: int) -> None:
        self._command = [sys.executable, str(Path(__file__).with_name("soak_client.py"))]
        self._command += [address, transport]
        self._seed = seed
        self._past: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self.kills = 0
        self.start()

    def start(self) -> None:
        self._seed += 1000
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
        self._process = subprocess.Popen(
            [*self._command, str(self._seed)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        self._thread = threading.Thread(target=self._listen, args=(self._process,))
        self._thread.start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                with suppress(ValueError):  # cut by a kill
                    self._now = Counter(json.loads(line))

    def kill(self) -> None:
        if self._process is not None and self._thread is not None:
            self._process.kill()
            self._process.wait()
            self._thread.join()
            overrun = max(self._past["overrun_ms"], self._now["overrun_ms"])
            self._past += self._now
            self._past["overrun_ms"] = overrun
            self._now = Counter()
            self._process = None
            self.kills += 1

    def counts(self) -> Counter[str]:
        total = self._past + self._now
        total["overrun_ms"] = max(self._past["overrun_ms"], self._now["overrun_ms"])
        return total


class Soak:
    """Everything that runs, and what is done to it. Randomness comes from *draw*."""

    def __init__(self, folder: Path, draw: random.Random, stack: ExitStack) -> None:
        self._draw = draw
        self.faults: Counter[str] = Counter()
        (folder / "redis").mkdir()
        self.redis = RedisProcess(folder / "redis")
        self.redis.start()
        stack.callback(self.redis.stop)
        self._to_redis = stack.enter_context(closing(FaultProxy(self.redis.port)))
        url = f"redis://{self._to_redis.address}/0"
        (folder / "server").mkdir(mode=0o700)
        self.server = ServerProcess(folder / "server", *FLAGS, "--redis", url)
        self.server.environment = MALLOC
        self.server.start()
        stack.callback(self.server.kill)
        self._extents = folder / "server" / "disk" / "extents"
        self._to_server = stack.enter_context(closing(FaultProxy(self.server.port)))
        self.workers = []
        for number, transport in enumerate(CLIENTS):
            address = self._to_server.address if number == BEHIND_PROXY else self.server.address
            self.workers.append(Worker(address, transport, number))
            stack.callback(self.workers[-1].kill)
        self._kinds: dict[str, Callable[[], None]] = {
            "client killed": self._kill_client,
            "disk bytes": self._spoil_disk,
            "redis values": self._spoil_redis,
            "redis stopped": self._stop_redis,
            "redis slow": lambda: self._trouble(self._to_redis, Trouble(delay_s=0.3)),
            "redis silent": lambda: self._trouble(self._to_redis, Trouble(is_silent=True)),
            "redis bytes": lambda: self._trouble(self._to_redis, Trouble(flip_at=self._place())),
            "redis cut": lambda: self._trouble(self._to_redis, Trouble(cut_at=self._place())),
            "redis flushed": self._flush_redis,
            "network bytes": lambda: self._trouble(self._to_server, Trouble(flip_at=self._place())),
            "network cut": lambda: self._trouble(self._to_server, Trouble(cut_at=self._place())),
            "network slow": lambda: self._trouble(self._to_server, Trouble(delay_s=0.05)),
            "disk writes fail": self._fail_writes,
        }

    def fault(self) -> None:
        kind = self._draw.choice(list(self._kinds))
        self.faults[kind] += 1
        self._kinds[kind]()

    def _place(self) -> int:
        return self._draw.randrange(200_000)

    def _trouble(self, proxy: FaultProxy, trouble: Trouble) -> None:
        if self._draw.random() < 0.5:
            proxy.to_client = trouble
        else:
            proxy.to_server = trouble
        time.sleep(0.4)
        proxy.heal()

    def _kill_client(self) -> None:
        worker = self._draw.choice(self.workers)
        worker.kill()
        worker.start()

    def _spoil_disk(self) -> None:
        path = self._draw.choice(sorted(self._extents.iterdir()))
        with path.open("r+b") as file:
            data = file.read()
            starts = [i for i in range(0, len(data), 4096) if data[i : i + len(MAGIC)] == MAGIC]
            for start in self._draw.sample(starts, min(len(starts), 20)):
                at = start + self._draw.randrange(2300)
                file.seek(at)
                file.write(bytes([data[at] ^ 1 << self._draw.randrange(8)]))

    def _spoil_redis(self) -> None:
        names = self.redis.names()
        for name in self._draw.sample(names, min(len(names), 20)):
            value = self.redis.client.get(name)
            if isinstance(value, bytes) and value:
                at = self._draw.randrange(len(value))
                self.redis.client.setrange(name, at, bytes([value[at] ^ 0x20]))

    def _flush_redis(self) -> None:
        self.redis.client.flushall()

    def _stop_redis(self) -> None:
        with self.redis.frozen():
            time.sleep(0.4)

    def _fail_writes(self) -> None:
        largest_file(self.server.pid, 0)
        time.sleep(0.4)
        largest_file(self.server.pid)

    def restart_server(self) -> float:
        """Kill the server with SIGKILL; return how long the next one took to start."""
        self.server.kill()
        started = time.monotonic()
        self.server.start()
        return time.monotonic() - started

    def show_everything(self) -> None:
        """Put, delete and put every prompt, so that what the server remembers of each chunk, and of
        what became of it, is not growth later on.
        """
        options = ClientOptions("grpc", 16, 5000)
        with Client(self.server.address, SMALL, options) as client:
            for seed in range(1, PROMPTS + 1):
                keys = keys_of(client, seed, CHUNKS)
                chunks = chunks_of(client, keys)
                with suppress(KVStoreError):
                    client.put_chunks(chunks)
                    client.delete(keys=keys)
                    client.put_chunks(chunks)

    def totals(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for worker in self.workers:
            total += worker.counts()
        total["overrun_ms"] = max(worker.counts()["overrun_ms"] for worker in self.workers)
        return total

    def leases_left(self) -> int:
        """End all clients, and return how many leases outlive them by two seconds."""
        for worker in self.workers:
            worker.kill()
        options = ClientOptions("grpc", 16, 5000)
        deadline = time.monotonic() + 20.0  # of gRPC clients: their session has to fall silent
        with Client(self.server.address, SMALL, options) as client:
            while time.monotonic() < deadline:
                with suppress(KVStoreError):
                    left = int(client.status().leases)
                    if not left:
                        return 0
                time.sleep(0.2)
            return left


def run(minutes: float, seed: int) -> dict[str, float]:
    """Soak for so long; return the figures."""
    draw = random.Random(seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-soak-")))
        soak = Soak(folder, draw, stack)
        started, length_s = time.monotonic(), 60 * minutes
        warm_at, end_at = started + WARM_UP_SHARE * length_s, started + length_s
        _faults_until(soak, started + RESTART_SHARE * length_s)
        restart_s = soak.restart_server()
        soak.show_everything()
        pid = soak.server.pid
        _faults_until(soak, warm_at)
        before = (thread_count(pid), descriptor_count(pid))
        sampler = Sampler(lambda: anonymous_bytes(pid))
        stack.callback(sampler.stop)
        sampler.start()
        _faults_until(soak, end_at)
        memory = trend(sampler.stop())
        after = (thread_count(pid), descriptor_count(pid))
        leases = soak.leases_left()
        totals = soak.totals()
        _print(soak, totals)
        return {
            "minutes": minutes,
            "seed": seed,
            "verified_reads": totals["reads"],
            "wrong_bytes": totals["wrong"],
            "client_errors": totals["errors"],
            "puts": totals["puts"],
            "faults": sum(soak.faults.values()),
            "client_kills": sum(worker.kills for worker in soak.workers) - len(soak.workers),
            "restart_s": round(restart_s, 2),
            "get_deadline_overrun_ms": totals["overrun_ms"],
            "memory_slope_percent_per_h": round(memory.slope, 2),
            "memory_slope_low": round(memory.low, 2),
            "memory_slope_high": round(memory.high, 2),
            "memory_mb": round(anonymous_bytes(pid) / 1e6, 1),
            "threads_more": after[0] - before[0],
            "descriptors_more": after[1] - before[1],
            "leases_left": leases,
        }


def _faults_until(soak: Soak, end: float) -> None:
    while time.monotonic() < end:
        soak.fault()
        time.sleep(FAULT_EVERY_S)


def _print(soak: Soak, totals: Counter[str]) -> None:
    rows = [*sorted(soak.faults.items()), *sorted(totals.items())]
    for name, count in rows:
        print(f"{name:22} {count:>12}")


def main() -> int:
    """Soak as the flags say. Returns 1 for wrong bytes, or for leases that were left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    options = parser.parse_args()
    figures = run(options.minutes, options.seed)
    for name, value in figures.items():
        print(f"{name:28} {value:>12}")
    print(json.dumps({"soak": figures}))
    return int(figures["wrong_bytes"] > 0 or figures["leases_left"] > 0)


if __name__ == "__main__":
    sys.exit(main())
