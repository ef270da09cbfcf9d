"""The zmq transport: frames in parts of 1 MB between hosts, under credit both ways."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from kvstore.client.connection import SLACK_S
from kvstore.client.session import Session
from kvstore.client.stream import StreamTransport
from kvstore.client.transport import Arrived, Outgoing, Put, Transport, read_outcomes
from kvstore.client.zmq_link import ZmqLink, endpoint
from kvstore.proto import bulk
from kvstore.proto.buffers import Bytes
from kvstore.proto.bulk_reading import BulkReading
from kvstore.proto.errors import (
    DeadlineError,
    InvalidFrameError,
    KVStoreError,
    TierUnavailableError,
)
from kvstore.proto.types import ChainDigest
from kvstore.proto.wire import join_digests

if TYPE_CHECKING:
    import zmq

MAX_LINKS = 8
"""Requests at once; more go through gRPC. Below what a server allows one session."""
IDLE_FRAME_BYTES = 128 << 20
"""Memory kept for the frames of the next get: to fault fresh pages in costs as much as a copy."""
_LARGE_BLOCK_BYTES = (32 << 20) - (1 << 16)
"""The largest that glibc draws its conclusion from, with room for its own header."""


class ZmqTransport(Transport):
    """Gets and puts over DEALER sockets, one request at a time each.

    Raises TierUnavailableError at birth when the server does not take part.
    """

    name = "zmq"

    def __init__(self, session: Session) -> None:
        import zmq

        super().__init__(session)
        if not session.terms.zmq_address:
            raise TierUnavailableError("zmq", "the server was started without --zmq")
        self._where = endpoint(session.terms, session.connection.address)
        self._fallback = StreamTransport(session)
        self._memory = _FrameMemory(IDLE_FRAME_BYTES)
        _keep_freed_memory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._idle: list[ZmqLink] = []
        self._links = 0
        self._is_closed = False
        # Guards the three above.
        self._lock = threading.Lock()
        try:
            # Half of what a call may take: where nobody answers, gRPC is still to be asked.
            first = self._take(time.monotonic() + session.options.deadline_ms / 2000)
        except KVStoreError:
            self._context.term()
            raise
        assert first is not None
        self._give_back(first)

    # --- get

    @override
    @contextmanager
    def get(
        self, digests: Sequence[ChainDigest], lease_id: int, deadline_ms: int
    ) -> Iterator[Iterator[Arrived]]:
        deadline = time.monotonic() + deadline_ms / 1000 + SLACK_S
        link = self._take(deadline)
        if link is None:
            with self._fallback.get(digests, lease_id, deadline_ms) as arriving:
                yield arriving
            return
        frames: list[Bytes] = []
        limit_bytes = self.session.terms.max_frame_bytes
        reading = BulkReading(
            link.next_request(), limit_bytes, lambda _, size: self._memory.take(size, frames)
        )
        word = bulk.Get(
            reading.request, self.session.terms.session_id, lease_id, reading.open(), deadline_ms
        )
        try:
            link.send(word, deadline, join_digests(digests))
            yield self._arriving(link, reading, deadline)
        finally:
            self._leave(link, reading, deadline)
            self._memory.give(frames)

    def _arriving(self, link: ZmqLink, reading: BulkReading, deadline: float) -> Iterator[Arrived]:
        while not reading.is_over:
            word, payload = self._receive(link, deadline)
            landed = reading.take(word, payload)
            if isinstance(word, bulk.Part) and payload is not None:
                credit_bytes = reading.credit(len(payload))
                if credit_bytes:
                    link.send(bulk.Credit(reading.request, credit_bytes), deadline)
            del payload
            if landed is not None:
                yield Arrived(landed.chunk, landed.tier, landed.frame, _stays)

    def _leave(self, link: ZmqLink, reading: BulkReading, deadline: float) -> None:
        """Have the server let go of what was asked for; a link on which it does not is dropped."""
        try:
            if not reading.is_over:
                link.send(bulk.Cancel(reading.request), deadline)
            while not reading.is_over:
                word, _ = link.receive(deadline)
                if word.request == reading.request:
                    reading.is_over = isinstance(word, bulk.Done | bulk.Failed)
        except KVStoreError:
            self._drop(link)
        else:
            self._give_back(link)

    # --- put

    @override
    def put(self, chunks: Sequence[Outgoing], *, durable: bool, deadline_ms: int) -> list[Put]:
        deadline = time.monotonic() + deadline_ms / 1000 + SLACK_S
        link = self._take(deadline)
        if link is None:
            return self._fallback.put(chunks, durable=durable, deadline_ms=deadline_ms)
        is_over = False
        try:
            results = _Upload(link, deadline).run(
                bulk.Put(
                    link.next_request(),
                    self.session.terms.session_id,
                    deadline_ms,
                    bulk.DURABLE if durable else 0,
                ),
                chunks,
            )
            is_over = True
        except DeadlineError as error:
            self.session.connection.gate.note(error)
            raise
        finally:
            # After an error there may be parts on the way that nobody asked for any more.
            self._give_back(link) if is_over else self._drop(link)
        return results

    # --- links

    def _receive(self, link: ZmqLink, deadline: float) -> tuple[bulk.Word, Bytes | None]:
        try:
            return link.receive(deadline)
        except DeadlineError as error:
            self.session.connection.gate.note(error)
            raise

    def _take(self, deadline: float) -> ZmqLink | None:
        """Return a link of our own for a while; None when as many as there may be are in use."""
        self.session.connection.gate.check()
        with self._lock:
            if self._is_closed:
                raise KVStoreError("the client is closed")
            if self._idle:
                return self._idle.pop()
            if self._links >= MAX_LINKS:
                return None
            self._links += 1
        try:
            return ZmqLink(
                self._context, self._where, self.session.terms, lambda: self._is_closed, deadline
            )
        except KVStoreError:
            self._forget()
            raise

    def _give_back(self, link: ZmqLink) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(link)
                return
        self._drop(link)

    def _drop(self, link: ZmqLink) -> None:
        link.close()
        self._forget()

    def _forget(self) -> None:
        with self._lock:
            self._links -= 1
            is_last = self._is_closed and not self._links
        if is_last:
            self._context.term()

    @override
    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            idle, self._idle = self._idle, []
            is_last = not self._links
        for link in idle:
            self._drop(link)
        if is_last:
            self._context.term()


class _Upload:
    """One put: frames go out part by part, as far as the server's credit goes."""

    def __init__(self, link: ZmqLink, deadline: float) -> None:
        self._link = link
        self._deadline = deadline
        self._budget = bulk.Budget()
        self._request = 0
        self._done: list[Put] | None = None

    def run(self, word: bulk.Put, chunks: Sequence[Outgoing]) -> list[Put]:
        """Put *chunks*; return what became of each. Raises the server's errors."""
        self._request = word.request
        self._link.send(word, self._deadline)
        # Two, so that one is encoded while the other is on its way.
        rooms = [np.empty(max((c.frame_bytes for c in chunks), default=0), np.uint8)] * 2
        if len(chunks) > 1:
            rooms[1] = np.empty(len(rooms[0]), np.uint8)
        trackers: list[list[zmq.MessageTracker]] = [[], []]
        for index, chunk in enumerate(chunks):
            turn = index % 2
            self._wait_for(trackers[turn])
            frame = rooms[turn][: chunk.frame_bytes]
            chunk.encode(frame)
            trackers[turn] = self._send(index, frame)
        self._link.send(bulk.Finish(self._request, len(chunks)), self._deadline)
        while self._done is None:
            self._take_word()
        if len(self._done) != len(chunks):
            raise InvalidFrameError("count", len(self._done), f"{len(chunks)} were put")
        return self._done

    def _wait_for(self, trackers: Sequence[zmq.MessageTracker]) -> None:
        import zmq

        try:
            for tracker in trackers:
                tracker.wait(max(0.0, self._deadline - time.monotonic()))
        except zmq.NotDone:
            raise DeadlineError("the server did not take the frames in time") from None

    def _send(self, index: int, frame: Bytes) -> list[zmq.MessageTracker]:
        trackers = []
        for start in range(0, len(frame), bulk.MAX_PAYLOAD_BYTES):
            data = frame[start : start + bulk.MAX_PAYLOAD_BYTES]
            while self._link.has_more() or not self._budget.spend(len(data)):
                self._take_word()
            part = bulk.Part(self._request, len(frame), start, index, bytes(bulk.TIER_BYTES))
            tracker = self._link.send(part, self._deadline, data)
            assert tracker is not None
            trackers.append(tracker)
        return trackers

    def _take_word(self) -> None:
        word, payload = self._link.receive(self._deadline)
        if word.request != self._request:
            return
        if isinstance(word, bulk.Failed):
            raise bulk.unpack_failure(b"" if payload is None else payload.tobytes())
        if isinstance(word, bulk.Credit):
            self._budget.grant(word.credit_bytes)
        elif isinstance(word, bulk.Done):
            data = b"" if payload is None else payload.tobytes()
            self._done = read_outcomes(*bulk.unpack_outcomes(word.frames, data))
        else:
            raise InvalidFrameError("kind", type(word).__name__, "not an answer to a put")


