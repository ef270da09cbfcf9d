"""Blends prompts in an engine: loads stored rows, moves them and recomputes some of them.

CacheBlend (Yao et al., arXiv 2405.16444) with the exact causal mask: a row at position p attends
to keys up to p, whichever rows are recomputed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvstore.client.blend import selectors
from kvstore.client.blend.layer_pass import (
    EngineAdapter,
    LayerKV,
    LayerPass,
    StoredKV,
    Watch,
    place_segments,
)
from kvstore.client.blend.plan import BlendPlan, Origin
from kvstore.proto.errors import DeadlineError, InvalidRequestError, KVStoreError

LAYER_WAIT_S = 10.0
PROBE_ROWS = 64
"""The prompt's last rows, whose attention is measured."""
MAX_SINKS = 4
"""Limit of leading tokens computed as sinks; most models have one sink, a few up to four."""


class LayerSource(Protocol):
    """Provides the stored KV of a plan's segments. One thread reads all layers, in order."""

    def layer(self, i: int) -> Mapping[int, LayerKV]:
        """Return layer *i* of every ``exact`` and ``approx`` segment, by the segment's index.

        Blocks until it is loaded, at most to its own deadline. May raise any KVStoreError: the
        prompt is then computed. A missing segment is a layer that is not stored.
        """

    def narrow(self, rows: Sequence[int]) -> None:
        """Before the first layer, announce that *rows* (positions) are computed in all layers.

        They need not be loaded; their contents are never read.
        """


class MemorySource:
    """A source in memory. *stored*: layers of K and V, by the segment's index."""

    def __init__(self, stored: Mapping[int, Sequence[LayerKV]]) -> None:
        self._stored = stored

    def layer(self, i: int) -> Mapping[int, LayerKV]:
        """Return layer *i* of every segment."""
        return {index: layers[i] for index, layers in self._stored.items()}

    def narrow(self, rows: Sequence[int]) -> None:
        """Do nothing: all rows are in memory."""


class LayerLoader(AbstractContextManager["LayerLoader"]):
    """Reads *layers* of *source* ahead, in a thread that a with statement ends.

    *patience_s*: how long ``take`` waits for all of them; for one at most LAYER_WAIT_S.
    ``load_s`` is the source's time, ``wait_s`` the part that was waited for.
    """

    def __init__(self, source: LayerSource, layers: int, patience_s: float) -> None:
        self._source = source
        self._patience_s = patience_s
        self.load_s = 0.0
        self.wait_s = 0.0
        self._thread = ThreadPoolExecutor(1, "kvstore-blend")
        self._pending = deque(self._thread.submit(self._load, i) for i in range(layers))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error a source's call in progress is left to its own deadline.
        self._thread.shutdown(wait=kind is None, cancel_futures=True)

    def take(self) -> Mapping[int, LayerKV]:
        """Return the next layer. Raises DeadlineError, and what the source raises."""
        pending, started = self._pending.popleft(), time.perf_counter()
        limit_s = max(0.0, min(LAYER_WAIT_S, self._patience_s - self.wait_s))
        try:
            return pending.result(limit_s)
        except TimeoutError as error:
            if pending.done():  # the source's own deadline
                raise
            raise DeadlineError(f"a layer did not arrive within {limit_s:.3g} s") from error
        finally:
            self.wait_s += time.perf_counter() - started

    def _load(self, layer: int) -> Mapping[int, LayerKV]:
        started = time.perf_counter()
        found = self._source.layer(layer)
        self.load_s += time.perf_counter() - started
        return found


