"""Placement: asks each lower tier's admission about copies, with what is known of the chunk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.proto.plans import PrefillModel
from kvstore.proto.types import DIGEST_BYTES, ChunkKey, Namespace
from kvstore.server.catalog import Catalog
from kvstore.server.mover import Mover
from kvstore.server.policy.admission import (
    Moment,
    Offer,
    Pressure,
    SecondSighting,
    TierAdmission,
    WriteBack,
)
from kvstore.server.shelf import Shelf

MAX_ENGINES = 1024
"""Models whose speed of prefill is remembered, the latest that told."""


class Placement:
    """Whether copies are worth their writing. Thread-safe.

    Each shelf's own ``admission`` decides, or *otherwise* where it has none; how far its writes
    are behind is measured here. *clock* returns monotonic seconds.
    """

    def __init__(
        self,
        shelves: Sequence[Shelf],
        catalog: Catalog,
        mover: Mover,
        clock: Callable[[], float],
        otherwise: TierAdmission | None = None,
    ) -> None:
        fallback = otherwise or WriteBack()
        self._rules = {shelf.name: shelf.admission or fallback for shelf in shelves}
        self._pressures = {shelf.name: Pressure() for shelf in shelves}
        self._catalog = catalog
        self._mover = mover
        self._clock = clock
        self._engines: dict[Namespace, PrefillModel] = {}
        self._lock = threading.Lock()  # guards _pressures and _engines

    def admits(self, shelf: Shelf, key: ChunkKey, moment: Moment) -> bool:
        """Whether a copy of *key* on *shelf* is worth making now; it has none there."""
        rule = self._rules[shelf.name]
        engine = self._engines.get(Namespace(key[:DIGEST_BYTES]))
        if engine is None and not rule.looks_ahead:
            return rule.admits(Offer(moment, 0), 0.0)
        prospect = self._catalog.prospect(key, ahead=rule.looks_ahead)
        if prospect is None:
            return False
        load_s = compute_s = 0.0
        if engine is not None:
            load_s = float(shelf.load_s(np.array([prospect.size_bytes]))[0])
            tokens, context = prospect.tokens, prospect.context_tokens
            compute_s = engine.token_s * tokens + engine.pair_s * tokens * context
        offer = Offer(
            moment, prospect.size_bytes, prospect.hits, prospect.chance, load_s, compute_s,
            prospect.is_needed,
        )  # fmt: skip
        return rule.admits(offer, self.pressure(shelf.name))

    def watches_askings(self, shelf: Shelf) -> bool:
        """Whether a copy on *shelf* may follow from a chunk's being asked for."""
        return isinstance(self._rules[shelf.name], SecondSighting)

    def pressure(self, name: str) -> float:
        """Return how far behind a tier's writes are, from 0 to 1."""
        share = self._mover.fullness(f"store-{name}")
        with self._lock:
            return self._pressures[name].level(share, self._clock())

    def wrote(self, name: str, seconds: float) -> None:
        """A copy to a tier took so long."""
        with self._lock:
            self._pressures[name].note(seconds, self._clock())

    def note_engine(self, space: Namespace, prefill: PrefillModel) -> None:
        """An engine said how long it computes."""
        with self._lock:
            self._engines.pop(space, None)
            self._engines[space] = prefill
            if len(self._engines) > MAX_ENGINES:
                del self._engines[next(iter(self._engines))]
