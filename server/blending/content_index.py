"""Chunks by content, independent of their prefix, and what engines reported of them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from kvstore.proto.errors import InvalidFrameError, KVStoreError
from kvstore.proto.frame import header_bytes, parse_header, stated_header_bytes
from kvstore.proto.plans import NO_PRIORITY
from kvstore.proto.types import (
    DIGEST_BYTES,
    KEY_BYTES,
    ROOT,
    Accuracy,
    ChainDigest,
    ChunkInfo,
    ChunkKey,
    Namespace,
)
from kvstore.server.blending.scores import (
    UNKNOWN_IMPACT,
    Context,
    Scores,
    TokenPriorities,
    context_impact,
    fix_overhead,
)
from kvstore.server.index.access_log import CatalogState, Lookup
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.hints import UNKNOWN_CONTENT, PutInfo
from kvstore.server.index.holds import Lease, LeaseTerms
from kvstore.server.tiering.admission import remember
from kvstore.server.tiering.tier_slot import TierSlot

MAX_VARIANTS = 5
"""Limit of variants per content: Cache-Craft's M (section 5)."""

MAX_CONTEXT = 16
"""Nearest chunks before a variant that count as its context."""

MAX_STATISTICS = 1 << 16
"""Limit of variants with statistics, the last reported or first used."""

MAX_LEARNED = 4096
"""Limit of variants whose statistics survive a restart, the last reported."""

MAX_UNREAD = 4096
"""Limit of chunks whose frames wait to be read; beyond it the oldest are found by key only."""

CHUNKS_AT_ONCE = 8
"""Chunks per acquisition of the catalog's lock."""

STEP_S = 0.05
"""Time limit of a step that reads headers."""

GAVE_WAY_PRIORITY = NO_PRIORITY // 2
"""Priority of a variant displaced by better ones, below any that engines set."""

_MEMORY = "cpu"
_EWMA_WEIGHT = 0.25
_UNMEASURED = -1.0


class Named(NamedTuple):
    """A chunk as its frame describes it: its parent, content and position."""

    key: ChunkKey
    parent: ChainDigest
    content: bytes
    tokens: int
    position: int


class VariantInfo(NamedTuple):
    """The facts of one variant. ``deviation`` is -1 and ``reports`` 0 before any report.

    ``is_measured``: engines reported its attention; else *context* is by tokens.
    """

    key: ChunkKey
    parent: ChainDigest
    tokens: int
    position: int
    impact: float
    deviation: float
    reports: int
    context: Sequence[Context]
    is_measured: bool = False


class Measured(NamedTuple):
    """An engine's report on a variant: its mean deviation, -1 for none, and attention."""

    deviation: float
    context: Sequence[Context]
    intra_mass: float


