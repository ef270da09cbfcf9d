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
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.bare import bare_read
from bench.lib.report import timed
from bench.lib.workload import (
    SMALL,
    arrays,
    check,
    chunk_bytes,
    chunks_of,
    connect,
    keys_of,
    loading,
    make_chunks,
    model_of,
    put_all,
    rooms,
    serving,
)
from kvstore.client import Chunk, Client
from kvstore.client.options import TransportName
from kvstore.codecs.raw import RawCodec
from kvstore.proto.buffers import Bytes
from kvstore.proto.frame import FrameTemplate, check_frame, raw_frame_bytes
from kvstore.proto.keys import representation_digest
from kvstore.proto.types import DIGEST_BYTES, ROOT, ChunkInfo, ChunkKey, KVLayout
from kvstore.tiers.base import Tier

_BASE = np.random.default_rng(5).integers(0, 1 << 16, (2, 8, 256, 128), dtype=np.uint16)


def make_frames(count: int, seed: int) -> list[tuple[ChunkInfo, Bytes]]:
    """Return *count* frames of 2 MiB of noise."""
    model = model_of("2", 2)
    layout, digest = KVLayout.of(model, 256), representation_digest(model)
    rng = np.random.default_rng(seed)
    frames = []
    for tensors in rooms(model, count):
        for part in arrays([tensors]):
            part[...] = rng.integers(0, 1 << 16, part.shape, np.uint16)
        key = ChunkKey(rng.bytes(32))
        template = FrameTemplate(key, ROOT, digest, bytes(DIGEST_BYTES), layout)
        frame = np.empty(raw_frame_bytes(layout), np.uint8)
        frames.append((RawCodec().encode(template, tensors, frame).info(), frame))
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

    def extend(self, store_s: Sequence[float], load_s: Sequence[float]) -> None:
        """Add some rounds."""
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
        return timed(lambda: list(self._pool.map(self._store, self._frames)))

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
            seconds = timed(load_all)
        for (_, frame), out in zip(self._frames, self.out, strict=True):
            assert np.array_equal(frame, out), "wrong bytes"
        return seconds

    def run(self, side: Side, repeats: int) -> None:
        """Store and load *repeats* times."""
        for _ in range(repeats):
            side.extend([self.store_s()], [self.load_s()])

    def close(self) -> None:
        """Stop the threads and close the tier."""
        self._pool.shutdown()
        self._tier.close()


def bare_loads_s(folder: Path, outs: Sequence[Bytes], threads: int, rounds: int) -> list[float]:
    """Seconds of reading as many bytes as *outs* have out of a disk tier's extents, unverified."""
    with min((folder / "extents").iterdir()).open("rb") as file:
        # What is read is not looked at: frames that lie in further extents are like these.
        room = outs[: os.fstat(file.fileno()).st_size // len(outs[0])]
        with bare_read(file.fileno(), room, threads) as read:
            scale = len(outs) / len(room)
            return [scale * timed(read) for _ in range(rounds)]


class RequestSide:
    """A client that puts requests of the same tensors under fresh keys and gets them back."""

    def __init__(self, client: Client, length: int) -> None:
        self._client = client
        _, self._chunks = make_chunks(client, length, 1)
        self._out = rooms(client.model, length)
        self._seeds = count(2)
        self.size_bytes = chunk_bytes(self._chunks)

    def _round(self, side: Side) -> None:
        client, out = self._client, self._out
        keys = keys_of(client, len(self._chunks), next(self._seeds))
        chunks = chunks_of(keys, [chunk.tensors for chunk in self._chunks])
        for part in arrays(out):
            part[...] = 0
        put_s = timed(lambda: put_all(client, chunks))
        found: list[Any] = []
        get_s = timed(lambda: found.extend(client.get_chunks(keys, out)))
        assert len(found) == len(keys)
        check(chunks, out)
        client.delete(keys=keys)
        side.extend([put_s], [get_s])

    def run(self, side: Side, repeats: int) -> None:
        """Put and get *repeats* requests, and forget them again."""
        for _ in range(repeats):
            self._round(side)


@contextmanager
def request_side(transport: TransportName, layers: int, length: int) -> Iterator[RequestSide]:
    """Run a server of 1 GiB of CPU memory and a client of *transport*."""
    flags = ["--tiers", "cpu", "--cpu", "1GiB"]
    flags += ["--bulk", "127.0.0.1:0"] if transport == "tcp" else []
    with (
        serving(*flags) as (address, _),
        connect(address, model_of(str(layers), layers), transport=transport) as client,
    ):
        yield RequestSide(client, length)


def _numbered(client: Client, number: int) -> Chunk:
    """Return the chunk of 1 MiB that *number* names, a prompt of its own."""
    (key,) = client.keys([number % (1 << 31)] * 256)
    return Chunk(key, [[list(_BASE + np.uint16(number % (1 << 16)))]])


def put_numbered(client: Client, count: int) -> None:
    """Put chunks 0 to *count* one by one."""
    for number in range(count):
        client.put_chunks([_numbered(client, number)])


def write_for(address: str, first: int, per_s: float, seconds: float) -> int:
    """Put fresh chunks of 1 MiB, *per_s* a second; return how many."""
    sent = 0
    with connect(address, SMALL) as client:
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            client.put_chunks([_numbered(client, first + sent)])
            sent += 1
            time.sleep(max(0.0, started + sent / per_s - time.monotonic()))
    return sent


def read_for(client: Client, count: int, seconds: float) -> tuple[int, int]:
    """Get chunks 0 to *count* one by one, again and again; return how many, and how many right."""
    reads = right = 0
    started = time.monotonic()
    while reads < count or time.monotonic() - started < seconds:
        wanted = _numbered(client, reads % count)
        found = client.get_chunks([wanted.key])
        reads += 1
        right += len(found) == 1 and np.array_equal(arrays(found), arrays([wanted.tensors]))
    return reads, right


if __name__ == "__main__":
    print(write_for(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
