"""Plans and hints: which of a prompt's chunks to load, and engines' hints about chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvstore.proto.errors import InvalidRequestError, check_text


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Prefill time of t tokens after a context of c: start_s + token_s t + pair_s t c.

    The linear term is the cost of the weights, the product that of attention. Fit it to the
    engine's telemetry. Raises InvalidRequestError for a negative or non-finite number.
    """

    start_s: float
    token_s: float
    pair_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("start_s", "token_s", "pair_s"):
            if not 0 <= getattr(self, field) < math.inf:
                raise InvalidRequestError(field, getattr(self, field), "finite, not negative")

    def seconds(self, tokens: int, context: int) -> float:
        """Return the time of *tokens* after *context* tokens; 0 for no tokens."""
        if not tokens:
            return 0.0
        return self.start_s + self.token_s * tokens + self.pair_s * tokens * context


@dataclass(frozen=True, slots=True)
class PlanRange:
    """Chunks *first* to *stop*, exclusive: to load, or else to recompute.

    ``ms`` is the time of this range alone; ranges of both kinds overlap in time.
    """

    first: int
    stop: int
    load: bool
    ms: float


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Which chunks of a prompt to load and which to recompute, in order and without gaps.

    ``plan_ms`` is the time until all of the prompt's KV is present, including the tokens after its
    last chunk, when loads run in order from the start and the engine computes each range as soon
    as everything before it is present. ``recompute_ms`` is the time without the store; ``plan_ms``
    is never more. Both are estimates; for a deadline give the plan's chunks to
    ``kvstore.client.planning``.
    """

    ranges: tuple[PlanRange, ...]
    plan_ms: float
    recompute_ms: float

    @property
    def loaded(self) -> Sequence[int]:
        """Indexes of the chunks to load, ascending."""
        return [at for one in self.ranges if one.load for at in range(one.first, one.stop)]


@dataclass(frozen=True, slots=True)
class EngineTerms:
    """Sent by an engine with a lookup to get a plan: its speed and the prompt's length.

    ``prompt_tokens`` includes those after the last chunk; 0: as many as the chunks have.
    Raises InvalidRequestError.
    """

    prefill: PrefillModel
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_tokens < 1 << 32:
            raise InvalidRequestError("prompt_tokens", self.prompt_tokens, "a count, or 0")


MAX_PRIORITY = 100
NO_PRIORITY = 50
"""Priority of chunks without one."""
MAX_CATEGORY_CHARS = 64
MAX_HINT_MS = (1 << 32) - 1
MAX_PROMPT_TOKENS = (1 << 32) - 1
MAX_HANDOVER_MS = 600_000


class Reuse(IntEnum):
    """The engine's estimate of whether the chunks will be requested again."""

    unknown = 0
    discard = 1
    keep = 2


@dataclass(frozen=True, slots=True)
class Hints:
    """An engine's hints about chunks; wrong ones only cost its own hit ratio.

    ``reuse``: whether they will be requested again; its weight is learned.
    ``priority``: 1 to 100, the lower is evicted first; 0: none, as 50.
    ``ttl_ms``: time to live; 0: unlimited. ``pin_ms``: not evicted for this long, within the
    server's limit of pins; 0: not pinned. ``category``: the kind of prompt, at most 64 printable
    characters. ``prompt_tokens``: length of the whole prompt; 0: unknown. ``handover_ms``: another
    engine is about to read them: not evicted until read once, at most this long, within the limit
    of pins; 0: no hand-over.

    Raises InvalidRequestError.
    """

    reuse: Reuse = Reuse.unknown
    priority: int = 0
    ttl_ms: int = 0
    pin_ms: int = 0
    category: str = ""
    prompt_tokens: int = 0
    handover_ms: int = 0

    def __post_init__(self) -> None:
        if self.reuse not in Reuse.__members__.values():
            fix = "use 0 (unknown), 1 (discard) or 2 (keep)"
            raise InvalidRequestError("hints.reuse", self.reuse, fix)
        object.__setattr__(self, "reuse", Reuse(self.reuse))
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value <= limit:
                raise InvalidRequestError(f"hints.{name}", value, f"use 0 to {limit}")
        check_text("hints.category", self.category, MAX_CATEGORY_CHARS)


_LIMITS = {
    "priority": MAX_PRIORITY,
    "ttl_ms": MAX_HINT_MS,
    "pin_ms": MAX_HINT_MS,
    "prompt_tokens": MAX_PROMPT_TOKENS,
    "handover_ms": MAX_HANDOVER_MS,
}

NO_HINTS = Hints()
