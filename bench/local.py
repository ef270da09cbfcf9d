"""The main job on one node, against the limits of the machine it runs on.

Every figure is a ratio inside this run, or stands beside the bound it is held to. The server
is a process of its own on embedded defaults but for sizes and paths.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from bench.lib.bare import (
    in_steps,
    looked_at,
    parts_of,
    raw_stream,
    ring_put,
    steps_of,
    summed_get,
    summed_read,
)
from bench.lib.report import Report, best_s, flags_of, in_turns, paired
from bench.lib.workload import (
    MIB,
    MODEL,
    SMALL,
    TINY,
    check,
    chunk_bytes,
    connect,
    copy_all,
    make_chunks,
    redis_gets,
    redis_server,
    serving,
)
from kvstore.client import Chunk, Client, ClientOptions
from kvstore.client.chunk import LayerTensors, parents
from kvstore.client.connection import Connection
from kvstore.client.session import Session
from kvstore.client.transports.tcp import Entrance, FrameStream
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.keys import chain_digests
from kvstore.proto.types import DIGEST_BYTES, ChunkKey, KVLayout, PutOutcome
from kvstore.server.main import keep_freed_memory


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


STALLED_READERS = 64
SESSIONS = 5
"""That these are of: one may have 16 streams."""


def bulk_against_tcp(folder: Path, chunks: int, repeats: int) -> tuple[int, float, float, float]:
    """Return bytes, then the best seconds of a get, of a put and of the raw stream.

    Every byte of the gets is verified by the client, and compared in the end.
    """
    flags = ("--tiers", "cpu", "--cpu", "1GiB", "--bulk", "127.0.0.1:0")
    options = ClientOptions(transport="tcp", deadline_ms=20_000)
    with (
        serving(*flags, disk=folder / "none") as (address, _),
        Client(address, MODEL, options) as client,
    ):
        keys, sent = make_chunks(client, chunks, 6)
        size = chunk_bytes(sent)
        out = [empty_tensors(KVLayout.of(MODEL, 256)) for _ in sent]

        def put() -> None:
            client.delete(keys=keys)
            assert all(put.outcome is PutOutcome.stored for put in client.put_chunks(sent))

        def get() -> None:
            assert len(client.get_chunks(keys, out)) == len(keys)

        with raw_stream(size) as receive:
            put_s, _ = paired(put, receive, max(1, repeats // 2))
            get_s, raw_s = paired(get, receive, repeats)
        check(sent, out)
    return size, get_s, put_s, raw_s


@contextmanager
def stalled_readers(clients: Sequence[Client], keys: Sequence[ChunkKey]) -> Iterator[None]:
    """Have gets of *keys* whose readers take nothing, which last for six seconds at most."""
    with ExitStack() as stack:
        for number in range(STALLED_READERS):
            session = clients[number % len(clients)]._link.connected().session
            entrance = Entrance.of(session.terms, session.connection.address)
            stream = FrameStream(entrance, lambda: False, 5.0)
            stack.callback(stream.close)
            get = pb.GetRequest(
                session_id=session.terms.session_id,
                digests=b"".join(key[DIGEST_BYTES:] for key in keys),
                deadline_ms=60_000,
            )
            stream.begin(pb.StreamMessage(get=get), time.monotonic() + 5.0)
            time.sleep(0.01)  # one thread each until it stalls
        time.sleep(0.3)
        assert clients[0].status().leases == STALLED_READERS
        yield


def beside_stalled_readers(folder: Path, chunks: int, rounds: int) -> tuple[float, float]:
    """Return how much longer a get and a put take beside readers that take nothing."""
    flags = ("--tiers", "cpu", "--cpu", "1GiB", "--bulk", "127.0.0.1:0")
    options = ClientOptions(transport="tcp", deadline_ms=20_000)
    with ExitStack() as stack:
        address, _ = stack.enter_context(serving(*flags, disk=folder / "none"))
        client, *others = (
            stack.enter_context(Client(address, MODEL, options)) for _ in range(SESSIONS + 1)
        )
        keys, sent = make_chunks(client, chunks, 6)
        more, fresh = make_chunks(client, chunks // 2, 7)
        client.put_chunks(sent)
        out = [empty_tensors(KVLayout.of(MODEL, 256)) for _ in sent]

        def get() -> None:
            assert len(client.get_chunks(keys, out)) == len(keys)

        def put() -> None:
            client.delete(keys=more)
            assert all(put.outcome is PutOutcome.stored for put in client.put_chunks(fresh))

        free, beside = [], []
        for _ in range(rounds):
            free.append((best_s(get, 10), best_s(put, 10)))
            with stalled_readers(others, keys):
                beside.append((best_s(get, 10), best_s(put, 10)))
    get_s, put_s = map(min, zip(*free, strict=True))
    beside_get_s, beside_put_s = map(min, zip(*beside, strict=True))
    return beside_get_s / get_s, beside_put_s / put_s


CHUNKS = 16
PROMPT_CHUNKS = 32
"""A prompt of 8k tokens."""
REPEATS = 11
FLOOD_CHUNKS = 30
BURST_CHUNKS = 2000
LOOKUP_TOKENS = 128 * 1024
LEASE_CHUNKS = 128
LEASE_PACKETS_BYTES = (LEASE_CHUNKS * 16 + 64, LEASE_CHUNKS * (32 + 5) + 96)
"""A lease's question and answer: a digest for each chunk; a place, a tier and a time for each."""


