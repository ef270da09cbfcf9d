"""Chunks by their content, whatever is before it, and what engines reported of them."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.proto.key_table import NO_ROW, KeyTable, spare_rows
from kvstore.proto.plans import NO_PRIORITY
from kvstore.proto.types import (
    DIGEST_BYTES,
    ROOT,
    ChainDigest,
    ChunkInfo,
    ChunkKey,
    Fidelity,
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
from kvstore.server.index.hints import UNKNOWN_CONTENT, PutInfo
from kvstore.server.index.holds import Lease, LeaseTerms

MAX_VARIANTS = 5
"""Of one content: Cache-Craft's M (section 5)."""

MAX_CONTEXT = 16
"""Chunks before a variant that are looked at, the nearest."""

MAX_MASSES = 1 << 16
"""Variants whose reported attention is remembered, those reported on last."""

MAX_LEARNED = 4096
"""Variants whose statistics are kept over a restart, those reported on last."""

CONTENT_LIMIT = 1 << 18
"""Contents that blending finds chunks by."""

MAX_UNREAD = 4096
"""Chunks whose frames are to be looked at; of more, the oldest are found by key only."""

GAVE_WAY_PRIORITY = NO_PRIORITY // 2
"""Of a variant that gave way to better ones; what engines rank comes before it."""

_MEMORY = "cpu"
_EWMA_WEIGHT = 0.25
_UNMEASURED = -1.0


class Named(NamedTuple):
    """A chunk as its frame names it: what was before it, its content and its place."""

    key: ChunkKey
    parent: ChainDigest
    content: bytes
    tokens: int
    position: int


