"""A prompt's segments, their names in the store, and the plan made of them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from kvstore.client.server_link import check_kind
from kvstore.proto.blend import MAX_SEGMENTS as MAX_RESOLVED
from kvstore.proto.errors import InvalidRequestError, is_whole
from kvstore.proto.keys import chain_digest, check_chunk_tokens, content_digest, tokens_le32
from kvstore.proto.types import (
    DEFAULT_CHUNK_TOKENS,
    MAX_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    ROOT,
    ChainDigest,
    RopeParameters,
)

MAX_PROMPT_TOKENS = 1 << 20
MAX_SEGMENTS = 1 << 13

Kind: TypeAlias = Literal["exact", "approx", "miss"]


@dataclass(frozen=True, slots=True)
class Origin:
    """How KV was computed, besides the model: its rotation, its adapter, and changed weights."""

    rope: RopeParameters
    adapter_digest: str = "none"
    weights: bytes = b""
    """Their name, once they changed in place."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of a prompt and where their KV comes from.

    ``exact``: computed after the same prefix; ``approx``: the same tokens in another context;
    ``miss``: to be computed. ``chunk_id`` is the content digest of the tokens and of ``extra``,
    such as image ids; ``src_pos`` is the position of its first token when it was computed.
    ``ratio`` overrides the plan's. ``scores``: each token's gain from recomputation, from
    feedback. ``origin`` None: the engine's own. Raises InvalidRequestError.
    """

    start: int
    end: int
    kind: Kind
    chunk_id: bytes = b""
    src_pos: int = 0
    ratio: float | None = None
    scores: tuple[float, ...] | None = None
    origin: Origin | None = None
    extra: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise InvalidRequestError("segment", (self.start, self.end), "give start < end, from 0")
        if self.kind not in ("exact", "approx", "miss"):
            raise InvalidRequestError("segment.kind", self.kind, "use exact, approx or miss")
        if self.src_pos < 0:
            raise InvalidRequestError("segment.src_pos", self.src_pos, "use 0 or more")
        if self.ratio is not None:
            _check_share("segment.ratio", self.ratio)
        if self.scores is not None and len(self.scores) != len(self):
            fix = f"give one for each of {len(self)} tokens"
            raise InvalidRequestError("segment.scores", len(self.scores), fix)

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """The segments of *tokens*, and the share that is recomputed.

    The segments tile the prompt; the last is a ``miss``, because its logits are needed.
    *ratio*: the share of the ``approx`` tokens that the *selector* may choose; gaps and suffix
    are always computed and do not count. Raises InvalidRequestError.
    """

    tokens: tuple[int, ...]
    segments: tuple[Segment, ...]
    ratio: float = 0.3
    selector: str = "hybrid"

    def __post_init__(self) -> None:
        _check_share("ratio", self.ratio)
        if not 0 < len(self.tokens) <= MAX_PROMPT_TOKENS:
            raise InvalidRequestError("tokens", len(self.tokens), f"1 to {MAX_PROMPT_TOKENS}")
        if not 0 < len(self.segments) <= MAX_SEGMENTS:
            raise InvalidRequestError("segments", len(self.segments), f"1 to {MAX_SEGMENTS}")
        end = 0
        for segment in self.segments:
            if segment.start != end:
                fix = f"segments tile the prompt: start at {end}"
                raise InvalidRequestError("segment.start", segment.start, fix)
            end = segment.end
            tokens = self.tokens[segment.start : end] if segment.chunk_id else ()
            if tokens and content_digest(tokens_le32(tokens), segment.extra) != segment.chunk_id:
                fix = f"tokens {segment.start} to {end} differ: look the chunk up again"
                raise InvalidRequestError("segment.chunk_id", segment.chunk_id.hex(), fix)
        if end != len(self.tokens):
            fix = f"end at the prompt's end, {len(self.tokens)}"
            raise InvalidRequestError("segments", end, fix)
        if segment.kind != "miss":
            fix = "the last must be a miss: its logits are needed"
            raise InvalidRequestError("segments", segment.kind, fix)

    def of_kind(self, kind: Kind) -> list[tuple[int, Segment]]:
        """Return the segments of *kind* with their indices."""
        return [(at, segment) for at, segment in enumerate(self.segments) if segment.kind == kind]

    def count(self, kind: Kind) -> int:
        """Return how many tokens are of *kind*."""
        return sum(len(segment) for _, segment in self.of_kind(kind))

    def shares(self) -> dict[int, float]:
        """Return the share of each ``approx`` segment that is recomputed, by index."""
        found = self.of_kind("approx")
        return {at: self.ratio if one.ratio is None else one.ratio for at, one in found}

    def as_miss(self, indices: Container[int]) -> BlendPlan:
        """Return the plan that computes the segments at *indices* instead."""
        segments = (
            Segment(one.start, one.end, "miss") if at in indices else one
            for at, one in enumerate(self.segments)
        )
        return replace(self, segments=tuple(segments))

    def without(self, *kinds: Kind) -> BlendPlan:
        """Return the plan that computes the segments of *kinds* instead."""
        return self.as_miss([at for at, one in enumerate(self.segments) if one.kind in kinds])

    def with_ratio(self, ratio: float) -> BlendPlan:
        """Return the plan with *ratio*, also in segments with a lower ratio of their own."""
        segments = (
            one if one.ratio is None else replace(one, ratio=max(one.ratio, ratio))
            for one in self.segments
        )
        return replace(self, segments=tuple(segments), ratio=ratio)

    def chosen_tokens(self, ratio: float) -> float:
        """Return how many ``approx`` tokens *ratio*, or a higher one of a segment, computes."""
        return sum(len(one) * max(ratio, one.ratio or 0.0) for _, one in self.of_kind("approx"))


def _check_share(field_name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InvalidRequestError(field_name, value, "give a share from 0 to 1")


# --- names of segments in the store


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """Tokens [start, stop) of a prompt: one document or message.

    With ``approximate``, KV of the same tokens in another context is accepted. Raises
    InvalidRequestError.
    """

    start: int
    stop: int
    approximate: bool = True

    def __post_init__(self) -> None:
        whole = is_whole(self.start) and is_whole(self.stop)
        if not whole or not 0 <= self.start < self.stop < 1 << 32:
            raise InvalidRequestError("segment", (self.start, self.stop), "give start < stop")


@dataclass(frozen=True, slots=True)
class NamedChunk:
    """One chunk of a segment: its tokens in the prompt, and its names."""

    start: int
    stop: int
    digest: ChainDigest
    parent: ChainDigest
    content: bytes

    @property
    def tokens(self) -> int:
        """Its number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class NamedSegment:
    """A range of a prompt, cut into named chunks. A remainder at its end is in no chunk."""

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
    """Cut a prompt into segments, *ranges* and the gaps between them, and these into chunks.

    Each segment starts a new chunk, so that the same document is always cut alike. A last piece
    below 16 tokens joins the chunk before it, or is in no chunk if that would be too large or
    there is none; chain digests still cover it. *extra* enters the first chain digest, and every
    content digest. Raises InvalidRequestError for ranges that are not in order or past the end.
    """
    check_chunk_tokens(chunk_tokens)
    check_kind("ranges", ranges, SegmentRange, is_list=True)
    data, found, parent = memoryview(tokens_le32(tokens)), list[NamedSegment](), ROOT
    for one in _tiles(len(data) // 4, ranges):
        chunks = []
        for start, stop in _cuts(one.start, one.stop, chunk_tokens):
            piece = data[4 * start : 4 * stop]
            above, parent = parent, chain_digest(parent, piece, extra if parent == ROOT else ())
            if stop - start >= MIN_CHUNK_TOKENS:
                chunks.append(NamedChunk(start, stop, parent, above, content_digest(piece, extra)))
        found.append(NamedSegment(one.start, one.stop, tuple(chunks), one.approximate))
    return found


def _tiles(count: int, ranges: Sequence[SegmentRange]) -> list[SegmentRange]:
    """Return *ranges* and the gaps between them, over the whole prompt."""
    tiles, at = list[SegmentRange](), 0
    for one in ranges:
        if one.start < at or one.stop > count:
            wrong = (one.start, one.stop)
            raise InvalidRequestError("segments", wrong, f"in order, disjoint, up to {count}")
        gap = [SegmentRange(at, one.start, approximate=False)] if one.start > at else []
        tiles += [*gap, one]
        at = one.stop
    if at < count:
        tiles.append(SegmentRange(at, count, approximate=False))
    if len(tiles) > MAX_RESOLVED:
        raise InvalidRequestError("segments", len(tiles), f"at most {MAX_RESOLVED}")
    return tiles


def _cuts(start: int, stop: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Cut one segment. Only the last cut may be below 16 tokens."""
    cuts = [(at, min(at + chunk_tokens, stop)) for at in range(start, stop, chunk_tokens)]
    joined = cuts[-2:][0][0]
    if stop - cuts[-1][0] < MIN_CHUNK_TOKENS and stop - joined <= MAX_CHUNK_TOKENS:
        cuts[-2:] = [(joined, stop)]
    return cuts
