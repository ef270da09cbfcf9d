"""The Frame: one chunk's encoded bytes, the same on every tier and on the wire.

docs/format.md specifies layout, limits and test vectors. A frame is a header (fixed part,
component table, segment table), then one segment per layer of each component, 64-byte aligned.
Refinement levels may follow, each again with one segment per layer: a byte prefix that ends with
a level is readable at that level. The header and each segment carry an xxh3_64; no byte is used
before its check.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.buffers import Bytes, Sliced, as_bytes, checksum, copy_bytes, copy_groups
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError, LayoutMismatchError
from kvstore.proto.types import (
    Accuracy,
    ChainDigest,
    ChunkInfo,
    ChunkKey,
    ChunkShard,
    Component,
    DType,
    Extent,
    KVLayout,
    LayerKind,
    Stated,
)

MAX_COMPONENTS = 64
COMPONENT = struct.Struct("<BBBx3I6I8x")

_NOTHING = (0, 0, 0, 0)
"""The extent of a component that the frame does not cover."""

assert COMPONENT.size == 48


@lru_cache(maxsize=256)
def pack_components(layout: KVLayout, shard: ChunkShard | None = None) -> bytes:
    """Return the component table of *layout*, or of the *shard* that a frame covers."""
    whole = layout if shard is None else shard.whole
    extents = [Extent.whole(c) for c in layout.components] if shard is None else shard.extents
    return b"".join(
        COMPONENT.pack(
            c.kind, c.dtype, c.parts, c.layers, c.kv_heads, c.head_dim, c.tokens,
            *(extent or _NOTHING), c.chunk_tokens,
        )
        for c, extent in zip(whole.components, extents, strict=True)
    )  # fmt: skip


@lru_cache(maxsize=1024)
def unpack_table(table: bytes) -> tuple[KVLayout, ChunkShard | None]:
    """Parse a component table; equal tables share one layout.

    Return the layout that the frame covers, and its shard of the chunk; None: the whole chunk.
    Raises InvalidFrameError.
    """
    if not table or len(table) % COMPONENT.size or len(table) > MAX_COMPONENTS * COMPONENT.size:
        raise InvalidFrameError("components", len(table), f"a row has {COMPONENT.size} bytes")
    components, extents = [], []
    for row in COMPONENT.iter_unpack(table):
        kind, dtype, parts, layers, kv_heads, head_dim, tokens, *rectangle, chunk_tokens = row
        try:
            component = Component(
                LayerKind(kind), DType(dtype), layers, kv_heads, head_dim, tokens, chunk_tokens
            )
        except (ValueError, LayoutMismatchError) as error:
            raise InvalidFrameError("component", row, str(error)) from None
        if parts != component.parts:
            raise InvalidFrameError("parts", parts, f"{component.kind.name} has {component.parts}")
        components.append(component)
        extents.append(None if (*rectangle,) == _NOTHING else Extent(*rectangle))
    whole = KVLayout(tuple(components))
    try:
        shard = ChunkShard(whole, tuple(extents))
    except LayoutMismatchError as error:
        raise InvalidFrameError("rectangle", extents, str(error)) from None
    return (whole, None) if shard.is_whole else (shard.layout, shard)


ALIGN_BYTES = 64
MAX_SEGMENTS = 4096
MAX_FRAME_BYTES = 1 << 30

SEGMENT_DTYPE = np.dtype(
    [
        ("component", "<u2"),
        ("section", "<u2"),
        ("layer", "<u4"),
        ("offset", "<u8"),
        ("stored_bytes", "<u8"),
        ("checksum", "<u8"),
    ]
)
"""One row of the segment table. ``section`` is the level: 0 is the payload, 1 refines it."""

assert SEGMENT_DTYPE.itemsize == 32


@lru_cache(maxsize=64)
def empty_rows(layout: KVLayout, levels: int, shard: ChunkShard | None = None) -> NDArray[Any]:
    """Return the segment table of *layout* with names only; offsets, sizes and sums are zero."""
    spans = [(number, 0) for number in range(len(layout.components))]
    if shard is not None:
        spans = [(number, extent.first_layer) for number, extent in shard.numbered]
    rows = np.array(
        [
            (number, level, first + layer, 0, 0, 0)
            for level in range(1 + levels)
            for (number, first), component in zip(spans, layout.components, strict=True)
            for layer in range(component.layers)
        ],
        SEGMENT_DTYPE,
    )
    rows.flags.writeable = False
    return rows


@lru_cache(maxsize=32)
def _check_shape(
    table: bytes, segments: bytes, levels: int, sizes: tuple[int, int, int, int]
) -> None:
    """Raise InvalidFrameError unless *segments*, without checksums, match the component *table*.

    Their names are the layout's, in order, and they follow each other. *sizes* are stated by the
    header: its own, the frame's and the chunk's bytes, and tokens. Raw frames of one layout are
    alike, so the result is cached: a check takes as long as the checksum of a mebibyte.
    """
    layout, shard = unpack_table(table)
    size, frame_bytes, *of_chunk = sizes
    if of_chunk[0] > MAX_FRAME_BYTES:
        raise InvalidFrameError("raw_bytes", of_chunk[0], f"at most {MAX_FRAME_BYTES}")
    rows = np.frombuffer(segments, "<u8").reshape(-1, 3)
    found = (len(rows), *of_chunk)
    if found != (layout.segment_count * (1 + levels), layout.raw_bytes, layout.tokens):
        raise InvalidFrameError("layout", found, "contradicts itself")
    if frame_bytes > MAX_FRAME_BYTES:
        raise InvalidFrameError("frame_bytes", frame_bytes, f"at most {MAX_FRAME_BYTES}")
    names, offset, stored = rows.T
    # The first eight bytes of a row: component, section, layer.
    if not np.array_equal(names, empty_rows(layout, levels, shard).view("<u8")[::4]):
        raise InvalidFrameError("segments", len(rows), "must be one a layer, in order")
    if (offset > MAX_FRAME_BYTES).any() or (stored > MAX_FRAME_BYTES).any():
        raise InvalidFrameError("segments", int(stored.max()), f"at most {MAX_FRAME_BYTES} bytes")
    stop = offset + stored
    starts = np.concatenate([[size], -(-stop[:-1] // ALIGN_BYTES) * ALIGN_BYTES])
    if not np.array_equal(offset, starts.astype("<u8")) or int(stop[-1]) != frame_bytes:
        raise InvalidFrameError("segments", frame_bytes, "must follow each other, 64-byte aligned")


MAGIC = b"KVFR"
VERSION = 1
FIXED_BYTES = 192
NO_ASSET = bytes(16)
"""The header's asset field when decoding needs no calibration tables."""

