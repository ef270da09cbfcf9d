"""Views: leased chunks in the server's memory, read without a copy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from kvstore.client.chunk import to_torch
from kvstore.codecs.base import ChunkTensors, Part
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidRequestError,
    KVStoreError,
    is_whole,
)
from kvstore.proto.frame import (
    ALIGN_BYTES,
    KEY_OFFSET,
    FrameHeader,
    check_frame,
    header_bytes,
    parse_header,
    raw_frame_bytes,
)
from kvstore.proto.types import KEY_BYTES, ChunkKey, KVLayout
from kvstore.proto.unix_socket import NOWHERE, PLACE_ROW, ROW_BYTES, Reach, unpack_places

if TYPE_CHECKING:
    import torch

    from kvstore.client.transports.shared_memory import SlabMap, Slabs

MEMORY = int(Reach.memory)
WORD_BYTES = 8
_KEY_WORDS = np.arange(KEY_OFFSET // WORD_BYTES, (KEY_OFFSET + KEY_BYTES) // WORD_BYTES)
"""Offsets of the key in a frame, in words."""


class Layers(NamedTuple):
    """The layers of one component of a raw frame: byte offsets, dtype, and shape: (parts, kv_heads,
    tokens, head_dim), or what the kind has instead.
    """

    starts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


@dataclass(frozen=True, slots=True, eq=False)
class RawGeometry:
    """The location of the tensors in a raw frame; it depends on *layout* alone."""

    layout: KVLayout
    frame_bytes: int
    components: tuple[Layers, ...]


@lru_cache(maxsize=64)
def geometry_of(layout: KVLayout) -> RawGeometry:
    """Return the one geometry of *layout*."""
    components, end = [], header_bytes(layout)
    for component in layout.components:
        step = -(-component.layer_bytes // ALIGN_BYTES) * ALIGN_BYTES
        starts = tuple(range(end, end + component.layers * step, step))
        shape = (component.parts, *component.shape)
        components.append(Layers(starts, shape, np.dtype(f"<u{component.dtype.item_bytes}")))
        end += component.layers * step
    return RawGeometry(layout, raw_frame_bytes(layout), tuple(components))


class ChunkView:
    """Read-only tensors of one chunk, valid while its lease is held.

    The server verified the frame when it was stored, and it cannot be written to since. Call
    ``confirm`` after reading if the lease may have ended meanwhile. ``verify`` compares every byte
    with its checksum.
    """

    __slots__ = ("_generation", "_geometry", "_slab", "_start", "key")

    def __init__(
        self, key: ChunkKey, slab: SlabMap, start: int, generation: int, geometry: RawGeometry
    ) -> None:
        """View the raw frame of *key* at byte *start* of *slab*."""
        self.key = key
        self._slab = slab
        self._start = start
        self._generation = generation
        self._geometry = geometry

    @property
    def layout(self) -> KVLayout:
        """The layout of the tensors."""
        return self._geometry.layout

    @property
    def frame(self) -> Bytes:
        """The frame's bytes, read-only."""
        return self._slab.data[self._start : self._start + self._geometry.frame_bytes]

    def layer(self, index: int, component: int = 0) -> Part:
        """Return one layer: (parts, kv_heads, tokens, head_dim), the parts being K and V.

        Unsigned integers of the dtype's size, read-only, in the server's memory. Raises
        InvalidRequestError for a layer that the chunk has not.
        """
        layers = self._geometry.components[component]
        if not is_whole(index) or not 0 <= index < len(layers.starts):
            raise InvalidRequestError("index", index, f"the chunk has {len(layers.starts)} layers")
        offset = self._start + layers.starts[index]
        return np.ndarray(layers.shape, layers.dtype, self._slab.bytes, offset)

    def torch_layer(self, index: int, component: int = 0) -> torch.Tensor:
        """Return one layer as a torch tensor of the chunk's dtype, bfloat16 included.

        torch has no read-only memory: writing to it crashes the process (SIGSEGV).
        """
        layer = self.layer(index, component)
        memory = (ctypes.c_uint8 * layer.nbytes).from_address(layer.ctypes.data)
        memory.slab = self._slab  # type: ignore[attr-defined] # mapped for as long as this lives
        writable = np.frombuffer(memoryview(memory), layer.dtype).reshape(layer.shape)
        return to_torch(writable, self.layout.components[component].dtype)

    def tensors(self) -> ChunkTensors:
        """Return every layer: components, then layers, then parts."""
        return [
            [list(self.layer(index, number)) for index in range(component.layers)]
            for number, component in enumerate(self.layout.components)
        ]

    def confirm(self) -> None:
        """Raise LeaseExpiredError if the memory was reused: the bytes read are not the chunk's."""
        self._slab.confirm(self._start, self._generation)

    def verify(self) -> FrameHeader:
        """Compare every byte with its checksum. Raises ChunkCorruptError, LeaseExpiredError."""
        try:
            return check_frame(self.frame, self.key)
        finally:
            self.confirm()