class Learned(NamedTuple):
    """Statistics of one variant from reports and uses; they survive a restart."""

    key: Annotated[ChunkKey, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    impact: Annotated[float, Field(ge=0, le=1)] = UNKNOWN_IMPACT
    deviation: Annotated[float, Field(ge=_UNMEASURED)] = _UNMEASURED
    overlap: Annotated[float, Field(ge=0, le=1)] = 0.0
    uses: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    reports: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    context: Annotated[tuple[Context, ...], Field(max_length=MAX_CONTEXT)] = ()


class PromptChunk(NamedTuple):
    """A chunk of a prompt. *key* is empty if its prefix is not known."""

    key: ChunkKey
    content: bytes
    tokens: int


class Candidate(NamedTuple):
    """A chunk that can be read: *source* is the index of its tier in the request."""

    facts: VariantInfo
    source: int
    size_bytes: int
    accuracy: Accuracy


class Matches(NamedTuple):
    """The matches of one chunk: itself, or others with its content, and its priorities."""

    is_exact: bool
    candidates: list[Candidate]
    priority: bytes


class ContentIndex:
    """Variants by namespace and content digest. A listener of the catalog with this *state*.

    Thread-safe, except ``note`` to ``removed``, which need the catalog's lock.

    A variant is a chunk with a copy whose frame names its content. Beyond MAX_VARIANTS of one
    content the variant that has saved least is dropped: uses times the share not recomputed
    (Cache-Craft, section 5), but never the one that depends least on its prefix. A variant that
    began its prompt is that one only if there is no other: its first token is an attention sink.
    Contents beyond *limit*, of half a KiB a variant, are ignored; 0: all are. Dropped variants stay
    on their tiers as prefixes.
    """

    def __init__(self, state: CatalogState, limit: int) -> None:
        self._state = state
        self._limit = limit
        self.left_out = 0
        """Chunks ignored because of *limit*."""
        # Plain tuples of bytes and numbers, which the garbage collector does not track.
        self._variants: dict[ChunkKey, tuple[ChainDigest, bytes, int, int]] = {}
        """Parent, content, tokens and position of each."""
        self._contents: dict[bytes, tuple[ChunkKey, ...]] = {}
        """Variants by namespace and content, the latest first."""
        self._learned: OrderedDict[ChunkKey, Learned] = OrderedDict()
        """Statistics of variants, and of those of the last run, which may return."""
        self._priorities = TokenPriorities()
        self.unread: deque[ChunkKey] = deque(maxlen=MAX_UNREAD)
        """Chunks loaded into memory that other servers put: their frames contain their content."""

    def note(self, chunk: Named) -> ChunkKey | None:
        """Add a chunk; return the variant that it displaced, if any."""
        if chunk.content == UNKNOWN_CONTENT or chunk.key in self._variants:
            return None
        name = chunk.key[:DIGEST_BYTES] + chunk.content
        others = self._contents.get(name, ())
        if not others and len(self._contents) >= self._limit:
            self.left_out += 1
            return None
        self._variants[chunk.key] = chunk[1:]
        keys = self._contents[name] = (chunk.key, *others)
        if len(keys) <= MAX_VARIANTS:
            return None

        def rank(key: ChunkKey) -> tuple[bool, float, int]:
            parent, _, _, position = self._variants[key]
            return parent == ROOT, self._known(key).impact, position

        def saved(key: ChunkKey) -> float:
            known = self._known(key)
            return known.uses * (1.0 - fix_overhead(known.impact, known.overlap))

        best = min(keys, key=rank)
        gone = min((key for key in reversed(keys) if key != best), key=saved)
        self.forget(gone)
        return gone

    def forget(self, key: ChunkKey) -> bool:
        """Remove a chunk without copies. Return whether it was a variant."""
        row = self._variants.pop(key, None)
        if row is None:
            return False
        name = key[:DIGEST_BYTES] + row[1]
        left = tuple(one for one in self._contents.pop(name) if one != key)
        if left:
            self._contents[name] = left
        self._learned.pop(key, None)
        return True

    def variants(self, space: Namespace, content: bytes) -> list[VariantInfo]:
        """Return the variants of *content*, the latest first."""
        return [self._facts(key) for key in self._contents.get(space + content, ())]

    def facts(self, key: ChunkKey) -> VariantInfo | None:
        """Return the facts of a variant; None for other chunks."""
        return self._facts(key) if key in self._variants else None

    def _facts(self, key: ChunkKey) -> VariantInfo:
        parent, _, tokens, position = self._variants[key]
        known = self._known(key)
        return VariantInfo(
            key, parent, tokens, position, known.impact, known.deviation, known.reports,
            known.context or self._before(key), bool(known.context),
        )  # fmt: skip

    def _known(self, key: ChunkKey) -> Learned:
        return self._learned.get(key) or Learned(key)

    def _before(self, key: ChunkKey) -> list[Context]:
        """Return the context by tokens, farthest first; absent chunks as one unknown content."""
        found: list[Context] = []
        parent, _, _, left = self._variants[key]
        while parent != ROOT and left > 0 and len(found) < MAX_CONTEXT:
            row = self._variants.get(ChunkKey(key[:DIGEST_BYTES] + parent))
            if row is None:
                break
            parent, content, tokens, _ = row
            found.append(Context(content, tokens, float(tokens)))
            left -= tokens
        if left > 0:
            found.append(Context(UNKNOWN_CONTENT, left, float(left)))
        return found[::-1]

    def report(self, key: ChunkKey, measured: Measured) -> bytes | None:
        """Record an engine's report on a variant. Return its content; None when it is gone."""
        if key not in self._variants:
            return None
        _, content, tokens, _ = self._variants[key]
        known, deviation = self._known(key), measured.deviation
        if deviation < 0:
            deviation = known.deviation
        elif known.deviation >= 0:
            deviation = known.deviation + _EWMA_WEIGHT * (deviation - known.deviation)
        known = known._replace(deviation=deviation, reports=known.reports + 1)
        if context := tuple(measured.context):
            impact = context_impact(context, measured.intra_mass, tokens)
            known = known._replace(context=context, impact=impact)
        remember(self._learned, key, known, MAX_STATISTICS)
        return content

    def stored(self, tier: str, infos: Sequence[ChunkInfo], put_info: PutInfo | None) -> None:
        """Index a chunk by its content, or queue its frame in memory to be read."""
        if put_info is None:
            if tier == _MEMORY:
                self.unread += [info.key for info in infos if info.key not in self._variants]
        elif put_info.content != UNKNOWN_CONTENT:
            (info,) = infos
            tokens = info.layout.tokens
            self._take_in(Named(info.key, info.parent, put_info.content, tokens, put_info.position))

    def removed(self, tier: str, key: ChunkKey, *, is_last: bool) -> None:
        """Forget a chunk without copies."""
        if is_last:
            self.forget(key)

    def _take_in(self, chunk: Named) -> None:
        # A displaced variant is evicted before its neighbours, unless an engine ranked it.
        key = self.note(chunk)
        row = self._state.index.row(key) if key is not None else 0
        if row and self._state.metadata.hints.priority(row) == NO_PRIORITY:
            self._state.metadata.hints.set_priority(row, GAVE_WAY_PRIORITY)

    def matches(
        self,
        space: Namespace,
        chunks: Sequence[PromptChunk],
        least: Accuracy,
        tiers: Sequence[str | None],
        *,
        approximate: bool,
    ) -> list[Matches]:
        """Return the matches of each chunk on *tiers*, the best first, at *least* this accurate.

        None: a tier that is not read. Without *approximate* only exact matches are searched.
        """
        index, hints = self._state.index, self._state.metadata.hints

        def candidate(key: ChunkKey, facts: VariantInfo | None = None) -> Candidate | None:
            """Return the chunk on the first of *tiers* that has it, or None."""
            row = index.row(key) if key else 0
            if not row or hints.is_expired(row, now_s):
                return None
            holders = index.holders(row, least)
            source = next((at for at, tier in enumerate(tiers) if tier in holders), None)
            if source is None:
                return None
            info = index.info(str(tiers[source]), row)
            facts = facts or self.facts(key)
            if facts is None:  # its frame is not read yet
                facts = VariantInfo(key, info.parent, index.tokens(row), 0, 0.0, -1.0, 0, ())
            return Candidate(facts, source, info.size_bytes, info.accuracy)

        found = []
        for start in range(0, len(chunks), CHUNKS_AT_ONCE):
            with self._state.lock:
                now_s = self._state.clock()
                for chunk in chunks[start : start + CHUNKS_AT_ONCE]:
                    exact = candidate(chunk.key)
                    if exact is not None and exact.facts.tokens == chunk.tokens:
                        found.append(Matches(True, [exact], b""))
                        continue
                    variants = self.variants(space, chunk.content) if approximate else []
                    placed = (candidate(v.key, v) for v in variants if v.tokens == chunk.tokens)
                    others = [one for one in placed if one is not None]
                    priority = self._priorities.levels(space + chunk.content) if others else b""
                    found.append(Matches(False, others, priority))
        return found

    def lease_any(self, keys: Iterable[ChunkKey], terms: LeaseTerms) -> Lease | None:
        """Lease the existing ones of *keys*; None if there is none. Raises QuotaExceededError."""
        with self._state.lock:
            known = list(dict.fromkeys(key for key in keys if self._state.index.row(key)))
            until = self._state.clock() + terms.ttl_s
            return self._state.holds.leases.grant(terms.session_id, known, until) if known else None

    def chose(self, chosen: Sequence[tuple[ChunkKey, float]]) -> None:
        """Record variants that were returned, each with the share of its context in the prompt."""
        with self._state.lock:
            for key, overlap in chosen:
                if key in self._variants:
                    known = self._known(key)
                    mean = known.overlap + _EWMA_WEIGHT * (overlap - known.overlap)
                    self._learned[key] = known._replace(uses=known.uses + 1.0, overlap=mean)
                    if len(self._learned) > MAX_STATISTICS:
                        self._learned.popitem(last=False)
            keys = [key for key, _ in chosen]
            rows = [row for key in keys if (row := self._state.index.row(key))]
            # Only for the policies: the history counts prompts.
            event = Lookup(np.array(rows, np.intp), keys, self._state.clock(), is_again=True)
            self._state.access_log.note(event)
        self._state.news.set()

    def variant_tokens(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Return the tokens of each of *keys*; 0 if it is not a variant."""
        with self._state.lock:
            return [self._variants[key][2] if key in self._variants else 0 for key in keys]

    def reported(self, reports: Sequence[tuple[ChunkKey, Measured, Scores | None]]) -> None:
        """Record reports on existing variants: scores are (tokens), -1 if not measured."""
        with self._state.lock:
            for key, measured, scores in reports:
                content = self.report(key, measured)
                if content is not None and scores is not None:
                    self._priorities.note(key[:DIGEST_BYTES] + content, scores)

    def learned(self) -> list[Learned]:
        """Return the statistics of reported variants, the latest last."""
        with self._state.lock:
            reported = (one for one in reversed(self._learned.values()) if one.reports)
            return list(islice(reported, MAX_LEARNED))[::-1]

    def recall(self, rows: Sequence[Learned]) -> None:
        """Restore the statistics of an earlier run."""
        with self._state.lock:
            for one in rows[-MAX_LEARNED:]:
                remember(self._learned, one.key, one, MAX_STATISTICS)

    def name(self, chunk: Named) -> None:
        """Index a chunk by its frame; one without copies is ignored."""
        with self._state.lock:
            if self._state.index.row(chunk.key):
                self._take_in(chunk)

    def unnamed(self, tier: str, limit: int) -> list[ChunkKey]:
        """Return chunks on *tier* of unknown content, at most *limit*."""
        with self._state.lock:
            index = self._state.index
            return [
                key
                for row in index.known_rows()
                if tier in index.holders(row) and (key := index.key(row)) not in self._variants
            ][-limit:]

    def counts(self) -> tuple[int, int, int, int]:
        """Return the numbers of contents, variants and ignored chunks, and bytes of priorities."""
        with self._state.lock:
            contents, size = len(self._contents), self._priorities.size_bytes
            return contents, len(self._variants), self.left_out, size


@dataclass(eq=False)
class ContentReader:
    """Reads headers of chunks of unknown content: those of other nodes loaded into memory, then at
    most *limit* that survived a restart on the last of *slots*, latest first.

    Each is read from the first of *slots* that has it. For one thread; *clock* returns seconds.
    """

    catalog: Catalog
    contents: ContentIndex
    slots: Sequence[TierSlot]
    limit: int
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        limit = self.limit
        self._left = self.contents.unnamed(self.slots[-1].name, limit) if limit else []

    def step(self) -> bool:
        """Read some headers; return False once none is left."""
        until = self.clock() + STEP_S
        while self.clock() < until:
            waiting = self.contents.unread or self._left
            if not waiting:
                return False
            self._read(waiting.pop())  # other threads only append
        return True

    def _read(self, key: ChunkKey) -> None:
        copies = self.catalog.hold(key)
        try:
            slot = next((one for one in self.slots if one.name in copies), None)
            if slot is not None and (named := self._named(slot, copies[slot.name])) is not None:
                self.contents.name(named)
        except KVStoreError:
            pass  # it can still be found by key, and its reader gets the error
        finally:
            self.catalog.release_hold(key)

    def _named(self, slot: TierSlot, info: ChunkInfo) -> Named | None:
        head = np.empty(min(header_bytes(info.layout), info.size_bytes), np.uint8)
        if not slot.guarded(lambda: slot.tier.read(info.key, head)):
            return None
        if len(head) < (longer := stated_header_bytes(head)) <= info.size_bytes:
            head = np.empty(longer, np.uint8)
            if not slot.guarded(lambda: slot.tier.read(info.key, head)):
                return None
        found = parse_header(head)
        if found.key != info.key:
            raise InvalidFrameError("key", found.key.hex(), "the frame is another chunk's")
        return Named(found.key, found.parent, found.content, found.layout.tokens, found.position)
