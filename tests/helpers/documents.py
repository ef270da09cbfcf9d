"""Prompts of documents stored for reuse in other prompts, and results of Resolve."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from helpers.prompts import tensors_of, tokens

from kvstore.client import Chunk, Client
from kvstore.client.blend.plan import NamedSegment, SegmentRange
from kvstore.client.segments import SegmentMatch, SegmentQuery
from kvstore.codecs.base import ChunkTensors
from kvstore.proto.blend import ChunkReport, ReuseReport, ShadowResult
from kvstore.proto.keys import chunk_key
from kvstore.proto.types import ChunkKey, PutOutcome
from kvstore.server.blending.content_index import ContentIndex
from kvstore.server.index.access_log import CatalogState
from kvstore.server.index.hints import ChunkMetadata
from kvstore.server.index.holds import Holds, Leases

HEAD, OTHER_HEAD = tokens(1, 16), tokens(2, 32)
DOCUMENT, OTHER = tokens(11, 40), tokens(12, 32)
QUESTION = tokens(3, 10)
TRIAL = SegmentQuery(is_trial=True)


def make_content_index(limit: int) -> ContentIndex:
    """Return an index of a catalog without tiers."""
    holds = Holds(Leases(1, int), 0)
    return ContentIndex(CatalogState({}, holds, time.monotonic, ChunkMetadata()), limit)


def prompt_of(
    head: Sequence[int], *documents: Sequence[int]
) -> tuple[list[int], list[SegmentRange]]:
    """Return a prompt of a head, documents and a question, and the ranges of the documents."""
    prompt, ranges = list(head), []
    for document in documents:
        ranges.append(SegmentRange(len(prompt), len(prompt) + len(document)))
        prompt += document
    return prompt + QUESTION, ranges


def put_prompt(
    client: Client, prompt: Sequence[int], ranges: Sequence[SegmentRange]
) -> list[NamedSegment]:
    """Put all chunks of a prompt; return its segments."""
    segments = client.name_segments(prompt, ranges)
    chunks = [
        Chunk(
            key := chunk_key(client.namespace, one.digest),
            tensors_of(key, client.model, one.tokens),
            parent=one.parent,
            position=one.start,
            content=one.content,
        )
        for segment in segments
        for one in segment.chunks
    ]
    outcomes = {put.outcome for put in client.put_chunks(chunks)}
    assert outcomes <= {PutOutcome.stored, PutOutcome.exists}
    return segments


def kinds(resolved: SegmentMatch) -> list[list[str]]:
    """Return the kind of each chunk, by segment: exact, variant or none."""
    return [
        [
            "exact" if one.is_exact else "variant" if one.variants else "none"
            for one in segment.chunks
        ]
        for segment in resolved.found.segments
    ]


def keys_of(client: Client, segment: NamedSegment) -> list[ChunkKey]:
    return [chunk_key(client.namespace, one.digest) for one in segment.chunks]


def read(resolved: SegmentMatch) -> list[ChunkTensors]:
    """Read all resolved chunks by layer; return them."""
    layers = [list(layer.tensors) for layer in resolved.layers(list(resolved.chunks()))]
    return [[[layer[number] for layer in layers]] for number in range(len(layers[0]))]


def report_of(resolved: SegmentMatch, shadow: ShadowResult | None = None) -> ReuseReport:
    """Return a report with deviations of every chunk, the largest of its last token."""
    chunks = tuple(
        ChunkReport(
            one.best.digest,
            layer=1,
            deviations=np.arange(one.wanted.tokens, dtype="<f2").tobytes(),
            selected=bytes(-(-one.wanted.tokens // 8)),
            query_attention=bytes(range(one.wanted.tokens)),
        )
        for one in resolved.chunks()
    )
    return ReuseReport("", chunks, 0.15, 1.0, 2.0, 8.0, shadow)


def shadowed(agreement: float = 1.0, divergence: float = 0.0) -> ShadowResult:
    return ShadowResult(divergence, agreement, 64)
