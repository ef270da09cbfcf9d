"""A blend's KV out of the store: the plan that a Resolve answers, and its layers as they come."""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from kvstore.client.blend.engine import Blender, BlendResult
from kvstore.client.blend.layer_pass import EngineAdapter, LayerKV, Run, positions_of
from kvstore.client.blend.plan import BlendPlan, Origin, Segment
from kvstore.client.blend.segments import NamedChunk, SegmentRange
from kvstore.client.chunk import Chunk
from kvstore.client.client import Client
from kvstore.client.layers import Layer
from kvstore.client.resolving import FoundChunk, Resolved, ResolveTerms
from kvstore.client.transport import Put
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import ContextMass
from kvstore.proto.errors import InvalidRequestError, KVStoreError, ModelError
from kvstore.proto.keys import chunk_key
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import LayerKind, Model

_HIGHEST_PRIORITY = 255


@dataclass(frozen=True, slots=True)
class _Run:
    """Chunks that stood behind one another where they were computed: one segment of a plan."""

    chunks: tuple[FoundChunk, ...]

    @property
    def start(self) -> int:
        return self.chunks[0].asked.start

    @property
    def stop(self) -> int:
        return self.chunks[-1].asked.stop


class StoreSource:
    """A LayerSource over the answer to a Resolve, and the ``plan`` that it is the source of.

    *tokens* are the prompt's. Consecutive chunks that stood behind one another in their own
    prompt, too, are one segment. The prompt's last chunk is always computed, as its logits are
    wanted. Layer i + 1 is on its way while layer i is used. Leave the ``with`` to end the
    loads; *resolved* is its owner's to release.

    Raises ModelError for models with anything but one attention layer a number.
    """

    def __init__(self, resolved: Resolved, tokens: Sequence[int], representation: Model) -> None:
        self._resolved = resolved
        self._layer_ids = _attention_layers(representation)
        group = representation.layer_groups[0]
        self._dtype: torch.dtype = getattr(torch, group.dtype.name)
        self._heads, self._head_dim = group.kv_heads, group.head_dim
        self._runs = _runs([one for one in resolved.chunks() if one.asked.stop < len(tokens)])
        origin = Origin(resolved.found.rope, representation.adapter_digest, resolved.terms.weights)
        self.plan = _plan(tokens, self._runs, resolved, origin)
        places = {segment.start: place for place, segment in enumerate(self.plan.segments)}
        self._places = [places[run.start] for run in self._runs]
        self._tensors: list[list[LayerKV]] = []
        self._layers: Generator[Layer, None, None] | None = None
        self._unwanted: frozenset[int] = frozenset()
        self._left_out: frozenset[int] = frozenset()
        self._at = -1
        self._is_closed = False
        # Held while a layer is waited for: a generator is run by one thread at a time.
        self._lock = threading.Lock()

    @property
    def loaded_bytes(self) -> int:
        """What the segments of the plan take in the store, but for rows that were left out."""
        return sum(
            chunk.best.size_bytes * (chunk.asked.tokens - len(self._unwanted_of(chunk)))
            // chunk.asked.tokens
            for run in self._runs
            for chunk in run.chunks
        )  # fmt: skip

    @property
    def token_bytes(self) -> float:
        """What a token of the plan's segments takes in the store, all layers; 0 without one."""
        chunks = [chunk for run in self._runs for chunk in run.chunks]
        tokens = sum(chunk.asked.tokens for chunk in chunks)
        return sum(chunk.best.size_bytes for chunk in chunks) / tokens if tokens else 0.0

    @property
    def can_skip_rows(self) -> bool:
        """Whether rows that ``narrow`` names are left out: of raw frames, and if none is compared.

        Frames of a codec are smaller than their KV, and come whole.
        """
        raw = 2 * len(self._layer_ids) * self._heads * self._head_dim * self._dtype.itemsize
        return not self._resolved.found.is_shadow and self.token_bytes >= raw

    @property
    def left_out(self) -> frozenset[int]:
        """Positions that were not asked for: what ``stored`` has there is nothing."""
        return self._left_out

    def approximate_chunks(self) -> Iterator[FoundChunk]:
        """Yield the chunks in the plan that come from other prompts."""
        for run in self._runs:
            if not run.chunks[0].is_exact:
                yield from run.chunks

    def stored(self, place: int) -> Sequence[LayerKV]:
        """Return all layers of a segment of the plan as they were stored; to be read to the end."""
        return self._tensors[self._places.index(place)]

    def layer(self, i: int) -> Mapping[int, LayerKV]:
        """Return layer *i* of every segment that has all its chunks: on the CPU.

        Waits for it, at most to the deadline of the client's calls. Layers are asked for in
        rising order. Raises KVStoreErrors.
        """
        try:
            with self._lock:
                return self._next(i)
        finally:
            if self._is_closed:  # meanwhile: whoever closed it did not wait for us
                self.close()

    def _next(self, i: int) -> Mapping[int, LayerKV]:
        if self._is_closed or not self._runs:
            return {}
        if self._layers is None:
            self._layers = self._begun()
        count = 0
        for layer in self._layers:
            self._at, count = layer.layer_id, len(layer.tensors)
            if self._at >= self._layer_ids[i]:
                break
        return self._whole(i, count) if self._at == self._layer_ids[i] else {}

    def _begun(self) -> Generator[Layer, None, None]:
        chunks: list[FoundChunk] = []
        out = []
        self._left_out = self._unwanted
        for run in self._runs:
            shape = (self._heads, run.stop - run.start, self._head_dim)
            layers = [
                (torch.empty(shape, dtype=self._dtype), torch.empty(shape, dtype=self._dtype))
                for _ in self._layer_ids
            ]
            self._tensors.append(layers)
            for chunk in run.chunks:
                span = slice(chunk.asked.start - run.start, chunk.asked.stop - run.start)
                out.append([[(k[:, span], v[:, span]) for k, v in layers]])
                chunks.append(chunk)
        rows = {place: self._unwanted_of(chunk) for place, chunk in enumerate(chunks)}
        skipped = SkippedRows.of(rows)
        return self._resolved.layers(chunks, out, skipped if len(skipped) else None)

    def _unwanted_of(self, chunk: FoundChunk) -> list[int]:
        """Return the rows of a chunk, from its first on, that are left out."""
        if chunk.is_exact or not self._left_out:
            return []
        start, stop = chunk.asked.start, chunk.asked.stop
        return [at - start for at in range(start, stop) if at in self._left_out]

    def _whole(self, i: int, count: int) -> dict[int, LayerKV]:
        """Return what is there of layer *i* if so many chunks have come."""
        found: dict[int, LayerKV] = {}
        for place, run, layers in zip(self._places, self._runs, self._tensors, strict=True):
            count -= len(run.chunks)
            if count < 0:
                break
            found[place] = layers[i]
        return found

    def narrow(self, rows: Sequence[int], from_layer: int) -> None:
        """Leave *rows* out, if they are computed in all layers and none was asked for yet.

        Not of a request that is compared with a full prefill: there all rows are measured.
        """
        if from_layer == 0 and self._layers is None and not self._resolved.found.is_shadow:
            self._unwanted = frozenset(rows)

    def close(self) -> None:
        """End the loads. Idempotent; a layer that is being waited for is left to its thread,
        which ends them then.
        """
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        layers, self._layers = self._layers, None
        if layers is not None:
            layers.close()

    def __enter__(self) -> StoreSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _attention_layers(representation: Model) -> list[int]:
    groups = representation.layer_groups
    if len(groups) != 1 or groups[0].kind is not LayerKind.attention:
        kinds = [group.kind.name for group in groups]
        raise ModelError("layer_groups", kinds, "one group of attention layers is blended")
    return list(groups[0].layer_ids)


