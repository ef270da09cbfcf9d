"""The lossless codec: blocks of byte planes with sieved exponents. Lossless for every dtype.

The exponents of KV tensors are few and uneven, their signs and mantissas noise. The planes are
split block by block, while a block is in cache; only the exponents are coded, by a sieve or, if
that is shorter, by zstd, and the noise is stored uncompressed. docs/format.md specifies the
segment.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import zstandard
from numpy import ascontiguousarray as contiguous
from numpy.typing import NDArray

from kvstore.codecs.base import Codec, Part
from kvstore.proto.buffers import Bytes, address, addresses
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.native import loops
from kvstore.proto.types import Accuracy, Component, DType

Words: TypeAlias = NDArray[Any]
"""A flat, contiguous array of u8, u16 or u32, at any address."""

Planes: TypeAlias = "Sequence[Bytes] | NDArray[np.uint8]"
"""Flat arrays of bytes, one per byte of a word, plane 0 first."""

PASSES = 5
VALUES = 3
"""Byte values that a pass codes."""
GROUP = 64
"""Bytes whose bits are stored together: 64 low ones, then 64 high ones."""
GROUP_BYTES = 16
PAD_BYTES = GROUP
"""Readable and writable bytes that the loops need after those of a pass."""

_HEAD = struct.Struct(f"<{PASSES * VALUES}BB{PASSES}I")

_SAMPLE_SHIFT = 11
"""About 2^11 bytes are sampled at an odd distance, as heads have even numbers of channels."""
_MAX_COMMON = (2, 3)
"""Share of the two commonest values above which an entropy coder is much shorter."""
_MAX_BITS = (33, 10)
"""Bits per byte above which the sieve's values cover too few bytes."""


def kind_of(dtype: DType) -> str:
    """Return how words of *dtype* are split: its name, or ``bytes`` for one-byte types."""
    return dtype.name if dtype.item_bytes > 1 else "bytes"


class Loops:
    """The loops of one path, with the checks of their arguments. Thread-safe."""

    def __init__(self, path: str | None = None) -> None:
        self._native = loops(path)

    def split(self, kind: str, words: Words, planes: Planes) -> None:
        """Split *words* of *kind* into *planes*, both flat."""
        _check_planes(words, planes)
        if kind == "bytes":
            np.copyto(planes[0], words)
            return
        split = getattr(self._native, f"split_{kind}")
        split(address(words), *map(_out_address, planes), words.size)

    def join(self, kind: str, words: Words, planes: Planes) -> None:
        """Join *planes* into *words*, the inverse of ``split``."""
        _check_planes(words, planes)
        if kind == "bytes":
            np.copyto(words, planes[0])
            return
        join = getattr(self._native, f"join_{kind}")
        join(_out_address(words), *addresses(*planes), words.size)

    def squeeze(self, data: Bytes, values: Bytes, scratch: Bytes, out: Bytes) -> list[int] | None:
        """Sieve *data* into *out*; return the bytes left after each pass, None if *out* is full."""
        _check_sieve(data, values, scratch)
        given, kept, counts = contiguous(data), contiguous(values), np.empty(PASSES, np.int64)
        is_done = self._native.sieve_squeeze(
            address(given), len(given), address(kept), address(scratch), address(out),
            len(out), address(counts),
        )  # fmt: skip
        return counts.tolist() if is_done else None

    def spread(
        self, body: Bytes, values: Bytes, counts: list[int], scratch: Bytes, out: Bytes
    ) -> bool:
        """Undo ``squeeze``; return whether every pass matches its bits."""
        _check_sieve(out, values, scratch)
        if body_bytes(len(out), counts) != len(body) or max(counts) > len(out):
            return False
        given, kept, each = contiguous(body), contiguous(values), np.array(counts, np.int64)
        arrays = (kept, each, scratch, out)
        found = self._native.sieve_spread(address(given), len(given), *addresses(*arrays), len(out))
        return bool(found)


def _out_address(data: NDArray[Any]) -> int:
    """Return the address of *data* for writing. Raises ValueError if it is read-only."""
    if not data.flags.writeable:
        raise ValueError("assignment destination is read-only")
    return address(data)


def _check_planes(words: Words, planes: Planes) -> None:
    sizes = {words.size, *(plane.size for plane in planes)}
    if len(sizes) > 1 or not all(each.flags.c_contiguous for each in (words, *planes)):
        raise ValueError(f"planes of one size, C-ordered; not {sorted(sizes)}")


def _check_sieve(data: Bytes, values: Bytes, scratch: Bytes) -> None:
    if len(scratch) < 2 * (len(data) + PAD_BYTES) or len(values) != PASSES * VALUES:
        raise ValueError(f"{len(scratch)} bytes of scratch and {len(values)} values")


# --- sieved planes


def scratch_for(items: int) -> Bytes:
    """Return the loops' scratch memory for planes of at most *items* bytes."""
    return np.empty(2 * (items + PAD_BYTES), np.uint8)


