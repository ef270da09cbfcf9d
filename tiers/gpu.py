"""Frames in the memory of one device, next to the engine that reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count, cycle, takewhile
from queue import SimpleQueue
from threading import Lock
from typing import NamedTuple

import torch
from typing_extensions import override

from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.device import Device, Event, Stream, tensor_over
from kvstore.proto.errors import InvalidRequestError, TierFullError, TierUnavailableError
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.proto.unix_socket import ARENA_SLAB, Place, Reach, pack_places
from kvstore.tiers.allocator import FreeList
from kvstore.tiers.base import DEFAULT_TENANT, Reservation, Tier, TierStats, check_range

PIECES_PER_TRANSFER = 2


@dataclass(slots=True, eq=False)
class _Piece:
    """``busy`` is the event of its last copy, ``out`` the destination of its bytes after it."""

    tensor: torch.Tensor
    bytes: Bytes
    busy: Event | None = None
    out: Bytes | None = None

    def settle(self) -> None:
        """Wait for its last copy, and deliver its bytes."""
        out, self.out = self.out, None
        if self.busy is not None:
            self.busy.synchronize()
            self.busy = None
        if out is not None:
            copy_bytes(out, self.bytes[: len(out)])


class Staging:
    """Up to *transfers* at once, each through two pieces of *piece_bytes*; others wait. The host
    fills or empties one piece while the device copies the other. Thread-safe.
    """

    def __init__(self, device: Device, transfers: int, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._pairs: SimpleQueue[list[_Piece]] = SimpleQueue()
        for _ in range(transfers):
            tensors = [device.staging(piece_bytes) for _ in range(PIECES_PER_TRANSFER)]
            self._pairs.put([_Piece(tensor, tensor.numpy()) for tensor in tensors])

    @contextmanager
    def _pair(self) -> Iterator[list[_Piece]]:
        pair = self._pairs.get()
        try:
            yield pair
        finally:
            for piece in pair:
                piece.out = None  # after a failed transfer
            self._pairs.put(pair)

    def upload(self, stream: Stream, out: torch.Tensor, data: Bytes) -> None:
        """Queue copies of *data* to the device; *data* may be reused on return."""
        with self._pair() as pair:
            for piece, start in zip(cycle(pair), self._starts(data), strict=False):
                part = data[start : start + self._piece_bytes]
                piece.settle()
                copy_bytes(piece.bytes[: len(part)], part)
                stream.copy(out[start : start + len(part)], piece.tensor[: len(part)])
                piece.busy = stream.record()

    def download(self, stream: Stream, out: Bytes, data: torch.Tensor) -> None:
        """Copy *data* from the device to *out*; synchronous."""
        with self._pair() as pair:
            for piece, start in zip(cycle(pair), self._starts(out), strict=False):
                piece.settle()
                part = out[start : start + self._piece_bytes]
                stream.copy(piece.tensor[: len(part)], data[start : start + len(part)])
                piece.busy, piece.out = stream.record(), part
            for piece in pair:
                piece.settle()

    def _starts(self, data: Bytes) -> range:
        return range(0, len(data), self._piece_bytes)


GRANULE_BYTES = 256
"""Alignment of cudaMalloc: every frame starts on a line of the device's memory."""
BLOCK_HEADER_BYTES = 256
"""Precedes each frame; ends in the generation, as in a slab of CPU memory."""
STAGING_TRANSFERS = 4
STAGING_PIECE_BYTES = 4 << 20
_WORD_BYTES = 8
_generations = count(0x5EED_B10C_0000_0000, 2)
"""One per process, so that places of different tiers never match."""


class _Frame(NamedTuple):
    """A chunk in the arena."""

    info: ChunkInfo
    tenant: str
    place: Place