FLAG_RESTORED = 1
"""Decoded from a lossy copy or blended: never treated as an original."""
FLAG_UNSUMMED = 2
"""Segment checksums are zero; ``copy_frame`` fills them in. Valid in puts only."""
_KNOWN_FLAGS = FLAG_RESTORED

_FIXED = struct.Struct("<4sHHIHHHBBIQQII32s16s16s16sdd16sH22xQ")
_CHECKSUM_OFFSET = FIXED_BYTES - 8
_HEADER_BYTES_OFFSET, ACCURACY_OFFSET, KEY_OFFSET = 8, 18, 48
_OWN = (slice(44, 48), slice(48, 96), slice(112, 128), slice(128, 136))
"""Fields that differ between like frames: first token, key and parent, content, cost."""
assert _FIXED.size == FIXED_BYTES


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


@lru_cache(maxsize=256)
def header_bytes(layout: KVLayout, levels: int = 0, shard: ChunkShard | None = None) -> int:
    """Return the header size of a frame of *layout* or *shard* with *levels* refinements."""
    components = layout.components if shard is None else shard.whole.components
    table = COMPONENT.size * len(components) + 32 * layout.segment_count * (1 + levels)
    return _aligned(FIXED_BYTES + table)


@lru_cache(maxsize=256)
def raw_frame_bytes(layout: KVLayout) -> int:
    """Return the frame size of *layout* under the raw codec."""
    size = header_bytes(layout)
    for component in layout.components:
        size += component.layers * _aligned(component.layer_bytes)
    last = layout.components[-1].layer_bytes
    return size - _aligned(last) + last


