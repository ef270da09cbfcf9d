"""Blending under the store's quality gate: blends if it is open, compares, and reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvstore.client.blend.cost import BlendPlanner, Decision, Speed
from kvstore.client.blend.engine import Blender, BlendResult
from kvstore.client.blend.layer_pass import LayerKV
from kvstore.client.blend.plan import BlendPlan, SegmentRange
from kvstore.client.blend.selectors import CHECK_LAYER
from kvstore.client.blend.store import StoreSource
from kvstore.client.client import Client
from kvstore.client.planning import LinkMeter
from kvstore.client.segments import SegmentMatch, SegmentQuery
from kvstore.proto.blend import ChunkReport, GateView, ReuseReport, ShadowResult
from kvstore.proto.errors import InvalidRequestError, KVStoreError

SHADOW_TOKENS = 16
"""Answer tokens decoded from a full prefill and scored on the blend. The question's own logits are
closer to the full prefill, because it is computed; answer tokens attend to all of the blend."""
CLEAR_MARGIN = 0.1
"""Least difference of probability of a full prefill's two likeliest tokens. Closer ones also swap
between two dtypes of one model, so their order does not measure a blend."""
WORST = 1e3
"""Nats for logits that are not numbers or exclude a token that the full prefill may choose: keeps
means finite for reports."""
_PRIOR, _PRIOR_BYTES_PER_S = Speed(0.0, 0.0, 1e-4, 1e-9), 1e9
"""Placeholders until a measurement; no decision uses them."""


@dataclass(frozen=True, slots=True)
class ShadowEval:
    """Mean KL(full || blended) per token, in nats, and the share with the same likeliest token.

    ``agreement`` covers the ``clear_tokens``, at which the full prefill's two likeliest are
    CLEAR_MARGIN apart, or all ``tokens`` if none is clear.
    """

    divergence: float
    agreement: float
    tokens: int
    clear_tokens: int

    @property
    def reported(self) -> ShadowResult:
        """The result to report. Raises InvalidRequestError for invalid numbers."""
        return ShadowResult(self.divergence, self.agreement, self.tokens)


def compare(full: Tensor, blended: Tensor) -> ShadowEval:
    """Compare *blended* logits with *full* ones: (tokens, vocabulary) each.

    Summed in float64. Raises InvalidRequestError for shapes that differ and for no tokens.
    """
    if full.shape != blended.shape or full.ndim != 2 or not len(full):
        found = (tuple(full.shape), tuple(blended.shape))
        raise InvalidRequestError("logits", found, "give the same rows of both, at least one")
    wanted, got = (part.double().log_softmax(-1) for part in (full, blended))
    share = wanted.exp()
    # Masked tokens have probability 0 and a logarithm of minus infinity in both.
    parts = torch.where(share == 0, 0.0, share * (wanted - got))
    divergence = parts.sum(-1).nan_to_num(WORST).clamp(max=WORST).mean()
    agrees = (full.argmax(-1) == blended.argmax(-1)) & ~blended.isnan().any(-1)
    likeliest = wanted.topk(2).values.exp() if full.shape[1] > 1 else wanted.exp()
    is_clear = likeliest[:, 0] - likeliest[:, -1] >= CLEAR_MARGIN
    clear = int(is_clear.sum())
    agreement = float(agrees[is_clear if clear else slice(None)].double().mean())
    return ShadowEval(max(0.0, float(divergence)), agreement, len(full), clear)


def worse(first: ShadowEval, second: ShadowEval) -> ShadowEval:
    """Combine two comparisons of one blend: the larger divergence, and the tokens of both."""
    clear, tokens = first.clear_tokens + second.clear_tokens, first.tokens + second.tokens
    covered = ((one, one.clear_tokens if clear else one.tokens) for one in (first, second))
    agreement = sum(one.agreement * count for one, count in covered) / (clear or tokens)
    return ShadowEval(max(first.divergence, second.divergence), agreement, tokens, clear)


def deviations(full: Sequence[LayerKV], stored: Sequence[LayerKV]) -> Tensor:
    """Return the distance of each token's stored values from *full* ones: (tokens,), float32.

    Layers of (kv_heads, tokens, head_dim) each; squared distances, relative to a layer's mean
    squared value, summed over the layers.
    """
    found = torch.zeros(full[0][1].shape[1], device=full[0][1].device)
    for (_, wanted), (_, got) in zip(full, stored, strict=True):
        squares = wanted.float().square().sum((0, 2)).mean()
        distance = (wanted.float() - got.float()).square().sum((0, 2))
        found += distance / squares.clamp_min(torch.finfo(torch.float32).tiny)
    return found


@dataclass(frozen=True, slots=True)
class GuardedResult:
    """The result to answer from, and the outcome of the blend.

    ``result`` is the full prefill's if there was one; its logits are those of the plan's last
    segment, or of the tokens after the last range if the store failed. ``gate`` is None then;
    ``failure`` is why, or why a report was refused. ``decision`` is the planner's; None if nothing
    was stored, or the request is to be compared.
    """

    result: BlendResult
    plan: BlendPlan | None = None
    shadow: ShadowEval | None = None
    gate: GateView | None = None
    failure: str = ""
    decision: Decision | None = None


class GuardedBlender:
    """Blends the requests that the gate admits, compares those it samples, and reports.

    *terms* hold the tag, and whether these are trials. *planner* decides whether blending is
    worth it, and measures every prompt; None: a new one. As thread-safe as *blender* is.
    """

    def __init__(
        self,
        client: Client,
        blender: Blender,
        terms: SegmentQuery | None = None,
        selector: str = "hybrid",
        planner: BlendPlanner | None = None,
    ) -> None:
        link = LinkMeter(_PRIOR_BYTES_PER_S)
        self._planner = planner or BlendPlanner(blender.adapter.n_layers, _PRIOR, link)
        self._client = client
        self._blender = blender
        self._terms = terms or SegmentQuery()
        self._selector = selector

    def run(self, tokens: Sequence[int], ranges: Sequence[SegmentRange]) -> GuardedResult:
        """Return the prompt's logits and KV, computed if the store fails.

        Raises InvalidRequestError for ranges outside this prompt.
        """
        self._client.name_segments(tokens, ranges, self._terms.extra)
        try:
            return self._blended(tokens, ranges)
        except KVStoreError as error:
            first = ranges[-1].stop if ranges else 0
            done = self._prefill(tokens, min(first, len(tokens) - 1))
            return GuardedResult(done, failure=f"{type(error).__name__}: {error}")

    def _prefill(self, tokens: Sequence[int], logits_from: int) -> BlendResult:
        done = self._blender.prefill(tokens, logits_from=logits_from)
        self._planner.observe_full(len(tokens), done.report.total_s)
        return done

    def _blended(self, tokens: Sequence[int], ranges: Sequence[SegmentRange]) -> GuardedResult:
        terms = replace(self._terms, weights=self._blender.adapter.origin.weights)
        with (
            self._client.find_segments(tokens, ranges, terms) as resolved,
            StoreSource(resolved, tokens, self._client.model) as source,
        ):
            plan = replace(source.plan, selector=self._selector)
            decision = self._decided(plan, source, resolved)
            plan = plan if decision is None else decision.applied(plan)
            if plan.count("miss") == len(tokens):  # nothing stored, or not worth it
                resolved.release()
            result = self._tried(plan, source, resolved)
            full, shadow, gate, failure = None, None, resolved.found.gate, ""
            if result.is_blended and resolved.found.is_shadow:
                full = self._prefill(tokens, plan.segments[-1].start)
                shadow = self._compared(tokens, full, result)
            now = {result.weights, (full or result).weights, self._blender.adapter.origin.weights}
            if now != {terms.weights}:  # mixed weights: not comparable
                shadow = None
            elif result.is_blended:
                try:
                    report = _report(plan, source, result, full, shadow)
                    gate = self._client.report_reuse(replace(report, tag=terms.tag))
                except KVStoreError as error:
                    failure = f"{type(error).__name__}: {error}"
            return GuardedResult(full or result, plan, shadow, gate, failure, decision)

    def _compared(
        self, tokens: Sequence[int], full: BlendResult, result: BlendResult
    ) -> ShadowEval | None:
        """Compare the question and the full prefill's answer; None without memory for KV copies."""
        try:
            follows, wanted = self._blender.decode(tokens, full, SHADOW_TOKENS)
            found = self._blender.score(tokens, result, follows)
        except torch.OutOfMemoryError:
            return None
        return worse(compare(full.logits, result.logits), compare(wanted, found))

    def _decided(
        self, plan: BlendPlan, source: StoreSource, resolved: SegmentMatch
    ) -> Decision | None:
        """Return the decision on *plan*; None: blend it as is, for example to compare it."""
        if resolved.found.is_shadow or plan.count("miss") == len(plan.tokens):
            return None
        if not self._planner.full.is_measured:  # there is no baseline
            return Decision("full", 1.0, 0.0, 0.0)
        if not self._planner.blend.is_measured:
            return None
        return self._planner.choose(plan, source.token_bytes, can_skip_rows=source.can_skip_rows)

    def _tried(self, plan: BlendPlan, source: StoreSource, resolved: SegmentMatch) -> BlendResult:
        within_s = self._planner.wait_s(len(plan.tokens), source.loaded_bytes)
        # A shadow request is answered from a full prefill, so its blend may take any time.
        patience_s = math.inf if resolved.found.is_shadow else within_s
        result = self._blender.blend(plan, source, patience_s=patience_s)
        if result.report.failure.startswith(("DeadlineError", "TierUnavailableError")):
            self._planner.observe_load(source.loaded_bytes, within_s)
            resolved.abandon()
        elif result.is_blended:
            self._planner.observe_blend(plan, result, source.loaded_bytes)
        elif plan.count("miss") == len(plan.tokens):
            self._planner.observe_full(len(plan.tokens), result.report.total_s)
        return result


