"""Puts of a client: chunks whole, or layer by layer as an engine finishes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from kvstore.client.chunk import (
    Chunk,
    PlannedChunk,
    Shard,
    Span,
    TensorLike,
    arrays_of,
    has_any,
    layer_arrays,
    to_host,
)
from kvstore.client.connection import Until
from kvstore.client.forks import FORKS
from kvstore.client.paged_cache import Blocks, kept_from
from kvstore.client.server_link import (
    MAX_OPEN_BATCHES,
    LeftMs,
    ServerLink,
    check_kind,
    digest_batches,
    packed,
)
from kvstore.client.session import Session
from kvstore.client.transports.base import Outgoing, Put, PutTerms, Transport
from kvstore.codecs.base import check_parts
from kvstore.codecs.block_part import BlockPart
from kvstore.codecs.raw import RAW, raw_header
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import as_bytes, copy_bytes
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    LayoutMismatchError,
    TierUnavailableError,
)
from kvstore.proto.frame import FrameTemplate, pack_header, raw_frame_bytes
from kvstore.proto.plans import Hints
from kvstore.proto.types import (
    END_KINDS,
    KVLayout,
    LayerGroup,
    LayerKind,
    Model,
    layer_order,
)

_KEY = attrgetter("key")


def put_whole(
    link: ServerLink, chunks: Sequence[Chunk], shard: Shard | None, hints: Hints, *, durable: bool
) -> list[Put]:
    """Store *chunks*, or the *shard* of each, a batch at a time."""

    check_kind("chunks", chunks, Chunk, is_list=True)
    check_kind("hints", hints, Hints)
    check_kind("durable", durable, bool)
    check_kind("shard", shard, Shard, or_none=True)

    def work(transport: Transport, left_ms: LeftMs) -> list[Put]:
        session, important = transport.session, list[tuple[Chunk, int]]()
        packed(list(map(_KEY, chunks)), session.namespace)
        model, outgoing = session.representation, []
        for chunk in chunks:
            layout = layout_of(chunk, model, None if shard is None else shard.layers)
            part = None if shard is None else shard.in_chunk(model, layout)
            arrays = arrays_of(layout if part is None else part.layout, chunk.tensors)
            outgoing.append(Outgoing(_template(session, chunk, layout), arrays, part))
            if chunk.importance is not None:
                important.append((chunk, layout.tokens))
        if important:
            _weigh(link, session, important, left_ms)
        return _put(transport, outgoing, PutTerms(durable, 0, hints), left_ms)

    return link.run(work) if chunks else []


def _put(
    transport: Transport, outgoing: Sequence[Outgoing], terms: PutTerms, left_ms: LeftMs
) -> list[Put]:
    results: list[Put] = []
    limit = transport.session.terms.max_batch_chunks
    for first in range(0, len(outgoing), limit):
        batch = outgoing[first : first + limit]
        results += transport.put(batch, replace(terms, within_ms=left_ms()))
    return results


def put_by_layers(
    link: ServerLink,
    chunks: Sequence[PlannedChunk],
    terms: PutTerms,
    spans: Sequence[tuple[int, int]] | None = None,
) -> LayeredPut:
    """Begin a put of *chunks* whose layers are given one by one: over all tokens of the prompt if
    they are its *spans*, of which there may be none.
    """
    if link.options.shard is not None:
        fix = "layered puts store whole chunks only: use put"
        raise LayoutMismatchError("shard", link.options.shard, fix)
    if spans is not None and not spans:
        return LayeredPut(link.model, [], lambda _: [], spans)
    check_kind("chunks", chunks, PlannedChunk, is_list=True)
    check_kind("hints", terms.hints, Hints)
    check_kind("durable", terms.durable, bool)
    left_ms = Until(terms.within_ms).left_ms
    transport = link.connected(left_ms)
    most = MAX_OPEN_BATCHES * transport.session.terms.max_batch_chunks
    if not 1 <= len(chunks) <= most:
        raise InvalidRequestError("chunks", len(chunks), f"give 1 to {most} in one put")
    packed([one.key for one in chunks], transport.session.namespace)
    templates = [
        _template(transport.session, one, KVLayout.of(link.model, one.tokens)) for one in chunks
    ]

    def store(frames: Sequence[Outgoing]) -> list[Put]:
        return link.run(lambda now, left: _put(now, frames, terms, left), left_ms())

    return LayeredPut(link.model, templates, store, spans)


def layout_of(chunk: Chunk, model: Model, layers: Span | None = None) -> KVLayout:
    """Return the layout of a whole chunk: its own, or by the tokens of its attention layers.

    The chunk has the tensors of all layers, or of *layers*. Raises LayoutMismatchError.
    """
    if chunk.layout is not None:
        if not isinstance(chunk.layout, KVLayout) or not chunk.layout.is_of(model):
            fix = "make it with KVLayout.of this client's Model"
            raise LayoutMismatchError("layout", chunk.layout, fix)
        return chunk.layout
    groups = model.layer_groups
    if layers is not None:
        groups = tuple(group for group in groups if has_any(group, layers))
    for number, group in enumerate(groups):
        if group.kind not in END_KINDS:
            try:
                tokens = int(chunk.tensors[number][0][0].shape[1])
            except (AttributeError, IndexError, TypeError):
                given = type(chunk.tensors).__name__
                fix = "give components, layers, parts of (kv_heads, tokens, head_dim)"
                raise LayoutMismatchError("tensors", given, fix) from None
            return KVLayout.of(model, tokens)
    fix = "give it: without attention layers the tensors do not determine it"
    raise LayoutMismatchError("layout", None, fix)


def _template(session: Session, chunk: Chunk | PlannedChunk, layout: KVLayout) -> FrameTemplate:
    """Raises InvalidRequestError for a chunk over the server's limit."""
    frame_bytes, limit = raw_frame_bytes(layout), session.terms.max_frame_bytes
    if frame_bytes > limit:
        raise InvalidRequestError(
            "frame_bytes", frame_bytes, f"the server's limit is {limit}; use shorter chunks"
        )
    return chunk.template(session.representation_digest, layout)