@dataclass(frozen=True, slots=True)
class FrameTemplate:
    """The header fields that are known before the payload is encoded.

    ``position`` is the index of the chunk's first token in its chain. ``origin`` is the codec of
    the lossy copy that a restored frame was decoded from; else 0.
    """

    key: ChunkKey
    parent: ChainDigest
    representation: bytes
    content: bytes
    layout: KVLayout
    position: int = 0
    prefill_flops: float = 0.0
    flags: int = 0
    origin: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader(FrameTemplate):
    """Everything before the payload; also the template for encoding the frame again.

    ``segments`` is a read-only array of SEGMENT_DTYPE. ``error_bound`` is meaningful when
    ``accuracy`` is ``bounded``. ``levels`` counts the refinements after the base; ``asset`` names
    the calibration tables that the codec needs. With a ``shard``, ``layout`` is the covered part,
    and segments keep the numbers of the whole chunk.
    """

    codec_id: int
    codec_revision: int
    accuracy: Accuracy
    frame_bytes: int
    segments: NDArray[Any]
    error_bound: float = 0.0
    levels: int = 0
    asset: bytes = NO_ASSET
    shard: ChunkShard | None = None

    @property
    def header_bytes(self) -> int:
        """Bytes before the first segment."""
        return header_bytes(self.layout, self.levels, self.shard)

    @property
    def stated(self) -> Stated:
        """The accuracy that the frame states."""
        return _stated(self.accuracy, self.codec_id, self.flags, self.origin)

    def level_end(self, level: int) -> int:
        """Return the length of the prefix that is readable at *level*."""
        last = self.segments[(level + 1) * self.layout.segment_count - 1]
        return int(last["offset"]) + int(last["stored_bytes"])

    def info(self) -> ChunkInfo:
        """Return the store's index entry of the frame."""
        return ChunkInfo(
            self.key, self.parent, self.layout, self.codec_id, self.frame_bytes,
            self.accuracy, self.prefill_flops,
        )  # fmt: skip

    def segment(self, frame: Sliced, index: int) -> Bytes:
        """Return the stored bytes of segment *index*, a view of *frame*."""
        row = self.segments[index]
        offset = int(row["offset"])
        return frame[offset : offset + int(row["stored_bytes"])]


