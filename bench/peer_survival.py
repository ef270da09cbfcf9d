"""What is left to read: of chunks on disk while others write, and of a burst."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.local import bench_burst
from bench.peer_lmcache import VERSION, LMCache, Server
from bench.peer_ours import (
    DEADLINE_MS,
    read_for,
    small_base,
    small_keys,
    small_tensors,
)
from bench.peer_process import ANSWER_TIMEOUT_S, end
from bench.peer_run import Run
from bench.workload import SMALL, serving
from kvstore.client import Chunk, Client, ClientOptions

READABLE_KEYS = 16
FLOOD_S = 3.0
"""The writer's lead: what is to be read is out of CPU memory by then."""
READ_S = 5.0
WRITES = f"100000 100 {FLOOD_S + READ_S}"
"""The first number, chunks of 1 MiB a second, and for how long."""
SETTLE_S = 2.0
BURST_CHUNKS = 2000
CPU_GIB = 0.125


def measure_readable(run: Run, theirs: str) -> None:
    """The share of gets of 16 chunks on disk that are right while another client writes."""
    with run.scratch("readable") as folder:
        flags = ("--tiers", "cpu,disk", "--cpu", "128MiB", "--disk", f"3GiB:{folder / 'disk'}")
        options = ClientOptions(deadline_ms=DEADLINE_MS)
        with (
            serving(*flags, disk=folder / "disk") as (address, _),
            Client(address, SMALL, options) as client,
        ):
            base = small_base()
            for number in range(READABLE_KEYS):
                (key,) = small_keys(client, number)
                client.put_chunks([Chunk(key, small_tensors(base, number))])
            command = [sys.executable, "-m", "bench.peer_ours", address, *WRITES.split()]
            writer = subprocess.Popen(command, stdout=subprocess.PIPE)
            try:
                time.sleep(FLOOD_S)
                reads, right = read_for(client, READABLE_KEYS, READ_S)
                out, _ = writer.communicate(timeout=ANSWER_TIMEOUT_S)
            finally:
                end(writer)
    if writer.returncode:
        raise RuntimeError(f"the writer ended with {writer.returncode}")
    speed = int(out) / (FLOOD_S + READ_S)
    ours = f"{right} of {reads} gets right, {speed:.0f} MiB/s written"
    run.add("readable_under_writes", right / reads, ours, theirs)


def measure_burst(run: Run, theirs: str) -> None:
    """2,000 puts of 1 MiB into 128 MiB of CPU memory and disk: how many cannot be read after."""
    with run.scratch("burst") as folder:
        bench_burst(folder, run.report)
    run.report.note("  the same burst", "", f"theirs {theirs}")


def lmcache_readable(run: Run, peer: LMCache) -> str:
    """Say what LMCache delivers of 16 chunks under the same writes."""
    with (
        _server(run, peer) as server,
        server.client(1000) as reader,
        server.client(2000) as writer,
    ):
        reader.ask(f"store 0 {READABLE_KEYS}")
        writer.tell(f"write {WRITES}")
        time.sleep(FLOOD_S)
        read = reader.ask(f"read {READABLE_KEYS} {READ_S}")
        written = writer.answer()
    share, speed = read["delivered"] / read["reads"], written["sent"] / written["seconds"]
    return f"{share:.2f}, {speed:.0f} MiB/s sent to {VERSION} with fs_native"


def lmcache_burst(run: Run, peer: LMCache) -> str:
    """Say how many chunks of the same burst LMCache loses."""
    with _server(run, peer) as server, server.client(1000) as client:
        client.ask(f"store 0 {BURST_CHUNKS}")
        time.sleep(SETTLE_S)
        read = client.ask(f"read {BURST_CHUNKS} 0")
    lost = BURST_CHUNKS - read["delivered"]
    return f"{lost:.0f} lost by {VERSION} with fs_native"


@contextmanager
def _server(run: Run, peer: LMCache) -> Iterator[Server]:
    with run.scratch("lmcache") as folder:
        adapter = {"type": "fs_native", "base_path": str(folder)}
        with peer.server(CPU_GIB, adapter) as server:
            yield server