def bench_transport(address: str, report: Report) -> None:
    """Shared memory against memcpy, and gRPC in GB/s."""
    options = ClientOptions(transport="shm", deadline_ms=20_000)
    with Client(address, MODEL, options) as client:
        keys, chunks = make_chunks(client, PROMPT_CHUNKS, 1)
        size = chunk_bytes(chunks)
        out = [empty_tensors(KVLayout.of(MODEL, 256)) for _ in chunks]
        copy_all(chunks, out)

        def put() -> None:
            assert all(put.outcome is PutOutcome.stored for put in client.put_chunks(chunks))

        put_s = copy_s = bare_s = float("inf")
        with ring_put(parts_of(chunks)) as bare_put:
            for _ in range(REPEATS):
                put_s = min(put_s, best_s(put, 1))
                copy_s = min(copy_s, best_s(lambda: copy_all(chunks, out), 1))
                bare_s = min(bare_s, best_s(bare_put, 1))
                client.delete(keys=keys)
        copied = f"memcpy {size / copy_s / 1e9:.2f} GB/s"
        report.add(
            "shm_put_vs_memcpy", copy_s / put_s, f"put {size / put_s / 1e9:.2f} GB/s",
            f"{copied}, bar 0.6",
        )  # fmt: skip
        report.add(
            "shm_put_limit_vs_memcpy", copy_s / bare_s,
            f"two processes, a ring {size / bare_s / 1e9:.2f} GB/s", copied,
        )  # fmt: skip
        put()

        def get() -> None:
            assert len(client.get_chunks(keys, out)) == len(keys)

        get_s = copy_s = bare_s = float("inf")
        with summed_get(steps_of(out)) as bare_get:
            for _ in range(REPEATS):
                bare_s = min(bare_s, best_s(bare_get, 1))
                copy_s = min(copy_s, best_s(lambda: copy_all(chunks, out), 1))
                get_s = min(get_s, best_s(get, 1))
        copied = f"memcpy {size / copy_s / 1e9:.2f} GB/s"
        report.add(
            "shm_get_vs_memcpy", copy_s / get_s, f"get {size / get_s / 1e9:.2f} GB/s",
            f"{copied}, bar 0.95",
        )  # fmt: skip
        report.add(
            "shm_get_limit_vs_memcpy", copy_s / bare_s,
            f"two threads, copied and summed {size / bare_s / 1e9:.2f} GB/s", copied,
        )  # fmt: skip
        check(chunks, out)
    with Client(address, MODEL, ClientOptions(transport="grpc", deadline_ms=20_000)) as client:
        get_s = best_s(lambda: client.get_chunks(keys, out), REPEATS)
        report.add("grpc_get_gbps", size / get_s / 1e9, f"{size / MIB:.0f} MiB", "bar 0.5")
        check(chunks, out)


