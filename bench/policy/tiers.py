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
from kvstore.cli.simulate import BlockLine
from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.policy import EvictionPolicy, Rows
from kvstore.server.eviction.reuse_statistics import ReuseForecast
from kvstore.server.tiering.admission import ADMISSIONS, CopyRequest, TierAdmission, Trigger

FULL = InsertInfo()
"""Of all blocks but the last of a prompt."""


@dataclass(slots=True)
class TierCounts:
    """Blocks asked for, found on each tier, and written to the slow one."""

    asked: int = 0
    fast: int = 0
    slow: int = 0
    written: int = 0

    @property
    def hit_rate(self) -> float:
        return (self.fast + self.slow) / self.asked if self.asked else 0.0


@dataclass(slots=True)
class Tier:
    """One tier of the replay: who is there, by policy and by row, in at most ``places``."""

    policy: EvictionPolicy
    places: int
    here: set[int] = field(default_factory=set)

    def insert(self, row: int, parent: int, now_s: float) -> None:
        self.here.add(row)
        self.policy.insert(row, parent, 1, now_s)

    def remove(self, row: int) -> None:
        self.here.discard(row)
        self.policy.remove(row)


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
        self._fast, self._slow = (Tier(LruEviction(), count) for count in places)
        self._admission = admission
        self._forecast = forecast
        self._parents: dict[int, int] = {}
        self._children: Counter[int] = Counter()
        """Blocks on any tier that continue each."""
        self.counts = TierCounts()

    def request(
        self, rows: Sequence[int], now_s: float, *, is_full: bool = True
    ) -> tuple[int, int]:
        """Ask for a chain of blocks; return how many of its prefix were on each tier.

        *is_full*: whether the last fills its block.
        """
        fast, slow = self._found(rows)
        counts = self.counts
        counts.asked += len(rows)
        counts.fast += fast
        counts.slow += slow
        known: Rows = np.array(rows, np.intp)
        self._remember(known, is_full, now_s)
        self._fast.policy.touch(known, now_s)
        self._slow.policy.touch(known, now_s)
        mine = set(rows)
        parent = NO_ROW
        for row in rows:
            self._parents.setdefault(row, parent)
            parent = row
            if not self._bring(row, mine, now_s):
                break
        return fast, slow

    def _remember(self, rows: Rows, is_full: bool, now_s: float) -> None:
        forecast, history = self._forecast, self._forecast.history
        new = next(
            (at for at, row in enumerate(rows.tolist()) if not forecast.history.hits_of(row)),
            len(rows),
        )
        forecast.requested(rows[:new], len(rows), now_s)
        history.requested(rows[:new], len(rows), now_s)
        parent = int(rows[new - 1]) if new else NO_ROW
        facts = InsertInfo(is_full, prompt_chunks=len(rows))
        history.seen_chain(rows[new:], parent, facts, now_s)
        for row in rows[new:].tolist():
            forecast.seen(row, parent, FULL if row != rows[-1] else facts, now_s)
            parent = row

    def _found(self, rows: Sequence[int]) -> tuple[int, int]:
        fast = slow = 0
        for row in rows:
            if row in self._fast.here:
                fast += 1
            elif row in self._slow.here:
                slow += 1
            else:
                break
        return fast, slow

    def _bring(self, row: int, mine: set[int], now_s: float) -> bool:
        if row in self._fast.here:
            self._offer(row, Trigger.asked, mine, now_s)
            return True
        while len(self._fast.here) >= self._fast.places:
            victim = next(self._fast.policy.victims(mine.__contains__, now_s), NO_ROW)
            if not victim:
                return False
            self._offer(victim, Trigger.leaving, mine, now_s)
            self._remove(self._fast, victim)
        self._insert(self._fast, row, now_s)
        if row not in self._slow.here:
            self._offer(row, Trigger.stored, mine, now_s)
        return True

    def _insert(self, tier: Tier, row: int, now_s: float) -> None:
        if row not in self._fast.here and row not in self._slow.here:
            self._children[self._parents[row]] += 1
        tier.insert(row, self._parents[row], now_s)

    def _remove(self, tier: Tier, row: int) -> None:
        tier.remove(row)
        if row not in self._fast.here and row not in self._slow.here:
            self._children[self._parents[row]] -= 1

    def _offer(self, row: int, moment: Trigger, mine: set[int], now_s: float) -> None:
        if row in self._slow.here or not self._slow.places:
            return
        forecast = self._forecast
        chance = forecast.chance(row, now_s) if moment is Trigger.leaving else 1.0
        is_needed = self._children[row] > 0
        offer = CopyRequest(moment, 1, forecast.history.hits_of(row), chance, is_needed=is_needed)
        if not self._admission.admits(offer, 0.0):
            return
        if len(self._slow.here) >= self._slow.places and not self._make_room(mine, now_s):
            return
        self._insert(self._slow, row, now_s)
        self.counts.written += 1

    def _make_room(self, mine: set[int], now_s: float) -> bool:
        def keep(row: int) -> bool:
            # Its one copy is the way to blocks of the fast tier.
            return row in mine or (self._children[row] > 0 and row not in self._fast.here)

        victim = next(self._slow.policy.victims(keep, now_s), NO_ROW)
        if victim:
            self._forecast.evicted(victim, now_s)
            self._remove(self._slow, victim)
        return victim != NO_ROW

    def orphans(self) -> list[int]:
        here = self._fast.here | self._slow.here | {NO_ROW}
        return [row for row in sorted(here) if row and self._parents[row] not in here]


SHARES = ((0.01, 0.10), (0.05, 0.25))
"""Fast and slow tier as shares of the footprint."""


def run_two_tier(
    requests: Sequence[BlockLine], shares: tuple[float, float], admission: str
) -> TierCounts:
    """Replay *requests* under the admission of that name; return the counts of the second half.

    The first half teaches the statistics.
    """
    rows: dict[int, int] = {}
    for request in requests:
        for block in request.block_ids:
            rows.setdefault(block, len(rows) + 1)
    fast, slow = (int(share * len(rows)) for share in shares)
    tokens = requests[0].block_tokens
    forecast = ReuseForecast(AccessHistory(tokens), tokens)
    replay = TierReplay((fast, slow), ADMISSIONS[admission], forecast)
    for at, request in enumerate(requests):
        if at == len(requests) // 2:
            replay.counts = TierCounts()
        is_full = request.input_tokens % tokens == 0
        chain = [rows[block] for block in request.block_ids]
        replay.request(chain, request.time_s, is_full=is_full)
    return replay.counts


def compare_writes(report: Report, requests: Sequence[BlockLine]) -> None:
    ratios, points = [], []
    for shares in SHARES:
        found = {name: run_two_tier(requests, shares, name) for name in ADMISSIONS}
        ours, theirs = found["auto"], found["through"]
        ratios.append(ours.written / max(1, theirs.written))
        points.append(100 * (ours.hit_rate - theirs.hit_rate))
    report.add("two_tier_bytes_ratio", max(ratios), "over write-through", "at most 0.88")
    report.add("two_tier_hit_diff", min(points), "points, the worst size", "at least 0")
