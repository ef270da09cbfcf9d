"""What the catalog answers with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.types import ChunkInfo, ChunkKey


@dataclass(frozen=True, slots=True)
class ChunkDetails:
    """One chunk as the catalog knows it: its copies by tier name."""

    key: ChunkKey
    copies: Mapping[str, ChunkInfo]
    leases: int
    is_pinned: bool
    hits: int
    idle_s: float = -1.0
    """Since it was last asked for, or put; -1 for unknown."""
    pinned_s: float = 0.0
    """For how much longer it is pinned."""
    expires_s: float = 0.0
    """Until its time to live is up; 0: it has none."""
    priority: int = 0
    context_tokens: int = 0


class EvictionRank(NamedTuple):
    """How many others go before a chunk; at least so many where no more were looked at."""

    before: int
    is_at_least: bool = False


class UsedPrefix(NamedTuple):
    """A prefix by its last chunk: how often lookups found it, and how many tokens it has."""

    key: ChunkKey
    hits: int
    tokens: int
    tiers: tuple[str, ...]


class Leasing(IntEnum):
    """Whether a lookup leases what is ready, and if so, for which kind of get."""

    no = 0
    whole = 1
    """Of whole frames: those on lower tiers are loaded ahead."""
    ranged = 2
    """Of ranges of stored frames: nothing is loaded that nobody asked for."""

    @classmethod
    def of(cls, request: pb.LookupRequest) -> Leasing:
        """Return what *request* asks for."""
        if not request.lease:
            return cls.no
        return cls.ranged if request.ranges else cls.whole


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The chunks of the longest prefix that can be read.

    ``sources[i]`` is the place of chunk i's tier among those asked for and ``sizes[i]`` its
    bytes there. ``known`` counts the chunks that any tier has, ``pending`` those behind them
    that are being written. ``lease_id`` is 0 when nothing was leased.
    """

    known: int
    pending: int
    sources: NDArray[np.uint8]
    sizes: NDArray[np.int64]
    lease_id: int = 0
    evicted: int = 0
    """Chunks of the prompt that had been evicted, from its first on."""
    shared: int = 0
    """Chunks that are here or had been, where a prefix cannot end everywhere; else 0."""

    @property
    def first_missing(self) -> int:
        """The place in the chain of the first chunk that is neither known nor being written."""
        return self.known + self.pending


class LeaseTerms(NamedTuple):
    """For whom, and for how long from now."""

    session_id: int
    ttl_s: float
