from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from contracts.chunks import make_info, payload
from contracts.shelf import assert_absent, assert_holds, bytes_of, put
from contracts.tier import TierContract
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from helpers.disk_process import EXTENT_BYTES, INDEX_BYTES
from helpers.redis_process import RedisProcess
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import ChunkCorruptError, TierUnavailableError
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkInfo
from kvstore.tiers import encrypted
from kvstore.tiers.base import Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.encrypted import (
    CELL_BYTES,
    HEADER_BYTES,
    EncryptedTier,
    KeyRing,
    cells,
    encrypted_bytes,
    largest_frame_bytes,
)
from kvstore.tiers.redis import RedisTier

KEYS = {1: b"1" * 32, 2: b"2" * 32}
SIZE = 3 * CELL_BYTES


def disk(path: Path, capacity_bytes: int = 4 << 20) -> DiskTier:
    return DiskTier((path, capacity_bytes), file_bytes=EXTENT_BYTES, index_bytes=INDEX_BYTES)


class TestEncryptedDiskTier(TierContract):
    def make_tier(self, capacity_bytes: int, tmp_path: Path) -> Tier:
        inner = disk(tmp_path / "disk", capacity_bytes)
        return EncryptedTier(inner, KeyRing(lambda: KEYS, os.urandom))


class TestEncryptedRedisTier(TierContract):
    @pytest.fixture(autouse=True)
    def _server(self, redis: RedisProcess) -> None:
        self.redis = redis

    def make_tier(self, capacity_bytes: int, tmp_path: Path) -> Tier:
        inner = RedisTier(self.redis.url, capacity_bytes, timeout_ms=10_000, part_bytes=4096)
        return EncryptedTier(inner, KeyRing(lambda: KEYS, os.urandom))


# --- the format


