"""Blending's access to the store: plans and layers from a SegmentMatch, and stores of prefills."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from kvstore.client.blend.engine import Blender, BlendResult
from kvstore.client.blend.layer_pass import EngineAdapter, LayerKV
from kvstore.client.blend.plan import BlendPlan, NamedChunk, Origin, Segment, SegmentRange
from kvstore.client.chunk import Chunk
from kvstore.client.client import Client
from kvstore.client.decode import Layer
from kvstore.client.segments import FoundChunk, SegmentMatch, SegmentQuery
from kvstore.client.transports.base import Put
from kvstore.proto.blend import ChunkReport, ContextMass, ReuseReport
from kvstore.proto.errors import InvalidRequestError, KVStoreError, ModelError
from kvstore.proto.keys import chunk_key
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import Model

SAMPLED_ROWS = 8
"""Rows of a chunk, evenly spaced, whose attention is measured."""
SAMPLED_LAYERS = 8
"""Limit of layers measured, evenly spaced."""
MAX_CONTEXT = 16
"""The nearest preceding chunks that are reported; a server accepts no more."""


class StoreSource(AbstractContextManager["StoreSource"]):
    """A LayerSource over the reply to a Resolve, and its ``plan``.

    *tokens* are the prompt's. Chunks that are consecutive here and in their own prompt form one
    segment. The prompt's last chunk is always computed, because its logits are needed. Leaving
    the ``with`` ends the loads; the owner of *resolved* releases it. Raises ModelError for models
    with anything but one group of attention layers.
    """

    def __init__(self, resolved: SegmentMatch, tokens: Sequence[int], model: Model) -> None:
        kinds = [group.kind.name for group in model.layer_groups]
        if kinds != ["attention"]:
            raise ModelError("layer_groups", kinds, "only one group of attention layers is blended")
        (group,) = model.layer_groups
        self._resolved = resolved
        self._layer_ids = list(group.layer_ids)
        self._dtype: torch.dtype = getattr(torch, group.dtype.name)
        self._heads, self._head_dim = group.kv_heads, group.head_dim
        origin = Origin(resolved.found.rope, model.adapter_digest, resolved.terms.weights)
        self.plan, self._chunks = _planned(tokens, resolved, origin)
        self.left_out: frozenset[int] = frozenset()
        """Positions that are not loaded: ``stored`` is undefined there."""
        self._tensors: dict[int, list[LayerKV]] = {}
        self._layers: Generator[Layer, None, None] | None = None
        self._is_closed = False

    @property
    def loaded_bytes(self) -> int:
        """The stored bytes of the plan's segments, without rows that were left out."""
        return sum(
            chunk.best.size_bytes * (count - len(self._unwanted(chunk))) // count
            for chunk, count in ((one, one.wanted.tokens) for one in self.chunks())
        )

    @property
    def token_bytes(self) -> float:
        """The stored bytes per token of the plan's segments, all layers; 0 without segments."""
        tokens = sum(chunk.wanted.tokens for chunk in self.chunks())
        return sum(chunk.best.size_bytes for chunk in self.chunks()) / max(1, tokens)

    @property
    def can_skip_rows(self) -> bool:
        """Whether rows passed to ``narrow`` are left out: for raw frames, if none is compared.

        Frames of a codec are smaller than their KV, and are loaded whole.
        """
        raw = 2 * len(self._layer_ids) * self._heads * self._head_dim * self._dtype.itemsize
        return not self._resolved.found.is_shadow and self.token_bytes >= raw

    def chunks(self) -> Iterator[FoundChunk]:
        """Yield the chunks in the plan."""
        return (chunk for chunks in self._chunks.values() for chunk in chunks)

    def stored(self, index: int) -> Sequence[LayerKV]:
        """Return all layers of a segment as stored, valid once every layer has been read."""
        return self._tensors[index]

    def layer(self, i: int) -> Mapping[int, LayerKV]:
        """Return layer *i* of every segment that has all its chunks, on the CPU.

        Waits for it, to the client's deadline; each once and in order. Raises KVStoreErrors.
        """
        if self._is_closed or not self._chunks:
            return {}
        try:
            if self._layers is None:
                self._layers = self._begun()
            layer = next(self._layers, None)
        finally:
            if self._is_closed:  # close() did not wait for this call
                self.close()
        if layer is None or layer.id != self._layer_ids[i]:
            return {}
        ends = accumulate(map(len, self._chunks.values()))
        count, all_ends = len(layer.tensors), zip(self._chunks, ends, strict=True)
        return {index: self._tensors[index][i] for index, end in all_ends if end <= count}

    def _begun(self) -> Generator[Layer, None, None]:
        out = []
        for index, run in self._chunks.items():
            start = self.plan.segments[index].start
            shape = (self._heads, len(self.plan.segments[index]), self._head_dim)
            new = partial(torch.empty, shape, dtype=self._dtype)
            self._tensors[index] = layers = [(new(), new()) for _ in self._layer_ids]
            for chunk in run:
                span = slice(chunk.wanted.start - start, chunk.wanted.stop - start)
                out.append([[(k[:, span], v[:, span]) for k, v in layers]])
        chunks = list(self.chunks())
        skipped = SkippedRows.of({at: self._unwanted(one) for at, one in enumerate(chunks)})
        return self._resolved.layers(chunks, out, skipped if len(skipped) else None)

    def _unwanted(self, chunk: FoundChunk) -> list[int]:
        """Return the rows of a chunk that are left out, relative to its first."""
        if chunk.is_exact or not self.left_out:
            return []
        start, stop = chunk.wanted.start, chunk.wanted.stop
        return [at - start for at in range(start, stop) if at in self.left_out]

    def narrow(self, rows: Sequence[int]) -> None:
        """Leave *rows* out, unless the request is compared with a full prefill: it needs all."""
        if not self._resolved.found.is_shadow:
            self.left_out = frozenset(rows)

    def close(self) -> None:
        """End the loads. Idempotent. A thread waiting for a layer ends them when it returns."""
        self._is_closed = True
        if self._layers is not None:
            with suppress(ValueError):  # raised by a running generator
                self._layers.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _planned(
    tokens: Sequence[int], resolved: SegmentMatch, origin: Origin
) -> tuple[BlendPlan, dict[int, list[FoundChunk]]]:
    """Return the plan, and the chunks of its stored segments by index."""
    runs: list[list[FoundChunk]] = []
    for one in resolved.chunks():
        if one.wanted.stop >= len(tokens):
            continue
        if runs and _continues(runs[-1][-1], one):
            runs[-1].append(one)
        else:
            runs.append([one])
    segments: list[Segment] = []
    chunks, at, ratio = {}, 0, resolved.found.gate.ratio
    for run in runs:
        first, stop = run[0], run[-1].wanted.stop
        if first.wanted.start > at:
            segments.append(Segment(at, first.wanted.start, "miss"))
        chunks[len(segments)] = run
        priority = b"".join(chunk.priority for chunk in run)
        segments.append(
            Segment(
                first.wanted.start,
                stop,
                "exact" if first.is_exact else "approx",
                # A single chunk's digest is checked against the tokens; in a run each frame is.
                chunk_id=first.wanted.content if len(run) == 1 else b"",
                src_pos=first.best.position,
                ratio=first.ratio if first.ratio > ratio else None,
                scores=tuple(level / 255 for level in priority) or None,
                origin=origin,
                extra=resolved.terms.names,
            )
        )
        at = stop
    segments.append(Segment(at, len(tokens), "miss"))
    return BlendPlan(tuple(tokens), tuple(segments), ratio=ratio), chunks


