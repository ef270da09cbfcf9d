"""What a server reports: its own state, that of its chunks, and events of chunks.

Sizes are in bytes, times in seconds. Events are hints: a chunk may be gone when it is requested,
or stored without an event.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Self

from kvstore.client.forks import FORKS, EndedByForkError
from kvstore.client.server_link import ServerLink
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.blend import GateView
from kvstore.proto.errors import InvalidRequestError, KVStoreError, LeaseExpiredError
from kvstore.proto.messages import as_value
from kvstore.proto.types import DIGEST_BYTES, KEY_BYTES, Accuracy, ChunkKey, Component

CALL_MS = 600_000
"""The server ends each call before that, and the stream makes the next one."""
PAGES_AHEAD = 16
"""Pages buffered for an asyncio client."""


@dataclass(frozen=True, slots=True)
class CopyStat:
    """A copy of a chunk on a tier. With ``ranks`` only: by its ``policy`` ``before`` others are
    evicted first, or more with ``at_least``, if the chunk was not among those ranked.
    """

    tier: str
    codec: str
    size_bytes: int
    accuracy: Accuracy
    before: int
    at_least: bool
    policy: str


@dataclass(frozen=True, slots=True)
class ChunkStat:
    """A chunk of the client's namespace.

    ``parent`` is the digest of the chunk before it, zeros for a prompt's first. ``idle_s`` is the
    time since it was last read or put, None if unknown; ``pinned_s`` how much longer it is pinned;
    ``expires_s`` its remaining time to live, None without one. ``context_tokens`` are those
    of the stored chunks before it; ``raw_bytes`` its size without a codec.
    """

    digest: bytes
    parent: bytes
    tokens: int
    raw_bytes: int
    copies: tuple[CopyStat, ...]
    leases: int
    pinned: bool
    hits: int
    idle_s: float | None
    pinned_s: float
    expires_s: float | None
    priority: int
    context_tokens: int
    components: tuple[Component, ...]


@dataclass(frozen=True, slots=True)
class SizeRatio:
    """The hit ratio, 0 to 1, that a tier ``scale`` times as large would have."""

    scale: float
    hit_ratio: float


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """The use of a tier by a tenant or category with a quota; a limit of 0 is none."""

    name: str
    used_bytes: int
    quota_bytes: int
    guaranteed_bytes: int


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A tier: ``state`` is serving or degraded, for the ``reason``."""

    name: str
    capacity_bytes: int
    used_bytes: int
    chunks: int
    codec: str
    state: str
    reason: str
    policy: str
    what_if: tuple[SizeRatio, ...]
    partitions: tuple[PartitionStatus, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """Another node of the directory."""

    node_id: str
    incarnation: int
    grpc_address: str
    bulk_address: str


@dataclass(frozen=True, slots=True)
class DirectoryStatus:
    """A server's state in the node directory, and the ``nodes`` it finds there.

    ``standing`` is known, unknown, taken or full; ``failure`` why Redis cannot be used.
    ``announced`` counts the chunks it lists, ``waiting`` the entries still to be written.
    """

    node_id: str
    incarnation: int
    standing: str
    failure: str
    announced: int
    waiting: int
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """A server: ``state`` is serving or draining, ``boot_id`` changes when it starts again.

    Sizes, ``sessions``, ``leases`` and ``counters`` are 0 and empty for callers without the role
    admin. ``ghosts`` counts the evicted chunks in ghost lists of policies; ``directory`` is None
    without one.
    """

    boot_id: int
    version: str
    state: str
    uptime_s: float
    tiers: tuple[TierStatus, ...]
    sessions: int
    leases: int
    counters: Mapping[str, int]
    socket_path: str
    ghosts: int
    gates: tuple[GateView, ...]
    directory: DirectoryStatus | None


def stat_from_message(message: pb.ChunkStat) -> ChunkStat:
    """Return a chunk's state. Raises KVStoreError if it is invalid."""
    idle_s = None if message.idle_s < 0 else message.idle_s
    try:
        return as_value(ChunkStat, message, idle_s=idle_s, expires_s=message.expires_s or None)
    except ValueError as error:
        raise KVStoreError(f"the server's reply is invalid: {error}") from None


def status_from_message(message: pb.StatusResponse) -> ServerStatus:
    """Return a server's state."""
    has_directory = message.HasField("directory")
    return as_value(
        ServerStatus,
        message,
        boot_id=message.server.boot_id,
        counters=dict(message.counters),
        directory=as_value(DirectoryStatus, message.directory) if has_directory else None,
    )


class Place(NamedTuple):
    """A reader's position: behind page *cursor* of the server's start *boot_id*."""

    boot_id: int
    cursor: int


class ChunkEvent(NamedTuple):
    """A copy of *key*, behind *parent* (None: a prompt's first), stored on *tier* or removed."""

    key: ChunkKey
    parent: ChunkKey | None
    tokens: int
    tier: str
    accuracy: Accuracy

    @property
    def is_stored(self) -> bool:
        """Whether it was stored."""
        return self.tokens > 0


@dataclass(frozen=True, slots=True)
class EventPage:
    """*events* in order; an empty page is a sign of life. *cleared*: discard all earlier state.

    *place* is where to resume; None until the current chunks are all sent. Events from meanwhile
    follow, some of them twice.
    """

    events: tuple[ChunkEvent, ...]
    boot_id: int
    cleared: bool
    place: Place | None


class EventStream(Iterator[EventPage]):
    """Pages without end: ``with client.events() as pages: for page in pages``.

    One thread iterates; any may ``close``, which ends it. Raises KVStoreErrors: then resume by
    ``events(since)``, from the ``place`` of the last page that had one.
    """

    def __init__(self, link: ServerLink, since: Place | None) -> None:
        self._link = link
        self._connection = link.connection
        self._since = since
        self._call: Any = None
        self._process = FORKS.process
        self._closed = False

    def __next__(self) -> EventPage:
        FORKS.check(self._process, "the stream of events")
        is_lost = False
        while True:
            try:
                if self._call is None:
                    self._begin(is_new=is_lost)
                message = self._connection.next_of(self._call)
                if message is not None:
                    page = page_from_message(message)
                    self._since = page.place
                    return page
            except EndedByForkError:
                pass
            except KVStoreError as error:
                self._end()
                if self._closed:
                    raise StopIteration from None
                if is_lost or not isinstance(error, LeaseExpiredError):
                    raise
                is_lost = True  # the server lost the session: try another, once
            self._end()

    def _begin(self, *, is_new: bool) -> None:
        if is_new:
            self._link.renew(self._link.connected())
        session_id = self._link.connected().session.terms.session_id
        boot_id, cursor = self._since or Place(0, 0)
        request = pb.EventsRequest(session_id=session_id, boot_id=boot_id, cursor=cursor)
        call = self._connection.begin_stream("Events", request, CALL_MS, is_idle=True)
        self._call = call
        if self._closed:  # closed before ``close`` found the call
            self._connection.end_stream(call)

    def _end(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._connection.end_stream(call)

    def close(self) -> None:
        """End the stream, and any wait for its next page. Idempotent."""
        if self._process is FORKS.process:
            self._closed = True
            if (call := self._call) is not None:
                self._connection.end_stream(call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def page_from_message(message: pb.EventsResponse) -> EventPage:
    """Return the page of a message. Raises InvalidRequestError if it is invalid."""
    boot_id = message.server.boot_id
    return EventPage(
        tuple(map(_event, message.events)),
        boot_id,
        message.cleared,
        Place(boot_id, message.cursor) if message.cursor else None,
    )


def _event(event: pb.ChunkEvent) -> ChunkEvent:
    if len(event.key) != KEY_BYTES or len(event.parent) not in (0, DIGEST_BYTES):
        raise InvalidRequestError("key", event.key.hex(), "the server sent an invalid event")
    space, accuracy = event.key[:DIGEST_BYTES], event.accuracy
    return ChunkEvent(
        ChunkKey(event.key),
        ChunkKey(space + event.parent) if event.parent else None,
        event.tokens,
        event.tier,
        Accuracy(accuracy) if accuracy <= Accuracy.exact else Accuracy.approximate,
    )


async def followed(stream: EventStream) -> AsyncGenerator[EventPage, None]:
    """Yield the pages of *stream*, read all the time by a thread of its own, as the event loop's
    are few. Use with ``aclosing``.
    """
    loop = asyncio.get_running_loop()
    pages: asyncio.Queue[EventPage | KVStoreError | None] = asyncio.Queue()
    slots = threading.Semaphore(PAGES_AHEAD)

    def push(what: EventPage | KVStoreError | None) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(pages.put_nowait, what)

    def read() -> None:
        try:
            for page in chain(stream, (None,)):
                slots.acquire()
                push(page)
        except KVStoreError as error:
            push(error)

    threading.Thread(target=read, name="kvstore-events", daemon=True).start()
    try:
        while (page := await pages.get()) is not None:
            if isinstance(page, KVStoreError):
                raise page
            slots.release()
            yield page
    finally:
        stream.close()
        slots.release(PAGES_AHEAD)
