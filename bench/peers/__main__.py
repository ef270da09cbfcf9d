"""Our store beside LMCache, Mooncake Store and plain Redis, on one machine.

Both sides of a ratio run in turns in one run, and the median of each counts. Ours is verified as
always. Each peer runs in a virtual environment of its own, which the first run makes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import redis

from bench.lib.bare import bare_gets, raw_stream
from bench.lib.processes import ANSWER_TIMEOUT_S, PeerSkippedError, end
from bench.lib.report import Report, bar_chart, parser_of, timed
from bench.lib.workload import MIB, SMALL, connect, redis_server, serving
from bench.local import BURST_CHUNKS, bench_burst
from bench.peers.lmcache import VERSION, Adapter, LMCache, Server
from bench.peers.mooncake import VERSION as MOONCAKE
from bench.peers.mooncake import Mooncake
from bench.peers.ours import (
    Side,
    TierSide,
    bare_loads_s,
    make_frames,
    put_numbered,
    read_for,
    request_side,
)
from kvstore.server.main import keep_freed_memory
from kvstore.server.wiring import LOADS_AT_ONCE
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.redis import RedisTier

BARS = {
    "disk_load_vs_lmcache_fs_native": 1.5,
    "disk_store_vs_lmcache_fs_native": 1.0,
    "redis_load_vs_lmcache_resp": 1.0,
    "retrieve_vs_lmcache_shm": 1.5,
    "store_vs_lmcache_shm": 1.0,
    "retrieve_vs_mooncake_tcp": 1.5,
    "store_vs_mooncake_tcp": 1.5,
    "readable_under_writes": 1.0,
}
"""What each has to reach; burst_lost has to be 0."""
DISK_KEYS = ("disk_load_vs_lmcache_fs_native", "disk_store_vs_lmcache_fs_native")
DISK_LIMIT_KEYS = ("disk_load_limit_vs_lmcache_fs_native",)
REDIS_KEYS = ("redis_load_vs_lmcache_resp", "redis_store_vs_lmcache_resp")
REDIS_LIMIT_KEYS = ("redis_load_limit_vs_lmcache_resp",)
SHM_KEYS = ("retrieve_vs_lmcache_shm", "store_vs_lmcache_shm")
MOONCAKE_KEYS = ("retrieve_vs_mooncake_tcp", "store_vs_mooncake_tcp")
MOONCAKE_LIMIT_KEYS = ("retrieve_limit_vs_mooncake_tcp",)
ROUNDS = 3
"""Of each side, in turns; a round repeats its work a few times itself."""
OBJECTS, OBJECT_BYTES, REQUESTS = 64, 2 * MIB, 8
STORE_THREADS = 4
"""As many as fs_native has; the server stores with one for each medium."""
READABLE_KEYS = 16
FLOOD_S, READ_S, SETTLE_S = 3.0, 5.0, 2.0
"""The first is the writer's lead: what is to be read is out of CPU memory by then."""
WRITES = f"100000 100 {FLOOD_S + READ_S}"
"""The first number, chunks of 1 MiB a second, and for how long."""
CPU_GIB = 0.125


@dataclass(frozen=True, slots=True)
class Run:
    """Where files go, and what is reported."""

    folder: Path
    report: Report

    def add(self, key: str, value: float, ours: str, theirs: str) -> None:
        """Report a ratio with what it is made of, and its bar where it has one."""
        bar = f", bar {BARS[key]:g}" if key in BARS else ""
        self.report.add(key, value, f"ours {ours}", f"theirs {theirs}{bar}")

    def add_speeds(self, keys: Sequence[str], size_bytes: int, ours: Side, theirs: Side) -> None:
        """Report the load of *size_bytes* under the first key, the store under the second."""
        pairs = [(ours.load_s, theirs.load_s), (ours.store_s, theirs.store_s)]
        for key, (mine, other) in zip(keys, pairs, strict=False):
            words = [
                f"{size_bytes / median(seconds) / 1e9:.2f} GB/s "
                f"(best {size_bytes / min(seconds) / 1e9:.2f}), {side.words}"
                for seconds, side in ((mine, ours), (other, theirs))
            ]
            self.add(key, median(other) / median(mine), *words)


def scratch() -> TemporaryDirectory[str]:
    """Return a folder that goes with all that is in it."""
    return TemporaryDirectory(prefix="kvstore-peers-")