def bench_tier(
    client: Client, tier: str, chunks: Sequence[Chunk], keys: Sequence[ChunkKey], rounds: int
) -> float:
    """Seconds of a get whose every chunk comes from *tier*; CPU memory is emptied before each."""
    out = [empty_tensors(KVLayout.of(MODEL, 256)) for _ in chunks]
    best = float("inf")
    for number in range(rounds):
        _leave_on(client, tier, keys, number)
        best = min(best, best_s(lambda: client.get_chunks(keys, out), 1))
        check(chunks, out)
    return best


def _leave_on(client: Client, tier: str, keys: Sequence[ChunkKey], number: int) -> None:
    """Empty CPU memory of *keys*, again where an earlier read had them promoted meanwhile."""
    for _ in range(10):
        _flood(client, number)
        if set(client.lookup(keys=keys).tiers) == {tier}:
            return
        time.sleep(0.3)
    raise AssertionError(client.lookup(keys=keys).tiers)


def _flood(client: Client, number: int) -> None:
    """Push everything else out of CPU memory with as many other chunks as it holds."""
    rng = np.random.default_rng(1000 + number)
    keys = client.keys(rng.integers(0, 1 << 31, 256 * FLOOD_CHUNKS).tolist())
    tensors = _flood_tensors(client)
    named = zip(keys, tensors, parents(keys), strict=True)
    chunks = [Chunk(key, kv, parent=parent) for key, kv, parent in named]
    assert all(put.outcome is PutOutcome.stored for put in client.put_chunks(chunks))
    client.delete(keys=keys)


@lru_cache(maxsize=1)
def _flood_tensors(client: Client) -> list[LayerTensors]:
    """Noise takes longer to make than all that is measured: make it once."""
    return [chunk.tensors for chunk in make_chunks(client, FLOOD_CHUNKS, 1000)[1]]


def bench_bulk(folder: Path, report: Report) -> None:
    """The bulk channel against a bare TCP stream of the same bytes into ready memory."""
    size, get_s, put_s, raw_s = bulk_against_tcp(folder, PROMPT_CHUNKS, REPEATS)
    report.add(
        "bulk_get_vs_raw_tcp", raw_s / get_s, f"get {size / get_s / 1e9:.2f} GB/s",
        f"TCP {size / raw_s / 1e9:.2f} GB/s, bar 0.6",
    )  # fmt: skip
    report.note("bulk put", f"{raw_s / put_s:.3f}", f"put {size / put_s / 1e9:.2f} GB/s")


def bench_stalled(folder: Path, report: Report) -> None:
    """Gets and puts over TCP beside 64 readers that take nothing, against none of them."""
    get, put = beside_stalled_readers(folder, 8, 5)
    report.add(
        "bulk_beside_stalled_readers", max(get, put), f"get {get:.2f}, put {put:.2f}", "bar 1.2"
    )


def bench_disk(folder: Path, report: Report) -> None:
    """Disk gets from the page cache against preadv of the same bytes."""
    disk = folder / "disk"
    flags = (
        "--tiers", "cpu,disk", "--cpu", "256MiB", "--disk", f"2GiB:{disk}",
        "--write", "evict",  # no copies of the flood while we measure
    )  # fmt: skip
    with serving(*flags, disk=disk) as (address, _), connect(address, MODEL) as client:
        keys, chunks = make_chunks(client, CHUNKS, 2)
        client.put_chunks(chunks, durable=True)
        size = chunk_bytes(chunks)
        out = np.empty(size, np.uint8)
        # The chunks are the first that were put there, one behind the other.
        descriptor = os.open(disk / "extents" / "0000.kv", os.O_RDONLY)
        try:
            assert os.preadv(descriptor, [out.data], 0) == size
            read = partial(best_s, lambda: os.preadv(descriptor, [out.data], 0), 1)
            ratio, get_s, read_s = in_turns(
                lambda: bench_tier(client, "disk", chunks, keys, 1), read, REPEATS
            )
            with summed_read(descriptor, in_steps(out)) as bare:
                limit, bare_s, _ = in_turns(partial(best_s, bare, 1), read, REPEATS)
        finally:
            os.close(descriptor)
    report.add(
        "disk_get_vs_pread", ratio, f"get {size / get_s / 1e9:.2f} GB/s",
        f"preadv {size / read_s / 1e9:.2f} GB/s, bar 0.9",
    )  # fmt: skip
    report.add(
        "disk_get_limit_vs_pread", limit,
        f"two threads, read and summed {size / bare_s / 1e9:.2f} GB/s", "as above",
    )  # fmt: skip


