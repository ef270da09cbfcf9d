"""Puts of a client: chunks whole, or layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter

from kvstore.client.chunk import Chunk, PlannedChunk, Shard
from kvstore.client.connection import Until
from kvstore.client.layered_put import LayeredPut
from kvstore.client.server_link import MAX_OPEN_BATCHES, LeftMs, ServerLink, digest_batches, packed
from kvstore.client.session import Session
from kvstore.client.tensors import arrays_of
from kvstore.client.transports.base import Outgoing, Put, PutTerms, Transport
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    LayoutMismatchError,
    TierUnavailableError,
)
from kvstore.proto.frame import FrameTemplate, raw_frame_bytes
from kvstore.proto.plans import Hints
from kvstore.proto.types import KVLayout

_KEY = attrgetter("key")


def put_whole(
    link: ServerLink,
    chunks: Sequence[Chunk],
    shard: Shard | None,
    hints: Hints,
    *,
    durable: bool,
) -> list[Put]:
    """Store *chunks*, or of each what *shard* covers, a batch at a time."""

    def work(transport: Transport, left_ms: LeftMs) -> list[Put]:
        session, important = transport.session, list[tuple[Chunk, int]]()
        packed(list(map(_KEY, chunks)), session.terms.namespace)
        outgoing = []
        for chunk in chunks:
            outgoing.append(_outgoing(session, chunk, shard))
            if chunk.importance is not None:
                important.append((chunk, outgoing[-1].template.layout.tokens))
        if important:
            _weigh(link, session, important, left_ms)
        return _put(transport, outgoing, PutTerms(durable, 0, hints), left_ms)

    return link.run(work) if chunks else []


def _put(
    transport: Transport, outgoing: Sequence[Outgoing], terms: PutTerms, left_ms: LeftMs
) -> list[Put]:
    """Put a batch at a time, all within what *left_ms* says."""
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
    """Begin a put of *chunks* whose layers come one by one, over all tokens if they are *spans*
    of a prompt, of which there may be none.
    """
    if link.options.shard is not None:
        fix = "layer by layer there are whole chunks only: use put"
        raise LayoutMismatchError("shard", link.options.shard, fix)
    if spans is not None and not spans:
        return LayeredPut(link.model, [], lambda _: [], spans)
    left_ms = Until(terms.within_ms).left_ms
    transport = link.connected(left_ms)
    most = MAX_OPEN_BATCHES * transport.session.terms.max_batch_chunks
    if not 1 <= len(chunks) <= most:
        raise InvalidRequestError("chunks", len(chunks), f"give 1 to {most} in one put")
    packed([one.key for one in chunks], transport.session.terms.namespace)
    templates = [
        _template(transport.session, one, KVLayout.of(link.model, one.tokens)) for one in chunks
    ]

    def store(frames: Sequence[Outgoing]) -> list[Put]:
        return link.run(lambda now, left: _put(now, frames, terms, left), left_ms())

    return LayeredPut(link.model, templates, store, spans)


def _outgoing(session: Session, chunk: Chunk, shard: Shard | None) -> Outgoing:
    model = session.representation
    if shard is None:
        layout, arrays = chunk.arrays(model)
        return Outgoing(_template(session, chunk, layout), arrays)
    part = shard.in_chunk(model, chunk.whole_layout(model, shard.layers))
    arrays = arrays_of(part.layout, chunk.tensors)
    return Outgoing(_template(session, chunk, part.whole), arrays, part)


def _template(session: Session, chunk: Chunk | PlannedChunk, layout: KVLayout) -> FrameTemplate:
    """Raises InvalidRequestError for a chunk that is longer than the server takes."""
    frame_bytes, limit = raw_frame_bytes(layout), session.terms.max_frame_bytes
    if frame_bytes > limit:
        raise InvalidRequestError(
            "frame_bytes", frame_bytes, f"the server takes {limit} at most; use shorter chunks"
        )
    return FrameTemplate(
        chunk.key, chunk.parent, session.representation_digest, chunk.content, layout,
        chunk.position, chunk.prefill_flops,
    )  # fmt: skip


def _weigh(
    link: ServerLink, session: Session, chunks: Sequence[tuple[Chunk, int]], left_ms: LeftMs
) -> None:
    """Send which tokens of *chunks* matter, ahead of them, where a codec has a use for it; a server
    that does not get it codes all alike.
    """
    terms = session.terms
    weights = [chunk.weights(tokens) for chunk, tokens in chunks]
    if not terms.weighs:
        return
    digests = packed([chunk.key for chunk, _ in chunks], terms.namespace)
    for first, some in digest_batches(digests, terms.max_batch_chunks):
        request = pb.WeighRequest(
            session_id=terms.session_id,
            digests=some,
            weights=weights[first : first + terms.max_batch_chunks],
        )
        with suppress(TierUnavailableError, DeadlineError):
            link.call("Weigh", request, pb.WeighResponse, left_ms())