def _runs(chunks: Sequence[FoundChunk]) -> list[_Run]:
    """Join chunks that follow one another here and followed one another there."""
    runs: list[_Run] = []
    for one in chunks:
        last = runs[-1].chunks[-1] if runs else None
        if last is not None and _continues(last, one):
            runs[-1] = _Run((*runs[-1].chunks, one))
        else:
            runs.append(_Run((one,)))
    return runs


def _continues(last: FoundChunk, one: FoundChunk) -> bool:
    return (
        last.asked.stop == one.asked.start
        and last.best.digest == one.best.parent
        and (last.is_exact, last.ratio) == (one.is_exact, one.ratio)
        and last.best.position + last.asked.tokens == one.best.position
        and bool(last.priority) == bool(one.priority)
    )


def _plan(
    tokens: Sequence[int], runs: Sequence[_Run], resolved: Resolved, origin: Origin
) -> BlendPlan:
    least, at = resolved.found.gate.ratio, 0
    segments: list[Segment] = []
    for run in runs:
        if run.start > at:
            segments.append(Segment(at, run.start, "miss"))
        segments.append(_segment(run, resolved, origin, least))
        at = run.stop
    segments.append(Segment(at, len(tokens), "miss"))
    return BlendPlan(tuple(tokens), tuple(segments), ratio=least)


