"""An EncryptedTier: another tier, of which the medium sees frames encrypted only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from typing_extensions import override

from kvstore.proto.buffers import Bytes, as_bytes, copy_bytes
from kvstore.proto.errors import ChunkCorruptError, InvalidRequestError, TierUnavailableError
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.tiers.at_rest import (
    CELL_BYTES,
    HEADER_BYTES,
    TAG_BYTES,
    AtRestKeys,
    Cell,
    Envelope,
    UnknownEpochError,
    cells,
    frame_bytes_of,
    largest_frame_bytes,
    sealed_bytes,
)
from kvstore.tiers.base import DEFAULT_TENANT, Reservation, Tier, TierStats

READ_CELLS = 4
"""Read at once: a megabyte, which a core's cache still holds when it is decrypted."""


@dataclass(slots=True, eq=False)
class _Draft:
    """A reserved frame. ``frame`` holds what was written in pieces; None once all was sent."""

    inner: Reservation
    tenant: str
    frame: Bytes | None = None
    is_sent: bool = False


class EncryptedTier(Tier):
    """*inner*, encrypted with *keys*. Sizes are those of frames; slack covers what is added.

    What does not open raises ChunkCorruptError, to be quarantined like any damage. What is of an
    epoch whose key is gone, or was never encrypted, is corrupt too, but absent on a medium that
    others share, who may have the key. Files with frames are shared with nobody.
    """

    def __init__(self, inner: Tier, keys: AtRestKeys) -> None:
        self.inner = inner
        self._keys = keys
        # What the Tier promises as attributes is the inner tier's.
        self.name = inner.name  # type: ignore[misc]
        self.survives_restart = inner.survives_restart  # type: ignore[misc]
        self.shared = inner.shared  # type: ignore[misc]
        self.reads_ahead = inner.reads_ahead  # type: ignore[misc]
        self.shows_files = False
        self.capacity_bytes = inner.capacity_bytes
        self.dropped_rows = inner.dropped_rows

    def __repr__(self) -> str:
        return f"EncryptedTier({self.inner!r})"

    @property
    @override
    def trouble(self) -> str:
        return self.inner.trouble

    @override
    def allocated_bytes(self, size_bytes: int) -> int:
        if size_bytes < 1:
            raise InvalidRequestError("size_bytes", size_bytes, "give a positive size")
        return self.inner.allocated_bytes(sealed_bytes(size_bytes))

    @override
    def max_frame_bytes(self) -> int:
        return largest_frame_bytes(self.inner.max_frame_bytes())

    # --- writing

    @override
    def reserve(self, info: ChunkInfo, tenant: str = DEFAULT_TENANT) -> Reservation:
        if info.size_bytes < 1:
            raise InvalidRequestError("size_bytes", info.size_bytes, "a frame has bytes")
        sealed = replace(info, size_bytes=sealed_bytes(info.size_bytes))
        inner = self.inner.reserve(sealed, tenant)
        return Reservation(info, tenant, inner.reserved_bytes, _Draft(inner, tenant))

    @override
    def write(self, reservation: Reservation, offset: int, data: Bytes) -> None:
        draft, size = _draft(reservation), reservation.info.size_bytes
        if not 0 <= offset <= size - len(data):
            raise InvalidRequestError(
                "offset", (offset, len(data)), f"stay within the frame's {size} bytes"
            )
        if len(data) == size and draft.frame is None:
            self._send(reservation, draft, data)
            draft.is_sent = True
            return
        self.inner.write(draft.inner, 0, np.zeros(0, np.uint8))  # is it still to be had?
        if draft.is_sent and len(data):
            fix = "all of the frame was written, and is encrypted"
            raise InvalidRequestError("offset", (offset, len(data)), fix)
        if draft.frame is None and len(data):
            draft.frame = np.zeros(size, np.uint8)
        if draft.frame is not None:
            copy_bytes(draft.frame[offset : offset + len(data)], data)

    def _send(self, reservation: Reservation, draft: _Draft, frame: Bytes) -> None:
        key = reservation.info.key
        try:
            envelope = self._keys.new(key, len(frame), draft.tenant)
        except UnknownEpochError as error:
            raise TierUnavailableError(self.name, str(error)) from None
        room = np.empty(CELL_BYTES, np.uint8)
        room[:HEADER_BYTES] = as_bytes(envelope.header)
        for cell in cells(len(frame)):
            begin = HEADER_BYTES if not cell.number else 0
            end = begin + cell.stop - cell.start + TAG_BYTES
            envelope.seal(cell, frame[cell.start : cell.stop], room[begin:end])
            self.inner.write(draft.inner, cell.place - begin, room[:end])

    @override
    def seal(self, reservation: Reservation, *, durable: bool = False) -> bool:
        draft = _draft(reservation)
        if not draft.is_sent:
            size = reservation.info.size_bytes
            frame = draft.frame if draft.frame is not None else np.zeros(size, np.uint8)
            try:
                self._send(reservation, draft, frame)
            except TierUnavailableError:
                self.inner.abort(draft.inner)
                raise
            draft.frame, draft.is_sent = None, True
        return self.inner.seal(draft.inner, durable=durable)

    @override
    def abort(self, reservation: Reservation) -> None:
        self.inner.abort(_draft(reservation).inner)

    # --- reading

    @override
    def read(
        self, key: ChunkKey, out: Bytes, offset: int = 0, verifier: FrameVerifier | None = None
    ) -> bool:
        return self._read(key, [(offset, out)], verifier)

    @override
    def read_batch(self, key: ChunkKey, ranges: Sequence[tuple[int, Bytes]]) -> bool:
        return self._read(key, ranges, None)

    def _read(
        self, key: ChunkKey, ranges: Sequence[tuple[int, Bytes]], verifier: FrameVerifier | None
    ) -> bool:
        (info,) = self.find([key])
        if info is None:
            return False
        size = info.size_bytes
        for offset, out in ranges:
            if not 0 <= offset <= size - len(out):
                raise InvalidRequestError(
                    "offset", (offset, len(out)), f"stay within the frame's {size} bytes"
                )
        opener = _Opener(self, key, size)
        for offset, out in ranges:
            for group in _groups(size, offset, len(out)):
                if not opener.fill(group, out, offset):
                    return False
                if verifier is not None:
                    verifier.update(min(group[-1].stop, len(out)))
        return True

    def opened(self, header: bytes, key: ChunkKey, frame_bytes: int) -> Envelope | None:
        """Return the envelope of a header that was read; None for one that is others' to open.

        Raises ChunkCorruptError.
        """
        try:
            return self._keys.known(header, key, frame_bytes)
        except UnknownEpochError as error:
            if self.shared:
                return None
            raise ChunkCorruptError(key, str(error)) from None

    @override
    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        self.inner.prefetch(keys)

    # --- knowing

    @override
    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        return [info and _plain(info) for info in self.inner.find(keys)]

    @override
    def scan(self) -> Iterator[ChunkInfo]:
        for sealed in self.inner.scan():
            info = _plain(sealed)
            if info is not None:
                yield info

    @override
    def delete(self, key: ChunkKey) -> bool:
        return self.inner.delete(key)

    @override
    def stats(self) -> TierStats:
        return self.inner.stats()

    @override
    def residents(self, key: ChunkKey) -> list[ChunkKey]:
        return self.inner.residents(key)

    @override
    def in_the_way(self, key: ChunkKey, size_bytes: int, tenant: str) -> list[ChunkKey]:
        return self.inner.in_the_way(key, sealed_bytes(size_bytes), tenant)

    @override
    def tenant_of(self, key: ChunkKey) -> str:
        return self.inner.tenant_of(key)

    @override
    def flush(self) -> None:
        self.inner.flush()

    @override
    def close(self) -> None:
        self.inner.close()