def body_bytes(items: int, counts: list[int]) -> int:
    """Return the size of a sieved plane after its head: passes, then the remaining bytes."""
    entering = [items, *counts[:-1]]
    return sum(GROUP_BYTES * -(-count // GROUP) for count in entering) + counts[-1]


def commonest(plane: Bytes) -> Bytes | None:
    """Return the values for the passes to code, or None if another code is shorter.

    Uses a sample and integers only, so that all machines choose alike.
    """
    counts = np.bincount(plane[:: len(plane) >> _SAMPLE_SHIFT | 1], minlength=256)
    order = np.argsort(-counts, kind="stable")[: PASSES * VALUES]
    found = counts[order]
    total = int(counts.sum())
    left = [total - int(found[: VALUES * k].sum()) for k in range(PASSES + 1)]
    bits = 2 * sum(left[:-1]) + 8 * left[-1]
    common, of = _MAX_COMMON
    most, each = _MAX_BITS
    if int(found[:2].sum()) * of > common * total or bits * each > most * total:
        return None
    return order.astype(np.uint8)


def pack_sieved(plane: Bytes, loops: Loops, scratch: Bytes, out: Bytes) -> Bytes | None:
    """Return *plane* sieved, at the start of *out*; None if that does not pay.

    The size of *out* is the largest result that pays.
    """
    values = commonest(plane)
    if values is None or len(out) <= _HEAD.size:
        return None
    counts = loops.squeeze(plane, values, scratch, out[_HEAD.size :])
    if counts is None:
        return None
    _HEAD.pack_into(out.data, 0, *values.tolist(), 0, *counts)
    return out[: _HEAD.size + body_bytes(len(plane), counts)]


def unpack_sieved(data: Bytes, loops: Loops, scratch: Bytes, out: Bytes) -> None:
    """Fill *out* from the sieved plane *data*. Raises InvalidFrameError."""
    if len(data) < _HEAD.size:
        raise InvalidFrameError("sieved plane", len(data), f"its head has {_HEAD.size} bytes")
    zero, *counts = _HEAD.unpack(data[: _HEAD.size].tobytes())[PASSES * VALUES :]
    if zero:
        raise InvalidFrameError("sieved plane", zero, "a byte that is 0")
    if any(after > before for before, after in zip([len(out), *counts], counts, strict=False)):
        raise InvalidFrameError("sieved plane", counts, f"passes of {len(out)} bytes leave fewer")
    if _HEAD.size + body_bytes(len(out), counts) != len(data):
        raise InvalidFrameError("sieved plane", len(data), f"its passes leave {counts}")
    values = data[: PASSES * VALUES]
    if not loops.spread(data[_HEAD.size :], values, counts, scratch, out):
        raise InvalidFrameError("sieved plane", counts, "it does not match its bits")


BLOCK_BYTES = 1 << 19
"""Decoded bytes of a block, so that it, planes and zstd's tables fit the second-level cache."""

_SIZE_BYTES = 4
_WITH_EXPONENTS = frozenset({DType.bfloat16, DType.float32})

_SAMPLES, _SAMPLE_BYTES = 8, 1024
"""Samples of a noise plane that are compressed first, so that noise costs next to nothing."""
_SIEVED = 1 << 31
"""Flag in the size of a sieved plane."""
_MAX_SIEVED_ITEMS = BLOCK_BYTES // 2
"""Larger blocks, which are single rows, are not sieved, so that scratch stays fixed."""
_MIN_GAIN = 32
"""A plane is coded if that saves at least one part in this many."""

Stored: TypeAlias = "tuple[Bytes, bool]"
"""A plane's stored bytes, and whether they are sieved."""

_WINDOW_LOG = 17


class _Contexts(threading.local):
    """One pair of contexts per thread: libzstd's are not thread-safe, and costly to create."""

    def __init__(self) -> None:
        # Hashes of seven bytes find almost no match in noise, as intended: the literals then go
        # straight to the entropy coder.
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=_WINDOW_LOG,
            write_content_size=1,
        )  # fmt: skip
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)


_CONTEXTS = _Contexts()


class _Scratch(threading.local):
    """A thread's scratch memory, allocated once instead of for each block."""

    def __init__(self) -> None:
        self.exponents = np.empty(_MAX_SIEVED_ITEMS, np.uint8)
        self.sieve = scratch_for(_MAX_SIEVED_ITEMS)


_SCRATCH = _Scratch()


