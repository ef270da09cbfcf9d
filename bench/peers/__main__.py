"""Our store beside LMCache, Mooncake Store and plain Redis, on one machine.

Both sides of a ratio run in turns in one run, and the median of each counts. Ours is verified as
always. Each peer runs in a virtual environment of its own, which the first run makes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import redis

from bench.lib.bare import bare_gets, raw_stream
from bench.lib.processes import ANSWER_TIMEOUT_S, PeerSkippedError, end
from bench.lib.report import Report, bar_chart, best_s, parser_of
from bench.lib.workload import MIB, SMALL, redis_server, serving
from bench.local import bench_burst
from bench.peers.lmcache import VERSION, Adapter, LMCache, Server
from bench.peers.mooncake import VERSION as MOONCAKE
from bench.peers.mooncake import Mooncake
from bench.peers.ours import (
    DEADLINE_MS,
    Side,
    TierSide,
    bare_loads_s,
    make_frames,
    read_for,
    request_side,
    small_base,
    small_keys,
    small_tensors,
)
from kvstore.client import Chunk, Client, ClientOptions
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


@dataclass(frozen=True, slots=True)
class Run:
    """Where files go, and what is reported."""

    folder: Path
    report: Report

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """Make an empty folder and remove it with all that is in it."""
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

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

    def attempt(self, keys: Sequence[str], work: Callable[[], None]) -> None:
        """Do *work*; leave *keys* out, saying why, when its peer cannot be had."""
        try:
            work()
        except PeerSkippedError as error:
            self.report.skip(keys, str(error))


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


def measure_burst(run: Run, theirs: str) -> None:
    """2,000 puts of 1 MiB into 128 MiB of CPU memory and disk: how many cannot be read after."""
    with run.scratch("burst") as folder:
        bench_burst(folder, run.report)
    run.report.note("  the same burst", "", f"theirs {theirs}")


def lmcache_readable(run: Run, peer: LMCache) -> str:
    """Say what LMCache delivers of 16 chunks under the same writes."""
    with (
        _lmcache_server(run, peer) as server,
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
    with _lmcache_server(run, peer) as server, server.client(1000) as client:
        client.ask(f"store 0 {BURST_CHUNKS}")
        time.sleep(SETTLE_S)
        read = client.ask(f"read {BURST_CHUNKS} 0")
    lost = BURST_CHUNKS - read["delivered"]
    return f"{lost:.0f} lost by {VERSION} with fs_native"


@contextmanager
def _lmcache_server(run: Run, peer: LMCache) -> Iterator[Server]:
    with run.scratch("lmcache") as folder:
        adapter = {"type": "fs_native", "base_path": str(folder)}
        with peer.server(CPU_GIB, adapter) as server:
            yield server


Peer = TypeVar("Peer")

ROUNDS = 3
"""Of each side, in turns; a round repeats its work a few times itself."""
OBJECTS = 64
OBJECT_BYTES = 2 * MIB
REQUESTS = 8
STORE_THREADS = 4
"""As many as fs_native has; the server stores with one for each medium."""
DISK_THREADS = LOADS_AT_ONCE["disk"]
PARTS = ("disk", "redis", "shm", "mooncake", "readable", "burst")
DISK_KEYS = ("disk_load_vs_lmcache_fs_native", "disk_store_vs_lmcache_fs_native")
DISK_LIMIT_KEYS = ("disk_load_limit_vs_lmcache_fs_native",)
REDIS_LIMIT_KEYS = ("redis_load_limit_vs_lmcache_resp",)
REDIS_KEYS = ("redis_load_vs_lmcache_resp", "redis_store_vs_lmcache_resp")
SHM_KEYS = ("retrieve_vs_lmcache_shm", "store_vs_lmcache_shm")
MOONCAKE_KEYS = ("retrieve_vs_mooncake_tcp", "store_vs_mooncake_tcp")
MOONCAKE_LIMIT_KEYS = ("retrieve_limit_vs_mooncake_tcp",)


def compare_disk(run: Run, peer: LMCache) -> None:
    """64 objects of 2 MiB through our disk tier, and through LMCache's adapter of files."""
    ours = Side("disk tier in process, verified")
    theirs = Side("fs_native in process")
    bare = Side("preadv with as many threads, nothing verified")
    with run.scratch("disk") as folder:
        tier = DiskTier((folder / "disk", OBJECTS * (OBJECT_BYTES + MIB)))
        side = TierSide(tier, make_frames(OBJECTS, 1), STORE_THREADS)
        try:
            side.warm_up()
            for _ in range(ROUNDS):
                side.run(ours, ROUNDS)
                bare.load_s += bare_loads_s(folder / "disk", side.out, DISK_THREADS, ROUNDS)
                with run.scratch("lmcache") as base:
                    adapter = {"type": "fs_native", "base_path": str(base)}
                    theirs.extend(*peer.bench_l2(adapter, OBJECTS, OBJECT_BYTES))
        finally:
            side.close()
    run.add_speeds(DISK_KEYS, OBJECTS * OBJECT_BYTES, ours, theirs)
    run.add_speeds(DISK_LIMIT_KEYS, OBJECTS * OBJECT_BYTES, bare, theirs)


