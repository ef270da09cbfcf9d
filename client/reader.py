"""The Reader: frames that arrived, verified and decoded into tensors, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from kvstore.client.file_frame import FileFrame
from kvstore.client.layer_feed import in_time
from kvstore.client.session import Session
from kvstore.client.tensors import LayerTensors, to_arrays
from kvstore.client.transport import Arrived
from kvstore.codecs.base import AnyTensors, ChunkTensors, codec_by_id, empty_tensors
from kvstore.codecs.raw import RawCodec
from kvstore.proto.buffers import Sliced
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    KVStoreError,
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


class Reader:
    """Decodes with *threads* threads of its own: one core copies slower than memory answers.

    Thread-safe.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._ahead = 2 * threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-copy")

    def read(
        self,
        session: Session,
        keys: Sequence[ChunkKey],
        arriving: Iterator[Arrived],
        room: Room = fresh,
    ) -> tuple[list[ChunkTensors], ChunkKey | None]:
        """Return the tensors of the longest prefix that proves right, and the key that did not.

        They are what *room* gave. Raises LeaseExpiredError when memory was reused under the
        reader, LayoutMismatchError when the room does not have the chunk's layout.
        """
        found: list[ChunkTensors] = []
        pending: deque[Future[ChunkTensors]] = deque()
        try:
            for arrived in in_time(arriving):
                key = keys[arrived.index]
                if len(keys) == 1:
                    found.append(decode(session, key, arrived, room))
                    break
                if len(pending) >= self._ahead:
                    found.append(pending.popleft().result())
                pending.append(self.submit(decode, session, key, arrived, room))
            while pending:
                found.append(pending.popleft().result())
        except (ChunkCorruptError, InvalidFrameError):
            # What is returned was verified; this was not, so the prefix ends before it.
            return found, keys[len(found)]
        except UnknownCodecError:
            return found, None  # right for all we know, to a newer client
        except TierUnavailableError:  # the server when nothing came, else a file of its
            if not found:
                raise
            return found, None
        finally:
            for left in pending:  # still reading shared memory and writing the caller's
                left.exception()
        return found, None

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have one of the threads do *work*. Raises KVStoreError after ``close``."""
        try:
            return self._pool.submit(work, *arguments)
        except RuntimeError as error:  # the pool's answer after ``close``
            raise KVStoreError(f"the client is closed: {error}") from None

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._pool.shutdown()


def decode(session: Session, key: ChunkKey, arrived: Arrived, room: Room) -> ChunkTensors:
    """Verify the frame that arrived for *key* and decode it into *room*.

    Raises ChunkCorruptError, InvalidFrameError, UnknownCodecError, LeaseExpiredError.
    """
    try:
        header = check_header(session, key, arrived.frame, len(arrived.frame))
        tensors: ChunkTensors = room(arrived.index, header.layout)
        frame = arrived.frame
        if isinstance(frame, FileFrame) and header.codec_id == RawCodec.codec_id:
            frame.decode_into(header, tensors)
        else:
            codec_by_id(header.codec_id).decode_into(header, frame[:], tensors)
        return tensors
    finally:
        # First of all errors: memory that was reused says nothing of the chunk.
        arrived.confirm()


def check_header(session: Session, key: ChunkKey, data: Sliced, frame_bytes: int) -> FrameHeader:
    """Return the header at the start of *data* if it is of *key*'s frame of that size.

    Raises ChunkCorruptError, InvalidFrameError.
    """
    header = parse_header(data)
    if header.key != key or header.frame_bytes != frame_bytes:
        raise ChunkCorruptError(key, f"its place holds chunk {header.key.hex()}")
    if header.representation != session.representation_digest:
        raise ChunkCorruptError(key, "it was stored for another Representation")
    return header
