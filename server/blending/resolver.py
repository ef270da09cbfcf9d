"""Blending: stored chunks for the segments of a prompt, and engines' reports on them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from kvstore.proto.blend import (
    ACCURACY_TAG,
    UNKNOWN,
    GateView,
    Resolution,
    ResolvedChunk,
    ResolvedSegment,
    Variant,
)
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import PrefillModel
from kvstore.proto.types import (
    DIGEST_BYTES,
    ROOT,
    Accuracy,
    ChainDigest,
    ChunkKey,
    LayerKind,
    layer_order,
)
from kvstore.server.blending.content_index import (
    Candidate,
    ContentIndex,
    Matches,
    Measured,
    PromptChunk,
)
from kvstore.server.blending.gates import Gates, Shadow
from kvstore.server.blending.scores import NO_IMPACT, Scores, fix_overhead, prefix_overlap
from kvstore.server.index.holds import LeaseTerms
from kvstore.server.security.sessions import Session
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.tier_slot import TierSlot

MAX_NAMED = 4096
"""Limit of chunks that one answer leases; long prompts get fewer variants per chunk."""

_PREFIX_ONLY = (LayerKind.state, LayerKind.window)
"""Kinds of layers whose chunks lack the KV of some of their tokens."""


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """Tokens *start* to *stop* of a prompt, cut into chunks."""

    start: int
    stop: int
    chunks: tuple[PromptChunk, ...]
    approximate: bool


class _Scored(NamedTuple):
    variant: Variant
    is_measured: bool


@dataclass(slots=True)
class VariantChoice:
    """Chooses variants for one Resolve, segment by segment in prompt order.

    ``places``: the first index of each content. ``limit``: variants per chunk. ``least_ratio`` is
    the gate's, ``prefill`` the engine's speed, if known.
    """

    sources: Sequence[TierSlot]
    places: Mapping[bytes, int]
    least_ratio: float
    limit: int
    prefill: PrefillModel | None
    _chunks_before: int = 0
    _chosen: bytes = b""

    def segment(self, asked: PromptSegment, found: Sequence[Matches]) -> ResolvedSegment:
        """Return the choice for one segment: no variants if the engine is known to compute it as
        fast as it loads and repairs them.
        """
        picked, stand_ins, at = [], [], asked.start
        for chunk, one in zip(asked.chunks, found, strict=True):
            picked.append(self._scored(one, at))
            at += chunk.tokens
            if picked[-1] and not one.is_exact:
                stand_ins.append((chunk.tokens, picked[-1][0]))
        ratio = self._ratio(stand_ins)
        recompute_ms, prefill = UNKNOWN, self.prefill
        if prefill is not None:
            recompute_ms = 1e3 * prefill.seconds(asked.stop - asked.start, asked.start)
            tokens = sum(count for count, _ in stand_ins)
            repair_ms = 1e3 * prefill.seconds(math.ceil(ratio * tokens), asked.start)
            load_ms = self._load_ms([best for _, best in stand_ins])
            if load_ms + repair_ms >= 1e3 * prefill.seconds(tokens, asked.start):
                pairs = zip(found, picked, strict=True)
                picked = [scored if one.is_exact else [] for one, scored in pairs]
        load_ms = self._load_ms([scored[0] for scored in picked if scored])
        chunks = [
            ResolvedChunk(one.is_exact, tuple(each.variant for each in scored), one.priority)
            if scored
            else ResolvedChunk()
            for one, scored in zip(found, picked, strict=True)
        ]
        return ResolvedSegment(tuple(chunks), ratio, load_ms, recompute_ms)

    def _scored(self, found: Matches, start: int) -> list[_Scored]:
        """Return the best candidates for the next chunk: the least to recompute first, of equals
        one that continues the last chosen chunk; those with an attention sink last.
        """
        scored = [self._variant(one, start, is_exact=found.is_exact) for one in found.candidates]
        came_from = self._chosen

        def order(scored: _Scored) -> tuple[bool, float, bool, float]:
            one = scored.variant
            overhead = round(one.fix_overhead, 4)
            return one.parent == ROOT, overhead, one.parent != came_from, one.load_ms

        scored = sorted(scored, key=order)[: self.limit]
        self._chosen = scored[0].variant.digest if scored else b""
        self._chunks_before += 1
        return scored

    def _variant(self, one: Candidate, start: int, *, is_exact: bool) -> _Scored:
        facts = one.facts
        position, impact, overlap, overhead = start, UNKNOWN, 1.0, 0.0
        if not is_exact:
            position, impact = facts.position, facts.impact
            overlap = prefix_overlap(facts.context, self.places, self._chunks_before)
            overhead = fix_overhead(impact, overlap)
        slot = self.sources[one.source]
        load_ms = 1e3 * slot.load_s(one.size_bytes)
        variant = Variant(
            ChainDigest(facts.key[DIGEST_BYTES:]), facts.parent, position, slot.name,
            load_ms, one.size_bytes, one.accuracy,
            impact, overlap, overhead, facts.deviation, facts.reports,
        )  # fmt: skip
        return _Scored(variant, facts.is_measured)

    def _ratio(self, stand_ins: Sequence[tuple[int, _Scored]]) -> float:
        """Return the share to recompute: at least the gate's, by CFO if attention was measured."""
        least = self.least_ratio
        tokens = sum(count for count, _ in stand_ins) or 1
        wanted = sum(
            count * least * (best.variant.fix_overhead / NO_IMPACT if best.is_measured else 1)
            for count, best in stand_ins
        )
        return min(1.0, max(least, wanted / tokens))

    def _load_ms(self, chosen: Sequence[_Scored]) -> float:
        """Return the time to load all, one batch per source, one source after another."""
        sizes: Counter[str] = Counter()
        for one in chosen:
            sizes[one.variant.tier] += one.variant.size_bytes
        loads = (slot.load_s(sizes[slot.name]) for slot in self.sources if sizes[slot.name])
        return 1e3 * sum(loads)


