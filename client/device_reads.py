"""Frames out of a server's memory into pages on a device: the reader, and each of its reads.

Frames of kvq are decoded on the device, on torch's current stream; those of other codecs are
transcoded to raw on the host and uploaded.
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
"""Host frames in flight at once: half of them are copied while the device works on the others."""
RING_BYTES = 256 << 20
"""Device memory for them."""
PIECE_BYTES = 64 << 20
"""Bytes registered in one call, which blocks other CUDA work of the process for 4 ms."""
MAX_SLABS = 64
"""Slabs registered in one session. A server has fewer at once; freed ones stay registered."""
_ALIGN_BYTES = 256
_WORD_BYTES = 8


@dataclass(slots=True)
class _Batch:
    """Frames that the device works on. ``held`` keeps the memory that it reads alive.

    ``confirms``, called after the sums, raise LeaseExpiredError for reused memory, and
    InvalidFrameError for contents that are not the codec's.
    """

    frames: Sequence[FrameAt]
    sums: list[Sums]
    """One entry, once launched."""
    stated: list[list[int]]
    """The checksums that each frame's header states."""
    done: Event | None = None
    confirms: Sequence[Callable[[], None]] = ()
    held: Sequence[object] = ()

    @classmethod
    def of(
        cls, frame: FrameAt, sums: Sums, confirm: Callable[[], None], held: Sequence[object]
    ) -> _Batch:
        """Return a batch of one frame."""
        stated = [frame.header.segments["checksum"].tolist()]
        return cls([frame], [sums], stated, None, [confirm], held)


class DeviceDecoder:
    """Decodes frames of host memory into pages on *device*. Thread-safe."""

    def __init__(self, kernels: FrameKernels, device: torch.device) -> None:
        self._kernels = kernels
        self._device = device

    @cached_property
    def kvq(self) -> KvqKernels | None:
        """The kernels of kvq, compiled at first use; None on a CPU.

        Raises TierUnavailableError when they cannot be compiled.
        """
        return None if self._device.type == "cpu" else open_kvq_kernels(self._device)

    def begin(
        self, frame: FrameAt, data: Bytes, confirm: Callable[[], None], paged: Paged
    ) -> _Batch:
        """Begin to decode *data*, a frame in host memory, into the pages. *confirm*, called once
        it is read, raises LeaseExpiredError for reused memory.

        Raises that in place of errors of the frame: ChunkCorruptError, InvalidFrameError,
        ModelError, UnknownCodecError. LayoutMismatchError and InvalidRequestError for pages that
        do not fit the chunk.
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
    """Whether the kernels support a kvq frame: no refinements, parts of a chunk, skipped blocks or
    several block tables.
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
    """A row a frame, on the host: its first bytes, as many as the header of a whole chunk has."""
    tables: DeviceTables | None = None
    """The tables of ``places``."""

    def __len__(self) -> int:
        return len(self.places or self.frames)

    @property
    def sizes(self) -> list[int]:
        """The frames' bytes."""
        return [place.size_bytes for place in self.places] or [len(one) for one in self.frames]