class LeasedViews:
    """Returns the view of each leased chunk by its index. *rows* are the places of the leased
    *keys*, as packed by the server; *whole* is the geometry of most frames. Raises
    InvalidRequestError when the rows are cut.
    """

    __slots__ = ("_found", "_keys", "_rows", "_slabs", "_whole")

    def __init__(
        self, slabs: Slabs, whole: RawGeometry, rows: bytes, keys: Sequence[ChunkKey]
    ) -> None:
        if len(rows) % ROW_BYTES:
            raise InvalidRequestError("places", len(rows), f"send rows of {ROW_BYTES} bytes")
        self._slabs = slabs
        self._whole = whole
        self._rows = rows
        self._keys = keys
        self._found: list[tuple[SlabMap, int, int] | None] = []
        """Slab, offset and generation of each chunk that was checked to be at its place."""

    def __call__(self, index: int) -> ChunkView | None:
        """Return the view of chunk *index*; None when it is not in shared memory.

        Raises LeaseExpiredError when the memory was reused, ChunkCorruptError when it holds another
        chunk, InvalidRequestError for a place outside its slab, InvalidFrameError, and
        TierUnavailableError when the server does not give the slab.
        """
        if not self._found:
            self._found = self._check_all()
        found = self._found[index]
        if found is None:
            return self._check_one(index)
        slab, start, generation = found
        if slab.words[start // WORD_BYTES - 1] != generation:
            slab.confirm(start, generation)  # raises
        return ChunkView(self._keys[index], slab, start, generation, self._whole)

    def _check_one(self, index: int) -> ChunkView | None:
        places, key, geometry = unpack_places(self._rows), self._keys[index], self._whole
        place = places[index] if index < len(places) else NOWHERE
        if place.reach != MEMORY:
            return None
        slab = self._slabs.slab_of(place)
        slab.confirm(place.offset, place.generation)
        frame = slab.data[place.offset : place.offset + place.size_bytes]
        if frame[KEY_OFFSET : KEY_OFFSET + KEY_BYTES].tobytes() != key:
            raise ChunkCorruptError(key, "its place holds another chunk")
        # The server accepts frames only of the session's layout, with layers of full size: a frame
        # of another length than a whole chunk is the last of a prompt.
        if len(frame) != geometry.frame_bytes:
            geometry = geometry_of(parse_header(frame).layout)
        if len(frame) != geometry.frame_bytes:
            raise ChunkCorruptError(key, f"{len(frame)} bytes of {geometry.frame_bytes}")
        return ChunkView(key, slab, place.offset, place.generation, geometry)

    def _check_all(self) -> list[tuple[SlabMap, int, int] | None]:
        """Check the places of all whole chunks, a slab at a time: one by one takes twice as long.
        With a wrong one, none of its slab is found: ``_check_one`` reports only the wrong one.
        """
        found: list[tuple[SlabMap, int, int] | None] = [None] * len(self._keys)
        rows = np.frombuffer(self._rows, PLACE_ROW)[: len(self._keys)]
        is_usual = rows["size_bytes"] == self._whole.frame_bytes
        is_usual &= rows["reach"] == MEMORY
        for number in set(rows["number"][is_usual].tolist()):
            with suppress(KVStoreError):
                slab = self._slabs.slab(number)
                here = np.flatnonzero(is_usual & (rows["number"] == number))
                indices, starts = here.tolist(), rows["offset"][here].tolist()
                keys = b"".join([self._keys[index] for index in indices])
                if not _hold(slab, starts, self._whole.frame_bytes, keys):
                    continue
                generations = rows["generation"][here].tolist()
                for at, start, word in zip(indices, starts, generations, strict=True):
                    found[at] = (slab, start, word)
        return found


def _hold(slab: SlabMap, starts: Sequence[int], size_bytes: int, keys: bytes) -> bool:
    """Whether each of *starts* can begin a frame of *size_bytes*, and all have their *keys*."""
    last = len(slab.words) * WORD_BYTES - size_bytes
    if min(starts) < WORD_BYTES or max(starts) > last:
        return False
    at = np.array(starts, np.intp)
    if int(np.bitwise_or.reduce(at)) % WORD_BYTES:
        return False
    words = np.frombuffer(slab.words, np.uint64)
    found: bytes = words[(at >> 3)[:, None] + _KEY_WORDS].tobytes()
    return found == keys


View: TypeAlias = Callable[[int], ChunkView | None]
"""From a leased chunk's index to its view; None if its memory is not shared."""
