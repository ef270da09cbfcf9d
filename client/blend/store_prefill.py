"""A full prefill's KV into the store, cut so that its documents are found in other prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from kvstore.client.blend.attention import ChunkAttention
from kvstore.client.blend.report import BlendResult
from kvstore.client.blend.segments import SegmentRange
from kvstore.client.chunk import Chunk
from kvstore.client.client import Client
from kvstore.client.resolving import ResolveTerms
from kvstore.client.transport import Put
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.keys import chunk_key


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
    puts = client.put_chunks(chunks)
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
