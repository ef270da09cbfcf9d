"""The Redis tier when what answers is slow, breaks off, lies or talks rubbish."""

from __future__ import annotations

import select
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from contracts.chunks import make_info, payload
from contracts.shelf import assert_holds, get, put
from helpers.redis_process import RedisProcess, free_port
from helpers.redis_relay import SPOILS, outcome, relay, sending, stay_silent_inside

from kvstore.proto.errors import TierUnavailableError
from kvstore.tiers.redis import RedisTier

RedisTierMaker = Callable[..., RedisTier]

INFO = make_info(1, 20_000)
DATA = payload(1, 20_000)


@pytest.mark.parametrize("spoilt", SPOILS)
def test_reply_that_is_wrong_is_a_miss_or_an_error_and_harms_nobody_else(
    redis: RedisProcess, no_leaks: None, spoilt: str
) -> None:
    beside = RedisTier(redis.url, 64 << 20, part_bytes=4096)
    put(beside, INFO, DATA)
    with relay(redis.port) as (url, handler):
        tier = RedisTier(url, 64 << 20, timeout_ms=300, part_bytes=4096)
        assert_holds(tier, INFO, DATA)
        handler.spoil = staticmethod(SPOILS[spoilt])
        for call in (lambda: tier.find([INFO.key]), lambda: get(tier, INFO)):
            assert outcome(call) in ("[None]", "None", "unavailable")
            assert_holds(beside, INFO, DATA)
        handler.spoil = None
        assert_holds(tier, INFO, DATA)
        tier.close()
    beside.close()


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
            started = time.monotonic()
            assert outcome(call) == "unavailable"
            assert 0.2 < time.monotonic() - started < 1.5
            handler.spoil = None
            assert_holds(tier, info, data)
        tier.close()


def drip_list(client: socket.socket, reply: bytes) -> None:
    """Send most of a listing at once, and then an item of it each 10 ms."""
    client.sendall(b"*2\r\n$1\r\n0\r\n*100000\r\n" + b"$5\r\nabcde\r\n" * 60_000)
    while not select.select([client], [], [], 0.01)[0]:
        client.sendall(b"$1\r\nx\r\n")


def test_listing_that_never_ends_is_given_up_at_the_deadline(
    redis: RedisProcess, no_leaks: None
) -> None:
    with relay(redis.port) as (url, handler):
        tier = RedisTier(url, 64 << 20, timeout_ms=300)
        assert tier.find([INFO.key]) == [None]
        handler.spoil = staticmethod(drip_list)
        started = time.monotonic()
        assert outcome(lambda: list(tier.scan())) == "unavailable"
        assert 0.2 < time.monotonic() - started < 1.5
        tier.close()


def test_frame_that_the_server_does_not_take_is_given_up_in_time(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url, timeout_ms=300, part_bytes=2 << 20)
    info = make_info(3, 40 << 20)
    reservation = tier.reserve(info)
    tier.write(reservation, payload(3, info.size_bytes))
    with redis.frozen():
        started = time.monotonic()
        with pytest.raises(TierUnavailableError, match="no answer in time"):
            tier.seal(reservation)
        assert time.monotonic() - started < 2
    assert get(tier, info) is None


@pytest.mark.parametrize("spoilt", ["drips", "hangs up inside", "another protocol", "an error"])
def test_put_that_gets_a_wrong_reply_fails_and_shows_nothing(
    redis: RedisProcess, no_leaks: None, spoilt: str
) -> None:
    beside = RedisTier(redis.url, 64 << 20, part_bytes=4096)
    with relay(redis.port) as (url, handler):
        tier = RedisTier(url, 64 << 20, timeout_ms=300, part_bytes=4096)
        handler.spoil = staticmethod(SPOILS[spoilt])
        with pytest.raises(TierUnavailableError):
            put(tier, INFO, DATA)
        assert get(beside, INFO) is None
        handler.spoil = None
        assert put(tier, INFO, DATA)
        assert_holds(beside, INFO, DATA)
        tier.close()
    beside.close()


