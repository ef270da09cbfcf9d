"""A PeerNode: one other server, with its session, connections, speed and faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.bulk import GUEST_S, guest_token
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    PermissionDeniedError,
    QuotaExceededError,
    ShuttingDownError,
    UnauthenticatedError,
)
from kvstore.proto.types import Namespace
from kvstore.server.cluster.peer_connections import PeerSession, StreamLink
from kvstore.server.tiering.breaker import Breaker

LINKS_PER_PEER = 8
"""Requests to one peer at once; a further one is a miss there."""
MAX_FAULTS = 3
"""Wrong answers or wrong bytes, or reads in a row that fail, before a peer is not used."""
BARRED_S = 60.0
CONNECT_S = 0.5
"""For a stream to be opened, or less where a request has less."""
_EWMA_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class DirectReadGrant:
    """Where a client of this server reads from a peer itself, and what lets it in there."""

    address: str
    certificate: bytes
    guest: pb.StreamAttach


@dataclass(slots=True)
class PeerSpeed:
    """Of transfers from one peer, as exponentially weighted means."""

    first_byte_s: float = 1e-3
    bytes_per_s: float = 1e9

    def add_first_byte(self, seconds: float) -> None:
        """The first byte of an answer came after so long."""
        self.first_byte_s += _EWMA_WEIGHT * (seconds - self.first_byte_s)

    def add_transfer(self, size_bytes: int, seconds: float) -> None:
        """So many bytes came in so long, after the first."""
        if seconds > 0:
            self.bytes_per_s += _EWMA_WEIGHT * (size_bytes / seconds - self.bytes_per_s)

    def load_s(self, size_bytes: int) -> float:
        """Return how long a frame of *size_bytes* would take."""
        return self.first_byte_s + size_bytes / self.bytes_per_s


class PeerNode:
    """``address`` is where its gRPC service is. Thread-safe; *clock* returns monotonic seconds."""

    def __init__(
        self, address: str, breaker: Breaker, clock: Callable[[], float], number: int = 0
    ) -> None:
        self.address = address
        self.number = number
        """What our clients know it by."""
        self.breaker = breaker
        self.speed = PeerSpeed()
        self.incarnation = 0
        """Of the start that the directory named last; 0: it named none."""
        self.is_self = False
        self.answered_at = 0.0
        self.session: PeerSession | None = None
        """What it opened for this server, as far as is known."""
        self._clock = clock
        self._opened_at = 0.0
        self._idle: list[StreamLink] = []
        self._in_use: set[StreamLink] = set()
        self._faults = 0
        self._failed_reads = 0
        """In a row, though it answered finds in between."""
        self._has_answered = False
        self._barred_until = 0.0
        # Guards the eight above.
        self._lock = threading.Lock()

    @property
    def is_barred(self) -> bool:
        """Whether it sent what is wrong, or failed at reads, of late."""
        return self._clock() < self._barred_until

    @property
    def is_up(self) -> bool:
        """Whether it may be used: it opened a session, answers, and is not barred."""
        return self.session is not None and not self.breaker.reason and not self.is_barred

    def open_session(self, session: PeerSession) -> None:
        """Use *session* from now on. The streams of an earlier one are closed."""
        self.forget()
        with self._lock:
            self.session = session
            self._opened_at = self._clock()
        self.answered_at = self._clock()

    def forget(self) -> None:
        """Its session is over, or it is another server by now. Idempotent."""
        with self._lock:
            self.session = None
            idle, self._idle = self._idle, []
            in_use = list(self._in_use)
        for stream in idle:
            stream.close()
        for stream in in_use:
            stream.hang_up()

    @property
    def is_connected(self) -> bool:
        """Whether a request would find a stream that nobody uses."""
        return bool(self._idle)

    def grant_direct_reads(self, space: Namespace) -> DirectReadGrant | None:
        """Let a client of this server read chunks of *space* there; None unless it is up.

        The client brings the grant to the peer. Time counts from the start of this server's
        session there, so that the clocks of two hosts need not agree.
        """
        with self._lock:
            session, opened_at = self.session, self._opened_at
        if session is None or not self.is_up:
            return None
        until_s = int(self._clock() - opened_at) + GUEST_S
        token = guest_token(session.token, session.session_id, space, until_s)
        guest = pb.StreamAttach(
            session_id=session.session_id, token=token, key_namespace=space, until_s=until_s
        )
        return DirectReadGrant(session.address, session.certificate, guest)

    @contextmanager
    def checkout(self, within_s: float) -> Iterator[StreamLink]:
        """Lend a stream for one request, connected in *within_s* seconds where none is idle.

        Raises QuotaExceededError, LeaseExpiredError, and as ``StreamLink.connect``.
        """
        with self._lock:
            if self.session is None:
                raise LeaseExpiredError(f"{self.address}: no session")
            if len(self._in_use) >= LINKS_PER_PEER:
                raise QuotaExceededError("links_per_peer", LINKS_PER_PEER, self.address)
            stream = self._idle.pop() if self._idle else StreamLink(self.session, self._clock)
            self._in_use.add(stream)
        try:
            if not stream.is_open:
                stream.connect(min(within_s, CONNECT_S))
            yield stream
        finally:
            with self._lock:
                self._in_use.discard(stream)
                is_kept = stream.is_open and stream.session is self.session
                if is_kept:
                    self._idle.append(stream)
            if not is_kept:
                stream.close()

    def note_answer(self, *, is_read: bool = False) -> None:
        """It did what was requested."""
        self.answered_at = self._clock()
        self.breaker.succeed()
        with self._lock:
            self._has_answered = True
            if is_read:
                self._failed_reads = 0

    def note_failure(self, error: KVStoreError, *, is_read: bool = False) -> str:
        """Take note of a failed request; return the counter that it belongs to."""
        if isinstance(error, QuotaExceededError):
            return "peer_refusals"  # it is busy, or we are: a miss
        if isinstance(
            error,
            LeaseExpiredError | UnauthenticatedError | PermissionDeniedError | ShuttingDownError,
        ):
            self.forget()
            return "peer_lost_sessions"
        if isinstance(error, InvalidFrameError | InvalidRequestError):
            self.note_fault()
            return "peer_invalid_answers"
        self.breaker.fail(str(error))
        with self._lock:
            if is_read and self._has_answered:  # else it is gone, and the breaker's
                self._has_answered = False
                self._failed_reads += 1
                self._bar_if_due()
        return "peer_failures"

    def note_fault(self) -> None:
        """It sent a wrong answer, or wrong bytes."""
        with self._lock:
            self._faults += 1
            self._bar_if_due()

    def _bar_if_due(self) -> None:
        if max(self._faults, self._failed_reads) >= MAX_FAULTS:
            self._faults = self._failed_reads = 0
            self._barred_until = self._clock() + BARRED_S
