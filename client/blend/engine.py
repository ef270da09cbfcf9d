"""The hook in an engine: stored rows loaded, moved, some computed anew, all of it attended.

CacheBlend (Yao et al., arXiv 2405.16444) with the exact causal mask: a row at position p reads
keys up to p, whichever rows are computed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitedTooLong
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvstore.client.blend.layer_pass import (
    EngineAdapter,
    LayerKV,
    LayerPass,
    StoredKV,
    place_segments,
)
from kvstore.client.blend.plan import BlendPlan, Origin, Segment
from kvstore.client.blend.selectors import (
    SELECTORS,
    check_layers,
    check_selector,
    chooses_any,
    reads_attention,
    rows_of,
    sink_rows,
)
from kvstore.proto.errors import DeadlineError, InvalidRequestError, KVStoreError

LAYER_WAIT_S = 10.0
PROBE_ROWS = 64
"""How many of the prompt's last rows are measured for what they attend to."""
MAX_SINKS = 4
"""First tokens of a prompt that are computed; models have one sink, a few have up to four."""


class LayerSource(Protocol):
    """Gives what is stored of a plan's segments.

    One thread reads layers, in rising order; ``narrow`` may come before or meanwhile from another.
    """

    def layer(self, i: int) -> Mapping[int, LayerKV]:
        """Return layer *i* of every ``exact`` and ``approx`` segment, by the segment's index.

        Blocks until it is here, at most to a deadline of its own. May raise any KVStoreError:
        the prompt is then computed. A segment left out is a layer that is not there.
        """

    def narrow(self, rows: Sequence[int], from_layer: int) -> None:
        """Take note that *rows* (positions) are computed from layer *from_layer* on.

        They need not be brought any more; what stands in their place is never read.
        """


class MemorySource:
    """KV that is at hand. *stored*: layers of K and V, by the segment's index."""

    def __init__(self, stored: Mapping[int, Sequence[LayerKV]]) -> None:
        self._stored = stored

    def layer(self, i: int) -> Mapping[int, LayerKV]:
        """Return layer *i* of every segment."""
        return {index: layers[i] for index, layers in self._stored.items()}

    def narrow(self, rows: Sequence[int], from_layer: int) -> None:
        """Nothing to leave out: it is here."""


class LayerLoader:
    """Reads *layers* of *source* in order, in a thread of its own, one layer ahead.

    *wait_s*: how long ``take`` waits for one layer, *patience_s*: for all of them. ``load_s`` and
    ``wait_s`` are what the source took and what of it was waited for. A with statement ends the
    thread; a call of the source that is under way then is left to its own deadline.
    """

    def __init__(
        self,
        source: LayerSource,
        layers: Sequence[int],
        wait_s: float,
        patience_s: float = math.inf,
    ) -> None:
        self._source = source
        self._layers = iter(layers)
        self._limits_s = wait_s, patience_s
        self._thread = ThreadPoolExecutor(1, "kvstore-blend")
        self._next: Future[Mapping[int, LayerKV]] | None = None
        self.load_s = 0.0
        self.wait_s = 0.0

    def __enter__(self) -> LayerLoader:
        self._begin_next()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown(wait=kind is None, cancel_futures=True)

    def take(self) -> Mapping[int, LayerKV]:
        """Return the next layer and begin the one behind it.

        Raises DeadlineError, and what the source raises.
        """
        pending = self._next
        if pending is None:
            raise DeadlineError("no layer is left to take")
        started = time.perf_counter()
        layer_s, all_s = self._limits_s
        limit_s = max(0.0, min(layer_s, all_s - self.wait_s))
        try:
            found = pending.result(limit_s)
        except WaitedTooLong as error:
            if pending.done():  # the source's own deadline
                raise
            raise DeadlineError(f"a layer did not come within {limit_s:.3g} s") from error
        finally:
            self.wait_s += time.perf_counter() - started
        self._begin_next()
        return found

    def _begin_next(self) -> None:
        layer = next(self._layers, None)
        self._next = None if layer is None else self._thread.submit(self._load, layer)

    def _load(self, layer: int) -> Mapping[int, LayerKV]:
        started = time.perf_counter()
        found = self._source.layer(layer)
        self.load_s += time.perf_counter() - started
        return found


