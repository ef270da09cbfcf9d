"""Puts other servers' memory among the tiers, where the configuration names any."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import urlsplit

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import DIRECTORY
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.breaker import Breaker
from kvstore.tiers.base import Tier

if TYPE_CHECKING:
    from kvstore.server.cluster.directory import Directory, NodeAddress
    from kvstore.server.cluster.peer_tier import PeerTier
    from kvstore.server.store.store import Store


class Me(NamedTuple):
    """This node, as its peers may tell it from others: ``boot_id`` is of its present start."""

    port: int
    boot_id: int


def with_peers(
    tiers: list[Tier], config: Settings, counters: Counters, clock: Callable[[], float]
) -> list[Tier]:
    """Return *tiers*, with the PeerTier before those that all share, if there are to be peers."""
    if not config.peers:
        return tiers
    from kvstore.server.cluster.peer_dial import PeerAccess
    from kvstore.server.cluster.peer_tier import PeerTier
    from kvstore.server.cluster.peers import Peers, PeersTerms

    access = PeerAccess(
        config.peer_key,
        config.peer_ca,
        config.tls_cert,
        config.tls_key,
        config.insecure,
        config.peer_name or "",
    )
    for address in config.peer_addresses:
        access.check(address)
    terms = PeersTerms(
        config.peer_addresses,
        config.limits.peer_timeout_ms,
        config.limits.breaker_failures,
        config.limits.breaker_retry_ms,
    )
    tier = PeerTier(Peers(terms, access.dial, counters, clock), counters, clock)
    first_shared = next((at for at, one in enumerate(tiers) if one.shared), len(tiers))
    return [*tiers[:first_shared], tier, *tiers[first_shared:]]


def ready_peers(
    config: Settings, store: Store, directory: Directory | None, me: Me
) -> Callable[[], None]:
    """Return what begins to reach for peers, who hear of this node as *me*.

    Raises InvalidRequestError when they are to come from a directory that is off.
    """
    if config.asks_directory and directory is None:
        fix = "they are found in the Redis: add --directory and --redis, or name their addresses"
        raise InvalidRequestError("peers", DIRECTORY, fix)
    slot = store.tiers.remote
    if slot is None:
        return lambda: None
    peers = cast("PeerTier", slot.tier).peers
    peers.directory = directory if config.asks_directory else None
    name = config.node_id or f"{socket.gethostname()[:100]}:{me.port}"
    return lambda: peers.start(name, me.boot_id)


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
