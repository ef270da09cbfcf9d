"""Frames that arrived, verified and decoded into tensors by several threads: whole, or by layer.

The first chunk that is late, missing or wrong ends the prefix; a wrong one is reported, and the
server drops it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import filterfalse
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias, TypeVar

from kvstore.client.chunk import LayerTensors, Shard, to_arrays
from kvstore.client.forks import FORKS
from kvstore.client.frames import Arrival, DirectFrame, FileFrame, LayeredFrame, LayerStream, Range
from kvstore.client.session import Session
from kvstore.codecs.base import (
    AnyPart,
    AnyTensors,
    ChunkTensors,
    Codec,
    Part,
    check_tensors,
    codec_by_id,
    empty_tensors,
)
from kvstore.codecs.raw import RAW
from kvstore.codecs.slices import copy_kept, cut, cut_bytes, kept_rows, place_cut
from kvstore.proto.buffers import Bytes, Sliced
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    KVStoreError,
    LayoutMismatchError,
    ModelError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader, parse_header
from kvstore.proto.row_mask import Rows, SkippedRows
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout, layer_order

WRONG = (ChunkCorruptError, InvalidFrameError, ModelError)
"""Errors that prove a chunk wrong: it is reported to the server."""
Target: TypeAlias = Callable[[int, KVLayout], Any]
"""Returns the target of a chunk, by index and layout, as AnyTensors of that layout."""
T = TypeVar("T")
N = TypeVar("N", bound=Any)
HELPER_WAIT_S = 0.01
"""How long a thread waits for the next frame of a read before it is free for others."""


class TooLossyError(KVStoreError):
    """The copy received is less accurate than requested: the chunk counts as missing."""


def fresh(_: int, layout: KVLayout) -> ChunkTensors:
    """Return new arrays."""
    return empty_tensors(layout)


def given(out: Sequence[LayerTensors]) -> Target:
    """Return the targets in the caller's *out*."""
    return lambda index, _: to_arrays(out[index])


def contiguous(
    arriving: Iterable[N], limit: int, chunks: Callable[[N], int] = lambda one: 1
) -> Iterator[N]:
    """Yield the items that arrive in order and in time, for up to *limit* chunks; raise only if
    there are none.

    An item has the ``index`` of its first chunk, and ``chunks(one)`` returns how many it has.
    """
    count = 0
    try:
        for arrived in arriving:
            if arrived.index != count or count + chunks(arrived) > limit:
                return
            count += chunks(arrived)
            yield arrived
    except (DeadlineError, TierUnavailableError):
        if not count:
            raise


def check_header(
    session: Session,
    key: ChunkKey,
    data: Sliced,
    frame_bytes: int,
    least: Accuracy = Accuracy.approximate,
) -> FrameHeader:
    """Return the header at the start of *data*, checked to be of *key*'s frame of that size.

    Raises ChunkCorruptError, InvalidFrameError, and TooLossyError if less accurate than *least*.
    """
    header = parse_header(data)
    if header.key != key or header.frame_bytes != frame_bytes:
        raise ChunkCorruptError(key, f"its place holds chunk {header.key.hex()}")
    if header.representation != session.representation_digest:
        raise ChunkCorruptError(key, "it was stored for another Model")
    if header.accuracy < least:  # the server should not send such copies
        raise TooLossyError(f"{key.hex()}: the copy received is {header.accuracy.name}")
    return header


# --- whole chunks