def compare_disk(run: Run, peer: LMCache) -> None:
    """64 objects of 2 MiB through our disk tier, and through LMCache's adapter of files."""
    ours, theirs = Side("disk tier in process, verified"), Side("fs_native in process")
    bare = Side("preadv with as many threads, nothing verified")
    with scratch() as folder:
        disk = Path(folder) / "disk"
        tier = DiskTier((disk, OBJECTS * (OBJECT_BYTES + MIB)))
        with closing(TierSide(tier, make_frames(OBJECTS, 1), STORE_THREADS)) as side:
            side.run(Side("warm-up"), 1)
            for _ in range(ROUNDS):
                side.run(ours, ROUNDS)
                bare.load_s += bare_loads_s(disk, side.out, LOADS_AT_ONCE["disk"], ROUNDS)
                with scratch() as base:
                    adapter = {"type": "fs_native", "base_path": base}
                    theirs.extend(*peer.bench_l2(adapter, OBJECTS, OBJECT_BYTES))
    run.add_speeds(DISK_KEYS, OBJECTS * OBJECT_BYTES, ours, theirs)
    run.add_speeds(DISK_LIMIT_KEYS, OBJECTS * OBJECT_BYTES, bare, theirs)


def compare_redis(run: Run, peer: LMCache) -> None:
    """The same through one Redis: our tier, LMCache's adapter, and redis-py's GET."""
    ours, theirs = Side("Redis tier in process, verified"), Side("resp in process")
    plain = Side("redis-py GET of the same parts")
    bare = Side("GETRANGE of the same over one bare socket, nothing verified")
    with ExitStack() as stack:
        port = stack.enter_context(redis_server(Path(stack.enter_context(scratch()))))
        tier = RedisTier(f"redis://127.0.0.1:{port}/1", 1 << 30, timeout_ms=5000)
        side = TierSide(tier, make_frames(OBJECTS, 2), STORE_THREADS)
        stack.enter_context(closing(side))
        client, other = (stack.enter_context(redis.Redis(port=port, db=db)) for db in (1, 0))
        adapter: Adapter = {"type": "resp", "host": "127.0.0.1", "port": port}
        side.run(Side("warm-up"), 1)
        for _ in range(ROUNDS):
            side.run(ours, ROUNDS)
            names = [one for one in client.scan_iter(count=1000) if not bytes(one).endswith(b":m")]
            plain.load_s.append(timed(partial(deque, map(client.get, names), 0)))
            with bare_gets(port, 1, names) as gets:
                bare.load_s += [timed(gets) for _ in range(ROUNDS)]
            theirs.extend(*peer.bench_l2(adapter, OBJECTS, OBJECT_BYTES))
            other.flushdb()
    size_bytes = OBJECTS * OBJECT_BYTES
    run.add_speeds(REDIS_KEYS, size_bytes, ours, theirs)
    run.add_speeds(("redis_load_vs_plain_redis",), size_bytes, ours, plain)
    run.add_speeds(REDIS_LIMIT_KEYS, size_bytes, bare, theirs)


def compare_shm(run: Run, peer: LMCache) -> None:
    """Requests of 16.8 MB between a client and a server on one host."""
    ours = Side("put and get through shm, verified")
    theirs = Side("bench server --mode cpu, without its lookup")
    with request_side("shm", 8, 2) as side, peer.server(2, None) as server:
        for number in range(ROUNDS):
            side.run(ours, REQUESTS)
            times = server.bench(number * REQUESTS, REQUESTS)
            theirs.extend(times.store_s, times.retrieve_s)
        run.add_speeds(SHM_KEYS, side.size_bytes, ours, theirs)


def compare_mooncake(run: Run, peer: Mooncake) -> None:
    """Objects of 16 MiB, one at a time, over TCP on the loopback device."""
    ours = Side("put and get over tcp, verified")
    theirs = Side(f"{MOONCAKE}, put_from and get_into, TCP")
    bare = Side("a bare stream, sendall and recv_into, TCP")
    with (
        request_side("tcp", 16, 1) as side,
        raw_stream(side.size_bytes) as receive,
        peer.client(side.size_bytes) as client,
    ):
        for _ in range(4 * ROUNDS):
            side.run(ours, 1)
            bare.load_s.append(timed(receive))
            times = client.ask("round")
            theirs.extend([times["store_s"]], [times["load_s"]])
        run.add_speeds(MOONCAKE_KEYS, side.size_bytes, ours, theirs)
        run.add_speeds(MOONCAKE_LIMIT_KEYS, side.size_bytes, bare, theirs)


