"""Scrubbing reads and verifies tiers at a bounded rate; clearing deletes a tenant's chunks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from queue import Empty, SimpleQueue
from typing import NamedTuple

from kvstore.proto.errors import ChunkCorruptError, InvalidRequestError, TierUnavailableError
from kvstore.proto.types import ChunkKey, Namespace
from kvstore.server.store.store import Store
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.tier_slot import TierSlot, verify

EVERY_TENANT = "*"
BATCH_CHUNKS = 64
"""Chunks deleted between two checks of the deadline."""

REST_S = 60.0
"""Pause between two background passes."""


class Verdict(Enum):
    """The result of checking a copy."""

    sound = "sound"
    damaged = "damaged"
    absent = "absent"
    unread = "unread"
    """Its tier did not answer."""


@dataclass(slots=True)
class ScrubReport:
    """Progress of the running pass, or the result of the last one. Bytes are of frames."""

    is_running: bool = False
    passes: int = 0
    """Passes completed since the start."""
    total_chunks: int = 0
    checked_chunks: int = 0
    checked_bytes: int = 0
    damaged_chunks: int = 0
    unread_chunks: int = 0


class Scrub:
    """Passes over tiers, one at a time. Thread-safe.

    Damaged copies are dropped, as by gets. *bytes_per_s* is the rate of background passes over
    *tiers*; 0 for none.
    """

    def __init__(self, moves: Moves, tiers: Sequence[str], bytes_per_s: int) -> None:
        self._moves = moves
        self._slots = moves.tiers.slots
        self._catalog = moves.catalog
        self._counters = moves.counters
        self._clock = moves.clock
        self._tiers = [name for name in tiers if name in self._slots]
        self._bytes_per_s = bytes_per_s
        self._report = ScrubReport()
        """Written by the thread of the pass, and by ``begin``."""
        self._requests: SimpleQueue[tuple[Sequence[str], int]] = SimpleQueue()
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards the thread, and admits one request at a time
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start background passes if there is a rate."""
        with self._lock:
            if self._bytes_per_s:
                self._start_thread()

    def _start_thread(self) -> None:
        """The caller holds the lock."""
        if self._thread is None and not self._closing.is_set():
            thread = threading.Thread(target=self._run, name="scrub", daemon=True)
            thread.start()  # before the assignment: ``close`` joins only a started thread
            self._thread = thread

    def begin(self, tiers: Sequence[str], bytes_per_s: int) -> bool:
        """Request a pass over *tiers*, by default those of the background; return False while one
        runs. Raises InvalidRequestError for an unknown tier.
        """
        for name in tiers:
            if name not in self._slots:
                raise InvalidRequestError("tiers", name, f"use some of {', '.join(self._slots)}")
        with self._lock:
            if self._report.is_running:
                return False
            self._start_thread()
            self._report = ScrubReport(is_running=True, passes=self._report.passes)
        self._requests.put((tiers or self._tiers, bytes_per_s))
        return True

    def report(self) -> ScrubReport:
        """Return the progress of the pass."""
        return replace(self._report)

    def close(self) -> None:
        """End the pass and the thread. Idempotent."""
        self._closing.set()
        with self._lock:
            thread = self._thread
        self._requests.put(((), 0))
        if thread is not None:
            thread.join()

    def check(
        self, key: ChunkKey, slot: TierSlot, representation: bytes = b""
    ) -> tuple[Verdict, int]:
        """Read and verify one copy; return the verdict and its bytes. A damaged one is dropped.

        With *representation* a frame of another one counts as damaged.
        """
        moves = self._moves
        info = self._catalog.hold(key).get(slot.name)
        try:
            if info is None:
                return Verdict.absent, 0
            is_memory = slot is moves.tiers.cpu
            frame = moves.tiers.cpu_tier.peek(key) if is_memory else moves.read_bypass(info, slot)
            if frame is None:
                return Verdict.absent, 0
            with suppress(ChunkCorruptError):
                header = verify(frame, key)
                if not representation or header.representation == representation:
                    return Verdict.sound, len(frame)
            moves.eviction.drop_corrupt(slot, key)
            return Verdict.damaged, len(frame)
        except ChunkCorruptError:
            return Verdict.damaged, 0 if info is None else info.size_bytes
        except TierUnavailableError:
            return Verdict.unread, 0
        finally:
            self._catalog.release_hold(key)

    def drop_damaged(self, keys: Sequence[ChunkKey], representation: bytes = b"") -> int:
        """Check chunks that a reader found damaged; return how many copies are.

        Sound copies stay: the damage may be on the reader's network.
        """
        copies = [(key, self._slots[n]) for key in keys for n in self._catalog.holders(key)]
        verdicts = [self.check(key, slot, representation)[0] for key, slot in copies]
        return verdicts.count(Verdict.damaged)

    def run_pass(self, tiers: Sequence[str], bytes_per_s: int) -> ScrubReport:
        """Check all copies on *tiers* once, at most *bytes_per_s*; 0: unlimited."""
        slots = [self._slots[name] for name in tiers]
        plan = [(slot, info.key) for slot in slots for info in slot.tier.scan()]
        self._report = report = ScrubReport(True, self._report.passes, len(plan))
        started, taken = self._clock(), 0
        for slot, key in plan:
            if self._closing.is_set():
                return self.report()
            verdict, size_bytes = self.check(key, slot)
            report.checked_chunks += verdict is not Verdict.unread
            report.checked_bytes += size_bytes
            report.damaged_chunks += verdict is Verdict.damaged
            report.unread_chunks += verdict is Verdict.unread
            self._counters.add("scrubbed_chunks", verdict in (Verdict.sound, Verdict.damaged))
            self._counters.add("scrubbed_bytes", size_bytes)
            taken += size_bytes
            if bytes_per_s:
                self._closing.wait(max(0.0, started + taken / bytes_per_s - self._clock()))
        report.passes += 1
        report.is_running = False
        self._counters.add("scrub_passes")
        return self.report()

    def _run(self) -> None:
        while True:
            request: tuple[Sequence[str], int] = (self._tiers, self._bytes_per_s)
            with suppress(Empty):
                request = self._requests.get(timeout=REST_S if self._bytes_per_s else None)
            if self._closing.is_set():
                return
            try:
                self.run_pass(*request)
            except TierUnavailableError:  # the scan failed; a later pass retries
                self._report.is_running = False


