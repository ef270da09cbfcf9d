"""The zplane codec: blocks of byte planes, the exponents sieved. Lossless for every dtype.

The exponents of KV tensors are few and uneven, their signs and mantissas noise. Split apart
block by block, while a block is in cache, the exponents alone are coded, by a sieve or by zstd
where that is shorter, and the noise is stored as it is. The segment's layout stands in
docs/format.md.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import zstandard

from kvstore.codecs.base import Codec, Part
from kvstore.codecs.planes import (
    Splitter,
    Words,
    best_splitter,
    block_count,
    flat_rows,
    gather_rows,
    kind_of,
    row_blocks,
    scatter_rows,
)
from kvstore.codecs.sieve import Sieve, native_sieve, pack_sieved, scratch_for, unpack_sieved
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import Accuracy, Component, DType

BLOCK_BYTES = 1 << 19
"""Decoded bytes of a block: block, planes and zstd's tables stay in the second-level cache."""

_SIZE_BYTES = 4
_WITH_EXPONENTS = frozenset({DType.bfloat16, DType.float32})

_SAMPLES, _SAMPLE_BYTES = 8, 1024
"""Pieces of a plane of noise that are tried first, so that noise costs next to nothing."""


_SIEVED = 1 << 31
"""Set in the size of a plane that is sieved."""
_MAX_SIEVED_ITEMS = BLOCK_BYTES // 2
"""Blocks of more elements, which are single rows, are not sieved, so that scratch stays fixed."""
_MIN_GAIN = 32
"""A plane is sieved when that saves at least one part in so many."""


Stored: TypeAlias = "tuple[Bytes, bool]"
"""A plane's bytes as they are stored, and whether they are sieved."""


_WINDOW_LOG = 17


class _Contexts(threading.local):
    """One pair of contexts a thread: libzstd's must not be shared, and making one is dear."""

    def __init__(self) -> None:
        # Hashing of seven bytes finds next to no match in noise, which is the point: the
        # literals then go straight to the entropy coder.
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=_WINDOW_LOG,
            write_content_size=1,
        )  # fmt: skip
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)


_CONTEXTS = _Contexts()


class _Rooms(threading.local):
    """A thread's scratch, so that no block has the memory behind it found anew."""

    def __init__(self) -> None:
        self.exponents = np.empty(_MAX_SIEVED_ITEMS, np.uint8)
        self.sieve = scratch_for(_MAX_SIEVED_ITEMS)


_ROOMS = _Rooms()


