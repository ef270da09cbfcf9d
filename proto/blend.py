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
"""Segments of one prompt, including the gaps between the named ones."""
MAX_REQUESTED_CHUNKS = 1024
"""Chunks of one Resolve, and of one report."""
MAX_TAG_CHARS = 64
UNKNOWN = -1.0
"""Stands for a number that was not measured."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A chunk with the requested tokens, as computed in one prompt.

    ``parent`` is the chain digest of the chunk before it in that prompt, ``position`` the index of
    its first token there. ``context_impact``, ``overlap`` and ``fix_overhead`` are Cache-Craft's
    CCI, beta' and CFO for the requesting prompt. Numbers that were not measured are -1.
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
    """The variants of one chunk. ``is_exact``: the only variant is the KV of this very prompt.

    ``priority`` has one byte per token; tokens with a higher value gain more from recomputation.
    It is empty when no report covers these tokens.
    """

    is_exact: bool = False
    variants: tuple[Variant, ...] = ()
    priority: bytes = b""


@dataclass(frozen=True, slots=True)
class ResolvedSegment:
    """The chunks of one segment; ``ratio``: the share of its variants' tokens to recompute.

    ``load_ms`` is the load time of the best variants, ``recompute_ms`` the time to compute the
    whole segment; -1 when the request did not state the engine's speed.
    """

    chunks: tuple[ResolvedChunk, ...]
    ratio: float
    load_ms: float
    recompute_ms: float = UNKNOWN


@dataclass(frozen=True, slots=True)
class GateView:
    """A gate as a client sees it: whether KV of other prompts is served, and why.

    ``let_through`` and ``kept_out`` count requests, trials excluded; a Resolution leaves them 0.
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
    """For ACCURACY_TAG: the codecs whose own gates are open."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """The answer to a Resolve: one segment per requested segment, all chunks under a lease.

    ``exact_prefix`` counts the leading chunks of the prompt that are stored exactly.
    ``layer_order``: the model's layer numbers in the order of gets. ``is_shadow``: compare this
    request with a full prefill, and report. ``lease_id`` is 0 when nothing is stored;
    ``more_leases`` are those of a prompt that was resolved in several requests.
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
    """Attention from a chunk's tokens to an earlier chunk, in the variant's own prompt.

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
    """Blended against full prefill: mean KL(full || blended) per token in nats, top-1 agreement
    over the tokens whose top-1 is clear, and the number of tokens.
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
    """Measurements of a variant, by its digest; fields that were not measured stay empty.

    ``deviations``: a little-endian float16 per token, at ``layer``; -1 where not measured.
    ``selected``: one bit per token, lowest first, set if recomputed. ``query_attention``: the
    question's attention to each token, one byte. ``intra_mass``, with ``context``: the chunk's
    attention to itself.
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
    """Quality and timing of one blended request, for the gate of its ``tag``.

    ``ratio``: the recomputed share of the approximate tokens. ``full_ms`` is the time of a full
    prefill; times that were not measured are 0.
    """

    tag: str = ""
    chunks: tuple[ChunkReport, ...] = ()
    ratio: float = 0.0
    load_ms: float = 0.0
    compute_ms: float = 0.0
    full_ms: float = 0.0
    shadow: ShadowResult | None = None


def check_number(field: str, value: float, top: float = math.inf) -> float:
    """Return *value* if it is finite and from 0 to *top*. Raises InvalidRequestError."""
    if not (0 <= value <= top and value < math.inf):
        fix = "finite, not negative" if top == math.inf else f"a number from 0 to {top:g}"
        raise InvalidRequestError(field, value, fix)
    return value


ACCURACY_TAG = "accuracy:approximate"
"""Tag of lossy copies that state no bound. Each codec has a gate; this tag lists the open ones."""


def accuracy_tag(codec: str) -> str:
    """Return the gate's tag for copies that *codec* encoded with a loss and without a bound."""
    return f"{ACCURACY_TAG}:{codec}"


def check_tag(tag: str) -> str:
    """Return *tag* if it is valid. Raises InvalidRequestError."""
    return check_text("tag", tag, MAX_TAG_CHARS)
