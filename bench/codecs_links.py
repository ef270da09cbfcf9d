"""Over which links a codec pays: what a link delivers in decoded bytes, with it and without.

Encoding is off the way to the first token and not counted. Decoding overlaps the transfer, so
that the slower of the two is what a reader sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.codecs_speeds import Measured

LINKS_GBPS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 12.5)
"""GB/s of the link: a slow Redis to 100 GbE."""


def delivered_gbps(link_gbps: float, ratio: float, decode_gbps: float) -> float:
    """Return decoded GB/s over a link of *link_gbps*, one core decoding while bytes arrive."""
    return min(link_gbps * ratio, decode_gbps)


def break_even_gbps(ratio: float, decode_gbps: float, copy_gbps: float) -> float:
    """Return the fastest link over which the codec delivers more than raw bytes do.

    0 for one that never does.
    """
    return min(decode_gbps, copy_gbps) if ratio > 1 else 0.0


def gains(
    measured: Mapping[str, Measured], links: Sequence[float] = LINKS_GBPS
) -> dict[str, list[tuple[float, float]]]:
    """Return for each codec the gain over raw bytes at each link: pairs (GB/s, times)."""
    copy = measured["memcpy"].decode_gbps
    return {
        name: [
            (link, delivered_gbps(link, m.ratio, m.decode_gbps) / min(link, copy)) for link in links
        ]
        for name, m in measured.items()
        if name not in ("memcpy", "raw")
    }
