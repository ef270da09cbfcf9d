"""Fixtures of benchmarks: a server process, a Redis, chunks of noise, loads of a tier."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.lib.processes import child, free_port, serving_peer
from kvstore.client import Chunk, Client, ClientOptions
from kvstore.client.chunk import LayerTensors, parents
from kvstore.codecs.base import empty_tensors
from kvstore.proto import types
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import header_bytes
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkInfo, ChunkKey, KVLayout, Model, PutOutcome
from kvstore.server.tiering.work_queue import MAX_BATCH
from kvstore.server.wiring import LOADS_AT_ONCE, batch_parallelism
from kvstore.tiers.base import Tier
from kvstore.tiers.redis import RedisTier

MIB = 1 << 20


def model_of(name: str, layers: int, kv_heads: int = 8, head_dim: int = 128) -> Model:
    """Return a model in bfloat16; at the defaults each layer takes 1 MiB in 256 tokens."""
    kind, ids = types.LayerKind.attention, tuple(range(layers))
    group = types.LayerGroup(kind, types.DType.bfloat16, ids, kv_heads, head_dim)
    rope = types.RopeParameters(500000.0, head_dim)
    return Model(f"bench/{name}", "r1", "none", "none", (group,), rope, "none")


MODEL = model_of("8b", 8)
"""Chunks of 8 MiB: eight layers of an 8B-class model (8 KV heads of 128, bf16) x 256 tokens."""
SMALL = model_of("1mib", 1)
TINY = model_of("tiny", 1, 1, 8)
"""Chunks of 8 KiB, whose size does not matter."""


@contextmanager
def serving(*flags: str) -> Iterator[tuple[str, int]]:
    """Run a server process; yield its address and pid."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kvstore.server", "--listen", "127.0.0.1:0"]
        command += ["--log-level", "error", "--socket", f"{folder}/kv.sock", *flags]
        with child(*command) as (pid, line):
            if "listening on" not in line:
                raise RuntimeError(f"the server did not start: {line!r}")
            yield line.split()[3], pid


def connect(address: str, model: Model, **options: Any) -> Client:
    """Return a client of *model* with a deadline that no benchmark reaches."""
    return Client(address, model, ClientOptions(**{"deadline_ms": 20_000, **options}))


@contextmanager
def joined(*flags: str, model: Model = MODEL, **options: Any) -> Iterator[Client]:
    with serving(*flags) as (address, _), connect(address, model, **options) as client:
        yield client


def keys_of(client: Client, count: int, seed: int) -> list[ChunkKey]:
    tokens = np.random.default_rng(seed).integers(0, 1 << 31, 256 * count)
    return client.keys(tokens.tolist())


def chunks_of(keys: Sequence[ChunkKey], tensors: Iterable[LayerTensors]) -> list[Chunk]:
    named = zip(keys, tensors, parents(keys), strict=True)
    return [Chunk(key, kv, parent=parent) for key, kv, parent in named]


def buffers(model: Model, count: int) -> list[Any]:
    return [empty_tensors(KVLayout.of(model, 256)) for _ in range(count)]


def make_chunks(client: Client, count: int, seed: int) -> tuple[list[ChunkKey], list[Chunk]]:
    """Return *count* chained chunks of bf16 noise, each with its own memory."""
    keys, rng = keys_of(client, count, seed), np.random.default_rng(seed)
    tensors = buffers(client.model, count)
    for part in arrays(tensors):
        part[...] = rng.standard_normal(part.shape, np.float32).view(np.uint32) >> 16
    return keys, chunks_of(keys, tensors)


def put_all(client: Client, chunks: Sequence[Chunk]) -> None:
    assert all(put.outcome is PutOutcome.stored for put in client.put_chunks(chunks))


def get_all(client: Client, keys: Sequence[ChunkKey], out: Sequence[Any]) -> None:
    assert len(client.get_chunks(keys, out)) == len(keys)


def arrays(tensors: Iterable[LayerTensors]) -> list[NDArray[Any]]:
    return [np.asarray(p) for one in tensors for layers in one for parts in layers for p in parts]


def arrays_of(chunks: Iterable[Chunk]) -> list[NDArray[Any]]:
    return arrays(chunk.tensors for chunk in chunks)


def chunk_bytes(chunks: Sequence[Chunk]) -> int:
    return sum(int(part.nbytes) for part in arrays_of(chunks))


def check(chunks: Sequence[Chunk], out: Sequence[LayerTensors]) -> None:
    for part, target in zip(arrays_of(chunks), arrays(out), strict=True):
        if not np.array_equal(part, target):
            raise AssertionError("wrong bytes")


@contextmanager
def redis_server() -> Iterator[int]:
    """Run a Redis; yield its port."""
    program, port = shutil.which("redis-server"), free_port()
    if program is None:
        raise SystemExit("redis-server is not installed; `make test` installs it")
    with TemporaryDirectory() as folder:
        flags = ("--port", str(port), "--save", "", "--appendonly", "no", "--dir", folder)
        with serving_peer([program, *flags], [port], Path(folder) / "redis.log"):
            yield port


_LINK = """
import sys
sys.path[:0] = ["tests"]
from helpers.slow_link import SlowLink
link = SlowLink(int(sys.argv[1]), float(sys.argv[2]))
print(link.port, flush=True)
sys.stdin.read()
link.close()
"""


@contextmanager
def slow_link(port: int, gbits: float) -> Iterator[int]:
    """Run a process with a link of *gbits* a second to *port*; yield the port to connect to."""
    with child(sys.executable, "-c", _LINK, str(port), str(gbits * 125e6)) as (_, line):
        yield int(line)


Load = tuple[ChunkInfo, Bytes]
"""A frame, and memory allocated for it."""


@contextmanager
def loading(tier: Tier, loads: Sequence[Load]) -> Iterator[Callable[[], None]]:
    """Yield a function that loads and verifies all of *loads*, with the server's thread count.

    In rows if the tier batches loads. All are requested at once.
    """
    threads, length = LOADS_AT_ONCE.get(tier.name, 1), 1
    if tier.batch_key(loads[0][0].key) is not None:
        threads, length = batch_parallelism()[f"load-{tier.name}"], MAX_BATCH
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
    """Yield a get of all *keys* from the Redis tier into allocated memory, as the server loads."""
    with closing(RedisTier(url, 1 << 40, timeout_ms=5000)) as tier:
        infos = [info for info in tier.find(keys) if info is not None]
        assert len(infos) == len(keys)
        ready = [np.empty(info.size_bytes, np.uint8) for info in infos]
        with loading(tier, list(zip(infos, ready, strict=True))) as load_all:
            yield load_all