@dataclass(frozen=True, slots=True)
class BlendReport:
    """What was done for one prompt.

    ``selected``: positions of the ``approx`` rows that were computed through all layers.
    ``rows``: how many rows each layer computed. ``deviation``: squared distance of fresh values
    from stored, (tokens,), by check layer. ``attention``: what each token got of the prompt's own
    rows, (tokens,), if it was measured. ``load_s``: what the source took; ``wait_s``: what of it
    computing waited for. ``refused``: why segments were computed instead, by their index.
    ``failure``: why the whole prompt was; empty if it was not.
    """

    selected: Tensor
    rows: tuple[int, ...]
    deviation: Mapping[int, Tensor] = field(default_factory=dict)
    attention: Tensor | None = None
    load_s: float = 0.0
    wait_s: float = 0.0
    refused: Mapping[int, str] = field(default_factory=dict)
    failure: str = ""
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BlendResult:
    """Logits of the last segment, (tokens, vocabulary), and K and V of each layer.

    K and V: (kv_heads, tokens, head_dim) of the whole prompt. With ``is_blended`` some of it
    was computed in another context: it may serve this request, and is never to be stored under
    the prompt's own keys nor kept as a prefix. ``weights`` names those that all of it is of, as an
    ``Origin`` does; None: they changed meanwhile, and it is not to be stored either.
    """

    logits: Tensor
    kv: tuple[LayerKV, ...]
    is_blended: bool
    report: BlendReport
    weights: bytes | None = None