def bench_redis(folder: Path, report: Report) -> None:
    """Verified gets of the Redis tier against redis-py's GET of the same parts, and all the way.

    The first is one client of Redis against another. The second goes on through the server and
    shared memory to the engine: a third process, where two already fill two cores.
    """
    import redis

    with redis_server(folder) as port:
        url = f"redis://127.0.0.1:{port}/0"
        flags = (
            "--tiers", "cpu,redis", "--cpu", "256MiB", "--redis", url, "--codec", "redis=raw",
            "--redis-timeout-ms", "5000",
        )  # fmt: skip
        disk = folder / "none"
        with serving(*flags, disk=disk) as (address, _), connect(address, MODEL) as client:
            keys, chunks = make_chunks(client, CHUNKS, 3)
            client.put_chunks(chunks)
            raw = redis.Redis(port=port)
            while any("redis" not in {c.tier for c in s.copies} for s in client.stat(keys=keys)):
                time.sleep(0.05)
            names = [k for k in raw.scan_iter(count=1000) if not bytes(k).endswith(b":m")]
            size = chunk_bytes(chunks)

            def get_raw() -> None:
                assert sum(len(raw.get(name) or b"") for name in names) >= size

            keep_freed_memory()  # as the tier's process does; both sides allocate replies of 2 MB
            with redis_gets(url, keys) as get:
                tier = in_turns(partial(best_s, get, 1), partial(best_s, get_raw, 1), 2 * REPEATS)
            through = in_turns(
                lambda: bench_tier(client, "redis", chunks, keys, 1),
                partial(best_s, get_raw, 1),
                REPEATS // 2 + 1,
            )
            raw.close()
    ratio, our_s, raw_s = tier
    report.add(
        "redis_get_vs_raw", ratio, f"tier {size / our_s / 1e9:.2f} GB/s",
        f"GET {size / raw_s / 1e9:.2f} GB/s, bar 0.7",
    )  # fmt: skip
    ratio, our_s, raw_s = through
    report.add(
        "redis_client_get_vs_raw", ratio, f"client {size / our_s / 1e9:.2f} GB/s",
        f"GET {size / raw_s / 1e9:.2f} GB/s",
    )  # fmt: skip