def measure_readable(run: Run, theirs: str) -> None:
    """The share of gets of 16 chunks on disk that are right while another client writes."""
    with scratch() as disk:
        flags = ("--tiers", "cpu,disk", "--cpu", "128MiB", "--disk", f"3GiB:{disk}")
        with serving(*flags) as (address, _), connect(address, SMALL) as client:
            put_numbered(client, READABLE_KEYS)
            command = [sys.executable, "-m", "bench.peers.ours", address, *WRITES.split()]
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


def lmcache_readable(peer: LMCache) -> str:
    """Say what LMCache delivers of 16 chunks under the same writes."""
    with (
        _lmcache_server(peer) as server,
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


def measure_burst(run: Run, theirs: str) -> None:
    """2,000 puts of 1 MiB into 128 MiB of CPU memory and disk: how many cannot be read after."""
    with scratch() as folder:
        bench_burst(Path(folder), run.report)
    run.report.note("  the same burst", "", f"theirs {theirs}")


def lmcache_burst(peer: LMCache) -> str:
    """Say how many chunks of the same burst LMCache loses."""
    with _lmcache_server(peer) as server, server.client(1000) as client:
        client.ask(f"store 0 {BURST_CHUNKS}")
        time.sleep(SETTLE_S)
        read = client.ask(f"read {BURST_CHUNKS} 0")
    return f"{BURST_CHUNKS - read['delivered']:.0f} lost by {VERSION} with fs_native"


@contextmanager
def _lmcache_server(peer: LMCache) -> Iterator[Server]:
    adapter: Adapter = {"type": "fs_native", "base_path": (folder := scratch()).name}
    with folder, peer.server(CPU_GIB, adapter) as server:
        yield server


def _say(work: Callable[[LMCache], str], peer: LMCache | str) -> str:
    """Return what *work* says of LMCache, or why there is nothing to say."""
    try:
        return f"skipped: {peer}" if isinstance(peer, str) else work(peer)
    except PeerSkippedError as error:
        return f"skipped: {error}"


COMPARED: dict[str, tuple[Any, Sequence[str], Callable[[Run, Any], None]]] = {
    "disk": (LMCache, DISK_KEYS + DISK_LIMIT_KEYS, compare_disk),
    "redis": (LMCache, REDIS_KEYS + REDIS_LIMIT_KEYS, compare_redis),
    "shm": (LMCache, SHM_KEYS, compare_shm),
    "mooncake": (Mooncake, MOONCAKE_KEYS + MOONCAKE_LIMIT_KEYS, compare_mooncake),
}
"""By part: the peer, keys that are left out without it, and what compares."""
BESIDE = {
    "readable": (measure_readable, lmcache_readable),
    "burst": (measure_burst, lmcache_burst),
}
"""Parts whose key needs no peer, and what says the same of LMCache."""


def measure(run: Run, venvs: Path, only: Sequence[str]) -> None:
    """Install the peers of the parts *only*, then measure beside each."""
    installed: dict[Any, Any] = {}
    for part in (part for part in (*COMPARED, *BESIDE) if part in only):
        kind, keys, work = COMPARED.get(part, (LMCache, (), None))
        if kind not in installed:
            try:
                installed[kind] = kind.install(venvs, run.folder)
            except PeerSkippedError as error:
                installed[kind] = str(error)
        peer = installed[kind]
        if work is None:
            ours, theirs = BESIDE[part]
            ours(run, _say(theirs, peer))
        elif isinstance(peer, str):
            run.report.skip(keys, peer)
        else:
            try:
                work(run, peer)
            except PeerSkippedError as error:
                run.report.skip(keys, str(error))


def main(argv: Sequence[str] | None = None) -> None:
    """Run every part and print the report."""
    parser = parser_of(__doc__, [*COMPARED, *BESIDE])
    parser.add_argument("--venvs", type=Path, default=Path("build/peers"), metavar="DIR",
                        help="where the peers are installed; default build/peers")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios as an SVG")
    flags = parser.parse_args(argv)
    keep_freed_memory()  # as the server, whose tiers run in this process here
    report = Report("peers")
    with scratch() as folder:
        measure(Run(Path(folder), report), flags.venvs.absolute(), flags.only)
    if flags.plot is not None:
        bars = [(key, report.values[key], bar) for key, bar in BARS.items() if key in report.values]
        bar_chart(flags.plot, "kvstore against its peers: ours / theirs", bars)
    report.print(only_json=flags.json)


if __name__ == "__main__":
    main()
