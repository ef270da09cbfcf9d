"""Placement: applies each lower tier's admission to copies, with the chunk's statistics."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from kvstore.proto.plans import PrefillModel
from kvstore.proto.types import DIGEST_BYTES, ChunkKey, Namespace
from kvstore.server.index.catalog import Catalog
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.admission import (
    WRITE_BACK,
    CopyRequest,
    EvictionValue,
    Pressure,
    TierAdmission,
    Trigger,
    WriteBudget,
    remember,
)
from kvstore.server.tiering.tier_slot import Tiers, TierSlot
from kvstore.server.tiering.work_queue import WorkQueue

MAX_ENGINES = 1024
"""Models whose prefill speed is remembered, the latest reported."""


class Placement:
    """Decides whether copies are worth writing. Thread-safe.

    Uses the slot's ``admission``, or the one of ``set_terms`` if it has none, and the write
    pressure measured here. *clock* returns monotonic seconds.
    """

    def __init__(
        self,
        tiers: Tiers,
        catalog: Catalog,
        work_queue: WorkQueue,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.tiers = tiers
        self.catalog = catalog
        self.work_queue = work_queue
        self.counters = counters
        self._clock = clock
        self._pressures = {name: Pressure() for name in tiers.slots}
        self._prices = {name: EvictionValue() for name in tiers.slots}
        self._engines: OrderedDict[Namespace, PrefillModel] = OrderedDict()
        self._lock = threading.Lock()  # guards _pressures, _budgets, _engines and _prices
        self.set_terms(WRITE_BACK, {})

    def set_terms(self, otherwise: TierAdmission, bytes_a_day: Mapping[str, int]) -> None:
        """Set the admission of slots without one, and the write budgets of tiers, which durable
        puts may exceed. Called at start.
        """
        now_s = self._clock()
        self._rules = {name: slot.admission or otherwise for name, slot in self.tiers.slots.items()}
        self._weighs = any(rule.least_value is not None for rule in self._rules.values())
        known = self.tiers.slots.keys() & bytes_a_day.keys()
        self._budgets = {name: WriteBudget(bytes_a_day[name], now_s) for name in known}

    def admits(self, slot: TierSlot, key: ChunkKey, moment: Trigger) -> bool:
        """Whether to copy *key* to *slot* now, which has no copy.

        An admitted copy is charged to the tier's write budget.
        """
        rule = self._rules[slot.name]
        budget = self._budgets.get(slot.name)
        engine = self._engines.get(Namespace(key[:DIGEST_BYTES]))
        if engine is None and not rule.looks_ahead and budget is None:
            return moment in rule.triggers
        looks_ahead = rule.looks_ahead or (budget is not None and moment is Trigger.leaving)
        estimate = self.catalog.queries.reuse_estimate(key, ahead=looks_ahead)
        if estimate is None:
            return False
        load_s = compute_s = 0.0
        if engine is not None:
            load_s = slot.load_s(estimate.size_bytes)
            tokens, context = estimate.tokens, estimate.context_tokens
            compute_s = engine.token_s * tokens + engine.pair_s * tokens * context
        offer = CopyRequest(
            moment, estimate.size_bytes, estimate.hits, estimate.chance, load_s, compute_s,
            estimate.is_needed,
        )  # fmt: skip
        if not rule.admits(offer, self.pressure(slot.name)):
            return False
        return budget is None or self._affords(budget, key, offer)

    def _affords(self, budget: WriteBudget, key: ChunkKey, offer: CopyRequest) -> bool:
        """Charge for a copy if it is worth it: beyond the budget only evicted chunks can be."""
        with self._lock:
            price = budget.price(self._clock())
            is_leaving = offer.moment is Trigger.leaving
            affords = price == 0 or (is_leaving and (offer.is_needed or offer.value >= price))
            if affords:
                budget.admitted(key, offer.size_bytes)
        if not affords:
            self.counters.add("over_budget_copies")
        return affords

    def by_load(self, slots: Sequence[TierSlot], size_bytes: int) -> Sequence[TierSlot]:
        """Return *slots* by load time of *size_bytes* if all admit by value; else as given."""
        if any(self._rules[slot.name].least_value is None for slot in slots):
            return slots
        return sorted(slots, key=lambda slot: slot.load_s(size_bytes))

    def evicting(self, slot: TierSlot, key: ChunkKey, below: TierSlot) -> None:
        """Record that a fast tier evicts *key*, which prices its memory if copies have values."""
        if self._weighs:
            value = self._value(key, below)
            with self._lock:
                self._prices[slot.name].note_eviction(value)

    def promotes(self, key: ChunkKey, source: TierSlot, target: TierSlot) -> bool:
        """Whether a copy of *key* on the faster *target* is worth what that evicts for it."""
        if not self._weighs:
            return True
        value = self._value(key, source)
        with self._lock:
            return self._prices[target.name].takes(value)

    def _value(self, key: ChunkKey, source: TierSlot) -> float:
        """Return the seconds that a byte of *key* in memory saves over a load from *source*."""
        estimate = self.catalog.queries.reuse_estimate(key)
        if estimate is None:
            return 0.0
        saved_s = source.load_s(estimate.size_bytes)
        return estimate.chance * saved_s / max(1, estimate.size_bytes)

    def budgets(self) -> dict[str, tuple[int, float]]:
        """Return the budget in bytes a day and the bytes left now, for tiers with a budget."""
        with self._lock:
            now_s, known = self._clock(), self._budgets.items()
            return {name: (one.bytes_a_day, one.left_bytes(now_s)) for name, one in known}

    def admits_on_lookup(self, slot: TierSlot) -> bool:
        """Whether a lookup may cause a copy on *slot*."""
        return Trigger.asked in self._rules[slot.name].triggers

    def pressure(self, name: str) -> float:
        """Return the write pressure of a tier, from 0 to 1."""
        share = self.work_queue.fullness(f"store-{name}")
        with self._lock:
            return self._pressures[name].level(share, self._clock())

    def note_write(
        self, name: str, key: ChunkKey, size_bytes: int = 0, seconds: float = 0.0
    ) -> None:
        """Record a copy to a tier and its time; 0 bytes: it was admitted but not made."""
        with self._lock:
            self._pressures[name].note(seconds, self._clock())
            if name in self._budgets:
                self._budgets[name].note_write(key, size_bytes)

    def note_engine(self, space: Namespace, prefill: PrefillModel) -> None:
        """Record an engine's prefill speed."""
        with self._lock:
            remember(self._engines, space, prefill, MAX_ENGINES)
