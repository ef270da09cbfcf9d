"""Our store against LMCache, Mooncake Store and plain Redis, on one machine.

Both sides of a ratio alternate in one run; the median of each counts. Our reads are verified. Each
peer has its own virtual environment, made by the first run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import redis

from bench.lib import workload
from bench.lib.bare import bare_gets, bare_read, raw_stream
from bench.lib.processes import ANSWER_TIMEOUT_S, PeerSkippedError, end
from bench.lib.report import Report, parser_of, timed
from bench.lib.workload import MIB, SMALL, arrays, connect, joined
from bench.local import BURST_CHUNKS, bench_burst
from bench.peers.lmcache import VERSION, Adapter, LMCache, Server
from bench.peers.mooncake import VERSION as MOONCAKE
from bench.peers.mooncake import Mooncake
from kvstore.client import Chunk, Client
from kvstore.codecs.raw import RawCodec
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import FrameTemplate, check_frame, raw_frame_bytes
from kvstore.proto.keys import representation_digest
from kvstore.proto.types import DIGEST_BYTES, ROOT, ChunkInfo, ChunkKey, KVLayout
from kvstore.server.main import keep_freed_memory
from kvstore.server.wiring import LOADS_AT_ONCE
from kvstore.tiers.base import Tier
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
"""Lower bars; burst_lost must be 0."""
KEYS = {
    "disk": ("disk_load_vs_lmcache_fs_native", "disk_store_vs_lmcache_fs_native",
             "disk_load_limit_vs_lmcache_fs_native"),
    "redis": ("redis_load_vs_lmcache_resp", "redis_store_vs_lmcache_resp",
              "redis_load_limit_vs_lmcache_resp"),
    "shm": ("retrieve_vs_lmcache_shm", "store_vs_lmcache_shm"),
    "mooncake": ("retrieve_vs_mooncake_tcp", "store_vs_mooncake_tcp",
                 "retrieve_limit_vs_mooncake_tcp"),
}  # fmt: skip
"""By part, the keys skipped without its peer: a load, a store, and a load by bare loops."""
ROUNDS = 3
"""Rounds of each side, in turns; a round repeats its work a few times."""
OBJECTS, OBJECT_BYTES, REQUESTS = 64, 2 * MIB, 8
STORE_THREADS = 4
"""As in fs_native; the server stores with one thread for each tier."""
READABLE_KEYS = 16
FLOOD_S, READ_S, SETTLE_S = 3.0, 5.0, 2.0
"""The first is the writer's lead, which evicts the chunks to be read from CPU memory."""
WRITES = f"100000 100 {FLOOD_S + READ_S}"
"""First chunk number, chunks of 1 MiB a second, and seconds."""
CPU_GIB = 0.125
_BASE = np.random.default_rng(5).integers(0, 1 << 16, (2, 8, 256, 128), dtype=np.uint16)
_WRITER = "import sys; from bench.peers.__main__ import write_for; write_for(*sys.argv[1:])"
scratch = partial(TemporaryDirectory, prefix="kvstore-peers-")


@dataclass(slots=True)
class Side:
    """The seconds of each store and load of one side.

    The median counts: new pages make one store ten times as fast as another, so the best of few is
    not representative.
    """

    what: str
    store_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)

    def extend(self, store_s: Sequence[float], load_s: Sequence[float]) -> None:
        self.store_s += store_s
        self.load_s += load_s

    def speed(self, size_bytes: int, seconds: Sequence[float]) -> str:
        mean, best = (size_bytes / one / 1e9 for one in (median(seconds), min(seconds)))
        return f"{mean:.2f} GB/s (best {best:.2f}), {self.what}"


@dataclass(frozen=True, slots=True)
class Run:
    """The folder for files, and the report."""

    folder: Path
    report: Report

    def add(self, key: str, value: float, ours: str, theirs: str) -> None:
        bar = f", bar {BARS[key]:g}" if key in BARS else ""
        self.report.add(key, value, f"ours {ours}", f"theirs {theirs}{bar}")

    def add_speeds(self, keys: Sequence[str], size: int, ours: Side, theirs: Side) -> None:
        pairs = [(ours.load_s, theirs.load_s), (ours.store_s, theirs.store_s)]
        for key, (mine, other) in zip(keys, pairs, strict=False):
            figures = ours.speed(size, mine), theirs.speed(size, other)
            self.add(key, median(other) / median(mine), *figures)


# --- our side, measured like the peer's own figures


