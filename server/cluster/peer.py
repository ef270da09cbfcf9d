"""A Peer: one other server as this one knows it, with its speed and what may be asked of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kvstore.proto.bulk import Guest
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
from kvstore.proto.guest_token import GUEST_S, guest_token
from kvstore.proto.types import Namespace
from kvstore.server.breaker import Breaker
from kvstore.server.cluster.peer_link import PeerLink, PeerTerms
from kvstore.server.cluster.stream_link import StreamLink

if TYPE_CHECKING:
    import zmq

LINKS_PER_PEER = 8
"""Requests to one peer at once; a further one is a miss there."""
MAX_LIES = 3
"""Wrong answers or wrong bytes, or reads in a row that fail, before a peer is left alone."""
BARRED_S = 60.0
STREAM_WITHIN_S = 0.5
"""For a stream to be opened; past it the bulk channel does."""
STREAMS_AGAIN_S = 30.0
_EWMA_WEIGHT = 0.2

AnyLink = TypeVar("AnyLink", PeerLink, StreamLink)


@dataclass(frozen=True, slots=True)
class Lent:
    """Where a client of ours reads from a peer itself, and the word by which it is let in."""

    stream_address: str
    stream_certificate: bytes
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
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._idle: list[PeerLink] = []
        self._idle_streams: list[StreamLink] = []
        self._lent_streams: set[StreamLink] = set()
        self._has_streams = False
        self._no_streams_until = 0.0
        self._lent = 0
        self._lies = 0
        self._stalls = 0
        """Reads in a row that failed, though it answered questions in between."""
        self._has_answered = False
        self._barred_until = 0.0
        # Guards the thirteen above.
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

    def let_in(self, terms: PeerTerms, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """It opened a session for us. The links of an earlier one are closed."""
        self.forget()
        with self._lock:
            self._terms, self._context = terms, context
            self._has_streams, self._no_streams_until = False, 0.0
            self._let_in_at = self._clock()
        self.heard_at = self._clock()

    def forget(self) -> None:
        """Its session is over, or it is another server by now. Idempotent."""
        with self._lock:
            self._terms = None
            idle: list[PeerLink | StreamLink] = [*self._idle, *self._idle_streams]
            self._idle, self._idle_streams = [], []
            lent = list(self._lent_streams)
        for link in idle:
            link.close()
        for stream in lent:
            stream.hang_up()

    @property
    def is_lent(self) -> bool:
        """Whether clients of ours may read from it themselves: it is up, and has streams."""
        return self._has_streams and self.is_up

    def let_guest(self, space: Namespace) -> Lent | None:
        """Let a client of ours read chunks of *space*; None where there is nothing to let it to.

        The peer hears of it from the client. Time is told from the start of our session there,
        so that the clocks of two hosts need not agree.
        """
        with self._lock:
            terms, began_at = self._terms, self._let_in_at
        if terms is None or not self.is_lent:
            return None
        until_s = int(self._clock() - began_at) + GUEST_S
        token = guest_token(terms.token, terms.session_id, space, until_s)
        guest = Guest(0, terms.session_id, space, until_s, token)
        return Lent(terms.stream_address, terms.stream_certificate, guest)

    @contextmanager
    def lend(self) -> Iterator[PeerLink]:
        """Lend a link for one request. Raises QuotaExceededError, LeaseExpiredError."""
        terms, context = self._borrow()
        with self._lock:
            link = self._idle.pop() if self._idle else PeerLink(terms, context, self._clock)
        try:
            yield link
        finally:
            self._take_back(link, self._idle)

    @contextmanager
    def lend_reader(self) -> Iterator[PeerLink | StreamLink]:
        """Lend what one frame is read over: a stream where the peer has them and is reached.

        Raises as ``lend`` does.
        """
        stream = self._stream()
        if stream is None:
            with self.lend() as link:
                yield link
            return
        try:
            yield stream
        finally:
            self._take_back(stream, self._idle_streams)

    def _stream(self) -> StreamLink | None:
        """Borrow a stream; None without one."""
        if not self._has_streams:
            return None
        terms, _ = self._borrow()
        with self._lock:
            if self._idle_streams:
                stream = self._idle_streams.pop()
                self._lent_streams.add(stream)
                return stream
        return self._reached(StreamLink(terms, self._clock))

    def try_streams(self) -> None:
        """Open a stream where the peer has them and none is known to be reached, if that is due.

        For the upkeep: no read waits for a port that nobody may reach.
        """
        terms = self._terms
        is_told = terms is not None and bool(terms.stream_address)
        if not is_told or self._has_streams or self._clock() < self._no_streams_until:
            return
        try:
            terms, _ = self._borrow()
            stream = self._reached(StreamLink(terms, self._clock))
        except (QuotaExceededError, LeaseExpiredError):
            return  # it is asked again, and let in again
        if stream is not None:
            self._has_streams = True
            self._take_back(stream, self._idle_streams)

    def _reached(self, stream: StreamLink) -> StreamLink | None:
        """Return a borrowed *stream* when it is connected; else none is used for a while."""
        with self._lock:
            self._lent_streams.add(stream)
        try:
            stream.reach(STREAM_WITHIN_S)
        except KVStoreError as error:
            self._take_back(stream, self._idle_streams)
            if isinstance(error, QuotaExceededError | LeaseExpiredError):
                raise
            with self._lock:
                self._has_streams = False
                self._no_streams_until = self._clock() + STREAMS_AGAIN_S
            return None
        return stream

    def _borrow(self) -> tuple[PeerTerms, zmq.Context[zmq.Socket[bytes]]]:
        with self._lock:
            terms, context = self._terms, self._context
            if terms is None or context is None:
                raise LeaseExpiredError(f"{self.address}: no session")
            if self._lent >= LINKS_PER_PEER:
                raise QuotaExceededError("links_per_peer", LINKS_PER_PEER, self.address)
            self._lent += 1
        return terms, context

    def _take_back(self, link: AnyLink, idle: list[AnyLink]) -> None:
        with self._lock:
            self._lent -= 1
            is_kept = link.is_open and link.terms is self._terms
            if isinstance(link, StreamLink):
                self._lent_streams.discard(link)
            if is_kept:
                idle.append(link)
        if not is_kept:
            link.close()

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
