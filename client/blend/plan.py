"""What is to be blended: a prompt, cut into segments, and where the KV of each comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import content_digest, tokens_le32
from kvstore.proto.types import RopeParameters

MAX_PROMPT_TOKENS = 1 << 20
MAX_SEGMENTS = 1 << 13
MAX_CHECK_LAYERS = 8

Kind: TypeAlias = Literal["exact", "approx", "miss"]
UNROTATED = -1
"""``src_pos`` of keys that are stored without their rotation."""


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
    context; ``miss``: to be computed. ``chunk_id`` is the content digest of the tokens,
    ``variant`` names the copy, ``src_pos`` is the position of its first token when it was
    computed. ``ratio`` replaces the plan's for this segment. ``scores``: how much each token
    gains by being computed anew, as learned from feedback. ``origin`` None: the engine's own.
    Raises InvalidRequestError.
    """

    start: int
    end: int
    kind: Kind
    chunk_id: bytes = b""
    variant: bytes = b""
    src_pos: int = UNROTATED
    ratio: float | None = None
    scores: tuple[float, ...] | None = None
    origin: Origin | None = None
    extra: tuple[bytes, ...] = ()
    """Further ids that its content digest covers, such as those of images."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise InvalidRequestError("segment", (self.start, self.end), "give start < end, from 0")
        if self.kind not in ("exact", "approx", "miss"):
            raise InvalidRequestError("segment.kind", self.kind, "use exact, approx or miss")
        if self.src_pos < UNROTATED:
            raise InvalidRequestError("segment.src_pos", self.src_pos, "use 0 or more, -1 for none")
        if self.ratio is not None:
            _share("segment.ratio", self.ratio)
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

    For experiments with plans made by hand, as neither gained anything where it was measured:
    with *head_tokens* the first so many tokens of each ``approx`` segment are chosen before all
    others, with *granularity* whole blocks of so many tokens are chosen.
    """

    tokens: tuple[int, ...]
    segments: tuple[Segment, ...]
    ratio: float = 0.3
    selector: str = "hybrid"
    check_layers: tuple[int, ...] = (1,)
    ratios: tuple[float, ...] = ()
    head_tokens: int = 0
    granularity: int = 1

    def __post_init__(self) -> None:
        self._check_tiles()
        self._check_numbers()
        self._check_digests()

    def _check_tiles(self) -> None:
        if not 0 < len(self.tokens) <= MAX_PROMPT_TOKENS:
            raise InvalidRequestError("tokens", len(self.tokens), f"1 to {MAX_PROMPT_TOKENS}")
        if not 0 < len(self.segments) <= MAX_SEGMENTS:
            raise InvalidRequestError("segments", len(self.segments), f"1 to {MAX_SEGMENTS}")
        place = 0
        for segment in self.segments:
            if segment.start != place:
                raise InvalidRequestError(
                    "segment.start", segment.start, f"segments tile the prompt: start at {place}"
                )
            place = segment.end
        if place != len(self.tokens):
            raise InvalidRequestError(
                "segments", place, f"they end at the prompt's end, {len(self.tokens)}"
            )
        if self.segments[-1].kind != "miss":
            raise InvalidRequestError(
                "segments", self.segments[-1].kind, "the last is a miss: its logits are wanted"
            )

    def _check_numbers(self) -> None:
        _share("ratio", self.ratio)
        rising = (a >= b for a, b in zip(self.check_layers, self.check_layers[1:], strict=False))
        if (
            len(self.check_layers) > MAX_CHECK_LAYERS
            or any(rising)
            or min((1, *self.check_layers)) < 1
        ):
            raise InvalidRequestError(
                "check_layers", self.check_layers, "rising, from 1: layer 0 cannot deviate"
            )
        if self.ratios and len(self.ratios) != len(self.check_layers):
            raise InvalidRequestError("ratios", self.ratios, "give one for each check layer")
        for share in self.ratios:
            _share("ratios", share)
        if any(a < b for a, b in zip(self.ratios, self.ratios[1:], strict=False)):
            raise InvalidRequestError("ratios", self.ratios, "a later layer chooses among fewer")
        if self.head_tokens < 0 or self.granularity < 1:
            found = (self.head_tokens, self.granularity)
            raise InvalidRequestError("head_tokens, granularity", found, "at least 0 and 1")

    def _check_digests(self) -> None:
        for segment in self.segments:
            if not segment.chunk_id:
                continue
            tokens = tokens_le32(self.tokens[segment.start : segment.end])
            if content_digest(tokens, segment.extra) != segment.chunk_id:
                raise InvalidRequestError(
                    "segment.chunk_id",
                    segment.chunk_id.hex(),
                    f"tokens {segment.start} to {segment.end} are others: look the chunk up again",
                )

    def count(self, kind: Kind) -> int:
        """Return how many tokens are of *kind*."""
        return sum(len(segment) for segment in self.segments if segment.kind == kind)

    def of_kind(self, kind: Kind) -> Iterator[tuple[int, Segment]]:
        """Yield the segments of *kind* with their indices."""
        for index, segment in enumerate(self.segments):
            if segment.kind == kind:
                yield index, segment

    def as_miss(self, indices: frozenset[int]) -> BlendPlan:
        """Return the plan that computes the segments at *indices* instead."""
        if not indices:
            return self
        segments = tuple(
            Segment(segment.start, segment.end, "miss") if index in indices else segment
            for index, segment in enumerate(self.segments)
        )
        return replace(self, segments=segments)

    def with_ratio(self, ratio: float) -> BlendPlan:
        """Return the plan with *ratio* at every check layer, and in segments that had less."""
        if ratio == self.ratio:
            return self
        segments = tuple(
            segment if segment.ratio is None else replace(segment, ratio=max(segment.ratio, ratio))
            for segment in self.segments
        )
        return replace(self, segments=segments, ratio=ratio, ratios=())

    def without(self, *kinds: Kind) -> BlendPlan:
        """Return the plan that computes the segments of *kinds* instead."""
        found = (index for kind in kinds for index, _ in self.of_kind(kind))
        return self.as_miss(frozenset(found))

    def chosen_tokens(self, ratio: float) -> float:
        """Return how many ``approx`` tokens *ratio* computes, segments' own ratios kept to."""
        return sum(
            len(s) * (ratio if s.ratio is None else max(s.ratio, ratio))
            for _, s in self.of_kind("approx")
        )


def _share(field_name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InvalidRequestError(field_name, value, "a share is from 0 to 1")
