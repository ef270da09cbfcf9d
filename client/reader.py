"""The Reader: frames that arrived, verified and decoded into tensors, several at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from kvstore.client.direct_frame import DirectFrame
from kvstore.client.file_frame import FileFrame
from kvstore.client.layer_feed import in_time
from kvstore.client.rectangle_room import RectangleRoom
from kvstore.client.session import Session
from kvstore.client.tensors import LayerTensors, to_arrays
from kvstore.client.transport import Arrival
from kvstore.codecs.base import AnyTensors, ChunkTensors, codec_by_id, empty_tensors
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.shards import cut
from kvstore.proto.buffers import Bytes, Sliced
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    KVStoreError,
    ModelError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader, parse_header
from kvstore.proto.types import ChunkKey, KVLayout

Room: TypeAlias = Callable[[int, KVLayout], Any]
"""Returns where the tensors of chunk number so and so go, as AnyTensors of that layout."""


def fresh(_: int, layout: KVLayout) -> ChunkTensors:
    """Room in arrays of their own."""
    return empty_tensors(layout)


def given(out: Sequence[LayerTensors] | None) -> Room:
    """Room in what the caller brought, if it brought any."""
    if out is None:
        return fresh

    def room(index: int, _: KVLayout) -> AnyTensors:
        return to_arrays(out[index])

    return room


T = TypeVar("T")


class _Reading:
    """The frames of one read, decoded by whoever is free: its caller and some helpers.

    The caller feeds and, rather than wait, decodes too. Frames are taken in their order, so that
    all before one that failed are tried.
    """

    def __init__(self, decode: Callable[[Arrival], ChunkTensors], ahead: int) -> None:
        self._decode = decode
        self._ahead = ahead
        self._waiting: SimpleQueue[Arrival | None] = SimpleQueue()
        self._found: dict[int, ChunkTensors] = {}
        self._errors: dict[int, KVStoreError] = {}
        self._failed = math.inf
        """The place of a frame that failed: nobody looks at those behind it."""

    def help(self) -> None:
        """Decode what waits until there will be no more."""
        while (arrived := self._waiting.get()) is not None:
            self._try(arrived)

    def feed(self, arriving: Iterator[Arrival]) -> None:
        """Have all that arrives decoded, until one fails."""
        for arrived in arriving:
            if arrived.index > self._failed:
                return
            if self._waiting.qsize() < self._ahead:
                self._waiting.put(arrived)
            else:
                self._try(arrived)

    def finish(self, helpers: Sequence[Future[None]]) -> None:
        """Decode what is left and wait for *helpers*: they write to the caller's memory."""
        try:
            with suppress(Empty):
                while (arrived := self._waiting.get_nowait()) is not None:
                    self._try(arrived)
        finally:  # a room may raise anything: no thread waits for more after that
            for _ in helpers:
                self._waiting.put(None)
            running = [helper for helper in helpers if not helper.cancel()]
            wait(running)
        for helper in running:
            helper.result()

    def result(self) -> tuple[list[ChunkTensors], KVStoreError | None]:
        """Return the tensors of the longest prefix, and what the next one failed with."""
        first = min(self._errors, default=len(self._found))
        return [self._found[index] for index in range(first)], self._errors.get(first)

    def _try(self, arrived: Arrival) -> None:
        if arrived.index > self._failed:
            return
        try:
            self._found[arrived.index] = self._decode(arrived)
        except KVStoreError as error:
            self._errors[arrived.index] = error
            self._failed = min(self._failed, arrived.index)