def _segment(run: _Run, resolved: Resolved, origin: Origin, least: float) -> Segment:
    first = run.chunks[0]
    priority = b"".join(chunk.priority for chunk in run.chunks)
    scores = tuple(level / _HIGHEST_PRIORITY for level in priority) if priority else None
    return Segment(
        run.start,
        run.stop,
        "exact" if first.is_exact else "approx",
        # The digest of one chunk is checked against the tokens; a run's frames are, each.
        chunk_id=first.asked.content if len(run.chunks) == 1 else b"",
        variant=first.best.digest,
        src_pos=first.best.position,
        ratio=first.ratio if first.ratio > least else None,
        scores=scores,
        origin=origin,
        extra=resolved.terms.names,
    )


def store_prefill(
    client: Client,
    result: BlendResult,
    tokens: Sequence[int],
    ranges: Sequence[SegmentRange],
    extra: Sequence[bytes] = (),
    attention: Sequence[ChunkAttention] = (),
) -> list[Put]:
    """Put the chunks of *tokens*, whose documents are *ranges*; return what became of each.

    *attention*: what they attended to, of ``measured_prefill``, told to the store once they are
    there; how little they depend on it is what they are chosen and kept by.

    Raises InvalidRequestError for KV that was blended: what was computed behind another prompt
    is never stored under this one's names. Of KV whose weights changed meanwhile nothing is
    stored. Raises KVStoreErrors.
    """
    if result.is_blended:
        fix = "it was blended, and serves its own request only; store a full prefill's"
        raise InvalidRequestError("result", "blended KV", fix)
    if result.weights is None:
        return []
    names = ResolveTerms(extra=tuple(extra), weights=result.weights).names
    chunks = [
        Chunk(
            chunk_key(client.namespace, one.digest),
            [[(k[:, one.start : one.stop].cpu(), v[:, one.start : one.stop].cpu())
              for k, v in result.kv]],
            one.parent,
            position=one.start,
            content=one.content,
        )
        for segment in client.name_segments(tokens, ranges, names)
        for one in segment.chunks
    ]  # fmt: skip
    puts = client.put(chunks)
    if attention:
        _tell(client, attention)
    return puts


def _tell(client: Client, attention: Sequence[ChunkAttention]) -> None:
    """Report what chunks attended to; chunks that are not there are the store's to refuse."""
    report = pb.ReportReuseRequest()
    for one in attention:
        told = report.chunks.add(digest=one.chunk.digest, intra_mass=one.intra_mass)
        for mass in one.context:
            told.context.add(content=mass.content, tokens=mass.tokens, mass=mass.mass)
    with suppress(KVStoreError):  # they are stored all the same; it ranks them without
        client.report_reuse(report)