def _weigh(
    link: ServerLink, session: Session, chunks: Sequence[tuple[Chunk, int]], left_ms: LeftMs
) -> None:
    """Send the importance of tokens ahead of *chunks*, if a codec of the server uses it; without
    it the server codes all tokens alike.
    """
    terms = session.terms
    weights = [chunk.weights(tokens) for chunk, tokens in chunks]
    if not terms.weighs:
        return
    digests = packed([chunk.key for chunk, _ in chunks], session.namespace)
    for first, some in digest_batches(digests, terms.max_batch_chunks):
        request = pb.WeighRequest(
            session_id=terms.session_id,
            digests=some,
            weights=weights[first : first + terms.max_batch_chunks],
        )
        with suppress(TierUnavailableError, DeadlineError):
            link.call("Weigh", request, pb.WeighResponse, left_ms())


def _listed(tensors: Any) -> list[Any]:
    try:
        return list(tensors)
    except TypeError:
        fix = "give the parts of a layer, K and V, or a list of them for each chunk"
        raise InvalidRequestError("tensors", type(tensors).__name__, fix) from None


class LayeredPut:
    """``with client.put_layers(tokens) as put``: give each layer once, in any order.

    Leaving the block stores the chunks, and ``results`` holds the outcome of each; none is visible
    before. Leaving it by an exception, or with layers missing, stores nothing. For one thread.
    """

    def __init__(
        self,
        representation: Model,
        templates: Sequence[FrameTemplate],
        store: Callable[[Sequence[Outgoing]], list[Put]],
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.results: list[Put] = []
        self.spans = spans
        """Where each chunk lies in the prompt; None when ``layer`` takes chunks."""
        self._store = store
        self._templates = templates
        self._headers = [raw_header(template) for template in templates]
        self._sums = [[0] * len(header.segments) for header in self._headers]
        self._frames = [np.zeros(header.frame_bytes, np.uint8) for header in self._headers]
        self._segments = dict(layer_order(representation))
        self._missing = list(self._segments)
        groups = enumerate(representation.layer_groups)
        self._groups = [numbered for numbered in groups for _ in numbered[1].layer_ids]
        """Number and layer group of each segment."""
        self._is_over = False
        self._process = FORKS.process

    def layer(
        self,
        layer_id: int,
        tensors: Sequence[Sequence[TensorLike | BlockPart]] | Sequence[TensorLike] | TensorLike,
    ) -> None:
        """Give layer *layer_id* of the model: its parts, K and V, over all tokens of the prompt; in
        a put of chunks, ``tensors[i]`` are the parts of chunk i.

        Each part is (kv_heads, tokens, head_dim), numpy or torch, any strides; parts of chunks lie
        on the CPU or in blocks. The caller may reuse them on return. Raises LayoutMismatchError or
        InvalidRequestError for tensors that do not fit; the put then goes on without them.
        """
        FORKS.check(self._process, "the put")
        if self._is_over:
            raise InvalidRequestError("layer_id", layer_id, "this put has ended; begin another")
        if layer_id not in self._missing:
            known = layer_id in list(self._segments)
            fix = "give each layer once" if known else f"the model has {sorted(self._segments)}"
            raise InvalidRequestError("layer_id", layer_id, fix)
        segment = self._segments[layer_id]
        number, group = self._groups[segment]
        components = [one.layout.components[number] for one in self._templates]
        chunks = list(map(to_host, _listed(tensors)))
        if self.spans is None:
            chunks = [_listed(parts) for parts in chunks]
        else:
            chunks = self._cut(chunks, group)
        if len(chunks) != len(components):
            raise LayoutMismatchError("tensors", len(chunks), f"give {len(components)} chunks")
        layers = []
        for component, parts in zip(components, chunks, strict=True):
            arrays = layer_arrays(parts, component.dtype)
            check_parts(component, arrays)
            layers.append(arrays)
        places = zip(self._headers, self._frames, self._sums, components, layers, strict=True)
        for header, frame, sums, component, arrays in places:
            out = header.segment(frame, segment)
            _, sums[segment] = RAW.encode_checked(arrays, component, out)
        self._missing.remove(layer_id)

    def _cut(self, parts: Sequence[Any], group: LayerGroup) -> list[list[Any]]:
        """Return the part of one layer of the prompt that each chunk keeps."""
        spans = self.spans or ()
        if group.kind is LayerKind.state:
            fix = "states have no token axis: use put_chunk_layers"
            raise LayoutMismatchError("layer_id", group.kind.name, fix)
        if any(isinstance(part, BlockPart | Blocks) for part in parts):
            fix = "give tensors over all tokens; for blocks use put or put_chunk_layers"
            raise InvalidRequestError("tensors", "blocks", fix)
        shapes = [tuple(getattr(part, "shape", ())) for part in parts]
        stop = spans[-1][1] if spans else 0
        if len(shapes) != group.parts or any(len(one) != 3 or one[1] < stop for one in shapes):
            fix = f"give {group.parts} of (kv_heads, {stop} tokens or more, head_dim)"
            raise LayoutMismatchError("tensors", shapes, fix)
        return [[part[:, kept_from(group, *span) : span[1]] for part in parts] for span in spans]

    def commit(self) -> list[Put]:
        """Store the chunks. Raises InvalidRequestError and stores nothing if layers are missing."""
        FORKS.check(self._process, "the put")
        if self._is_over:
            return self.results
        if self._missing:
            self.abandon()
            raise InvalidRequestError("layers", self._missing, "give them all; nothing was stored")
        self._is_over = True
        frames, self._frames = self._frames, []
        found = []
        for template, sums, frame in zip(self._templates, self._sums, frames, strict=True):
            header = as_bytes(pack_header(raw_header(template, sums)))
            copy_bytes(frame[: len(header)], header)
            found.append(Outgoing(template, (), frame=frame))
        self.results = self._store(found)
        return self.results

    def abandon(self) -> None:
        """Store nothing. Idempotent; does nothing after ``commit``."""
        self._is_over, self._frames = True, []

    def __enter__(self) -> LayeredPut:
        return self

    def __exit__(self, _: object, error: object, trace: object) -> None:
        if error is None:
            self.commit()
        else:
            self.abandon()
