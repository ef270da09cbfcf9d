"""Frames out of a server's memory into pages on a device: what a reader keeps for all its reads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.client.device_decode import Begun, DeviceDecoder
from kvstore.client.layer_feed import in_time
from kvstore.client.reader import check_header
from kvstore.client.transport import Arrived
from kvstore.codecs.frame_kernels import open_kernels
from kvstore.codecs.paged import RAW, FrameAt, FrameKernels, Paged, Sums, check_sums
from kvstore.proto.buffers import Bytes
from kvstore.proto.device import Device, Event, tensor_over
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    KVStoreError,
    RepresentationError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.frame import KEY_OFFSET, FrameHeader, like_header
from kvstore.proto.places import Place
from kvstore.proto.types import ChunkKey, KVLayout

if TYPE_CHECKING:
    from kvstore.client.cuda import CudaTransport

BATCHES_AHEAD = 4
"""Batches of frames that the device works on while the host prepares the next."""
MAX_BATCH_FRAMES = 32
FIRST_BATCH_FRAMES = 8
"""Of an idle device, which would wait while the host prepares more."""
READ_SLOTS = 8
"""Frames of host memory on their way at once: half of them are copied while the device is at work
on the others."""
PIECE_BYTES = 64 << 20
"""What is registered in one call. CUDA holds up other work of the process meanwhile: 4 ms."""
MAX_SLABS = 64
"""Registered for one session. A server has fewer at once; those it gave up stay until the end."""
_ALIGN_BYTES = 256
_BROKEN = (ChunkCorruptError, InvalidFrameError, RepresentationError)
"""What says that a chunk is wrong, and is to be dropped."""


@dataclass(frozen=True, slots=True)
class InArena:
    """Frames of consecutive chunks from number ``index`` on, in the mapped memory of the device.

    ``heads``: a row for each place, on the host: as many of its first bytes as the header of a
    whole chunk has. Like ``Arrived``, with places instead of ``frame``.
    """

    index: int
    places: list[Place]
    heads: NDArray[np.uint8]


class DeviceReader:
    """Reads frames into pages on *device*, one get at a time. Frames of host memory pass a ring of
    *slots* slots for frames of up to *frame_bytes* bytes.

    Raises TierUnavailableError when the device has no memory for it, or no kernels.
    """

    def __init__(self, device: Device, frame_bytes: int, slots: int = READ_SLOTS) -> None:
        self.device = device
        self.frame_bytes = -(-frame_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self.ring = device.allocate(slots * self.frame_bytes)
        try:
            self.kernels: FrameKernels = open_kernels(self.ring.device)
            self.decoder = DeviceDecoder(self.kernels, self.ring.device)
            self.copies, self.work = device.stream(), device.stream()
        except KVStoreError:
            device.release(self.ring)
            raise
        self.busy: list[Event | None] = [None] * slots
        """What reads each slot, until it is over."""
        self.lock = threading.Lock()
        """Held by the get at work."""

    def wait(self) -> None:
        """Wait for all that is queued."""
        for stream in (self.work, self.copies):
            stream.record().synchronize()

    def close(self) -> None:
        """Give the ring back. Nobody reads any more."""
        with self.lock:
            self.wait()
            ring, self.ring = self.ring, self.ring[:0].clone()
            self.device.release(ring)


class Registration:
    """Has *device* copy straight out of slabs. A thread registers them, piece by piece: until it
    came to a piece, copies out of it are only slower.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slabs: dict[int, tuple[int, int]] = {}
        """The addresses where each begins and ends."""
        self._waiting: SimpleQueue[Bytes | None] = SimpleQueue()
        self._ends: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def note(self, number: int, memory: Bytes) -> None:
        """Have slab *number* registered, unless it was before. For one thread at a time."""
        if number in self._slabs or self._is_closed or len(self._slabs) >= MAX_SLABS:
            return
        start = memory.ctypes.data
        self._slabs[number] = start, start + len(memory)
        self._waiting.put(memory)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstore-register", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (memory := self._waiting.get()) is not None:
            for start in range(0, len(memory), PIECE_BYTES):
                if self._is_closed:
                    return
                end = self._device.register(memory[start : start + PIECE_BYTES], read_only=True)
                if end is None:
                    return  # it was said so; the next one would not do either
                self._ends.append(end)

    def cuts(self, data: Bytes) -> Iterator[slice]:
        """Cut *data* where pieces end: no copy may be of two of them."""
        first = data.ctypes.data
        start = next((a for a, b in self._slabs.values() if a <= first < b), first)
        at = 0
        while at < len(data):
            stop = min(len(data), at + PIECE_BYTES - (first - start + at) % PIECE_BYTES)
            yield slice(at, stop)
            at = stop

    def close(self) -> None:
        """End the thread and every registration. Idempotent."""
        self._is_closed = True
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()
        while self._ends:
            self._ends.pop()()


