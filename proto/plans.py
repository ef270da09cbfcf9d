"""Plans and hints: which of a prompt's chunks to load, and what engines say of chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvstore.proto.errors import InvalidRequestError, check_text


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Seconds for *tokens* behind *context* tokens: a + b tokens + c tokens context.

    The linear term is that of the weights, the other that of attention. Fit it to the engine's
    own telemetry. Raises InvalidRequestError for what is negative or no number.
    """

    start_s: float
    token_s: float
    pair_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("start_s", "token_s", "pair_s"):
            if not 0 <= getattr(self, field) < math.inf:
                raise InvalidRequestError(field, getattr(self, field), "finite, not negative")

    def seconds(self, tokens: int, context: int) -> float:
        """Return what *tokens* behind *context* others take; nothing for none."""
        if not tokens:
            return 0.0
        return self.start_s + self.token_s * tokens + self.pair_s * tokens * context


@dataclass(frozen=True, slots=True)
class PlanRange:
    """Chunks *first* to *stop*, the last not included: to load, or else to recompute.

    ``ms`` is what that takes by itself; ranges of both kinds overlap in time.
    """

    first: int
    stop: int
    load: bool
    ms: float


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Which chunks of a prompt to load and which to recompute, in order and without gaps.

    ``plan_ms`` is from now until all of the prompt's KV is there, the tokens behind its last
    chunk included, when loads run in order from the start and the engine computes each range as
    soon as what comes before it is there. ``recompute_ms`` is the same without this service:
    ``plan_ms`` is never more. Both are estimates; for a deadline give the plan's chunks to
    ``kvstore.client.planning``.
    """

    ranges: tuple[PlanRange, ...]
    plan_ms: float
    recompute_ms: float

    @property
    def loaded(self) -> Sequence[int]:
        """The places of the chunks to load, ascending."""
        return [at for one in self.ranges if one.load for at in range(one.first, one.stop)]


@dataclass(frozen=True, slots=True)
class EngineTerms:
    """What an engine sends with a lookup to get a plan: its speed and how long the prompt is.

    ``prompt_tokens`` counts those behind the last chunk, too; 0: as many as the chunks have.
    Raises InvalidRequestError.
    """

    prefill: PrefillModel
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_tokens < 1 << 32:
            raise InvalidRequestError("prompt_tokens", self.prompt_tokens, "a count, or 0")


MAX_PRIORITY = 100
NO_PRIORITY = 50
"""Of chunks without a priority."""
MAX_CATEGORY_CHARS = 64
MAX_HINT_MS = (1 << 32) - 1
MAX_PROMPT_TOKENS = (1 << 32) - 1
MAX_HANDOVER_MS = 600_000


class Reuse(IntEnum):
    """Whether the chunks will be requested again, as far as the engine knows."""

    unknown = 0
    discard = 1
    keep = 2


@dataclass(frozen=True, slots=True)
class Hints:
    """An engine's hints about chunks; wrong ones cost its own hit rate alone.

    ``reuse``: whether they will be requested again; its weight is learned.
    ``priority``: 1 to 100, of two chunks about to go the lower goes first; 0: none, as 50.
    ``ttl_ms``: forgotten after this; 0: never. ``pin_ms``: not evicted for this long, within the
    server's limit of pins; 0: not pinned. ``category``: what kind of prompt this is, at most 64
    printable characters. ``prompt_tokens``: those of the whole prompt; 0: unknown.
    ``handover_ms``: another engine is about to read them: not evicted until they were read once,
    for so long at most, within the limit of pins; 0: not handed over.

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
