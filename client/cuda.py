"""The cuda transport: frames from the server's GPU memory, and its CPU memory, into an engine's
pages on the same device.

Rows go from the mapped arena into the pages in one kernel, without a copy in between, which makes
the frame's checksums as they pass. torch is imported here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import cast

import numpy as np
import torch
from typing_extensions import override

from kvstore.client.arena import Arena, open_arena
from kvstore.client.client import Client
from kvstore.client.device_pages import DevicePages
from kvstore.client.device_puts import DevicePutting
from kvstore.client.layer_feed import in_time
from kvstore.client.reader import check_header
from kvstore.client.session import Session
from kvstore.client.shm import ShmTransport
from kvstore.client.transport import Arrived, Assembly, Transport
from kvstore.codecs.frame_kernels import open_kernels
from kvstore.codecs.paged import FrameAt, FrameKernels, Sums, check_sums
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.cuda import HOST_REGISTER_READ_ONLY, import_cupy, register_host
from kvstore.proto.device import tensor_over
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.frame import header_bytes
from kvstore.proto.places import Place, Reach, unpack_places
from kvstore.proto.types import ChainDigest, ChunkKey, KVLayout

BATCHES_AHEAD = 4
"""Batches of frames that the device works on while the host prepares the next."""
MAX_BATCH_FRAMES = 32
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class InArena:
    """A frame in the mapped memory of the device: where, and its header's bytes on the host.

    Like ``Arrived``, with device memory in place of ``frame``.
    """

    index: int
    place: Place
    head: Bytes


class CudaTransport(ShmTransport):
    """Shared memory, and the memory of the device that the server's gpu tier is on.

    What is mapped of the device stays so until the transport is closed and the last get that was
    at work then has ended: a kernel that reads what is mapped no more takes the engine's context
    with it. Raises TierUnavailableError at birth when the server shares none, or this process
    does not see its device.
    """

    name = "cuda"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._registered: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self._users = 1
        """Gets at work, and this transport itself until it is closed."""
        self._is_closed = False
        # Guards the two above.
        self._users_lock = Lock()
        try:
            self.arena: Arena = open_arena(session.terms, self.slabs)
        except KVStoreError:
            super().close()
            raise
        try:
            self.kernels: FrameKernels = open_kernels(self.arena.memory.device)
        except KVStoreError:
            self.close()
            raise
        whole = KVLayout.of(session.representation, session.options.chunk_tokens)
        self._head_bytes = header_bytes(whole)  # the same for shorter chunks

    @contextmanager
    def get_on_device(
        self, digests: Sequence[ChainDigest], deadline_ms: int
    ) -> Iterator[Iterator[InArena | Arrived]]:
        """Enter to iterate frames as ``get`` does, those on the device where they lie."""
        request = self.get_request(digests, 0, deadline_ms, pb.VIA_DEVICE)
        with self._mapped(), self._leased_replies(request) as (replies, leases):
            try:
                yield self._arriving_near(replies, leases)
            finally:
                # What is queued may read memory of the lease, and writes into the caller's.
                _wait_for(self.arena.memory.device)

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """Keep what is mapped until this is left. Raises LeaseExpiredError once it is closed."""
        with self._users_lock:
            if self._is_closed:
                raise LeaseExpiredError("the connection to the server was closed; ask once more")
            self._users += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._users_lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            while self._registered:
                self._registered.pop()()
            self.arena.close()

    def _arriving_near(
        self, replies: Iterator[pb.GetResponse], leases: set[int]
    ) -> Iterator[InArena | Arrived]:
        assembly = Assembly(self.session.terms.max_frame_bytes)
        for reply in replies:
            leases.add(reply.lease_id)
            names = reply.places.tier_names
            places = unpack_places(reply.places.rows)
            heads = iter(self._heads([p for p in places if p.reach == Reach.device]))
            for index, place in enumerate(places, reply.index):
                if place.reach == Reach.device:
                    yield InArena(index, place, next(heads))
                    continue
                slab = self.slabs.reach(place)
                self._register(place.number, slab.data)
                frame = slab.data[place.offset : place.offset + place.size_bytes]
                yield Arrived(
                    index,
                    names[place.tier],
                    frame,
                    partial(slab.confirm, place.offset, place.generation),
                )
            whole = assembly.add(reply.part) if reply.HasField("part") else None
            if whole is not None:
                yield Arrived(reply.index, reply.tier, whole, lambda: None)

    def _heads(self, places: Sequence[Place]) -> list[Bytes]:
        """Return the header of each frame in the arena, brought to the host in one go.

        Raises LeaseExpiredError for a place that was reused, InvalidRequestError for one outside.
        """
        memory = self.arena.memory
        row_bytes = _WORD_BYTES + self._head_bytes
        rows = torch.empty((len(places), row_bytes), dtype=torch.uint8, pin_memory=memory.is_cuda)
        for row, place in zip(rows, places, strict=True):
            start, stop = place.offset - _WORD_BYTES, place.offset + self._head_bytes
            if start < 0 or place.offset % 16 or place.offset + place.size_bytes > len(memory):
                raise InvalidRequestError(
                    "place", (place.offset, place.size_bytes), f"arena has {len(memory)} bytes"
                )
            row[: stop - start].copy_(memory[start:stop], non_blocking=True)
        _wait_for(memory.device)
        found = rows.numpy()
        words = np.ascontiguousarray(found[:, :_WORD_BYTES]).view("<u8").ravel()
        if words.tolist() != [place.generation for place in places]:
            raise _replaced()
        return [row[_WORD_BYTES:] for row in found]

    def confirm(self, places: Sequence[Place]) -> None:
        """Raise LeaseExpiredError if the memory of one of *places* was reused."""
        words = self.arena.memory.view(torch.int64)
        at = torch.tensor([place.offset // _WORD_BYTES - 1 for place in places])
        if words[at.to(words.device)].tolist() != [place.generation for place in places]:
            raise _replaced()

    def _register(self, slab_id: int, data: Bytes) -> None:
        """Have the device copy straight out of a slab; without that copies are only slower."""
        device = self.arena.memory.device
        if slab_id in self._seen or device.type != "cuda":
            return
        self._seen.add(slab_id)
        cupy = import_cupy("cuda")
        unregister = register_host(cupy, device.index or 0, data, HOST_REGISTER_READ_ONLY)
        if unregister is not None:
            self._registered.append(unregister)

    @override
    def close(self) -> None:
        with self._users_lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            try:
                super().close()
            finally:
                self._leave()


class CudaClient(DevicePutting, Client):
    """A Client of a server on the same host and GPU. What is new is ``get_device_pages`` and
    ``put_on_device``.

    ``options.transport`` is not looked at.
    """

    @override
    def _connect(self) -> Transport:
        session = Session(
            self._connection, self.representation, self.options, lambda: self.counts()
        )
        try:
            return CudaTransport(session)
        except (KVStoreError, OSError):
            session.close()
            raise

    def get_device_pages(
        self, keys: Sequence[ChunkKey], paged: DevicePages, block_ids: Sequence[int]
    ) -> int:
        """Read the longest prefix of *keys* that is there in time straight into pages on the
        device, on torch's current stream.

        *keys* are those of a request from its first token on, *block_ids* its blocks. Return
        how many chunks were read and verified: all work on them is done then. Slots of the
        chunks past them may have been written to and are not to be used.
        """

        def work(transport: Transport) -> int:
            assert isinstance(transport, CudaTransport)
            return self._read_on_device(transport, keys, paged, block_ids)

        try:
            return self._with_session(work)
        except LeaseExpiredError:
            # One was dropped between its place and our look: ask what is left.
            return self._with_session(work)

    def _read_on_device(
        self,
        transport: CudaTransport,
        keys: Sequence[ChunkKey],
        paged: DevicePages,
        block_ids: Sequence[int],
    ) -> int:
        digests = [self._digest(key) for key in keys]
        reading = _Reading(transport, keys, paged, block_ids)
        try:
            with transport.get_on_device(digests, self.options.deadline_ms) as arriving:
                reading.run(in_time(cast("Iterator[Arrived]", arriving)))
        except RuntimeError as error:  # what torch and cupy raise
            reason = str(error).partition("\n")[0]
            raise TierUnavailableError("cuda", f"{type(error).__name__}: {reason}") from error
        if reading.broken is not None:
            self._quarantine(transport, reading.broken)
        return reading.done


@dataclass(frozen=True, slots=True)
class _Batch:
    """Frames that the device works on. ``memory`` is theirs, kept until it is done."""

    frames: list[FrameAt]
    memory: torch.Tensor
    sums: Sums
    confirm: Callable[[], None]


class _Reading:
    """One get at work: what has arrived is put on the device's queue, and proved behind it."""

    def __init__(
        self,
        transport: CudaTransport,
        keys: Sequence[ChunkKey],
        paged: DevicePages,
        block_ids: Sequence[int],
    ) -> None:
        self._transport = transport
        self._keys = keys
        self._paged = paged.of(block_ids)
        self._chunk_tokens = transport.session.options.chunk_tokens
        self._run: list[InArena] = []
        self._run_frames: list[FrameAt] = []
        self._queue: deque[_Batch] = deque()
        self.done = 0
        self.broken: ChunkKey | None = None

    def run(self, arriving: Iterator[InArena | Arrived]) -> None:
        """Read until the end of the prefix; ``done`` and ``broken`` then say how it went."""
        try:
            for arrived in arriving:
                if isinstance(arrived, InArena):
                    self._add(arrived)
                else:
                    self._flush()
                    self._upload(arrived)
            self._flush()
            while self._queue:
                self._prove(self._queue.popleft())
        except (ChunkCorruptError, InvalidFrameError):
            self._end()
        except UnknownCodecError:
            self._end()
            self.broken = None  # right for all we know, to a newer client

    def _end(self) -> None:
        """Prove what was queued before the chunk that is wrong."""
        try:
            while self._queue:
                self._prove(self._queue.popleft())
        except (ChunkCorruptError, InvalidFrameError):
            self._queue.clear()
        self.broken = self._keys[self.done]

    def _frame(self, index: int, head: Bytes, size_bytes: int, offset: int) -> FrameAt:
        header = check_header(self._transport.session, self._keys[index], head, size_bytes)
        if header.layout.tokens > self._chunk_tokens:
            raise InvalidFrameError("tokens", header.layout.tokens, f"<= {self._chunk_tokens}")
        return FrameAt(offset, header, index * self._chunk_tokens)

    def _add(self, arrived: InArena) -> None:
        place = arrived.place
        try:
            frame = self._frame(arrived.index, arrived.head, place.size_bytes, place.offset)
        except (ChunkCorruptError, InvalidFrameError):
            self._flush()
            raise
        run = self._run_frames
        if run and (len(run) == MAX_BATCH_FRAMES or run[0].header.layout != frame.header.layout):
            self._flush()
        self._run.append(arrived)
        self._run_frames.append(frame)

    def _flush(self) -> None:
        """Queue the run of frames in the arena as one batch."""
        if not self._run:
            return
        places = [arrived.place for arrived in self._run]
        frames, self._run, self._run_frames = self._run_frames, [], []
        memory = self._transport.arena.memory
        self._start(frames, memory, partial(self._transport.confirm, places))

    def _upload(self, arrived: Arrived) -> None:
        """Queue a frame of host memory, by way of memory of its own on the device."""
        data = arrived.frame[:]
        frame = self._frame(arrived.index, data, len(data), 0)
        host, device = tensor_over(data), self._transport.arena.memory.device
        memory = torch.empty(len(host), dtype=torch.uint8, device=device)
        memory.copy_(host, non_blocking=True)
        self._start([frame], memory, arrived.confirm)

    def _start(
        self, frames: list[FrameAt], memory: torch.Tensor, confirm: Callable[[], None]
    ) -> None:
        while len(self._queue) >= BATCHES_AHEAD:
            self._prove(self._queue.popleft())
        sums = self._transport.kernels.scatter(memory, frames, self._paged)
        self._queue.append(_Batch(frames, memory, sums, confirm))

    def _prove(self, batch: _Batch) -> None:
        """Wait for a batch and count its frames, up to the first that is wrong."""
        found = batch.sums()
        batch.confirm()  # first of all: memory that was reused says nothing of the chunk
        for frame, sums in zip(batch.frames, found, strict=True):
            check_sums(frame.header, sums)
            self.done += 1


def _wait_for(device: torch.device) -> None:
    """Wait for torch's current stream of *device*."""
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


def _replaced() -> LeaseExpiredError:
    return LeaseExpiredError("the chunk was replaced while it was read; look it up again")
