"""The Reader: frames that arrived, verified and decoded into tensors, several at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvstore.client.session import Session
from kvstore.client.tensors import LayerTensors, to_arrays
from kvstore.client.transport import Arrived
from kvstore.codecs.base import ChunkTensors, codec_by_id, empty_tensors
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    KVStoreError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.frame import parse_header
from kvstore.proto.types import ChunkKey


class Reader:
    """Decodes with *threads* threads of its own: one core copies slower than memory answers.

    Thread-safe.
    """

    def __init__(self, threads: int) -> None:
        self._ahead = 2 * threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-copy")

    def read(
        self,
        session: Session,
        keys: Sequence[ChunkKey],
        arriving: Iterator[Arrived],
        out: Sequence[LayerTensors] | None,
    ) -> tuple[list[ChunkTensors], ChunkKey | None]:
        """Return the tensors of the longest prefix that proves right, and the key that did not.

        Written into *out* where given. Raises LeaseExpiredError when memory was reused under
        the reader, LayoutMismatchError when *out* does not have the chunk's layout.
        """
        found: list[ChunkTensors] = []
        pending: deque[Future[ChunkTensors]] = deque()
        try:
            for arrived in _in_time(arriving):
                key = keys[arrived.index]
                room = None if out is None else to_arrays(out[arrived.index])
                if len(keys) == 1:
                    found.append(decode(session, key, arrived, room))
                    break
                if len(pending) >= self._ahead:
                    found.append(pending.popleft().result())
                pending.append(self._submit(session, key, arrived, room))
            while pending:
                found.append(pending.popleft().result())
        except (ChunkCorruptError, InvalidFrameError):
            # What is returned was verified; this was not, so the prefix ends before it.
            return found, keys[len(found)]
        except UnknownCodecError:
            return found, None  # right for all we know, to a newer client
        finally:
            for left in pending:  # still reading shared memory and writing the caller's
                left.exception()
        return found, None

    def _submit(
        self, session: Session, key: ChunkKey, arrived: Arrived, room: ChunkTensors | None
    ) -> Future[ChunkTensors]:
        try:
            return self._pool.submit(decode, session, key, arrived, room)
        except RuntimeError as error:  # the pool's answer after ``close``
            raise KVStoreError(f"the client is closed: {error}") from None

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._pool.shutdown()


def _in_time(arriving: Iterator[Arrived]) -> Iterator[Arrived]:
    """Yield what follows without a gap and arrives in time; raise only if nothing does."""
    count = 0
    try:
        for arrived in arriving:
            if arrived.index != count:
                return
            count += 1
            yield arrived
    except (DeadlineError, TierUnavailableError):
        if not count:
            raise


def decode(
    session: Session, key: ChunkKey, arrived: Arrived, room: ChunkTensors | None
) -> ChunkTensors:
    """Verify the frame that arrived for *key* and decode it, into *room* where given.

    Raises ChunkCorruptError, InvalidFrameError, UnknownCodecError, LeaseExpiredError.
    """
    try:
        return _decode(session, key, arrived, room)
    finally:
        # First of all errors: memory that was reused says nothing of the chunk.
        arrived.confirm()


def _decode(
    session: Session, key: ChunkKey, arrived: Arrived, room: ChunkTensors | None
) -> ChunkTensors:
    header = parse_header(arrived.frame)
    if header.key != key or header.frame_bytes != len(arrived.frame):
        raise ChunkCorruptError(key, f"its place holds chunk {header.key.hex()}")
    if header.representation != session.representation_digest:
        raise ChunkCorruptError(key, "it was stored for another Representation")
    tensors = empty_tensors(header.layout) if room is None else room
    codec_by_id(header.codec_id).decode_into(header, arrived.frame, tensors)
    return tensors