def make_frames(count: int, seed: int) -> list[tuple[ChunkInfo, Bytes]]:
    """Return *count* frames of 2 MiB of noise."""
    model = workload.model_of("2", 2)
    layout, digest = KVLayout.of(model, 256), representation_digest(model)
    rng = np.random.default_rng(seed)
    frames = []
    for tensors in workload.buffers(model, count):
        for part in arrays([tensors]):
            part[...] = rng.integers(0, 1 << 16, part.shape, np.uint16)
        key = ChunkKey(rng.bytes(32))
        template = FrameTemplate(key, ROOT, digest, bytes(DIGEST_BYTES), layout)
        frame = np.empty(raw_frame_bytes(layout), np.uint8)
        frames.append((RawCodec().encode(template, tensors, frame).info(), frame))
    return frames


class TierSide:
    """One of our tiers in this process, as a peer's benchmark runs its adapter.

    Some threads store verified frames, as the server copies them. Loads verify step by step into
    allocated memory, as in the server.
    """

    def __init__(self, tier: Tier, frames: Sequence[tuple[ChunkInfo, Bytes]]) -> None:
        self._tier = tier
        self._frames = frames
        self.out = [np.zeros_like(frame) for _, frame in frames]
        self._pool = ThreadPoolExecutor(STORE_THREADS)

    def _store(self, pair: tuple[ChunkInfo, Bytes]) -> None:
        info, frame = pair
        check_frame(frame, info.key)
        reservation = self._tier.reserve(info)
        self._tier.write(reservation, frame)
        assert self._tier.seal(reservation)

    def run(self, side: Side, repeats: int) -> None:
        """Store and load *repeats* times, with a flush between, which fs_native does not have."""
        infos = [info for info, _ in self._frames]
        for _ in range(repeats):
            for info in infos:
                self._tier.delete(info.key)
            store_s = timed(lambda: list(self._pool.map(self._store, self._frames)))
            self._tier.flush()
            for out in self.out:
                out[:] = 0
            with workload.loading(self._tier, list(zip(infos, self.out, strict=True))) as load_all:
                side.extend([store_s], [timed(load_all)])
            for (_, frame), out in zip(self._frames, self.out, strict=True):
                assert np.array_equal(frame, out), "wrong bytes"

    def close(self) -> None:
        self._pool.shutdown()
        self._tier.close()


