"""Cost of one operation of the control path as chunks, clients and tiers grow.

Chunks and tiers are measured on an index in this process, as a million puts would take an hour.
Clients call a server process; its processor time counts, as all share this machine.
"""

from __future__ import annotations

import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import psutil

from bench.lib.report import Report, line_chart, parser_of
from bench.lib.workload import MIB, TINY, connect, make_chunks, redis_server, serving
from kvstore.client import Client
from kvstore.proto.device import HostDevice
from kvstore.proto.types import (
    ROOT,
    Accuracy,
    ChainDigest,
    ChunkInfo,
    ChunkKey,
    Component,
    DType,
    KVLayout,
    LayerKind,
    Namespace,
)
from kvstore.proto.unix_socket import Place
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.holds import Leases
from kvstore.server.security.sessions import Session, SessionTable
from kvstore.server.store.lookup import Lookup
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.breaker import Breaker
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.prefetch import Prefetch
from kvstore.server.tiering.tier_slot import TierCodec, Tiers, TierSlot
from kvstore.server.tiering.work_queue import WorkQueue
from kvstore.tiers.base import Tier
from kvstore.tiers.cpu import CpuTier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.gpu import GpuTier
from kvstore.tiers.locations import LocationTable
from kvstore.tiers.redis import RedisTier

PROMPT_CHUNKS = 512
FRAME_BYTES = 4096
SPACE = Namespace(bytes(16))
LAYOUT = KVLayout((Component(LayerKind.attention, DType.bfloat16, 1, 1, 8, 256),))
CHUNK_COUNTS = (1_000, 10_000, 100_000, 1_000_000)
CLIENT_COUNTS = (1, 4, 16, 64)
SAMPLES = 60
EVICT_ROUND = 64
"""Victims of one call, as in eviction."""
CLIENT_LOOKUPS = 640
DISK_CHUNKS = 8_192
Points = list[tuple[float, float]]