class ZplaneCodec(Codec):
    """Exact, about two thirds of the size for bfloat16, much faster than zstd over the words.

    *splitter_of* finds the splitter for a kind of words, *sieve_of* the sieve; their choice
    changes no byte.
    """

    name = "zplane"
    codec_id = 2
    revision = 2
    accuracy = Accuracy.exact

    def __init__(
        self,
        splitter_of: Callable[[str], Splitter] = best_splitter,
        sieve_of: Callable[[], Sieve] = native_sieve,
    ) -> None:
        self._splitter_of = splitter_of
        self._sieve_of = sieve_of

    def max_segment_bytes(self, component: Component) -> int:
        """Upper bound of one encoded layer: the plane table and every plane as it is."""
        return _table_bytes(component) + component.layer_bytes

    def encode_segment(self, parts: Sequence[Part], component: Component, out: Bytes) -> int:
        """Encode one layer into *out* and return how many bytes were used."""
        width = component.dtype.item_bytes
        splitter, sieve = self._splitter_of(kind_of(component.dtype)), self._sieve_of()
        scratch = _scratch(component)
        has_exponents = component.dtype in _WITH_EXPONENTS
        sizes: list[int] = []
        end = _table_bytes(component)
        for part in parts:
            bits = part.view(scratch.dtype)
            for start, stop in row_blocks(component, BLOCK_BYTES // width):
                words = flat_rows(bits, start, stop)
                if words is None:
                    words = gather_rows(bits, start, stop, scratch)
                room = out[end : end + words.nbytes]
                planes = list(room.reshape(width, -1)[::-1])  # the exponents come last
                is_sieved = has_exponents and len(words) <= _MAX_SIEVED_ITEMS
                if is_sieved:
                    planes[0] = _ROOMS.exponents[: len(words)]
                splitter.split(words, planes)
                found = _store_planes(planes, room, has_exponents, sieve if is_sieved else None)
                sizes += found
                end += sum(size & ~_SIEVED for size in found)
        table = np.array(sizes, "<u4").view(np.uint8)
        np.copyto(out[: len(table)], table)
        return end

    def decode_segment(self, data: Bytes, component: Component, out: Sequence[Part]) -> None:
        """Decode one verified layer into *out*. Raises InvalidFrameError on bad contents."""
        width = component.dtype.item_bytes
        splitter, sieve = self._splitter_of(kind_of(component.dtype)), self._sieve_of()
        scratch = _scratch(component)
        blocks = _blocks(data, component)
        for part in out:
            bits = part.view(scratch.dtype)
            for start, stop in row_blocks(component, BLOCK_BYTES // width):
                items = (stop - start) * component.head_dim
                planes = _plain_planes(next(blocks), items, sieve)
                words = flat_rows(bits, start, stop)
                if words is None:
                    splitter.join(scratch[:items], planes)
                    scatter_rows(bits, start, stop, scratch[:items])
                else:
                    splitter.join(words, planes)


@lru_cache(maxsize=16)
def _block_items(component: Component) -> tuple[int, ...]:
    """Return how many elements each block of a layer has."""
    blocks = row_blocks(component, BLOCK_BYTES // component.dtype.item_bytes)
    items = [(stop - start) * component.head_dim for start, stop in blocks]
    return tuple(items * component.parts)


def _table_bytes(component: Component) -> int:
    width = component.dtype.item_bytes
    blocks = component.parts * block_count(component, BLOCK_BYTES // width)
    return _SIZE_BYTES * width * blocks


def _scratch(component: Component) -> Words:
    items = max(component.head_dim, BLOCK_BYTES // component.dtype.item_bytes)
    items = min(items, component.part_bytes // component.dtype.item_bytes)
    return np.empty(items, f"<u{component.dtype.item_bytes}")


def _store_planes(
    planes: Sequence[Bytes], room: Bytes, has_exponents: bool, sieve: Sieve | None
) -> list[int]:
    """Write *planes* (w times items), last first, to *room*; return their rows of the table.

    Planes that cannot be coded lie in *room* already, but for the sieve's, which is plane 0.
    """
    sizes: list[int] = []
    end = 0
    for index, plane in reversed(list(enumerate(planes))):
        items = len(plane)
        if index == 0 and sieve is not None:
            less = room[end : end + items - items // _MIN_GAIN]
            found = pack_sieved(plane, sieve, _ROOMS.sieve, less)
            if found is not None:
                sizes.append(len(found) | _SIEVED)
                break
        packed = _compress(plane, index > 0 or not has_exponents)
        stored = plane if packed is None else packed
        is_there = packed is None and end == len(sizes) * items and (index or sieve is None)
        if not is_there:
            np.copyto(room[end : end + len(stored)], stored)
        sizes.append(len(stored))
        end += len(stored)
    return sizes


def _plain_planes(block: Sequence[Stored], items: int, sieve: Sieve) -> list[Bytes]:
    """Return the planes of a block, plane 0 first. Raises InvalidFrameError."""
    planes = []
    for stored, is_sieved in reversed(block):
        if is_sieved:
            plane = _ROOMS.exponents[:items]
            unpack_sieved(stored, sieve, _ROOMS.sieve, plane)
        else:
            plane = stored if len(stored) == items else _inflate(stored, items)
        planes.append(plane)
    return planes


def _compress(plane: Bytes, is_noise: bool) -> Bytes | None:
    """Return *plane* compressed, or None when that gains too little."""
    if is_noise and len(plane) > 4 * _SAMPLES * _SAMPLE_BYTES:
        rows = plane[: len(plane) // _SAMPLES * _SAMPLES].reshape(_SAMPLES, -1)
        if _deflate(np.ascontiguousarray(rows[:, :_SAMPLE_BYTES]).reshape(-1)) is None:
            return None
    return _deflate(plane)


def _blocks(data: Bytes, component: Component) -> Iterator[list[Stored]]:
    """Return the stored planes of each block, last first, once all lengths are checked."""
    width = component.dtype.item_bytes
    end = _table_bytes(component)
    if len(data) < end:
        raise InvalidFrameError("planes", len(data), f"their table has {end} bytes")
    rows = struct.unpack(f"<{end // _SIZE_BYTES}I", data[:end].tobytes())
    last = end + sum(row & ~_SIEVED for row in rows)
    if last != len(data):
        raise InvalidFrameError("planes", last, f"segment has {len(data)} bytes")
    may_sieve = component.dtype in _WITH_EXPONENTS
    planes = []
    for number, items in enumerate(_block_items(component)):
        block = []
        for index, row in enumerate(rows[number * width : (number + 1) * width], 1 - width):
            size, is_sieved = row & ~_SIEVED, row >= _SIEVED
            if size > items:
                raise InvalidFrameError("stored plane", size, "longer than the plane itself")
            if is_sieved and not (may_sieve and index == 0 and items <= _MAX_SIEVED_ITEMS):
                raise InvalidFrameError("sieved plane", -index, "only exponents are sieved")
            block.append((data[end : end + size], is_sieved))
            end += size
        planes.append(block)
    return iter(planes)


def _deflate(data: Bytes) -> Bytes | None:
    """Return *data* as one zstd frame, or None when that gains too little."""
    packed = _CONTEXTS.compressor.compress(data.data)
    if len(packed) >= len(data) - len(data) // _MIN_GAIN:
        return None
    return np.frombuffer(packed, np.uint8)


def _inflate(data: Bytes, size: int) -> Bytes:
    """Return the *size* bytes in the zstd frame *data*; its own claims are checked first."""
    try:
        claim = zstandard.get_frame_parameters(data.data)
        if claim.content_size != size:
            raise InvalidFrameError("plane", claim.content_size, f"must declare {size} bytes")
        if claim.window_size > max(size, 1 << _WINDOW_LOG):
            raise InvalidFrameError("window", claim.window_size, f"at most 2^{_WINDOW_LOG}")
        plain = _CONTEXTS.decompressor.decompress(
            data.data, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise InvalidFrameError("plane", len(data), str(error)) from None
    if len(plain) != size:
        raise InvalidFrameError("plane", len(plain), f"must hold {size} bytes")
    return np.frombuffer(plain, np.uint8)
