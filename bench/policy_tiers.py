"""Two tiers under a block trace: what the value rule writes and finds, beside write-through.

Rows for bench.policy; the sizes are shares of the trace's footprint, the counts those of its
second half, once the statistics of the first are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.tier_replay import LoadModel, TierCounts, TierReplay, TierTerms
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.reuse_statistics import ReuseForecast
from kvstore.server.tiering.admission import ADMISSIONS

SIZES = ((0.01, 0.10), (0.05, 0.25))
"""Fast and slow tier as shares of the footprint."""


class BlockRequest(NamedTuple):
    """One prompt of a trace: when it came, how long it is, and the blocks it is made of."""

    at_s: float
    tokens: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class TwoTierRow:
    """One run. ``mean_s`` is the mean time until a prompt's KV is there, by LoadModel."""

    admission: str
    is_exclusive: bool
    fast_share: float
    slow_share: float
    hit_rate: float
    fast_hit_rate: float
    written_bytes: int
    mean_s: float


def run_two_tier(
    trace: Iterable[BlockRequest],
    shares: tuple[float, float],
    admission: str,
    *,
    is_exclusive: bool = False,
) -> TwoTierRow:
    """Replay *trace* on tiers of *shares* of its footprint, under the admission of that name."""
    requests = list(trace)
    rows = _rows(requests)
    places = [int(share * len(rows)) for share in shares]
    terms = TierTerms(places[0], places[1], is_exclusive)
    model, rule = LoadModel(), ADMISSIONS[admission]
    forecast = ReuseForecast(AccessHistory(model.block_tokens), model.block_tokens)
    replay = TierReplay(LruEviction(), LruEviction(), terms, rule, forecast)
    times: list[float] = []
    for at, request in enumerate(requests):
        if at == len(requests) // 2:
            replay.counts = TierCounts()
            times.clear()
        is_full = request.tokens % model.block_tokens == 0
        chain = [rows[block] for block in request.blocks]
        found = replay.request(chain, request.at_s, is_full=is_full)
        times.append(model.seconds(request.tokens, *found))
    counts = replay.counts
    return TwoTierRow(
        admission,
        is_exclusive,
        *shares,
        counts.hit_rate,
        counts.fast / counts.asked if counts.asked else 0.0,
        counts.written * model.block_bytes,
        model.mean_s(times),
    )


def _rows(requests: Sequence[BlockRequest]) -> dict[int, int]:
    rows: dict[int, int] = {}
    for request in requests:
        for block in request.blocks:
            rows.setdefault(block, len(rows) + 1)
    return rows


def two_tier_table(trace: Iterable[BlockRequest]) -> list[TwoTierRow]:
    """Return every admission at every size."""
    requests = list(trace)
    return [run_two_tier(requests, shares, name) for shares in SIZES for name in ADMISSIONS]


def two_tier_keys(rows: Sequence[TwoTierRow]) -> dict[str, float]:
    """Return the value rule beside write-through, each at its worst size.

    ``two_tier_bytes_ratio``: bytes written over those of write-through. ``two_tier_hit_diff``:
    points of hit rate more.
    """
    ratios, points = [], []
    for shares in SIZES:
        here = {row.admission: row for row in rows if (row.fast_share, row.slow_share) == shares}
        ours, theirs = here["auto"], here["through"]
        ratios.append(ours.written_bytes / max(1, theirs.written_bytes))
        points.append(100 * (ours.hit_rate - theirs.hit_rate))
    return {"two_tier_bytes_ratio": max(ratios), "two_tier_hit_diff": min(points)}