class FrameWriter:
    """Fills a caller's buffer with one frame, segment by segment, in layer order.

    With *levels*: the base of all layers, then the first refinement of all, and so on.
    Not thread-safe. ``out`` must hold ``header_bytes`` and every segment's upper bound.
    """

    def __init__(self, template: FrameTemplate, out: Bytes, levels: int = 0) -> None:
        self._template = template
        self._out = out
        self._levels = levels
        layout = template.layout
        segment_count = layout.segment_count * (1 + levels)
        check_limits(len(layout.components), segment_count, layout.raw_bytes)
        self._segments = empty_rows(layout, levels).copy()
        self._next = 0
        self._end = header_bytes(layout, levels)

    def reserve(self, size_bytes: int) -> Bytes:
        """Return the buffer of the next segment, at most *size_bytes* long."""
        start = _aligned(self._end)
        if start + size_bytes > len(self._out):
            raise InvalidFrameError("out", len(self._out), f"give {start + size_bytes} bytes")
        self._out[self._end : start] = 0
        return self._out[start : start + size_bytes]

    def commit(self, stored_bytes: int, segment_checksum: int | None = None) -> None:
        """Finish the segment begun by ``reserve`` at its actual size."""
        start = _aligned(self._end)
        stop = start + stored_bytes
        if segment_checksum is None:
            segment_checksum = checksum(self._out[start:stop])
        row = self._segments[self._next]
        row["offset"], row["stored_bytes"] = start, stored_bytes
        row["checksum"] = segment_checksum
        self._next += 1
        self._end = stop

    def finish(
        self,
        codec_id: int,
        revision: int,
        accuracy: Accuracy,
        error_bound: float = 0.0,
        asset: bytes = NO_ASSET,
    ) -> FrameHeader:
        """Write and return the header of all segments. The frame is then complete."""
        if self._next != len(self._segments):
            raise InvalidFrameError("segments", self._next, f"commit all {len(self._segments)}")
        if self._end > MAX_FRAME_BYTES:
            raise InvalidFrameError("frame_bytes", self._end, f"at most {MAX_FRAME_BYTES}")
        t = self._template
        self._segments.flags.writeable = False
        header = FrameHeader(
            t.key, t.parent, t.representation, t.content, t.layout, t.position,
            t.prefill_flops, t.flags, t.origin, codec_id=codec_id, codec_revision=revision,
            accuracy=accuracy, frame_bytes=self._end, segments=self._segments,
            error_bound=error_bound, levels=self._levels, asset=asset,
        )  # fmt: skip
        packed = pack_header(header)
        self._out[: len(packed)] = as_bytes(packed)
        return header


def pack_header(header: FrameHeader) -> bytes:
    """Return the header's bytes, checksum included."""
    layout, size = header.layout, header.header_bytes
    whole = layout if header.shard is None else header.shard.whole
    fixed = (
        MAGIC, VERSION, header.flags, size, len(whole.components), header.codec_id,
        header.codec_revision, header.accuracy, header.levels, len(header.segments),
        header.frame_bytes, layout.raw_bytes, layout.tokens, header.position, header.key,
        header.parent, header.representation, header.content, header.prefill_flops,
        header.error_bound, header.asset, header.origin,
    )  # fmt: skip
    body = bytearray(size)
    _FIXED.pack_into(body, 0, *fixed, 0)
    end = FIXED_BYTES + COMPONENT.size * len(whole.components)
    body[FIXED_BYTES:end] = pack_components(layout, header.shard)
    body[end : end + header.segments.nbytes] = header.segments.tobytes()
    body[_CHECKSUM_OFFSET:FIXED_BYTES] = struct.pack("<Q", checksum(bytes(body)))
    return bytes(body)


