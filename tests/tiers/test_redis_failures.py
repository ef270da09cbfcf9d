"""The Redis tier when its server is down, frozen, emptied, changed, breaks off or lies."""

from __future__ import annotations

import select
import socket
import socketserver
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from contracts.chunks import make_info, payload
from contracts.shelf import assert_absent, assert_counts, assert_holds, get, put
from helpers.redis_process import RedisProcess, TlsFiles
from helpers.redis_relay import SPOILS, outcome, relay, sending, serving, stay_silent_inside

from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_chunks import KeyNames

RedisTierMaker = Callable[..., RedisTier]

INFO = make_info(1, 10_000)
DATA = payload(1, 10_000)
PARTED = make_info(1, 20_000)
PARTED_BYTES = payload(1, 20_000)
NAMES = KeyNames("kvs:1:")
ACL = "ACL SETUSER writer on >secret +@all %R~*"

CALLS: dict[str, Callable[[RedisTier], object]] = {
    "find": lambda tier: tier.find([INFO.key]),
    "read": lambda tier: get(tier, INFO),
    "delete": lambda tier: tier.delete(INFO.key),
    "scan": lambda tier: list(tier.scan()),
    "put": lambda tier: put(tier, make_info(2, 10_000), DATA),
}


def test_tier_that_starts_before_its_server_works_once_it_is_there(
    own_redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(own_redis.url)
    for call in CALLS.values():
        with pytest.raises(TierUnavailableError, match=r"redis://127\.0\.0\.1:\d+/0: .*; check"):
            call(tier)
    assert_counts(tier, [], [])
    own_redis.start()
    assert put(tier, INFO, DATA)
    assert_holds(tier, INFO, DATA)


def test_tier_that_could_not_list_at_its_start_counts_what_is_there_before_it_reserves(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    put(open_redis_tier(redis.url), INFO, DATA)
    with redis.frozen():
        tier = open_redis_tier(redis.url, timeout_ms=200)
        with pytest.raises(TierUnavailableError):
            tier.reserve(INFO)
    assert_counts(tier, [], [])
    reservation = tier.reserve(make_info(2, 100))
    assert_counts(tier, [INFO], [reservation])


@pytest.mark.parametrize("call", CALLS)
def test_frozen_server_fails_each_call_in_bounded_time_and_works_again_after(
    redis: RedisProcess, open_redis_tier: RedisTierMaker, call: str
) -> None:
    tier = open_redis_tier(redis.url, timeout_ms=200)
    put(tier, INFO, DATA)
    with redis.frozen():
        start = time.monotonic()
        with pytest.raises(TierUnavailableError, match="Timeout"):
            CALLS[call](tier)
        assert time.monotonic() - start < 3
        assert_counts(tier, [INFO], [])
    assert tier.delete(INFO.key) is (call != "delete")
    assert put(tier, INFO, DATA)
    assert_holds(tier, INFO, DATA)


def test_restarted_server_has_forgotten_and_is_filled_again(
    own_redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    own_redis.start()
    tier = open_redis_tier(own_redis.url)
    infos = [make_info(seed, 10_000) for seed in range(4)]
    for info in infos:
        put(tier, info, DATA)
    own_redis.stop()
    own_redis.start()
    assert get(tier, infos[0]) is None
    assert tier.find([info.key for info in infos[:2]]) == [None, None]
    assert tier.delete(infos[2].key) is False
    assert_counts(tier, [infos[3]], [])
    assert put(tier, infos[3], DATA)
    assert_counts(tier, [infos[3]], [])
    assert_holds(tier, infos[3], DATA)


def test_flushed_server_has_forgotten_between_reserve_and_seal(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url)
    put(tier, INFO, DATA)
    reservation = tier.reserve(INFO)
    tier.write(reservation, payload(2, 10_000))
    redis.client.flushall()
    assert tier.seal(reservation) is True
    assert_holds(tier, INFO, payload(2, 10_000))
    assert_counts(tier, [INFO], [])
    redis.client.flushall()
    assert list(tier.scan()) == []
    assert_counts(tier, [], [])


def test_killed_writer_leaves_invisible_parts_that_expire(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    # may write parts but no manifest: its death falls between the two
    redis.command(*f"{ACL} %W~*}}:*:*".split())
    tier = open_redis_tier(f"redis://writer:secret@127.0.0.1:{redis.port}", ttl_s=1000)
    with pytest.raises(TierUnavailableError, match=r"NoPermissionError.*ACL"):
        put(tier, INFO, DATA)
    tier.close()
    assert len(redis.names()) == 3
    assert all(1000 < redis.client.ttl(name) <= 2000 for name in redis.names())
    other = open_redis_tier(redis.url)
    assert_absent(other, INFO)
    assert_counts(other, [], [])
    assert put(other, INFO, payload(2, 10_000))
    assert_holds(other, INFO, payload(2, 10_000))


def test_failed_write_is_cleaned_up_before_the_next(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    redis.command(*f"{ACL} %W~*}}:*:*".split())
    tier = open_redis_tier(f"redis://writer:secret@127.0.0.1:{redis.port}")
    with pytest.raises(TierUnavailableError):
        put(tier, INFO, DATA)
    assert len(redis.names()) == 3
    redis.command(*f"{ACL} ~*".split())
    assert put(tier, make_info(2, 10), payload(2, 10))
    assert len(redis.names()) == 2


def test_chunk_whose_seal_got_no_answer_is_gone_after_the_next(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    with relay(redis.port) as (url, handler):
        handler.unanswered = b"\r\nNX\r\n"
        tier = open_redis_tier(url)
        with pytest.raises(TierUnavailableError):
            put(tier, INFO, DATA)
        assert redis.client.exists(NAMES.manifest(INFO.key))
        assert_counts(tier, [], [])
        with pytest.raises(TierUnavailableError):
            put(tier, make_info(2, 10_000), DATA)
        assert not redis.client.exists(NAMES.manifest(INFO.key))
        assert len(redis.names()) == 4
        tier.close()


class _QuotesTheAuth(socketserver.BaseRequestHandler):
    """Answer everything with an error that quotes it, as some proxies do."""

    def handle(self) -> None:
        while data := self.request.recv(1 << 16):
            quoted = data.decode(errors="replace").replace("\r\n", " ")
            self.request.sendall(f"-ERR unknown command {quoted}\r\n".encode())


@pytest.mark.parametrize(
    ("password", "typed"),
    [("hunter2secret", "hunter2secret"), ("p@ss/wörd:1", "p%40ss%2Fw%C3%B6rd%3A1")],
)
def test_password_shows_in_no_error(
    redis: RedisProcess, open_redis_tier: RedisTierMaker, password: str, typed: str
) -> None:
    def shown(url: str) -> str:
        tier = open_redis_tier(url)
        with pytest.raises(TierUnavailableError) as caught:
            tier.find([INFO.key])
        return f"{tier!r} {tier} {caught.value} {caught.value!r}"

    with serving(_QuotesTheAuth) as url:
        with_password = url.replace("://", f"://:{typed}@")
        quoted = shown(with_password)
        open_redis_tier(with_password).close()
    assert "unknown command" in quoted
    assert "***" in quoted
    refused = shown(f"redis://someone:{typed}@127.0.0.1:{redis.port}/0")
    assert "check the user and its password" in refused
    for text in (quoted, refused):
        assert password not in text
        assert typed not in text


UNUSABLE = [
    "", "secret", "http://:secret@host", "redis://", "redis://:sec/ret@host:6379",
    "redis://user:12/secret@host", "redis://user:12#secret@host", "redis://user:12?secret@host",
    "redis://host:secret", "redis://host/secret", "redis://host?password=secret",
    "redis://host?socket_timeout=secret", "redis://[secret", "unix:///secret",
]  # fmt: skip


def test_url_that_cannot_be_used_is_refused_without_being_shown() -> None:
    for url in UNUSABLE:
        with pytest.raises(InvalidRequestError, match="percent-encoded") as caught:
            RedisTier(url, 1 << 20)
        assert "sec" not in str(caught.value)


def test_tls_url_never_falls_back_to_plain_text(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url.replace("redis://", "rediss://"), timeout_ms=1000)
    with pytest.raises(TierUnavailableError, match="rediss://"):
        tier.find([INFO.key])


def test_replica_refuses_writes_and_says_what_to_do(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url)
    redis.client.replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(TierUnavailableError, match="point the URL at the primary"):
            put(tier, INFO, DATA)
    finally:
        redis.client.replicaof("NO", "ONE")
    assert_counts(tier, [], [])
    assert put(tier, INFO, DATA)


def test_closed_tier_is_unavailable_and_leaves_its_data(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url)
    put(tier, INFO, DATA)
    reservation = tier.reserve(make_info(2, 10))
    tier.write(reservation, payload(2, 10))
    tier.close()
    with pytest.raises(TierUnavailableError, match="closed"):
        tier.find([INFO.key])
    with pytest.raises(TierUnavailableError, match="closed"):
        tier.seal(reservation)
    assert_counts(tier, [INFO], [])
    assert_holds(open_redis_tier(redis.url), INFO, DATA)


def test_more_callers_than_connections_all_get_their_turn(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url)
    put(tier, INFO, DATA)

    def work(_: int) -> None:
        for _ in range(20):
            assert tier.find([INFO.key]) == [INFO]
            assert tier.read(INFO.key, np.zeros(10_000, np.uint8))

    with ThreadPoolExecutor(48) as pool:
        list(pool.map(work, range(48)))
    assert len(list(redis.client.client_list())) <= 18


Relayed = tuple[RedisTier, Any]


@pytest.fixture
def relayed(redis: RedisProcess, no_leaks: None) -> Iterator[Relayed]:
    """A tier behind a relay, and the handler whose ``spoil`` can be set."""
    with relay(redis.port) as (url, handler):
        tier = RedisTier(url, 64 << 20, timeout_ms=300, part_bytes=4096)
        yield tier, handler
        tier.close()


@pytest.fixture
def beside(redis: RedisProcess, relayed: Relayed) -> Iterator[RedisTier]:
    """A tier over the same Redis that nothing happens to."""
    with closing(RedisTier(redis.url, 64 << 20, part_bytes=4096)) as tier:
        yield tier


@pytest.mark.parametrize("spoilt", SPOILS)
def test_reply_that_is_wrong_is_a_miss_or_an_error_and_harms_nobody_else(
    relayed: Relayed, beside: RedisTier, spoilt: str
) -> None:
    tier, handler = relayed
    put(beside, PARTED, PARTED_BYTES)
    assert_holds(tier, PARTED, PARTED_BYTES)
    handler.spoil = staticmethod(SPOILS[spoilt])
    for call in (lambda: tier.find([PARTED.key]), lambda: get(tier, PARTED)):
        assert outcome(call) in ("[None]", "None", "unavailable")
        assert_holds(beside, PARTED, PARTED_BYTES)
    handler.spoil = None
    assert_holds(tier, PARTED, PARTED_BYTES)


def assert_given_up_in_time(call: Callable[[], object]) -> None:
    """Fail unless a call of a tier with 300 ms is an error at its deadline."""
    started = time.monotonic()
    assert outcome(call) == "unavailable"
    assert 0.2 < time.monotonic() - started < 1.5


@pytest.mark.timeout(30)  # without the deadline a reply drips for hours
@pytest.mark.parametrize("spoilt", ["drips", "drips inside", "stays silent"])
def test_reply_that_comes_too_slowly_is_given_up_at_the_deadline(
    redis: RedisProcess, no_leaks: None, spoilt: str
) -> None:
    data = payload(2, 300_000)
    info = make_info(2, len(data))
    with relay(redis.port) as (url, handler):
        tier = RedisTier(url, 64 << 20, timeout_ms=300, part_bytes=1 << 20)
        put(tier, info, data)
        for call in (lambda: get(tier, info), lambda: tier.find([info.key])):
            handler.spoil = staticmethod(SPOILS.get(spoilt, stay_silent_inside))
            assert_given_up_in_time(call)
            handler.spoil = None
            assert_holds(tier, info, data)
        tier.close()


def drip_list(client: socket.socket, reply: bytes) -> None:
    """Send most of a listing at once, and then an item of it each 10 ms."""
    client.sendall(b"*2\r\n$1\r\n0\r\n*100000\r\n" + b"$5\r\nabcde\r\n" * 60_000)
    while not select.select([client], [], [], 0.01)[0]:
        client.sendall(b"$1\r\nx\r\n")


def test_listing_that_never_ends_is_given_up_at_the_deadline(relayed: Relayed) -> None:
    tier, handler = relayed
    assert tier.find([PARTED.key]) == [None]
    handler.spoil = staticmethod(drip_list)
    assert_given_up_in_time(lambda: list(tier.scan()))


def list_without_end(client: socket.socket, reply: bytes) -> None:
    """Answer everything with a page of a listing that has nothing and goes on."""
    while True:
        client.sendall(b"*2\r\n$1\r\n7\r\n*0\r\n")
        if not client.recv(1 << 16):
            return


@pytest.mark.timeout(30)
def test_listing_whose_pages_never_end_ends_in_time_and_forgets_nothing(
    relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.tiers.redis_chunks.LIST_S", 0.2)
    tier, handler = relayed
    assert put(tier, PARTED, PARTED_BYTES)
    counted = tier.stats()
    handler.spoil = staticmethod(list_without_end)
    assert list(tier.scan()) == []
    assert tier.stats() == counted


def test_frame_that_the_server_does_not_take_is_given_up_in_time(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url, timeout_ms=300, part_bytes=2 << 20)
    info = make_info(3, 40 << 20)
    reservation = tier.reserve(info)
    tier.write(reservation, payload(3, info.size_bytes))
    with redis.frozen():
        started = time.monotonic()
        with pytest.raises(TierUnavailableError, match="no answer in time") as error:
            tier.seal(reservation)
        assert time.monotonic() - started < 2
    assert "raise --redis-timeout-ms" in str(error.value)
    assert get(tier, info) is None


@pytest.mark.parametrize("spoilt", ["drips", "hangs up inside", "another protocol", "an error"])
def test_put_that_gets_a_wrong_reply_fails_and_shows_nothing(
    relayed: Relayed, beside: RedisTier, spoilt: str
) -> None:
    tier, handler = relayed
    handler.spoil = staticmethod(SPOILS[spoilt])
    with pytest.raises(TierUnavailableError):
        put(tier, PARTED, PARTED_BYTES)
    assert get(beside, PARTED) is None
    handler.spoil = None
    assert put(tier, PARTED, PARTED_BYTES)
    assert_holds(beside, PARTED, PARTED_BYTES)


@pytest.fixture(scope="module")
def tls_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """A Redis that speaks TLS alone, as 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    process = RedisProcess(folder, tls=TlsFiles.make(folder))
    process.start()
    yield process
    process.client.close()
    process.stop()


def test_tls_carries_chunks_of_any_size(
    tls_redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(tls_redis.url, 128 << 20, part_bytes=(2 << 20) - 64)
    sizes = (10, 33_000_001, *range(1_000_000, 1_000_004))
    for info in [make_info(seed, size) for seed, size in enumerate(sizes, 2)]:
        put(tier, info, payload(2, info.size_bytes))
        assert_holds(tier, info, payload(2, info.size_bytes))
    assert len(tier.find([make_info(seed, 1).key for seed in range(512)])) == 512


def test_certificate_that_nobody_signed_or_of_another_name_is_refused(
    tls_redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    unsigned = tls_redis.url.partition("?")[0]
    for url in (unsigned, tls_redis.url.replace("127.0.0.1", "localhost")):
        with pytest.raises(TierUnavailableError, match="certificate verify failed"):
            open_redis_tier(url).find([PARTED.key])


def test_large_frame_takes_one_connection(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url, 256 << 20, part_bytes=(2 << 20) - 64, connections=3)
    info = make_info(4, 40 << 20)
    put(tier, info, payload(4, info.size_bytes))
    assert_holds(tier, info, payload(4, info.size_bytes))
    assert len(redis.client.client_list()) == 1 + 1
    out = np.zeros(17 << 20, np.uint8)
    assert tier.read(info.key, out, 12_345_678)
    assert np.array_equal(out, payload(4, info.size_bytes)[12_345_678:][: 17 << 20])


def test_read_from_the_start_gives_a_chunk_its_whole_life_again(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url, ttl_s=1000)
    put(tier, PARTED, PARTED_BYTES)
    for name in redis.names():
        redis.client.expire(name, 50)
    assert tier.read(PARTED.key, np.zeros(10, np.uint8), 5)
    assert {redis.client.ttl(name) for name in redis.names()} <= {49, 50}
    assert tier.read(PARTED.key, np.zeros(10, np.uint8))
    manifest, *parts = sorted(redis.client.ttl(name) for name in redis.names())
    assert 50 < manifest <= 1000 < min(parts)


def test_listing_that_cannot_be_read_forgets_nothing(relayed: Relayed) -> None:
    tier, handler = relayed
    assert put(tier, PARTED, PARTED_BYTES)
    counted = tier.stats()
    handler.spoil = staticmethod(sending(b"*2\r\n$1\r\n0\r\n$4\r\nnone\r\n"))
    assert list(tier.scan()) == []
    assert tier.stats() == counted


def test_a_server_without_a_cluster_that_sends_elsewhere_is_not_left(relayed: Relayed) -> None:
    tier, handler = relayed
    assert put(tier, PARTED, PARTED_BYTES)
    handler.spoil = staticmethod(sending(b"-MOVED 0 127.0.0.1:1\r\n" * 4))
    assert outcome(lambda: get(tier, PARTED)) == "unavailable"
    handler.spoil = None
    assert_holds(tier, PARTED, PARTED_BYTES)


@pytest.mark.parametrize("reply", [b":7\r\n", b"*1\r\n$1\r\na\r\n"], ids=["number", "list"])
def test_manifest_of_another_type_is_a_miss_that_can_be_put_again(
    relayed: Relayed, reply: bytes
) -> None:
    tier, handler = relayed
    assert put(tier, PARTED, PARTED_BYTES)
    handler.spoil = staticmethod(sending(reply * 40))
    assert outcome(lambda: get(tier, PARTED)) in ("None", "unavailable")
    assert outcome(lambda: tier.find([PARTED.key])) in ("[None]", "unavailable")
    handler.spoil = None
    put(tier, PARTED, PARTED_BYTES)
    assert_holds(tier, PARTED, PARTED_BYTES)