class VariantInfo(NamedTuple):
    """What is known of one variant. ``deviation`` is -1 and ``reports`` 0 before any report.

    ``is_measured``: engines said what attention it paid; else *context* is by tokens.
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
    """What an engine reported of a variant: its mean deviation, -1 for none, and attention."""

    deviation: float
    context: Sequence[Context]
    intra_mass: float


class Learned(NamedTuple):
    """What is known of one variant from reports and uses: it is kept over a restart."""

    key: ChunkKey
    impact: float
    deviation: float
    overlap: float
    uses: float
    reports: int
    context: tuple[Context, ...]


class ContentIndex:
    """Variants by namespace and content digest. Not thread-safe: the catalog's lock guards it.

    A variant is a chunk with a copy whose frame names its content; about 150 bytes each. Of more
    than MAX_VARIANTS of one content that goes which has saved least, uses times the share that was
    not to be recomputed (Cache-Craft, section 5), but never the one that depends least on what was
    before it. One that began its prompt is that only where there is no other: its first token is
    an attention sink. Contents beyond *limit* are not taken in; 0: none are. What goes from here
    stays on its tiers, where it is a prefix.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.left_out = 0
        """Chunks that came when *limit* was reached."""
        self._contents = KeyTable()
        self._heads = array("I", [NO_ROW])
        """By row of a content, that of its latest variant."""
        self._variants = KeyTable()
        self._content_rows, self._next = array("I", [0]), array("I", [0])
        self._positions, self._born = array("I", [0]), array("I", [0])
        self._tokens, self._reports = array("I", [0]), array("I", [0])
        self._uses, self._overlaps = array("f", [0]), array("f", [0])
        self._impacts, self._deviations = array("f", [0]), array("f", [0])
        self._columns = (
            self._content_rows, self._next, self._positions, self._born, self._tokens, self._uses,
            self._overlaps, self._impacts, self._deviations, self._reports,
        )  # fmt: skip
        self._parents = bytearray(DIGEST_BYTES)
        self._masses: OrderedDict[int, tuple[Context, ...]] = OrderedDict()
        self._reported: OrderedDict[int, None] = OrderedDict()
        """The MAX_LEARNED rows that were reported on last."""
        self._recalled: dict[ChunkKey, Learned] = {}
        """Learned before the last start, of variants that were not read since."""
        self._clock = 0

    def note(self, chunk: Named) -> ChunkKey | None:
        """A chunk came; return the variant that gave way to it, if one did."""
        if chunk.content == UNKNOWN_CONTENT or self._variants.find(chunk.key):
            return None
        name = ChunkKey(chunk.key[:DIGEST_BYTES] + chunk.content)
        if not self._contents.find(name) and len(self._contents) >= self._limit:
            self.left_out += 1
            return None
        content = self._contents.add(name)
        if content == len(self._heads):
            self._heads.frombytes(bytes(4 * spare_rows(content)))
        row = self._variants.add(chunk.key)
        if row == len(self._next):
            count = spare_rows(row)
            self._parents += bytes(count * DIGEST_BYTES)
            for column in self._columns:
                column.frombytes(bytes(4 * count))
        self._clock += 1
        self._content_rows[row], self._next[row] = content, self._heads[content]
        self._heads[content] = row
        self._positions[row], self._born[row] = chunk.position, self._clock & 0xFFFFFFFF
        self._tokens[row] = chunk.tokens
        self._parents[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES] = chunk.parent
        self._uses[row], self._overlaps[row] = 1.0, 0.0
        self._impacts[row] = UNKNOWN_IMPACT
        self._deviations[row], self._reports[row] = _UNMEASURED, 0
        known = self._recalled.pop(chunk.key, None)
        if known is not None:
            self._learn(row, known)
        return self._give_way(content)

    def _give_way(self, content: int) -> ChunkKey | None:
        rows = list(self._rows(content))
        if len(rows) <= MAX_VARIANTS:
            return None

        def rank(row: int) -> tuple[bool, float, int]:
            return self._parent(row) == ROOT, self._impacts[row], self._positions[row]

        def saved(row: int) -> tuple[float, int]:
            overhead = fix_overhead(self._impacts[row], self._overlaps[row])
            return self._uses[row] * (1.0 - overhead), self._born[row]

        rows.remove(min(rows, key=rank))
        key = self._variants.key(min(rows, key=saved))
        self.forget(key)
        return key

    def forget(self, key: ChunkKey) -> bool:
        """A chunk is gone from all tiers. Return whether it was a variant."""
        row = self._variants.find(key)
        if not row:
            return False
        content = self._content_rows[row]
        if self._heads[content] == row:
            self._heads[content] = self._next[row]
        else:
            before = next(one for one in self._rows(content) if self._next[one] == row)
            self._next[before] = self._next[row]
        if not self._heads[content]:
            self._contents.remove(content)
        self._masses.pop(row, None)
        self._reported.pop(row, None)
        self._variants.remove(row)
        return True

    def _rows(self, content: int) -> Iterator[int]:
        row = self._heads[content]
        while row:
            yield row
            row = self._next[row]

    def variants(self, space: Namespace, content: bytes) -> list[VariantInfo]:
        """Return the variants of *content*, those that came last first."""
        row = self._contents.find(ChunkKey(space + content))
        return [self._facts(one) for one in self._rows(row)] if row else []

    def facts(self, key: ChunkKey) -> VariantInfo | None:
        """Return what is known of a variant; None when it is none."""
        row = self._variants.find(key)
        return self._facts(row) if row else None

    def content(self, key: ChunkKey) -> bytes:
        """Return the content digest of a variant; UNKNOWN_CONTENT when it is none."""
        row = self._variants.find(key)
        return self._content(row) if row else UNKNOWN_CONTENT

    def _content(self, row: int) -> bytes:
        return self._contents.key(self._content_rows[row])[DIGEST_BYTES:]

    def _facts(self, row: int) -> VariantInfo:
        return VariantInfo(
            self._variants.key(row), self._parent(row), self._tokens[row], self._positions[row],
            self._impacts[row], self._deviations[row], self._reports[row],
            self._masses.get(row) or self._before(row), row in self._masses,
        )  # fmt: skip

    def _parent(self, row: int) -> ChainDigest:
        return ChainDigest(bytes(self._parents[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]))

    def _before(self, row: int) -> list[Context]:
        """Return the chunks before a variant, the farthest first, each with its tokens for mass;
        those not here any more, or too far away, as one chunk that no prompt has.
        """
        found: list[Context] = []
        space, left = self._variants.key(row)[:DIGEST_BYTES], self._positions[row]
        parent = self._parent(row)
        while parent != ROOT and left > 0 and len(found) < MAX_CONTEXT:
            row = self._variants.find(ChunkKey(space + parent))
            if not row:
                break
            tokens = self._tokens[row]
            found.append(Context(self._content(row), tokens, float(tokens)))
            left -= tokens
            parent = self._parent(row)
        if left > 0:
            found.append(Context(UNKNOWN_CONTENT, left, float(left)))
        return found[::-1]

    def used(self, key: ChunkKey, overlap: float) -> None:
        """A variant was given out where this share of its context was there, too."""
        row = self._variants.find(key)
        if row:
            self._uses[row] += 1.0
            self._overlaps[row] += _EWMA_WEIGHT * (overlap - self._overlaps[row])

    def report(self, key: ChunkKey, measured: Measured) -> bool:
        """An engine used a variant, and measured it. Return whether it is still here."""
        row = self._variants.find(key)
        if not row:
            return False
        self._reports[row] += 1
        if measured.deviation >= 0:
            before = self._deviations[row]
            step = _EWMA_WEIGHT * (measured.deviation - before)
            self._deviations[row] = measured.deviation if before < 0 else before + step
        if context := tuple(measured.context):
            self._impacts[row] = context_impact(context, measured.intra_mass, self._tokens[row])
        self._remember(row, context)
        return True

    def _remember(self, row: int, context: tuple[Context, ...]) -> None:
        self._reported[row] = None
        self._reported.move_to_end(row)
        if len(self._reported) > MAX_LEARNED:
            self._reported.popitem(last=False)
        if context:
            self._masses[row] = context
            self._masses.move_to_end(row)
            if len(self._masses) > MAX_MASSES:
                self._masses.popitem(last=False)

    def learned(self) -> list[Learned]:
        """Return what reports taught, the latest last, first of variants that were not read yet."""
        found = list(self._recalled.values())
        found += [
            Learned(
                self._variants.key(row), self._impacts[row], self._deviations[row],
                self._overlaps[row], self._uses[row], self._reports[row],
                self._masses.get(row, ()),
            )
            for row in self._reported
        ]  # fmt: skip
        return found[-MAX_LEARNED:]

    def recall(self, rows: Sequence[Learned]) -> None:
        """Take in what an earlier run learned of variants that are here, or once they come."""
        for one in rows[-MAX_LEARNED:]:
            row = self._variants.find(one.key)
            if row:
                self._learn(row, one)
            else:
                self._recalled[one.key] = one

    def _learn(self, row: int, known: Learned) -> None:
        self._impacts[row], self._deviations[row] = known.impact, known.deviation
        self._overlaps[row], self._uses[row] = known.overlap, known.uses
        self._reports[row] = known.reports
        self._remember(row, known.context)

    @property
    def content_count(self) -> int:
        """Contents of which there is a variant."""
        return len(self._contents)

    def __len__(self) -> int:
        return len(self._variants)

    def __contains__(self, key: ChunkKey) -> bool:
        return self._variants.find(key) != NO_ROW


