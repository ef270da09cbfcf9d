"""Blending under the store's gate: what it lets through, what is compared, and what it is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvstore.client.blend.blender import Blender
from kvstore.client.blend.controller import Controller, Decision
from kvstore.client.blend.cost import Speed
from kvstore.client.blend.feedback import Shadow, compare, deviations, worse
from kvstore.client.blend.patience import Patience
from kvstore.client.blend.plan import BlendPlan
from kvstore.client.blend.report import BlendResult
from kvstore.client.blend.segments import SegmentRange
from kvstore.client.blend.store_source import StoreSource
from kvstore.client.levels import LinkMeter
from kvstore.client.resolving import Resolved, ResolveTerms, Resolving
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import GateView
from kvstore.proto.errors import KVStoreError

SHADOW_TOKENS = 16
"""Decoded from a full prefill and scored behind the blend: what answers are made of. The question
is closer to its full prefill than they are, as it is computed, and they read all of the blend."""

_LARGEST_HALF = 65504.0
_BYTE = 255

_LATE = ("DeadlineError", "TierUnavailableError")
_PRIOR = Speed(0.0, 0.0, 1e-4, 1e-9)
_PRIOR_BYTES_PER_S = 1e9
"""Both only until something was measured, and nothing is decided by them."""


@dataclass(frozen=True, slots=True)
class GatedResult:
    """What to answer from, and what came of the question.

    ``result`` is the full prefill's where there was one; its logits are those of the plan's last
    segment, or of what is behind the last range where the store failed. ``gate`` is None when
    the store did not answer; ``failure`` says why, or why a report was refused. ``decision`` is
    what the controller made of it; None where nothing was there, or the request is to be
    compared.
    """

    result: BlendResult
    plan: BlendPlan | None = None
    shadow: Shadow | None = None
    gate: GateView | None = None
    failure: str = ""
    decision: Decision | None = None


class GatedBlender:
    """Blends what the gate lets through, compares what it wants compared, and reports.

    *terms* say the tag, and whether these are trials. *controller* decides whether blending is
    worth it, and learns from every prompt; None: one of its own. As thread-safe as *blender* is.
    """

    def __init__(
        self,
        client: Resolving,
        blender: Blender,
        terms: ResolveTerms | None = None,
        selector: str = "hybrid",
        controller: Controller | None = None,
    ) -> None:
        own = Controller(blender.n_layers, _PRIOR, LinkMeter(_PRIOR_BYTES_PER_S))
        self._controller = controller or own
        self._client = client
        self._blender = blender
        self._terms = terms or ResolveTerms()
        self._selector = selector
        self._patience = Patience()

    def run(self, tokens: Sequence[int], ranges: Sequence[SegmentRange]) -> GatedResult:
        """Return the prompt's logits and KV. Never raises for the store: it is computed then.

        Raises InvalidRequestError for ranges that are not of this prompt.
        """
        self._client.name_segments(tokens, ranges, self._terms.extra)
        try:
            return self._blended(tokens, ranges)
        except KVStoreError as error:
            failure = f"{type(error).__name__}: {error}"
            first = ranges[-1].stop if ranges else 0
            done = self._prefill(tokens, min(first, len(tokens) - 1))
            return GatedResult(done, failure=failure)

    def _prefill(self, tokens: Sequence[int], logits_from: int) -> BlendResult:
        done = self._blender.prefill(tokens, logits_from=logits_from)
        self._note_full(len(tokens), done)
        return done

    def _note_full(self, tokens: int, done: BlendResult) -> None:
        self._patience.note_full(tokens, done.report.total_s)
        self._controller.observe_full(tokens, done.report.total_s)

    def _blended(self, tokens: Sequence[int], ranges: Sequence[SegmentRange]) -> GatedResult:
        terms = replace(self._terms, weights=self._blender.weights)
        with self._client.resolve(tokens, ranges, terms) as resolved:
            with StoreSource(resolved, tokens, self._client.representation) as source:
                plan = replace(source.plan, selector=self._selector)
                decision = self._decided(plan, source, resolved)
                if decision is not None:
                    plan = decision.applied(plan)
                if plan.count("miss") == len(tokens):  # nothing there, or not worth it
                    resolved.release()
                result = self._tried(plan, source, resolved)
                answer = GatedResult(result, plan, gate=resolved.found.gate, decision=decision)
                if not result.is_blended:
                    return answer
                full, shadow = None, None
                if resolved.found.is_shadow:
                    full = self._prefill(tokens, plan.segments[-1].start)
                    shadow = self._compared(tokens, full, result)  # None: no memory for it
                now = {result.weights, (full or result).weights, self._blender.weights}
                if now != {terms.weights}:  # of mixed weights: says nothing
                    return replace(answer, result=full or result)
                reporter = _Reporter(plan, source, result, full)
                report = reporter.message(self._terms.tag, shadow)
            answer = replace(answer, result=full or result, shadow=shadow)
            try:
                return replace(answer, gate=self._client.report_reuse(report))
            except KVStoreError as error:
                return replace(answer, failure=f"{type(error).__name__}: {error}")

    def _compared(
        self, tokens: Sequence[int], full: BlendResult, result: BlendResult
    ) -> Shadow | None:
        """Compare the question's rows, and what follows it as the full prefill has it.

        None where there is no memory for copies of the KV: the request has its answer.
        """
        try:
            follows, wanted = self._blender.decode(tokens, full, SHADOW_TOKENS)
            found = self._blender.score(tokens, result, follows)
        except torch.OutOfMemoryError:
            return None
        return worse(compare(full.logits, result.logits), compare(wanted, found))

    def _decided(self, plan: BlendPlan, source: StoreSource, resolved: Resolved) -> Decision | None:
        """Return what to do with *plan*; None: as it says.

        What is to be compared is blended, and so is the first prompt after a full prefill was
        measured: before, nothing is known to compare with, and the prompt is computed.
        """
        if resolved.found.is_shadow or plan.count("miss") == len(plan.tokens):
            return None
        if not self._controller.knows_full:
            return Decision("full", 1.0, 0.0, 0.0)
        if not self._controller.knows_blend:
            return None
        return self._controller.decide(plan, source.token_bytes, can_skip_rows=source.can_skip_rows)

    def _tried(self, plan: BlendPlan, source: StoreSource, resolved: Resolved) -> BlendResult:
        """Carry *plan* out, and learn from it."""
        # What is answered from a full prefill is to be compared, whatever it takes.
        within_s = self._patience.within_s(len(plan.tokens), source.loaded_bytes)
        patience_s = math.inf if resolved.found.is_shadow else within_s
        result = self._blender.blend(plan, source, patience_s=patience_s)
        if result.report.failure.startswith(_LATE):
            self._patience.note_late(source.loaded_bytes, within_s)
            self._controller.observe_late(source.loaded_bytes, within_s)
            resolved.abandon()
        elif result.is_blended:
            self._patience.note_load(source.loaded_bytes, result.report.load_s)
            self._controller.observe_blend(plan, result, source.loaded_bytes)
        elif plan.count("miss") == len(plan.tokens):
            self._note_full(len(plan.tokens), result)
        return result


@dataclass(frozen=True, slots=True)
class _Reporter:
    """One blend as the store is told of it."""

    plan: BlendPlan
    source: StoreSource
    result: BlendResult
    full: BlendResult | None

    def message(self, tag: str, shadow: Shadow | None) -> pb.ReportReuseRequest:
        """Return the report. With a full prefill deviations are those of all layers."""
        done = self.result.report
        message = pb.ReportReuseRequest(
            tag=tag,
            ratio=self._ratio(),
            load_ms=1e3 * done.load_s,
            compute_ms=1e3 * done.total_s,
            full_ms=1e3 * self.full.report.total_s if self.full is not None else 0.0,
        )
        if shadow is not None:
            message.shadow.CopyFrom(
                pb.ShadowResult(
                    divergence=shadow.divergence, agreement=shadow.agreement, tokens=shadow.tokens
                )
            )
        layer, found = self._deviations()
        selected = set(done.selected.tolist())
        attention = _levels(done.attention)
        for chunk in self.source.approximate_chunks():
            start, stop = chunk.asked.start, chunk.asked.stop
            bits = [place in selected for place in range(start, stop)]
            message.chunks.add(
                digest=chunk.best.digest,
                layer=layer,
                deviations=b"" if found is None else found[start:stop].tobytes(),
                selected=np.packbits(bits, bitorder="little").tobytes(),
                query_attention=b"" if attention is None else attention[start:stop].tobytes(),
            )
        return message

    def _ratio(self) -> float:
        """Return the share of the approximate tokens that was wanted, the least of all segments.

        It is what the gate is about; the tokens that were computed are rounded up.
        """
        shares = [
            self.plan.ratio if segment.ratio is None else segment.ratio
            for _, segment in self.plan.of_kind("approx")
        ]
        return min(shares, default=self.plan.ratio)

    def _deviations(self) -> tuple[int, np.ndarray[tuple[int], np.dtype[np.float16]] | None]:
        """Return where deviations were measured and those of all tokens, -1 for the unmeasured."""
        found: np.ndarray[tuple[int], np.dtype[np.float32]]
        if self.full is not None:
            found = np.full(len(self.plan.tokens), -1.0, np.float32)
            for place, segment in self.plan.of_kind("approx"):
                span = slice(segment.start, segment.end)
                wanted = [(k[:, span].cpu(), v[:, span].cpu()) for k, v in self.full.kv]
                found[span] = deviations(wanted, self.source.stored(place)).numpy()
            found[sorted(self.source.left_out)] = -1.0
            return 0, _halves(found)
        checked = self.result.report.deviation
        if not checked:
            return 0, None
        layer = min(checked)  # where all approximate rows were still computed
        return layer, _halves(checked[layer].float().cpu().numpy())


def _halves(
    values: np.ndarray[tuple[int], np.dtype[np.float32]],
) -> np.ndarray[tuple[int], np.dtype[np.float16]] | None:
    """Return *values* in sixteen bits; None when any is no number."""
    if not np.isfinite(values).all():
        return None
    return values.clip(max=_LARGEST_HALF).astype("<f2")


def _levels(
    attention: Tensor | None,
) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
    """Return attention as bytes, the highest 255."""
    if attention is None or not float(attention.max()) > 0:
        return None
    scaled = attention.float().cpu() * (_BYTE / float(attention.max()))
    levels: np.ndarray[tuple[int], np.dtype[np.uint8]] = scaled.round().numpy().astype(np.uint8)
    return levels