class Blender:
    """Blends prompts of one engine. As thread-safe as its adapter is.

    *sinks*: how many first tokens of a prompt its other tokens may use as attention sinks
    (Xiao et al., arXiv 2309.17453, section 3.1), 0 to 4. They are always computed unless they are
    exact: a stored chunk has no sink there, and the sink that it may bring from its own prompt is
    none once it is computed behind other tokens. *layer_wait_s*: how long one layer is waited for
    before the prompt is computed instead. Raises InvalidRequestError.
    """

    def __init__(
        self, adapter: EngineAdapter, *, sinks: int = 1, layer_wait_s: float = LAYER_WAIT_S
    ) -> None:
        if not 0 <= sinks <= MAX_SINKS:
            raise InvalidRequestError("sinks", sinks, f"use 0 to {MAX_SINKS}")
        self.adapter = adapter
        self._sinks = sinks
        self._layer_wait_s = layer_wait_s

    @torch.inference_mode()
    def compile(self, tokens: Sequence[int], *, sink: Sequence[int]) -> list[LayerKV]:
        """Return K and V of *tokens*, a layer each, computed behind *sink*, which is left out.

        *sink*: the system prompt that they will stand behind, or BOS at least. With none their
        first token becomes an attention sink, which it is not in any other place: right for the
        beginning of a prompt only.

        (kv_heads, tokens, head_dim) each; their ``src_pos`` is the length of *sink*.
        """
        done = self.prefill((*sink, *tokens))
        first = len(sink)
        return [(k[:, first:].clone(), v[:, first:].clone()) for k, v in done.kv]

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], *, logits_from: int = 0) -> BlendResult:
        """Compute all of *tokens*. Logits: those of the tokens from *logits_from* on.

        Raises InvalidRequestError for a position that is not in the prompt.
        """
        plan = _whole(tokens)
        if not 0 <= logits_from < len(tokens):
            fix = f"a position of the prompt, 0 to {len(tokens) - 1}"
            raise InvalidRequestError("logits_from", logits_from, fix)
        own, started = self.adapter.origin, time.perf_counter()
        return self._finished(self._computed(plan, logits_from), own, started)

    @torch.inference_mode()
    def decode(
        self, tokens: Sequence[int], result: BlendResult, count: int
    ) -> tuple[list[int], Tensor]:
        """Return the likeliest *count* tokens after *tokens*, whose KV is that of *result*.

        One after the other. With the logits that they were chosen by: (count, vocabulary).
        """
        kv, logits = _padded(result, count), [result.logits[-1:]]
        found = [int(logits[0].argmax())]
        while len(found) < count:
            logits.append(self._behind((*tokens, *found), kv, len(tokens) + len(found) - 1))
            found.append(int(logits[-1].argmax()))
        return found, torch.cat(logits)

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], result: BlendResult, follows: Sequence[int]) -> Tensor:
        """Return the logits that predict *follows* behind *tokens*: (follows, vocabulary).

        Teacher-forced, behind the KV of *result*; the first are *result*'s last.
        """
        kv = _padded(result, len(follows))
        found = self._behind((*tokens, *follows), kv, len(tokens))
        return torch.cat([result.logits[-1:], found[:-1]])

    def _behind(self, tokens: Sequence[int], kv: Sequence[LayerKV], first: int) -> Tensor:
        """Compute *tokens* from *first* on behind *kv*, and into it; return their logits."""
        count = len(tokens)
        work = LayerPass(_whole(tokens), torch.arange(first, count), first)
        return work.run(
            self.adapter, lambda layer: (kv[layer][0][:, :count], kv[layer][1][:, :count])
        )

    @torch.inference_mode()
    def blend(
        self, plan: BlendPlan, source: LayerSource, *, patience_s: float = math.inf
    ) -> BlendResult:
        """Return the last segment's logits and the prompt's KV, as *plan* says.

        Once *patience_s* were waited for the source in all, the prompt is computed instead.

        With a ratio of 1 nothing is loaded and all is computed: the result is the engine's own
        full prefill, to the bit on one device. Segments of another adapter or rotation are
        computed, and the whole prompt is when the source fails: the report says why. Raises
        InvalidRequestError for a selector that is not known.
        """
        check_selector(plan.selector)
        own, started, failure = self.adapter.origin, time.perf_counter(), ""
        refused = _refused(plan, own)
        plan = plan.as_miss(_computed_anyway(plan) | frozenset(refused))
        try:
            result = self._blended(plan, source, patience_s)
        except KVStoreError as error:
            failure = f"{type(error).__name__}: {error}"
            result = self._computed(plan, plan.segments[-1].start)
        report = replace(result.report, refused=refused, failure=failure)
        return self._finished(replace(result, report=report), own, started)

    def _finished(self, result: BlendResult, own: Origin, started: float) -> BlendResult:
        """Return *result*, begun when the engine was *own*, with its time and its weights."""
        report = replace(result.report, total_s=time.perf_counter() - started)
        weights = own.weights if self.adapter.origin == own else None
        return replace(result, report=report, weights=weights)

    def _computed(self, plan: BlendPlan, logits_from: int) -> BlendResult:
        """Compute the whole prompt."""
        work = LayerPass(plan, torch.arange(len(plan.tokens)), logits_from)
        logits = work.run(self.adapter, dict[int, LayerKV]().__getitem__)  # nothing is stored
        report = BlendReport(work.selected[:0], tuple(work.row_counts))
        return BlendResult(logits, tuple(work.kv), is_blended=False, report=report)

    def _blended(self, plan: BlendPlan, source: LayerSource, patience_s: float) -> BlendResult:
        last = plan.segments[-1].start
        if plan.count("miss") == len(plan.tokens):
            return self._computed(plan, last)
        adapter, sinks, attention = self.adapter, sink_rows(plan, self._sinks), None
        chooses = chooses_any(plan)
        checks = check_layers(plan, adapter.n_layers) if chooses else ()
        is_probed = chooses and reads_attention(plan)
        rows = rows_of(plan, "approx", "miss")
        if not checks and not is_probed:  # rows are known before anything is loaded
            rows = _rows(plan, sinks, None)
            source.narrow(rows.tolist(), 0)
        # Up to a check layer all approximate rows are computed.
        first = 0 if plan.count("exact") else min(checks, default=0)
        layers, exact = range(first, adapter.n_layers), plan.without("approx")
        with LayerLoader(source, layers, self._layer_wait_s, patience_s) as loader:

            def stored_kv(layer: int) -> LayerKV:
                loaded = loader.take() if layer >= first else {}
                used = exact if layer < min(checks, default=0) else plan
                return place_segments(adapter, used, layer, loaded)

            kv_of: StoredKV = stored_kv
            if is_probed:
                probing = self._probed(plan, stored_kv, sinks)
                attention, kv_of = probing.attention, probing.kv.__getitem__
                rows = _rows(plan, sinks, attention)
                source.narrow(rows.tolist(), 0)
            work = LayerPass(plan, rows, last, checks, sinks, source.narrow)
            logits = work.run(adapter, kv_of)
        is_approx = torch.isin(work.selected, rows_of(plan, "approx").to(work.selected.device))
        selected, counts = work.selected[is_approx], tuple(work.row_counts)
        loads = loader.load_s, loader.wait_s
        report = BlendReport(selected, counts, work.deviation, attention, *loads)
        is_blended = plan.count("approx") > 0
        return BlendResult(logits, tuple(work.kv), is_blended, report)

    def _probed(self, plan: BlendPlan, stored_kv: StoredKV, sinks: Tensor) -> LayerPass:
        """Compute the prompt's own rows over what is stored, and sum the last ones' attention."""
        rows = torch.cat([rows_of(plan, "miss"), sinks]).sort().values
        end = len(plan.tokens)
        first = max(plan.segments[-1].start, end - PROBE_ROWS)
        probe = torch.arange(first, end, device=self.adapter.device)
        work = LayerPass(plan, rows, end, probe=probe)
        work.run(self.adapter, stored_kv)
        return work


