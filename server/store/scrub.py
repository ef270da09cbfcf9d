"""Scrubbing: what tiers hold is read and verified before anybody asks for it, at a bounded rate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import ChunkCorruptError, InvalidRequestError, TierUnavailableError
from kvstore.proto.types import ChunkKey
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.tier_slot import TierSlot, verify

REST_S = 60.0
"""Between two passes in the background."""


class Verdict(Enum):
    """What a copy turned out to be."""

    sound = "sound"
    damaged = "damaged"
    absent = "absent"
    unread = "unread"
    """Its tier did not answer."""


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """How far the pass is that runs, or how the last one ended. Bytes are of frames."""

    is_running: bool = False
    passes: int = 0
    """Passes that came to their end since the start."""
    total_chunks: int = 0
    checked_chunks: int = 0
    checked_bytes: int = 0
    damaged_chunks: int = 0
    unread_chunks: int = 0


class Scrub:
    """Passes over tiers, one at a time. Thread-safe.

    Damaged copies go into drop_corrupt, as those that gets find: they are deleted, counted in
    ``corrupt_chunks``, and can be put again. *bytes_per_s* is the rate of passes in the
    background over *tiers*; 0 for none. *clock* returns monotonic seconds.
    """

    def __init__(
        self,
        moves: Moves,
        tiers: Sequence[str],
        bytes_per_s: int,
        clock: Callable[[], float],
    ) -> None:
        self._moves = moves
        self._counters = moves.counters
        self._tiers = [name for name in tiers if name in moves.tiers.slots]
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._report = ScrubReport()
        self._asked: tuple[list[str], int] | None = None
        self._closed = False
        # Guards the three above; notified when one changes.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to work in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="scrub", daemon=True)
        self._thread.start()

    def begin(self, tiers: Sequence[str], bytes_per_s: int) -> bool:
        """Ask for a pass over *tiers*, none for the usual ones; False while one runs.

        Raises InvalidRequestError for a tier that this server has not.
        """
        for name in tiers:
            if name not in self._moves.tiers.slots:
                fix = f"use some of {', '.join(self._moves.tiers.slots)}"
                raise InvalidRequestError("tiers", name, fix)
        with self._changed:
            if self._report.is_running or self._asked is not None:
                return False
            self._asked = (list(tiers) or self._tiers, bytes_per_s)
            self._report = ScrubReport(is_running=True, passes=self._report.passes)
            self._changed.notify_all()
        return True

    def report(self) -> ScrubReport:
        """Return how far the pass is."""
        with self._changed:
            return self._report

    def close(self) -> None:
        """End the pass and the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def check(
        self, key: ChunkKey, slot: TierSlot, representation: bytes = b""
    ) -> tuple[Verdict, int]:
        """Read and verify one copy; return what it is and its bytes. A damaged one is dropped.

        With *representation* a frame that was stored for another one is damaged too.
        """
        moves = self._moves
        info = moves.catalog.hold(key).get(slot.name)
        try:
            if info is None:
                return Verdict.absent, 0
            is_memory = slot is moves.tiers.cpu
            frame = moves.tiers.cpu_tier.peek(key) if is_memory else moves.read_bypass(info, slot)
            if frame is None:
                return Verdict.absent, 0
            if _is_sound(frame, key, representation):
                return Verdict.sound, len(frame)
            moves.eviction.drop_corrupt(slot, key)
            return Verdict.damaged, len(frame)
        except ChunkCorruptError:
            return Verdict.damaged, 0 if info is None else info.size_bytes
        except TierUnavailableError:
            return Verdict.unread, 0
        finally:
            moves.catalog.let_go(key)

    def drop_damaged(self, keys: Sequence[ChunkKey], representation: bytes = b"") -> int:
        """Check the copies of chunks that a reader found damaged; return how many were.

        What a reader saw may be its network's doing: a copy that is sound stays.
        """
        moves = self._moves
        damaged = 0
        for key in keys:
            for name in moves.catalog.holders(key):
                verdict, _ = self.check(key, moves.tiers.slots[name], representation)
                damaged += verdict is Verdict.damaged
        return damaged

    def run_pass(self, tiers: Sequence[str], bytes_per_s: int) -> ScrubReport:
        """Check everything on *tiers* once, *bytes_per_s* at most; 0 for as fast as it goes."""
        slots = [self._moves.tiers.slots[name] for name in tiers]
        plan = [(slot, [info.key for info in slot.tier.scan()]) for slot in slots]
        total = sum(len(keys) for _, keys in plan)
        with self._changed:
            self._report = ScrubReport(True, self._report.passes, total)
        started, taken = self._clock(), 0
        for slot, keys in plan:
            for key in keys:
                if self._closed:
                    return self.report()
                verdict, size_bytes = self.check(key, slot)
                self._note(verdict, size_bytes)
                taken += size_bytes
                if bytes_per_s:
                    self._wait(started + taken / bytes_per_s - self._clock())
        with self._changed:
            self._report = replace(self._report, is_running=False, passes=self._report.passes + 1)
        self._counters.add("scrub_passes")
        return self.report()

    def _note(self, verdict: Verdict, size_bytes: int) -> None:
        with self._changed:
            report = self._report
            self._report = replace(
                report,
                checked_chunks=report.checked_chunks + (verdict is not Verdict.unread),
                checked_bytes=report.checked_bytes + size_bytes,
                damaged_chunks=report.damaged_chunks + (verdict is Verdict.damaged),
                unread_chunks=report.unread_chunks + (verdict is Verdict.unread),
            )
        self._counters.add("scrubbed_chunks", verdict in (Verdict.sound, Verdict.damaged))
        self._counters.add("scrubbed_bytes", size_bytes)

    def _wait(self, seconds: float) -> None:
        with self._changed:
            if seconds > 0 and not self._closed:
                self._changed.wait(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._asked is None and not self._closed:
                    self._changed.wait(REST_S if self._bytes_per_s else None)
                if self._closed:
                    return
                asked, self._asked = self._asked, None
            if asked is None and not self._bytes_per_s:
                continue
            try:
                self.run_pass(*(asked or (self._tiers, self._bytes_per_s)))
            except TierUnavailableError:  # its list cannot be had; another pass comes
                with self._changed:
                    self._report = replace(self._report, is_running=False)


def _is_sound(frame: Bytes, key: ChunkKey, representation: bytes) -> bool:
    try:
        header = verify(frame, key)
    except ChunkCorruptError:
        return False
    return not representation or header.representation == representation
