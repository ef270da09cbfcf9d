"""Store events: which chunks a node's own tiers gain and lose.

They are hints: a chunk may be gone when it is asked for, and come unannounced.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvstore.client.forks import FORKS, EndedByForkError
from kvstore.client.server_link import ServerLink
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, KVStoreError, LeaseExpiredError
from kvstore.proto.types import DIGEST_BYTES, KEY_BYTES, Accuracy, ChunkKey

CALL_MS = 600_000
"""The server ends each call before that, and the stream makes the next."""
PAGES_AHEAD = 16
"""Read for an asyncio client that has not taken them yet."""


class Place(NamedTuple):
    """Where a reader is: behind page *cursor* of the server's start *boot_id*."""

    boot_id: int
    cursor: int


class ChunkEvent(NamedTuple):
    """A copy of *key*, behind *parent* (None: a prompt's first), came to *tier* or left it."""

    key: ChunkKey
    parent: ChunkKey | None
    tokens: int
    tier: str
    accuracy: Accuracy

    @property
    def is_stored(self) -> bool:
        """Whether it came."""
        return self.tokens > 0


@dataclass(frozen=True, slots=True)
class EventPage:
    """*events* in order, maybe none: then the node lives. *cleared*: forget what you knew of it.

    *place* is what to go on from; None while what is there is still being told. What comes
    meanwhile is told behind it, some of it twice.
    """

    events: tuple[ChunkEvent, ...]
    boot_id: int
    cleared: bool
    place: Place | None


class EventStream:
    """Pages without end: ``with client.events() as pages: for page in pages``.

    One thread iterates; any may ``close``, which ends it. Raises KVStoreErrors: then go on with
    ``events(since)``, from the ``place`` of the last page that had one.
    """

    def __init__(self, link: ServerLink, since: Place | None) -> None:
        self._link = link
        self._connection = link.connection
        self._since = since
        self._call: Any = None
        self._is_lost = False
        self._process = FORKS.process
        self._closed = False
        self._lock = threading.Lock()  # guards _call and _closed

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> EventPage:
        while True:
            message = self._next()
            if message is not None:
                page = page_from_message(message)
                self._since = page.place
                return page

    def _next(self) -> pb.EventsResponse | None:
        """Return the next message; None when another call is to be made."""
        FORKS.check(self._process, "the stream of events")
        try:
            if self._call is None:
                self._begin()
            message: pb.EventsResponse | None = self._connection.next_of(self._call)
        except LeaseExpiredError:
            self._end()
            if self._is_lost:
                raise
            self._is_lost = True  # the server did not know our session: try another, once
            return None
        except EndedByForkError:
            self._end()
            return None
        except KVStoreError:
            self._end()
            if self._closed:
                raise StopIteration from None
            raise
        self._is_lost = False
        if message is None:
            self._end()
        return message

    def _begin(self) -> None:
        since = self._since or Place(0, 0)
        request = pb.EventsRequest(
            session_id=self._session_id(),
            boot_id=since.boot_id,
            cursor=since.cursor,
        )
        call = self._connection.begin_stream("Events", request, CALL_MS, is_idle=True)
        with self._lock:
            self._call = call
            is_closed = self._closed
        if is_closed:
            self._connection.end_stream(call)

    def _session_id(self) -> int:
        if self._is_lost:
            self._link.renew(self._link.connected())
        return self._link.connected().session.terms.session_id

    def _end(self) -> None:
        with self._lock:
            call, self._call = self._call, None
        if call is not None:
            self._connection.end_stream(call)

    def close(self) -> None:
        """End the stream, and whoever waits for its next page. Idempotent."""
        if self._process is not FORKS.process:
            return
        with self._lock:
            self._closed = True
            call = self._call
        if call is not None:
            self._connection.end_stream(call)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def page_from_message(message: pb.EventsResponse) -> EventPage:
    """Return the page of a message. Raises InvalidRequestError for one that is none."""
    boot_id = message.server.boot_id
    return EventPage(
        tuple(map(_event, message.events)),
        boot_id,
        message.cleared,
        Place(boot_id, message.cursor) if message.cursor else None,
    )


def _event(event: pb.ChunkEvent) -> ChunkEvent:
    if len(event.key) != KEY_BYTES or len(event.parent) not in (0, DIGEST_BYTES):
        raise InvalidRequestError("key", event.key.hex(), "the server's events make no sense")
    space, accuracy = event.key[:DIGEST_BYTES], event.accuracy
    return ChunkEvent(
        ChunkKey(event.key),
        ChunkKey(space + event.parent) if event.parent else None,
        event.tokens,
        event.tier,
        Accuracy(accuracy) if accuracy <= Accuracy.exact else Accuracy.approximate,
    )


async def followed(stream: EventStream) -> AsyncGenerator[EventPage, None]:
    """Yield the pages of *stream*, read by a thread of its own. Use with ``aclosing``.

    Reading takes a thread for as long as it goes on, which the event loop's own are too few for.
    """
    loop = asyncio.get_running_loop()
    pages: asyncio.Queue[EventPage | KVStoreError | None] = asyncio.Queue()
    room = threading.Semaphore(PAGES_AHEAD)

    def tell(what: EventPage | KVStoreError | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            loop.call_soon_threadsafe(pages.put_nowait, what)

    def read() -> None:
        try:
            for page in stream:
                room.acquire()
                tell(page)
        except KVStoreError as error:
            tell(error)
        else:
            tell(None)

    threading.Thread(target=read, name="kvstore-events", daemon=True).start()
    try:
        while (page := await pages.get()) is not None:
            if isinstance(page, KVStoreError):
                raise page
            room.release()
            yield page
    finally:
        stream.close()
        room.release(PAGES_AHEAD)
