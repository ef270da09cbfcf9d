"""Our side of what is measured beside the peers, each piece as the peer's own figure is made.

Run as a program it is the client that writes while another reads.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.lib.bare import bare_read
from bench.lib.report import best_s
from bench.lib.workload import SMALL, check, chunk_bytes, loading, make_chunks, serving
from kvstore.client import Chunk, Client, ClientOptions
from kvstore.client.chunk import parents
from kvstore.client.options import TransportName
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.codecs.raw import RawCodec
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import FrameTemplate, check_frame, raw_frame_bytes
from kvstore.proto.keys import representation_digest
from kvstore.proto.types import (
    DIGEST_BYTES,
    ROOT,
    ChunkInfo,
    ChunkKey,
    DType,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
    PutOutcome,
    RopeParameters,
)
from kvstore.tiers.base import Tier

DEADLINE_MS = 20_000


def model_of(layers: int) -> Model:
    """Return a model of whose layers each takes 1 MiB in a chunk of 256 tokens."""
    return Model(
        f"bench/{layers}", "r1", "none", "none",
        (LayerGroup(LayerKind.attention, DType.bfloat16, tuple(range(layers)), 8, 128),),
        RopeParameters(500000.0, 128), "none",
    )  # fmt: skip


def make_frames(count: int, seed: int) -> list[tuple[ChunkInfo, Bytes]]:
    """Return *count* frames of 2 MiB of noise."""
    model = model_of(2)
    layout = KVLayout.of(model, 256)
    rng = np.random.default_rng(seed)
    frames = []
    for _ in range(count):
        tensors = empty_tensors(layout)
        for part in (part for layers in tensors for parts in layers for part in parts):
            part[...] = rng.integers(0, 1 << 16, part.shape, np.uint16)
        template = FrameTemplate(
            ChunkKey(rng.bytes(32)), ROOT, representation_digest(model), bytes(DIGEST_BYTES), layout
        )
        frame = np.empty(raw_frame_bytes(layout), np.uint8)
        header = RawCodec().encode(template, tensors, frame)
        frames.append((header.info(), frame))
    return frames


@dataclass(slots=True)
class Side:
    """The seconds of each store and load of one side, and what was measured.

    The median counts: where a new file's pages come from makes one and the same store ten
    times as fast as another, so that the best of few says little.
    """

    words: str
    store_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)

    def take(self, store_s: float, load_s: float) -> None:
        """Add a round."""
        self.store_s.append(store_s)
        self.load_s.append(load_s)

    def extend(self, store_s: Sequence[float], load_s: Sequence[float]) -> None:
        """Add the rounds of a peer's own run."""
        self.store_s += store_s
        self.load_s += load_s


class TierSide:
    """One of our tiers in this process, as a peer's benchmark has its adapter.

    Frames go in verified, as the mover copies them, by *writers* threads, and come out as it loads
    them: verified step by step, into memory that is there.
    """

    def __init__(self, tier: Tier, frames: Sequence[tuple[ChunkInfo, Bytes]], writers: int) -> None:
        self._tier = tier
        self._frames = frames
        self.out = [np.zeros_like(frame) for _, frame in frames]
        self._pool = ThreadPoolExecutor(writers)

    def store_s(self) -> float:
        """Seconds of storing all frames, none of which is there before."""
        for info, _ in self._frames:
            self._tier.delete(info.key)
        return best_s(lambda: list(self._pool.map(self._store, self._frames)), 1)

    def _store(self, pair: tuple[ChunkInfo, Bytes]) -> None:
        info, frame = pair
        check_frame(frame, info.key)
        reservation = self._tier.reserve(info)
        self._tier.write(reservation, frame)
        assert self._tier.seal(reservation)

    def load_s(self) -> float:
        """Seconds of loading and verifying all frames, once what was stored is on its medium.

        Files of fs_native are not brought there at all.
        """
        self._tier.flush()
        for out in self.out:
            out[:] = 0
        infos = [info for info, _ in self._frames]
        with loading(self._tier, list(zip(infos, self.out, strict=True))) as load_all:
            seconds = best_s(load_all, 1)
        for (_, frame), out in zip(self._frames, self.out, strict=True):
            assert np.array_equal(frame, out), "wrong bytes"
        return seconds

    def warm_up(self) -> None:
        """Store and load once, as the peer's benchmark does first."""
        self.run(Side("warm-up"), 1)

    def run(self, side: Side, repeats: int) -> None:
        """Store and load *repeats* times."""
        for _ in range(repeats):
            side.take(self.store_s(), self.load_s())

    def close(self) -> None:
        """Stop the threads and close the tier."""
        self._pool.shutdown()
        self._tier.close()


