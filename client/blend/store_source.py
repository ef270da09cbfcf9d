"""A blend's KV out of the store: the plan that a Resolve answers, and its layers as they come."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from kvstore.client.blend.plan import BlendPlan, Origin, Segment
from kvstore.client.blend.source import LayerKV
from kvstore.client.decode import Layer
from kvstore.client.resolving import FoundChunk, Resolved
from kvstore.proto.errors import ModelError
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
