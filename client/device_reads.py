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
from functools import cached_property, partial
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
    """Frames like *header* that the device works on. ``held`` keeps memory that it reads alive.

    ``confirms``, called after the sums, raise LeaseExpiredError for reused memory, and
    InvalidFrameError for contents that are not the codec's.
    """

    header: FrameHeader
    sums: list[Sums]
    """One entry, once launched."""
    done: Event
    stated: list[list[int]]
    """The checksums that each frame's header states."""
    confirms: Sequence[Callable[[], None]] = ()
    held: object = None


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
    ) -> tuple[FrameHeader, Sums, Sequence[Callable[[], None]], object]:
        """Begin to decode *data*, a frame in host memory, into the pages. *confirm*, called once
        it is read, raises LeaseExpiredError for reused memory.

        Return the header of the frame that is summed, its sums, and ``confirms`` and ``held`` of
        its batch. Raises LeaseExpiredError in place of errors of the frame: ChunkCorruptError,
        InvalidFrameError, ModelError, UnknownCodecError. LayoutMismatchError and
        InvalidRequestError for pages that do not fit the chunk.
        """
        header = frame.header
        try:
            if header.codec_id == KvqCodec.codec_id and _has_kernels(frame, paged) and self.kvq:
                memory = self._upload(tensor_over(data))
                sums = self._kernels.sums(memory, [frame])
                decoded = self.kvq.decode(memory, frame, paged, data)
                return header, sums, [confirm, decoded], (data, memory)
            size = max_transcoded_bytes(header.layout, RAW)
            host = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            raw = FrameAt(0, transcode(data, RAW, host.numpy()), frame.first_token)
            memory = self._upload(host)
            sums = self._kernels.scatter(memory, [raw], paged)
            return raw.header, sums, [confirm], (host, memory)
        finally:
            confirm()

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
        self._in_arena: list[tuple[DeviceTables, Sequence[Place]]] = []
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
            self._verify_past(0)
        except (*WRONG, UnknownCodecError, TierUnavailableError) as error:
            with suppress(*WRONG):  # those queued before it
                self._verify_past(0)
            if isinstance(error, WRONG) and self.done < len(self.keys):
                self.broken = self.keys[self.done]
            elif isinstance(error, TierUnavailableError) and not self.done:
                raise  # a file that cannot be read
            confirm = self._confirming()
        confirm()

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

        def fetch() -> tuple[DeviceTables, Callable[[], NDArray[np.int64]]]:
            tables = kernels.tables(starts, self._paged)
            return tables, kernels.words(memory, tables, _WORD_BYTES, words)

        found = copies.launched(fetch)
        copies.record().synchronize()
        ((run.tables, wait),) = found
        rows = wait()
        _check_generations(rows[:, 0], places)
        run.heads = np.ascontiguousarray(rows[:, 1:]).view(np.uint8)
        self._in_arena.append((run.tables, places))

    def _arena(self) -> torch.Tensor:
        assert self._transport.arena is not None
        return self._transport.arena.memory

    def _confirming(self) -> Callable[[], None]:
        """Queue a check of the generations of arena places, behind all work that reads them.

        The returned function raises LeaseExpiredError if any place was reused by then.
        """
        words, work = self.reader.kernels.words, self.reader.work
        waits = [
            work.launched(partial(words, self._arena(), tables, _WORD_BYTES, 1))
            for tables, _ in self._in_arena
        ]
        done = work.record()

        def confirm() -> None:
            if waits:
                done.synchronize()
            for (wait,), (_, places) in zip(waits, self._in_arena, strict=True):
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
            queue = self._queue_in_arena if run.places else self._queue_in_ring
            queue(run, number, stated)
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
        self._verify_past(BATCHES_AHEAD - 1)
        reader, data, confirm = self.reader, run.frames[number], run.confirms[number]
        frame = FrameAt(0, header, (run.index + number) * self._chunk_tokens)
        begin = partial(reader.decoder.begin, frame, data, confirm, self._paged)
        ((header, sums, confirms, held),) = reader.work.launched(begin)
        stated, done = [header.segments["checksum"].tolist()], reader.work.record()
        self._queue.append(_Batch(header, [sums], done, stated, confirms, held))

    def _queue_in_arena(self, run: Run, first: int, stated: list[list[int]]) -> None:
        """Queue frames in place, from *first* of *run* on."""
        tables, stop = run.tables, first + len(stated)
        assert tables is not None
        offsets = [place.offset for place in run.places[first:stop]]
        started = self._start(
            self._arena(), run.index + first, offsets, lambda: tables.cut(first, stop)
        )
        self._queue.append(_Batch(*started, stated))

    def _queue_in_ring(self, run: Run, first: int, stated: list[list[int]]) -> None:
        """Queue the copies of host frames into the ring, and from there into the pages."""
        reader, start, made = self.reader, run.index + first, self._ring_tables
        held = run.frames[first : first + len(stated)]
        if len(held[0]) > reader.frame_bytes:  # all have one length
            raise InvalidFrameError("frame_bytes", len(held[0]), f"<= {reader.frame_bytes}")
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
        header, sums, done = self._start(
            reader.ring, start, offsets, lambda: made[0].cut(start, start + len(held))
        )
        for slot in slots:
            reader.busy[slot] = done
        confirms = run.confirms[first : first + len(stated)]
        self._queue.append(_Batch(header, sums, done, stated, confirms, held))

    @cached_property
    def _ring_tables(self) -> list[DeviceTables]:
        """One entry once launched: the tables of all frames, each in the ring slot of its index.

        Uploaded at once: behind copies of frames they would be late.
        """
        reader, numbers = self.reader, np.arange(len(self.keys))
        offsets = numbers % len(reader.busy) * reader.frame_bytes
        starts = np.stack([offsets, numbers * self._chunk_tokens], 1)
        return reader.copies.launched(partial(reader.kernels.tables, starts, self._paged))

    def _start(
        self,
        memory: torch.Tensor,
        index: int,
        offsets: Sequence[int],
        tables: Callable[[], DeviceTables],
    ) -> tuple[FrameHeader, list[Sums], Event]:
        """Queue the copy of frames like the last parsed header, from chunk *index* on, into the
        pages; return the header, a list that gets the sums, and the end of the work.
        """
        self._verify_past(BATCHES_AHEAD - 1)
        assert self._parsed is not None
        reader, header, tokens = self.reader, self._parsed[1], self._chunk_tokens
        frames = [FrameAt(at, header, number * tokens) for number, at in enumerate(offsets, index)]
        like = header.layout, header.header_bytes  # frames with equal row offsets
        if like not in self._checked:
            reader.kernels.check(memory, frames, self._paged)
            self._checked.add(like)
        self._paged.check_slots(like[0], [frame.first_token for frame in frames])
        start = reader.kernels.start
        sums = reader.work.launched(lambda: start(memory, frames, self._paged, tables()))
        return header, sums, reader.work.record()

    def _verify_past(self, most: int) -> None:
        """Verify the first batches of the queue, all but *most*."""
        while len(self._queue) > most:
            self._verify(self._queue.popleft())

    def _verify(self, batch: _Batch) -> None:
        """Wait for a batch and count its frames up to the first wrong one; raise for that one."""
        try:
            batch.done.synchronize()
            (sums,) = batch.sums
            found = sums()
            for confirm in batch.confirms:
                confirm()  # raises first: reused memory proves nothing about the chunk
            for stated, those in zip(batch.stated, found, strict=True):
                if stated != those:
                    segments = batch.header.segments.copy()
                    segments["checksum"] = stated
                    key = self.keys[self.done]
                    check_sums(replace(batch.header, key=key, segments=segments), those)
                self.done += 1
        except KVStoreError:
            self._queue.clear()  # later frames no longer count
            raise


def _check_generations(found: NDArray[np.int64], places: Sequence[Place]) -> None:
    if found.tolist() != [place.generation for place in places]:
        raise LeaseExpiredError("the chunk was replaced while it was read; look it up again")
