"""What an engine takes to compute KV: the alternative to loading it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.proto.plans import PrefillModel as PrefillModel

LEAST_TOKENS = 32
"""Fewer take what a step takes, however fast the engine is."""
SAMPLES_KEPT = 32
DOUBT = 2.0
"""Where only estimates are compared, an engine counts as so many times slower than it was: a hit
that would have been sooner computed costs little, and one given up in vain costs the engine."""
LEAST_LEFT_S = 0.001
"""What is left at least of a deadline, once it has passed: no load is worth it then."""

LEAST_LOOKUP_MS = 50
"""What a lookup may take however near the deadline is: one that is late holds up others, too."""


@dataclass(slots=True)
class Deadline:
    """A request with a deadline, ``deadline_s`` seconds from ``began_s`` on.

    ``compute`` is given chunks of the prompt, from the first one on, while the last ones load;
    None for an engine that computes nothing until the loads are over. Afterwards ``computed`` is
    how many it was given.
    """

    deadline_s: float
    compute: Callable[[range], None] | None = None
    computed: int = 0
    began_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative once it is late."""
        return self.deadline_s - (time.monotonic() - self.began_s)


class PrefillMeter:
    """Learns what an engine takes a token, from what it computed. Any thread may call.

    The median of the last SAMPLES_KEPT, by tokens: a pause between two steps, or a model that is
    compiled at its first one, moves nothing for long, and a few tokens take what a step takes.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=SAMPLES_KEPT)
        self._lock = threading.Lock()

    def observe(self, tokens: int, seconds: float) -> None:
        """Take note that *tokens* were computed in so many seconds; of too few nothing."""
        if tokens >= LEAST_TOKENS and seconds > 0:
            with self._lock:
                self._seen.append((seconds / tokens, tokens))

    def model(self, doubt: float = 1.0) -> PrefillModel | None:
        """Return what a token takes, times *doubt*; None before anything was computed."""
        with self._lock:
            samples = sorted(self._seen)
        left = sum(tokens for _, tokens in samples) / 2
        for token_s, tokens in samples:
            left -= tokens
            if left <= 0:
                return PrefillModel(0.0, doubt * token_s)
        return None


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