@given(st.integers(1, 5 * CELL_BYTES), st.data())
def test_cells_cover_every_range_and_their_places_do_not_overlap(
    size: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    every, some = list(cells(size)), list(cells(size, start, stop))
    assert some == [cell for cell in every if cell.start < stop and cell.stop > start]
    assert [cell.start for cell in every] == [0, *(cell.stop for cell in every[:-1])]
    assert every[-1].stop == size
    ends = [cell.place + cell.stop - cell.start + encrypted.TAG_BYTES for cell in every]
    assert [HEADER_BYTES, *ends[:-1]] == [cell.place for cell in every]
    assert ends[-1] == encrypted_bytes(size)
    assert largest_frame_bytes(encrypted_bytes(size)) == size
    assert encrypted_bytes(largest_frame_bytes(size + 100)) <= size + 100


@given(st.integers(0, 3 * CELL_BYTES))
def test_a_size_that_no_frame_takes_is_none(sealed: int) -> None:
    info = encrypted._plain(make_info(1, sealed))
    assert info is None or encrypted_bytes(info.size_bytes) == sealed


def test_keys_are_derived_as_rfc_5869_says() -> None:
    for salt in (b"", b"salt" * 6):
        expected = HKDF(SHA256(), 32, salt, b"info").derive(b"k" * 32)
        assert encrypted._hkdf(b"k" * 32, salt, b"info") == expected


def test_a_frame_on_the_medium_is_what_it_was_in_the_first_version() -> None:
    """Written down so that files of this version stay readable."""
    keys = KeyRing(lambda: KEYS, lambda count: bytes(range(count)))
    info = make_info(1, 20)
    envelope = keys.new(info.key, 20, "acme")
    out = np.empty(36, np.uint8)
    (cell,) = cells(20)
    envelope.seal(cell, np.arange(20, dtype=np.uint8), out)
    assert envelope.header[:32].hex() == GOLDEN_HEADER
    assert envelope.header[32:] == bytes(range(32))
    assert out.tobytes().hex() == GOLDEN_CELL
    reader = KeyRing(lambda: {2: b"2" * 32}, os.urandom).cipher_for(envelope.header, info.key, 20)
    back = np.empty(20, np.uint8)
    assert reader.open(cell, out, back)
    assert back.tolist() == list(range(20))


GOLDEN_HEADER = "4b565345010000000200000000000000140000000000000077a43c2aa39233ff"
GOLDEN_CELL = "c9cae5c8988785cb1f17690892f5307c4d0774221eaf61794427d9d7109443aa0df94114"
"""By HKDF and AES-GCM of the library cryptography: that of the tenant's key, then the frame's."""


# --- on a medium


class Medium:
    """A disk tier, encrypted, and what lies in its file for one chunk."""

    def __init__(self, path: Path, keys: Callable[[], dict[int, bytes]]) -> None:
        self._path = path
        self.inner = disk(path)
        self.tier = EncryptedTier(self.inner, KeyRing(keys, os.urandom))

    def sealed(self, info: ChunkInfo) -> Bytes:
        out = np.empty(encrypted_bytes(info.size_bytes), np.uint8)
        assert self.inner.read(info.key, out)
        return out

    def replace(self, info: ChunkInfo, sealed: Bytes) -> None:
        """Put *sealed* where *info* lies, past the tier."""
        place = self.inner.file_place(info.key)
        assert place is not None
        with (self._path / "extents" / f"{place.number:04}.kv").open("r+b") as file:
            file.seek(place.offset)
            file.write(sealed.tobytes())


@pytest.fixture
def medium(tmp_path: Path) -> Iterator[Medium]:
    made = Medium(tmp_path / "disk", lambda: KEYS)
    yield made
    made.tier.close()


def assert_corrupt(tier: Tier, info: ChunkInfo) -> None:
    out = np.empty(info.size_bytes, np.uint8)
    for verifier in (None, FrameVerifier(out, info.key, 64)):
        with pytest.raises(ChunkCorruptError):
            tier.read(info.key, out, 0, verifier)


def test_the_medium_sees_no_byte_of_a_frame(medium: Medium, tmp_path: Path) -> None:
    info = make_info(1, SIZE)
    data = payload(1, SIZE)
    put(medium.tier, info, data)
    medium.tier.flush()
    raw = b"".join(file.read_bytes() for file in (tmp_path / "disk").rglob("*") if file.is_file())
    assert raw
    assert data[1000:1032].tobytes() not in raw
    assert medium.tier.file_place(info.key) is None


def test_two_frames_of_the_same_bytes_share_none_encrypted(medium: Medium) -> None:
    one, two = make_info(1, SIZE), make_info(2, SIZE)
    for info in (one, two):
        put(medium.tier, info, payload(1, SIZE))
    first, second = medium.sealed(one), medium.sealed(two)
    assert not np.array_equal(first[HEADER_BYTES : HEADER_BYTES + 64], second[64:128])
    assert (first[32:64] != second[32:64]).any()


FIELDS = [0, 4, 6, 8, 12, 16, 24, 32, 56, 64, 5000]
"""A byte of: magic, version, zeros, epoch, reserved, size, tenant, salt, prefix, two of a cell."""


def test_a_flipped_bit_anywhere_is_never_served(medium: Medium) -> None:
    info = make_info(1, SIZE)
    put(medium.tier, info, payload(1, SIZE))
    sealed = medium.sealed(info)
    for at in (*FIELDS, CELL_BYTES - 1, CELL_BYTES, 2 * CELL_BYTES - 1, -1):
        flipped = sealed.copy()
        flipped[at] ^= 1
        medium.replace(info, flipped)
        assert_corrupt(medium.tier, info)


def test_nothing_of_another_frame_opens_in_its_place(medium: Medium) -> None:
    one, two = make_info(1, SIZE), make_info(2, SIZE)
    put(medium.tier, one, payload(1, SIZE))
    put(medium.tier, two, payload(2, SIZE))
    mine, other = medium.sealed(one), medium.sealed(two)
    for spot in (
        slice(0, None),  # the whole frame, of another chunk
        slice(0, HEADER_BYTES),
        slice(HEADER_BYTES, None),
        slice(CELL_BYTES, 2 * CELL_BYTES),
        slice(32, 64),  # salt and nonce
    ):
        changed = mine.copy()
        changed[spot] = other[spot]
        medium.replace(one, changed)
        assert_corrupt(medium.tier, one)


def test_cells_of_a_frame_do_not_open_in_each_others_place_nor_in_a_later_version(
    medium: Medium,
) -> None:
    info = make_info(1, SIZE)
    put(medium.tier, info, payload(1, SIZE))
    first = medium.sealed(info)
    swapped = first.copy()
    swapped[CELL_BYTES : 2 * CELL_BYTES] = first[2 * CELL_BYTES : 3 * CELL_BYTES]
    medium.replace(info, swapped)
    assert_corrupt(medium.tier, info)
    medium.tier.delete(info.key)
    put(medium.tier, info, payload(2, SIZE))
    later = medium.sealed(info)
    later[CELL_BYTES : 2 * CELL_BYTES] = first[CELL_BYTES : 2 * CELL_BYTES]
    medium.replace(info, later)
    assert_corrupt(medium.tier, info)


def test_a_frame_of_another_tenant_is_under_another_key(medium: Medium) -> None:
    info = make_info(1, 100)
    keys = KeyRing(lambda: KEYS, lambda count: bytes(count))
    acme, zeta = (keys.new(info.key, 100, tenant) for tenant in ("acme", "zeta"))
    assert acme.header[24:32] != zeta.header[24:32]
    out, back = np.empty(116, np.uint8), np.empty(100, np.uint8)
    (cell,) = cells(100)
    acme.seal(cell, np.zeros(100, np.uint8), out)
    assert not zeta.open(cell, out, back)


# --- rotation


def test_a_new_epoch_is_written_with_and_the_old_is_read_until_it_is_retired(
    tmp_path: Path,
) -> None:
    now = {1: KEYS[1]}
    medium = Medium(tmp_path / "disk", lambda: now)
    old, new = make_info(1, SIZE), make_info(2, SIZE)
    put(medium.tier, old, payload(1, SIZE))
    now = dict(KEYS)
    put(medium.tier, new, payload(2, SIZE))
    assert [int(medium.sealed(info)[8]) for info in (old, new)] == [1, 2]
    assert_holds(medium.tier, old, payload(1, SIZE))
    assert_holds(medium.tier, new, payload(2, SIZE))
    now = {2: KEYS[2]}
    assert_corrupt(medium.tier, old)
    assert_holds(medium.tier, new, payload(2, SIZE))
    now = {}
    third = make_info(3, SIZE)
    reservation = medium.tier.reserve(third)
    with pytest.raises(TierUnavailableError):
        medium.tier.write(reservation, payload(3, SIZE))
    medium.tier.abort(reservation)
    medium.tier.close()


def test_what_was_never_encrypted_is_not_served_from_an_encrypted_tier(tmp_path: Path) -> None:
    plain = disk(tmp_path / "disk")
    info = make_info(1, encrypted_bytes(1000))
    put(plain, info, bytes_of(info))
    plain.close()
    medium = Medium(tmp_path / "disk", lambda: KEYS)
    (found,) = medium.tier.find([info.key])
    assert found is not None
    assert_corrupt(medium.tier, found)
    medium.tier.close()


def test_of_a_shared_medium_what_others_alone_can_open_is_absent_and_stays(
    redis: RedisProcess,
) -> None:
    def tier(keys: dict[int, bytes]) -> EncryptedTier:
        return EncryptedTier(
            RedisTier(redis.url, 64 << 20, timeout_ms=10_000), KeyRing(lambda: keys, os.urandom)
        )

    ours, theirs = tier({1: KEYS[1]}), tier({2: KEYS[2]})
    info = make_info(1, SIZE)
    put(ours, info, payload(1, SIZE))
    assert not theirs.read(info.key, np.empty(SIZE, np.uint8))
    assert_holds(ours, info, payload(1, SIZE))
    for one in (ours, theirs):
        one.close()


def test_a_poisoned_value_in_redis_is_a_miss(redis: RedisProcess) -> None:
    tier = EncryptedTier(
        RedisTier(redis.url, 64 << 20, timeout_ms=10_000), KeyRing(lambda: KEYS, os.urandom)
    )
    info = make_info(1, 1000)
    put(tier, info, payload(1, 1000))
    (part,) = [name for name in redis.names() if len(redis.value(name)) == encrypted_bytes(1000)]
    sealed = bytearray(redis.value(part))
    sealed[-1] ^= 1  # not a byte of its own choice: one time in 256 that would be the right one
    redis.client.set(part, bytes(sealed), keepttl=True)
    assert_corrupt(tier, info)
    tier.delete(info.key)
    assert_absent(tier, info)
    tier.close()