class _Opener:
    """Reads and decrypts the cells of one frame, for one reader."""

    def __init__(self, tier: EncryptedTier, key: ChunkKey, frame_bytes: int) -> None:
        self._tier = tier
        self._key = key
        self._frame_bytes = frame_bytes
        self._envelope: Envelope | None = None
        self._header: Bytes = np.empty(HEADER_BYTES, np.uint8)
        self._room: Bytes = np.empty(READ_CELLS * CELL_BYTES, np.uint8)
        self._whole: Bytes = np.empty(0, np.uint8)

    def fill(self, group: Sequence[Cell], out: Bytes, offset: int) -> bool:
        """Put what *group* has of *out*, which begins at *offset* of the frame, in its place.

        False when it is not there, or others' to open. Raises ChunkCorruptError.
        """
        first, last = group[0].place, group[-1].place
        size = last - first + group[-1].stop - group[-1].start + TAG_BYTES
        sealed = self._room[:size]
        ranges = [(first, sealed)]
        if self._envelope is None:
            ranges.insert(0, (0, self._header))
        if not self._tier.inner.read_batch(self._key, ranges):
            return False
        if self._envelope is None:
            header = self._header.tobytes()
            self._envelope = self._tier.opened(header, self._key, self._frame_bytes)
            if self._envelope is None:
                return False
        for cell in group:
            begin = cell.place - first
            body = sealed[begin : begin + cell.stop - cell.start + TAG_BYTES]
            self._open(self._envelope, cell, body, out, offset)
        return True

    def _open(self, envelope: Envelope, cell: Cell, body: Bytes, out: Bytes, offset: int) -> None:
        start, stop = cell.start - offset, cell.stop - offset
        if start >= 0 and stop <= len(out):
            is_right = envelope.open(cell, body, out[start:stop])
        else:
            if not len(self._whole):
                self._whole = np.empty(CELL_BYTES, np.uint8)
            whole = self._whole[: stop - start]
            is_right = envelope.open(cell, body, whole)
            if is_right:
                begin, end = max(0, start), min(stop, len(out))
                copy_bytes(out[begin:end], whole[begin - start : end - start])
        if not is_right:
            raise ChunkCorruptError(self._key, "what lies there does not decrypt")


def _groups(frame_bytes: int, offset: int, size: int) -> Iterator[list[Cell]]:
    """Yield the cells of a range, a few at a time."""
    group: list[Cell] = []
    for cell in cells(frame_bytes, offset, offset + size):
        group.append(cell)
        if len(group) == READ_CELLS:
            yield group
            group = []
    if group:
        yield group


def _plain(info: ChunkInfo) -> ChunkInfo | None:
    """Return *info* with the size of its frame; None for one of a size that none has."""
    size = frame_bytes_of(info.size_bytes)
    return replace(info, size_bytes=size) if size else None


def _draft(reservation: Reservation) -> Any:
    if not isinstance(reservation.place, _Draft):
        raise InvalidRequestError("reservation", reservation.info.key.hex(), "is another tier's")
    return reservation.place
