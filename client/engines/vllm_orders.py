"""What the scheduler's half of the vLLM connector tells the workers' half, and back."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.proto.types import ChainDigest


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Read *digests*, consecutive chunks of a request, into its blocks.

    ``block_ids``: the blocks of all these chunks, in order. The first ``kept_blocks`` hold
    what the engine found in its own cache, and may be in use: they are not written to.
    """

    request_id: str
    digests: tuple[ChainDigest, ...]
    block_ids: tuple[int, ...]
    kept_blocks: int = 0


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

    ``block_ids``: the blocks of all these chunks, in order.
    """

    request_id: str
    chunks: tuple[NamedChunk, ...]
    block_ids: tuple[int, ...]


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
    why this engine's pages cannot be stored, or nothing.
    """

    short_loads: dict[str, int] = field(default_factory=dict)
    refusal: str = ""

    def joined(self, other: WorkerNews) -> WorkerNews:
        """Return what two ranks say together: a chunk is read when every rank has read it."""
        loads = dict(self.short_loads)
        for request_id, chunks in other.short_loads.items():
            loads[request_id] = min(chunks, loads.get(request_id, chunks))
        return WorkerNews(loads, self.refusal or other.refusal)
