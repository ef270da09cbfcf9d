"""Puts, gets, lookups and leases on one node, against the limits of the machine.

Each figure is a ratio within this run or has a bar. The server is a process of its own with
default settings except sizes and paths.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from statistics import median

import numpy as np
import redis

from bench.lib import workload
from bench.lib.bare import raw_stream
from bench.lib.report import Part, Report, gbps, in_turns, paired, run_parts, timed
from bench.lib.workload import MIB, MODEL, SMALL, TINY, buffers, check, joined, put_all
from kvstore.client import Chunk, Client
from kvstore.client.chunk import LayerTensors, parents
from kvstore.client.transports.tcp import Entrance, FrameStream
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.types import DIGEST_BYTES, ChunkKey, PutOutcome
from kvstore.server.main import keep_freed_memory

CHUNKS = 16
PROMPT_CHUNKS = 32
"""A prompt of 8k tokens."""
REPEATS = 11
FLOOD_CHUNKS = 30
BURST_CHUNKS = 2000
LOOKUP_TOKENS = 128 * 1024
LEASE_CHUNKS = 128
STALLED_READERS, SESSIONS = 64, 5
"""Readers, and the sessions they share: a session may have 16 streams."""
MEMORY = ("--tiers", "cpu", "--cpu", "1GiB")
BULK = (*MEMORY, "--bulk", "127.0.0.1:0")


def bench_import(report: Report, _folder: Path) -> None:
    """Import the server in a new process: seconds and resident megabytes."""
    code = (
        "import time; t = time.perf_counter(); import kvstore.server.main; "
        "import kvstore.tiers.disk, kvstore.tiers.redis; s = time.perf_counter() - t; "
        "import psutil; print(s, psutil.Process().memory_info().rss)"
    )
    runs = [subprocess.check_output([sys.executable, "-c", code]).split() for _ in range(3)]
    seconds, sizes = (list(map(float, column)) for column in zip(*runs, strict=True))
    report.add("import_s", min(seconds), "server and all tiers", "bar 1 s")
    report.add("import_mb", max(sizes) / MIB, "resident", "bar 150 MB")


def bench_transport(report: Report, _folder: Path) -> None:
    with workload.serving(*MEMORY) as (address, _pid):
        with workload.connect(address, MODEL, transport="shm") as client:
            keys, chunks = workload.make_chunks(client, PROMPT_CHUNKS, 1)
            size, out = workload.chunk_bytes(chunks), buffers(MODEL, PROMPT_CHUNKS)
            pairs = list(zip(workload.arrays(out), workload.arrays_of(chunks), strict=True))

            def copy() -> None:
                for target, part in pairs:
                    np.copyto(target, part)

            copy()
            turns = []
            for _ in range(REPEATS):
                turns.append((timed(partial(put_all, client, chunks)), timed(copy)))
                client.delete(keys=keys)
            ours_s, copy_s = map(min, zip(*turns, strict=True))
            texts = f"put {gbps(size, ours_s)}", f"memcpy {gbps(size, copy_s)}, bar 0.6"
            report.add("shm_put_vs_memcpy", copy_s / ours_s, *texts)
            put_all(client, chunks)
            get = partial(workload.get_all, client, keys, out)
            copy_s, ours_s = paired(copy, get, REPEATS)
            texts = f"get {gbps(size, ours_s)}", f"memcpy {gbps(size, copy_s)}, bar 0.95"
            report.add("shm_get_vs_memcpy", copy_s / ours_s, *texts)
            check(chunks, out)
        with workload.connect(address, MODEL, transport="grpc") as client:
            get = partial(workload.get_all, client, keys, out)
            get_s = min(timed(get) for _ in range(REPEATS))
            report.add("grpc_get_gbps", size / get_s / 1e9, f"{size / MIB:.0f} MiB", "bar 0.5")
            check(chunks, out)


def bench_bulk(report: Report, _folder: Path) -> None:
    """Compare the bulk channel with a bare TCP stream of the same bytes into allocated memory."""
    with joined(*BULK, transport="tcp") as client:
        keys, chunks = workload.make_chunks(client, PROMPT_CHUNKS, 6)
        size, out = workload.chunk_bytes(chunks), buffers(MODEL, PROMPT_CHUNKS)
        put_all(client, chunks)
        with raw_stream(size) as receive:
            get_s, raw_s = paired(partial(workload.get_all, client, keys, out), receive, REPEATS)
        check(chunks, out)
    ours, theirs = f"get {gbps(size, get_s)}", f"TCP {gbps(size, raw_s)}, bar 0.6"
    report.add("bulk_get_vs_raw_tcp", raw_s / get_s, ours, theirs)


def digests_of(keys: Sequence[ChunkKey]) -> bytes:
    return b"".join(key[DIGEST_BYTES:] for key in keys)


@contextmanager
def stalled_readers(clients: Sequence[Client], keys: Sequence[ChunkKey]) -> Iterator[None]:
    """Keep gets of *keys* open whose readers read nothing; they last at most six seconds."""
    with ExitStack() as stack:
        for number in range(STALLED_READERS):
            session = clients[number % len(clients)]._link.connected().session
            entrance = Entrance.of(session.terms, session.connection.address)
            stream = FrameStream(entrance, 5.0)
            stack.callback(stream.close)
            get = pb.GetRequest(
                session_id=session.terms.session_id,
                digests=digests_of(keys),
                deadline_ms=60_000,
            )
            stream.begin(pb.StreamMessage(get=get), time.monotonic() + 5.0)
            time.sleep(0.01)  # each uses a thread until it stalls
        time.sleep(0.3)
        assert clients[0].status().leases == STALLED_READERS
        yield


def bench_stalled(report: Report, _folder: Path) -> None:
    """Time gets and puts over TCP beside 64 readers that read nothing, and without them."""
    with ExitStack() as stack:
        address, _pid = stack.enter_context(workload.serving(*BULK))
        client, *others = (
            stack.enter_context(workload.connect(address, MODEL, transport="tcp"))
            for _ in range(SESSIONS + 1)
        )
        keys, sent = workload.make_chunks(client, 8, 6)
        more, fresh = workload.make_chunks(client, 4, 7)
        client.put_chunks(sent)
        get = partial(workload.get_all, client, keys, buffers(MODEL, 8))

        def put() -> None:
            client.delete(keys=more)
            put_all(client, fresh)

        free, beside = [], []
        for _ in range(5):
            free.append(paired(get, put, 10))
            with stalled_readers(others, keys):
                beside.append(paired(get, put, 10))
    alone, ours = (list(map(min, zip(*found, strict=True))) for found in (free, beside))
    get_, put_ = (one / other for one, other in zip(ours, alone, strict=True))
    texts = f"get {get_:.2f}, put {put_:.2f}"
    report.add("bulk_beside_stalled_readers", max(get_, put_), texts, "bar 1.2")


def get_from(client: Client, tier: str, chunks: Sequence[Chunk], keys: Sequence[ChunkKey]) -> float:
    """Return the seconds of a get of *chunks* from *tier*; a flood evicts them from memory."""
    out = buffers(MODEL, len(chunks))
    for seed in range(1000, 1010):  # repeats if an earlier read promoted them meanwhile
        others = workload.keys_of(client, FLOOD_CHUNKS, seed)
        put_all(client, workload.chunks_of(others, _flood(client)))
        client.delete(keys=others)
        if set(client.lookup(keys=keys).tiers) == {tier}:
            break
        time.sleep(0.3)
    else:
        raise AssertionError(client.lookup(keys=keys).tiers)
    seconds = timed(lambda: client.get_chunks(keys, out))
    check(chunks, out)
    return seconds


@lru_cache(maxsize=1)
def _flood(client: Client) -> list[LayerTensors]:
    """Return noise that fills CPU memory; cached, as making it takes longer than the get."""
    return [chunk.tensors for chunk in workload.make_chunks(client, FLOOD_CHUNKS, 1000)[1]]


def bench_disk(report: Report, folder: Path) -> None:
    disk = folder / "disk"
    flags = ("--tiers", "cpu,disk", "--cpu", "256MiB", "--disk", f"2GiB:{disk}")
    with joined(*flags, "--write", "evict") as client:  # the flood is not copied meanwhile
        keys, chunks = workload.make_chunks(client, CHUNKS, 2)
        client.put_chunks(chunks, durable=True)
        out = np.empty(workload.chunk_bytes(chunks), np.uint8)
        # These chunks were put first and lie one after another.
        with (disk / "extents" / "0000.kv").open("rb") as file:
            assert os.preadv(file.fileno(), [out.data], 0) == len(out)
            read = partial(timed, lambda: os.preadv(file.fileno(), [out.data], 0))
            get = partial(get_from, client, "disk", chunks, keys)
            ratio, get_s, read_s = in_turns(get, read, REPEATS)
    ours, theirs = f"get {gbps(len(out), get_s)}", f"preadv {gbps(len(out), read_s)}, bar 0.9"
    report.add("disk_get_vs_pread", ratio, ours, theirs)


def bench_redis(report: Report, _folder: Path) -> None:
    """Compare verified gets with redis-py's GET of the same parts.

    First from the Redis tier in this process; then through a server and shared memory: a third
    process, where two already fill two cores.
    """
    with workload.redis_server() as port, redis.Redis(port=port) as raw:
        url = f"redis://127.0.0.1:{port}/0"
        flags = ("--tiers", "cpu,redis", "--cpu", "256MiB", "--redis", url)
        with joined(*flags, "--codec", "redis=raw", "--redis-timeout-ms", "5000") as client:
            keys, chunks = workload.make_chunks(client, CHUNKS, 3)
            client.put_chunks(chunks)
            while any("redis" not in {c.tier for c in s.copies} for s in client.stat(keys=keys)):
                time.sleep(0.05)
            names = [k for k in raw.scan_iter(count=1000) if not bytes(k).endswith(b":m")]
            size = workload.chunk_bytes(chunks)

            def get_raw() -> None:
                assert sum(len(raw.get(name) or b"") for name in names) >= size

            theirs = partial(timed, get_raw)
            keep_freed_memory()  # as the server does; both sides allocate replies of 2 MB
            with workload.redis_gets(url, keys) as get:
                tier, *tier_s = in_turns(partial(timed, get), theirs, 2 * REPEATS)
            through = partial(get_from, client, "redis", chunks, keys)
            whole, *whole_s = in_turns(through, theirs, REPEATS // 2 + 1)
    tiers, gets = (gbps(size, one) for one in tier_s)
    report.add("redis_get_vs_raw", tier, tiers, f"GET {gets}, bar 0.7")
    ours, gets = (gbps(size, one) for one in whole_s)
    report.add("redis_client_get_vs_raw", whole, ours, f"GET {gets}")


def bench_lookup(report: Report, _folder: Path) -> None:
    """Time a leased lookup of 128k stored tokens, at the client and inside the server."""
    with joined(*MEMORY, model=TINY) as client:
        keys, chunks = workload.make_chunks(client, LOOKUP_TOKENS // 256, 4)
        client.put_chunks(chunks)

        def look_up() -> None:
            assert client.lease(keys=keys).match.ready == len(keys)

        times_s = [timed(look_up) for _ in range(50)]
        session = client._link.connected().session
        request = pb.LookupRequest(
            session_id=session.terms.session_id, digests=digests_of(keys), lease=True
        )
        times_us = []
        for _ in range(20):
            reply = session.connection.call("Lookup", request, 5000, pb.LookupResponse)
            assert reply.ready == len(keys)
            times_us.append(reply.server_us)
    report.add(
        "lookup_512_ms", 1e3 * median(times_s), "median, leased, at the client", "bar 1.5 ms"
    )
    report.add("lookup_512_server_ms", median(times_us) / 1e3, "median, leased", "bar 1 ms")


def bench_lease(report: Report, _folder: Path) -> None:
    """Lease a prompt of 128 chunks in memory and read the first element of each."""
    with joined(*MEMORY, model=SMALL) as client:
        keys, chunks = workload.make_chunks(client, LEASE_CHUNKS, 6)
        client.put_chunks(chunks)
        times_s = []
        for _ in range(5 * REPEATS):
            started_s = time.perf_counter()
            with client.lease(keys=keys) as lease:
                views = [lease.view(index) for index in range(len(keys))]
                first = [view.layer(0)[0, 0, 0, 0] for view in views if view is not None]
                times_s.append(time.perf_counter() - started_s)
            assert len(first) == len(keys)
    bar = f"bar {300 + 3 * LEASE_CHUNKS} us"
    report.add("lease_128_us", 1e6 * median(times_s), "median, first element of each", bar)


def bench_burst(report: Report, folder: Path) -> None:
    """Put 2,000 chunks of 1 MiB into 128 MiB of CPU memory and disk; count those not readable."""
    flags = ("--tiers", "cpu,disk", "--cpu", "128MiB", "--disk", f"3GiB:{folder / 'burst'}")
    base = np.random.default_rng(5).integers(0, 1 << 16, (2, 8, 256, 128), dtype=np.uint16)

    def tensors(number: int) -> LayerTensors:
        return [[list(base + np.uint16(number))]]

    refused = lost = 0
    with joined(*flags, model=SMALL) as client:
        keys = workload.keys_of(client, BURST_CHUNKS, 5)
        for number, (key, parent) in enumerate(zip(keys, parents(keys), strict=True)):
            (put,) = client.put_chunks([Chunk(key, tensors(number), parent=parent)])
            refused += put.outcome is not PutOutcome.stored
        for start in range(0, BURST_CHUNKS, CHUNKS):
            found = client.get_chunks(keys[start : start + CHUNKS])
            correct = sum(
                np.array_equal(workload.arrays([got]), workload.arrays([tensors(number)]))
                for number, got in enumerate(found, start)
            )
            lost += min(CHUNKS, BURST_CHUNKS - start) - correct
    report.add("burst_lost", lost, f"of {BURST_CHUNKS} x 1 MiB, {refused} refused", "bar 0")


PARTS: dict[str, Part] = {
    "transport": bench_transport,
    "lookup": bench_lookup,
    "lease": bench_lease,
    "bulk": bench_bulk,
    "disk": bench_disk,
    "redis": bench_redis,
    "import": bench_import,
    "burst": bench_burst,
    "stalled": bench_stalled,
}


def main(argv: Sequence[str] | None = None) -> None:
    run_parts("local", PARTS, argv, __doc__)


if __name__ == "__main__":
    main()
