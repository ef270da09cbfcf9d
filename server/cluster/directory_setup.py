"""Opening the node directory that a configuration names."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvstore.server.settings.settings import Settings
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.breaker import Breaker

if TYPE_CHECKING:  # its files load redis
    from kvstore.server.cluster.directory import Directory, NodeAddress


def open_directory(
    config: Settings,
    incarnation: int,
    grpc_port: int,
    bulk_address: str,
    counters: Counters,
    clock: Callable[[], float],
) -> Directory | None:
    """Return the directory, not yet started, or None where it is off.

    *bulk_address* is where the bulk channel was bound, empty for none.
    """
    if not config.directory or config.redis_url is None:
        return None
    from kvstore.server.cluster.directory import Directory, DirectoryTerms
    from kvstore.tiers.redis_client import RedisClient

    url = config.redis_access(config.redis_url)
    link = RedisClient("redis", url, config.redis_timeout_ms, config.limits.redis_connections)
    me = _address(config, incarnation, grpc_port, bulk_address)
    breaker = Breaker(
        "node directory", config.limits.breaker_failures, config.limits.breaker_retry_ms, clock
    )
    terms = DirectoryTerms(
        config.redis_prefix, config.limits.directory_ttl_ms, config.limits.directory_chunks
    )
    return Directory(link, me, terms, counters, breaker, clock)


def _address(config: Settings, incarnation: int, grpc_port: int, bulk_address: str) -> NodeAddress:
    from kvstore.server.cluster.directory import NodeAddress

    host = config.advertise or config.listen_address[0]
    host = f"[{host}]" if ":" in host else host
    bulk = ""
    if bulk_address.startswith("tcp:"):
        bulk = f"tcp://{host}:{urlsplit(bulk_address).port}"
    name = config.node_id or f"{socket.gethostname()[:100]}:{grpc_port}"
    return NodeAddress(name, incarnation, bulk, f"{host}:{grpc_port}")