@dataclass(frozen=True, slots=True)
class Question:
    """A validated Resolve. ``deadline`` is on the server's clock."""

    segments: tuple[PromptSegment, ...]
    tag: str
    is_trial: bool
    deadline: float
    least: Accuracy
    max_variants: int
    prefill: PrefillModel | None


@dataclass(frozen=True, slots=True)
class Report:
    """A validated ReportReuse. ``chunks``: variants, the measurements of each, and the scores of
    their tokens, (tokens), -1 if not measured.
    """

    tag: str
    chunks: tuple[tuple[ChunkKey, Measured, Scores | None], ...]
    shadow: Shadow | None
    speedup: float = UNKNOWN


class Blending:
    """Answers Resolve and ReportReuse. Thread-safe.

    *count_ready* returns the length of a prompt's prefix that can be read by a deadline on the
    server's clock, in chunks of at least an accuracy. *contents* limits the content index.
    """

    def __init__(
        self,
        moves: Moves,
        count_ready: Callable[[Session, Sequence[ChunkKey], float, Accuracy], int],
        lease_ttl_ms: int,
        gates: Gates,
        contents: int,
    ) -> None:
        self.gates = gates
        self.contents = ContentIndex(moves.catalog.state, contents)
        moves.catalog.listeners.append(self.contents)
        self._catalog = moves.catalog
        self._counters = moves.counters
        self._sources = moves.tiers.sources
        self._count_ready = count_ready
        self._lease_ttl_ms = lease_ttl_ms
        self.tier_names = tuple(slot.name for slot in moves.tiers.sources)

    def resolve(self, session: Session, question: Question) -> Resolution:
        """Return the stored chunks of each segment, and lease them. Raises QuotaExceededError.

        A chunk with the prompt's own prefix is exact; others get variants if the request opts in,
        the gate is open and they are faster, the least to recompute first.
        """
        kinds = {group.kind for group in session.representation.layer_groups}
        for kind in sorted(kinds.intersection(_PREFIX_ONLY)):
            fix = "its KV fits one prefix only; use Lookup"
            raise InvalidRequestError("representation", f"{kind.name} layers", fix)
        name, model = (session.namespace, question.tag), session.representation.model_id
        is_open, is_shadow, gate = False, False, self.gates.view(name)
        if any(one.approximate for one in question.segments):
            is_open, is_shadow = self.gates.admit(name, trial=question.is_trial, model=model)
        prefix = self._exact_prefix(session, question)
        contents = [chunk.content for one in question.segments for chunk in one.chunks]
        limit = min(question.max_variants, max(1, MAX_NAMED // max(1, len(contents))))
        places = {content: place for place, content in reversed(list(enumerate(contents)))}
        choice = VariantChoice(self._sources, places, gate.ratio, limit, question.prefill)
        tiers = [None if slot.breaker.is_open else slot.name for slot in self._sources]
        space, least, segments = session.namespace, question.least, list[ResolvedSegment]()
        for one in question.segments:
            is_any = one.approximate and is_open
            found = self.contents.matches(space, one.chunks, least, tiers, approximate=is_any)
            segments.append(choice.segment(one, found))
        resolution = Resolution(
            tuple(segments), prefix, gate,
            tuple(layer for layer, _ in layer_order(session.representation)),
            session.representation.rope, is_shadow,
        )  # fmt: skip
        return self._leased(session, resolution)

    def _exact_prefix(self, session: Session, question: Question) -> int:
        """Return the length of the prompt's exact prefix, here or on other nodes, in chunks."""
        keys, at = [], 0
        for segment in question.segments:
            if segment.start != at:  # after a gap, or a chunk without a key
                break
            for chunk in takewhile(lambda one: one.key, segment.chunks):
                keys.append(chunk.key)
                at += chunk.tokens
        if not keys:
            return 0
        return self._count_ready(session, keys, question.deadline, question.least)

    def _leased(self, session: Session, resolution: Resolution) -> Resolution:
        """Lease the variants of *resolution*; drop those evicted meanwhile."""
        space = session.namespace
        every = [chunk for one in resolution.segments for chunk in one.chunks]
        keys = [ChunkKey(space + variant.digest) for chunk in every for variant in chunk.variants]
        terms = LeaseTerms(session.session_id, self._lease_ttl_ms / 1000)
        lease = self.contents.lease_any(keys, terms)
        held = set(lease.keys) if lease is not None else set()

        def kept(chunk: ResolvedChunk) -> ResolvedChunk:
            variants = tuple(v for v in chunk.variants if ChunkKey(space + v.digest) in held)
            return replace(chunk, variants=variants, is_exact=chunk.is_exact and bool(variants))

        segments = tuple(
            replace(one, chunks=tuple(map(kept, one.chunks))) for one in resolution.segments
        )
        chunks = [chunk for one in segments for chunk in one.chunks]
        best = [
            (ChunkKey(space + chunk.variants[0].digest), chunk.variants[0].overlap)
            for chunk in chunks
            if chunk.variants and not chunk.is_exact
        ]
        if best:
            self.contents.chose(best)
        named = sum(bool(chunk.variants) for chunk in chunks)
        self._counters.add("blend_resolves")
        self._counters.add("blend_exact_chunks", sum(chunk.is_exact for chunk in chunks))
        self._counters.add("blend_variant_chunks", len(best))
        self._counters.add("blend_missing_chunks", len(chunks) - named)
        if lease is None:
            return replace(resolution, segments=segments)
        ttl_ms, lease_id = self._lease_ttl_ms, lease.lease_id
        return replace(resolution, segments=segments, lease_id=lease_id, lease_ttl_ms=ttl_ms)

    def report(self, session: Session, report: Report) -> GateView:
        """Record a report; return the new gate, or with ACCURACY_TAG that of all codecs."""
        if report.tag == ACCURACY_TAG:
            return self.gates.of_codecs(session.namespace)
        self.contents.reported(report.chunks)
        self._counters.add("blend_reports")
        name, model = (session.namespace, report.tag), session.representation.model_id
        self.gates.record(name, report.shadow, report.speedup, model)
        return self.gates.view(name)