class Decoded(NamedTuple):
    """A chunk that was read, its frame's header, and its tier."""

    tensors: ChunkTensors
    header: FrameHeader
    tier: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one read is to return: the *shard* of chunks of *accuracy* or better.

    Chunk i of *keys* goes to ``target(first + i, layout)``.
    """

    session: Session
    keys: Sequence[ChunkKey]
    target: Target = fresh
    accuracy: Accuracy = Accuracy.exact
    first: int = 0
    shard: Shard | None = None

    def decode(self, arrived: Arrival) -> Decoded:
        """Verify the frame of a chunk and decode it into its target.

        Raises the errors in ``WRONG``, UnknownCodecError, TooLossyError, LeaseExpiredError.
        """
        index, frame = arrived.index, arrived.data
        if isinstance(frame, DirectFrame):
            frame.check()
            return Decoded(frame.tensors, frame.header, arrived.tier)
        try:
            key = self.keys[index]
            header = check_header(self.session, key, frame, len(frame), self.accuracy)
            model = self.session.representation
            if self.shard is not None and not self.shard.has_any(model, header.layout):
                self.target(self.first + index, header.layout)  # records the layout, for windows
                tensors = []
            elif self.shard is not None:
                part = self.shard.in_chunk(model, header.layout)
                tensors = self.target(self.first + index, part.layout)
                cut(header, frame, part, tensors)
            else:
                tensors = self.target(self.first + index, header.layout)
                if header.codec_id != RAW.codec_id:
                    codec_by_id(header.codec_id).decode_into(header, frame[:], tensors)
                elif isinstance(frame, FileFrame):
                    frame.decode_into(header, tensors)
                else:
                    RAW.decode_into(header, frame[:], tensors)
            return Decoded(tensors, header, arrived.tier)
        finally:
            # Before all other errors: reused memory proves nothing about the chunk.
            arrived.confirm()

    def direct(self, index: int, size: int, start: Bytes) -> DirectFrame | None:
        """Return the receiver of the parts of a frame of *size* bytes, which begins with *start*.

        None for a frame that ``decode`` needs whole: to decode it, cut it, or find it wrong.
        """
        if self.shard is not None or index >= len(self.keys):
            return None
        with suppress(KVStoreError):
            key = self.keys[index]
            header = check_header(self.session, key, start, size, self.accuracy)
            if header.codec_id == RAW.codec_id:
                head = start[: header.header_bytes].copy()  # a part is longer
                return DirectFrame(header, head, self.target(self.first + index, header.layout))
        return None


@dataclass(slots=True, eq=False)
class _PrefixRead:
    """The frames of one read, decoded by the caller and some helper threads.

    They are taken in order, so that all before a failed one are decoded.
    """

    wanted: Wanted
    reader: Reader
    helpers: list[Future[None]] = field(default_factory=list)
    waiting: SimpleQueue[Arrival | None] = field(default_factory=SimpleQueue)
    found: dict[int, Decoded] = field(default_factory=dict)
    errors: dict[int, KVStoreError] = field(default_factory=dict)
    failed: float = math.inf
    """The index of the first failed frame; those behind it are skipped."""
    fed: int = 0

    def help(self) -> None:
        """Decode what waits, until None or a pause of HELPER_WAIT_S: threads are shared, and the
        next frame may take long to arrive.
        """
        with suppress(Empty):
            while (arrived := self.waiting.get(timeout=HELPER_WAIT_S)) is not None:
                self.decode(arrived)

    def feed(self, arriving: Iterable[Arrival]) -> None:
        """Queue the frames that arrive in order, until one fails; with two per thread waiting, the
        caller decodes.
        """
        count, threads = len(self.wanted.keys), self.reader.threads
        for arrived in arriving:
            if arrived.index != self.fed or arrived.index > self.failed:
                return
            if self.fed == count:
                raise InvalidFrameError("index", arrived.index, f"{count} chunks were requested")
            self.fed += 1
            if self.waiting.qsize() >= 2 * threads:
                self.decode(arrived)
                continue
            self.waiting.put(arrived)
            for number, helper in enumerate(self.helpers):
                if helper.done():
                    helper.result()
                    self.helpers[number] = self.reader.submit(self.help)

    def decode(self, arrived: Arrival) -> None:
        """Decode a frame, unless one before it failed."""
        if arrived.index > self.failed:
            return
        try:
            self.found[arrived.index] = self.wanted.decode(arrived)
        except KVStoreError as error:
            self.errors[arrived.index] = error
            self.failed = min(self.failed, arrived.index)


class Reader:
    """Decodes with *threads* threads, the caller included: one core does not saturate memory.
    Thread-safe.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-copy")

    def read(
        self, wanted: Wanted, arriving: Iterable[Arrival]
    ) -> tuple[list[Decoded], ChunkKey | None]:
        """Return the longest prefix that arrives and is right, and the key of the wrong chunk.

        A copy that is not accurate enough, or of an unknown codec, ends the prefix without a key:
        it may be right for others. Raises LeaseExpiredError when memory was reused during the read,
        LayoutMismatchError when the target does not have the chunk's layout, and, if nothing was
        read, DeadlineError or TierUnavailableError.
        """
        reading, count = _PrefixRead(wanted, self), len(wanted.keys)
        error: KVStoreError | None = None
        try:
            while len(reading.helpers) < min(self.threads, count) - 1:  # they take long to start
                reading.helpers.append(self.submit(reading.help))
            reading.feed(arriving)
        except (DeadlineError, TierUnavailableError) as late:
            error = None if reading.fed else late
        except KVStoreError as stopped:
            error = stopped
        finally:
            for _ in range(1 + len(reading.helpers)):
                reading.waiting.put(None)
            try:
                reading.help()
            finally:  # a target may raise anything; the helpers write to the caller's memory
                running = list(filterfalse(Future.cancel, reading.helpers))
                wait(running)
            for helper in running:
                helper.result()
        done = min(reading.errors, default=len(reading.found))
        found = list(map(reading.found.__getitem__, range(done)))
        error = reading.errors.get(done, error)
        if error is None or isinstance(error, UnknownCodecError | TooLossyError):
            return found, None
        if isinstance(error, WRONG) and done < count:
            return found, wanted.keys[done]
        # A frame that was not requested, or a file that cannot be read.
        if found and isinstance(error, (*WRONG, TierUnavailableError)):
            return found, None
        raise error

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run *work* in one of the threads. Raises KVStoreError after ``close``."""
        try:
            return self._pool.submit(work, *arguments)
        except RuntimeError as error:  # the pool is closed
            raise KVStoreError(f"the client is closed: {error}") from None

    def leave(self) -> None:
        """In a child, where its threads do not run: refuse all work."""
        self._pool = ThreadPoolExecutor(1)
        self._pool.shutdown()

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._pool.shutdown()


# --- layer by layer


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the chunks that are right so far, verified.

    ``id`` is the model's layer number. ``tensors[i]`` are the parts (K and V) of chunk i, each
    (kv_heads, tokens, head_dim): unsigned integers of the dtype's size, or the caller's ``out``;
    for CUDA tensors, their copy in host memory.
    """

    id: int
    tensors: Sequence[Sequence[Part]]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk whose header is right, and the targets of its layers in segment order."""

    arrived: Arrival
    header: FrameHeader
    codec: Codec
    layers: Sequence[Sequence[AnyPart]]
    extents: Sequence[tuple[int, int]]
    """Start and end of each segment in the frame, as sent."""
    kept: Rows | None
    """The rows that are wanted; None: all."""

    layered: LayeredFrame | None
    """The frame, if its segments arrive one by one."""

    def take(self, segment: int) -> Bytes | None:
        """Wait for a segment; None when it will not arrive."""
        start, stop = self.extents[segment]
        if self.layered is not None:
            return self.layered.stream.take(self.layered.number, start)
        with suppress(TierUnavailableError):  # a file that cannot be read
            data: Bytes = self.arrived.data[start:stop]
            return data
        return None

    def decode(self, segment: int, data: Bytes) -> None:
        """Verify a segment and decode it into its target. Raises the errors in ``WRONG``."""
        out, kept = self.layers[segment], self.kept
        if kept is None:
            self.codec.decode_checked(self.header, segment, data, out)
        elif self.layered is not None and self.layered.stream.is_cut:
            place_cut(self.header, segment, data, kept, out)  # type: ignore[arg-type]
        else:
            copy_kept(self.header, segment, data, kept, out)  # type: ignore[arg-type]


class LayerReader:
    """One get layer by layer: a layer is used while later ones still arrive.

    Used once; ``layers`` by one thread. After it, ``broken`` is the key of the wrong chunk, if any.
    *accepts*: whether the frame of a chunk, by index, is the wanted one; None: all are. *skipped*
    rows, by chunk index, are not wanted: for raw frames their targets keep their contents.
    """

    def __init__(
        self,
        reader: Reader,
        wanted: Wanted,
        accepts: Callable[[int, FrameHeader], bool] | None = None,
        skipped: SkippedRows | None = None,
    ) -> None:
        self.broken: ChunkKey | None = None
        self._reader = reader
        self._wanted = wanted
        self._accepts = accepts
        self._skipped = skipped
        self._order = layer_order(wanted.session.representation)
        self._chunks: list[_Chunk] = []
        # Chunks from this one on are lost. It only sinks; a stale read only costs work.
        self._count = 0
        self._lock = threading.Lock()  # held to change the count and ``broken``

    def layers(self, arriving: Iterator[Arrival]) -> Generator[Layer, None, None]:
        """Yield each layer once it is verified, while the threads decode later ones.

        Raises as ``Client.get_layers``.
        """
        process = FORKS.process
        for arrived in contiguous(arriving, len(self._wanted.keys)):
            if not self._open(arrived):
                break
        self._count = len(self._chunks)
        streams, shared = self._streams(), self._reader
        if streams:  # those who wait for segments are not those whom other calls wait for
            self._reader = Reader(shared.threads)
        started: list[list[Future[None]]] = []
        try:
            started.extend(self._start(segment) for _, segment in self._order)  # partial on error
            for (layer_id, segment), pieces in zip(self._order, started, strict=True):
                for piece in pieces:
                    piece.result()
                if not self._count:
                    return
                yield Layer(layer_id, [c.layers[segment] for c in self._chunks[: self._count]])  # type: ignore[misc]
                FORKS.check(process, "the get")
        finally:
            if process is FORKS.process:  # a child does not have the threads
                self._settle(streams, started)
                if self._reader is not shared:
                    self._reader.close()

    def _streams(self) -> list[LayerStream]:
        """Return the layer streams, with the order of segments set."""
        ranges: dict[LayerStream, list[Range]] = {}
        for _, segment in self._order:
            for chunk in self._chunks:
                if (frame := chunk.layered) is not None:
                    wanted = Range(frame.number, *chunk.extents[segment])
                    ranges.setdefault(frame.stream, []).append(wanted)
        for stream, plan in ranges.items():
            stream.expect(plan)
        return list(ranges)

    def _settle(
        self, streams: Sequence[LayerStream], started: Sequence[Sequence[Future[None]]]
    ) -> None:
        """Wait for work that still reads shared memory and writes the caller's."""
        self._count = 0
        running = [piece for pieces in started for piece in pieces if not piece.cancel()]
        if not all(map(Future.done, running)):
            for stream in streams:
                stream.end()
        wait(running)

    def _open(self, arrived: Arrival) -> bool:
        """Add the frame if its header is right; return whether it is."""
        wanted = self._wanted
        key = wanted.keys[arrived.index]
        try:
            header = check_header(
                wanted.session, key, arrived.data, arrived.frame_bytes, wanted.accuracy
            )
            if self._accepts is not None and not self._accepts(arrived.index, header):
                return False
            codec = codec_by_id(header.codec_id)
            codec.check_header(header)
        except WRONG:
            self.broken = key
            return False
        except (UnknownCodecError, TierUnavailableError, TooLossyError):
            return False  # may be right, for a newer client or on another disk
        finally:
            arrived.confirm()
        tensors: AnyTensors = wanted.target(arrived.index, header.layout)
        check_tensors(header.layout, tensors, is_target=True)
        layers = [parts for component in tensors for parts in component]
        if len(layers) != header.layout.segment_count:  # a window may be left out of whole chunks
            fix = f"give {header.layout.segment_count}"
            raise LayoutMismatchError("layers", len(layers), fix)
        kept = kept_rows(header, self._skipped, arrived.index)
        layered = arrived.data if isinstance(arrived.data, LayeredFrame) else None
        starts, sizes = header.segments["offset"].tolist(), header.segments["stored_bytes"].tolist()
        if kept is not None and layered is not None and layered.stream.is_cut:
            sizes = [cut_bytes(header, index, kept) for index in range(len(starts))]
        extents = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        self._chunks.append(_Chunk(arrived, header, codec, layers, extents, kept, layered))
        return True

    def _start(self, segment: int) -> list[Future[None]]:
        run = -(-len(self._chunks) // self._reader.threads) or 1
        return [
            self._reader.submit(self._decode, segment, first, first + run)
            for first in range(0, len(self._chunks), run)
        ]

    def _decode(self, segment: int, first: int, stop: int) -> None:
        for number in range(first, min(stop, self._count)):
            if number >= self._count:
                return
            chunk = self._chunks[number]
            data = chunk.take(segment)
            if data is None:
                self._truncate(number, None)
                return
            try:
                chunk.decode(segment, data)
            except WRONG:
                self._truncate(number, self._wanted.keys[chunk.arrived.index])
            finally:
                # Before all other errors: reused memory proves nothing about the chunk.
                chunk.arrived.confirm()

    def _truncate(self, number: int, broken: ChunkKey | None) -> None:
        with self._lock:
            if number < self._count:
                self._count, self.broken = number, broken
            for chunk in self._chunks[number:]:
                if chunk.layered is not None:
                    chunk.layered.stream.drop(chunk.layered.number)