def _continues(last: FoundChunk, one: FoundChunk) -> bool:
    """Return whether *one* follows *last* here and where both were computed."""
    return (
        last.wanted.stop == one.wanted.start
        and last.best.digest == one.best.parent
        and (last.is_exact, last.ratio) == (one.is_exact, one.ratio)
        and last.best.position + last.wanted.tokens == one.best.position
        and bool(last.priority) == bool(one.priority)
    )


def store_prefill(
    client: Client,
    result: BlendResult,
    tokens: Sequence[int],
    ranges: Sequence[SegmentRange],
    extra: Sequence[bytes] = (),
    attention: ReuseReport | None = None,
) -> list[Put]:
    """Put a full prefill's KV, cut so that its documents, *ranges*, are found in other prompts.

    Return each chunk's outcome. *attention*, from ``measured_prefill``, is reported to the store
    afterwards; chunks are selected and kept by how little they depend on others. Stores nothing
    if the weights changed meanwhile. Raises InvalidRequestError for blended KV, and KVStoreErrors.
    """
    if result.is_blended:
        fix = "it is only for its own request; store a full prefill's"
        raise InvalidRequestError("result", "blended KV", fix)
    if result.weights is None:
        return []
    names = SegmentQuery(extra=tuple(extra), weights=result.weights).names
    chunks = []
    for segment in client.name_segments(tokens, ranges, names):
        for one in segment.chunks:
            span, key = slice(one.start, one.stop), chunk_key(client.namespace, one.digest)
            kv = [[(k[:, span].cpu(), v[:, span].cpu()) for k, v in result.kv]]
            chunk = Chunk(key, kv, parent=one.parent, position=one.start, content=one.content)
            chunks.append(chunk)
    puts = client.put_chunks(chunks)
    if attention is not None and attention.chunks:
        with suppress(KVStoreError):  # they are stored, but ranked without it
            client.report_reuse(attention)
    return puts