class Cleared(NamedTuple):
    """Chunks deleted, chunks leased or pinned, bytes freed, and chunks past the deadline."""

    deleted: int = 0
    leased: int = 0
    deleted_bytes: int = 0
    left: int = 0


def clear(
    store: Store,
    keys: Sequence[ChunkKey],
    deadline: float,
    tier: str = "",
    *,
    dry_run: bool = False,
) -> Cleared:
    """Delete the copies of *keys*, or those on *tier*; with *dry_run* only count them."""
    catalog, clock = store.catalog, store.moves.clock
    keys = [key for key in keys if not tier or tier in catalog.holders(key)]
    deleted = leased = freed_bytes = 0
    for start in range(0, len(keys), BATCH_CHUNKS):
        if clock() >= deadline:
            return Cleared(deleted, leased, freed_bytes, len(keys) - start)
        batch = keys[start : start + BATCH_CHUNKS]
        before = _bytes(store, batch, tier)
        if dry_run:
            stay = [key for key in batch if catalog.is_held(key)]
            went, kept = len(batch) - len(stay), len(stay)
        else:
            went, kept = store.delete(batch, deadline, tier)
            stay = batch
        deleted, leased = deleted + went, leased + kept
        freed_bytes += max(0, before - _bytes(store, stay, tier))
    return Cleared(deleted, leased, freed_bytes)


def _bytes(store: Store, keys: Sequence[ChunkKey], tier: str) -> int:
    copies = (store.catalog.copies(key) for key in keys)
    return sum(
        info.size_bytes for each in copies for name, info in each.items() if tier in ("", name)
    )


def keys_of_tenant(store: Store, tenant: str) -> list[ChunkKey]:
    """Return the chunks of *tenant*, or of all tenants for EVERY_TENANT.

    Chunks only on a shared tier, in a namespace that no session used here, belong to no tenant.
    """
    catalog = store.catalog
    if tenant == EVERY_TENANT:
        return catalog.queries.keys_from(b"")
    spaces = [one for one in catalog.queries.spaces() if _tenant_of(store, one) == tenant]
    return [key for space in spaces for key in catalog.queries.keys_from(space)]


def _tenant_of(store: Store, space: Namespace) -> str | None:
    known = store.spaces.of(space)
    if known is not None:
        return known.tenant
    for key in store.catalog.queries.keys_from(space):
        for name in store.catalog.holders(key):
            tier = store.tiers.slots[name].tier
            if not tier.shared:
                return tier.tenant_of(key)
    return None
