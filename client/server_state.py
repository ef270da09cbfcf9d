"""What a server reports about itself and its chunks. Sizes are in bytes, times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import GateView
from kvstore.proto.errors import KVStoreError
from kvstore.proto.messages import as_value
from kvstore.proto.types import Accuracy, Component


@dataclass(frozen=True, slots=True)
class CopyStat:
    """A copy of a chunk on a tier, as its codec wrote it.

    With ``ranks`` only: the tier evicts ``before`` others first by its ``policy``, or more with
    ``at_least``, as the chunk was not among those that were ranked.
    """

    tier: str
    codec: str
    size_bytes: int
    accuracy: Accuracy
    before: int
    at_least: bool
    policy: str


@dataclass(frozen=True, slots=True)
class ChunkStat:
    """A chunk of the client's namespace.

    ``parent`` is the digest of the chunk before it, zeros for a prompt's first. ``idle_s`` is the
    time since it was last read or put, None if unknown; ``pinned_s`` how much longer it is pinned;
    ``expires_s`` its remaining time to live, None without one. ``context_tokens`` are those
    of the stored chunks before it; ``raw_bytes`` its size without a codec.
    """

    digest: bytes
    parent: bytes
    tokens: int
    raw_bytes: int
    copies: tuple[CopyStat, ...]
    leases: int
    pinned: bool
    hits: int
    idle_s: float | None
    pinned_s: float
    expires_s: float | None
    priority: int
    context_tokens: int
    components: tuple[Component, ...]


@dataclass(frozen=True, slots=True)
class SizeRatio:
    """The hit ratio, 0 to 1, that a tier ``scale`` times as large would have."""

    scale: float
    hit_ratio: float


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """What a tenant or category with a quota uses of a tier; a limit of 0 is none."""

    name: str
    used_bytes: int
    quota_bytes: int
    guaranteed_bytes: int


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A tier: ``state`` is serving or degraded, for the ``reason``."""

    name: str
    capacity_bytes: int
    used_bytes: int
    chunks: int
    codec: str
    state: str
    reason: str
    policy: str
    what_if: tuple[SizeRatio, ...]
    partitions: tuple[PartitionStatus, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """Another node of the directory."""

    node_id: str
    incarnation: int
    grpc_address: str
    bulk_address: str


@dataclass(frozen=True, slots=True)
class DirectoryStatus:
    """How a server stands in the node directory, and the ``nodes`` it sees there.

    ``standing`` is known, unknown, taken or full; ``failure`` why Redis cannot be used for it.
    ``announced`` counts the chunks that it names, ``waiting`` the entries still to be written.
    """

    node_id: str
    incarnation: int
    standing: str
    failure: str
    announced: int
    waiting: int
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """A server: ``state`` is serving or draining, ``boot_id`` changes when it starts again.

    Sizes, ``sessions``, ``leases`` and ``counters`` are 0 and empty for callers without the role
    admin. ``ghosts`` are the evicted chunks that policies remember; ``directory`` is None where the
    server is in none.
    """

    boot_id: int
    version: str
    state: str
    uptime_s: float
    tiers: tuple[TierStatus, ...]
    sessions: int
    leases: int
    counters: Mapping[str, int]
    socket_path: str
    ghosts: int
    gates: tuple[GateView, ...]
    directory: DirectoryStatus | None


def stat_from_message(message: pb.ChunkStat) -> ChunkStat:
    """Return a chunk's state. Raises KVStoreError for one that no server sends."""
    idle_s = None if message.idle_s < 0 else message.idle_s
    try:
        return as_value(ChunkStat, message, idle_s=idle_s, expires_s=message.expires_s or None)
    except ValueError as error:
        raise KVStoreError(f"the server's reply cannot be read: {error}") from None


def status_from_message(message: pb.StatusResponse) -> ServerStatus:
    """Return a server's state."""
    has_directory = message.HasField("directory")
    return as_value(
        ServerStatus,
        message,
        boot_id=message.server.boot_id,
        counters=dict(message.counters),
        directory=as_value(DirectoryStatus, message.directory) if has_directory else None,
    )