class DeviceReader:
    """Reads frames into pages on *device*, one get at a time. Frames of host memory pass a ring of
    at least *least_slots* slots for frames of up to *frame_bytes* bytes.

    Raises TierUnavailableError when the device has no memory for the ring, or no kernels.
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
        """The event after the last work that reads each slot."""
        self.lock = threading.Lock()
        """Held by the get in progress."""

    def wait(self) -> None:
        """Wait for all queued work."""
        for stream in (self.work, self.copies):
            stream.record().synchronize()

    def close(self) -> None:
        """Free the ring; no read may follow."""
        with self.lock:
            self.wait()
            ring, self.ring = self.ring, self.ring[:0].clone()
            self.device.release(ring)


class Registration:
    """Slabs registered with *device*, so that it copies directly from them. A thread registers them
    piece by piece; copies from a piece that is not registered yet are only slower.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slabs: dict[int, tuple[int, int]] = {}
        """Start and end address of each slab."""
        self._waiting: SimpleQueue[Bytes | None] = SimpleQueue()
        self._ends: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, number: int, memory: Bytes) -> None:
        """Queue slab *number* for registration, unless it was before. One thread at a time."""
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
                    return  # already logged; the next one would fail too
                self._ends.append(end)

    def cuts(self, data: Bytes) -> Iterator[slice]:
        """Cut *data* at the ends of pieces: no copy may span two."""
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
    """One get in progress: frames are queued on the device as they arrive, and verified afterwards.

    Nothing is written to the pages before *after*, an event of the engine's stream. A frame less
    accurate than *least* ends the prefix.
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
        """The bytes of the last parsed header, and the header."""
        self._ring_tables: list[DeviceTables] = []
        """One entry once launched: the tables of all frames, each in the ring slot of its index."""
        self._has_ring_tables = False
        self._in_arena: list[Run] = []
        self._checked: set[tuple[KVLayout, int]] = set()
        """Layouts and header sizes of frames that were checked to fit the pages."""
        self._queue: deque[_Batch] = deque()
        self.done = 0
        self.broken: ChunkKey | None = None
        if after is not None:
            reader.work.wait(after)

    def run(self, arriving: Iterator[Run]) -> None:
        """Read until the end of the prefix; ``done`` and ``broken`` then hold the outcome.

        Raises LeaseExpiredError if device memory was reused meanwhile: that proves nothing about
        the chunks.
        """
        try:
            for run in contiguous(arriving, len(self.keys), len):
                self._fetch_heads(run)
                if not self._take(run):
                    break
            confirm = self._confirming()
            self._verify_all()
        except (*WRONG, UnknownCodecError, TierUnavailableError) as error:
            with suppress(*WRONG):  # those queued before it
                self._verify_all()
            if isinstance(error, WRONG) and self.done < len(self.keys):
                self.broken = self.keys[self.done]
            elif isinstance(error, TierUnavailableError) and not self.done:
                raise  # a file that cannot be read
            confirm = self._confirming()
        confirm()

    def _verify_all(self) -> None:
        while self._queue:
            self._verify(self._queue.popleft())

    # --- frames as they arrive

    def _fetch_heads(self, run: Run) -> None:
        """Copy the heads of frames to the host; those in the arena all at once."""
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
        """Queue a check of the generations of arena places, behind all work that reads them.

        The returned function raises LeaseExpiredError if any place was reused by then.
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
        """Queue the frames of *run* that are accurate enough; return whether all are.

        One header is parsed; later ones are compared with it.
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
        """Return the checksums stated by headers from *first* on, at most a batch, up to the first
        that is wrong, or unlike the last parsed header.
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
                run.confirms[number]()  # raises first: reused memory proves nothing about the chunk
            raise
        return header

    # --- the device's queue

    def _decode(self, run: Run, number: int, header: FrameHeader) -> None:
        """Queue a frame of another codec for decoding, as a batch of its own."""
        if run.places:
            raise UnknownCodecError(header.codec_id, "raw, in a device's memory")
        self._limit_queue()
        reader, data, confirm = self.reader, run.frames[number], run.confirms[number]
        frame = FrameAt(0, header, (run.index + number) * self._chunk_tokens)
        begun: list[_Batch] = []
        reader.work.launch(
            lambda: begun.append(reader.decoder.begin(frame, data, confirm, self._paged))
        )
        begun[0].done = reader.work.record()
        self._queue.append(begun[0])

    def _queued_in_arena(self, run: Run, first: int, stated: list[list[int]]) -> None:
        """Queue frames in place, from *first* of *run* on."""
        tables = run.tables
        assert tables is not None
        places = run.places[first : first + len(stated)]
        frames = self._frames(run.index + first, [place.offset for place in places])
        cut = tables.cut(first, first + len(stated))
        sums = self._start(self._arena(), frames, lambda: cut)
        self._queue.append(_Batch(frames, sums, stated, self.reader.work.record()))

    def _queued_in_ring(self, run: Run, first: int, stated: list[list[int]]) -> None:
        """Queue the copies of host frames into the ring, and from there into the pages."""
        reader, start = self.reader, run.index + first
        held = run.frames[first : first + len(stated)]
        if len(held[0]) > reader.frame_bytes:  # all have one length
            raise InvalidFrameError("frame_bytes", len(held[0]), f"<= {reader.frame_bytes}")
        self._upload_ring_tables()
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

    def _upload_ring_tables(self) -> None:
        """Upload the tables of all frames at once: behind copies of frames they would be late."""
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
        """Queue the copy of *frames* into the pages; return a list that gets the sums."""
        self._limit_queue()
        reader, header = self.reader, frames[0].header
        like = header.layout, header.header_bytes  # frames with equal row offsets
        if like not in self._checked:
            reader.kernels.check(memory, frames, self._paged)
            self._checked.add(like)
        self._paged.check_slots(like[0], [frame.first_token for frame in frames])
        sums: list[Sums] = []

        def launch() -> None:
            sums.append(reader.kernels.start(memory, frames, self._paged, tables()))

        reader.work.launch(launch)
        return sums

    def _limit_queue(self) -> None:
        while len(self._queue) >= BATCHES_AHEAD:
            self._verify(self._queue.popleft())

    def _verify(self, batch: _Batch) -> None:
        """Wait for a batch and count its frames up to the first wrong one; raise for that one."""
        try:
            assert batch.done is not None
            batch.done.synchronize()
            (sums,) = batch.sums
            found = sums()
            for confirm in batch.confirms:
                confirm()  # raises first: reused memory proves nothing about the chunk
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
            self._queue.clear()  # later frames no longer count
            raise


def _check_generations(found: NDArray[np.int64], places: Sequence[Place]) -> None:
    if found.tolist() != [place.generation for place in places]:
        raise LeaseExpiredError("the chunk was replaced while it was read; look it up again")