@dataclass(frozen=True, slots=True)
class BlendReport:
    """A report on one prompt.

    ``selected``: positions of the ``approx`` rows that were computed through all layers.
    ``rows``: how many rows each layer computed. If measured: ``deviation``, the squared distance
    of fresh values from stored at CHECK_LAYER, and ``attention``, each token's from the prompt's
    own rows, (tokens,) both. ``load_s``: the source's time; ``wait_s``: the part that was waited
    for. ``refused``: why segments were computed instead, by index; ``failure``: why the whole
    prompt was.
    """

    selected: Tensor
    rows: tuple[int, ...]
    deviation: Tensor | None = None
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
    was computed in another context: it may serve this request, but must never be stored under
    the prompt's own keys or kept as a prefix. ``weights`` names the weights of all of it, as in
    ``Origin``; None: they changed meanwhile, and it must not be stored either.
    """

    logits: Tensor
    kv: tuple[LayerKV, ...]
    is_blended: bool
    report: BlendReport
    weights: bytes | None = None


class Blender:
    """Blends prompts of one engine. As thread-safe as its adapter is.

    *sinks*: how many leading tokens of a prompt may be attention sinks of the others (Xiao et
    al., arXiv 2309.17453, section 3.1), 0 to 4. They are always computed unless exact: a stored
    chunk has no sink there, and a sink from its own prompt is none after other tokens. Raises
    InvalidRequestError.
    """

    def __init__(self, adapter: EngineAdapter, *, sinks: int = 1) -> None:
        if not 0 <= sinks <= MAX_SINKS:
            raise InvalidRequestError("sinks", sinks, f"use 0 to {MAX_SINKS}")
        self.adapter = adapter
        self._sinks = sinks

    @torch.inference_mode()
    def compile(self, tokens: Sequence[int], *, sink: Sequence[int]) -> list[LayerKV]:
        """Return K and V of *tokens*, (kv_heads, tokens, head_dim) a layer, computed after *sink*.

        *sink*: the system prompt that will precede them, or at least BOS; their ``src_pos`` is its
        length. Without one their first token becomes an attention sink, which is right only at
        the start of a prompt.
        """
        done = self.prefill((*sink, *tokens))
        first = len(sink)
        return [(k[:, first:].clone(), v[:, first:].clone()) for k, v in done.kv]

    @torch.inference_mode()
    def prefill(
        self, tokens: Sequence[int], *, logits_from: int = 0, watch: Watch | None = None
    ) -> BlendResult:
        """Compute all of *tokens*; return the logits of those from *logits_from* on.

        Raises InvalidRequestError for a position that is not in the prompt.
        """
        if not 0 <= logits_from < len(tokens):
            fix = f"give a position of the prompt, 0 to {len(tokens) - 1}"
            raise InvalidRequestError("logits_from", logits_from, fix)
        own, started = self.adapter.origin, time.perf_counter()
        return self._finished(self._computed(tokens, logits_from, watch), own, started)

    @torch.inference_mode()
    def decode(
        self, tokens: Sequence[int], result: BlendResult, count: int
    ) -> tuple[list[int], Tensor]:
        """Return *count* tokens, decoded greedily after *tokens*, and their logits."""
        kv, logits = _padded(result, count), [result.logits[-1:]]
        found = [int(logits[0].argmax())]
        while len(found) < count:
            logits.append(self._extend((*tokens, *found), kv, len(tokens) + len(found) - 1))
            found.append(int(logits[-1].argmax()))
        return found, torch.cat(logits)

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], result: BlendResult, follows: Sequence[int]) -> Tensor:
        """Return the teacher-forced logits of *follows* after *tokens*: (follows, vocabulary)."""
        found = self._extend((*tokens, *follows), _padded(result, len(follows)), len(tokens))
        return torch.cat([result.logits[-1:], found[:-1]])

    def _extend(self, tokens: Sequence[int], kv: Sequence[LayerKV], first: int) -> Tensor:
        """Compute *tokens* from *first* on, extending *kv*; return their logits."""
        there = [(k[:, : len(tokens)], v[:, : len(tokens)]) for k, v in kv]
        work = LayerPass(tokens, torch.arange(first, len(tokens)), first)
        return work.run(self.adapter, there.__getitem__)

    @torch.inference_mode()
    def blend(
        self, plan: BlendPlan, source: LayerSource, *, patience_s: float = math.inf
    ) -> BlendResult:
        """Return the last segment's logits and the prompt's KV, by *plan*.

        With a ratio of 1 nothing is loaded: the result is the engine's own full prefill,
        bit-identical on one device. Segments of another adapter or rotation are computed; if the
        source fails or takes longer than *patience_s* in all, the whole prompt is. The report has
        the reasons. Raises InvalidRequestError for an unknown selector.
        """
        selectors.check_selector(plan.selector)
        own, started, failure = self.adapter.origin, time.perf_counter(), ""
        refused = _refused(plan, own)
        plan = plan.as_miss(_computed_anyway(plan) | refused.keys())
        try:
            result = self._blended(plan, source, patience_s)
        except KVStoreError as error:
            failure = f"{type(error).__name__}: {error}"
            result = self._computed(plan.tokens, plan.segments[-1].start)
        report = replace(result.report, refused=refused, failure=failure)
        return self._finished(replace(result, report=report), own, started)

    def _finished(self, result: BlendResult, own: Origin, started: float) -> BlendResult:
        """Return *result*, started with the engine's origin *own*, with its time and weights."""
        report = replace(result.report, total_s=time.perf_counter() - started)
        weights = own.weights if self.adapter.origin == own else None
        return replace(result, report=report, weights=weights)

    def _computed(
        self, tokens: Sequence[int], logits_from: int, watch: Watch | None = None
    ) -> BlendResult:
        work = LayerPass(tokens, torch.arange(len(tokens)), logits_from, watch=watch)
        logits = work.run(self.adapter)
        report = BlendReport(work.rows[:0], tuple(work.row_counts))
        return BlendResult(logits, tuple(work.kv), is_blended=False, report=report)

    def _blended(self, plan: BlendPlan, source: LayerSource, patience_s: float) -> BlendResult:
        last = plan.segments[-1].start
        if plan.count("miss") == len(plan.tokens):
            return self._computed(plan.tokens, last)
        adapter, sinks = self.adapter, selectors.sink_rows(plan, self._sinks)
        chosen, attention = partial(selectors.computed_rows, plan, sinks), None
        rows, measure = selectors.rows_of(plan, "approx", "miss"), None
        if selectors.chooses_any(plan):
            measure = selectors.measure_of(plan, adapter.n_layers)
        if measure is None:
            rows = chosen(None)
            source.narrow(rows.tolist())
        with LayerLoader(source, adapter.n_layers, patience_s) as loader:
            kv_of: StoredKV = lambda at: place_segments(adapter, plan, at, loader.take())  # noqa: E731
            if measure == "attention":
                kv, attention = self._probed(plan, kv_of, sinks)
                rows, kv_of = chosen(attention), kv.__getitem__
            work = LayerPass(plan.tokens, rows, last, chosen if measure == "deviation" else None)
            logits = work.run(adapter, kv_of)
        is_approx = torch.isin(work.rows, selectors.rows_of(plan, "approx").to(work.rows.device))
        found = (work.rows[is_approx], tuple(work.row_counts), work.deviation, attention)
        report = BlendReport(*found, loader.load_s, loader.wait_s)
        return BlendResult(logits, tuple(work.kv), plan.count("approx") > 0, report)

    def _probed(
        self, plan: BlendPlan, stored_kv: StoredKV, sinks: Tensor
    ) -> tuple[list[LayerKV], Tensor]:
        """Compute gaps and suffix only; return K and V, and the last rows' attention: (tokens,)."""
        end, masses = len(plan.tokens), list[Tensor]()
        rows = torch.cat([selectors.rows_of(plan, "miss"), sinks]).sort().values
        first = max(plan.segments[-1].start, end - PROBE_ROWS)

        def watch(layer: int, query: Tensor, positions: Tensor, kv: LayerKV) -> None:
            is_read = positions >= first
            read = (query[:, is_read], positions[is_read], kv)
            masses.append(self.adapter.attention_mass(layer, *read))

        work = LayerPass(plan.tokens, rows, end, watch=watch)
        work.run(self.adapter, stored_kv)
        return work.kv, reduce(torch.add, masses)


def _refused(plan: BlendPlan, own: Origin) -> dict[int, str]:
    """Return why segments do not match the engine's current origin, by index."""
    found = {}
    for index, one in enumerate(plan.segments):
        origin = one.origin or own
        if origin.adapter_digest != own.adapter_digest:
            found[index] = "another adapter"
        elif origin != own:
            found[index] = "another rotation" if origin.rope != own.rope else "other weights"
    return found


def _computed_anyway(plan: BlendPlan) -> set[int]:
    """Return the indices of ``approx`` segments with all rows to be computed.

    If that is all of them, the ``exact`` ones, too: after a loaded prefix rows are summed in
    another order than in a full prefill (2e-5 of a logit in float32).
    """
    shares = plan.shares()
    whole = {index for index, share in shares.items() if share >= 1}
    if whole and len(whole) == len(shares):
        whole.update(index for index, _ in plan.of_kind("exact"))
    return whole


def _padded(result: BlendResult, count: int) -> list[LayerKV]:
    return [(pad(k, (0, 0, 0, count)), pad(v, (0, 0, 0, count))) for k, v in result.kv]