def bench_lookup(address: str, report: Report) -> None:
    """One lookup of 128k tokens, all of it stored, leased: time at the client and the server."""
    with connect(address, TINY) as client:
        keys, chunks = make_chunks(client, LOOKUP_TOKENS // 256, 4)
        client.put_chunks(chunks)
        times_s = []
        for _ in range(50):
            started_s = time.perf_counter()
            lease = client.lease(keys=keys)
            times_s.append(time.perf_counter() - started_s)
            assert lease.match.ready == len(keys)
        connection = Connection(address, 1000)
        session = Session(connection, TINY, client.options)
        request = pb.LookupRequest(
            session_id=session.terms.session_id,
            digests=b"".join(key[16:] for key in keys),
            lease=True,
        )
        times_us = []
        for _ in range(20):
            reply = connection.call("Lookup", request, 5000, pb.LookupResponse)
            assert reply.ready == len(keys)
            times_us.append(reply.server_us)
        session.close()
        connection.close()
    report.add(
        "lookup_512_ms", float(np.median(times_s)) * 1000, "median, leased, asked for by a client",
        "bar 1.5 ms",
    )  # fmt: skip
    report.add(
        "lookup_512_server_ms", float(np.median(times_us)) / 1000, "median, leased", "bar 1 ms"
    )


def bench_lease(address: str, report: Report) -> None:
    """Lease a prompt of 128 chunks in memory and look at the first element of each."""
    with connect(address, SMALL) as client:
        keys, chunks = make_chunks(client, LEASE_CHUNKS, 6)
        client.put_chunks(chunks)
        times_s, bare_s = [], []
        with looked_at(LEASE_CHUNKS, *LEASE_PACKETS_BYTES) as look:
            for _ in range(5 * REPEATS):
                bare_s.append(best_s(look, 1))
                started_s = time.perf_counter()
                with client.lease(keys=keys) as lease:
                    views = [lease.view(index) for index in range(len(keys))]
                    first = [view.layer(0)[0, 0, 0, 0] for view in views if view is not None]
                    times_s.append(time.perf_counter() - started_s)
                assert len(first) == len(keys)
        client.delete(keys=keys)
    report.add(
        "lease_128_us", float(np.median(times_s)) * 1e6,
        f"median, first element of each; best {1e6 * min(times_s):.0f}",
        f"bar {300 + 3 * LEASE_CHUNKS} us",
    )  # fmt: skip
    report.add(
        "lease_128_limit_us", float(np.median(bare_s)) * 1e6,
        f"a bare exchange and look; best {1e6 * min(bare_s):.0f}", "as above",
    )  # fmt: skip


def bench_burst(folder: Path, report: Report) -> None:
    """2,000 puts of 1 MiB into 128 MiB of CPU memory and disk: how many cannot be read after."""
    flags = ("--tiers", "cpu,disk", "--cpu", "128MiB", "--disk", f"3GiB:{folder / 'burst'}")
    with serving(*flags, disk=folder / "burst") as (address, _), connect(address, SMALL) as client:
        rng = np.random.default_rng(5)
        keys = client.keys(rng.integers(0, 1 << 31, 256 * BURST_CHUNKS).tolist())
        base = rng.integers(0, 1 << 16, (2, 8, 256, 128), dtype=np.uint16)

        def tensors(number: int) -> ChunkTensors:
            part = base + np.uint16(number)
            return [[[part[0], part[1]]]]

        refused = 0
        for number, (key, parent) in enumerate(zip(keys, parents(keys), strict=True)):
            (put,) = client.put_chunks([Chunk(key, tensors(number), parent=parent)])
            refused += put.outcome is not PutOutcome.stored
        lost = 0
        for start in range(0, BURST_CHUNKS, CHUNKS):
            group = keys[start : start + CHUNKS]
            found = client.get_chunks(group)
            right = sum(
                all(np.array_equal(a, b) for a, b in zip(got[0][0], want[0][0], strict=True))
                for got, want in zip(
                    found, map(tensors, range(start, start + CHUNKS)), strict=False
                )
            )
            lost += len(group) - right
    report.add("burst_lost", lost, f"of {BURST_CHUNKS} x 1 MiB, {refused} refused", "bar 0")


SHARED = {"transport": bench_transport, "lookup": bench_lookup, "lease": bench_lease}
PARTS = {
    "bulk": bench_bulk,
    "disk": bench_disk,
    "redis": bench_redis,
    "import": lambda _, report: bench_import(report),
    "burst": bench_burst,
    "stalled": bench_stalled,
    "metadata": bench_metadata,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts that the flags ask for, and print the report."""
    options = flags_of(argv, __doc__, [*SHARED, *PARTS])
    report = Report("local")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if shared := [part for part in SHARED if part in options.only]:
            with serving("--tiers", "cpu", "--cpu", "1GiB", disk=folder / "none") as (address, _):
                for part in shared:
                    SHARED[part](address, report)
        for part in (part for part in PARTS if part in options.only):
            PARTS[part](folder, report)
    report.print(only_json=options.json)


if __name__ == "__main__":
    main()
