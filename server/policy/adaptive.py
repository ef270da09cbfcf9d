"""The policy that follows whichever of several would have hit most, as their shadows show."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW, spare_rows
from kvstore.server.policy.asked_report import Report
from kvstore.server.policy.base import EvictionPolicy
from kvstore.server.policy.hedge import Hedge
from kvstore.server.policy.history import History
from kvstore.server.policy.hit_density import HitDensityEviction
from kvstore.server.policy.leaves import LeafFirstEviction
from kvstore.server.policy.mirror import Mirror
from kvstore.server.policy.radix import Rows
from kvstore.server.policy.registry import UNGUARDED, make_policy
from kvstore.server.policy.shadow import NODES, Asked, Cast, ShadowSet

CANDIDATES = ("hit_density", UNGUARDED, "lru", "s3fifo", "lfu")
"""The policies that are tried; the first is followed until another has shown itself better.

By hit density there are two: its guard against LRU lets it go on only when what it lost is a
small share again, and here is seen sooner what it would hit.
"""

ROUND_CHUNKS = 256
"""Sampled chunks asked for between two decisions."""

LESSON_CHUNKS = 64
"""The same between two weighings of the candidates in a small cache."""

_KEPT = 1 - 1 / 32
"""The weight that hits keep from round to round."""

_MARGIN = 1.01
_LEAST_MORE_HITS = 32
_LEAST_ASKED = 10 * ROUND_CHUNKS
_COST = 0.4
"""Hits that are lost for each chunk that the new one's cache would have and the old one's not."""

_MUCH_MORE = 0.1
"""The share of more hits at which that is no matter."""

_AWAITED = 1 << 14

_SHARES = 16
"""Parts that a small cache is shared out in."""

_BY_DENSITY = ("hit_density", UNGUARDED, "lru")  # as each of these it can name victims

_STEP = 7
"""Odd, and far from a divisor: batches one after the other fall into shares evenly."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which policy is followed, and why.

    *hit_ratios* are those of the candidates' shadows, of chunks, the latest counting most; None
    while nothing is known. *since_s* is on the caller's clock, *sample_rate* the share of chunks
    that the shadows see, and *sampled* how many of those were asked for lately.
    """

    policy: str
    since_s: float
    switches: int
    hit_ratios: Mapping[str, float | None]
    sample_rate: float
    sampled: int


class AdaptiveEviction(EvictionPolicy):
    """Several policies told of everything, victims from the one whose shadow is hit most.

    The idea of choosing among experts by what they would have hit is that of ACME (Ari et al.,
    2002) and LeCaR (Vietri et al., HotStorage 2018); here each candidate runs in small over a
    hashed sample of the chunks (see ``shadow``), so that what is compared is what each would do
    by itself. Another is followed when it had at least 1 % more hits, 32 more, and 0.4 more for
    each chunk that it has and the one followed has not, which is what a switch may cost, or a
    tenth more in all; and 2560 sampled chunks were asked for, all weighted by age. Decisions are
    256 sampled chunks apart.

    While all chunks are in the sample, victims are such that what stays is what the shadows would
    have: a policy works badly for long on what another one left, its shadow does not. Such a
    small cache is shared out: of chunks stored together one candidate says whether they stay,
    and each has a say in as many as its weight among them (see ``hedge``), every 64 chunks anew.
    Few hits tell little of who is better, so the loss to the best is a part of a wrong choice's.

    How large the cache is shows when a victim is first asked for: what is here then is what
    fits. Until then all candidates would hit the same. Thirteen bytes a row, and the candidates';
    those that hit density can name victims as have no columns of their own where it is.
    """

    def __init__(
        self,
        history: History,
        candidates: Sequence[str] = CANDIDATES,
        limit_nodes: int = NODES,
    ) -> None:
        """Raises InvalidRequestError for candidates that are none."""
        if not candidates or "adaptive" in candidates:
            raise InvalidRequestError(
                "candidates", list(candidates), "name policies to choose from"
            )
        self._names = tuple(candidates)
        self._history = history
        self._density = None
        if "hit_density" in candidates:
            self._density = HitDensityEviction(history)
        self._of_name = {name: self._made(name) for name in candidates}
        self._policies = list(dict.fromkeys(self._of_name.values()))
        """What is told of events: for those of ``_BY_DENSITY`` one, where hit density is there."""
        self._mirror = Mirror(history, lambda: self._shadows.rate)
        shadowed = [make_policy(name, self._mirror) for name in candidates]
        self._shadow_density = next(
            (one for one in shadowed if isinstance(one, HitDensityEviction)), None
        )
        casts = [Cast(policy) for policy in shadowed]
        self._shadows = ShadowSet(casts, self._mirror.copy, limit_nodes)
        history.followers.append(self._follow)
        history.watchers.append(self._watch)
        self._sizes = array("Q", [0])
        """Bytes of the chunks here; 0 for those that are not."""
        self._above = array("I", [NO_ROW])
        """The nearest sampled chunk, from the row's up: where the shadows' tree goes on."""
        self._shares = array("B", [0])
        """In which share of a small cache each chunk is."""
        self._owners = [0] * _SHARES
        """The candidate that has a say in each share."""
        self._hedge = Hedge(len(candidates), 2 if UNGUARDED in candidates[:2] else 1)
        self._batch, self._latest = 0, NO_ROW
        self._used_bytes = 0
        self._full_bytes = 0.0
        self._awaited: set[int] = set()
        """Sampled rows that were asked for while not here: when they come, it was counted."""
        self._strays: set[int] = set()
        """Chunks here that the shadow of their owner has not, while that has all it would have."""
        self._chosen, self._switches, self._since_s = 0, 0, 0.0
        self._round, self._round_asked = [0.0] * len(candidates), 0
        self._lesson, self._lesson_asked = [0.0] * len(candidates), 0
        self._hits, self._asked = [0.0] * len(candidates), 0.0

    def why(self) -> Choice:
        """Return what is followed now, and what it was chosen by."""
        asked = self._asked + self._round_asked
        hits = [old + new for old, new in zip(self._hits, self._round, strict=True)]
        ratios = {
            name: count / asked if asked else None
            for name, count in zip(self._names, hits, strict=True)
        }
        return Choice(
            self._names[self._chosen], self._since_s, self._switches, ratios,
            self._shadows.rate, int(asked),
        )  # fmt: skip

    def _made(self, name: str) -> EvictionPolicy:
        if self._density is not None and name in _BY_DENSITY:
            return self._density
        return make_policy(name, self._history)

    # --- events

    def _reach(self, row: int) -> None:
        if row < len(self._sizes):
            return
        count = row + 1 - len(self._sizes) + spare_rows(row)
        for column in (self._sizes, self._above, self._shares):
            column.frombytes(bytes(count * column.itemsize))

    @override
    def insert(self, row: int, parent: int, size_bytes: int, now_s: float) -> None:
        self.insert_chain(np.array([row], np.intp), parent, size_bytes, now_s)

    @override
    def insert_chain(self, rows: Rows, parent: int, size_bytes: int, now_s: float) -> None:
        if not len(rows):
            return
        for policy in self._policies:
            policy.insert_chain(rows, parent, size_bytes, now_s)
        self._reach(max(int(rows.max()), parent))
        sizes = np.frombuffer(self._sizes, np.uint64)
        fresh = sizes[rows] == 0
        count = len(set(rows[fresh].tolist()))
        sizes[rows[fresh]] = max(1, size_bytes)
        self._used_bytes += count * max(1, size_bytes)
        del sizes
        if parent != self._latest:
            self._batch += 1
        self._latest = int(rows[-1])
        np.frombuffer(self._shares, np.uint8)[rows[fresh]] = self._batch * _STEP % _SHARES
        mask = self._shadows.sampled(rows.astype(np.uint64))
        above = self._above[parent]
        self._link(rows, mask, above)
        asked = [row for row in rows[mask & fresh].tolist() if self._is_asking(row)]
        if asked:
            self._ask(asked, [max(1, size_bytes)] * len(asked), above, now_s)

    def _link(self, rows: Rows, mask: NDArray[np.bool_], above: int) -> None:
        """Note the nearest sampled chunk of each row of a chain that continues *above*."""
        places = np.maximum.accumulate(np.where(mask, np.arange(len(rows)), -1))
        np.frombuffer(self._above, np.uint32)[rows] = np.where(places < 0, above, rows[places])

    def _is_asking(self, row: int) -> bool:
        """Whether a chunk that came was asked for by that: if no lookup named it just before."""
        if row in self._awaited:
            self._awaited.discard(row)
            return False
        known = self._shadows.row(row)
        if known and self._mirror.is_another(row, known):
            self._shadows.forget(row)
        return True

    @override
    def touch(self, rows: Rows, now_s: float) -> None:
        for policy in self._policies:
            policy.touch(rows, now_s)
        rows = rows[rows < len(self._sizes)]
        rows = rows[np.frombuffer(self._above, np.uint32)[rows] == rows]
        if not len(rows):
            return
        known = rows[self._shadows.sampled(rows.astype(np.uint64))].tolist()
        if not known:
            return
        usual = max(1, self._used_bytes // max(1, len(self)))
        self._ask(known, [self._sizes[row] or usual for row in known], NO_ROW, now_s)
        for row in known:
            if not self._sizes[row]:
                self._awaited.add(row)
        if len(self._awaited) > _AWAITED:
            self._awaited.clear()

    def _ask(self, rows: list[int], sizes: list[int], above: int, now_s: float) -> None:
        """Let the shadows serve the sampled chunks of a request."""
        rate = self._shadows.rate
        capacity_bytes = self._full_bytes or float("inf")
        asked = Asked(rows, sizes, now_s, above or None)
        for at, hits in enumerate(self._shadows.request(asked, capacity_bytes)):
            self._round[at] += hits
            self._lesson[at] += hits
        self._round_asked += len(rows)
        self._lesson_asked += len(rows)
        if self._shadows.rate == 1.0:
            self._strays.difference_update(rows)
            for at, left in enumerate(self._shadows.left):
                self._strays.update(
                    row for row in left if self._sizes[row] and self._owner(row) == at
                )
        if self._lesson_asked >= LESSON_CHUNKS:
            self._learn()
        if self._round_asked >= ROUND_CHUNKS:
            self._decide(now_s)
        if self._shadows.rate != rate:
            # What was counted at a higher rate counts for as much as it would have at this one.
            share = self._shadows.rate / rate
            self._hits = [hits * share for hits in self._hits]
            self._asked *= share
            self._strays = set()

    @override
    def remove(self, row: int) -> None:
        self.remove_all((row,))

    @override
    def remove_all(self, rows: Sequence[int]) -> None:
        for policy in self._policies:
            policy.remove_all(rows)
        sizes = self._sizes
        for row in rows:
            if row < len(sizes):
                self._used_bytes -= sizes[row]
                sizes[row] = 0
        self._strays.difference_update(rows)

    def _follow(self, rows: Rows) -> None:
        """Bring what was hinted of chunks to their shadows."""
        known = {row: theirs for row in rows.tolist() if (theirs := self._shadows.row(row))}
        self._mirror.follow(list(known), list(known.values()))

    def _watch(self, report: Report) -> None:
        """Bring what was asked for since the last report to the shadows."""
        mask = self._shadows.sampled(report.rows.astype(np.uint64))
        row_of = self._shadows.row
        rows = np.zeros(len(report.rows), np.intp)
        rows[mask] = [row_of(row) for row in report.rows[mask].tolist()]
        is_known = rows > 0
        self._mirror.watch(report, rows[is_known], is_known)
        # What is hit here is the doing of the one that is followed, and tells of no other; that
        # one sees more than its shadow does.
        is_followed = self._names[self._chosen] == "hit_density" and self._shadows.rate < 1.0
        if self._density is not None and self._shadow_density is not None and not is_followed:
            self._density.decide_as(self._shadow_density)

    # --- the choice

    def _decide(self, now_s: float) -> None:
        """End a round: age what was counted, and follow another if it is better by enough."""
        self._hits = [old * _KEPT + new for old, new in zip(self._hits, self._round, strict=True)]
        self._asked = self._asked * _KEPT + self._round_asked
        self._round, self._round_asked = [0.0] * len(self._names), 0
        best = max(range(len(self._names)), key=lambda at: (self._hits[at], -at))
        ours = self._hits[self._chosen]
        more = self._hits[best] - ours
        if self._asked < _LEAST_ASKED or more < max(_LEAST_MORE_HITS, ours * (_MARGIN - 1)):
            return
        cost = _COST * self._shadows.count_only(best, self._chosen)
        if more < min(cost, _MUCH_MORE * ours):
            return
        self._chosen = best
        self._since_s = now_s
        self._switches += 1

    def _learn(self) -> None:
        """Weigh the candidates by what each hit since the last time, and share out by it."""
        if self._full_bytes:  # until then all hit the same
            self._hedge.learn(self._lesson)
        self._lesson, self._lesson_asked = [0.0] * len(self._names), 0
        self._share_out()

    def _share_out(self) -> None:
        """Give each candidate as much of a small cache as its hits speak for it."""
        if self._shadows.rate < 1.0 or not self._full_bytes:
            return
        ends = [round(_SHARES * end) for end in accumulate(self._hedge.weights)]
        owners = [bisect_right(ends, share) for share in range(_SHARES)]
        if owners != self._owners:
            self._owners = owners
            self._find_strays()

    def _owner(self, row: int) -> int:
        return self._owners[self._shares[row]]

    def _find_strays(self) -> None:
        """Note which chunks the shadow of their owner would not have."""
        here = np.flatnonzero(np.frombuffer(self._sizes, np.uint64)).tolist()
        holds = self._shadows.holds
        self._strays = {row for row in here if not holds(self._owner(row), row)}

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        # The tier is full now. Where it is asked for room before it is, the size comes down slowly.
        less = (self._used_bytes - self._full_bytes) / 64
        self._full_bytes = max(float(self._used_bytes), self._full_bytes + less)
        if self._shadows.rate < 1.0:
            return self._victims_of(self._chosen, keep, now_s)
        leader = max(self._owners, key=self._owners.count)
        policy = self._of_name[self._names[leader]]
        if isinstance(policy, LeafFirstEviction):
            return self._name_as_shadow(leader, policy, keep, now_s)
        return self._victims_of(leader, keep, now_s)

    def _victims_of(self, at: int, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        """Yield whom the candidate at place *at* would evict."""
        policy = self._of_name[self._names[at]]
        if isinstance(policy, HitDensityEviction) and self._names[at] == "lru":
            return policy.victims_by_use(keep, now_s)
        if isinstance(policy, HitDensityEviction) and self._names[at] == UNGUARDED:
            return policy.victims_unguarded(keep, now_s)
        return policy.victims(keep, now_s)

    def _name_as_shadow(
        self, at: int, policy: LeafFirstEviction, keep: Callable[[int], bool], now_s: float
    ) -> Iterator[int]:
        """Yield victims so that what stays here is what the shadows would have.

        First those that the owner's has not, then whom that of *policy*, the candidate at place
        *at*, would evict itself, then the rest.
        """
        sizes, strays = self._sizes, self._strays
        named: dict[int, None] = {}
        if strays:
            for row in self._victims_of(at, lambda row: row not in strays or keep(row), now_s):
                named[row] = None
                yield row

        def is_kept(row: int) -> bool:
            return row not in named and keep(row)

        rows = self._shadows.victims(
            at, lambda row: row < len(sizes) and sizes[row] > 0 and is_kept(row), now_s
        )
        for row in policy.in_order(chain(list(named), rows), is_kept):
            if row not in named:
                named[row] = None
                yield row
        for row in self._victims_of(at, keep, now_s):
            if row not in named:
                yield row

    @override
    def __len__(self) -> int:
        return len(self._policies[0])
