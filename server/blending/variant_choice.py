"""VariantChoice: of what there is of a segment, what to name, in which order, and what it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.proto.blend import UNKNOWN, ResolvedChunk, ResolvedSegment, Variant
from kvstore.proto.plans import PrefillModel
from kvstore.proto.types import DIGEST_BYTES, ROOT, ChainDigest, ChunkKey
from kvstore.server.blending.contents import AskedChunk, Candidate, Matches
from kvstore.server.blending.scores import NO_IMPACT, fix_overhead, prefix_overlap
from kvstore.server.tiering.tier_slot import TierSlot


@dataclass(frozen=True, slots=True)
class AskedSegment:
    """Tokens *start* to *stop* of a prompt and the chunks that they are cut into."""

    start: int
    stop: int
    chunks: tuple[AskedChunk, ...]
    approximate: bool


@dataclass(frozen=True, slots=True)
class ChoiceTerms:
    """The gate's ratio, how many variants of a chunk, and the engine's speed if it said."""

    least_ratio: float
    limit: int
    prefill: PrefillModel | None


class _Scored(NamedTuple):
    candidate: Candidate
    overlap: float
    overhead: float
    load_ms: float


class VariantChoice:
    """One answer to a Resolve. Segments are to come in the order of the prompt.

    *places* says where each content is first in the prompt, by chunk.
    """

    def __init__(
        self, sources: Sequence[TierSlot], places: Mapping[bytes, int], terms: ChoiceTerms
    ) -> None:
        self._sources = sources
        self._places = places
        self._terms = terms
        self._chunks_before = 0
        self._chosen = ChunkKey(b"")

    def segment(self, asked: AskedSegment, found: Sequence[Matches]) -> ResolvedSegment:
        """Return what to name of one segment.

        With the engine's speed, no variants where loading and repairing them takes as long as
        computing.
        """
        picked: list[list[_Scored]] = []
        for one in found:
            scored = self._scored(one)[: self._terms.limit]
            self._chosen = scored[0].candidate.facts.key if scored else ChunkKey(b"")
            self._chunks_before += 1
            picked.append(scored)
        stand_ins = [
            (chunk.tokens, scored[0])
            for chunk, one, scored in zip(asked.chunks, found, picked, strict=True)
            if scored and not one.is_exact
        ]
        ratio = self._ratio(stand_ins)
        named = True
        recompute_ms = UNKNOWN
        if self._terms.prefill is not None:
            recompute_ms = 1e3 * self._terms.prefill.seconds(asked.stop - asked.start, asked.start)
            named = self._is_worth_it(stand_ins, ratio, asked.start, self._terms.prefill)
        if not named:
            picked = [
                scored if one.is_exact else [] for one, scored in zip(found, picked, strict=True)
            ]
        load_ms = self._load_ms([scored[0].candidate for scored in picked if scored])
        chunks, start = [], asked.start
        for chunk, one, scored in zip(asked.chunks, found, picked, strict=True):
            chunks.append(self._resolved(one, scored, start))
            start += chunk.tokens
        return ResolvedSegment(tuple(chunks), ratio, load_ms, recompute_ms)

    def _scored(self, found: Matches) -> list[_Scored]:
        """Return the candidates, the one of which least has to be recomputed first.

        Behind all others those that began their prompts, which carry its attention sink. Of equal
        ones that which goes on from the chunk chosen before, then the fastest to load.
        """
        scored = []
        for one in found.candidates:
            facts = one.facts
            overlap, overhead = 1.0, 0.0
            if not found.is_exact:
                overlap = prefix_overlap(facts.context, self._places, self._chunks_before)
                overhead = fix_overhead(facts.impact, overlap)
            scored.append(_Scored(one, overlap, overhead, self._load_ms([one])))
        came_from = self._chosen[DIGEST_BYTES:]

        def order(one: _Scored) -> tuple[bool, float, bool, float]:
            facts = one.candidate.facts
            is_first = facts.parent == ROOT
            return is_first, round(one.overhead, 4), facts.parent != came_from, one.load_ms

        return sorted(scored, key=order)

    def _ratio(self, stand_ins: Sequence[tuple[int, _Scored]]) -> float:
        """Return the share to recompute: the gate's; where attention was measured, by CFO, no less.

        The gate's ratio is what was found good enough for chunks of any context, so it sets
        equation 12's factor: what depends least on a context that is gone has just that.
        """
        least = self._terms.least_ratio
        tokens = sum(count for count, _ in stand_ins)
        if not tokens:
            return least
        wanted = sum(
            count * least * (best.overhead / NO_IMPACT if best.candidate.facts.is_measured else 1)
            for count, best in stand_ins
        )
        return min(1.0, max(least, wanted / tokens))

    def _is_worth_it(
        self,
        stand_ins: Sequence[tuple[int, _Scored]],
        ratio: float,
        start: int,
        prefill: PrefillModel,
    ) -> bool:
        tokens = sum(count for count, _ in stand_ins)
        repair_ms = 1e3 * prefill.seconds(math.ceil(ratio * tokens), start)
        load_ms = self._load_ms([best.candidate for _, best in stand_ins])
        return load_ms + repair_ms < 1e3 * prefill.seconds(tokens, start)

    def _load_ms(self, chosen: Sequence[Candidate]) -> float:
        """Return what loading takes, all of one source together, one source after the other."""
        sizes: dict[int, int] = {}
        for one in chosen:
            sizes[one.source] = sizes.get(one.source, 0) + one.size_bytes
        return sum(
            1e3 * float(self._sources[source].load_s(np.array([size], np.int64))[0])
            for source, size in sizes.items()
        )

    def _resolved(self, found: Matches, scored: Sequence[_Scored], start: int) -> ResolvedChunk:
        variants = []
        for candidate, overlap, overhead, load_ms in scored:
            facts = candidate.facts
            variants.append(
                Variant(
                    digest=ChainDigest(facts.key[DIGEST_BYTES:]),
                    parent=facts.parent,
                    position=start if found.is_exact else facts.position,
                    tier=self._sources[candidate.source].name,
                    load_ms=load_ms,
                    size_bytes=candidate.size_bytes,
                    fidelity=candidate.fidelity,
                    context_impact=UNKNOWN if found.is_exact else facts.impact,
                    overlap=overlap,
                    fix_overhead=overhead,
                    deviation=facts.deviation,
                    reports=facts.reports,
                )
            )
        is_exact = found.is_exact and bool(variants)
        return ResolvedChunk(is_exact, tuple(variants), found.priority if variants else b"")