class PromptChunk(NamedTuple):
    """A chunk of a prompt. *key* is empty where what is before it is not known."""

    key: ChunkKey
    content: bytes
    tokens: int


class Candidate(NamedTuple):
    """A chunk that can be read: *source* is the place of its tier in the request."""

    facts: VariantInfo
    source: int
    size_bytes: int
    fidelity: Fidelity


class Matches(NamedTuple):
    """What there is of one chunk: itself, or others with its content, and its priorities."""

    is_exact: bool
    candidates: list[Candidate]
    priority: bytes


class Contents:
    """A listener of the catalog. Shares the lock of *state*. Thread-safe but for what the catalog
    calls, which has the lock. *limit* contents are kept.
    """

    def __init__(self, state: CatalogState, limit: int = CONTENT_LIMIT) -> None:
        self._state = state
        self.content_index = ContentIndex(limit)
        self._priorities = TokenPriorities()
        self.report_count = 0
        """Reports that were taken in."""
        self.unread: deque[ChunkKey] = deque(maxlen=MAX_UNREAD)
        """Chunks that others put and that came into memory: their frames say what they hold."""

    def stored(self, tier: str, infos: Sequence[ChunkInfo], put_info: PutInfo | None) -> None:
        """Know a chunk by its content, or note that its frame in memory is to be read."""
        if put_info is None:
            if tier == _MEMORY:
                self.unread += [info.key for info in infos if info.key not in self.content_index]
        elif put_info.content != UNKNOWN_CONTENT:
            (info,) = infos
            tokens = info.layout.tokens
            self._take_in(Named(info.key, info.parent, put_info.content, tokens, put_info.position))

    def removed(self, tier: str, key: ChunkKey, *, is_last: bool) -> None:
        """Forget a chunk that is nowhere any more."""
        if is_last:
            self.content_index.forget(key)

    def _take_in(self, chunk: Named) -> None:
        # A variant that gives way goes before others that are next, unless an engine ranked it.
        key = self.content_index.note(chunk)
        row = self._state.index.row(key) if key is not None else 0
        if row and self._state.metadata.hints.priority(row) == NO_PRIORITY:
            self._state.metadata.hints.set_priority(row, GAVE_WAY_PRIORITY)

    def matches(
        self,
        space: Namespace,
        chunks: Sequence[PromptChunk],
        least: Fidelity,
        tiers: Sequence[str | None],
        *,
        approximate: bool,
    ) -> list[Matches]:
        """Return what there is of each chunk on *tiers*, the best first, of *least* or better.

        None: a tier that is not read. Without *approximate* only the chunks themselves are sought.
        """
        with self._state.lock:
            now_s = self._state.clock()
            found = []
            for chunk in chunks:
                exact = self._candidate(chunk.key, None, least, tiers, now_s)
                if exact is not None and exact.facts.tokens == chunk.tokens:
                    found.append(Matches(True, [exact], b""))
                    continue
                variants = self.content_index.variants(space, chunk.content) if approximate else []
                placed = (
                    self._candidate(one.key, one, least, tiers, now_s)
                    for one in variants
                    if one.tokens == chunk.tokens
                )
                others = [one for one in placed if one is not None]
                priority = self._priorities.levels(space + chunk.content) if others else b""
                found.append(Matches(False, others, priority))
            return found

    def _candidate(
        self,
        key: ChunkKey,
        facts: VariantInfo | None,
        least: Fidelity,
        tiers: Sequence[str | None],
        now_s: float,
    ) -> Candidate | None:
        """Return the chunk on the first of *tiers* that has it; None where none does."""
        index = self._state.index
        row = index.row(key) if key else 0
        if not row or self._state.metadata.hints.is_expired(row, now_s):
            return None
        holders = index.holders(row, least)
        for source, tier in enumerate(tiers):
            if tier in holders:
                info = index.info(tier, row)
                facts = facts or self.content_index.facts(key)
                if facts is None:  # its frame is not read yet
                    facts = VariantInfo(key, info.parent, index.tokens(row), 0, 0.0, -1.0, 0, ())
                return Candidate(facts, source, info.size_bytes, info.fidelity)
        return None

    def lease_any(self, keys: Iterable[ChunkKey], terms: LeaseTerms) -> Lease | None:
        """Lease those of *keys* that exist; None when none does. Raises QuotaExceededError."""
        with self._state.lock:
            known = list(dict.fromkeys(key for key in keys if self._state.index.row(key)))
            until = self._state.clock() + terms.ttl_s
            return self._state.holds.leases.grant(terms.session_id, known, until) if known else None

    def chose(self, chosen: Sequence[tuple[ChunkKey, float]]) -> None:
        """Variants were given out, each where this share of its context was there, too."""
        with self._state.lock:
            for key, overlap in chosen:
                self.content_index.used(key, overlap)
            keys = [key for key, _ in chosen]
            rows = [row for key in keys if (row := self._state.index.row(key))]
            # For the policies, not the history, which counts prompts.
            event = Lookup(np.array(rows, np.intp), keys, self._state.clock(), is_again=True)
            self._state.access_log.note(event)
        self._state.news.set()

    def variant_tokens(self, keys: Sequence[ChunkKey]) -> list[int]:
        """Return the tokens of each of *keys*; 0 for what is no variant here."""
        with self._state.lock:
            found = [self.content_index.facts(key) for key in keys]
        return [0 if one is None else one.tokens for one in found]

    def reported(self, reports: Sequence[tuple[ChunkKey, Measured, Scores | None]]) -> None:
        """Take in reports of variants that are here: scores are (tokens), -1 if not measured."""
        with self._state.lock:
            self.report_count += 1
            for key, measured, scores in reports:
                if self.content_index.report(key, measured) and scores is not None:
                    content = self.content_index.content(key)
                    self._priorities.note(key[:DIGEST_BYTES] + content, scores)

    def learned(self) -> list[Learned]:
        """Return what engines reported of variants, of those reported on last."""
        with self._state.lock:
            return self.content_index.learned()

    def recall(self, rows: Sequence[Learned]) -> None:
        """Take in what an earlier run learned of variants."""
        with self._state.lock:
            self.content_index.recall(rows)

    def name(self, chunk: Named) -> None:
        """A frame was read that names its chunk; one that is gone is passed over."""
        with self._state.lock:
            if self._state.index.row(chunk.key):
                self._take_in(chunk)

    def next_unread(self) -> ChunkKey | None:
        """Return a chunk in memory whose frame nobody has looked at, once; None without one."""
        with self._state.lock:
            return self.unread.popleft() if self.unread else None

    def unnamed(self, tier: str, limit: int) -> list[ChunkKey]:
        """Return chunks on *tier* whose content is not known, at most *limit*."""
        with self._state.lock:
            contents, index = self.content_index, self._state.index
            return [
                key
                for row in index.known_rows()
                if tier in index.holders(row) and (key := index.key(row)) not in contents
            ][-limit:]

    def counts(self) -> tuple[int, int, int, int]:
        """Return how many contents and variants there are, contents left out, priorities' bytes."""
        with self._state.lock:
            contents, size = self.content_index, self._priorities.size_bytes
            return contents.content_count, len(contents), contents.left_out, size