def compare_redis(run: Run, peer: LMCache) -> None:
    """The same through one Redis: our tier, LMCache's adapter, and redis-py's GET."""
    ours, theirs = Side("Redis tier in process, verified"), Side("resp in process")
    plain = Side("redis-py GET of the same parts")
    bare = Side("GETRANGE of the same over one bare socket, nothing verified")
    with run.scratch("redis") as folder, redis_server(folder) as port:
        tier = RedisTier(f"redis://127.0.0.1:{port}/1", 1 << 30, timeout_ms=5000)
        side = TierSide(tier, make_frames(OBJECTS, 2), STORE_THREADS)
        adapter: Adapter = {"type": "resp", "host": "127.0.0.1", "port": port}
        client = redis.Redis(port=port, db=1)
        try:
            side.warm_up()
            for _ in range(ROUNDS):
                side.run(ours, ROUNDS)
                plain.load_s.append(_get_all_s(client))
                with bare_gets(port, 1, _names(client)) as gets:
                    bare.load_s += [best_s(gets, 1) for _ in range(ROUNDS)]
                theirs.extend(*peer.bench_l2(adapter, OBJECTS, OBJECT_BYTES))
                with redis.Redis(port=port) as other:
                    other.flushdb()
        finally:
            client.close()
            side.close()
    size_bytes = OBJECTS * OBJECT_BYTES
    run.add_speeds(REDIS_KEYS, size_bytes, ours, theirs)
    run.add_speeds(("redis_load_vs_plain_redis",), size_bytes, ours, plain)
    run.add_speeds(REDIS_LIMIT_KEYS, size_bytes, bare, theirs)


def _names(client: redis.Redis) -> list[bytes]:
    """Return the names of all parts, manifests left out."""
    return [name for name in client.scan_iter(count=1000) if not bytes(name).endswith(b":m")]


def _get_all_s(client: redis.Redis) -> float:
    names = _names(client)
    return best_s(lambda: [client.get(name) for name in names], 1)


def compare_shm(run: Run, peer: LMCache) -> None:
    """Requests of 16.8 MB between a client and a server on one host."""
    ours = Side("put and get through shm, verified")
    theirs = Side("bench server --mode cpu, without its lookup")
    lookups_s: list[float] = []
    with (
        run.scratch("shm") as folder,
        request_side(folder, "shm", 8, 2) as side,
        peer.server(2, None) as server,
    ):
        for number in range(ROUNDS):
            side.run(ours, REQUESTS)
            times = server.bench(number * REQUESTS, REQUESTS)
            theirs.extend(times.store_s, times.retrieve_s)
            lookups_s += times.lookup_s
        size_bytes = side.size_bytes
    run.add_speeds(SHM_KEYS, size_bytes, ours, theirs)
    ours_ms, theirs_ms = ([1e3 * median(t) for t in (x.load_s, x.store_s)] for x in (ours, theirs))
    run.report.note(
        "  of one request", "",
        f"ours get {ours_ms[0]:.2f} put {ours_ms[1]:.2f} ms; theirs lookup "
        f"{1e3 * median(lookups_s):.2f} retrieve {theirs_ms[0]:.2f} store {theirs_ms[1]:.2f} ms",
    )  # fmt: skip


