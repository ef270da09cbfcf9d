"""Puts other servers' memory among the tiers, where the configuration names any."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import DIRECTORY
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.breaker import Breaker
from kvstore.tiers.base import Tier

if TYPE_CHECKING:
    from kvstore.server.cluster.directory import Directory
    from kvstore.server.cluster.peer_tier import PeerTier
    from kvstore.server.store.store import Store


def with_peers(
    tiers: list[Tier], config: Settings, counters: Counters, clock: Callable[[], float]
) -> list[Tier]:
    """Return *tiers*, with the PeerTier before those that all share, if there are to be peers."""
    if not config.peers:
        return tiers
    from kvstore.server.cluster.peer_connections import PeerAccess
    from kvstore.server.cluster.peer_tier import PeerTier
    from kvstore.server.cluster.peers import Peers, PeersTerms

    name, addresses, limits = config.peer_name or "", config.peer_addresses, config.limits
    access = PeerAccess(
        config.peer_key, config.peer_ca, config.tls_cert, config.tls_key, config.insecure, name
    )
    for address in addresses:
        access.check(address)
    terms = PeersTerms(
        addresses, limits.peer_timeout_ms, limits.breaker_failures, limits.breaker_retry_ms
    )
    tier = PeerTier(Peers(terms, access.dial, counters, clock), counters, clock)
    first_shared = next((at for at, one in enumerate(tiers) if one.shared), len(tiers))
    return [*tiers[:first_shared], tier, *tiers[first_shared:]]


def ready_peers(
    config: Settings, store: Store, directory: Directory | None, grpc_port: int, boot_id: int
) -> Callable[[], None]:
    """Return what begins to dial peers; *boot_id* tells this node from them.

    Raises InvalidRequestError when they are to come from a directory that is off.
    """
    if config.asks_directory and directory is None:
        fix = "they are found in the Redis: add --directory and --redis, or name their addresses"
        raise InvalidRequestError("peers", DIRECTORY, fix)
    slot = store.tiers.remote
    if slot is None:
        return lambda: None
    peers = cast("PeerTier", slot.tier).peers
    peers.holders = directory.holders if directory and config.asks_directory else None
    return lambda: peers.start(_node_id(config, grpc_port), boot_id)


def _node_id(config: Settings, grpc_port: int) -> str:
    return config.node_id or f"{socket.gethostname()[:100]}:{grpc_port}"


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
    from kvstore.server.cluster.membership import NodeAddress
    from kvstore.tiers.redis_client import RedisClient

    limits = config.limits
    host = config.advertise or config.listen_address[0]
    host = f"[{host}]" if ":" in host else host
    bulk = f"tcp://{host}:{urlsplit(bulk_address).port}" if bulk_address.startswith("tcp:") else ""
    me = NodeAddress(_node_id(config, grpc_port), incarnation, bulk, f"{host}:{grpc_port}")
    url = config.redis_access(config.redis_url)
    link = RedisClient("redis", url, config.redis_timeout_ms, limits.redis_connections)
    breaker = Breaker("node directory", limits.breaker_failures, limits.breaker_retry_ms, clock)
    terms = DirectoryTerms(config.redis_prefix, limits.directory_ttl_ms, limits.directory_chunks)
    return Directory(link, me, terms, counters, breaker, clock)
