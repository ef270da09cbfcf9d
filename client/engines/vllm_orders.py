"""What the scheduler's half of the vLLM connector tells the workers' half, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvstore.proto.hints import NO_HINTS, Hints
from kvstore.proto.types import ChainDigest

BlockTables: TypeAlias = Sequence[Sequence[int]]
"""The blocks of a request in each of vLLM's KV cache groups, from its first token on."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Read *digests*, consecutive chunks of a request, into its blocks.

    ``tables``: in each block table of the request, the blocks of all these chunks, in order; 0
    where it has none. The first ``kept_blocks`` hold what the engine found in its own cache, and
    may be in use: they are not written to. ``all_or_nothing``: some of the chunks are of no use.
    """

    request_id: str
    digests: tuple[ChainDigest, ...]
    tables: tuple[tuple[int, ...], ...]
    kept_blocks: int = 0
    all_or_nothing: bool = False

    def blocks_from(self, first: int) -> tuple[int, ...]:
        """Return the blocks from number *first* on that are not kept; of one table only."""
        return self.tables[0][max(first, self.kept_blocks) :]


@dataclass(frozen=True, slots=True)
class NamedChunk:
    """A chunk as its put names it; ``position`` is its first token's."""

    digest: ChainDigest
    parent: ChainDigest
    content: bytes
    position: int


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Store consecutive chunks of a request, which are whole once this step is over.

    ``tables``: as those of a LoadOrder. ``hints``: of all of them.
    """

    request_id: str
    chunks: tuple[NamedChunk, ...]
    tables: tuple[tuple[int, ...], ...]
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class StepOrders:
    """What the workers have to do in one step. An idle step computes nothing."""

    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class WorkerNews:
    """What the scheduler has to learn from workers.

    ``short_loads``: requests of which not every chunk was read, and how many were. ``refusal``:
    why this engine's pages cannot be stored, or nothing. ``stored``: chunks that are in the store
    now, and by how many ranks, where somebody wants to be told.
    """

    short_loads: dict[str, int] = field(default_factory=dict)
    refusal: str = ""
    stored: Mapping[ChainDigest, int] = field(default_factory=dict)

    def joined(self, other: WorkerNews) -> WorkerNews:
        """Return what two ranks say together: a chunk is read when every rank has read it."""
        loads = dict(self.short_loads)
        for request_id, chunks in other.short_loads.items():
            loads[request_id] = min(chunks, loads.get(request_id, chunks))
        stored = Counter(self.stored) + Counter(other.stored)
        return WorkerNews(loads, self.refusal or other.refusal, stored)
