"""Frames out of a server's memory into pages on a device: what a reader keeps for all its reads.

kvq's frames are decoded on the device, of which torch's current stream is used; those of other
codecs on the host, and uploaded as raw ones.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.client.decode import WRONG, check_header, contiguous
from kvstore.codecs.frame_kernels import open_kernels
from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.kvq_kernels import KvqKernels, open_kvq_kernels
from kvstore.codecs.paged import (
    SKIPPED_BLOCK,
    DeviceTables,
    FrameAt,
    FrameKernels,
    Paged,
    Sums,
    check_sums,
)
from kvstore.codecs.raw import RAW
from kvstore.codecs.transcode import max_transcoded_bytes, transcode
from kvstore.proto.buffers import Bytes
from kvstore.proto.device import Device, Event, tensor_over
from kvstore.proto.errors import (
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.frame import ACCURACY_OFFSET, KEY_OFFSET, FrameHeader, like_header
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout
from kvstore.proto.unix_socket import Place

if TYPE_CHECKING:
    from kvstore.client.cuda import CudaTransport


BATCHES_AHEAD = 4
"""Batches of frames that the device works on while the host prepares the next."""
MAX_BATCH_FRAMES = 32
READ_SLOTS = 16
"""Frames of host memory on their way at once: half of them are copied while the device is at work
on the others."""
RING_BYTES = 256 << 20
"""Device memory for them."""
PIECE_BYTES = 64 << 20
"""What is registered in one call. CUDA holds up other work of the process meanwhile: 4 ms."""
MAX_SLABS = 64
"""Registered for one session. A server has fewer at once; those it gave up stay until the end."""
_ALIGN_BYTES = 256
_WORD_BYTES = 8


@dataclass(slots=True)
class _Batch:
    """Frames that the device works on. ``held`` is memory that is read until it is done.

    ``confirms``, after the sums, raise LeaseExpiredError for memory that was reused, and
    InvalidFrameError for contents that are not the codec's.
    """

    frames: Sequence[FrameAt]
    sums: list[Sums]
    """One, once the device came to it."""
    stated: list[list[int]]
    """The checksums that each frame's header states."""
    done: Event | None = None
    confirms: Sequence[Callable[[], None]] = ()
    held: Sequence[object] = ()

    @classmethod
    def of(
        cls, frame: FrameAt, sums: Sums, confirm: Callable[[], None], held: Sequence[object]
    ) -> _Batch:
        """Return that of one frame, on the device's queue."""
        stated = [frame.header.segments["checksum"].tolist()]
        return cls([frame], [sums], stated, None, [confirm], held)


class DeviceDecoder:
    """*kernels* are those of raw frames on *device*. Thread-safe."""

    def __init__(self, kernels: FrameKernels, device: torch.device) -> None:
        self._kernels = kernels
        self._device = device

    @cached_property
    def kvq(self) -> KvqKernels | None:
        """The kernels of kvq, compiled when first asked for. A CPU in place of a device has none.

        Raises TierUnavailableError when they cannot be compiled.
        """
        return None if self._device.type == "cpu" else open_kvq_kernels(self._device)

    def begin(
        self, frame: FrameAt, data: Bytes, confirm: Callable[[], None], paged: Paged
    ) -> _Batch:
        """Begin to decode *data*, a frame in host memory, into the pages. *confirm* is called when
        it was read: it raises LeaseExpiredError for memory that was reused.

        Raises that before all that *data* would be blamed for: ChunkCorruptError,
        InvalidFrameError, ModelError, UnknownCodecError. LayoutMismatchError and
        InvalidRequestError for pages that are not the chunk's.
        """
        header = frame.header
        try:
            if header.codec_id == KvqCodec.codec_id and _has_kernels(frame, paged) and self.kvq:
                return self._on_device(self.kvq, frame, data, confirm, paged)
            return self._on_host(frame, data, confirm, paged)
        finally:
            confirm()

    def _on_device(
        self,
        kvq: KvqKernels,
        frame: FrameAt,
        data: Bytes,
        confirm: Callable[[], None],
        paged: Paged,
    ) -> _Batch:
        host = tensor_over(data)
        memory = self._upload(host)
        sums = self._kernels.sums(memory, [frame])
        decoded = kvq.decode(memory, frame, paged, data)

        def confirm_all() -> None:
            confirm()
            decoded()

        return _Batch.of(frame, sums, confirm_all, (data, memory))

    def _on_host(
        self, frame: FrameAt, data: Bytes, confirm: Callable[[], None], paged: Paged
    ) -> _Batch:
        size = max_transcoded_bytes(frame.header.layout, RAW)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        raw = FrameAt(0, transcode(data, RAW, host.numpy()), frame.first_token)
        memory = self._upload(host)
        sums = self._kernels.scatter(memory, [raw], paged)
        return _Batch.of(raw, sums, confirm, (host, memory))

    def _upload(self, host: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(len(host), dtype=torch.uint8, device=self._device)
        return memory.copy_(host, non_blocking=True)


def _has_kernels(frame: FrameAt, paged: Paged) -> bool:
    """Whether there are kernels for a kvq frame: not for refinements, parts of a chunk, or several
    block tables.
    """
    components = frame.header.layout.components
    is_whole = not any(component.first_token for component in components)
    is_plain = len(paged.tables) == 1 and SKIPPED_BLOCK not in paged.tables[0]
    return not frame.header.levels and is_whole and is_plain and paged.shard is None


@dataclass(slots=True)
class Run:
    """Frames of consecutive chunks from number ``index`` on: in the memory of the device at
    ``places``, or ``frames`` of host memory. ``confirms``: as ``Arrival.confirm``, one a frame.
    """

    index: int
    places: Sequence[Place] = ()
    frames: Sequence[Bytes] = ()
    confirms: Sequence[Callable[[], None]] = ()
    heads: NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, 0), np.uint8))
    """A row each, on the host: as many first bytes as the header of a whole chunk has."""
    tables: DeviceTables | None = None
    """Of ``places``."""

    def __len__(self) -> int:
        return len(self.places or self.frames)

    @property
    def sizes(self) -> list[int]:
        """The frames' bytes."""
        return [place.size_bytes for place in self.places] or [len(one) for one in self.frames]


