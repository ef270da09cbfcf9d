"""What an engine takes to compute KV: the alternative to loading it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.proto.errors import InvalidRequestError


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


def chunks_worth_loading(
    load_us: Sequence[int], spans: Sequence[tuple[int, int]], total: int, prefill: PrefillModel
) -> int:
    """Return how many chunks to load of those in reach, the rest of the prompt being computed.

    ``load_us[i]`` is the load of the chunk at ``spans[i]``, first token and the one after its
    last, as a lookup estimates it; *total* the prompt's tokens. The fewest that end soonest.
    """
    best, best_s, loaded_s = 0, prefill.seconds(total, 0), 0.0
    for count, (load, (_, stop)) in enumerate(zip(load_us, spans, strict=True), start=1):
        loaded_s += load / 1e6
        # The last token is computed in any case: an engine needs its output.
        rest = max(1, total - stop)
        found_s = loaded_s + prefill.seconds(rest, total - rest)
        if found_s < best_s:
            best, best_s = count, found_s
    return best
