"""What benchmarks serve and put: a server process, a Redis, chunks of noise, loads of a tier."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from kvstore.client import Chunk, Client, ClientOptions
from kvstore.client.chunk import parents
from kvstore.codecs.base import empty_tensors
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import header_bytes
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import (
    ChunkInfo,
    ChunkKey,
    DType,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
    RopeParameters,
)
from kvstore.server.tiering.work_queue import MAX_BATCH
from kvstore.server.wiring import LOADS_AT_ONCE, batch_parallelism
from kvstore.tiers.base import Tier
from kvstore.tiers.redis import RedisTier

MIB = 1 << 20

# Chunks of 8 MiB: eight layers of an 8B-class model (8 KV heads of 128, bf16) x 256 tokens.
MODEL = Model(
    "bench/8b", "r1", "none", "none",
    (LayerGroup(LayerKind.attention, DType.bfloat16, tuple(range(8)), 8, 128),),
    RopeParameters(500000.0, 128), "none",
)  # fmt: skip
# Chunks of 8 KiB, where bytes are no part of the question.
TINY = Model(
    "bench/tiny", "r1", "none", "none",
    (LayerGroup(LayerKind.attention, DType.bfloat16, (0,), 1, 8),),
    RopeParameters(500000.0, 8), "none",
)  # fmt: skip
# Chunks of 1 MiB: one layer of the same.
SMALL = Model(
    "bench/1mib", "r1", "none", "none",
    (LayerGroup(LayerKind.attention, DType.bfloat16, (0,), 8, 128),),
    RopeParameters(500000.0, 128), "none",
)  # fmt: skip


@contextmanager
def serving(*flags: str, disk: Path) -> Iterator[tuple[str, int]]:
    """Run a server process; yield its address and pid."""
    command = [
        sys.executable, "-m", "kvstore.server", "--listen", "127.0.0.1:0", "--log-level", "error",
        "--socket", str(disk.parent / "kv.sock"), *flags,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "listening on" not in line:
                raise RuntimeError(f"the server did not start: {line!r}")
            yield line.split()[3], process.pid
        finally:
            process.terminate()
            process.wait(30)


def make_chunks(client: Client, count: int, seed: int) -> tuple[list[ChunkKey], list[Chunk]]:
    """Return *count* chained chunks of bf16 noise, each with memory of its own."""
    rng = np.random.default_rng(seed)
    keys = client.keys(rng.integers(0, 1 << 31, 256 * count).tolist())
    chunks = []
    for key, parent in zip(keys, parents(keys), strict=True):
        tensors = empty_tensors(KVLayout.of(client.model, 256))
        for part in (part for layers in tensors for parts in layers for part in parts):
            part[...] = rng.standard_normal(part.shape, np.float32).view(np.uint32) >> 16
        chunks.append(Chunk(key, tensors, parent=parent))
    return keys, chunks


def chunk_bytes(chunks: Sequence[Chunk]) -> int:
    """Decoded bytes of *chunks*."""
    return sum(
        int(part.nbytes)
        for c in chunks
        for layers in c.tensors
        for parts in layers
        for part in parts
    )


def copy_all(chunks: Sequence[Chunk], out: Sequence[object]) -> None:
    """The limit of a copy-out: plain numpy copies of the same tensors."""
    for chunk, room in zip(chunks, out, strict=True):
        for layers, room_layers in zip(chunk.tensors, room, strict=True):  # type: ignore[call-overload]
            for parts, room_parts in zip(layers, room_layers, strict=True):
                for part, room_part in zip(parts, room_parts, strict=True):
                    np.copyto(room_part, part)


def check(chunks: Sequence[Chunk], out: Sequence[object]) -> None:
    """Raise AssertionError unless *out* holds the bytes of *chunks*."""
    for chunk, room in zip(chunks, out, strict=True):
        for layers, room_layers in zip(chunk.tensors, room, strict=True):  # type: ignore[call-overload]
            for parts, room_parts in zip(layers, room_layers, strict=True):
                for part, room_part in zip(parts, room_parts, strict=True):
                    if not np.array_equal(part, room_part):
                        raise AssertionError("wrong bytes")


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """Run a Redis of our own; yield its port."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is not installed; `make test` installs it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [
        program,
        "--port",
        str(port),
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        str(folder),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            _wait_for(port)
            yield port
        finally:
            process.terminate()
            process.wait(10)


def _wait_for(port: int) -> None:
    import redis

    for _ in range(100):
        try:
            redis.Redis(port=port).ping()
        except redis.ConnectionError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError("Redis did not start")


def connect(address: str, model: Model, *, read_peers: bool = True) -> Client:
    """Return a client of *model* with a deadline that no benchmark runs into."""
    return Client(address, model, ClientOptions(deadline_ms=20_000, read_peers=read_peers))


Load = tuple[ChunkInfo, Bytes]
"""Which frame, and memory that is there for it."""


@contextmanager
def loading(tier: Tier, loads: Sequence[Load]) -> Iterator[Callable[[], None]]:
    """Yield what loads and verifies all of *loads*, by as many threads as the server has for that.

    In rows where the tier wants them so. All are asked for at once.
    """
    queue = f"load-{tier.name}"
    is_batched = tier.batch_key(loads[0][0].key) is not None
    threads = batch_parallelism()[queue] if is_batched else LOADS_AT_ONCE.get(tier.name, 1)
    length = MAX_BATCH if is_batched else 1
    rows = [loads[at : at + length] for at in range(0, len(loads), length)]
    with ThreadPoolExecutor(threads) as pool:

        def load_all() -> None:
            left = iter(rows)
            for done in [pool.submit(_load_rows, tier, left) for _ in range(threads)]:
                done.result()

        yield load_all


def _load_rows(tier: Tier, rows: Iterator[Sequence[Load]]) -> None:
    for row in rows:
        keys = [info.key for info, _ in row]
        for at, (info, out) in enumerate(row):
            if len(row) > 1:
                tier.expect(keys[at:])
            verifier = FrameVerifier(out, info.key, header_bytes(info.layout))
            assert tier.read(info.key, out, 0, verifier)
            verifier.finish()
        if len(row) > 1:
            tier.expect(())


@contextmanager
def redis_gets(url: str, keys: Sequence[ChunkKey]) -> Iterator[Callable[[], None]]:
    """Yield a get of all *keys* from the Redis tier into memory of ours, each verified, as the
    server loads them.
    """
    with closing(RedisTier(url, 1 << 40, timeout_ms=5000)) as tier:
        infos = [info for info in tier.find(keys) if info is not None]
        assert len(infos) == len(keys)
        rooms = [np.empty(info.size_bytes, np.uint8) for info in infos]
        with loading(tier, list(zip(infos, rooms, strict=True))) as load_all:
            yield load_all
