"""What faults cost: a minute of the soak, restarts by what a disk holds, and clients that die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.report import Report
from bench.workload import TINY, make_chunks
from kvstore.cli.demo.demo import ServerChild
from kvstore.client import Client, ClientOptions
from kvstore.proto.types import ROOT, ChunkInfo, ChunkKey, Component, DType, KVLayout, LayerKind
from kvstore.tiers.disk import DiskTier, file_bytes_for

ROOT_FOLDER = Path(__file__).resolve().parents[1]
MINUTES = 10.0
FRAME_BYTES = 256 << 10
HELD_CHUNKS = 8192
DEATHS = 5
SOAK_KEYS = (
    "wrong_bytes", "verified_reads", "memory_slope_percent_per_h", "get_deadline_overrun_ms",
)  # fmt: skip


SOAK = """
import runpy, sys
sys.path[:0] = ["src", "tests"]
sys.argv = {arguments!r}
runpy.run_path({program!r}, run_name="__main__")
"""
"""What runs the soak from the checkout's root."""


def measure(report: Report, folder: Path) -> None:
    """Add what the soak says, ``restart_s_per_10gb`` and ``client_death_reclaim_s``."""
    _soak(report)
    _restart(report, folder)
    _deaths(report, folder)


def _soak(report: Report) -> None:
    program = ROOT_FOLDER / "tests" / "faults" / "soak.py"
    if not program.exists():
        report.skip(SOAK_KEYS, "its programs are in tests/faults of a checkout")
        return
    arguments = ["soak", "--minutes", str(MINUTES), "--seed", "1"]
    done = subprocess.run(
        [sys.executable, "-c", SOAK.format(program=str(program), arguments=arguments)],
        cwd=ROOT_FOLDER, capture_output=True, text=True, check=False, timeout=60 * MINUTES + 300,
    )  # fmt: skip
    try:
        figures = json.loads(done.stdout.splitlines()[-1])["soak"]
    except (ValueError, IndexError, KeyError):
        report.skip(SOAK_KEYS, f"the soak ended with {done.returncode}: {done.stderr[-200:]}")
        return
    text = f"{MINUTES:g} min, {figures['faults']} faults, {figures['client_kills']} kills"
    for key in SOAK_KEYS:
        report.add(key, figures[key], text)


def _restart(report: Report, folder: Path) -> None:
    """Time the start of a server over a full disk tier, less that of an empty one."""
    size = HELD_CHUNKS * (FRAME_BYTES + 4096) + (64 << 20)
    times = []
    for name, chunks in (("none", 0), ("full", HELD_CHUNKS)):
        place = folder / name
        place.mkdir()
        _fill(place / "disk", size, chunks)
        child = ServerChild(place, ["--tiers", "cpu,disk", "--cpu", "64MiB", "--disk",
                                    f"{size}:{place / 'disk'}"])  # fmt: skip
        best = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            child.start()
            best = min(best, time.perf_counter() - started)
            assert f"recovered_chunks={chunks}" in child.greeting
            child.kill()
        times.append(best)
    held = HELD_CHUNKS * FRAME_BYTES
    text = f"{HELD_CHUNKS} chunks of 256 KiB found again, beyond an empty start of {times[0]:.2f} s"
    report.add("restart_s_per_10gb", (times[1] - times[0]) * 10e9 / held, text, "5 at most")


def _fill(path: Path, size_bytes: int, chunks: int) -> None:
    """Seal chunks without bytes: a start reads none."""
    tier = DiskTier((path, size_bytes), file_bytes=file_bytes_for(size_bytes, 64 << 20))
    layout = KVLayout((Component(LayerKind.attention, DType.bfloat16, 1, 1, 8, 256),))
    for number in range(chunks):
        key = ChunkKey(os.urandom(32))
        reservation = tier.reserve(ChunkInfo(key, ROOT, layout, 0, FRAME_BYTES))
        tier.seal(reservation, durable=number == chunks - 1)
    tier.close()


HOLD = """
import sys, time
from bench.workload import TINY, make_chunks
from kvstore.client import Client, ClientOptions

client = Client(sys.argv[1], TINY, ClientOptions("shm", deadline_ms=20_000))
keys, _ = make_chunks(client, 8, seed=1)
leases = [client.lease(keys=keys) for _ in range(50)]
assert len(leases[0].get()) == 8
print("holding", flush=True)
time.sleep(600)
"""


def _deaths(report: Report, folder: Path) -> None:
    place = folder / "deaths"
    place.mkdir()
    slowest = 0.0
    options = ClientOptions("grpc", deadline_ms=20_000)
    with ExitStack() as stack:
        child = stack.enter_context(ServerChild(place, ["--tiers", "cpu", "--cpu", "64MiB"]))
        client = stack.enter_context(Client(child.address, TINY, options))
        _, chunks = make_chunks(client, 8, seed=1)
        client.put_chunks(chunks)
        for _ in range(DEATHS):
            with _holder(child.address) as process:
                process.kill()
                started = time.perf_counter()
                while client.status().leases:
                    time.sleep(0.002)
                slowest = max(slowest, time.perf_counter() - started)
    text = f"the slowest of {DEATHS} killed clients with 50 leases each"
    report.add("client_death_reclaim_s", slowest, text, "2 at most")


@contextmanager
def _holder(address: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, address]
    process = subprocess.Popen(command, cwd=ROOT_FOLDER, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        yield process
    finally:
        process.kill()
        process.communicate()
