"""Verbs and checks for tests of tiers, and a random schedule against a dict."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from contracts.chunks import make_info, payload

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import TierFullError
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.tiers.base import Reservation, Tier


def open_files() -> int:
    """Return how many files and memfds this process has open.

    Sockets and the like do not count: those of earlier tests are closed in the background. Nor do
    the device files of CUDA's driver, which stay open from their first use on.
    """
    gc.collect()
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            path = os.readlink(f"/proc/self/fd/{name}")
            count += path.startswith("/") and not path.startswith("/dev/nvidia")
    return count


def put(tier: Tier, info: ChunkInfo, data: Bytes, *, durable: bool = False) -> bool:
    """Reserve, write and seal one chunk."""
    reservation = tier.reserve(info)
    tier.write(reservation, data)
    return tier.seal(reservation, durable=durable)


def bytes_of(info: ChunkInfo) -> Bytes:
    """Return payload that depends on the chunk's key and size alone."""
    return payload(int.from_bytes(info.key[-4:], "little"), info.size_bytes)


def fill_up(tier: Tier, infos: Sequence[ChunkInfo]) -> tuple[list[ChunkInfo], TierFullError]:
    """Put ``bytes_of`` chunks until one is refused; return those that went in and the refusal."""
    done: list[ChunkInfo] = []
    for info in infos:
        try:
            put(tier, info, bytes_of(info))
        except TierFullError as error:
            return done, error
        done.append(info)
    raise AssertionError(f"{len(infos)} chunks went in and none was refused")


def get(tier: Tier, info: ChunkInfo) -> Bytes | None:
    """Return the whole frame, None when absent."""
    out = np.zeros(info.size_bytes, dtype=np.uint8)
    return out if tier.read(info.key, out) else None


def assert_holds(tier: Tier, info: ChunkInfo, data: Bytes) -> None:
    """Fail unless the tier has exactly *data* and *info* under the chunk's key."""
    found = get(tier, info)
    assert found is not None
    assert np.array_equal(found, data)
    assert tier.find([info.key]) == [info]


def assert_absent(tier: Tier, info: ChunkInfo) -> None:
    """Fail unless nothing can be seen of the chunk."""
    assert get(tier, info) is None
    assert tier.find([info.key]) == [None]
    assert info.key not in [known.key for known in tier.scan()]


def assert_counts(tier: Tier, sealed: Sequence[ChunkInfo], open_: Sequence[Reservation]) -> None:
    """Fail unless the tier accounts for exactly these chunks and reservations."""
    taken = sum(tier.allocated_bytes(info.size_bytes) for info in sealed)
    taken += sum(reservation.reserved_bytes for reservation in open_)
    stats = tier.stats()
    assert stats.used_bytes == taken
    assert stats.used_bytes <= stats.capacity_bytes
    assert (stats.chunks, stats.reservations) == (len(sealed), len(open_))


def assert_holds_only(tier: Tier, infos: Sequence[ChunkInfo]) -> None:
    """Fail unless the tier has these chunks, with ``bytes_of`` in each, and nothing else."""
    assert_counts(tier, infos, [])
    for info in infos:
        assert_holds(tier, info, bytes_of(info))


def shuffled_by_key(count: int) -> list[ChunkInfo]:
    """Return infos whose order is neither that of their keys nor of their sizes."""
    infos = [make_info(seed, 200 + 37 * (seed * 5 % count)) for seed in range(count)]
    assert infos != sorted(infos, key=lambda info: info.key)
    return infos


class Schedule:
    """A seeded run of random steps on a tier and on a dict that says what it must hold."""

    def __init__(self, tier: Tier, draw: random.Random) -> None:
        self.tier = tier
        self.draw = draw
        self.sealed: dict[ChunkKey, tuple[ChunkInfo, Bytes]] = {}
        self.open: list[tuple[Reservation, Bytes]] = []
        self.most_bytes = min(tier.max_frame_bytes, tier.capacity_bytes // 12)

    def step(self) -> None:
        steps = [self.reserve, self.reserve, self.seal, self.seal, self.abort, self.delete]
        self.draw.choice([*steps, self.read])()

    def reserve(self) -> None:
        """Reserve one of few keys, so that the same one is often being written twice."""
        info = make_info(self.draw.randrange(40), self.draw.randrange(1, self.most_bytes))
        try:
            reservation = self.tier.reserve(info)
        except TierFullError:
            assert self.sealed or self.open
            return
        assert (reservation.info, reservation.tenant) == (info, "default")
        assert reservation.reserved_bytes == self.tier.allocated_bytes(info.size_bytes)
        assert reservation.reserved_bytes >= info.size_bytes
        data = payload(self.draw.getrandbits(32), info.size_bytes)
        self.tier.write(reservation, data)
        self.open.append((reservation, data))
        if info.key not in self.sealed:
            assert_absent(self.tier, info)

    def _pick(self) -> tuple[Reservation, Bytes] | None:
        return self.open.pop(self.draw.randrange(len(self.open))) if self.open else None

    def seal(self) -> None:
        if picked := self._pick():
            info = picked[0].info
            assert self.tier.seal(picked[0]) is (info.key not in self.sealed)
            self.sealed.setdefault(info.key, (info, picked[1]))

    def abort(self) -> None:
        if picked := self._pick():
            self.tier.abort(picked[0])

    def delete(self) -> None:
        key = make_info(self.draw.randrange(40), 1).key
        assert self.tier.delete(key) is (self.sealed.pop(key, None) is not None)

    def read(self) -> None:
        """Find a few keys, and read a range of the last into the middle of some room."""
        keys = [make_info(self.draw.randrange(40), 1).key for _ in range(self.draw.randrange(4))]
        every = [self.sealed.get(key) for key in keys]
        assert self.tier.find(keys) == [known and known[0] for known in every]
        for key, known in zip(keys[-1:], every[-1:], strict=True):
            frame = known[1] if known else payload(0, 8)
            start = self.draw.randrange(len(frame))
            stop = self.draw.randrange(start, len(frame) + 1)
            room = np.full(stop - start + 2, 7, dtype=np.uint8)
            assert self.tier.read(key, room[1:-1], start) is (known is not None)
            right = frame[start:stop] if known else 7
            assert (room[1:-1] == right).all()
            assert room[0] == room[-1] == 7

    def check_accounts(self) -> None:
        infos = [info for info, _ in self.sealed.values()]
        assert_counts(self.tier, infos, [reservation for reservation, _ in self.open])

    def check_contents(self) -> None:
        assert list(self.tier.scan()) == [info for info, _ in self.sealed.values()]
        for info, data in self.sealed.values():
            assert_holds(self.tier, info, data)

    def tear_down(self) -> None:
        """Give everything back: the tier must be as good as new."""
        while self.open:
            self.abort()
        for key in list(self.sealed):
            assert self.tier.delete(key)
        assert_counts(self.tier, [], [])
        self.tier.abort(self.tier.reserve(make_info(1, self.tier.max_frame_bytes)))
