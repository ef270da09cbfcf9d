"""The Redis tier against a real server: the contract, and what only a shared tier meets."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from contracts.chunks import make_frame, make_info, make_representation, payload
from contracts.shelf import assert_absent, assert_counts, assert_holds, get, put
from contracts.tier import TierContract
from helpers.redis_process import RedisProcess

from kvstore.proto.buffers import checksum
from kvstore.proto.errors import (
    InvalidRequestError,
    TierFullError,
)
from kvstore.proto.frame import check_frame
from kvstore.proto.types import ChunkInfo
from kvstore.tiers.base import Tier
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_chunks import KeyNames, parse_manifest

RedisTierMaker = Callable[..., RedisTier]
NAMES = KeyNames("kvs:1:")


def part_names(redis: RedisProcess) -> list[bytes]:
    return [name for name in redis.names() if not name.endswith(b":m")]


class TestRedisTier(TierContract):
    @pytest.fixture(autouse=True)
    def _server(self, redis: RedisProcess) -> None:
        self.redis = redis

    def make_tier(self, capacity_bytes: int, tmp_path: Path) -> Tier:
        return RedisTier(self.redis.url, capacity_bytes, timeout_ms=10_000, part_bytes=4096)


def test_frame_is_stored_as_parts_and_a_manifest_that_all_expire(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url, ttl_s=1000)
    info = make_info(1, 10_000)
    put(tier, info, payload(1, 10_000))
    name = NAMES.manifest(info.key)
    manifest = parse_manifest(redis.value(name), info.key)
    assert manifest is not None
    assert manifest.info == info
    parts = NAMES.parts(manifest)
    assert redis.names() == sorted([name, *parts])
    assert b"".join(map(redis.value, parts)) == payload(1, 10_000).tobytes()
    assert 0 < redis.client.ttl(name) <= 1000
    assert all(redis.client.ttl(part) > 1000 for part in parts)


def test_nothing_is_sealed_before_it_is_written(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url)
    reservation = tier.reserve(make_info(1, 100))
    with pytest.raises(InvalidRequestError, match="write it first"):
        tier.seal(reservation)
    assert_counts(tier, [], [reservation])
    tier.abort(reservation)


def test_a_size_without_room_for_a_chunk_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="capacity_bytes"):
        RedisTier("redis://127.0.0.1:1", 512)


def test_other_node_finds_and_reads_what_the_first_sealed(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    first, second = open_redis_tier(redis.url), open_redis_tier(redis.url, part_bytes=8192)
    info, frame = make_frame(1, 256, representation=make_representation(4, 2, 16))
    put(first, info, frame)
    assert second.find([info.key]) == [info]
    found = get(second, info)
    assert found is not None
    assert check_frame(found, info.key).info() == info
    assert_counts(second, [], [])
    assert put(second, info, payload(2, info.size_bytes)) is False
    assert second.delete(info.key) is True
    assert redis.names() == []
    assert_absent(first, info)
    assert_counts(first, [], [])


def test_find_answers_for_more_keys_than_one_round_trip_takes(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    first, second = open_redis_tier(redis.url), open_redis_tier(redis.url)
    infos = [make_info(seed, 10) for seed in range(1100)]
    for info in infos[::100]:
        put(first, info, payload(1, 10))
    expected = [info if at % 100 == 0 else None for at, info in enumerate(infos)]
    assert second.find([info.key for info in infos]) == expected


def test_version_that_another_node_replaced_is_read_and_counted_no_more(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    first, second = open_redis_tier(redis.url), open_redis_tier(redis.url)
    old, new = make_info(1, 10_000), make_info(1, 20_000)
    put(first, old, payload(1, 10_000))
    second.delete(old.key)
    put(second, new, payload(2, 20_000))
    out = np.zeros(15_000, dtype=np.uint8)
    assert first.read(new.key, out, 2_000)
    assert np.array_equal(out, payload(2, 20_000)[2_000:17_000])
    assert_counts(first, [], [])
    assert first.find([new.key]) == [new]


def test_scan_counts_what_others_put_and_forgets_what_they_removed(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    first, second = open_redis_tier(redis.url), open_redis_tier(redis.url)
    infos = [make_info(seed, 1_000 + seed) for seed in range(4)]
    for tier, info in zip([first, second, second, first], infos, strict=True):
        put(tier, info, payload(1, info.size_bytes))
    second.delete(infos[0].key)
    assert list(first.scan()) == infos[1:]
    assert_counts(first, infos[1:], [])


def test_prefixes_divide_one_server(redis: RedisProcess, open_redis_tier: RedisTierMaker) -> None:
    first = open_redis_tier(redis.url, prefix="a:")
    second = open_redis_tier(redis.url, prefix="b:")
    info = make_info(1, 10)
    redis.client.set("a:{" + "0" * 64 + "}:m:not-ours", b"x")
    redis.client.set("a:{zz}:m", b"x")
    put(first, info, payload(1, 10))
    assert list(first.scan()) == [info]
    assert list(second.scan()) == []
    assert second.delete(info.key) is False
    assert_holds(first, info, payload(1, 10))


def test_of_thirty_two_writers_one_whole_version_stays_and_no_part_of_the_others(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tiers = [open_redis_tier(redis.url) for _ in range(4)]
    barrier = Barrier(32, timeout=60)
    info = make_info(1, 50_001)

    def work(seed: int) -> bool:
        tier = tiers[seed % 4]
        reservation = tier.reserve(info)
        tier.write(reservation, payload(seed, info.size_bytes))
        barrier.wait()
        return tier.seal(reservation)

    with ThreadPoolExecutor(32) as pool:
        won = list(pool.map(work, range(32)))
    assert won.count(True) == 1
    for tier in tiers:
        assert_holds(tier, info, payload(won.index(True), info.size_bytes))
    assert len(part_names(redis)) == 13
    assert sum(tier.stats().chunks for tier in tiers) == 1
    assert sum(tier.stats().reservations for tier in tiers) == 0


def test_expired_chunk_is_absent_and_its_bytes_come_back_when_noticed(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url)
    for info in (make_info(1, 10_000), make_info(2, 10_000), make_info(3, 10_000)):
        put(tier, info, payload(1, 10_000))
        redis.client.pexpireat(NAMES.manifest(info.key), 1)
    assert get(tier, make_info(1, 10_000)) is None
    assert tier.stats().chunks == 2
    assert tier.find([make_info(2, 10_000).key]) == [None]
    assert tier.stats().chunks == 1
    assert tier.delete(make_info(3, 10_000).key) is False
    assert_counts(tier, [], [])


@pytest.mark.parametrize("full", ["before the first part", "between parts"])
def test_server_without_memory_refuses_and_nothing_half_shows(
    redis: RedisProcess, open_redis_tier: RedisTierMaker, full: str
) -> None:
    tier = open_redis_tier(redis.url, part_bytes=1 << 20)
    kept, info = make_info(1, 10_000), make_info(2, 16 << 20)
    put(tier, kept, payload(1, 10_000))
    used = int(redis.client.info("memory")["used_memory"])
    redis.client.config_set("maxmemory", 1 if full.startswith("before") else used + (6 << 20))
    with pytest.raises(TierFullError) as caught:
        put(tier, info, payload(2, info.size_bytes))
    assert caught.value.need_bytes == tier.allocated_bytes(info.size_bytes)
    assert len(redis.names()) == 2
    assert_absent(tier, info)
    assert_holds(tier, kept, payload(1, 10_000))
    assert_counts(tier, [kept], [])
    assert tier.delete(kept.key) is True
    redis.client.config_set("maxmemory", 0)
    assert put(tier, info, payload(2, info.size_bytes))
    assert_holds(tier, info, payload(2, info.size_bytes))


@pytest.fixture
def sealed(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> tuple[RedisTier, RedisTier, ChunkInfo]:
    """A tier, another node, and a real frame of 9 parts that the first has sealed."""
    tier = open_redis_tier(redis.url)
    info, frame = make_frame(1, 128, representation=make_representation(2, 2, 16))
    put(tier, info, frame)
    assert len(part_names(redis)) == 9
    return tier, open_redis_tier(redis.url), info


Sealed = tuple[RedisTier, RedisTier, ChunkInfo]


def test_poisoned_manifest_is_absent_and_makes_way(redis: RedisProcess, sealed: Sealed) -> None:
    tier, other, info = sealed
    for poison in (b"x", b"x" * 60, b"x" * 5_000, bytes(200)):
        redis.client.set(NAMES.manifest(info.key), poison)
        assert other.find([info.key]) == [None]
        assert not redis.client.exists(NAMES.manifest(info.key))
        assert_absent(tier, info)
        assert_counts(tier, [], [])
        redis.client.set(NAMES.manifest(info.key), poison)
        assert other.delete(info.key) is False
        redis.client.set(NAMES.manifest(info.key), poison)
        assert put(other, info, payload(5, info.size_bytes))
        assert_holds(tier, info, payload(5, info.size_bytes))


def test_damaged_manifest_with_bytes_like_an_error_of_redis_is_absent_and_no_failure(
    redis: RedisProcess, open_redis_tier: RedisTierMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.tiers.redis.os.urandom", lambda size: b"\n-ERR no.\n-"[:size])
    tier, info = open_redis_tier(redis.url), make_info(1, 10_000)
    put(tier, info, payload(1, info.size_bytes))
    name = NAMES.manifest(info.key)
    size = redis.client.strlen(name)
    redis.client.setrange(name, size - 1, bytes([redis.value(name)[-1] ^ 1]))
    assert_absent(tier, info)
    assert put(tier, info, payload(1, info.size_bytes))
    assert_holds(tier, info, payload(1, info.size_bytes))


def test_manifest_of_the_wrong_type_is_absent_and_makes_way(
    redis: RedisProcess, sealed: Sealed
) -> None:
    tier, other, info = sealed
    for _ in range(2):
        redis.client.delete(NAMES.manifest(info.key))
        redis.client.rpush(NAMES.manifest(info.key), b"a list")
        assert_absent(tier, info)
        redis.client.rpush(NAMES.manifest(info.key), b"a list")
        assert put(other, info, payload(5, info.size_bytes))
        assert_holds(tier, info, payload(5, info.size_bytes))


def test_manifest_of_a_newer_version_is_absent_and_left_alone(
    redis: RedisProcess, sealed: Sealed
) -> None:
    tier, other, info = sealed
    body = b"\x02" + b"what the next version knows of a chunk"
    newer = body + checksum(body).to_bytes(8, "little")
    redis.client.set(NAMES.manifest(info.key), newer)
    assert_absent(tier, info)
    assert put(other, info, payload(5, info.size_bytes)) is False
    assert redis.client.get(NAMES.manifest(info.key)) == newer


@pytest.mark.parametrize("damage", ["missing", "short", "empty", "list"])
def test_chunk_that_lost_bytes_is_removed_and_can_be_put_again(
    redis: RedisProcess, sealed: Sealed, damage: str
) -> None:
    tier, other, info = sealed
    for part, first in ((0, other), (4, tier), (8, other)):
        name = part_names(redis)[part]
        data = redis.value(name)
        redis.client.delete(name)
        if damage == "list":
            redis.client.rpush(name, b"a list")
        elif damage != "missing":
            redis.client.set(name, data[:-1] if damage == "short" else b"")
        assert get(first, info) is None
        assert redis.names() == []
        assert get(tier, info) is None
        assert_counts(tier, [], [])
        assert put(tier, info, payload(5, info.size_bytes))
        assert_holds(other, info, payload(5, info.size_bytes))


def test_giant_values_are_never_fetched(redis: RedisProcess, sealed: Sealed) -> None:
    tier, other, info = sealed
    redis.client.append(part_names(redis)[2], b"x" * (32 << 20))
    redis.client.set(NAMES.manifest(make_info(7, 1).key), b"x" * (32 << 20))
    tracemalloc.start()
    try:
        found = get(other, info)
        assert other.find([make_info(7, 1).key, info.key]) == [None, info]
        assert list(other.scan()) == [info]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert found is not None
    check_frame(found, info.key)
    assert get(tier, info) is not None
