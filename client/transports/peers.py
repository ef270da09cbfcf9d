"""PeerReads: chunks read directly from the memory of other servers, not through the own one.

The own server lists the others and grants access to them, at session start if they are few. It
serves whatever they do not deliver.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace

from kvstore.client.connection import Pool
from kvstore.client.frames import Arrival, Direct, DirectFrame, FrameAssembler
from kvstore.client.session import Session
from kvstore.client.transports.tcp import DIAL_S, Entrance, FrameStream, in_use, streams_to
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import KVStoreError, QuotaExceededError, TierUnavailableError
from kvstore.proto.types import DIGEST_BYTES

TIER = "peer"
MAX_LENDERS = 16
"""Servers to connect to; one that was not read from for AGAIN_S makes way for another."""
SILENCE_S = 0.25
"""Timeout of the next bytes, before the own server is used."""
AGAIN_S = 30.0
"""How long a server that refused access or failed to deliver is skipped."""


@dataclass(slots=True)
class _Lender:
    """Another server; ``streams`` if it granted access, which is requested (again) at ``due_s``, in
    monotonic seconds; infinite during a request. ``used_s``: when it was added, or read from.
    """

    due_s: float = -math.inf
    streams: Pool[FrameStream] | None = None
    session_id: int = 0
    used_s: float = 0.0


class PeerReads:
    """The other servers that one session reads from. Thread-safe."""

    def __init__(self, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self.lenders: dict[int, _Lender] = {}
        self._is_closed = False
        # Guards the two above.
        self._lock = threading.Lock()

    def numbers(self) -> list[int]:
        """Return the servers with a ready connection."""
        self.connect_to(self._session.peers)
        with self._lock:
            known = [(number, one.streams) for number, one in self.lenders.items() if one.streams]
        self.connect_to(number for number, _ in known)
        return [number for number, streams in known if streams.is_ready()]

    def connect_to(self, numbers: Iterable[int]) -> None:
        """Request access, in the background, to servers that have chunks this client reads."""
        if not self._session.options.read_peers:
            return
        for number in numbers:
            with self._lock:
                known = self.lenders.get(number) or _Lender(used_s=self._clock())
                if self._is_closed or self._clock() < known.due_s or not self._has_space(number):
                    continue
                known.due_s = math.inf
                self.lenders[number] = known
            threading.Thread(
                target=self._connect, args=(number, known), name="kvstore-peer-connect", daemon=True
            ).start()

    def _has_space(self, number: int) -> bool:
        """Whether another may be added; evicts one that is not used if needed."""
        if number not in self.lenders and len(self.lenders) >= MAX_LENDERS:
            rows, since = self.lenders.items(), self._clock() - AGAIN_S
            first = next((n for n, x in rows if x.used_s < since and x.due_s < math.inf), None)
            if first is None:
                return False
            _close(self.lenders.pop(first))
        return True

    def _connect(self, number: int, lender: _Lender) -> None:
        session, requested_at = self._session, self._clock()
        request = pb.LendPeerRequest(session_id=session.terms.session_id, number=number)
        try:
            reply = session.connection.call(
                "LendPeer", request, session.options.deadline_ms, pb.LendPeerResponse
            )
            guest = pb.StreamAttach(
                session_id=reply.session_id,
                token=reply.token,
                key_namespace=session.namespace,
                until_s=reply.until_s,
            )
            entrance = Entrance(reply.bulk_address, reply.bulk_certificate, guest)
            streams = streams_to(entrance, SILENCE_S)
            with in_use(streams, streams.take(DIAL_S)):  # checks that it can be reached
                pass
        except KVStoreError:
            self._skip(lender)
            return
        due_s = requested_at + reply.valid_ms / 2000
        new = _Lender(due_s, streams, reply.session_id, lender.used_s)
        with self._lock:
            if not self._is_closed:
                self.lenders[number], new = new, lender
        _close(new)

    def _skip(self, lender: _Lender) -> None:
        lender.due_s = self._clock() + AGAIN_S
        _close(lender)

    def read(
        self, number: int, first: int, digests: bytes, direct: Direct, deadline: float
    ) -> Generator[Arrival, None, int | None]:
        """Yield the frames with *digests* from server *number*, in order; *first* is the index of
        the first one in the get. Return the index of the first that did not arrive, or None.

        Raises nothing. *direct* as in a ReadPlan; *deadline* in monotonic seconds.
        """
        with self._lock:
            lender = self.lenders.get(number) or _Lender()
            streams = lender.streams
        if streams is None:
            return first
        lender.used_s = self._clock()

        def renumbered(index: int, frame_bytes: int, start: Bytes) -> DirectFrame | None:
            return direct(first + index, frame_bytes, start)

        assembler = FrameAssembler(self._session.terms.max_frame_bytes, renumbered)
        try:
            with in_use(streams, streams.take(0.0)) as stream:
                if stream is None:
                    return first
                get = pb.GetRequest(
                    session_id=lender.session_id,
                    key_namespace=self._session.namespace,
                    digests=digests,
                    deadline_ms=max(1, int(1000 * (deadline - time.monotonic()))),
                )
                stream.begin(pb.StreamMessage(get=get), deadline)
                for frame in assembler.frames(stream.parts()):
                    yield replace(frame, index=first + frame.index, tier=TIER)
                assembler.end(stream.frames)
        except (TierUnavailableError, QuotaExceededError):
            pass  # it is overloaded, or has just restarted
        except KVStoreError:
            self._skip(lender)
        arrived = assembler.next_index
        return first + arrived if arrived < len(digests) // DIGEST_BYTES else None

    def leave(self) -> None:
        """In a child: drop the parent's connections."""
        self._lock = threading.Lock()  # another thread may have held it
        self.close(Pool.leave)

    def close(self, end: Callable[[Pool[FrameStream]], None] = Pool.close) -> None:
        """Close all connections; gets in progress use the own server. Idempotent."""
        with self._lock:
            self._is_closed = True
            lenders = list(self.lenders.values())
            self.lenders.clear()
        for lender in lenders:
            _close(lender, end)


def _close(lender: _Lender, end: Callable[[Pool[FrameStream]], None] = Pool.close) -> None:
    streams, lender.streams = lender.streams, None
    if streams is not None:
        end(streams)