def parse_header(
    frame: Sliced, known_flags: int = _KNOWN_FLAGS, *, takes_shards: bool = False
) -> FrameHeader:
    """Parse and check the header at the start of *frame*; segments are not read.

    Every length and offset is checked before it is used. Compare ``frame_bytes`` with
    ``len(frame)`` before reading segments, as ``check_frame`` does. Raises InvalidFrameError, also
    for a shard of a chunk, unless the caller *takes_shards*.
    """
    start = frame[:FIXED_BYTES].tobytes()
    if len(start) < FIXED_BYTES:
        raise InvalidFrameError("frame", len(start), f"a frame has at least {FIXED_BYTES} bytes")
    fixed = _FIXED.unpack(start)
    magic, version, flags, size, component_count, codec_id, revision, accuracy, levels = fixed[:9]
    segment_count, frame_bytes, raw_bytes, tokens, position = fixed[9:14]
    if magic != MAGIC:
        raise InvalidFrameError("magic", magic, f"expected {MAGIC!r}")
    if version != VERSION:
        raise InvalidFrameError("version", version, f"this reader supports version {VERSION}")
    # ``check_limits`` inlined: this runs for each frame of a get.
    if not 1 <= component_count <= MAX_COMPONENTS or not 1 <= segment_count <= MAX_SEGMENTS:
        raise InvalidFrameError("counts", (component_count, segment_count), "outside the limits")
    table_end = FIXED_BYTES + COMPONENT.size * component_count
    padding = size - table_end - 32 * segment_count
    if size % ALIGN_BYTES or not 0 <= padding < ALIGN_BYTES or size > len(frame):
        raise InvalidFrameError("header_bytes", size, "does not fit its tables or the frame")
    head = bytearray(frame[:size].tobytes())
    head[_CHECKSUM_OFFSET:FIXED_BYTES] = bytes(8)
    if checksum(bytes(head)) != fixed[-1]:
        raise InvalidFrameError("header checksum", hex(fixed[-1]), "the header is damaged")
    if flags & ~known_flags or accuracy not in Accuracy.__members__.values():
        raise InvalidFrameError("flags", (flags, accuracy), "set by a newer version")
    if not (0 <= fixed[18] < math.inf and 0 <= fixed[19] < math.inf):
        raise InvalidFrameError("cost or bound", fixed[18:20], "must be finite, not negative")
    segments = np.frombuffer(bytes(head), SEGMENT_DTYPE, segment_count, table_end)
    table = bytes(head[FIXED_BYTES:table_end])
    layout, shard = unpack_table(table)
    if shard is not None and not takes_shards:
        raise InvalidFrameError("rectangle", shard.extents, "only whole chunks are accepted")
    shape = segments.view("<u8").reshape(-1, 4)[:, :3].tobytes()
    _check_shape(table, shape, levels, (size, frame_bytes, raw_bytes, tokens))
    return FrameHeader(
        ChunkKey(fixed[14]), ChainDigest(fixed[15]), fixed[16], fixed[17], layout, position,
        fixed[18], flags, fixed[21], codec_id=codec_id, codec_revision=revision,
        accuracy=Accuracy(accuracy), frame_bytes=frame_bytes, segments=segments,
        error_bound=fixed[19], levels=levels, asset=fixed[20], shard=shard,
    )  # fmt: skip