class DeviceReader:
    """Reads frames into pages on *device*, one get at a time. Frames of host memory pass a ring of
    *least_slots* slots or more for frames of up to *frame_bytes* bytes.

    Raises TierUnavailableError when the device has no memory for it, or no kernels.
    """

    def __init__(self, device: Device, frame_bytes: int, least_slots: int = 2) -> None:
        self.device = device
        self.frame_bytes = -(-frame_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        slots = max(least_slots, min(READ_SLOTS, RING_BYTES // self.frame_bytes))
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
                    return  # which was logged; the next one would fail too
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


class Reading:
    """One get at work: what has arrived is put on the device's queue, and proved behind it.

    Nothing is written to the pages before *after*, an event of the engine's stream. Frames that
    state less than *least* end the prefix.
    """

    def __init__(
        self,
        transport: CudaTransport,
        reader: DeviceReader,
        keys: Sequence[ChunkKey],
        paged: Paged,
        after: Event | None = None,
        least: Accuracy = Accuracy.exact,
    ) -> None:
        self._transport = transport
        self.reader = reader
        self.keys = keys
        self.least = least
        self._paged = paged
        self._chunk_tokens = transport.session.options.chunk_tokens
        self._parsed: tuple[Bytes, FrameHeader] | None = None
        """The last header that was parsed, and its bytes."""
        self._ring_tables: list[DeviceTables] = []
        """Of all frames that come by way of the ring: each has a slot by its number."""
        self._has_ring_tables = False
        self._in_arena: list[Run] = []
        self._checked: set[tuple[KVLayout, int]] = set()
        """Frames that fit the pages. All of a get have places of their own in memory and pages."""
        self._queue: deque[_Batch] = deque()
        self.done = 0
        self.broken: ChunkKey | None = None
        if after is not None:
            reader.work.wait(after)

    def run(self, arriving: Iterator[Run]) -> None:
        """Read until the end of the prefix; ``done`` and ``broken`` then say how it went.

        Raises LeaseExpiredError where memory of the device was reused meanwhile: that says nothing
        of the chunks.
        """
        try:
            for run in contiguous(arriving, len(self.keys), len):
                self._bring_heads(run)
                if not self._take(run):
                    break
            confirm = self._confirming()
            self._prove_all()
        except (*WRONG, UnknownCodecError, TierUnavailableError) as error:
            with suppress(*WRONG):  # what was queued before it
                self._prove_all()
            if isinstance(error, WRONG) and self.done < len(self.keys):
                self.broken = self.keys[self.done]
            elif isinstance(error, TierUnavailableError) and not self.done:
                raise  # a file that cannot be read
            confirm = self._confirming()
        confirm()

    def _prove_all(self) -> None:
        while self._queue:
            self._prove(self._queue.popleft())

    # --- what arrived

    def _bring_heads(self, run: Run) -> None:
        """Bring the heads of frames to the host; of those in the arena in one go."""
        if not run.places:
            run.heads = np.zeros((len(run), self._transport.head_bytes), np.uint8)
            for head, frame in zip(run.heads, run.frames, strict=True):
                data = frame[: len(head)]
                head[: len(data)] = data
            return
        places, memory = run.places, self._arena()
        for place in places:
            start, stop = place.offset - _WORD_BYTES, place.offset + place.size_bytes
            if start < 0 or place.offset % 16 or stop > len(memory):
                raise InvalidRequestError(
                    "place", (place.offset, place.size_bytes), f"arena has {len(memory)} bytes"
                )
        firsts = self._chunk_tokens * (run.index + np.arange(len(places)))
        starts = np.stack([np.array([place.offset for place in places]), firsts], 1)
        kernels, copies = self.reader.kernels, self.reader.copies
        words = 1 + -(-self._transport.head_bytes // _WORD_BYTES)
        found: list[tuple[DeviceTables, Callable[[], NDArray[np.int64]]]] = []

        def launch() -> None:
            tables = kernels.tables(starts, self._paged)
            found.append((tables, kernels.words(memory, tables, _WORD_BYTES, words)))

        copies.launch(launch)
        copies.record().synchronize()
        ((run.tables, wait),) = found
        rows = wait()
        _check_generations(rows[:, 0], places)
        run.heads = np.ascontiguousarray(rows[:, 1:]).view(np.uint8)
        self._in_arena.append(run)

    def _arena(self) -> torch.Tensor:
        assert self._transport.arena is not None
        return self._transport.arena.memory

    def _confirming(self) -> Callable[[], None]:
        """Queue a look at the places in the arena behind all that reads them.

        The returned function raises LeaseExpiredError if the memory of one was reused until then.
        """
        waits: list[tuple[Callable[[], NDArray[np.int64]], Sequence[Place]]] = []
        kernels, work = self.reader.kernels, self.reader.work
        for run in self._in_arena:

            def launch(run: Run = run) -> None:
                assert run.tables is not None
                words = kernels.words(self._arena(), run.tables, _WORD_BYTES, 1)
                waits.append((words, run.places))

            work.launch(launch)
        done = work.record()

        def confirm() -> None:
            if self._in_arena:
                done.synchronize()
            for wait, places in waits:
                _check_generations(wait()[:, 0], places)

        return confirm

    def _take(self, run: Run) -> bool:
        """Queue what is to be read of *run*; whether that is all of it.

        One header is parsed, those like it are compared with it.
        """
        is_true = run.heads[:, ACCURACY_OFFSET] >= self.least
        count = len(is_true) if is_true.all() else int(is_true.argmin())
        number = 0
        while number < count:
            stated = self._alike(run, number, count)
            if not stated:
                header = self._header(run, number)
                if header.codec_id != RAW.codec_id:
                    self._decode(run, number, header)
                    number += 1
                    continue
                self._parsed = run.heads[number].copy(), header
                stated = self._alike(run, number, count)
                stated = stated or [header.segments["checksum"].tolist()]
            frames = self._queued_in_arena if run.places else self._queued_in_ring
            frames(run, number, stated)
            number += len(stated)
        return count == len(is_true)

    def _alike(self, run: Run, first: int, count: int) -> list[list[int]]:
        """Return the checksums that headers from number *first* on state, of a batch at most, up
        to the first that is not right, or not like the last that was parsed.
        """
        if self._parsed is None:
            return []
        head, header = self._parsed
        most = MAX_BATCH_FRAMES if run.places else len(self.reader.busy) // 2
        stop = min(count, first + most)
        heads = run.heads[first:stop]
        is_alike, stated = like_header(head, header, heads)
        keys = b"".join(self.keys[run.index + first : run.index + stop])
        wanted = np.frombuffer(keys, np.uint8).reshape(len(heads), -1)
        found = heads[:, KEY_OFFSET : KEY_OFFSET + wanted.shape[1]]
        is_alike &= (found == wanted).all(1)
        is_alike &= np.array(run.sizes[first:stop]) == header.frame_bytes
        alike = len(heads) if is_alike.all() else int(is_alike.argmin())
        rows: list[list[int]] = stated[:alike].tolist()
        return rows

    def _header(self, run: Run, number: int) -> FrameHeader:
        data = run.heads[number] if run.places else run.frames[number]
        key, session = self.keys[run.index + number], self._transport.session
        try:
            header = check_header(session, key, data, run.sizes[number])
            if header.codec_id == RAW.codec_id:
                RAW.check_header(header)
            if header.layout.tokens > self._chunk_tokens:
                raise InvalidFrameError("tokens", header.layout.tokens, f"<= {self._chunk_tokens}")
        except WRONG:
            if not run.places:
                run.confirms[number]()  # first of all: reused memory says nothing of the chunk
            raise
        return header

    # --- onto the device's queue

    def _decode(self, run: Run, number: int, header: FrameHeader) -> None:
        """Queue the decoding of a frame of another codec as a batch of its own."""
        if run.places:
            raise UnknownCodecError(header.codec_id, "raw, in a device's memory")
        self._make_room()
        reader, data, confirm = self.reader, run.frames[number], run.confirms[number]
        frame = FrameAt(0, header, (run.index + number) * self._chunk_tokens)
        begun: list[_Batch] = []
        reader.work.launch(
            lambda: begun.append(reader.decoder.begin(frame, data, confirm, self._paged))
        )
        begun[0].done = reader.work.record()
        self._queue.append(begun[0])

    def _queued_in_arena(self, run: Run, first: int, stated: list[list[int]]) -> None:
        """Queue frames where they lie, from number *first* of *run* on."""
        tables = run.tables
        assert tables is not None
        places = run.places[first : first + len(stated)]
        frames = self._frames(run.index + first, [place.offset for place in places])
        cut = tables.cut(first, first + len(stated))
        sums = self._start(self._arena(), frames, lambda: cut)
        self._queue.append(_Batch(frames, sums, stated, self.reader.work.record()))

    def _queued_in_ring(self, run: Run, first: int, stated: list[list[int]]) -> None:
        """Queue the copies of frames of host memory into the ring, and what is done there."""
        reader, start = self.reader, run.index + first
        held = run.frames[first : first + len(stated)]
        if len(held[0]) > reader.frame_bytes:  # all are as long
            raise InvalidFrameError("frame_bytes", len(held[0]), f"<= {reader.frame_bytes}")
        self._bring_ring_tables()
        slots = [number % len(reader.busy) for number in range(start, start + len(held))]
        for event in {id(event): event for slot in slots if (event := reader.busy[slot])}.values():
            reader.copies.wait(event)
        offsets = [slot * reader.frame_bytes for slot in slots]
        cuts = self._transport.registration_for(reader.device).cuts
        reader.copies.upload(
            reader.ring,
            [
                (offset + cut.start, data[cut])
                for offset, data in zip(offsets, held, strict=True)
                for cut in cuts(data)
            ],
        )
        reader.work.wait(reader.copies.record())
        frames, made = self._frames(start, offsets), self._ring_tables
        sums = self._start(reader.ring, frames, lambda: made[0].cut(start, start + len(held)))
        done = reader.work.record()
        for slot in slots:
            reader.busy[slot] = done
        confirms = run.confirms[first : first + len(stated)]
        self._queue.append(_Batch(frames, sums, stated, done, confirms, held))

    def _bring_ring_tables(self) -> None:
        """Bring the tables of all frames at once: one behind copies of frames would be late."""
        if self._has_ring_tables:
            return
        self._has_ring_tables = True
        reader, numbers = self.reader, np.arange(len(self.keys))
        offsets = numbers % len(reader.busy) * reader.frame_bytes
        starts, made = np.stack([offsets, numbers * self._chunk_tokens], 1), self._ring_tables
        reader.copies.launch(lambda: made.append(reader.kernels.tables(starts, self._paged)))

    def _frames(self, index: int, offsets: Sequence[int]) -> list[FrameAt]:
        assert self._parsed is not None
        header, tokens = self._parsed[1], self._chunk_tokens
        return [FrameAt(at, header, number * tokens) for number, at in enumerate(offsets, index)]

    def _start(
        self, memory: torch.Tensor, frames: list[FrameAt], tables: Callable[[], DeviceTables]
    ) -> list[Sums]:
        """Queue the way of *frames* into the pages; the sums come once it was launched."""
        self._make_room()
        reader, header = self.reader, frames[0].header
        like = header.layout, header.header_bytes  # rows of such frames lie at the same places
        if like not in self._checked:
            reader.kernels.check(memory, frames, self._paged)
            self._checked.add(like)
        self._paged.check_slots(like[0], [frame.first_token for frame in frames])
        sums: list[Sums] = []

        def launch() -> None:
            sums.append(reader.kernels.start(memory, frames, self._paged, tables()))

        reader.work.launch(launch)
        return sums

    def _make_room(self) -> None:
        while len(self._queue) >= BATCHES_AHEAD:
            self._prove(self._queue.popleft())

    def _prove(self, batch: _Batch) -> None:
        """Wait for a batch and count its frames, up to the first that is wrong."""
        try:
            assert batch.done is not None
            batch.done.synchronize()
            (sums,) = batch.sums
            found = sums()
            for confirm in batch.confirms:
                confirm()  # first of all: memory that was reused says nothing of the chunk
            if found == batch.stated:
                self.done += len(found)
                return
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


def _check_generations(found: NDArray[np.int64], places: Sequence[Place]) -> None:
    if found.tolist() != [place.generation for place in places]:
        raise LeaseExpiredError("the chunk was replaced while it was read; look it up again")