def _rows(plan: BlendPlan, sinks: Tensor, attention: Tensor | None) -> Tensor:
    """Return the rows that are computed in all layers: (rows,)."""
    rows = [rows_of(plan, "miss"), sinks]
    if chooses_any(plan):
        rows.append(SELECTORS[plan.selector](plan, attention).cpu())
    found: Tensor = torch.cat(rows).unique()
    return found


def _refused(plan: BlendPlan, own: Origin) -> dict[int, str]:
    """Return why segments are not of what the engine is now, by their indices."""
    found = {}
    for index, one in enumerate(plan.segments):
        origin = own if one.kind == "miss" or one.origin is None else one.origin
        if origin.adapter_digest != own.adapter_digest:
            found[index] = "another adapter"
        elif origin != own:
            found[index] = "another rotation" if origin.rope != own.rope else "other weights"
    return found


def _computed_anyway(plan: BlendPlan) -> frozenset[int]:
    """Return the segments that are not to be loaded, by their indices.

    Those ``approx`` ones all of whose rows are to be computed; and the ``exact`` ones too when
    that is all of them: whoever wants every row computed wants the full prefill. Behind a loaded
    prefix rows are summed in another order: 2e-5 of a logit in float32, and as far as that is
    the engine's own prefix cache from its full prefill.
    """
    shares = plan.shares()
    whole = {index for index, share in shares.items() if share >= 1}
    if whole and len(whole) == len(shares):
        whole.update(index for index, _ in plan.of_kind("exact"))
    return frozenset(whole)


def _whole(tokens: Sequence[int]) -> BlendPlan:
    """Return the plan that computes all of *tokens*."""
    return BlendPlan(tuple(tokens), (Segment(0, len(tokens), "miss"),))


def _padded(result: BlendResult, count: int) -> list[LayerKV]:
    """Return copies of the KV of *result* with space for *count* more tokens."""
    return [(pad(k, (0, 0, 0, count)), pad(v, (0, 0, 0, count))) for k, v in result.kv]
