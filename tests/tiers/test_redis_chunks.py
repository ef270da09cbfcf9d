"""Manifests and key names, without a server."""

from __future__ import annotations

import struct

import pytest
from contracts.chunks import make_info
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.buffers import checksum
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.frame import MAX_COMPONENTS, MAX_FRAME_BYTES
from kvstore.proto.types import KEY_BYTES, ChunkInfo, ChunkKey, KVLayout
from kvstore.tiers.redis_chunks import (
    MAX_MANIFEST_BYTES,
    MAX_PART_BYTES,
    MAX_PARTS,
    MIN_PART_BYTES,
    KeyNames,
    Manifest,
    parse_manifest,
)

_PART_BYTES = st.integers(MIN_PART_BYTES, MAX_PART_BYTES)


def _resum(body: bytes) -> bytes:
    return body + struct.pack("<Q", checksum(body))


@given(st.integers(0, 99), _PART_BYTES, st.integers(1, 1 << 22), st.binary(min_size=8, max_size=8))
def test_manifest_comes_back_as_it_was(
    seed: int, part_bytes: int, size_bytes: int, write_id: bytes
) -> None:
    info = make_info(seed, size_bytes)
    manifest = Manifest.of(info, part_bytes, write_id, 1_700_000_000_000_000)
    assert parse_manifest(manifest.raw, info.key) == manifest


@given(st.binary(max_size=400))
def test_no_bytes_with_a_right_checksum_crash_the_parser(body: bytes) -> None:
    with pytest.raises(InvalidFrameError):
        parse_manifest(_resum(b"\x01" + body), make_info(1, 1).key)


@given(st.data())
def test_any_flipped_bit_is_damage(data: st.DataObject) -> None:
    info = make_info(3, 10_000)
    raw = bytearray(Manifest.of(info, 4096, b"writer 1", 5).raw)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(InvalidFrameError):
        parse_manifest(bytes(raw), info.key)


def test_manifest_of_another_version_is_no_damage() -> None:
    info = make_info(1, 10_000)
    body = bytearray(Manifest.of(info, 4096, b"writer 1", 5).raw[:-8])
    body[0] = 2
    assert parse_manifest(_resum(bytes(body)), info.key) is None


def test_manifest_beyond_the_limits_is_refused() -> None:
    info = make_info(1, 1)
    for size_bytes, part_bytes in (
        (0, 4096),
        (MAX_FRAME_BYTES + 1, MAX_PART_BYTES),
        (1 << 62, MAX_PART_BYTES),
        (10_000, MIN_PART_BYTES - 1),
        (10_000, MAX_PART_BYTES + 1),
        (MIN_PART_BYTES * (MAX_PARTS + 1), MIN_PART_BYTES),
    ):
        body = bytearray(Manifest.of(info, 4096, b"writer 1", 5).raw[:-8])
        body[4:12] = struct.pack("<II", part_bytes, -(-size_bytes // part_bytes) & 0xFFFFFFFF)
        body[28:36] = struct.pack("<Q", size_bytes)
        with pytest.raises(InvalidFrameError):
            parse_manifest(_resum(bytes(body)), info.key)


def test_manifest_of_a_key_that_differs_anywhere_is_refused() -> None:
    """Of another chunk of the same namespace, and of the same chunk in another."""
    info = make_info(1, 10)
    for at in range(KEY_BYTES):
        other = bytearray(info.key)
        other[at] ^= 1
        with pytest.raises(InvalidFrameError, match="stands under"):
            parse_manifest(Manifest.of(info, 4096, b"writer 1", 5).raw, ChunkKey(bytes(other)))


def test_largest_layout_fits_the_limit_of_a_manifest() -> None:
    small = make_info(1, 10)
    layout = KVLayout(small.layout.components * MAX_COMPONENTS)
    info = ChunkInfo(small.key, small.parent, layout, 0, 10)
    manifest = Manifest.of(info, 4096, b"writer 1", 5)
    assert len(manifest.raw) <= MAX_MANIFEST_BYTES
    assert parse_manifest(manifest.raw, info.key) == manifest


@given(_PART_BYTES, st.integers(1, 1 << 26), st.data())
def test_cuts_cover_exactly_what_was_asked(
    part_bytes: int, size_bytes: int, data: st.DataObject
) -> None:
    manifest = Manifest.of(make_info(1, size_bytes), part_bytes, b"writer 1", 5)
    offset = data.draw(st.integers(0, size_bytes))
    length = data.draw(st.integers(0, size_bytes - offset))
    at = offset
    for part, start, stop in manifest.cut(offset, length):
        assert part * part_bytes + start == at
        assert 0 <= start < stop <= part_bytes
        at += stop - start
    assert at == offset + length


def test_names_of_a_chunk_share_one_hash_tag_and_lead_back_to_its_key() -> None:
    names, info = KeyNames("kvs:1:"), make_info(1, 10_000)
    manifest = Manifest.of(info, 4096, b"writer 1", 5)
    stem = b"kvs:1:{" + info.key.hex().encode() + b"}:"
    assert names.manifest(info.key) == stem + b"m"
    assert names.parts(manifest) == [
        stem + b"writer 1".hex().encode() + b":%d" % at for at in range(3)
    ]
    assert names.key_of(names.manifest(info.key)) == info.key
    assert names.key_of(names.manifest(info.key).upper()) is None
    assert names.key_of(names.parts(manifest)[0]) is None


@given(st.binary(max_size=90))
def test_foreign_names_are_no_keys(name: bytes) -> None:
    assert KeyNames("kvs:1:").key_of(name) is None
    assert KeyNames("kvs:1:").key_of(b"kvs:1:{" + name + b"}:m") is None
