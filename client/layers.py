"""Layers: a get whose first layer is used while those behind it are still on their way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvstore.client.forks import FORKS
from kvstore.client.layer_feed import LayerFeed, Opened, Range
from kvstore.client.reader import Reader, Room, check_header
from kvstore.client.session import Session
from kvstore.codecs.base import AnyPart, AnyTensors, Codec, Part, check_tensors, codec_by_id
from kvstore.codecs.row_cut import copy_kept, cut_bytes, kept_rows, place_cut
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader
from kvstore.proto.row_mask import Rows, SkippedRows
from kvstore.proto.types import ChunkKey, layer_order


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the chunks that are right so far, verified.

    ``layer_id`` is the model's own number of it. ``tensors[i]`` are the parts (K and V) of
    chunk i, each (kv_heads, tokens, head_dim): unsigned integers of the dtype's size, or what
    was given as ``out``.
    """

    layer_id: int
    tensors: Sequence[Sequence[Part]]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk whose header is right, and the places of its layers in the order of segments."""

    opened: Opened
    header: FrameHeader
    codec: Codec
    layers: Sequence[Sequence[AnyPart]]
    extents: Sequence[tuple[int, int]]
    """Where each segment begins and ends in the frame, as it comes."""
    kept: Rows | None
    """The rows that are wanted; None: all."""


class LayerReader:
    """One get layer by layer. Used once; ``layers`` by one thread.

    After it, ``broken`` is the key of the chunk that proved wrong, if one did.
    """

    def __init__(
        self,
        reader: Reader,
        session: Session,
        keys: Sequence[ChunkKey],
        feed: LayerFeed,
        room: Room,
    ) -> None:
        self.broken: ChunkKey | None = None
        self._reader = reader
        self._session = session
        self._keys = keys
        self._feed = feed
        self._room = room
        self.accepts: Callable[[int, FrameHeader], bool] | None = None
        """Whether the frame of a chunk, by its place, is the one that is wanted; None: all are."""
        self.skipped: SkippedRows | None = None
        """Rows, by a chunk's place, that are not wanted: those of raw frames stay as they are."""
        self.arrived_bytes = 0
        """What came of the layers so far."""
        self._order = layer_order(session.representation)
        self._chunks: list[_Chunk] = []
        # Chunks from here on are lost. It only ever sinks; who reads it late does too much.
        self._count = 0
        self._lock = threading.Lock()  # held to change the count and ``broken``

    def layers(self) -> Generator[Layer, None, None]:
        """Yield each layer once it is verified, while the threads go on with those behind it.

        Raises as ``Client.get_layers`` says.
        """
        process = FORKS.process
        self._open()
        self._feed.expect(
            [
                Range(chunk.opened.index, *chunk.extents[segment])
                for _, segment in self._order
                for chunk in self._chunks
            ]
        )
        started: list[list[Future[None]]] = []
        try:
            for position in range(len(self._order)):
                started.append(self._start(position))  # noqa: PERF401 - for the finally
            for (layer_id, segment), pieces in zip(self._order, started, strict=True):
                for piece in pieces:
                    piece.result()
                if not self._count:
                    return
                yield Layer(layer_id, [c.layers[segment] for c in self._chunks[: self._count]])  # type: ignore[misc]
                FORKS.check(process, "the get")
        finally:
            if process is FORKS.process:  # in a child the threads are not there
                self._settle(started)

    def _settle(self, started: list[list[Future[None]]]) -> None:
        """Wait for what still reads shared memory and writes the caller's."""
        self._count = 0
        self._feed.end()
        for piece in (piece for pieces in started for piece in pieces):
            if not piece.cancel():
                piece.exception()

    def _open(self) -> None:
        """Check the headers, up to the first that is wrong."""
        for opened in self._feed.headers():
            key = self._keys[opened.index]
            try:
                header = check_header(self._session, key, opened.header, opened.frame_bytes)
                if self.accepts is not None and not self.accepts(opened.index, header):
                    break
                codec = codec_by_id(header.codec_id)
                codec.check_header(header)
            except (ChunkCorruptError, InvalidFrameError):
                self.broken = key
                break
            except (UnknownCodecError, TierUnavailableError):
                break  # right for all we know, to a newer client or from a better disk
            finally:
                opened.confirm()
            tensors: AnyTensors = self._room(opened.index, header.layout)
            check_tensors(header.layout, tensors)
            layers = [parts for component in tensors for parts in component]
            kept = kept_rows(header, self.skipped, opened.index)
            extents = _extents(header, kept if self._feed.is_cut else None)
            self._chunks.append(_Chunk(opened, header, codec, layers, extents, kept))
        self._count = len(self._chunks)

    def _start(self, position: int) -> list[Future[None]]:
        """Have the threads decode one layer, a run of chunks each."""
        run = -(-len(self._chunks) // self._reader.threads) or 1
        return [
            self._reader.submit(self._decode, position, first, first + run)
            for first in range(0, len(self._chunks), run)
        ]

    def _decode(self, position: int, first: int, stop: int) -> None:
        _, segment = self._order[position]
        for number in range(first, min(stop, self._count)):
            if number >= self._count:
                return
            chunk = self._chunks[number]
            data = self._feed.take(position * len(self._chunks) + number)
            if data is None:
                self._lose(number, None)
                return
            try:
                self._decode_one(chunk, segment, data)
            except (ChunkCorruptError, InvalidFrameError):
                self._lose(number, self._keys[chunk.opened.index])
            finally:
                # First of all errors: memory that was reused says nothing of the chunk.
                chunk.opened.confirm()

    def _decode_one(self, chunk: _Chunk, segment: int, data: Bytes) -> None:
        out, kept = chunk.layers[segment], chunk.kept
        if kept is None:
            chunk.codec.decode_checked(chunk.header, segment, data, out)
        elif self._feed.is_cut:
            place_cut(chunk.header, segment, data, kept, out)  # type: ignore[arg-type]
        else:
            copy_kept(chunk.header, segment, data, kept, out)  # type: ignore[arg-type]
        with self._lock:
            self.arrived_bytes += len(data)

    def _lose(self, number: int, broken: ChunkKey | None) -> None:
        """End the prefix before chunk *number*."""
        with self._lock:
            if number < self._count:
                self._count, self.broken = number, broken
                self._feed.drop(self._chunks[number].opened.index)


def _extents(header: FrameHeader, cut_to: Rows | None) -> list[tuple[int, int]]:
    starts, sizes = header.segments["offset"].tolist(), header.segments["stored_bytes"].tolist()
    if cut_to is not None:
        sizes = [cut_bytes(header, index, cut_to) for index in range(len(starts))]
    return [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
