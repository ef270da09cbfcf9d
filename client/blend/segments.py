"""Segments of a prompt: how they are cut and named, sent to be resolved, and answered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import MAX_SEGMENTS, Resolution, ResolvedChunk, ResolvedSegment, Variant
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.keys import chain_digest, check_chunk_tokens, content_digest, tokens_le32
from kvstore.proto.messages import as_message, as_value
from kvstore.proto.types import (
    DEFAULT_CHUNK_TOKENS,
    DIGEST_BYTES,
    MAX_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    ROOT,
    ChainDigest,
)


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """Tokens *start* to *stop*, the last not included, of a prompt: one document, one message.

    With ``approximate`` KV of the same tokens behind others will do. Raises InvalidRequestError.
    """

    start: int
    stop: int
    approximate: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop < 1 << 32:
            raise InvalidRequestError("segment", (self.start, self.stop), "start below stop")


@dataclass(frozen=True, slots=True)
class NamedChunk:
    """One chunk of a segment: its tokens in the prompt, and the names they have."""

    start: int
    stop: int
    digest: ChainDigest
    parent: ChainDigest
    content: bytes

    @property
    def tokens(self) -> int:
        """How many it has."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class NamedSegment:
    """A stretch of a prompt, cut and named. What is left over at its end is in no chunk."""

    start: int
    stop: int
    chunks: tuple[NamedChunk, ...]
    approximate: bool


def name_segments(
    tokens: Sequence[int],
    ranges: Sequence[SegmentRange],
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    extra: Sequence[bytes] = (),
) -> list[NamedSegment]:
    """Cut a prompt into segments and these into chunks; what lies between *ranges* is one, too.

    Chunks begin anew at the start of each segment, so that the same document is always cut alike.
    A last one below 16 tokens joins the one before it, or is no chunk where that has no room or
    there is none; chain digests go on over it. *extra* enters the first chain digest, and every
    content digest. Raises InvalidRequestError for ranges that are not in order or past the end.
    """
    check_chunk_tokens(chunk_tokens)
    data = memoryview(tokens_le32(tokens))
    found: list[NamedSegment] = []
    parent = ROOT
    for one in _tiles(len(data) // 4, ranges):
        chunks = []
        for start, stop in _cuts(one.start, one.stop, chunk_tokens):
            piece = data[4 * start : 4 * stop]
            digest = chain_digest(parent, piece, extra if parent == ROOT else ())
            if stop - start >= MIN_CHUNK_TOKENS:
                content = content_digest(piece, extra)
                chunks.append(NamedChunk(start, stop, digest, parent, content))
            parent = digest
        found.append(NamedSegment(one.start, one.stop, tuple(chunks), one.approximate))
    return found


def _tiles(count: int, ranges: Sequence[SegmentRange]) -> list[SegmentRange]:
    """Return *ranges* with those between them, over the whole prompt."""
    tiles, at = [], 0
    for one in ranges:
        if one.start < at or one.stop > count:
            wrong = (one.start, one.stop)
            raise InvalidRequestError("segments", wrong, f"in order, apart, and up to {count}")
        if one.start > at:
            tiles.append(SegmentRange(at, one.start, approximate=False))
        tiles.append(one)
        at = one.stop
    if at < count:
        tiles.append(SegmentRange(at, count, approximate=False))
    if len(tiles) > MAX_SEGMENTS:
        raise InvalidRequestError("segments", len(tiles), f"at most {MAX_SEGMENTS}")
    return tiles


def _cuts(start: int, stop: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Cut one segment. Only the last cut may be below 16 tokens."""
    cuts = [(at, min(at + chunk_tokens, stop)) for at in range(start, stop, chunk_tokens)]
    if len(cuts) > 1 and stop - cuts[-1][0] < MIN_CHUNK_TOKENS:
        joined = cuts[-2][0]
        if stop - joined <= MAX_CHUNK_TOKENS:
            cuts[-2:] = [(joined, stop)]
    return cuts


def segments_to_messages(segments: Iterable[NamedSegment]) -> list[pb.PromptSegment]:
    """Return the protobuf form of *segments*."""
    return [
        as_message(
            pb.PromptSegment,
            one,
            chains=b"".join(chunk.digest for chunk in one.chunks),
            contents=b"".join(chunk.content for chunk in one.chunks),
            tokens=[chunk.tokens for chunk in one.chunks],
        )
        for one in segments
    ]


def resolution_from_message(
    message: pb.ResolveResponse, asked: Sequence[NamedSegment]
) -> Resolution:
    """Return the answer about the segments *asked* for. Raises KVStoreError if it is none."""
    names = tuple(message.tier_names)
    try:
        pairs = zip(message.segments, asked, strict=True)
        segments = tuple(_segment(one, wanted, names) for one, wanted in pairs)
        return as_value(Resolution, message, segments=segments)
    except (ValueError, IndexError) as error:
        raise KVStoreError(f"the server's answer about segments is damaged: {error}") from None


def _segment(
    message: pb.ResolvedSegment, asked: NamedSegment, names: Sequence[str]
) -> ResolvedSegment:
    chunks = []
    for one, chunk in zip(message.chunks, asked.chunks, strict=True):
        if len(one.priority) not in (0, chunk.tokens):
            raise ValueError(f"{len(one.priority)} priorities for {chunk.tokens} tokens")
        variants = tuple(_variant(variant, names) for variant in one.variants)
        if one.exact and [variant.digest for variant in variants] != [chunk.digest]:
            raise ValueError("an exact chunk of another name")
        if variants and not (one.exact or asked.approximate):
            raise ValueError("variants where none were asked for")
        chunks.append(ResolvedChunk(one.exact, variants, one.priority))
    if not 0 <= message.ratio <= 1:
        raise ValueError(f"ratio {message.ratio}")
    return ResolvedSegment(tuple(chunks), message.ratio, message.load_ms, message.recompute_ms)


def _variant(message: pb.Variant, names: Sequence[str]) -> Variant:
    if len(message.digest) != DIGEST_BYTES or len(message.parent) != DIGEST_BYTES:
        raise ValueError("a digest of another length")
    return as_value(Variant, message, tier=names[message.tier])
