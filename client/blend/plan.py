"""What is to be blended: a prompt, cut into segments, and where the KV of each comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import content_digest, tokens_le32
from kvstore.proto.types import RopeParameters

MAX_PROMPT_TOKENS = 1 << 20
MAX_SEGMENTS = 1 << 13
MAX_CHECK_LAYERS = 8

Kind: TypeAlias = Literal["exact", "approx", "miss"]


@dataclass(frozen=True, slots=True)
class Origin:
    """What stored KV was computed with, besides the model: its rotation and its adapter.

    ``weights`` names them once they changed in place; they are another origin from then on.
    """

    rope: RopeParameters
    adapter_digest: str = "none"
    weights: bytes = b""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of a prompt and where their KV comes from.

    ``exact``: computed behind the very same tokens; ``approx``: the same tokens in another
    context; ``miss``: to be computed. ``chunk_id`` is the content digest of the tokens and of
    ``extra``, such as ids of images; ``src_pos`` is the position of its first token when it was
    computed. ``ratio`` replaces the plan's for this segment.
    ``scores``: how much each token gains by being computed anew, as learned from feedback.
    ``origin`` None: the engine's own. Raises InvalidRequestError.
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
            raise InvalidRequestError(
                "segment.scores", len(self.scores), f"give one for each of {len(self)} tokens"
            )

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class BlendPlan:
    """Which chunks land at which positions of *tokens*, and which tokens are computed anew.

    The segments tile the prompt; the last is a ``miss``, because its logits are wanted.
    *ratio*: the share of the ``approx`` tokens that the *selector* may choose; gaps and suffix
    are always computed and never charged to it. *check_layers* are those at which a selector
    compares fresh KV with stored; *ratios* one for each of them, not rising, to filter by steps
    (CacheBlend, arXiv 2405.16444, section 4.3); empty: *ratio* at each. Raises
    InvalidRequestError.
    """

    tokens: tuple[int, ...]
    segments: tuple[Segment, ...]
    ratio: float = 0.3
    selector: str = "hybrid"
    check_layers: tuple[int, ...] = (1,)
    ratios: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._check_tiles()
        layers, ratios = self.check_layers, self.ratios
        is_rising = all(a < b for a, b in pairwise((0, *layers)))
        if len(layers) > MAX_CHECK_LAYERS or not is_rising:
            raise InvalidRequestError(
                "check_layers", layers, "rising, from 1: layer 0 cannot deviate"
            )
        for name, shares in (("ratio", (self.ratio,)), ("ratios", ratios)):
            for share in shares:
                _check_share(name, share)
        if ratios and len(ratios) != len(layers):
            raise InvalidRequestError("ratios", ratios, "give one for each check layer")
        if any(a < b for a, b in pairwise(ratios)):
            raise InvalidRequestError("ratios", ratios, "a later layer chooses among fewer")

    def _check_tiles(self) -> None:
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
            tokens = tokens_le32(self.tokens[segment.start : end]) if segment.chunk_id else b""
            if segment.chunk_id and content_digest(tokens, segment.extra) != segment.chunk_id:
                fix = f"tokens {segment.start} to {end} are others: look the chunk up again"
                raise InvalidRequestError("segment.chunk_id", segment.chunk_id.hex(), fix)
        if end != len(self.tokens):
            fix = f"they end at the prompt's end, {len(self.tokens)}"
            raise InvalidRequestError("segments", end, fix)
        if segment.kind != "miss":
            fix = "the last is a miss: its logits are wanted"
            raise InvalidRequestError("segments", segment.kind, fix)

    def count(self, kind: Kind) -> int:
        """Return how many tokens are of *kind*."""
        return sum(len(segment) for segment in self.segments if segment.kind == kind)

    def of_kind(self, kind: Kind) -> Iterator[tuple[int, Segment]]:
        """Yield the segments of *kind* with their indices."""
        for index, segment in enumerate(self.segments):
            if segment.kind == kind:
                yield index, segment

    def shares(self) -> dict[int, float]:
        """Return the share of each ``approx`` segment that is computed, by its index."""
        return {
            index: self.ratio if segment.ratio is None else segment.ratio
            for index, segment in self.of_kind("approx")
        }

    def as_miss(self, indices: frozenset[int]) -> BlendPlan:
        """Return the plan that computes the segments at *indices* instead."""
        if not indices:
            return self
        segments = tuple(
            Segment(segment.start, segment.end, "miss") if index in indices else segment
            for index, segment in enumerate(self.segments)
        )
        return replace(self, segments=segments)

    def without(self, *kinds: Kind) -> BlendPlan:
        """Return the plan that computes the segments of *kinds* instead."""
        return self.as_miss(frozenset(index for kind in kinds for index, _ in self.of_kind(kind)))

    def with_ratio(self, ratio: float) -> BlendPlan:
        """Return the plan with *ratio* at every check layer, and in segments that had less."""
        if ratio == self.ratio:
            return self
        segments = tuple(
            segment if segment.ratio is None else replace(segment, ratio=max(segment.ratio, ratio))
            for segment in self.segments
        )
        return replace(self, segments=segments, ratio=ratio, ratios=())

    def chosen_tokens(self, ratio: float) -> float:
        """Return how many ``approx`` tokens *ratio* computes; a segment's own ratio is kept."""
        return sum(
            len(s) * (ratio if s.ratio is None else max(s.ratio, ratio))
            for _, s in self.of_kind("approx")
        )


def _check_share(field_name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InvalidRequestError(field_name, value, "a share is from 0 to 1")