class LosslessCodec(Codec):
    """Exact, about two thirds of the size for bfloat16, much faster than zstd over the words.

    *loops* default to those of the fastest path; all give the same bytes.
    """

    name = "lossless"
    codec_id = 2
    revision = 2
    accuracy = Accuracy.exact

    def __init__(self, loops: Loops | None = None) -> None:
        self._loops = loops or Loops()

    def max_segment_bytes(self, component: Component) -> int:
        """Upper bound of one encoded layer: the plane table and every plane uncompressed."""
        return _table_bytes(component) + component.layer_bytes

    def encode_segment(self, parts: Sequence[Part], component: Component, out: Bytes) -> int:
        """Encode one layer into *out* and return the number of bytes used."""
        width, kind = component.dtype.item_bytes, kind_of(component.dtype)
        loops = self._loops
        has_exponents = component.dtype in _WITH_EXPONENTS
        sizes: list[int] = []
        end = _table_bytes(component)
        for part in parts:
            bits = contiguous(part).view(f"<u{width}").reshape(-1, component.head_dim)
            for rows in _row_blocks(component):
                words = bits[rows].reshape(-1)
                buffer = out[end : end + words.nbytes]
                planes = list(buffer.reshape(width, -1)[::-1])  # the exponents are last
                is_sieved = has_exponents and len(words) <= _MAX_SIEVED_ITEMS
                if is_sieved:
                    planes[0] = _SCRATCH.exponents[: len(words)]
                loops.split(kind, words, planes)
                found = _store_planes(planes, buffer, has_exponents, loops if is_sieved else None)
                sizes += found
                end += sum(size & ~_SIEVED for size in found)
        table = np.array(sizes, "<u4").view(np.uint8)
        np.copyto(out[: len(table)], table)
        return end

    def decode_segment(self, data: Bytes, component: Component, out: Sequence[Part]) -> None:
        """Decode one verified layer into *out*. Raises InvalidFrameError on bad contents."""
        width, kind = component.dtype.item_bytes, kind_of(component.dtype)
        loops = self._loops
        blocks = _blocks(data, component)
        for part in out:
            buffer = part if part.flags.c_contiguous else np.empty(part.shape, part.dtype)
            bits = buffer.view(f"<u{width}").reshape(-1, component.head_dim)
            for rows in _row_blocks(component):
                words = bits[rows].reshape(-1)
                loops.join(kind, words, _plain_planes(next(blocks), len(words), loops))
            if buffer is not part:
                np.copyto(part, buffer)


def _block_rows(component: Component) -> int:
    """Return the most rows of a block: as many as fit BLOCK_BYTES, at least one.

    A part has kv_heads x tokens rows of head_dim elements.
    """
    return max(1, BLOCK_BYTES // (component.dtype.item_bytes * component.head_dim))


@lru_cache(maxsize=16)
def _row_blocks(component: Component) -> tuple[slice, ...]:
    """Return the rows of each block of a part."""
    rows, step = component.kv_heads * component.tokens, _block_rows(component)
    return tuple(slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _table_bytes(component: Component) -> int:
    blocks = -(-component.kv_heads * component.tokens // _block_rows(component))
    return _SIZE_BYTES * component.dtype.item_bytes * component.parts * blocks


def _store_planes(
    planes: Sequence[Bytes], buffer: Bytes, has_exponents: bool, loops: Loops | None
) -> list[int]:
    """Write *planes* (w times items), last first, to *buffer*; return their rows of the table.

    Uncoded planes are already in *buffer*, except plane 0 if it is to be sieved.
    """
    sizes: list[int] = []
    end = 0
    for index, plane in reversed(list(enumerate(planes))):
        items = len(plane)
        if index == 0 and loops is not None:
            less = buffer[end : end + items - items // _MIN_GAIN]
            found = pack_sieved(plane, loops, _SCRATCH.sieve, less)
            if found is not None:
                sizes.append(len(found) | _SIEVED)
                break
        packed = _compress(plane, index > 0 or not has_exponents)
        stored = plane if packed is None else packed
        is_there = packed is None and end == len(sizes) * items and (index or loops is None)
        if not is_there:
            np.copyto(buffer[end : end + len(stored)], stored)
        sizes.append(len(stored))
        end += len(stored)
    return sizes


def _plain_planes(block: Sequence[Stored], items: int, loops: Loops) -> list[Bytes]:
    """Return the planes of a block, plane 0 first. Raises InvalidFrameError."""
    planes = []
    for stored, is_sieved in reversed(block):
        if is_sieved:
            plane = _SCRATCH.exponents[:items]
            unpack_sieved(stored, loops, _SCRATCH.sieve, plane)
        else:
            plane = stored if len(stored) == items else _inflate(stored, items)
        planes.append(plane)
    return planes


def _compress(plane: Bytes, is_noise: bool) -> Bytes | None:
    """Return *plane* compressed; None if that saves too little."""
    if is_noise and len(plane) > 4 * _SAMPLES * _SAMPLE_BYTES:
        rows = plane[: len(plane) // _SAMPLES * _SAMPLES].reshape(_SAMPLES, -1)
        if _deflate(np.ascontiguousarray(rows[:, :_SAMPLE_BYTES]).reshape(-1)) is None:
            return None
    return _deflate(plane)


def _blocks(data: Bytes, component: Component) -> Iterator[list[Stored]]:
    """Return the stored planes of each block, last first, after checking all lengths."""
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
    for number, at in enumerate(_row_blocks(component) * component.parts):
        items, block = (at.stop - at.start) * component.head_dim, []
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
    """Return *data* as one zstd frame; None if that saves too little."""
    packed = _CONTEXTS.compressor.compress(data.data)
    if len(packed) >= len(data) - len(data) // _MIN_GAIN:
        return None
    return np.frombuffer(packed, np.uint8)


def _inflate(data: Bytes, size: int) -> Bytes:
    """Return the *size* bytes in the zstd frame *data*, checking its header first."""
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
