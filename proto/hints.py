"""Hints: what an engine says of chunks that it puts or releases. A server may ignore them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.text import check_text

MAX_PRIORITY = 100
NO_PRIORITY = 50
"""What counts for chunks of which nobody gave a priority."""
MAX_CATEGORY_CHARS = 64
MAX_HINT_MS = (1 << 32) - 1
MAX_PROMPT_TOKENS = (1 << 32) - 1
MAX_HANDOVER_MS = 600_000


class Reuse(IntEnum):
    """Whether the chunks will be asked for again, as far as the engine knows."""

    unknown = 0
    discard = 1
    keep = 2


@dataclass(frozen=True, slots=True)
class Hints:
    """Beliefs about chunks, none of which can harm but the hit rate of who gave them.

    ``reuse``: whether they will be asked for again; how far that is believed is learned.
    ``priority``: 1 to 100, of two chunks about to go the lower goes first; 0: no word, as 50.
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
            raise InvalidRequestError(
                "hints.reuse", self.reuse, "use 0 (unknown), 1 (discard) or 2 (keep)"
            )
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
