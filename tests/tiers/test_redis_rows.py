"""What lies in Redis of a chunk; frames read one after another, checked as their slices come."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from contracts.chunks import make_frame, make_info, make_representation
from contracts.shelf import put
from helpers.local_server import eventually
from helpers.redis_process import RedisProcess
from helpers.redis_relay import SPOILS, outcome, relay
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.buffers import Bytes, checksum
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError, TierUnavailableError
from kvstore.proto.frame import MAX_COMPONENTS, MAX_FRAME_BYTES, header_bytes
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import KEY_BYTES, ChunkInfo, ChunkKey, KVLayout
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_chunks import (
    MAX_MANIFEST_BYTES,
    MAX_PART_BYTES,
    MAX_PARTS,
    MIN_PART_BYTES,
    KeyNames,
    Manifest,
    parse_manifest,
)
from kvstore.tiers.redis_connection import SLICE_BYTES, WINDOW

RedisTierMaker = Callable[..., RedisTier]
Frame = tuple[ChunkInfo, Bytes]

REPRESENTATION = make_representation(3, 4, 128)
COUNT = 6
PART_BYTES = SLICE_BYTES + 4096
"""So that frames have slices of all sizes, and several parts."""


def make_row(count: int = COUNT) -> list[Frame]:
    """Return frames of different sizes, each of several slices."""
    return [
        make_frame(seed, 256 + 8 * seed, representation=REPRESENTATION) for seed in range(count)
    ]


def load(tier: RedisTier, info: ChunkInfo) -> Bytes | None:
    """Load as the server does: checked as it comes. Return the frame, None when it is absent."""
    out = np.zeros(info.size_bytes, np.uint8)
    verifier = FrameVerifier(out, info.key, header_bytes(info.layout))
    if not tier.read(info.key, out, 0, verifier):
        return None
    assert verifier.finish().info() == info
    return out


def load_row(tier: RedisTier, row: Sequence[Frame]) -> None:
    """Load the frames one after the other, as a worker of the server does."""
    for info, frame in row:
        out = load(tier, info)
        assert out is not None
        assert np.array_equal(out, frame)


def stored(redis: RedisProcess, tier: RedisTier, count: int = COUNT) -> list[Frame]:
    row = make_row(count)
    for info, frame in row:
        assert put(tier, info, frame)
    redis.client.config_resetstat()
    return row


def calls(redis: RedisProcess, verb: str) -> int:
    """Return how often the server was asked for *verb*."""
    stats = redis.client.info("commandstats").get(f"cmdstat_{verb}", {})
    return int(stats.get("calls", 0))


def slices(row: Sequence[Frame], part_bytes: int = PART_BYTES) -> int:
    """Return how many slices the frames have, each part cut for itself."""
    parts = [
        min(part_bytes, len(frame) - at)
        for _, frame in row
        for at in range(0, len(frame), part_bytes)
    ]
    return sum(-(-size // SLICE_BYTES) for size in parts)


def test_a_row_comes_over_one_connection_and_nothing_is_asked_twice(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url, part_bytes=PART_BYTES, connections=4)
    row = stored(redis, tier)
    assert min(len(frame) for _, frame in row) > WINDOW * SLICE_BYTES
    load_row(tier, row)
    assert calls(redis, "getrange") == COUNT + slices(row)
    assert int(redis.client.info("stats")["total_connections_received"]) == 0
    load_row(tier, row[::-1])
    assert calls(redis, "getrange") == 2 * (COUNT + slices(row))


def test_what_is_gone_of_a_row_is_absent_and_the_rest_is_not(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url, part_bytes=PART_BYTES)
    row = stored(redis, tier)
    gone = {1: b":m", 3: b":0", 4: b":2"}  # the manifest, the first part, a later one
    for at, end in gone.items():
        stem = row[at][0].key.hex().encode()
        (name,) = (each for each in redis.names() if stem in each and each.endswith(end))
        redis.client.unlink(name)
    keys = [info.key for info, _ in row]
    for at, (info, frame) in enumerate(row):
        out = load(tier, info)
        assert (out is None) == (at in gone)
        assert out is None or np.array_equal(out, frame)
    assert tier.find(keys) == [None if at in gone else info for at, (info, _) in enumerate(row)]
    assert tier.stats().chunks == COUNT - len(gone)


def test_bytes_of_two_reads_are_never_checked_as_one(
    redis: RedisProcess, open_redis_tier: RedisTierMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_redis_tier(redis.url, part_bytes=PART_BYTES)
    other = open_redis_tier(redis.url, part_bytes=PART_BYTES)
    ((info, frame),) = stored(redis, tier, 1)
    (last,) = (name for name in redis.names() if name.endswith(b":2"))
    redis.client.unlink(last)  # it ends in the midst of the frame
    spoilt = frame.copy()
    spoilt[header_bytes(info.layout) + 5] ^= 1  # in what the first read had right
    look = tier._stat

    def others_put_first(keys: Sequence[ChunkKey]) -> list[Manifest | None]:
        monkeypatch.setattr(tier, "_stat", look)
        assert other.delete(info.key)
        assert put(other, info, spoilt)
        return look(keys)

    monkeypatch.setattr(tier, "_stat", others_put_first)
    assert load(tier, info) is None
    assert tier._stat is look
    with pytest.raises((ChunkCorruptError, InvalidFrameError)):
        load(tier, info)
    assert tier.find([info.key]) == [info], "what others put is theirs"


IN_A_ROW = ["drips inside", "hangs up inside", "goes silent inside", "other size", "wrong end"]
"""What leaves something of the one reply to be taken for the next."""


@pytest.mark.parametrize("spoilt", IN_A_ROW)
def test_a_reply_that_is_wrong_in_a_row_harms_no_other_frame(
    redis: RedisProcess, no_leaks: None, spoilt: str
) -> None:
    with relay(redis.port) as (url, handler):
        tier = RedisTier(url, 64 << 20, timeout_ms=300, part_bytes=PART_BYTES)
        row = make_row(4)
        for info, frame in row:
            put(tier, info, frame)
        assert load(tier, row[0][0]) is not None
        handler.spoil = staticmethod(SPOILS[spoilt])
        started = time.monotonic()
        for at in (1, 2):
            assert outcome(partial(load, tier, row[at][0])) in ("None", "unavailable")
        assert time.monotonic() - started < 2 * (3 * 0.3 + 1)
        handler.spoil = None
        load_row(tier, row[3:])
        tier.close()


def test_a_server_that_stops_in_a_row_is_given_up_in_time(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url, part_bytes=PART_BYTES, timeout_ms=300)
    row = stored(redis, tier)
    assert load(tier, row[0][0]) is not None
    with redis.frozen():
        started = time.monotonic()
        # The first slices of the second are here already, the rest of it is not.
        with pytest.raises(TierUnavailableError, match="no answer in time"):
            load(tier, row[1][0])
        assert time.monotonic() - started < 1.5
    load_row(tier, row)


def test_a_connection_that_went_between_two_frames_is_made_anew(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url, part_bytes=PART_BYTES, connections=4)
    row = stored(redis, tier)
    for frame in row:
        load_row(tier, [frame])
        redis.client.client_kill_filter(_type="normal", skipme=True)
        assert eventually(lambda: len(redis.client.client_list()) == 1)


def test_a_connection_that_goes_in_the_midst_is_never_mixed_with_another(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url, part_bytes=PART_BYTES, connections=4)
    row = stored(redis, tier)
    for _ in range(3):
        for frame in row:
            with suppress(TierUnavailableError):  # what had come was told already
                load_row(tier, [frame])
            redis.client.client_kill_filter(_type="normal", skipme=True)
    load_row(tier, row)


def test_a_frame_that_is_broken_off_once_is_missed_once_and_kept(
    redis: RedisProcess, open_redis_tier: RedisTierMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_redis_tier(redis.url, part_bytes=PART_BYTES)
    ((info, frame),) = stored(redis, tier, 1)
    read = tier._stored.read

    def broken_off(_: Manifest, out: Bytes, offset: int, arrived: Callable[[int], object]) -> bool:
        monkeypatch.setattr(tier._stored, "read", read)
        out[:SLICE_BYTES] = 1
        arrived(SLICE_BYTES)
        return False

    monkeypatch.setattr(tier._stored, "read", broken_off)
    assert load(tier, info) is None
    assert tier.find([info.key]) == [info], "its parts are all there"
    load_row(tier, [(info, frame)])


def test_threads_read_rows_beside_each_other(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url, part_bytes=PART_BYTES, connections=4)
    row = stored(redis, tier)
    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(load_row, tier, row[at:] + row[:at]) for at in (0, 1, 2, 3) * 3]
        for each in work:
            each.result()
    assert len(redis.client.client_list()) <= 1 + 4


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
        with pytest.raises(InvalidFrameError, match="is stored as"):
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