def like_header(
    head: Bytes, header: FrameHeader, heads: NDArray[np.uint8]
) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """Return which rows of *heads* are valid headers like *header*, which was parsed from *head*,
    and the segment checksums that each row states.

    Like headers differ only in names, position, cost and checksums. Rows are at least as long as
    *head*. For many frames of one shape this takes a seventh of the time of parsing each.
    """
    size = header.header_bytes
    rows, like = np.array(heads[:, :size]), np.array(head[None, :size])
    words, sum_word = rows.view("<u8"), _CHECKSUM_OFFSET // 8
    flops, stated = rows.view("<f8")[:, _OWN[-1].start // 8].copy(), words[:, sum_word].copy()
    words[:, sum_word] = 0
    is_right = stated == np.array([checksum(row) for row in rows], np.uint64)
    is_right &= (flops >= 0) & (flops < math.inf)
    table = FIXED_BYTES + COMPONENT.size * len(header.layout.components)
    sums = np.s_[:, table // 8 + 3 : (table + header.segments.nbytes) // 8 : 4]
    sums_stated = words[sums].copy()
    for each in (rows, like):  # blank the fields that may differ
        for part in _OWN:
            each[:, part] = 0
        each.view("<u8")[:, sum_word] = each.view("<u8")[sums] = 0
    return is_right & (rows == like).all(1), sums_stated


def _stated(accuracy: Accuracy, codec_id: int, flags: int, origin: int) -> Stated:
    if accuracy is not Accuracy.approximate:
        return Stated(accuracy)
    return Stated(accuracy, origin if flags & FLAG_RESTORED else codec_id)


def stated_header_bytes(start: Bytes) -> int:
    """Return the header length stated in *start*, the first FIXED_BYTES of a frame.

    Nothing is checked: read that many bytes, capped at the frame's size, and parse them.
    """
    return int.from_bytes(start[_HEADER_BYTES_OFFSET:][:4].tobytes(), "little")


def check_limits(component_count: int, segment_count: int, raw_bytes: int) -> None:
    """Raise InvalidFrameError unless the counts and bytes are within a frame's limits."""
    if not 1 <= component_count <= MAX_COMPONENTS or not 1 <= segment_count <= MAX_SEGMENTS:
        raise InvalidFrameError("counts", (component_count, segment_count), "outside the limits")
    if raw_bytes > MAX_FRAME_BYTES:
        raise InvalidFrameError("raw_bytes", raw_bytes, f"at most {MAX_FRAME_BYTES}")


def check_frame(frame: Bytes, key: ChunkKey | None = None, level: int | None = None) -> FrameHeader:
    """Parse *frame* and check its size, its key (when given) and every segment.

    With a *level*, *frame* is the prefix of a frame that is readable at that level. Raises
    InvalidFrameError for an invalid header or a level that the frame does not have,
    ChunkCorruptError when the header is valid but the bytes after it are not, or when it has
    another key.
    """
    header = parse_header(frame)
    if level is not None and not 0 <= level <= header.levels:
        raise InvalidFrameError("level", level, f"the frame has 0 to {header.levels}")
    count = header.layout.segment_count * (1 + (header.levels if level is None else level))
    check_identity(header, len(frame), key, level)
    for index in range(count):
        check_segment(header, index, checksum(header.segment(frame, index)))
    return header


def copy_frame(out: Bytes, data: Bytes, key: ChunkKey) -> FrameHeader:
    """Copy the frame *data* to *out* of the same length, and check every byte.

    The check reads *out*: a concurrent write to *data* cannot go unnoticed. A frame with
    FLAG_UNSUMMED gets its checksums here. Raises as ``check_frame`` does; *out* is then
    undefined.
    """
    if len(out) < FIXED_BYTES or len(out) != len(data):
        fix = f"give at least {FIXED_BYTES} bytes, and an equal buffer"
        raise InvalidFrameError("frame", len(data), fix)
    copy_bytes(out[:FIXED_BYTES], data[:FIXED_BYTES])
    end = min(max(stated_header_bytes(out), FIXED_BYTES), len(out))
    copy_bytes(out[FIXED_BYTES:end], data[FIXED_BYTES:end])
    header = parse_header(out, _KNOWN_FLAGS | FLAG_UNSUMMED)
    check_identity(header, len(out), key)
    segments = []
    rows = header.segments
    for start, size in zip(rows["offset"].tolist(), rows["stored_bytes"].tolist(), strict=True):
        if end < start:
            out[end:start] = 0
        end = start + size
        segments.append([(out[start:end], data[start:end])])
    checksums = copy_groups(segments)
    if header.flags & FLAG_UNSUMMED:
        summed = rows.copy()
        summed["checksum"] = checksums
        header = replace(header, flags=header.flags & ~FLAG_UNSUMMED, segments=summed)
        copy_bytes(out[: header.header_bytes], as_bytes(pack_header(header)))
    elif checksums != rows["checksum"].tolist():
        for index, found in enumerate(checksums):
            check_segment(header, index, found)
    return header


def check_identity(
    header: FrameHeader, size_bytes: int, key: ChunkKey | None, level: int | None = None
) -> None:
    """Raise ChunkCorruptError unless it is the frame of *key*, whole or up to *level*."""
    if key is not None and header.key != key:
        raise ChunkCorruptError(key, f"its place holds chunk {header.key.hex()}")
    whole_bytes = header.frame_bytes if level is None else header.level_end(level)
    if whole_bytes != size_bytes:
        raise ChunkCorruptError(header.key, f"{size_bytes} bytes of {whole_bytes}")


def check_segment(header: FrameHeader, index: int, found: int) -> None:
    """Compare a segment's computed checksum with the header's. Raises ChunkCorruptError."""
    row = header.segments[index]
    if found != int(row["checksum"]):
        where = f"component {row['component']} layer {row['layer']}"
        raise ChunkCorruptError(header.key, f"{where} fails its checksum")
