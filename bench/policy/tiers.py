"""Two tiers under a block trace: what the value rule writes and finds, beside write-through.

The policies, the admission and the chances are those of the server; only bytes and time are
not there. Each block takes one place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.lib.report import Report
from kvstore.cli.simulate import BlockTrace
from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.policy import Rows
from kvstore.server.eviction.reuse_statistics import ReuseForecast
from kvstore.server.tiering.admission import ADMISSIONS, CopyRequest, TierAdmission, Trigger

SHARES = ((0.01, 0.10), (0.05, 0.25))
"""Fast and slow tier as shares of the footprint."""
FULL = InsertInfo()
"""Of all blocks but the last of a prompt."""


@dataclass(slots=True)
class TierCounts:
    """Blocks asked for, found on either tier, and written to the slow one."""

    asked: int = 0
    hits: int = 0
    written: int = 0


@dataclass(slots=True)
class Tier:
    """One tier of the replay: which rows are there, in at most ``places``."""

    places: int
    here: set[int] = field(default_factory=set)
    policy: LruEviction = field(default_factory=LruEviction)

    @property
    def is_full(self) -> bool:
        return len(self.here) >= self.places


class TierReplay:
    """A fast tier above a slow one. Rows are blocks, 1 and up; a block has one parent for good.

    A request finds its longest prefix on either tier. Then what is on the slow one comes up,
    what is missing is stored on the fast one, head first, and victims of the fast tier without
    a copy are offered to the slow one. A request's own blocks are never its victims: when nothing
    else may go, the rest of it is not stored.
    """

    def __init__(
        self, places: tuple[int, int], admission: TierAdmission, forecast: ReuseForecast
    ) -> None:
        """*places*: what the fast tier and the slow one hold, in blocks."""
        self._fast, self._slow = map(Tier, places)
        self._admission = admission
        self._forecast = forecast
        self._parents: dict[int, int] = {}
        self._children: Counter[int] = Counter()
        """Blocks on any tier that continue each."""
        self.counts = TierCounts()

    def request(self, chain: Sequence[int], now_s: float, facts: InsertInfo = FULL) -> int:
        """Ask for a chain of blocks; return how many of its first were on a tier."""
        held = [self._is_held(row) for row in chain]
        hits = held.index(False) if False in held else len(held)
        self.counts.asked += len(chain)
        self.counts.hits += hits
        rows: Rows = np.array(chain, np.intp)
        self._remember(rows, facts, now_s)
        for tier in (self._fast, self._slow):
            tier.policy.touch(rows, now_s)
        mine, parent = set(chain), NO_ROW
        for row in chain:
            self._parents.setdefault(row, parent)
            parent = row
            if not self._bring(row, mine, now_s):
                break
        return hits

    def _is_held(self, row: int) -> bool:
        return row in self._fast.here or row in self._slow.here

    def _remember(self, rows: Rows, facts: InsertInfo, now_s: float) -> None:
        forecast, history, chain = self._forecast, self._forecast.history, rows.tolist()
        is_new = [not history.hits_of(row) for row in chain]
        known = is_new.index(True) if True in is_new else len(chain)
        forecast.requested(rows[:known], len(chain), now_s)
        history.requested(rows[:known], len(chain), now_s)
        parent = chain[known - 1] if known else NO_ROW
        history.seen_chain(rows[known:], parent, facts, now_s)
        for row in chain[known:]:
            forecast.seen(row, parent, facts if row == chain[-1] else FULL, now_s)
            parent = row

    def _bring(self, row: int, mine: set[int], now_s: float) -> bool:
        """Have *row* on the fast tier; return whether it could be had."""
        fast = self._fast
        if row in fast.here:
            self._offer(row, Trigger.asked, mine, now_s)
            return True
        while fast.is_full:
            victim = next(fast.policy.victims(mine.__contains__, now_s), NO_ROW)
            if not victim:
                return False
            self._offer(victim, Trigger.leaving, mine, now_s)
            self._remove(fast, victim)
        self._insert(fast, row, now_s)
        self._offer(row, Trigger.stored, mine, now_s)
        return True

    def _insert(self, tier: Tier, row: int, now_s: float) -> None:
        self._children[self._parents[row]] += not self._is_held(row)
        tier.here.add(row)
        tier.policy.insert(row, self._parents[row], 1, now_s)

    def _remove(self, tier: Tier, row: int) -> None:
        tier.here.discard(row)
        tier.policy.remove(row)
        self._children[self._parents[row]] -= not self._is_held(row)

    def _offer(self, row: int, moment: Trigger, mine: set[int], now_s: float) -> None:
        """Write *row* to the slow tier, if it is not there and admitted, and there is room."""
        slow, forecast = self._slow, self._forecast
        if row in slow.here or not slow.places:
            return
        chance = forecast.chance(row, now_s) if moment is Trigger.leaving else 1.0
        is_needed = self._children[row] > 0
        offer = CopyRequest(moment, 1, forecast.history.hits_of(row), chance, is_needed=is_needed)
        if not self._admission.admits(offer, 0.0):
            return
        if slow.is_full:

            def keep(one: int) -> bool:
                # Its one copy is the way to blocks of the fast tier.
                return one in mine or (self._children[one] > 0 and one not in self._fast.here)

            victim = next(slow.policy.victims(keep, now_s), NO_ROW)
            if not victim:
                return
            forecast.evicted(victim, now_s)
            self._remove(slow, victim)
        self._insert(slow, row, now_s)
        self.counts.written += 1


def run_two_tier(trace: BlockTrace, shares: tuple[float, float], admission: str) -> TierCounts:
    """Replay *trace* under the admission of that name; return the counts of the second half.

    The first half teaches the statistics.
    """
    fast, slow = (int(share * trace.blocks) for share in shares)
    tokens = trace.block_tokens
    forecast = ReuseForecast(AccessHistory(tokens), tokens)
    replay = TierReplay((fast, slow), ADMISSIONS[admission], forecast)
    for at, one in enumerate(trace.requests):
        if at == len(trace.requests) // 2:
            replay.counts = TierCounts()
        facts = InsertInfo(one.is_full, prompt_chunks=len(one.chain))
        replay.request(one.chain, one.time_s, facts)
    return replay.counts


def compare_writes(report: Report, trace: BlockTrace) -> None:
    ratios, points = [], []
    for shares in SHARES:
        ours, theirs = (run_two_tier(trace, shares, name) for name in ("auto", "through"))
        ratios.append(ours.written / max(1, theirs.written))
        points.append(100 * (ours.hits - theirs.hits) / max(1, ours.asked))
    report.add("two_tier_bytes_ratio", max(ratios), "over write-through", "at most 0.88")
    report.add("two_tier_hit_diff", min(points), "points, the worst size", "at least 0")
