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
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvstore.client.blend.layer_pass import (
    EngineAdapter,
    LayerKV,
    Pass,
    Stored,
    approx_mask,
    place,
    rows_of_kind,
)
from kvstore.client.blend.plan import BlendPlan, Origin, Segment
from kvstore.client.blend.selectors import Selector, head_rows, selector_of, sink_rows, wants_any
from kvstore.proto.errors import DeadlineError, InvalidRequestError, KVStoreError


class LayerSource(Protocol):
    """Gives what is stored of a plan's segments.

    One thread asks for layers, in rising order; ``narrow`` may come before or meanwhile from
    another.
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
    """Asks *source* for layers in order, in a thread of its own, one layer ahead.

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
        self._layers = list(layers)
        self._limit_s = wait_s
        self._patience_s = patience_s
        self._thread = ThreadPoolExecutor(1, "kvstore-blend")
        self._next: Future[Mapping[int, LayerKV]] | None = None
        self.load_s = 0.0
        self.wait_s = 0.0

    def __enter__(self) -> LayerLoader:
        self._ask()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=kind is None, cancel_futures=True)

    def take(self) -> Mapping[int, LayerKV]:
        """Return the next layer and ask for the one behind it.

        Raises DeadlineError, and what the source raises.
        """
        pending = self._next
        if pending is None:
            raise DeadlineError("no layer is left to take")
        started = time.perf_counter()
        limit_s = max(0.0, min(self._limit_s, self._patience_s - self.wait_s))
        try:
            found = pending.result(limit_s)
        except WaitedTooLong as error:
            if pending.done():  # the source's own deadline
                raise
            self.wait_s += time.perf_counter() - started
            raise DeadlineError(f"a layer did not come within {limit_s:.3g} s") from error
        self.wait_s += time.perf_counter() - started
        self._ask()
        return found

    def narrow(self, rows: Sequence[int], from_layer: int) -> None:
        """Tell the source which rows it need not bring any more."""
        self._source.narrow(rows, from_layer)

    def _ask(self) -> None:
        layer = self._layers.pop(0) if self._layers else None
        self._next = None if layer is None else self._thread.submit(self._load, layer)

    def _load(self, layer: int) -> Mapping[int, LayerKV]:
        started = time.perf_counter()
        found = self._source.layer(layer)
        self.load_s += time.perf_counter() - started
        return found


@dataclass(frozen=True, slots=True)
class BlendReport:
    """What the engine can tell the store of one blend.

    ``selected``: positions of the ``approx`` rows that were computed through all layers.
    ``deviation``: squared distance of fresh values from stored, (tokens,), by check layer.
    ``rows``: how many rows each layer computed. ``refused``: why a segment was computed
    instead, by its index. ``attention``: what each token got of the prompt's own rows,
    (tokens,), if it was asked for. ``failure``: why the whole prompt was; empty if it was not.
    ``load_s``: what the source took; ``wait_s``: what of it computing waited for.
    """

    selected: Tensor
    rows: tuple[int, ...]
    deviation: Mapping[int, Tensor]
    refused: Mapping[int, str]
    attention: Tensor | None = None
    failure: str = ""
    load_s: float = 0.0
    wait_s: float = 0.0
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
    weights: bytes | None


