"""Which codec a tier's link is worth: the break-even rule, and nothing measured here."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.proto.codec_speed import CodecSpeed
from kvstore.proto.types import Fidelity


def choose_codec(
    candidates: Iterable[CodecSpeed], link_bytes_per_s: float, least: Fidelity
) -> CodecSpeed | None:
    """Return the codec that loads fastest over the link; None where raw frames do.

    A candidate has to win against raw frames even when its decoding waits for its load, so that
    a single chunk is never later for it; of those, the one wins whose loads are fastest when
    decoding runs beside the next load, and of equals the smaller. None loses more than *least*.
    """
    worth = [
        one
        for one in candidates
        if one.fidelity >= least and link_bytes_per_s < one.break_even_bytes_per_s
    ]
    return max(worth, key=lambda c: (c.load_bytes_per_s(link_bytes_per_s), c.ratio), default=None)