def measured_prefill(
    adapter: EngineAdapter,
    tokens: Sequence[int],
    chunks: Sequence[NamedChunk],
    rows: int = SAMPLED_ROWS,
) -> tuple[BlendResult, ReuseReport]:
    """Compute all of *tokens*; return the result, and the attention of each of its *chunks*.

    Cache-Craft's context impact (Agarwal et al., SIGMOD 2025, arXiv 2502.15734, equations 3 and
    4): attention between a chunk and those before it, and within it, weights summed over its
    tokens, mean over heads and layers. Measured on at most *rows* rows of each chunk and a few
    layers, a small part of the prefill. Chunks with weights that are not numbers are omitted.
    """
    sampled = [_spread(one.start, one.stop, rows).to(adapter.device) for one in chunks]
    layers = _spread(0, adapter.n_layers, SAMPLED_LAYERS).tolist()
    # (chunks, tokens): mean weight of a row, summed over the heads of the sampled layers.
    sums, heads = torch.zeros((len(chunks), len(tokens)), dtype=torch.float64), 0

    def watch(layer: int, query: Tensor, positions: Tensor, kv: LayerKV) -> None:
        nonlocal heads
        if layer in layers:
            for total, places in zip(sums, sampled, strict=True):  # a row's index is its position
                mass = adapter.attention_mass(layer, query[:, places], positions[places], kv)
                total += mass.double().cpu()
            heads += len(query)

    result = Blender(adapter).prefill(tokens, watch=watch)
    reports = []
    for one, total in zip(chunks, sums, strict=True):
        share = one.tokens * total / heads
        before = [other for other in chunks if other.stop <= one.start][-MAX_CONTEXT:]
        *masses, own = (float(share[c.start : c.stop].sum()) for c in (*before, one))
        if not all(0 <= mass < math.inf for mass in (*masses, own)):
            continue
        context: dict[bytes, tuple[int, float]] = {}  # each content once, at its last place
        for other, mass in zip(before, masses, strict=True):
            _, known = context.pop(other.content, (0, 0.0))
            context[other.content] = (other.tokens, mass + known)
        seen = tuple(ContextMass(content, *known) for content, known in context.items())
        reports.append(ChunkReport(one.digest, context=seen, intra_mass=own))
    return result, ReuseReport(chunks=tuple(reports))


def _spread(start: int, stop: int, count: int) -> Tensor:
    """Return at most *count* evenly spaced numbers in [start, stop)."""
    if stop - start <= count:
        return torch.arange(start, stop)
    steps = (torch.arange(count) + 0.5) * ((stop - start) / count)
    return start + steps.long()
