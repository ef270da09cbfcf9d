"""The zstd codec: byte planes, each compressed where that gains. Lossless for every dtype.

The exponents of KV tensors are few and uneven, their mantissas noise. Splitting words into
byte planes lets zstd's entropy coder see the exponents alone; noisy planes are stored as
they are. The segment's layout stands in docs/format.md.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import zstandard

from kvstore.codecs.base import Codec, Part
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.types import Component, DType, Fidelity

_PLANE = struct.Struct("<II")
_STORED, _ZSTD = 0, 1

_ROTATED = frozenset({DType.bfloat16, DType.float32})
"""Types whose exponent shares its byte with the sign: one bit to the left puts that right."""

_WINDOW_LOG = 17
_BOX_ITEMS = 1 << 16
"""Words rotated and split at a time: their scratch stays in the second-level cache."""

_SAMPLES, _SAMPLE_BYTES = 8, 2048
"""Pieces of a plane that are tried first, so that noise costs next to nothing."""

_MIN_GAIN = 32
"""A plane is compressed when that saves at least one part in so many."""


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


class ZstdCodec(Codec):
    """Exact, about two thirds of the size for bfloat16; for media slower than zstd itself."""

    name = "zstd"
    codec_id = 1
    revision = 1
    fidelity = Fidelity.exact

    def max_segment_bytes(self, component: Component) -> int:
        """Upper bound of one encoded layer: the plane table and every plane as it is."""
        return _PLANE.size * component.dtype.item_bytes + component.layer_bytes

    def encode_segment(self, parts: Sequence[Part], component: Component, out: Bytes) -> int:
        """Encode one layer into *out* and return how many bytes were used."""
        planes = _split(parts, component, out)
        end = _PLANE.size * len(planes)
        for index, plane in enumerate(planes):
            packed = _compress(plane)
            method, data = (_STORED, plane) if packed is None else (_ZSTD, packed)
            if method == _ZSTD or end != _PLANE.size * len(planes) + index * len(plane):
                np.copyto(out[end : end + len(data)], data)
            _PLANE.pack_into(out.data, _PLANE.size * index, method, len(data))
            end += len(data)
        return end

    def decode_segment(self, data: Bytes, component: Component, out: Sequence[Part]) -> None:
        """Decode one verified layer into *out*. Raises InvalidFrameError on bad contents."""
        plane_bytes = component.layer_bytes // component.dtype.item_bytes
        planes = [
            stored if method == _STORED else inflate(stored, plane_bytes)
            for method, stored in _read_table(data, component.dtype.item_bytes, plane_bytes)
        ]
        _join(planes, component, out)


def _split(parts: Sequence[Part], component: Component, out: Bytes) -> list[Bytes]:
    """Write the byte planes of *parts* behind the table in *out* and return them."""
    width = component.dtype.item_bytes
    plane_bytes = component.layer_bytes // width
    body = out[_PLANE.size * width : _PLANE.size * width + component.layer_bytes]
    planes = [body[i * plane_bytes : (i + 1) * plane_bytes] for i in range(width)]
    word, spare = _scratch(component)
    at = 0
    for part in parts:
        bits = part.view(word.dtype)
        for box in _boxes(component.shape):
            piece = bits[box]
            stop = at + piece.size
            x = word[: piece.size]
            np.copyto(x.reshape(piece.shape), piece)
            if component.dtype in _ROTATED:
                _rotate(x, spare[: piece.size], 1)
            np.copyto(planes[0][at:stop], x, casting="unsafe")
            for plane in planes[1:]:
                np.right_shift(x, 8, out=x)
                np.copyto(plane[at:stop], x, casting="unsafe")
            at = stop
    return planes


def _join(planes: Sequence[Bytes], component: Component, out: Sequence[Part]) -> None:
    """Write the words whose byte planes are *planes* into *out*."""
    word, spare = _scratch(component)
    at = 0
    for part in out:
        bits = part.view(word.dtype)
        for box in _boxes(component.shape):
            piece = bits[box]
            stop = at + piece.size
            x = word[: piece.size]
            np.copyto(x, planes[-1][at:stop])
            for plane in planes[-2::-1]:
                np.left_shift(x, 8, out=x)
                np.bitwise_or(x, plane[at:stop], out=x)
            if component.dtype in _ROTATED:
                _rotate(x, spare[: piece.size], 8 * x.itemsize - 1)
            np.copyto(piece, x.reshape(piece.shape))
            at = stop


def _scratch(component: Component) -> tuple[Part, Part]:
    items = min(_BOX_ITEMS, component.part_bytes // component.dtype.item_bytes)
    dtype = f"<u{component.dtype.item_bytes}"
    return np.empty(items, dtype), np.empty(items, dtype)


def _rotate(words: Part, spare: Part, left: int) -> None:
    """Rotate each of *words* to the left in place."""
    np.right_shift(words, 8 * words.itemsize - left, out=spare)
    np.left_shift(words, left, out=words)
    np.bitwise_or(words, spare, out=words)


def _boxes(shape: tuple[int, int, int]) -> Iterator[tuple[slice, slice, slice]]:
    """Cut *shape* into boxes of at most _BOX_ITEMS that follow each other in C order."""
    heads, tokens, dim = shape
    head_step = max(1, _BOX_ITEMS // (tokens * dim))
    token_step = tokens if head_step > 1 else max(1, min(tokens, _BOX_ITEMS // dim))
    dim_step = min(dim, _BOX_ITEMS)
    for head in range(0, heads, head_step):
        for token in range(0, tokens, token_step):
            for at in range(0, dim, dim_step):
                yield (
                    slice(head, head + head_step),
                    slice(token, token + token_step),
                    slice(at, at + dim_step),
                )


def _compress(plane: Bytes) -> Bytes | None:
    """Return *plane* compressed, or None when that gains too little."""
    if len(plane) > 4 * _SAMPLES * _SAMPLE_BYTES:
        rows = plane[: len(plane) // _SAMPLES * _SAMPLES].reshape(_SAMPLES, -1)
        sample = rows[:, :_SAMPLE_BYTES].reshape(-1)
        if deflate(sample) is None:
            return None
    return deflate(plane)


def deflate(data: Bytes) -> Bytes | None:
    """Return *data* as one zstd frame, or None when that gains too little."""
    packed = _CONTEXTS.compressor.compress(data.data)
    if len(packed) >= len(data) - len(data) // _MIN_GAIN:
        return None
    return np.frombuffer(packed, np.uint8)


def _read_table(data: Bytes, width: int, plane_bytes: int) -> list[tuple[int, Bytes]]:
    """Return the method and the stored bytes of each plane, all lengths checked."""
    end = _PLANE.size * width
    if len(data) < end:
        raise InvalidFrameError("planes", len(data), f"their table has {end} bytes")
    planes = []
    for method, size in _PLANE.iter_unpack(data[:end].tobytes()):
        if method not in (_STORED, _ZSTD):
            raise InvalidFrameError("method", method, "this reader knows 0 and 1")
        if size > plane_bytes or (method == _STORED and size != plane_bytes):
            raise InvalidFrameError("stored plane", size, f"a plane has {plane_bytes} bytes")
        planes.append((method, data[end : end + size]))
        end += size
    if end != len(data):
        raise InvalidFrameError("planes", end, f"the segment has {len(data)} bytes")
    return planes


def inflate(data: Bytes, size: int) -> Bytes:
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
