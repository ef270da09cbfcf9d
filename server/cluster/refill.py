"""Refill: copies chunks again to a shared tier that has lost them (flushed, or evicting by itself).

Servers are not notified of losses. They check chunks that are put again at once, and all others
that they have on other tiers, some at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import takewhile

from kvstore.proto.errors import KVStoreError
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.store.store import Store
from kvstore.server.tiering.admission import Trigger
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.tier_slot import TierSlot

CHECK_S = 5.0
"""Interval between checks of other chunks while none was missing."""
MAX_AGAIN = 4096
"""Limit of queued chunks that were put again; further ones are checked in the walk."""
MAX_COPIES = 16
"""Copies per check, so that other copies can run in between."""


class Refill:
    """Refills one shared *slot*. Thread-safe."""

    def __init__(self, moves: Moves, slot: TierSlot) -> None:
        self._moves = moves
        self._slot = slot
        # Chunks to check next, and whether each was missing before: then the catalog lists no copy
        # on the slot, and a walk would not find it.
        self._again: dict[ChunkKey, bool] = {}
        self._row = 0
        self._next_s = moves.clock() + CHECK_S
        self._rests_until_s = 0.0

    def put_again(self, key: ChunkKey) -> None:
        """Check at the next tick a chunk whose put was answered with `exists`."""
        if len(self._again) < MAX_AGAIN:
            self._again.setdefault(key, False)

    def tick(self) -> None:
        """Queue the next check, if one is due. Called a few times a second."""
        now = self._moves.clock()
        walks = now >= self._next_s and len(self._again) < MAX_AGAIN // 2
        may_check = now >= self._rests_until_s and not self._slot.breaker.is_open
        if (walks or self._again) and may_check:
            self._next_s = now + CHECK_S if walks else self._next_s
            work = partial(self._check, walks=walks)
            self._moves.work_queue.submit(f"store-{self._slot.name}", b"refill", work)

    def _check(self, *, walks: bool) -> bool:
        """Check some chunks, and copy some of the missing ones. Return whether any were missing."""
        again, self._again = self._again, {}
        due, row = dict(again), self._row
        if walks:
            held, row = self._moves.catalog.queries.held_from(row)
            for one in held:
                if one.tier == self._slot.name:
                    due.setdefault(one.key, False)
        try:
            missing = self._missing(due)
        except KVStoreError:  # no answer: the walk resumes at the same place
            self._queue(again)
            self._rests_until_s = self._moves.clock() + CHECK_S
            raise
        self._row = row
        copied = sum(1 for _ in takewhile(self._copy, missing[:MAX_COPIES]))
        self._queue({left: due[left] for left in missing[copied:]})
        if missing:  # others are probably missing too
            self._next_s = self._moves.clock()
        return bool(missing)

    def _queue(self, due: Mapping[ChunkKey, bool]) -> None:
        """Queue chunks for another check, up to the limit."""
        for key, was_missing in due.items():
            if key in self._again or len(self._again) < MAX_AGAIN:
                self._again[key] = was_missing or self._again.get(key, False)

    def _missing(self, due: Mapping[ChunkKey, bool]) -> list[ChunkKey]:
        """Return the chunks of *due* that the slot has lost and another tier here has."""
        moves = self._moves
        here = {slot.name for slot in moves.tiers.sources if not slot.tier.shared}
        holders = {key: set(moves.catalog.holders(key)) for key in due}
        elsewhere = [key for key in due if holders[key] & here]
        known = [key for key in elsewhere if self._slot.name in holders[key]]
        found: dict[ChunkKey, ChunkInfo | None] = {}

        def work() -> bool:
            found.update(zip(known, self._slot.tier.find(known), strict=True))
            return True

        if known:
            self._slot.guarded(work, "find")
        return [k for k in elsewhere if found.get(k) is None and (k in found or due[k])]

    def _copy(self, key: ChunkKey) -> bool:
        """Copy a chunk if it is admitted. Return False if the slot does not take it now."""
        moves, name = self._moves, self._slot.name
        if name in moves.catalog.holders(key):
            moves.catalog.forget(name, key)
            moves.counters.add("lost_chunks")
        if not moves.placement.admits(self._slot, key, Trigger.stored):
            return True
        try:
            moves.copy_now(key, self._slot)
        except KVStoreError:
            moves.placement.note_write(name, key)
            self._queue({key: True})
            self._rests_until_s = moves.clock() + CHECK_S
            return False
        return True


def attach_refills(store: Store) -> None:
    """Attach a Refill to each shared tier of *store*."""
    for slot in store.tiers.lower:
        if slot.tier.shared:
            refill = Refill(store.moves, slot)
            store.reservations.on_existing.append(refill.put_again)
            store.on_tick.append(refill.tick)
