"""What is known of chunks beyond their bytes: when they were asked for, and what engines said."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import DIGEST_BYTES, ChunkInfo
from kvstore.server.blending.content_index import UNKNOWN_CONTENT, ContentIndex
from kvstore.server.blending.token_priority import TokenPriorities
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.policy import Rows
from kvstore.server.eviction.quotas import MissRatioCurve, PartitionTable
from kvstore.server.eviction.reuse_estimate import ReuseForecast
from kvstore.server.index.groups import GroupTable
from kvstore.server.index.hints import NEVER, HintTable
from kvstore.tiers.base import DEFAULT_TENANT

EVICTED_LIMIT = 1 << 18
"""Chunks without a copy that are remembered at least, if there were so many."""

CONTENT_LIMIT = 1 << 18
"""Contents that blending finds chunks by."""

_SPACES_KEPT = 4096


@dataclass(frozen=True, slots=True)
class PutInfo:
    """Whose chunk it is, what was said when it was put, and what its frame says of its tokens."""

    tenant: str = DEFAULT_TENANT
    hints: Hints = NO_HINTS
    content: bytes = UNKNOWN_CONTENT
    position: int = 0


@dataclass(slots=True, eq=False)
class ChunkMetadata:
    """By row of the ChunkIndex. Not thread-safe: the catalog's lock guards it.

    ``category_ttls_s`` is how long chunks of a category live when no hint says so, ``what_ifs``
    the tiers whose size is wondered about, ``policy_names`` what each tier's policy is called.
    Times are seconds on the caller's clock.
    """

    history: AccessHistory = field(default_factory=AccessHistory)
    hints: HintTable = field(default_factory=HintTable)
    partitions: PartitionTable = field(default_factory=PartitionTable)
    category_ttls_s: Mapping[str, float] = field(default_factory=dict)
    evicted_limit: int = EVICTED_LIMIT
    what_ifs: Mapping[str, MissRatioCurve] = field(default_factory=dict)
    policy_names: Mapping[str, str] = field(default_factory=dict)
    groups: GroupTable = field(default_factory=GroupTable)
    contents: ContentIndex = field(default_factory=lambda: ContentIndex(CONTENT_LIMIT))
    priorities: TokenPriorities = field(default_factory=TokenPriorities)
    forecast: ReuseForecast | None = None
    """Of the same history; None where no tier's admission asks for chances."""
    _full_tokens: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    """By namespace, the most tokens that a chunk of it had: shorter ones end a prompt."""

    def facts(self, row: int, info: ChunkInfo, put_info: PutInfo) -> InsertInfo:
        """A chunk came that no tier had; return what the history is to be told of it."""
        tokens = info.layout.tokens
        full = self._full(info, tokens)
        hints = put_info.hints
        group = self.groups.number(put_info.tenant, hints.category)
        prompt_chunks = -(-hints.prompt_tokens // full)
        flops = info.prefill_flops if 0.0 <= info.prefill_flops < math.inf else 0.0
        self.hints.assign_partition(row, self.partitions.number(put_info.tenant, hints.category))
        return InsertInfo(tokens >= full, flops, group, hints.reuse, prompt_chunks)

    def facts_of_chain(
        self, rows: Sequence[int], chain: Sequence[ChunkInfo], put_info: PutInfo
    ) -> tuple[InsertInfo, list[float]]:
        """Do the same for a *chain* of one layout; return the facts of each and their FLOPs."""
        facts = self.facts(rows[0], chain[0], put_info)
        partition = self.hints.partition(rows[0])
        if partition:  # a new row is in partition 0
            for row in rows:
                self.hints.assign_partition(row, partition)
        flops = [info.prefill_flops for info in chain]
        return replace(facts, flops=0.0), [f if 0.0 <= f < math.inf else 0.0 for f in flops]

    def _full(self, info: ChunkInfo, tokens: int) -> int:
        space = info.key[:DIGEST_BYTES]
        full = max(tokens, self._full_tokens.get(space, 0))
        self._full_tokens[space] = full
        if len(self._full_tokens) > _SPACES_KEPT:
            self._full_tokens.popitem(last=False)
        return full

    def hinted(self, rows: Rows, hints: Hints, now_s: float) -> None:
        """An engine spoke of chunks that are here; pins are not looked at."""
        if hints.reuse:
            self.history.hint(rows, hints.reuse)
        ttl_s = hints.ttl_ms / 1000 or self.category_ttls_s.get(hints.category, 0.0)
        for row in rows.tolist():
            if hints.priority:
                self.hints.set_priority(row, hints.priority)
            if ttl_s:
                self.hints.set_expiry(row, now_s + ttl_s)

    def live_on(self, row: int, now_s: float) -> None:
        """A chunk whose time was up was put again."""
        if self.hints.is_expired(row, now_s):
            self.hints.set_expiry(row, NEVER)