@pytest.fixture(scope="module")
def tls_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A Redis that also listens with TLS: its URL and the certificate to trust."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    port = free_port()
    process = RedisProcess(
        folder, "--tls-port", str(port), "--tls-cert-file", str(certificate),
        "--tls-key-file", str(key), "--tls-auth-clients", "no",
    )  # fmt: skip
    process.start()
    yield f"rediss://localhost:{port}", certificate
    process.client.close()
    process.stop()


def test_tls_carries_chunks_of_any_size(
    tls_redis: tuple[str, Path], open_redis_tier: RedisTierMaker
) -> None:
    url, certificate = tls_redis
    trusted = f"{url}?ssl_ca_certs={certificate}"
    tier = open_redis_tier(trusted, 128 << 20, part_bytes=(2 << 20) - 64)
    sizes = (10, 33_000_001, *range(1_000_000, 1_000_004))
    for info in [make_info(seed, size) for seed, size in enumerate(sizes, 2)]:
        put(tier, info, payload(2, info.size_bytes))
        assert_holds(tier, info, payload(2, info.size_bytes))
    assert len(tier.find([make_info(seed, 1).key for seed in range(512)])) == 512


def test_certificate_that_nobody_signed_is_refused(
    tls_redis: tuple[str, Path], open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(tls_redis[0])
    with pytest.raises(TierUnavailableError, match="certificate verify failed"):
        tier.find([INFO.key])
    other_name = tls_redis[0].replace("localhost", "127.0.0.1")
    tier = open_redis_tier(f"{other_name}?ssl_ca_certs={tls_redis[1]}")
    with pytest.raises(TierUnavailableError, match="certificate verify failed"):
        tier.find([INFO.key])
    assert ssl.HAS_TLSv1_3


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
    put(tier, INFO, DATA)
    for name in redis.names():
        redis.client.expire(name, 50)
    assert tier.read(INFO.key, np.zeros(10, np.uint8), 5)
    assert {redis.client.ttl(name) for name in redis.names()} <= {49, 50}
    assert tier.read(INFO.key, np.zeros(10, np.uint8))
    manifest, *parts = sorted(redis.client.ttl(name) for name in redis.names())
    assert 50 < manifest <= 1000 < min(parts)


def test_listing_that_cannot_be_read_forgets_nothing(redis: RedisProcess, no_leaks: None) -> None:
    with relay(redis.port) as (url, handler):
        tier = RedisTier(url, 64 << 20, timeout_ms=300)
        assert put(tier, INFO, DATA)
        counted = tier.stats()
        handler.spoil = staticmethod(sending(b"*2\r\n$1\r\n0\r\n$4\r\nnone\r\n"))
        assert list(tier.scan()) == []
        assert tier.stats() == counted
        tier.close()


def test_a_server_without_a_cluster_that_sends_elsewhere_is_not_left(
    redis: RedisProcess, no_leaks: None
) -> None:
    with relay(redis.port) as (url, handler):
        tier = RedisTier(url, 64 << 20, timeout_ms=300)
        assert put(tier, INFO, DATA)
        handler.spoil = staticmethod(sending(b"-MOVED 0 127.0.0.1:1\r\n" * 4))
        assert outcome(lambda: get(tier, INFO)) == "unavailable"
        handler.spoil = None
        assert_holds(tier, INFO, DATA)
        tier.close()


@pytest.mark.parametrize("reply", [b":7\r\n", b"*1\r\n$1\r\na\r\n"], ids=["number", "list"])
def test_manifest_of_another_type_is_a_miss_that_can_be_put_again(
    redis: RedisProcess, no_leaks: None, reply: bytes
) -> None:
    with relay(redis.port) as (url, handler):
        tier = RedisTier(url, 64 << 20, timeout_ms=300, part_bytes=4096)
        assert put(tier, INFO, DATA)
        handler.spoil = staticmethod(sending(reply * 40))
        assert outcome(lambda: get(tier, INFO)) in ("None", "unavailable")
        assert outcome(lambda: tier.find([INFO.key])) in ("[None]", "unavailable")
        handler.spoil = None
        put(tier, INFO, DATA)
        assert_holds(tier, INFO, DATA)
        tier.close()