class _FrameMemory:
    """Memory of frames that were read, for those of the next get. Thread-safe.

    At most *limit_bytes* of it lie idle.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._idle: dict[int, list[Bytes]] = {}
        self._idle_bytes = 0
        self._lock = threading.Lock()  # guards the two above

    def take(self, size_bytes: int, owner: list[Bytes]) -> Bytes:
        """Return memory of *size_bytes*, noted with its *owner*."""
        with self._lock:
            of_size = self._idle.get(size_bytes)
            frame = of_size.pop() if of_size else None
            if frame is not None:
                self._idle_bytes -= size_bytes
        if frame is None:
            frame = np.empty(size_bytes, np.uint8)
        owner.append(frame)
        return frame

    def give(self, frames: Sequence[Bytes]) -> None:
        """Take back what its owner reads no more."""
        with self._lock:
            for frame in frames:
                if self._idle_bytes + len(frame) > self._limit_bytes:
                    self._idle.clear()
                    self._idle_bytes = 0
                self._idle.setdefault(len(frame), []).append(frame)
                self._idle_bytes += len(frame)


def _keep_freed_memory() -> None:
    """Have the allocator keep what messages of a megabyte free, rather than give it back each time.

    glibc does so once the process has freed one block as large as this; its pages are never
    touched. ZeroMQ allocates each message: gets went from 1.1 to 1.6 GB/s with this.
    """
    np.empty(_LARGE_BLOCK_BYTES, np.uint8)


def _stays() -> None:
    """The frame is ours until the get is left."""
