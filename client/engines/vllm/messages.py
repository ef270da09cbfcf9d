"""What the scheduler's half of the vLLM connector and the workers' half send each other."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvstore.client.planning import PlanTerms
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import ChainDigest

INCOMPATIBLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What objects of another release, or of a user, raise that are not what they are taken for."""

BlockTables: TypeAlias = Sequence[Sequence[int]]
"""The blocks of a request in each of vLLM's KV cache groups, from its first token on."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Read *digests*, consecutive chunks of a request, into its blocks.

    ``tables``: in each block table of the request, the blocks of all these chunks, in order; 0
    where it has none. The first ``kept_blocks`` hold what the engine found in its own cache, and
    may be in use: they are not written to. ``all_or_nothing``: some of the chunks are of no use.
    ``terms``: of a request with a deadline, counted from here on.
    """

    request_id: str
    digests: tuple[ChainDigest, ...]
    tables: tuple[tuple[int, ...], ...]
    kept_blocks: int = 0
    all_or_nothing: bool = False
    terms: PlanTerms | None = None

    def blocks_from(self, first: int) -> tuple[int, ...]:
        """Return the blocks from number *first* on that are not kept; of one table only."""
        return self.tables[0][max(first, self.kept_blocks) :]


@dataclass(frozen=True, slots=True)
class ChunkName:
    """A chunk as its put names it; ``position`` is its first token's."""

    digest: ChainDigest
    parent: ChainDigest
    content: bytes
    position: int


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """Store consecutive chunks of a request, which are whole once this step is over.

    ``tables``: as those of a LoadSpec. ``hints``: of all of them.
    """

    request_id: str
    chunks: tuple[ChunkName, ...]
    tables: tuple[tuple[int, ...], ...]
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the workers have to do in one step. An idle step computes nothing.

    ``taken_blocks``: those that the engine gave out for this step. What lay in them is written
    over from its beginning on, by what it computes and by its loads. None: any may be.
    """

    loads: tuple[LoadSpec, ...] = ()
    stores: tuple[SaveSpec, ...] = ()
    is_idle: bool = False
    taken_blocks: frozenset[int] | None = None


@dataclass(slots=True)
class WorkerReport:
    """What the scheduler has to learn from workers."""

    short_loads: dict[str, int] = field(default_factory=dict)
    """Requests of which not every chunk was read, and how many were."""
    lossy_loads: dict[str, int] = field(default_factory=dict)
    """Those of which a chunk came from a lossy copy: the first such chunk's number in the load."""
    gated_loads: set[str] = field(default_factory=set)
    """Those of ``short_loads`` of which a chunk has lossy copies only that may not be used."""
    stored: Counter[ChainDigest] = field(default_factory=Counter)
    """Chunks in the store now, and by how many ranks, where there are KV events."""
    unstored: OrderedDict[ChainDigest, None] = field(default_factory=OrderedDict)
    """Chunks that were to be stored and will not come, the oldest first."""
    refusal: str = ""
    """Why this engine's pages cannot be stored, if they cannot."""
    is_down: bool = False
    """Whether a load failed as the server did not answer."""
    is_waiting: bool = False
    """Whether chunks wait in their pages for the next step, which may be an idle one."""

    def joined(self, other: WorkerReport) -> WorkerReport:
        """Return what two ranks report together: a chunk is read when every rank has read it, and
        lossy when any has read it so."""
        return WorkerReport(
            _lower(self.short_loads, other.short_loads),
            _lower(self.lossy_loads, other.lossy_loads),
            self.gated_loads | other.gated_loads,
            self.stored + other.stored,
            self.unstored | other.unstored,
            self.refusal or other.refusal,
            self.is_down or other.is_down,
            self.is_waiting or other.is_waiting,
        )


def _lower(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return the lower number of each request that either has one of."""
    return {**one, **{id_: min(count, one.get(id_, count)) for id_, count in other.items()}}


class FollowedTables:
    """The block tables of running requests, of what each step gives out.

    For releases of vLLM whose steps have none; where layers keep windows they are others.
    """

    def __init__(self) -> None:
        self._tables: dict[str, list[list[int]]] = {}

    def of(self, request_id: str) -> BlockTables:
        """Return those of a request; empty ones of one that has none."""
        return self._tables.get(request_id, ())

    def follow(self, output: Any) -> None:
        """Take in the step of vLLM's SchedulerOutput *output*."""
        for request_id in output.finished_req_ids:
            self._tables.pop(request_id, None)
        for one in output.scheduled_new_reqs:
            self._tables[one.req_id] = [list(table) for table in one.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = [list(table) for table in new or ()]
            elif new is not None and request_id in self._tables:
                for table, blocks in zip(self._tables[request_id], new, strict=True):
                    table += blocks


def taken_blocks(
    output: Any, loads: Sequence[LoadSpec], block_tokens: int
) -> frozenset[int] | None:
    """Return the blocks that vLLM gave out for the step of its SchedulerOutput *output*.

    None where another release does not say. Blocks that a new request found in vLLM's own cache
    keep what they have. Others that a request shares are among those returned, which costs a copy
    that could have waited, and nothing else.
    """
    tables: list[BlockTables] = [spec.tables for spec in loads]
    try:
        tables += [
            [table[one.num_computed_tokens // block_tokens :] for table in one.block_ids]
            for one in output.scheduled_new_reqs
        ]
        tables += [one for one in output.scheduled_cached_reqs.new_block_ids if one is not None]
        others = list(output.new_block_ids_to_zero or ())
        others += [one.dst_block_id for one in output.kv_cache_block_copies or ()]
    except AttributeError:
        return None
    return frozenset(others).union(*(ids for request in tables for ids in request))
