"""What an engine takes to compute KV: the alternative to loading it."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.proto.plans import PrefillModel as PrefillModel


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
