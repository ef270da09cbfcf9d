"""A full prefill's KV into the store, cut so that its documents are found in other prompts."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.client.blend.report import BlendResult
from kvstore.client.chunk import Chunk
from kvstore.client.client import Client
from kvstore.client.transport import Put
from kvstore.proto.blend import SegmentRange
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import chunk_key


def store_prefill(
    client: Client,
    result: BlendResult,
    tokens: Sequence[int],
    ranges: Sequence[SegmentRange],
    extra: Sequence[bytes] = (),
) -> list[Put]:
    """Put the chunks of *tokens*, whose documents are *ranges*; return what became of each.

    Raises InvalidRequestError for KV that was blended: what was computed behind another prompt
    is never stored under this one's names. Raises KVStoreErrors.
    """
    if result.is_blended:
        fix = "it was blended, and serves its own request only; store a full prefill's"
        raise InvalidRequestError("result", "blended KV", fix)
    chunks = [
        Chunk(
            chunk_key(client.namespace, one.digest),
            [[(k[:, one.start : one.stop].cpu(), v[:, one.start : one.stop].cpu())
              for k, v in result.kv]],
            one.parent,
            position=one.start,
            content=one.content,
        )
        for segment in client.name_segments(tokens, ranges, extra)
        for one in segment.chunks
    ]  # fmt: skip
    return client.put(chunks)
