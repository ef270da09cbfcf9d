"""A Peer: one other server as this one knows it, with its speed and what may be asked of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.proto.bulk import GUEST_S, Guest, guest_token
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
from kvstore.server.cluster.peer_connections import PeerTerms, StreamLink
from kvstore.server.tiering.breaker import Breaker

LINKS_PER_PEER = 8
"""Requests to one peer at once; a further one is a miss there."""
MAX_LIES = 3
"""Wrong answers or wrong bytes, or reads in a row that fail, before a peer is left alone."""
BARRED_S = 60.0
CONNECT_S = 0.5
"""For a stream to be opened, or less where a request has less."""
_EWMA_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Lent:
    """Where a client of ours reads from a peer itself, and the word by which it is let in."""

    address: str
    certificate: bytes
    guest: Guest


@dataclass(slots=True)
class PeerSpeed:
    """What transfers from one peer took, as exponentially weighted means."""

    first_byte_s: float = 1e-3
    bytes_per_s: float = 1e9

    def heard(self, seconds: float) -> None:
        """The first byte of an answer came after so long."""
        self.first_byte_s += _EWMA_WEIGHT * (seconds - self.first_byte_s)

    def came(self, size_bytes: int, seconds: float) -> None:
        """So many bytes came in so long, after the first."""
        if seconds > 0:
            self.bytes_per_s += _EWMA_WEIGHT * (size_bytes / seconds - self.bytes_per_s)

    def load_s(self, size_bytes: int) -> float:
        """Return how long a frame of *size_bytes* would take."""
        return self.first_byte_s + size_bytes / self.bytes_per_s


class Peer:
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
        """Of the start that the directory told of last; 0: it told of none."""
        self.is_self = False
        self.heard_at = 0.0
        self._clock = clock
        self._terms: PeerTerms | None = None
        self._let_in_at = 0.0
        self._idle: list[StreamLink] = []
        self._lent: set[StreamLink] = set()
        self._lies = 0
        self._stalls = 0
        """Reads in a row that failed, though it answered questions in between."""
        self._has_answered = False
        self._barred_until = 0.0
        # Guards the eight above.
        self._lock = threading.Lock()

    @property
    def has_session(self) -> bool:
        """Whether it has let us in, as far as is known."""
        return self._terms is not None

    @property
    def is_barred(self) -> bool:
        """Whether it lied, or failed at reads, of late."""
        return self._clock() < self._barred_until

    @property
    def is_up(self) -> bool:
        """Whether it may be asked: it let us in, answers, and did not lie."""
        return self._terms is not None and not self.breaker.reason and not self.is_barred

    @property
    def max_batch_chunks(self) -> int:
        """How many chunks it may be asked for at once; 0 while it has not let us in."""
        terms = self._terms
        return terms.max_batch_chunks if terms is not None else 0

    @property
    def heartbeat_s(self) -> float:
        """How long it keeps a silent session."""
        terms = self._terms
        return terms.heartbeat_ms / 1000 if terms is not None else 0.0

    def let_in(self, terms: PeerTerms) -> None:
        """It opened a session for us. The streams of an earlier one are closed."""
        self.forget()
        with self._lock:
            self._terms = terms
            self._let_in_at = self._clock()
        self.heard_at = self._clock()

    def forget(self) -> None:
        """Its session is over, or it is another server by now. Idempotent."""
        with self._lock:
            self._terms = None
            idle, self._idle = self._idle, []
            lent = list(self._lent)
        for stream in idle:
            stream.close()
        for stream in lent:
            stream.hang_up()

    @property
    def is_connected(self) -> bool:
        """Whether a request would find a stream that nobody uses."""
        return bool(self._idle)

    def let_guest(self, space: Namespace) -> Lent | None:
        """Let a client of ours read chunks of *space*; None unless it is up.

        The peer hears of it from the client. Time is told from the start of our session there,
        so that the clocks of two hosts need not agree.
        """
        with self._lock:
            terms, began_at = self._terms, self._let_in_at
        if terms is None or not self.is_up:
            return None
        until_s = int(self._clock() - began_at) + GUEST_S
        token = guest_token(terms.token, terms.session_id, space, until_s)
        guest = Guest(0, terms.session_id, space, until_s, token)
        return Lent(terms.address, terms.certificate, guest)

    @contextmanager
    def lend(self, within_s: float) -> Iterator[StreamLink]:
        """Lend a stream for one request, connected in *within_s* seconds where none is idle.

        Raises QuotaExceededError, LeaseExpiredError, and as ``StreamLink.reach``.
        """
        stream = self._borrow()
        try:
            if not stream.is_open:
                stream.reach(min(within_s, CONNECT_S))
            yield stream
        finally:
            self._take_back(stream)

    def _borrow(self) -> StreamLink:
        with self._lock:
            if self._terms is None:
                raise LeaseExpiredError(f"{self.address}: no session")
            if len(self._lent) >= LINKS_PER_PEER:
                raise QuotaExceededError("links_per_peer", LINKS_PER_PEER, self.address)
            stream = self._idle.pop() if self._idle else StreamLink(self._terms, self._clock)
            self._lent.add(stream)
        return stream

    def _take_back(self, stream: StreamLink) -> None:
        with self._lock:
            self._lent.discard(stream)
            is_kept = stream.is_open and stream.terms is self._terms
            if is_kept:
                self._idle.append(stream)
        if not is_kept:
            stream.close()

    def answered(self, *, is_read: bool = False) -> None:
        """It did as it was asked."""
        self.heard_at = self._clock()
        self.breaker.succeed()
        with self._lock:
            self._has_answered = True
            if is_read:
                self._stalls = 0

    def failed(self, error: KVStoreError, *, is_read: bool = False) -> str:
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
            self.lied()
            return "peer_invalid_answers"
        self.breaker.fail(str(error))
        with self._lock:
            if is_read and self._has_answered:  # else it is gone, and the breaker's
                self._has_answered = False
                self._stalls += 1
                self._bar_if_due()
        return "peer_failures"

    def lied(self) -> None:
        """It answered with what is not so."""
        with self._lock:
            self._lies += 1
            self._bar_if_due()

    def _bar_if_due(self) -> None:
        if max(self._lies, self._stalls) >= MAX_LIES:
            self._lies = self._stalls = 0
            self._barred_until = self._clock() + BARRED_S
