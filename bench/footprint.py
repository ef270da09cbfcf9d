"""What a server takes before it holds anything, and for each chunk besides its bytes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from bench.report import Report
from bench.workload import MIB, TINY
from kvstore.proto.keys import chain_digests
from kvstore.proto.types import ChunkKey, KVLayout


def bench_import(report: Report) -> None:
    """A server's import: seconds and resident megabytes, in a process of its own."""
    code = (
        "import time; t = time.perf_counter(); import kvstore.server.main; "
        "import kvstore.tiers.disk, kvstore.tiers.redis; s = time.perf_counter() - t; "
        "import psutil; print(s, psutil.Process().memory_info().rss)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    pairs = [tuple(map(float, run.stdout.split())) for run in runs]
    report.add("import_s", min(pair[0] for pair in pairs), "server and all tiers", "bar 1 s")
    report.add("import_mb", max(pair[1] for pair in pairs) / MIB, "resident", "bar 150 MB")


def bench_metadata(folder: Path, report: Report) -> None:
    """Traced bytes of everything kept per chunk that lies in CPU memory and on disk."""
    import gc
    import tracemalloc

    from kvstore.proto.frame import raw_frame_bytes
    from kvstore.proto.types import ChainDigest, ChunkInfo
    from kvstore.server.eviction.lru import LruEviction
    from kvstore.server.index.catalog import Catalog
    from kvstore.server.index.holds import Leases
    from kvstore.tiers.cpu import CpuTier
    from kvstore.tiers.disk import DiskTier

    count = 20_000
    layout = KVLayout.of(TINY, 16)
    size = raw_frame_bytes(layout)
    tiers = [
        CpuTier(count * (size + 4096), 64 * MIB),
        DiskTier((folder / "meta", count * (size + 8192))),
    ]
    leases = Leases(1, lambda: 1)
    catalog = Catalog({t.name: LruEviction() for t in tiers}, leases, 1, time.monotonic)
    digests = chain_digests(list(range(256 * count)))
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    parent = ChainDigest(bytes(16))
    for digest in digests:
        info = ChunkInfo(ChunkKey(bytes(16) + digest), parent, layout, 0, size)
        for tier in tiers:
            tier.seal(tier.reserve(info))
            catalog.note_sealed(tier.name, info)
        parent = digest
    for tier in tiers:
        tier.flush()
    gc.collect()  # written rows and their batch name one another
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for tier in tiers:
        tier.close()
    report.add("metadata_bytes_per_chunk", (after - before) / count, "CPU + disk copy", "reported")
