"""Replay of a block trace on two tiers: writes and hits of admission ``auto``, and write-through.

Policies, admission and reuse estimates are those of the server, without bytes and time. Capacity is
in blocks.
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
"""For all blocks of a prompt except the last."""


@dataclass(slots=True)
class TierCounts:
    """Blocks requested, found on either tier, and written to the slow one."""

    requested: int = 0
    hits: int = 0
    written: int = 0


@dataclass(slots=True)
class Tier:
    """One tier of the replay: its rows, at most ``places``."""

    places: int
    here: set[int] = field(default_factory=set)
    policy: LruEviction = field(default_factory=LruEviction)

    @property
    def is_full(self) -> bool:
        return len(self.here) >= self.places


class TierReplay:
    """A fast tier above a slow one. Rows are blocks from 1 on; the parent of a block never changes.

    A request finds its longest prefix on either tier. Then its blocks on the slow tier are
    promoted, missing ones are stored on the fast tier, head first, and victims of the fast tier
    without a copy are offered to the slow one. A request never evicts its own blocks: without
    another victim the rest of it is not stored.
    """

    def __init__(
        self, places: tuple[int, int], admission: TierAdmission, forecast: ReuseForecast
    ) -> None:
        """*places*: capacities of the fast and the slow tier, in blocks."""
        self._fast, self._slow = map(Tier, places)
        self._admission = admission
        self._forecast = forecast
        self._parents: dict[int, int] = {}
        self._children: Counter[int] = Counter()
        """Number of children of each block on any tier."""
        self.counts = TierCounts()

    def request(self, chain: Sequence[int], now_s: float, facts: InsertInfo = FULL) -> int:
        """Request a chain of blocks; return the length of its prefix on any tier."""
        held = [self._is_held(row) for row in chain]
        hits = held.index(False) if False in held else len(held)
        self.counts.requested += len(chain)
        self.counts.hits += hits
        rows: Rows = np.array(chain, np.intp)
        self._record(rows, facts, now_s)
        for tier in (self._fast, self._slow):
            tier.policy.touch(rows, now_s)
        own, parent = set(chain), NO_ROW
        for row in chain:
            self._parents.setdefault(row, parent)
            parent = row
            if not self._bring(row, own, now_s):
                break
        return hits

    def _is_held(self, row: int) -> bool:
        return row in self._fast.here or row in self._slow.here

    def _record(self, rows: Rows, facts: InsertInfo, now_s: float) -> None:
        forecast, history, chain = self._forecast, self._forecast.history, rows.tolist()
        is_new = [not history.hits_of(row) for row in chain]
        seen = is_new.index(True) if True in is_new else len(chain)
        forecast.requested(rows[:seen], len(chain), now_s)
        history.requested(rows[:seen], len(chain), now_s)
        parent = chain[seen - 1] if seen else NO_ROW
        history.seen_chain(rows[seen:], parent, facts, now_s)
        for row in chain[seen:]:
            forecast.seen(row, parent, facts if row == chain[-1] else FULL, now_s)
            parent = row

    def _bring(self, row: int, own: set[int], now_s: float) -> bool:
        """Bring *row* to the fast tier; return whether there was space."""
        fast = self._fast
        if row in fast.here:
            self._offer(row, Trigger.asked, own, now_s)
            return True
        while fast.is_full:
            victim = next(fast.policy.victims(own.__contains__, now_s), NO_ROW)
            if not victim:
                return False
            self._offer(victim, Trigger.leaving, own, now_s)
            self._remove(fast, victim)
        self._insert(fast, row, now_s)
        self._offer(row, Trigger.stored, own, now_s)
        return True

    def _insert(self, tier: Tier, row: int, now_s: float) -> None:
        self._children[self._parents[row]] += not self._is_held(row)
        tier.here.add(row)
        tier.policy.insert(row, self._parents[row], 1, now_s)

    def _remove(self, tier: Tier, row: int) -> None:
        tier.here.discard(row)
        tier.policy.remove(row)
        self._children[self._parents[row]] -= not self._is_held(row)

    def _offer(self, row: int, trigger: Trigger, own: set[int], now_s: float) -> None:
        """Write *row* to the slow tier if it is missing there, admitted, and there is space."""
        slow, forecast = self._slow, self._forecast
        if row in slow.here or not slow.places:
            return
        chance = forecast.chance(row, now_s) if trigger is Trigger.leaving else 1.0
        is_needed = self._children[row] > 0
        copy = CopyRequest(trigger, 1, forecast.history.hits_of(row), chance, is_needed=is_needed)
        if not self._admission.admits(copy, 0.0):
            return
        if slow.is_full:

            def keep(one: int) -> bool:
                # The only copy, with children on the fast tier.
                return one in own or (self._children[one] > 0 and one not in self._fast.here)

            victim = next(slow.policy.victims(keep, now_s), NO_ROW)
            if not victim:
                return
            forecast.evicted(victim, now_s)
            self._remove(slow, victim)
        self._insert(slow, row, now_s)
        self.counts.written += 1


def run_two_tier(trace: BlockTrace, shares: tuple[float, float], admission: str) -> TierCounts:
    """Replay *trace* with an *admission*; return the counts of the second half.

    The first half trains the statistics.
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
        points.append(100 * (ours.hits - theirs.hits) / max(1, ours.requested))
    report.add("two_tier_bytes_ratio", max(ratios), "over write-through", "at most 0.88")
    report.add("two_tier_hit_diff", min(points), "points, the worst size", "at least 0")