@dataclass(slots=True)
class _Batch:
    """Frames that the device works on. ``memory`` is theirs, kept until it is done."""

    frames: list[FrameAt]
    confirm: Callable[[], None]
    done: Event
    held: list[Bytes]
    """Host memory that is copied from."""
    stated: list[list[int]]
    """The checksums that each frame's header states."""
    sums: list[Sums] = field(default_factory=list)
    """One, once the device came to it."""


class Reading:
    """One get at work: what has arrived is put on the device's queue, and proved behind it.

    Nothing is written to the pages before *after*, an event of the engine's stream.
    """

    def __init__(
        self,
        transport: CudaTransport,
        reader: DeviceReader,
        keys: Sequence[ChunkKey],
        paged: Paged,
        after: Event | None = None,
    ) -> None:
        self._transport = transport
        self.reader = reader
        self.keys = keys
        self._paged = paged
        self._chunk_tokens = transport.session.options.chunk_tokens
        self._frames: list[FrameAt] = []
        self._stated: list[list[int]] = []
        self._places: list[Place] = []
        self._parsed: tuple[Bytes, FrameHeader] | None = None
        """The last header in the arena that was parsed, and its bytes."""
        self._confirms: list[Callable[[], None]] = []
        self._held: list[Bytes] = []
        self._slots: list[int] = []
        self._next_slot = 0
        self._checked: set[tuple[KVLayout, int]] = set()
        """Frames that fit the pages. All of a get have places of their own in memory and pages."""
        self._queue: deque[_Batch] = deque()
        self.done = 0
        self.broken: ChunkKey | None = None
        if after is not None:
            reader.work.wait(after)

    def run(self, arriving: Iterator[InArena | Arrived]) -> None:
        """Read until the end of the prefix; ``done`` and ``broken`` then say how it went."""
        try:
            for arrived in in_time(arriving, frame_count):
                if isinstance(arrived, InArena):
                    self._add(arrived)
                else:
                    self._upload(arrived)
            self._flush()
            while self._queue:
                self._prove(self._queue.popleft())
        except _BROKEN:
            self._end()
        except UnknownCodecError:
            self._end()
            self.broken = None  # right for all we know, to a newer client
        except TierUnavailableError:  # a file that cannot be read
            self._flush()
            self._end()
            self.broken = None
            if not self.done:
                raise

    def _end(self) -> None:
        """Prove what was queued before the chunk that is wrong."""
        with suppress(*_BROKEN):
            while self._queue:
                self._prove(self._queue.popleft())
        self.broken = self.keys[self.done]

    def _frame(self, index: int, head: Bytes, size_bytes: int, offset: int) -> FrameAt:
        try:
            header = check_header(self._transport.session, self.keys[index], head, size_bytes)
            if header.codec_id == RAW.codec_id:
                RAW.check_header(header)
            if header.layout.tokens > self._chunk_tokens:
                raise InvalidFrameError("tokens", header.layout.tokens, f"<= {self._chunk_tokens}")
        except (*_BROKEN, UnknownCodecError):
            self._flush()  # those before it are to be proved
            raise
        return FrameAt(offset, header, index * self._chunk_tokens)

    def _follows(self, frame: FrameAt, *, in_arena: bool) -> None:
        """Flush the run of frames at hand unless *frame* goes with them."""
        run = self._frames
        most = len(self.reader.busy) // 2
        if in_arena:
            most = MAX_BATCH_FRAMES if self._queue else FIRST_BATCH_FRAMES
        is_other = bool(run) and (
            in_arena != bool(self._places) or _like(run[0].header) != _like(frame.header)
        )
        if is_other or len(run) >= most:
            self._flush()

    def _add(self, run: InArena) -> None:
        """Queue frames where they lie. One is parsed, those like it are compared with it."""
        number = 0
        while number < len(run.places):
            alike = self._alike(run, number)
            for at, stated in enumerate(alike, number):
                self._add_one(run, at, stated)
            number += len(alike)
            if alike:
                continue
            place, head = run.places[number], run.heads[number]
            frame = self._frame(run.index + number, head, place.size_bytes, place.offset)
            if frame.header.codec_id != RAW.codec_id:
                self._flush()
                raise UnknownCodecError(frame.header.codec_id, "raw, in a device's memory")
            self._parsed = head, frame.header
            self._add_one(run, number, frame.header.segments["checksum"].tolist())
            number += 1

    def _alike(self, run: InArena, first: int) -> list[list[int]]:
        """Return the checksums that headers from number *first* on state, of a batch at most, up
        to the first that is not right, or not like the last that was parsed.
        """
        if self._parsed is None:
            return []
        head, header = self._parsed
        stop = first + MAX_BATCH_FRAMES
        places, heads = run.places[first:stop], run.heads[first:stop]
        is_alike, stated = like_header(head, header, heads)
        keys = b"".join(self.keys[run.index + first : run.index + first + len(places)])
        wanted = np.frombuffer(keys, np.uint8).reshape(len(places), -1)
        found = heads[:, KEY_OFFSET : KEY_OFFSET + wanted.shape[1]]
        is_alike &= (found == wanted).all(1)
        is_alike &= [place.size_bytes == header.frame_bytes for place in places]
        count = len(places) if is_alike.all() else int(is_alike.argmin())
        rows: list[list[int]] = stated[:count].tolist()
        return rows

    def _add_one(self, run: InArena, number: int, stated: list[int]) -> None:
        """Add a frame that is right and like the last that was parsed."""
        assert self._parsed is not None
        place = run.places[number]
        first_token = (run.index + number) * self._chunk_tokens
        frame = FrameAt(place.offset, self._parsed[1], first_token)
        self._follows(frame, in_arena=True)
        self._frames.append(frame)
        self._stated.append(stated)
        self._places.append(place)

    def _upload(self, arrived: Arrived) -> None:
        """Queue the copy of a frame of host memory into the ring."""
        reader = self.reader
        data = arrived.frame[:]
        frame = self._frame(arrived.index, data, len(data), self._next_slot * reader.frame_bytes)
        if frame.header.codec_id != RAW.codec_id:
            self._decode(replace(frame, offset=0), data, arrived)
            return
        if len(data) > reader.frame_bytes:
            self._flush()
            raise InvalidFrameError("frame_bytes", len(data), f"<= {reader.frame_bytes}")
        self._follows(frame, in_arena=False)
        busy = reader.busy[self._next_slot]
        if busy is not None:
            reader.copies.wait(busy)
        slot = reader.ring[frame.offset : frame.offset + len(data)]
        for cut in self._transport.registration_for(reader.device).cuts(data):
            reader.copies.copy(slot[cut], tensor_over(data[cut]))
        self._held.append(data)
        self._frames.append(frame)
        self._stated.append(frame.header.segments["checksum"].tolist())
        self._confirms.append(arrived.confirm)
        self._slots.append(self._next_slot)
        self._next_slot = (self._next_slot + 1) % len(reader.busy)

    def _decode(self, frame: FrameAt, data: Bytes, arrived: Arrived) -> None:
        """Queue the decoding of a frame of another codec as a batch of its own."""
        self._flush()
        self._make_room()
        reader = self.reader
        found: list[Begun] = []

        def launch() -> None:
            found.append(reader.decoder.begin(frame, data, arrived, self._paged))

        reader.work.launch(launch)
        done = reader.work.record()
        (begun,) = found
        stated = [begun.frame.header.segments["checksum"].tolist()]
        self._queue.append(_Batch([begun.frame], begun.confirm, done, [data], stated, [begun.sums]))

    def _make_room(self) -> None:
        while len(self._queue) >= BATCHES_AHEAD:
            self._prove(self._queue.popleft())

    def _flush(self) -> None:
        """Queue the run of frames at hand as one batch."""
        if not self._frames:
            return
        frames, self._frames = self._frames, []
        stated, self._stated = self._stated, []
        places, self._places = self._places, []
        confirms, self._confirms = self._confirms, []
        held, self._held = self._held, []
        slots, self._slots = self._slots, []
        self._make_room()
        reader, arena = self.reader, self._transport.arena
        if places:
            assert arena is not None
            memory = arena.memory
        else:
            memory = reader.ring
            reader.work.wait(reader.copies.record())
        like = _like(frames[0].header)
        if like not in self._checked:
            reader.kernels.check(memory, frames, self._paged)
            self._checked.add(like)
        self._paged.check_slots(like[0], [frame.first_token for frame in frames])
        sums: list[Sums] = []

        def launch() -> None:
            sums.append(reader.kernels.start(memory, frames, self._paged))

        reader.work.launch(launch)
        if places:
            confirms = [self._transport.confirming(places, reader.work)]
        done = reader.work.record()
        for slot in slots:
            reader.busy[slot] = done
        self._queue.append(_Batch(frames, partial(_each, confirms), done, held, stated, sums))

    def _prove(self, batch: _Batch) -> None:
        """Wait for a batch and count its frames, up to the first that is wrong."""
        try:
            batch.done.synchronize()
            (sums,) = batch.sums
            found = sums()
            batch.confirm()  # first of all: memory that was reused says nothing of the chunk
            for frame, stated, those in zip(batch.frames, batch.stated, found, strict=True):
                if stated != those:
                    segments = frame.header.segments.copy()
                    segments["checksum"] = stated
                    key = self.keys[self.done]
                    check_sums(replace(frame.header, key=key, segments=segments), those)
                self.done += 1
        except KVStoreError:
            self._queue.clear()  # what is behind it counts no more
            raise


def frame_count(arrived: InArena | Arrived) -> int:
    """Return of how many chunks *arrived* is."""
    return len(arrived.places) if isinstance(arrived, InArena) else 1


def _like(header: FrameHeader) -> tuple[KVLayout, int]:
    """Return what raw frames have in common whose rows lie at the same places."""
    return header.layout, header.header_bytes


def _each(works: Sequence[Callable[[], None]]) -> None:
    for work in works:
        work()