class GpuTier(Tier):
    """One allocation of *device*, cut by a FreeList.

    Uploads and downloads use two streams of the tier, so that neither waits for the other nor for
    an engine's work. Pageable bytes pass a bounded ring of pinned memory; bytes in registered
    memory (``Device.register``) are copied directly. A frame becomes visible once its copy on the
    device is done. Raises InvalidRequestError for a capacity below one granule and a header,
    TierUnavailableError if the device lacks memory.
    """

    name = "gpu"
    granule_bytes, overhead_bytes = GRANULE_BYTES, BLOCK_HEADER_BYTES

    def __init__(
        self, capacity_bytes: int, device: Device, staging_piece_bytes: int = STAGING_PIECE_BYTES
    ) -> None:
        if capacity_bytes < GRANULE_BYTES + BLOCK_HEADER_BYTES:
            raise InvalidRequestError("capacity_bytes", capacity_bytes, "give at least one frame")
        self.capacity_bytes = capacity_bytes // GRANULE_BYTES * GRANULE_BYTES
        self.max_frame_bytes = self.capacity_bytes - BLOCK_HEADER_BYTES
        self.device = device
        self.memory = device.allocate(self.capacity_bytes)
        """The whole arena (uint8), for work on frames that the caller has located and leased."""
        try:
            self._staging = Staging(device, STAGING_TRANSFERS, staging_piece_bytes)
            self._up, self._down = device.stream(), device.stream()
        except TierUnavailableError:
            device.release(self.memory)
            raise
        self._lock = Lock()
        # Guards the fields below; held for dictionary operations only.
        self._free_list = FreeList(self.capacity_bytes, GRANULE_BYTES)
        self._sealed: dict[ChunkKey, _Frame] = {}
        self._reserved: dict[object, Place] = {}
        """Keyed by place: generations are unique."""
        self._closed = False

    # --- put

    @override
    def reserve(self, info: ChunkInfo, tenant: str = DEFAULT_TENANT) -> Reservation:
        need_bytes = self.allocated_bytes(info.size_bytes)
        with self._lock:
            if self._closed:
                raise TierUnavailableError(self.name, "closed")
            start = self._free_list.allocate(need_bytes)
            if start is None:
                free_bytes = self.capacity_bytes - self._free_list.used_bytes
                raise TierFullError(self.name, need_bytes, free_bytes)
            first, generation = start + BLOCK_HEADER_BYTES, next(_generations)
            place = Place(ARENA_SLAB, Reach.device, 0, first, info.size_bytes, generation)
            self._reserved[place] = place
        return Reservation(info, tenant, need_bytes, place)

    @override
    def write(self, reservation: Reservation, frame: Bytes) -> None:
        reservation.check(frame)
        out = self._slice(self._open(reservation), 0, len(frame))
        if not self.device.is_registered(frame):
            self._staging.upload(self._up, out, frame)
            return
        self._up.copy(out, tensor_over(frame))
        self._up.record().synchronize()  # the caller may reuse its memory now

    def opened(self, reservation: Reservation, stream: Stream) -> torch.Tensor:
        """Return the reserved frame's device bytes, for work queued on *stream* from now on; the
        caller waits for it before it seals or aborts.
        """
        place = self._open(reservation)
        # Copies into the space by its former owner may still be queued.
        stream.wait(self._up.record())
        return self._slice(place, 0, place.size_bytes)

    @override
    def seal(self, reservation: Reservation, *, durable: bool = False) -> bool:
        place = self._open(reservation)
        try:
            self._up.fill(self._word(place), place.generation)
            self._up.record().synchronize()  # after every copy into the frame
        except TierUnavailableError:
            self.abort(reservation)
            raise
        with self._lock:
            del self._reserved[reservation.place]
            key = reservation.info.key
            if key not in self._sealed:
                self._sealed[key] = _Frame(reservation.info, reservation.tenant, place)
                return True
        self._retire(place)
        return False

    @override
    def abort(self, reservation: Reservation) -> None:
        with self._lock:
            place = self._reserved.pop(reservation.place, None)
            if place is not None:
                # Copies into it may still run; the next owner's are queued after them.
                self._free(place)

    def _open(self, reservation: Reservation) -> Place:
        with self._lock:
            place = self._reserved.get(reservation.place)
        if place is None:
            raise reservation.spent()
        return place

    def _slice(self, place: Place, offset: int, size_bytes: int) -> torch.Tensor:
        check_range(place.size_bytes, offset, size_bytes)
        start = place.offset + offset
        return self.memory[start : start + size_bytes]

    def _word(self, place: Place) -> torch.Tensor:
        return self.memory[place.offset - _WORD_BYTES : place.offset].view(torch.int64)

    # --- get

    @override
    def read(
        self, key: ChunkKey, out: Bytes, offset: int = 0, verifier: FrameVerifier | None = None
    ) -> bool:
        place = self.locate(key)
        if place is None:
            return False
        data = self._slice(place, offset, len(out))
        if self.device.is_registered(out):
            self._down.copy(tensor_over(out), data)
            self._down.record().synchronize()
        else:
            self._staging.download(self._down, out, data)
        if verifier is not None:
            verifier.update(len(out))
        return True

    def locate(self, key: ChunkKey) -> Place | None:
        """Return the place of the sealed frame for clients of the device; None when absent."""
        with self._lock:
            frame = self._sealed.get(key)
        return None if frame is None else frame.place

    def place_rows(self, keys: Sequence[ChunkKey]) -> bytes:
        """Return the places of the frames for clients of the device, up to the first absent one."""
        with self._lock:
            here = takewhile(self._sealed.__contains__, keys)
            return pack_places([self._sealed[key].place for key in here])

    @override
    def tenant_of(self, key: ChunkKey) -> str:
        with self._lock:
            frame = self._sealed.get(key)
        return DEFAULT_TENANT if frame is None else frame.tenant

    def arena_file(self) -> int:
        """Return a descriptor for another process to map the arena; the caller closes it."""
        return self.device.export(self.memory)

    @override
    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        with self._lock:
            frames = [self._sealed.get(key) for key in keys]
        return [frame and frame.info for frame in frames]

    @override
    def scan(self) -> Iterator[ChunkInfo]:
        with self._lock:
            return iter([frame.info for frame in self._sealed.values()])

    # --- delete

    @override
    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            frame = self._sealed.pop(key, None)
        if frame is None:
            return False
        self._retire(frame.place)
        return True

    def _retire(self, place: Place) -> None:
        """Free a block that is no longer visible."""
        try:
            # Odd, and queued before the space can be reused: a reader in another process that
            # still copies detects it.
            self._up.fill(self._word(place), place.generation + 1)
        finally:
            with self._lock:
                self._free(place)

    def _free(self, place: Place) -> None:
        start = place.offset - BLOCK_HEADER_BYTES
        self._free_list.free_range(start, self.allocated_bytes(place.size_bytes))

    @override
    def stats(self) -> TierStats:
        with self._lock:
            used_bytes = 0 if self._closed else self._free_list.used_bytes
            chunks, reservations = len(self._sealed), len(self._reserved)
            return TierStats(self.capacity_bytes, used_bytes, chunks, reservations)

    @override
    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._sealed.clear()
            self._reserved.clear()
        arena, self.memory = self.memory, torch.empty(0, dtype=torch.uint8)
        with suppress(TierUnavailableError):  # a failed device has no work queued
            for stream in (self._up, self._down):
                stream.record().synchronize()
        with suppress(TierUnavailableError):
            self.device.release(arena)