class Reader:
    """Decodes with *threads* threads, the caller's among them: memory answers faster than one
    core copies. Thread-safe.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-copy")

    def read(
        self,
        session: Session,
        keys: Sequence[ChunkKey],
        arriving: Iterator[Arrival],
        room: Room = fresh,
    ) -> tuple[list[ChunkTensors], ChunkKey | None]:
        """Return the tensors of the longest prefix that proves right, and the key that did not.

        They are what *room* gave. Raises LeaseExpiredError when memory was reused under the
        reader, LayoutMismatchError when the room does not have the chunk's layout.
        """

        def one(arrived: Arrival) -> ChunkTensors:
            return decode(session, keys[arrived.index], arrived, room)

        reading = _Reading(one, 2 * self.threads)
        helpers: list[Future[None]] = []
        stopped: KVStoreError | None = None
        try:
            while len(helpers) < min(self.threads, len(keys)) - 1:
                helpers.append(self.submit(reading.help))
            reading.feed(in_time(arriving))
        except KVStoreError as error:
            stopped = error
        finally:
            reading.finish(helpers)
        found, failed = reading.result()
        wrong = failed or stopped
        return found, None if wrong is None else _broken(keys, found, wrong)

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have one of the threads do *work*. Raises KVStoreError after ``close``."""
        try:
            return self._pool.submit(work, *arguments)
        except RuntimeError as error:  # the pool's answer after ``close``
            raise KVStoreError(f"the client is closed: {error}") from None

    def leave(self) -> None:
        """In a child, where its threads do not run: take no more work."""
        self._pool = ThreadPoolExecutor(1)
        self._pool.shutdown()

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._pool.shutdown()


def _broken(
    keys: Sequence[ChunkKey], found: Sequence[ChunkTensors], error: KVStoreError
) -> ChunkKey | None:
    """Return the key that *error* proves wrong, if it does. Raises what the caller has to know."""
    if isinstance(error, ChunkCorruptError | InvalidFrameError | ModelError):
        # What is returned was verified; this was not, so the prefix ends before it.
        return keys[len(found)]
    if isinstance(error, UnknownCodecError):
        return None  # right for all we know, to a newer client
    if isinstance(error, TierUnavailableError) and found:
        return None  # a file of the server's that cannot be read
    raise error


def decode(session: Session, key: ChunkKey, arrived: Arrival, room: Room) -> ChunkTensors:
    """Verify the frame that arrived for *key* and decode it into *room*.

    Raises ChunkCorruptError, InvalidFrameError, UnknownCodecError, LeaseExpiredError, and
    ModelError for a frame that names the tables of another model.
    """
    frame = arrived.data
    if isinstance(frame, DirectFrame):
        frame.check()
        return frame.tensors
    try:
        header = check_header(session, key, frame, len(frame))
        tensors: ChunkTensors = room(arrived.index, header.layout)
        if isinstance(room, RectangleRoom):
            cut(header, frame, room.shard(header.layout), tensors)
        elif isinstance(frame, FileFrame) and header.codec_id == RawCodec.codec_id:
            frame.decode_into(header, tensors)
        else:
            codec_by_id(header.codec_id).decode_into(header, frame[:], tensors)
        return tensors
    finally:
        # First of all errors: memory that was reused says nothing of the chunk.
        arrived.confirm()


def direct(
    session: Session, keys: Sequence[ChunkKey], room: Room, index: int, size: int, start: Bytes
) -> DirectFrame | None:
    """Return what takes the parts of a frame of *size* bytes, which begins with *start*.

    None for one that has to be whole first: to be decoded, cut, or found wrong by ``decode``.
    """
    if isinstance(room, RectangleRoom) or index >= len(keys):
        return None
    try:
        header = check_header(session, keys[index], start, size)
        if header.codec_id != RawCodec.codec_id:
            return None
        head = start[: header.header_bytes].copy()  # a part is longer
        return DirectFrame(header, head, room(index, header.layout))
    except KVStoreError:
        return None


def check_header(session: Session, key: ChunkKey, data: Sliced, frame_bytes: int) -> FrameHeader:
    """Return the header at the start of *data* if it is of *key*'s frame of that size.

    Raises ChunkCorruptError, InvalidFrameError.
    """
    header = parse_header(data)
    if header.key != key or header.frame_bytes != frame_bytes:
        raise ChunkCorruptError(key, f"its place holds chunk {header.key.hex()}")
    if header.representation != session.representation_digest:
        raise ChunkCorruptError(key, "it was stored for another Model")
    return header