def bare_loads_s(folder: Path, outs: Sequence[Bytes], threads: int, rounds: int) -> list[float]:
    """Return the seconds to read the bytes of *outs* from a disk tier's extents, unverified."""
    with min((folder / "extents").iterdir()).open("rb") as file:
        # Only the first extent is read; the time is scaled to all bytes.
        targets = outs[: os.fstat(file.fileno()).st_size // len(outs[0])]
        with bare_read(file.fileno(), targets, threads) as read:
            scale = len(outs) / len(targets)
            return [scale * timed(read) for _ in range(rounds)]


class RequestSide:
    """A client that puts the same tensors under new keys and gets them back."""

    def __init__(self, client: Client, length: int) -> None:
        self._client = client
        _, self._chunks = workload.make_chunks(client, length, 1)
        self._out = workload.buffers(client.model, length)
        self._seeds = count(2)
        self.size_bytes = workload.chunk_bytes(self._chunks)

    def run(self, side: Side, repeats: int) -> None:
        client, out = self._client, self._out
        for _ in range(repeats):
            keys = workload.keys_of(client, len(self._chunks), next(self._seeds))
            chunks = workload.chunks_of(keys, [chunk.tensors for chunk in self._chunks])
            for part in arrays(out):
                part[...] = 0
            put_s = timed(partial(workload.put_all, client, chunks))
            side.extend([put_s], [timed(partial(workload.get_all, client, keys, out))])
            workload.check(chunks, out)
            client.delete(keys=keys)


@contextmanager
def request_side(layers: int, length: int, *flags: str, **options: Any) -> Iterator[RequestSide]:
    model = workload.model_of(str(layers), layers)
    with joined("--tiers", "cpu", "--cpu", "1GiB", *flags, model=model, **options) as client:
        yield RequestSide(client, length)


def _numbered(client: Client, number: int) -> Chunk:
    """Return chunk *number* of 1 MiB, a prompt of its own."""
    (key,) = client.keys([number % (1 << 31)] * 256)
    return Chunk(key, [[list(_BASE + np.uint16(number % (1 << 16)))]])


def write_for(address: str, first: str, per_s: str, seconds: str) -> None:
    """Put new chunks of 1 MiB, *per_s* a second; print their number."""
    sent = 0
    with connect(address, SMALL) as client:
        started = time.monotonic()
        while time.monotonic() - started < float(seconds):
            client.put_chunks([_numbered(client, int(first) + sent)])
            sent += 1
            time.sleep(max(0.0, started + sent / float(per_s) - time.monotonic()))
    print(sent)


def read_for(client: Client, count: int, seconds: float) -> tuple[int, int]:
    """Get chunks 0 to *count* one by one, repeatedly; return the reads, and the correct ones."""
    reads = correct = 0
    started = time.monotonic()
    while reads < count or time.monotonic() - started < seconds:
        wanted = _numbered(client, reads % count)
        found = client.get_chunks([wanted.key])
        reads += 1
        correct += len(found) == 1 and np.array_equal(arrays(found), arrays([wanted.tensors]))
    return reads, correct


# --- comparisons


def compare_disk(run: Run, peer: LMCache) -> None:
    """Compare 64 objects of 2 MiB in our disk tier and in LMCache's file adapter."""
    ours, theirs = Side("disk tier in process, verified"), Side("fs_native in process")
    bare = Side("preadv with as many threads, unverified")
    with scratch() as folder:
        disk = Path(folder) / "disk"
        tier = DiskTier((disk, OBJECTS * (OBJECT_BYTES + MIB)))
        with closing(TierSide(tier, make_frames(OBJECTS, 1))) as side:
            side.run(Side("warm-up"), 1)
            for _ in range(ROUNDS):
                side.run(ours, ROUNDS)
                bare.load_s += bare_loads_s(disk, side.out, LOADS_AT_ONCE["disk"], ROUNDS)
                with scratch() as base:
                    adapter = {"type": "fs_native", "base_path": base}
                    theirs.extend(*peer.bench_l2(adapter, OBJECTS, OBJECT_BYTES))
    run.add_speeds(KEYS["disk"][:2], OBJECTS * OBJECT_BYTES, ours, theirs)
    run.add_speeds(KEYS["disk"][2:], OBJECTS * OBJECT_BYTES, bare, theirs)


def compare_redis(run: Run, peer: LMCache) -> None:
    """Compare the same in one Redis: our tier, LMCache's adapter, and redis-py's GET."""
    ours, theirs = Side("Redis tier in process, verified"), Side("resp in process")
    plain = Side("redis-py GET of the same parts")
    bare = Side("GETRANGE of the same over one bare socket, unverified")
    with ExitStack() as stack:
        port = stack.enter_context(workload.redis_server())
        tier = RedisTier(f"redis://127.0.0.1:{port}/1", 1 << 30, timeout_ms=5000)
        side = stack.enter_context(closing(TierSide(tier, make_frames(OBJECTS, 2))))
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
    run.add_speeds(KEYS["redis"][:2], OBJECTS * OBJECT_BYTES, ours, theirs)
    run.add_speeds(("redis_load_vs_plain_redis",), OBJECTS * OBJECT_BYTES, ours, plain)
    run.add_speeds(KEYS["redis"][2:], OBJECTS * OBJECT_BYTES, bare, theirs)


def compare_shm(run: Run, peer: LMCache) -> None:
    ours = Side("put and get through shm, verified")
    theirs = Side("bench server --mode cpu, without its lookup")
    with request_side(8, 2, transport="shm") as side, peer.server(2, None) as server:
        for number in range(ROUNDS):
            side.run(ours, REQUESTS)
            theirs.extend(*server.bench(number * REQUESTS, REQUESTS))
        run.add_speeds(KEYS["shm"], side.size_bytes, ours, theirs)


def compare_mooncake(run: Run, peer: Mooncake) -> None:
    """Compare objects of 16 MiB, one at a time, over TCP on the loopback device."""
    ours = Side("put and get over tcp, verified")
    theirs = Side(f"{MOONCAKE}, put_from and get_into, TCP")
    bare = Side("a bare stream, sendall and recv_into, TCP")
    with (
        request_side(16, 1, "--bulk", "127.0.0.1:0", transport="tcp") as side,
        raw_stream(side.size_bytes) as receive,
        peer.client(side.size_bytes) as client,
    ):
        for _ in range(4 * ROUNDS):
            side.run(ours, 1)
            bare.load_s.append(timed(receive))
            times = client.request("round")
            theirs.extend([times["store_s"]], [times["load_s"]])
        run.add_speeds(KEYS["mooncake"][:2], side.size_bytes, ours, theirs)
        run.add_speeds(KEYS["mooncake"][2:], side.size_bytes, bare, theirs)


def measure_readable(run: Run, theirs: str) -> None:
    """Add the share of correct gets of 16 chunks on disk while another client writes."""
    with scratch() as disk:
        flags = ("--tiers", "cpu,disk", "--cpu", "128MiB", "--disk", f"3GiB:{disk}")
        with joined(*flags, model=SMALL) as client:
            for number in range(READABLE_KEYS):
                client.put_chunks([_numbered(client, number)])
            command = [sys.executable, "-c", _WRITER, client.address, *WRITES.split()]
            writer = subprocess.Popen(command, stdout=subprocess.PIPE)
            try:
                time.sleep(FLOOD_S)
                reads, correct = read_for(client, READABLE_KEYS, READ_S)
                out, _ = writer.communicate(timeout=ANSWER_TIMEOUT_S)
            finally:
                end(writer)
    if writer.returncode:
        raise RuntimeError(f"the writer exited with {writer.returncode}")
    speed = int(out) / (FLOOD_S + READ_S)
    ours = f"{correct} of {reads} gets correct, {speed:.0f} MiB/s written"
    run.add("readable_under_writes", correct / reads, ours, theirs)


def lmcache_readable(peer: LMCache) -> str:
    with (
        _lmcache_server(peer) as server,
        server.client(1000) as reader,
        server.client(2000) as writer,
    ):
        reader.request(f"store 0 {READABLE_KEYS}")
        writer.send(f"write {WRITES}")
        time.sleep(FLOOD_S)
        read = reader.request(f"read {READABLE_KEYS} {READ_S}")
        written = writer.answer()
    share, speed = read["delivered"] / read["reads"], written["sent"] / written["seconds"]
    return f"{share:.2f}, {speed:.0f} MiB/s sent to {VERSION} with fs_native"


def measure_burst(run: Run, theirs: str) -> None:
    with scratch() as folder:
        bench_burst(run.report, Path(folder))
    run.report.note("  the same burst", "", f"theirs {theirs}")


def lmcache_burst(peer: LMCache) -> str:
    with _lmcache_server(peer) as server, server.client(1000) as client:
        client.request(f"store 0 {BURST_CHUNKS}")
        time.sleep(SETTLE_S)
        read = client.request(f"read {BURST_CHUNKS} 0")
    return f"{BURST_CHUNKS - read['delivered']:.0f} lost by {VERSION} with fs_native"


@contextmanager
def _lmcache_server(peer: LMCache) -> Iterator[Server]:
    adapter: Adapter = {"type": "fs_native", "base_path": (folder := scratch()).name}
    with folder, peer.server(CPU_GIB, adapter) as server:
        yield server


COMPARED: dict[str, Callable[[Run, Any], None]] = {
    "disk": compare_disk, "redis": compare_redis, "shm": compare_shm, "mooncake": compare_mooncake,
}  # fmt: skip
BESIDE = {
    "readable": (measure_readable, lmcache_readable),
    "burst": (measure_burst, lmcache_burst),
}
"""Parts whose key needs no peer, and the same measurement of LMCache."""


def installed(kind: Any, venvs: Path, folder: Path) -> Any:
    try:
        return kind.install(venvs, folder)
    except PeerSkippedError as error:
        return error


def measure(run: Run, venvs: Path, only: Sequence[str]) -> None:
    wanted = {part: Mooncake if part == "mooncake" else LMCache for part in only}
    peers = {kind: installed(kind, venvs, run.folder) for kind in set(wanted.values())}
    for part in (part for part in (*COMPARED, *BESIDE) if part in only):
        peer, theirs = peers[wanted[part]], ""
        try:
            if isinstance(peer, PeerSkippedError):
                raise peer
            if part in COMPARED:
                COMPARED[part](run, peer)
            else:
                theirs = BESIDE[part][1](peer)
        except PeerSkippedError as error:
            theirs = f"skipped: {error}"
            run.report.skip(KEYS.get(part, ()), str(error))
        if part in BESIDE:
            BESIDE[part][0](run, theirs)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, [*COMPARED, *BESIDE])
    parser.add_argument("--venvs", type=Path, default=Path("build/peers"), metavar="DIR",
                        help="folder of the peers; default build/peers")  # fmt: skip
    flags = parser.parse_args(argv)
    keep_freed_memory()  # as in the server: its tiers run in this process
    report = Report("peers")
    with scratch() as folder:
        measure(Run(Path(folder), report), flags.venvs.absolute(), flags.only)
    report.print(only_json=flags.json)


if __name__ == "__main__":
    main()