def _report(
    plan: BlendPlan,
    source: StoreSource,
    result: BlendResult,
    full: BlendResult | None,
    shadow: ShadowEval | None,
) -> ReuseReport:
    """Return the report on one blend; with a *full* prefill deviations cover all layers.

    Raises InvalidRequestError for an invalid comparison.
    """
    done = result.report
    layer, found = 0, None
    if full is not None:
        found = np.full(len(plan.tokens), -1.0, np.float32)  # -1: not measured
        for index, segment in plan.of_kind("approx"):
            span = slice(segment.start, segment.end)
            wanted = [(k[:, span].cpu(), v[:, span].cpu()) for k, v in full.kv]
            found[span] = deviations(wanted, source.stored(index)).numpy()
    elif done.deviation is not None:
        layer = CHECK_LAYER  # all approximate rows were computed up to here
        found = done.deviation.cpu().numpy()
    if found is None or not np.isfinite(found).all():
        found = np.empty(0, np.float32)
    halves = found.clip(max=np.finfo(np.float16).max).astype("<f2")
    attention, levels = done.attention, b""
    if attention is not None and float(attention.max()) > 0:
        scaled = attention.float().cpu() * (255 / float(attention.max()))
        levels = scaled.round().to(torch.uint8).numpy().tobytes()
    is_selected = np.zeros(len(plan.tokens), bool)
    is_selected[done.selected.cpu().numpy()] = True
    chunks = []
    for chunk in (one for one in source.chunks() if not one.is_exact):
        span = slice(chunk.wanted.start, chunk.wanted.stop)
        selected = np.packbits(is_selected[span], bitorder="little").tobytes()
        measured = halves[span].tobytes()
        chunks.append(ChunkReport(chunk.best.digest, layer, measured, selected, levels[span]))
    return ReuseReport(
        chunks=tuple(chunks),
        ratio=min(plan.shares().values(), default=plan.ratio),  # the one that the gate controls
        load_ms=1e3 * done.load_s,
        compute_ms=1e3 * done.total_s,
        full_ms=1e3 * full.report.total_s if full is not None else 0.0,
        shadow=None if shadow is None else shadow.reported,
    )