# What chunks of a prompt attended to while it was computed: Cache-Craft's context impact.
#
# Agarwal et al., "Cache-Craft", SIGMOD 2025 (arXiv 2502.15734), equations 3 and 4: attention
# between a chunk and those before it, and within it. Measured of a few rows and layers, which is
# a small part of the prefill that they are looked at in.

SAMPLED_ROWS = 8
"""Of a chunk, spread over it."""
SAMPLED_LAYERS = 8
"""Of a model, spread over it; fewer of a model with fewer."""
MAX_CONTEXT = 16
"""Chunks before one that are told, the nearest; no server takes more."""


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """Attention of one chunk's tokens: weights summed over them, mean over heads and layers.

    ``context``: what went to the chunks before it, the nearest last. What went to tokens of no
    chunk, or farther away, is in none; with ``intra_mass`` the sum is the chunk's tokens at most.
    """

    chunk: NamedChunk
    context: tuple[ContextMass, ...]
    intra_mass: float


def measured_prefill(
    adapter: EngineAdapter,
    tokens: Sequence[int],
    chunks: Sequence[NamedChunk],
    rows: int = SAMPLED_ROWS,
) -> tuple[BlendResult, list[ChunkAttention]]:
    """Compute all of *tokens*; return it, and what each of its *chunks* attended to.

    At most *rows* of each chunk are looked at. Chunks whose weights are no numbers are left out.
    """
    watch = _Watch(adapter, len(tokens), chunks, rows)
    result = Blender(watch).prefill(tokens)
    return result, list(watch.found())


class _Watch:
    """An EngineAdapter that does what *adapter* does, and looks at rows of *chunks*."""

    def __init__(
        self, adapter: EngineAdapter, count: int, chunks: Sequence[NamedChunk], rows: int
    ) -> None:
        self._adapter = adapter
        self._chunks = chunks
        self._rows = [_spread(one.start, one.stop, rows) for one in chunks]
        self._layers = set(_spread(0, adapter.n_layers, SAMPLED_LAYERS).tolist())
        self._sums = torch.zeros((len(chunks), count), dtype=torch.float64)
        """(chunks, tokens): mean weight of a row, summed over heads and layers."""
        self._weights = 0
        """Heads of all layers that were looked at."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def attend(self, layer: int, query: Tensor, runs: Sequence[Run], kv: LayerKV) -> Tensor:
        """Do what the engine does, and look on."""
        if layer in self._layers:
            positions = positions_of(runs, query.device)
            for number, rows in enumerate(self._rows):
                at = torch.isin(positions, rows.to(positions.device))
                mass = self._adapter.mass(layer, query[:, at], positions[at], kv)
                self._sums[number] += mass.double().cpu()
            self._weights += query.shape[0]
        return self._adapter.attend(layer, query, runs, kv)

    def found(self) -> Iterator[ChunkAttention]:
        """Yield what was seen of each chunk."""
        if not self._weights:
            return
        for one, sums in zip(self._chunks, self._sums, strict=True):
            share = sums / self._weights
            before = [other for other in self._chunks if other.stop <= one.start][-MAX_CONTEXT:]
            masses = [one.tokens * float(share[c.start : c.stop].sum()) for c in (*before, one)]
            if all(map(math.isfinite, masses)):
                yield ChunkAttention(one, tuple(_merged(before, masses)), masses[-1])


def _merged(chunks: Sequence[NamedChunk], masses: Sequence[float]) -> Iterator[ContextMass]:
    """Yield a mass for each content once, where it stands last."""
    found: dict[bytes, tuple[int, float]] = {}
    for one, mass in zip(chunks, masses, strict=False):
        _, known = found.pop(one.content, (0, 0.0))
        found[one.content] = (one.tokens, known + mass)
    for content, (tokens, mass) in found.items():
        yield ContextMass(content, tokens, mass)


def _spread(start: int, stop: int, count: int) -> Tensor:
    """Return at most *count* numbers from *start* to below *stop*, spread over them."""
    if stop - start <= count:
        return torch.arange(start, stop)
    steps = (torch.arange(count) + 0.5) * ((stop - start) / count)
    return start + steps.long()