def bare_loads_s(folder: Path, outs: Sequence[Bytes], threads: int, rounds: int) -> list[float]:
    """Seconds of reading as many bytes as *outs* have out of a disk tier's extents, unverified."""
    extent = sorted((folder / "extents").iterdir())[0]
    descriptor = os.open(extent, os.O_RDONLY)
    try:
        # What is read is not looked at: frames that lie in further extents are like these.
        room = [out for out in outs if out.nbytes][: os.fstat(descriptor).st_size // len(outs[0])]
        with bare_read(descriptor, room, threads) as read:
            scale = len(outs) / len(room)
            return [scale * best_s(read, 1) for _ in range(rounds)]
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class RequestSide:
    """A client that puts requests of the same tensors under fresh keys and gets them back."""

    client: Client
    chunks: Sequence[Chunk]
    out: list[ChunkTensors]
    seed: int = 0

    @classmethod
    def of(cls, client: Client, count: int) -> RequestSide:
        """Make requests of *count* chunks."""
        _, chunks = make_chunks(client, count, 1)
        layout = KVLayout.of(client.model, 256)
        return cls(client, chunks, [empty_tensors(layout) for _ in chunks])

    @property
    def size_bytes(self) -> int:
        """Bytes of a request's tensors."""
        return chunk_bytes(self.chunks)

    def round(self) -> tuple[float, float]:
        """Return the seconds of one put and of one get of it; forget it again."""
        self.seed += 1
        tokens = np.random.default_rng(self.seed).integers(0, 1 << 31, 256 * len(self.chunks))
        keys = self.client.keys(tokens.tolist())
        chunks = [
            Chunk(key, chunk.tensors, parent=parent)
            for key, chunk, parent in zip(keys, self.chunks, parents(keys), strict=True)
        ]
        for part in (part for c in self.out for layers in c for p in layers for part in p):
            part[...] = 0
        started = time.perf_counter()
        puts = self.client.put_chunks(chunks)
        between = time.perf_counter()
        found = self.client.get_chunks(keys, self.out)
        ended = time.perf_counter()
        assert all(put.outcome is PutOutcome.stored for put in puts)
        assert len(found) == len(keys)
        check(chunks, self.out)
        self.client.delete(keys=keys)
        return between - started, ended - between

    def run(self, side: Side, repeats: int) -> None:
        """Put and get *repeats* requests."""
        for _ in range(repeats):
            side.take(*self.round())


@contextmanager
def request_side(
    folder: Path, transport: TransportName, layers: int, count: int
) -> Iterator[RequestSide]:
    """Run a server of 1 GiB of CPU memory and a client of *transport*."""
    flags = ["--tiers", "cpu", "--cpu", "1GiB"]
    if transport == "tcp":
        flags += ["--bulk", "127.0.0.1:0"]
    options = ClientOptions(transport=transport, deadline_ms=DEADLINE_MS)
    with (
        serving(*flags, disk=folder / "none") as (address, _),
        Client(address, model_of(layers), options) as client,
    ):
        yield RequestSide.of(client, count)


def small_tensors(base: np.ndarray, number: int) -> ChunkTensors:
    """Return the tensors of the 1 MiB chunk *number*."""
    part = base + np.uint16(number % (1 << 16))
    return [[[part[0], part[1]]]]


def small_base() -> np.ndarray:
    """Return noise of the shape of a chunk's K and V."""
    return np.random.default_rng(5).integers(0, 1 << 16, (2, 8, 256, 128), dtype=np.uint16)


def small_keys(client: Client, number: int) -> list[ChunkKey]:
    """Return the key of the prompt of one chunk that *number* names."""
    return client.keys([number % (1 << 31)] * 256)


def write_for(address: str, first: int, per_s: float, seconds: float) -> int:
    """Put fresh chunks of 1 MiB, *per_s* a second; return how many."""
    base = small_base()
    sent = 0
    with Client(address, SMALL, ClientOptions(deadline_ms=DEADLINE_MS)) as client:
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            (key,) = small_keys(client, first + sent)
            client.put_chunks([Chunk(key, small_tensors(base, first + sent))])
            sent += 1
            time.sleep(max(0.0, started + sent / per_s - time.monotonic()))
    return sent


def read_for(client: Client, count: int, seconds: float) -> tuple[int, int]:
    """Get chunks 0 to *count* one by one, again and again; return how many, and how many right."""
    base = small_base()
    reads = right = 0
    started = time.monotonic()
    while reads < count or time.monotonic() - started < seconds:
        number = reads % count
        found = client.get_chunks(small_keys(client, number))
        reads += 1
        right += len(found) == 1 and all(
            np.array_equal(a, b)
            for a, b in zip(found[0][0][0], small_tensors(base, number)[0][0], strict=True)
        )
    return reads, right


def main(address: str, first: str, per_s: str, seconds: str) -> None:
    """Write, and print how many chunks."""
    print(write_for(address, int(first), float(per_s), float(seconds)))


if __name__ == "__main__":
    main(*sys.argv[1:])