class Index:
    """An index over *tiers*, from the fastest to the slowest, and the keys of some prompts."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        ids = count(1)
        clock, raw = time.monotonic, TierCodec("raw")
        slots = [
            TierSlot(one, raw, LruEviction(), Breaker("tier", 3, 1000, clock), clock)
            for one in tiers
        ]
        self.names = [slot.name for slot in slots]
        leases = Leases(16, lambda: next(ids))
        self.catalog = Catalog({slot.name: slot.policy for slot in slots}, leases, 1, clock)
        work_queue = WorkQueue({f"ask-{name}": 0 for name in self.names}, 16, clock)
        moves = Moves(Tiers(slots), self.catalog, work_queue, Counters(), clock, 1000)
        self._lookup = Lookup(moves, 30_000, Prefetch(moves, 0), None)
        sessions = SessionTable(1, 60_000, lambda _: b"salt", clock, os.urandom)
        self._session: Session = sessions.open(TINY, "bench")
        self.table = LocationTable()
        self.sample: list[list[ChunkKey]] = []
        self.chunks = 0

    def grow(self, chunks: int) -> None:
        """Add prompts until there are *chunks*; keep the keys of about 16 of them."""
        step = max(1, chunks // 16)
        mark = self.chunks
        while self.chunks < chunks:
            infos = make_prompt()
            for info in infos:
                for name in self.names:
                    self.catalog.note_sealed(name, info)
                self.table.seal(info, Place(1, 1, 0, self.chunks * FRAME_BYTES, info.size_bytes, 0))
                self.chunks += 1
            if self.chunks >= mark:
                self.sample.append([info.key for info in infos])
                mark += step

    def look_up(self, number: int) -> float:
        """Return the seconds of one lookup with a lease."""
        keys, deadline = self.sample[number % len(self.sample)], time.monotonic() + 1
        started = time.perf_counter()
        match = self._lookup.lookup(
            self._session, keys, deadline, lease=True, min_accuracy=Accuracy.exact
        )
        seconds = time.perf_counter() - started
        assert match.ready == len(keys)
        self.catalog.release(match.lease_id, self._session.session_id)
        return seconds

    def evict_us(self) -> float:
        """Return the microseconds to choose and remove a victim, the median of rounds."""
        rounds, eviction = [], self.catalog.eviction
        for _ in range(min(self.chunks // 4, 100 * EVICT_ROUND) // EVICT_ROUND):
            started = time.perf_counter()
            victims = eviction.claim_victims("cpu", EVICT_ROUND * FRAME_BYTES, EVICT_ROUND)
            for key in victims:
                self.catalog.drop_copy("cpu", key, even_if_held=False)
                self.catalog.purged("cpu", key)
            eviction.unclaim(victims)
            rounds.append(1e6 * (time.perf_counter() - started) / len(victims))
        return float(np.median(rounds))


def make_prompt() -> list[ChunkInfo]:
    """Return the chunks of a prompt."""
    digests = os.urandom(16 * PROMPT_CHUNKS)
    infos, parent = [], ROOT
    for at in range(0, len(digests), 16):
        digest = ChainDigest(digests[at : at + 16])
        infos.append(ChunkInfo(ChunkKey(SPACE + digest), parent, LAYOUT, 0, FRAME_BYTES))
        parent = digest
    return infos


@contextmanager
def cuda_free_tiers(folder: Path) -> Iterator[list[Tier]]:
    """Yield one empty tier of each kind; the gpu tier is last and uses CPU memory."""
    with ExitStack() as stack:
        port = stack.enter_context(redis_server())
        tiers: list[Tier] = [
            CpuTier(4 * MIB, 4 * MIB),
            DiskTier((folder / "disk", 4 * MIB)),
            RedisTier(f"redis://127.0.0.1:{port}/0", 4 * MIB),
            GpuTier(4 * MIB, HostDevice()),
        ]
        for tier in tiers:
            stack.callback(tier.close)
        yield tiers


def _medians(ours: Callable[[int], float], theirs: Callable[[int], float]) -> tuple[float, float]:
    pairs = [(ours(number), theirs(number)) for number in range(SAMPLES)]
    first, second = np.median(np.array(pairs), axis=0)
    return float(first), float(second)


def scale_chunks(tiers: Sequence[Tier], report: Report) -> dict[str, Points]:
    """Measure lookups, evictions and memory of an index that grows; lookups against a small one."""
    small, big = Index(tiers), Index(tiers)
    small.grow(CHUNK_COUNTS[0])
    before = _own_bytes()
    lookups: Points = []
    evictions: Points = []
    for chunks in CHUNK_COUNTS:
        big.grow(chunks)
        ours, theirs = _medians(big.look_up, small.look_up)
        lookups.append((chunks, ours / theirs))
        evictions.append((chunks, big.evict_us()))
    grown = (_own_bytes() - before) / big.chunks
    report.add("lookup_1e6_vs_1e3", lookups[-1][1], "a leased lookup of 512", "bar 1.5")
    report.add("lookup_512_us_1e6", 1e6 * ours, "the same, without the call", "bar 1000")
    report.add("evict_us", evictions[-1][1], "a victim at 1e6, chosen and removed", "bar 20")
    grows = evictions[-1][1] / evictions[0][1]
    report.add("evict_1e6_vs_1e3", grows, "the same against 1e3", "reported")
    report.add("metadata_mb_1e6", grown, "index with a CPU and a disk copy, CPU tier", "bar 400")
    return {"chunks: lookup": lookups, "chunks: eviction": _relative(evictions)}


def _own_bytes() -> int:
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def _relative(points: Points) -> Points:
    return [(x, y / points[0][1]) for x, y in points]


def weigh_disk_tier(folder: Path, report: Report) -> None:
    with closing(DiskTier((folder, 2 * DISK_CHUNKS * FRAME_BYTES))) as tier:
        tracemalloc.start()
        for _ in range(DISK_CHUNKS // 512):
            for info in make_prompt():
                tier.seal(tier.reserve(info))
        tier.flush()
        each = tracemalloc.get_traced_memory()[0] / DISK_CHUNKS
        tracemalloc.stop()
    what = f"the disk tier's part, of {DISK_CHUNKS} chunks"
    report.add("metadata_disk_mb_1e6", each, what, "reported")


def scale_tiers(tiers: Sequence[Tier], report: Report) -> Points:
    base = Index(tiers[:1])
    base.grow(CHUNK_COUNTS[1])
    points: Points = []
    for number in range(1, len(tiers) + 1):
        # The gpu tier is added last and is the fastest.
        used = tiers[:number] if number < 4 else [tiers[3], *tiers[:3]]
        index = Index(used)
        index.grow(CHUNK_COUNTS[1])
        ours, theirs = _medians(index.look_up, base.look_up)
        points.append((number, ours / theirs))
        report.note(f"{number} tiers", f"{1e6 * ours:.0f} us", ",".join(t.name for t in used))
    what = f"{len(tiers)} tiers have every chunk"
    report.add("lookup_all_vs_1_tiers", points[-1][1], what, "reported")
    return points


def scale_clients(report: Report) -> Points:
    points: Points = []
    with serving("--tiers", "cpu", "--cpu", "64MiB") as (address, pid), ExitStack() as stack:
        server = psutil.Process(pid)
        clients = [stack.enter_context(connect(address, TINY)) for _ in range(CLIENT_COUNTS[-1])]
        keys, chunks = make_chunks(clients[0], 512, 1)
        clients[0].put_chunks(chunks)
        pool = stack.enter_context(ThreadPoolExecutor(len(clients)))
        for client in clients:
            _look_up(client, keys, 1)
        for count in CLIENT_COUNTS:
            before, each = sum(server.cpu_times()[:2]), CLIENT_LOOKUPS // count
            for done in [pool.submit(_look_up, c, keys, each) for c in clients[:count]]:
                done.result()
            spent_s = sum(server.cpu_times()[:2]) - before
            points.append((count, 1e6 * spent_s / CLIENT_LOOKUPS))
    grows, what = points[-1][1] / points[0][1], "the server's processor time for one"
    report.add("lookup_64_vs_1_clients", grows, what, "reported")
    return _relative(points)


def _look_up(client: Client, keys: Sequence[ChunkKey], times: int) -> None:
    for _ in range(times):
        with client.lease(keys=keys) as lease:
            assert lease.match.ready == len(keys)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the costs as an SVG")
    flags = parser.parse_args(argv)
    report = Report("scaling")
    with tempfile.TemporaryDirectory() as name, cuda_free_tiers(Path(name)) as tiers:
        series = scale_chunks(tiers[:2], report)
        weigh_disk_tier(Path(name) / "weighed", report)
        series["tiers: lookup"] = scale_tiers(tiers, report)
        series["clients: server time"] = scale_clients(report)
    if flags.plot is not None:
        title = "Cost of one operation, relative to the smallest size"
        line_chart(flags.plot, title, ("chunks, tiers or clients", "times the cost"), series)
    report.print(only_json=flags.json)


if __name__ == "__main__":
    main()
