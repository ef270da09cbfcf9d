"""Fixtures of the tiers' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from helpers.redis_process import RedisProcess

from kvstore.tiers.redis import RedisTier


@pytest.fixture
def redis(redis_process: RedisProcess) -> RedisProcess:
    """The server, empty and with its default settings."""
    redis_process.reset()
    return redis_process


RedisTierMaker = Callable[..., RedisTier]


@pytest.fixture
def open_redis_tier() -> Iterator[RedisTierMaker]:
    """Open tiers of 64 MiB and parts of 4 KiB that are closed in the end."""
    opened: list[RedisTier] = []

    def make(url: str, capacity_bytes: int = 64 << 20, **settings: object) -> RedisTier:
        given = {"timeout_ms": 10_000, "part_bytes": 4096} | settings
        opened.append(RedisTier(url, capacity_bytes, **given))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()
