"""Values of blending: variants of chunks, gates and reports."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstore.proto.errors import InvalidRequestError, check_text
from kvstore.proto.types import (
    DIGEST_BYTES,
    MAX_CHUNK_TOKENS,
    Accuracy,
    ChainDigest,
    RopeParameters,
)

MAX_SEGMENTS = 256
"""Of one prompt, those between the named ones included."""
MAX_ASKED_CHUNKS = 1024
"""Of one Resolve, and of one report."""
MAX_TAG_CHARS = 64
UNKNOWN = -1.0
"""A number that was not measured."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A chunk with the tokens that were asked for, as it was computed in one prompt.

    ``parent`` is the chain digest of what it was computed behind, ``position`` the place of its
    first token then. ``context_impact``, ``overlap`` and ``fix_overhead`` are Cache-Craft's CCI,
    beta' and CFO for the prompt that asked. Numbers that nobody measured are -1.
    """

    digest: ChainDigest
    parent: ChainDigest
    position: int
    tier: str
    load_ms: float
    size_bytes: int
    accuracy: Accuracy
    context_impact: float = UNKNOWN
    overlap: float = UNKNOWN
    fix_overhead: float = UNKNOWN
    deviation: float = UNKNOWN
    reports: int = 0


@dataclass(frozen=True, slots=True)
class ResolvedChunk:
    """What there is of one chunk. ``is_exact``: the KV of this very prompt, the only variant.

    ``priority`` has a byte for each token, the larger the more it is worth recomputing; empty
    when nobody has reported on these tokens.
    """

    is_exact: bool = False
    variants: tuple[Variant, ...] = ()
    priority: bytes = b""


@dataclass(frozen=True, slots=True)
class ResolvedSegment:
    """What there is of one segment; ``ratio``: the share of its variants' tokens to recompute.

    ``load_ms`` is that of what is named, the best variants; ``recompute_ms`` what the engine
    takes to compute all of it, -1 when it did not say how fast it is.
    """

    chunks: tuple[ResolvedChunk, ...]
    ratio: float
    load_ms: float
    recompute_ms: float = UNKNOWN


@dataclass(frozen=True, slots=True)
class GateView:
    """A gate as a client sees it: whether KV of other prompts is given out, and why.

    Of ``let_through`` and ``kept_out`` requests, trials left out, only the server knows.
    """

    is_open: bool
    ratio: float
    agreement: float = UNKNOWN
    divergence: float = UNKNOWN
    shadows: int = 0
    why: str = ""
    is_calibrated: bool = False
    speedup: float = UNKNOWN
    tag: str = ""
    model: str = ""
    let_through: int = 0
    kept_out: int = 0
    codecs: tuple[str, ...] = ()
    """Asked for ACCURACY_TAG: those whose own gates are open."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """The answer to a Resolve: a segment for each that was asked for, all of it under a lease.

    ``exact_prefix`` counts the chunks from the prompt's first on that are there as they were.
    ``layer_order``: layers by the model's numbers, as gets bring them. ``is_shadow``: compare
    this one with a full prefill, and report. ``lease_id`` is 0 when nothing is there;
    ``more_leases`` are those of a prompt that was asked for in several requests.
    """

    segments: tuple[ResolvedSegment, ...]
    exact_prefix: int
    gate: GateView
    layer_order: tuple[int, ...]
    rope: RopeParameters
    is_shadow: bool = False
    lease_id: int = 0
    lease_ttl_ms: int = 0
    more_leases: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ContextMass:
    """Attention that a chunk's tokens paid to a chunk before it, in the variant's own prompt.

    ``mass``: weights summed over the chunk's tokens, mean over heads and layers.
    """

    content: bytes
    tokens: int
    mass: float

    def __post_init__(self) -> None:
        if len(self.content) != DIGEST_BYTES:
            raise InvalidRequestError("context.content", self.content, f"give {DIGEST_BYTES} bytes")
        if not 1 <= self.tokens <= MAX_CHUNK_TOKENS:
            fix = f"use 1 to {MAX_CHUNK_TOKENS}"
            raise InvalidRequestError("context.tokens", self.tokens, fix)
        check_number("context.mass", self.mass)


@dataclass(frozen=True, slots=True)
class ShadowResult:
    """Blended against fully computed: mean KL(full || blended) a token in nats, the share with
    the same likeliest token of those whose likeliest is clear, and how many tokens there were.
    """

    divergence: float
    agreement: float
    tokens: int

    def __post_init__(self) -> None:
        check_number("shadow.divergence", self.divergence, 1e6)
        check_number("shadow.agreement", self.agreement, 1.0)
        if not 1 <= self.tokens < 1 << 32:
            raise InvalidRequestError("shadow.tokens", self.tokens, "at least one")


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """What was measured of a variant, by its digest; what was not stays empty.

    ``deviations``: a little-endian float16 a token, at ``layer``; -1 for one that was not measured.
    ``selected``: a bit a token that was recomputed, the first the lowest. ``query_attention``: what
    the question paid each token, a byte. ``intra_mass``: what it paid itself, with ``context``.
    """

    digest: bytes
    layer: int = 0
    deviations: bytes = b""
    selected: bytes = b""
    query_attention: bytes = b""
    context: tuple[ContextMass, ...] = ()
    intra_mass: float = 0.0


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """What one blended request was worth, to the gate of its ``tag``.

    ``ratio``: the share of the approximate tokens that was recomputed. ``full_ms`` is the time of
    a full prefill; times are 0 where they were not measured.
    """

    tag: str = ""
    chunks: tuple[ChunkReport, ...] = ()
    ratio: float = 0.0
    load_ms: float = 0.0
    compute_ms: float = 0.0
    full_ms: float = 0.0
    shadow: ShadowResult | None = None


def check_number(field: str, value: float, top: float = math.inf) -> float:
    """Return *value* if it is a number from 0 to *top*, and finite. Raises InvalidRequestError."""
    if not (0 <= value <= top and value < math.inf):
        fix = "finite, not negative" if top == math.inf else f"a number from 0 to {top:g}"
        raise InvalidRequestError(field, value, fix)
    return value


ACCURACY_TAG = "accuracy:approximate"
"""Of lossy copies that state no bound. Each codec has a gate; this tag asks which are open."""


def accuracy_tag(codec: str) -> str:
    """Return the tag of the gate of a model's copies that *codec* is lossy in without a bound."""
    return f"{ACCURACY_TAG}:{codec}"


def check_tag(tag: str) -> str:
    """Return *tag* if it can be one. Raises InvalidRequestError."""
    return check_text("tag", tag, MAX_TAG_CHARS)