def compare_mooncake(run: Run, peer: Mooncake) -> None:
    """Objects of 16 MiB, one at a time, over TCP on the loopback device."""
    ours = Side("put and get over tcp, verified")
    theirs = Side(f"{MOONCAKE}, put_from and get_into, TCP")
    bare = Side("a bare stream, sendall and recv_into, TCP")
    with (
        run.scratch("tcp") as folder,
        request_side(folder, "tcp", 16, 1) as side,
        raw_stream(side.size_bytes) as receive,
        peer.client(side.size_bytes) as client,
    ):
        for _ in range(4 * ROUNDS):
            side.run(ours, 1)
            bare.load_s.append(best_s(receive, 1))
            times = client.ask("round")
            theirs.take(times["store_s"], times["load_s"])
        size_bytes = side.size_bytes
    run.add_speeds(MOONCAKE_KEYS, size_bytes, ours, theirs)
    run.add_speeds(MOONCAKE_LIMIT_KEYS, size_bytes, bare, theirs)


def _say(work: Callable[[Run, LMCache], str], run: Run, peer: LMCache | str) -> str:
    """Return what *work* says of LMCache, or why there is nothing to say."""
    if isinstance(peer, str):
        return f"skipped: {peer}"
    try:
        return work(run, peer)
    except PeerSkippedError as error:
        return f"skipped: {error}"


def _install(install: Callable[[Path, Path], Peer], venvs: Path, folder: Path) -> Peer | str:
    """Return the peer, or why it cannot be had."""
    try:
        return install(venvs, folder)
    except PeerSkippedError as error:
        return str(error)


def compare(
    run: Run, keys: Sequence[str], work: Callable[[Run, Peer], None], peer: Peer | str
) -> None:
    """Do *work* with *peer*; leave *keys* out, saying why, when it cannot be had."""
    if isinstance(peer, str):
        run.report.skip(keys, peer)
    else:
        run.attempt(keys, partial(work, run, peer))


def measure(run: Run, venvs: Path, only: Sequence[str]) -> None:
    """Install the peers of the parts *only*, then measure beside each."""
    if set(only) - {"mooncake"}:
        _beside_lmcache(run, _install(LMCache.install, venvs, run.folder), only)
    if "mooncake" in only:
        mooncake = _install(Mooncake.install, venvs, run.folder)
        compare(run, MOONCAKE_KEYS + MOONCAKE_LIMIT_KEYS, compare_mooncake, mooncake)


def _beside_lmcache(run: Run, lmcache: LMCache | str, only: Sequence[str]) -> None:
    if "disk" in only:
        compare(run, DISK_KEYS + DISK_LIMIT_KEYS, compare_disk, lmcache)
    if "redis" in only:
        compare(run, REDIS_KEYS + REDIS_LIMIT_KEYS, compare_redis, lmcache)
    if "shm" in only:
        compare(run, SHM_KEYS, compare_shm, lmcache)
    if "readable" in only:
        measure_readable(run, _say(lmcache_readable, run, lmcache))
    if "burst" in only:
        measure_burst(run, _say(lmcache_burst, run, lmcache))


def main(argv: Sequence[str] | None = None) -> None:
    """Run every part and print the report."""
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--venvs", type=Path, default=Path("build/peers"), metavar="DIR",
                        help="where the peers are installed; default build/peers")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios as an SVG")
    flags = parser.parse_args(argv)
    keep_freed_memory()  # as the server, whose tiers run in this process here
    report = Report("peers")
    with tempfile.TemporaryDirectory() as name:
        measure(Run(Path(name), report), flags.venvs.absolute(), flags.only)
    if flags.plot is not None:
        bars = [(key, report.values[key], bar) for key, bar in BARS.items() if key in report.values]
        bar_chart(flags.plot, "kvstore against its peers: ours / theirs", bars)
    report.print(only_json=flags.json)


if __name__ == "__main__":
    main()