LAYER_WAIT_S = 10.0
PROBE_ROWS = 64
"""How many of the prompt's last rows are asked what they attend to."""
MAX_SINKS = 4
"""First tokens of a prompt that are computed; models have one sink, a few have up to four."""


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
        self._adapter = adapter
        self._sinks = sinks
        self._layer_wait_s = layer_wait_s

    @property
    def n_layers(self) -> int:
        """Of the engine."""
        return self._adapter.n_layers

    @property
    def weights(self) -> bytes:
        """A name of the engine's weights as they are now; empty until they change in place."""
        return self._adapter.origin.weights

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
        order = _Order(self._adapter, self._adapter.origin, plan, {}, time.perf_counter())
        return self._computed(order, logits_from, "")

    @torch.inference_mode()
    def decode(
        self, tokens: Sequence[int], result: BlendResult, count: int
    ) -> tuple[list[int], Tensor]:
        """Return the likeliest *count* tokens after *tokens*, whose KV is that of *result*.

        One after the other. With the logits that they were chosen by: (count, vocabulary).
        """
        kv, logits = _with_room(result, count), [result.logits[-1:]]
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
        kv = _with_room(result, len(follows))
        found = self._behind((*tokens, *follows), kv, len(tokens))
        return torch.cat([result.logits[-1:], found[:-1]])

    def _behind(self, tokens: Sequence[int], kv: Sequence[LayerKV], first: int) -> Tensor:
        """Compute *tokens* from *first* on behind *kv*, and into it; return their logits."""
        count = len(tokens)
        work = Pass(_whole(tokens), torch.arange(first, count), first)
        return work.run(
            self._adapter, lambda layer: (kv[layer][0][:, :count], kv[layer][1][:, :count])
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
        selector = selector_of(plan.selector)
        started = time.perf_counter()
        own = self._adapter.origin
        refused = _refused(plan, own)
        plan = plan.as_miss(_computed_anyway(plan)).as_miss(frozenset(refused))
        order = _Order(self._adapter, own, plan, refused, started, patience_s)
        try:
            return self._blended(order, source, selector)
        except KVStoreError as error:
            failure = f"{type(error).__name__}: {error}"
        return self._computed(order, plan.segments[-1].start, failure)

    def _computed(self, order: _Order, logits_from: int, failure: str) -> BlendResult:
        """Compute the whole prompt."""
        plan = order.plan
        work = Pass(plan, torch.arange(len(plan.tokens)), logits_from, is_engines_own=True)
        logits = work.run(self._adapter, _nothing_stored)
        return order.result(work, logits, failure=failure)

    def _blended(self, order: _Order, source: LayerSource, selector: Selector) -> BlendResult:
        plan = order.plan
        if plan.count("miss") == len(plan.tokens):
            return self._computed(order, plan.segments[-1].start, "")
        chooses, sinks = wants_any(plan), sink_rows(plan, self._sinks)
        checks = selector.check_layers(plan) if chooses else ()
        checks = tuple(layer for layer in checks if layer < self._adapter.n_layers)
        asks = chooses and selector.needs_attention and not checks
        rows = None if asks else _rows(plan, selector, None, checks, sinks)
        if rows is not None and not checks:  # before anything is asked for
            source.narrow(rows.tolist(), 0)
        asked, wait_s = self._asked(plan, checks), self._layer_wait_s
        with LayerLoader(source, asked, wait_s, order.patience_s) as loader:
            stored, attention = self._loaded(plan, loader, checks), None
            if rows is None:
                attention, stored = self._probed(plan, stored, sinks)
                rows = _rows(plan, selector, attention, checks, sinks)
                loader.narrow(rows.tolist(), 0)
            work = Pass(plan, rows, plan.segments[-1].start, checks, selector, sinks=sinks)
            work.narrow = lambda kept, layer: loader.narrow(kept.tolist(), layer)
            logits = work.run(self._adapter, stored)
        return order.result(work, logits, attention, loader)

    def _asked(self, plan: BlendPlan, checks: tuple[int, ...]) -> range:
        """Return the layers to ask for: up to a check layer all ``approx`` rows are computed."""
        first = min(checks, default=0) if plan.count("exact") == 0 else 0
        return range(first, self._adapter.n_layers)

    def _loaded(self, plan: BlendPlan, loader: LayerLoader, checks: tuple[int, ...]) -> Stored:
        asked = self._asked(plan, checks)
        first_check = min(checks, default=0)
        exact = plan.without("approx")

        def stored(layer: int) -> LayerKV:
            loaded = loader.take() if layer in asked else {}
            used = exact if layer < first_check else plan
            return place(self._adapter, used, layer, loaded)

        return stored

    def _probed(
        self, plan: BlendPlan, stored: Stored, sinks: Tensor
    ) -> tuple[Tensor | None, Stored]:
        """Return the attention of the prompt's own rows, and the layers that were loaded."""
        rows = torch.cat([rows_of_kind(plan, "miss"), sinks]).sort().values
        end = len(plan.tokens)
        first = max(plan.segments[-1].start, end - PROBE_ROWS)
        probe = torch.arange(first, end, device=self._adapter.device)
        work = Pass(plan, rows, end, probe=probe)
        work.run(self._adapter, stored)
        return work.attention, work.kv.__getitem__


@dataclass(frozen=True, slots=True)
class _Order:
    """One call of ``blend``: what the engine was at its start, what is left of its plan, and since
    when.
    """

    adapter: EngineAdapter
    own: Origin
    plan: BlendPlan
    refused: dict[int, str]
    started: float
    patience_s: float = math.inf

    def result(
        self,
        work: Pass,
        logits: Tensor,
        attention: Tensor | None = None,
        loader: LayerLoader | None = None,
        *,
        failure: str = "",
    ) -> BlendResult:
        is_approx = approx_mask(self.plan, work.selected.device)
        is_blended = bool(is_approx.any()) and not failure and loader is not None
        report = BlendReport(
            work.selected[is_approx[work.selected]] if is_blended else work.selected[:0],
            tuple(work.row_counts),
            work.deviation,
            self.refused,
            attention,
            failure,
            loader.load_s if loader else 0.0,
            loader.wait_s if loader else 0.0,
            time.perf_counter() - self.started,
        )
        weights = self.own.weights if self.adapter.origin == self.own else None
        return BlendResult(logits, tuple(work.kv), is_blended, report, weights)


def _refused(plan: BlendPlan, own: Origin) -> dict[int, str]:
    """Return why segments are not of what the engine is now, by their indices."""
    found = {}
    for index, segment in enumerate(plan.segments):
        origin = segment.origin
        if segment.kind == "miss" or origin is None or origin == own:
            continue
        if origin.adapter_digest != own.adapter_digest:
            found[index] = "another adapter"
        else:
            found[index] = "another rotation" if origin.rope != own.rope else "other weights"
    return found


def _rows(
    plan: BlendPlan,
    selector: Selector,
    attention: Tensor | None,
    checks: tuple[int, ...],
    sinks: Tensor,
) -> Tensor:
    """Return the rows of the first layer: (rows,)."""
    if checks:
        return rows_of_kind(plan, "approx", "miss")
    rows = [rows_of_kind(plan, "miss"), sinks]
    if wants_any(plan):
        rows += [head_rows(plan), selector.static(plan, attention).cpu()]
    found: Tensor = torch.cat(rows).unique()
    return found


def _whole(tokens: Sequence[int]) -> BlendPlan:
    """Return the plan that computes all of *tokens*."""
    return BlendPlan(tuple(tokens), (Segment(0, len(tokens), "miss"),))


def _with_room(result: BlendResult, count: int) -> list[LayerKV]:
    """Return copies of the KV of *result* with room for *count* more tokens."""
    return [(pad(k, (0, 0, 0, count)), pad(v, (0, 0, 0, count))) for k, v in result.kv]


def _nothing_stored(layer: int) -> LayerKV:
    raise LookupError(f"layer {layer}: nothing is stored of a prompt that is computed whole")


def _computed_anyway(plan: BlendPlan) -> frozenset[int]:
    """Return the segments that are not to be loaded, by their indices.

    Those ``approx`` ones all of whose rows are to be computed; and the ``exact`` ones too when
    that is all of them: whoever wants every row computed wants the full prefill. Behind a loaded
    prefix rows are summed in another order: 2e-5 of a logit in float32, and as far as that is
    the engine's own prefix cache from its full prefill.
    """
    shares = {
        index: plan.ratio if segment.ratio is None else segment.ratio
        for index, segment in plan.of_kind("approx")
    }
    whole = {index for index, share in shares.items() if share >= 1}
    if whole and len(whole) == len(shares):
        whole.update(index for index, _ in plan.of_kind("exact"))
    return frozenset(whole)
