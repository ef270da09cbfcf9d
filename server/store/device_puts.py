"""Puts from a client's device memory: frames are copied and verified on the device.

This file imports torch, so only a server with a gpu tier imports it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import structlog

from kvstore.codecs.frame_kernels import open_kernels
from kvstore.codecs.paged import FrameAt, FrameKernels, Sums, check_sums
from kvstore.proto import unix_socket
from kvstore.proto.buffers import Bytes
from kvstore.proto.device import Event, Imported, tensor_over
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidRequestError,
    LeaseExpiredError,
    QuotaExceededError,
    ShuttingDownError,
    TierUnavailableError,
)
from kvstore.proto.frame import FrameHeader, pack_header
from kvstore.proto.plans import Hints
from kvstore.proto.types import ChunkInfo, LayerKind, PutOutcome
from kvstore.proto.unix_socket import Place
from kvstore.server.security.sessions import Session
from kvstore.server.store.reservations import PutResult, PutTicket
from kvstore.server.store.store import Store

MAX_RING_BYTES = 1 << 30
PUTS_AT_ONCE = 4
"""Concurrent puts of one session; more are refused."""
_FIRST_LOOK_S = 50e-6
_LOOK_S = 2e-3

logger = structlog.get_logger(__name__)

RingFrame: TypeAlias = tuple[FrameHeader, int]
"""A frame's header and its offset in the ring."""


@dataclass(slots=True)
class _Ring:
    """A client's memory. ``users`` counts the puts that read it, and its session until it ends."""

    imported: Imported
    users: int = 1


class DevicePuts:
    """Maps rings, one per session, and puts frames from them. Thread-safe.

    A ring stays mapped until its session has ended and no put copies from it.
    """

    def __init__(self, store: Store, kernels: FrameKernels) -> None:
        moves = store.moves
        assert moves.tiers.gpu is not None
        assert moves.tiers.gpu_tier is not None
        self._store = store
        self._reservations = store.reservations
        self._slot, self._tier = moves.tiers.gpu, moves.tiers.gpu_tier
        self._clock = moves.clock
        self._kernels = kernels
        self._stream = self._tier.device.stream()
        self._rings: dict[int, _Ring] = {}
        self._lock = threading.Lock()  # guards the rings and how many use each

    def take_ring(self, session: Session, request: unix_socket.Request, exported: Bytes) -> None:
        """Map the ring that *session* exported. Raises InvalidRequestError for one too large, of
        another device or a second one, LeaseExpiredError, TierUnavailableError if out of memory.
        """
        device, size_bytes = self._tier.device, request.arg
        if request.token != unix_socket.device_token(device.identity):
            raise InvalidRequestError("device", request.token.hex(), f"be on {device.identity}")
        if not 0 < size_bytes <= MAX_RING_BYTES:
            raise InvalidRequestError("ring", size_bytes, f"at most {MAX_RING_BYTES} bytes")
        ring = _Ring(device.import_memory(exported, size_bytes))
        with self._lock:
            is_late = session.is_closed  # its ring would never be released
            is_second = session.session_id in self._rings
            if not is_late and not is_second:
                self._rings[session.session_id] = ring
                return
        ring.imported.close()
        if is_late:
            raise LeaseExpiredError(f"session_id={session.session_id}: closed; open a session")
        raise InvalidRequestError("ring", session.session_id, "one per session")

    def end_session(self, session: Session) -> None:
        """Release the ring of a session that ended."""
        with self._lock:
            ring = self._rings.pop(session.session_id, None)
        if ring is not None:
            self._leave(ring)

    def close(self) -> None:
        """Release all rings. Idempotent."""
        with self._lock:
            rings, self._rings = self._rings, {}
        for ring in rings.values():
            self._leave(ring)

    def _leave(self, ring: _Ring) -> None:
        with self._lock:
            ring.users -= 1
            is_last = not ring.users
        if is_last:
            ring.imported.close()

    @contextmanager
    def _using(self, session: Session) -> Iterator[Imported]:
        with self._lock:
            ring = self._rings.get(session.session_id)
            if ring is None:
                raise InvalidRequestError("session_id", session.session_id, "send a ring first")
            if ring.users > PUTS_AT_ONCE:
                raise QuotaExceededError("puts_at_once", PUTS_AT_ONCE, session.client)
            ring.users += 1
        try:
            yield ring.imported
        finally:
            self._leave(ring)

    def put(
        self,
        session: Session,
        frames: Sequence[RingFrame],
        event: bytes,
        deadline: float,
        hints: Hints,
    ) -> list[PutResult]:
        """Copy frames from the ring of *session* and make those that verify visible.

        *event* is the handle of a device event that completes once the ring is written. Until then
        nothing is reserved and nothing waits on the device. Raises DeadlineError when it is late.
        """
        if self._store.writes.is_draining:
            raise ShuttingDownError("the server is draining; no new puts")
        results, placed = list[PutResult](), dict[int, PutTicket]()
        with self._using(session) as ring:
            for header, offset in frames:
                if offset + header.frame_bytes > len(ring.memory):
                    fix = f"within a ring of {len(ring.memory)} bytes"
                    raise InvalidRequestError("offset", (offset, header.frame_bytes), fix)
            if self._slot.breaker.is_open:
                reason = f"gpu is unavailable: {self._slot.breaker.reason}"
                return [PutResult(PutOutcome.refused, reason)] * len(frames)
            written = self._tier.device.import_event(event)
            self._wait_for(written, session, deadline)
            self._stream.wait(written)  # orders the copies after the client's writes
            try:
                for at, (header, _) in enumerate(frames):
                    begun = self._reserve(session, header.info(), deadline, hints)
                    if isinstance(begun, PutTicket):
                        placed[at] = begun
                        begun = PutResult(PutOutcome.pending)
                    results.append(begun)
                for at, found in zip(list(placed), self._copied(ring, frames, placed), strict=True):
                    results[at] = self._commit(placed.pop(at), frames[at][0], found)
            finally:
                for ticket in placed.values():
                    self._reservations.discard(ticket)
        return results

    def _wait_for(self, event: Event, session: Session, deadline: float) -> None:
        pause_s = _FIRST_LOOK_S
        while not event.query():
            if session.is_closed:
                raise LeaseExpiredError(f"session_id={session.session_id}: closed during the put")
            if self._clock() >= deadline:
                raise DeadlineError("the client's event is late")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S)

    def _reserve(
        self, session: Session, info: ChunkInfo, deadline: float, hints: Hints
    ) -> PutTicket | PutResult:
        reservations, slot = self._reservations, self._slot
        if self._store.states is not None and info.layout.has(LayerKind.state):
            reason = "state admission needs a put through CPU memory"
            return reservations.refuse(info.key, reason)
        most_bytes = slot.tier.max_frame_bytes
        if info.size_bytes > most_bytes:
            return reservations.refuse(info.key, f"tier {slot.name!r} takes at most {most_bytes}")
        return reservations.reserve(session, info, deadline, hints, device=slot)

    def _copied(
        self, ring: Imported, frames: Sequence[RingFrame], placed: Mapping[int, PutTicket]
    ) -> list[list[int]]:
        """Copy frames to their reserved space; return the checksums of the copies."""
        if not placed:
            return []
        stream, begun = self._stream, list[Sums]()
        packed = {at: bytearray(pack_header(frames[at][0])) for at in placed}
        places = [
            FrameAt(cast("Place", ticket.reservation.place).offset, frames[at][0], 0)
            for at, ticket in placed.items()
        ]

        def work() -> bool:
            try:
                for at, ticket in placed.items():
                    out, start = self._tier.opened(ticket.reservation, stream), frames[at][1]
                    size = len(packed[at])
                    stream.copy(out[:size], tensor_over(np.frombuffer(packed[at], np.uint8)))
                    stream.copy(out[size:], ring.memory[start + size : start + len(out)])
                stream.launch(lambda: begun.append(self._kernels.sums(self._tier.memory, places)))
            finally:  # after an error too: queued copies still write
                stream.record().synchronize()
            return True

        self._slot.guarded(work, "write")
        return begun[0]()

    def _commit(self, ticket: PutTicket, header: FrameHeader, found: Sequence[int]) -> PutResult:
        try:
            check_sums(header, found)
        except ChunkCorruptError as error:
            self._reservations.reject(header.key, error)
            self._reservations.discard(ticket)
            return PutResult(PutOutcome.refused, str(error))
        return self._reservations.commit(ticket, header)


def open_device_puts(store: Store) -> DevicePuts | None:
    """Return the DevicePuts of the gpu tier; None, with a warning, without checksum kernels."""
    tier = store.tiers.gpu_tier
    assert tier is not None
    try:
        return DevicePuts(store, open_kernels(tier.memory.device))
    except TierUnavailableError as error:
        logger.warning("puts from device memory are off", reason=str(error))
        return None
