"""The raw codec: the tensors' bytes, part after part."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override
from xxhash import xxh3_64

from kvstore.codecs.base import (
    AnyPart,
    AnyTensors,
    ChunkTensors,
    Codec,
    EncodeTerms,
    Part,
    check_tensors,
)
from kvstore.codecs.block_part import (
    BLOCK_ROW,
    ROW_SUM,
    BlockLayers,
    BlockPart,
    BlockStack,
    block_rows,
)
from kvstore.proto.buffers import (
    BLOCK_BYTES,
    LOOP_FROM_BYTES,
    LOOP_UNIT_BYTES,
    Bytes,
    Pieces,
    Sliced,
    address,
    as_bytes,
    copy_groups,
)
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.frame import (
    ALIGN_BYTES,
    FLAG_UNSUMMED,
    NO_ASSET,
    SEGMENT_DTYPE,
    FrameHeader,
    FrameTemplate,
    check_limits,
    check_segment,
    header_bytes,
    pack_header,
    raw_frame_bytes,
)
from kvstore.proto.native import Loops, loops
from kvstore.proto.types import END_KINDS, Accuracy, Component, KVLayout


class RawCodec(Codec):
    """Plain copies, for memory tiers and zero-copy readers."""

    name = "raw"
    codec_id = 0
    revision = 1
    accuracy = Accuracy.exact

    @override
    def check_header(self, header: FrameHeader) -> None:
        """Also raise InvalidFrameError unless each layer has its size, so that the layout alone
        determines the offsets of views.
        """
        if (header.codec_id, header.codec_revision, header.levels, header.asset) != _PLAIN:
            super().check_header(header)  # raises with the reason
        stored = header.segments["stored_bytes"]
        sizes = _raw_rows(header.layout)["stored_bytes"]
        wrong = np.flatnonzero(stored != sizes)
        if len(wrong):
            fix = f"a layer has {sizes[wrong[0]]}"
            raise InvalidFrameError("stored_bytes", int(stored[wrong[0]]), fix)

    def max_segment_bytes(self, component: Component) -> int:
        """Size of one encoded layer, exact for this codec."""
        return component.layer_bytes

    def max_frame_bytes(self, layout: KVLayout) -> int:
        """Size of the frame of *layout*, exact for this codec."""
        return raw_frame_bytes(layout)

    @override
    def encode(
        self,
        template: FrameTemplate,
        tensors: AnyTensors,
        out: Bytes,
        terms: EncodeTerms | None = None,
    ) -> FrameHeader:
        """Copy each layer to its offset; *terms* are ignored.

        Raises as ``Codec.encode`` does. One call for all layers, as in ``decode_into``.
        """
        layout = template.layout
        if (found := pieces_in(layout, tensors)) is None:
            check_tensors(layout, tensors)
        if len(out) < raw_frame_bytes(layout):
            raise InvalidFrameError("out", len(out), f"give {raw_frame_bytes(layout)} bytes")
        is_summed = not template.flags & FLAG_UNSUMMED
        for start, stop in _gaps(layout):
            out[start:stop] = 0
        if found is None:
            checksums = _encode_layers(layout, tensors, out, is_summed=is_summed)
        else:
            checksums = found[0].copy(out, found[1], is_encode=True)
            if not is_summed:
                checksums = [0] * len(checksums)
        header = raw_header(template, checksums)
        packed = pack_header(header)
        out[: len(packed)] = np.frombuffer(packed, np.uint8)
        return header

    def pieces(self, template: FrameTemplate, tensors: AnyTensors) -> list[Bytes] | None:
        """Return the frame of ``encode`` as pieces: its header, then views of *tensors*.

        Nothing is copied, and the checksums cover the views. None if a part is in blocks or
        strided. Raises as ``encode`` does.
        """
        layout = template.layout
        check_tensors(layout, tensors)
        found: list[Bytes] = []
        checksums = []
        gaps = {stop: _GAP[: stop - start] for start, stop in _gaps(layout)}
        starts = iter(_raw_rows(layout)["offset"].tolist())
        for layers in tensors:
            for parts in layers:
                flat = flat_parts(parts)
                if flat is None:
                    return None
                found += [gaps[start]] if (start := next(starts)) in gaps else []
                found += flat
                checksums.append(_checksum(flat))
        return [as_bytes(pack_header(raw_header(template, checksums))), *found]

    def encode_segment(self, parts: Sequence[AnyPart], component: Component, out: Bytes) -> int:
        """Copy one layer into *out* and return its ``layer_bytes``."""
        for part, target in zip(
            parts, part_views(out[: component.layer_bytes], component), strict=True
        ):
            _gather(part.view(target.dtype), target)
        return component.layer_bytes

    def decode_segment(self, data: Bytes, component: Component, out: Sequence[AnyPart]) -> None:
        """Copy one verified layer into *out*. Raises InvalidFrameError on a wrong size."""
        for view, part in zip(part_views(data, component), out, strict=True):
            _scatter(view, part.view(view.dtype))

    def encode_checked(
        self, parts: Sequence[AnyPart], component: Component, out: Bytes
    ) -> tuple[int, int]:
        """Copy one layer into *out*, summing the copy while it is in cache."""
        size = component.layer_bytes
        return size, _encode_summed(parts, component, out[:size])

    def decode_checked(
        self, header: FrameHeader, index: int, data: Bytes, out: Sequence[AnyPart]
    ) -> None:
        """Copy one layer into *out*, summing it while it is in cache."""
        component = header.layout.components[int(header.segments[index]["component"])]
        if len(data) != component.layer_bytes:
            raise _wrong_size(data, component)
        pieces = _pieces(data, out)
        found = _scatter_layer(data, out) if pieces is None else copy_groups([pieces])[0]
        check_segment(header, index, found)

    def decode_into(self, header: FrameHeader, frame: Bytes, out: AnyTensors) -> None:
        """Copy each segment into *out*, summing it while it is in cache.

        Raises as ``Codec.decode_into`` does. One call for all layers: a call per layer adds a tenth
        to the copies of a chunk.
        """
        self.check_header(header)
        found = pieces_in(header.layout, out, is_target=True)
        is_whole = frame.strides == (1,) and len(frame) >= raw_frame_bytes(header.layout)
        # The header of a shard, which names all components of the chunk, may be longer.
        is_usual = (
            is_whole and header.segments["offset"][0] == _raw_rows(header.layout)["offset"][0]
        )
        if found is None or not is_usual:
            self.decode_by_layer(header, frame, out)
        else:
            pieces, places = found
            sums = pieces.copy(frame, places)
            if sums != header.segments["checksum"].tolist():  # or windows are left out
                pieces.check(header, sums)

    def decode_by_layer(self, header: FrameHeader, frame: Sliced, out: AnyTensors) -> None:
        """Do the same layer by layer: into blocks or strided tensors, or from a file.

        Also raises InvalidFrameError for a truncated frame.
        """
        check_tensors(header.layout, out, is_target=True)
        starts = header.segments["offset"].tolist()
        checksums = header.segments["checksum"].tolist()
        sums: dict[int, int] = {}
        together: dict[int, Pieces] = {}
        first = 0
        for component, layers in zip(header.layout.components, out, strict=True):
            some, rows = starts[first : first + len(layers)], None
            if isinstance(frame, np.ndarray) and len(layers):
                rows = block_rows(layers, frame, some)
            if rows is not None:
                loops().scatter_summed(address(rows), rows.size // BLOCK_ROW)
                sums.update(enumerate(rows[:, -1, -1, -1, ROW_SUM].tolist(), first))
            else:
                for index, (start, parts) in enumerate(zip(some, layers, strict=True), first):
                    data = frame[start : start + component.layer_bytes]
                    if len(data) != component.layer_bytes:
                        raise _wrong_size(data, component)
                    if (pieces := _pieces(data, parts)) is not None:
                        together[index] = pieces
                    else:
                        sums[index] = _scatter_layer(data, parts)
            first += component.layers
        sums.update(zip(together, copy_groups(list(together.values())), strict=True))
        for index, found in sums.items():
            if found != checksums[index]:
                check_segment(header, index, found)

    def views(self, header: FrameHeader, frame: Bytes) -> ChunkTensors:
        """Return the tensors inside a raw *frame* without copying, writable when it is.

        Unsigned integers of the dtype's size, as in ``empty_tensors``. Only sizes are verified: the
        caller does ``check_frame``. Raises InvalidFrameError, UnknownCodecError for a frame of
        another codec.
        """
        self.check_header(header)
        segments = iter(range(header.layout.segment_count))
        return [
            [
                list(part_views(header.segment(frame, next(segments)), component))
                for _ in range(component.layers)
            ]
            for component in header.layout.components
        ]


RAW = RawCodec()
_PLAIN = (RawCodec.codec_id, RawCodec.revision, 0, NO_ASSET)
_GAP = np.zeros(ALIGN_BYTES, np.uint8)
OUT, AT, UNITS, SIZE, SUM = range(5)
"""Columns of a piece for the loops of ``native/sums.c``."""


class RawPieces(NamedTuple):
    """The parts of raw layers as rows of ``native/sums.c``, to copy and sum in one call.

    ``AT`` counts from the frame's start. ``segments`` are the layers' numbers.
    """

    rows: NDArray[np.uint64]
    segments: Sequence[int]
    is_past: bool
    """Whether copies are large enough to bypass the caches, as the next reader is another core."""
    address: int
    """Address of the rows."""

    def copy(
        self,
        frame: Bytes,
        places: Sequence[int],
        *,
        is_encode: bool = False,
        native: Loops | None = None,
    ) -> list[int]:
        """Copy the parts from *frame* to *places*, or back; return the layers' checksums."""
        count = len(places)
        found = (ctypes.c_uint64 * len(self.segments))()
        (native or loops()).copy_frame(
            self.address, count, address(frame), (ctypes.c_uint64 * count)(*places),
            found, is_encode, self.is_past,
        )  # fmt: skip
        return found[:]

    def read(self, descriptor: int, offset: int, places: Sequence[int]) -> list[int] | None:
        """Do the same from a file with the frame at *offset*; None if it is incomplete."""
        rows = self.rows.copy()
        rows[:, OUT] = places
        rows[:, AT] += np.uint64(offset)
        if loops().read_summed(address(rows), len(rows), descriptor) != len(rows):
            return None
        found: list[int] = rows[rows[:, SIZE] > 0, SUM].tolist()
        return found

    def check(self, header: FrameHeader, found: Sequence[int]) -> None:
        """Compare checksums with those of *header*. Raises ChunkCorruptError."""
        stated = header.segments["checksum"].tolist()
        for segment, one in zip(self.segments, found, strict=True):
            if one != stated[segment]:
                check_segment(header, segment, one)


def pieces_in(
    layout: KVLayout, tensors: AnyTensors, *, is_target: bool = False
) -> tuple[RawPieces, list[int]] | None:
    """Return the pieces of a raw frame of *layout*, and the addresses of all parts of *tensors*.

    None if these must be copied layer by layer, after ``check_tensors``: one is in blocks, strided,
    not of whole units, not as in *layout*, or a read-only target.
    """
    if not isinstance(tensors, Sequence) or len(tensors) != len(layout.components):
        return None
    places: list[int] = []
    for component, layers in zip(layout.components, tensors, strict=True):
        may_lack = is_target and component.kind in END_KINDS and not len(layers)
        is_whole = len(layers) == component.layers or may_lack
        if isinstance(layers, BlockLayers) or not is_whole:
            return None
        shape, item_bytes = component.shape, component.dtype.item_bytes
        for parts in layers:
            if len(parts) != component.parts:
                return None
            for part in parts:
                if not isinstance(part, np.ndarray) or part.shape != shape:
                    return None
                flags = part.flags
                is_one = flags.c_contiguous and part.dtype.itemsize == item_bytes
                if not is_one or (is_target and not flags.writeable):
                    return None
                places.append(address(part))
    pieces = raw_pieces(layout, *map(len, tensors))
    return None if pieces is None else (pieces, places)


@lru_cache(maxsize=256)
def raw_pieces(layout: KVLayout, *layers: int) -> RawPieces | None:
    """Return the pieces of a raw frame of *layout*. *layers* is each component's layer count, or 0
    to leave out a window or state. None if a part is not of whole units.
    """
    starts = _raw_rows(layout)["offset"].tolist()
    rows: list[tuple[int, ...]] = []
    segments: list[int] = []
    first = 0
    for component, count in zip(layout.components, layers, strict=True):
        size, last = component.part_bytes, component.parts - 1
        units, rest = divmod(size, LOOP_UNIT_BYTES)
        if rest:
            return None
        for segment in range(first, first + count):
            segments.append(segment)
            start = starts[segment]
            rows += [(0, start + part * size, units, 0, 0) for part in range(last)]
            rows.append((0, start + last * size, units, component.layer_bytes, 0))
        first += component.layers
    table = np.array(rows, np.uint64).reshape(-1, 5)
    is_past = int(table[:, UNITS].sum()) * LOOP_UNIT_BYTES >= LOOP_FROM_BYTES
    return RawPieces(table, segments, is_past, address(table))


def _encode_layers(
    layout: KVLayout, tensors: AnyTensors, out: Bytes, *, is_summed: bool
) -> list[int]:
    """Copy *tensors* to their offsets in *out* layer by layer; return the checksums, or zeros."""
    starts = _raw_rows(layout)["offset"].tolist()
    checksums: list[int] = []
    for component, layers in zip(layout.components, tensors, strict=True):
        size, first = component.layer_bytes, starts[len(checksums)]
        if isinstance(layers, BlockStack) and not (is_summed or size % ALIGN_BYTES):
            layers.gather(out[first : first + size * component.layers])
            checksums += [0] * component.layers
            continue
        for parts in layers:
            start = starts[len(checksums)]
            target = out[start : start + size]
            if is_summed:
                checksums.append(_encode_summed(parts, component, target))
            else:
                RAW.encode_segment(parts, component, target)
                checksums.append(0)
    return checksums


def _checksum(pieces: Sequence[Bytes]) -> int:
    digest = xxh3_64()
    for piece in pieces:
        digest.update(piece)  # type: ignore[arg-type]
    return digest.intdigest()


@lru_cache(maxsize=64)
def _gaps(layout: KVLayout) -> list[tuple[int, int]]:
    """Return start and end of each gap between the layers of a raw frame."""
    rows = _raw_rows(layout)
    starts = rows["offset"].tolist()
    ends = [header_bytes(layout), *(rows["offset"] + rows["stored_bytes"]).tolist()]
    return [(end, start) for end, start in zip(ends, starts, strict=False) if end < start]


def flat_parts(parts: Sequence[AnyPart]) -> list[Bytes] | None:
    """Return the bytes of *parts*; None if one is in blocks or strided."""
    found: list[Bytes] = []
    for part in parts:
        if not (isinstance(part, np.ndarray) and part.flags.c_contiguous):
            return None
        found.append(part.reshape(-1).view(np.uint8))
    return found


def _pairs(layer: Bytes, flat: Sequence[Bytes]) -> list[tuple[Bytes, Bytes]]:
    """Return *layer* cut into equal pieces, each paired with one of *flat*."""
    size = len(layer) // len(flat)
    return [(layer[at * size : (at + 1) * size], part) for at, part in enumerate(flat)]


def _encode_summed(parts: Sequence[AnyPart], component: Component, target: Bytes) -> int:
    """Copy one layer into *target* and return the checksum of the copy."""
    flat = flat_parts(parts)
    if flat is not None:
        return copy_groups([_pairs(target, flat)])[0]
    digest = xxh3_64()
    for part, view in zip(parts, part_views(target, component), strict=True):
        for block, theirs in _blocks(view, part):
            _gather(theirs, block)
            digest.update(block)  # type: ignore[arg-type]
    return digest.intdigest()


def _pieces(layer: Bytes, out: Sequence[AnyPart]) -> Pieces | None:
    """Return the copies of a raw layer to *out*; None if a part is in blocks or strided."""
    flat = flat_parts(out)
    return None if flat is None else [(target, data) for data, target in _pairs(layer, flat)]


def _scatter_layer(layer: Bytes, out: Sequence[AnyPart]) -> int:
    """Copy a raw layer into *out* and return its checksum."""
    digest = xxh3_64()
    size = len(layer) // len(out)
    for at, part in enumerate(out):
        _scatter_part(layer[at * size : (at + 1) * size], part, digest)
    return digest.intdigest()


def _scatter_part(data: Bytes, part: AnyPart, digest: xxh3_64) -> None:
    typed = data.view(f"<u{part.dtype.itemsize}").reshape(part.shape)
    if len(data) <= BLOCK_BYTES and part.dtype == typed.dtype:
        _scatter(typed, part)
        digest.update(data)  # type: ignore[arg-type]
        return
    for block, theirs in _blocks(typed, part):
        _scatter(block, theirs)
        digest.update(block)  # type: ignore[arg-type]


def _blocks(view: Part, part: AnyPart) -> Iterator[tuple[Part, AnyPart]]:
    """Yield matching blocks of a frame's part and a caller's, each of a few heads.

    A block fits the second-level cache, so that its checksum costs next to nothing.
    """
    theirs = part.view(view.dtype)
    heads = max(1, BLOCK_BYTES * len(view) // max(1, view.nbytes))
    for start in range(0, len(view), heads):
        yield view[start : start + heads], theirs[start : start + heads]


def _scatter(view: Part, part: AnyPart) -> None:
    if isinstance(part, BlockPart):
        part.scatter(view)
    else:
        np.copyto(part, view)


def _gather(part: AnyPart, view: Part) -> None:
    if isinstance(part, BlockPart):
        part.gather(view)
    else:
        np.copyto(view, part)


def part_views(data: Bytes, component: Component) -> Iterator[Part]:
    """Yield the parts of the raw layer *data* as typed views of it.

    Raises InvalidFrameError unless *data* has exactly ``layer_bytes``.
    """
    if len(data) != component.layer_bytes:
        raise _wrong_size(data, component)
    typed = data.view(f"<u{component.dtype.item_bytes}")
    yield from typed.reshape(component.parts, *component.shape)


def _wrong_size(data: Bytes, component: Component) -> InvalidFrameError:
    return InvalidFrameError("stored_bytes", len(data), f"a layer has {component.layer_bytes}")


def raw_header(template: FrameTemplate, checksums: Sequence[int] | None = None) -> FrameHeader:
    """Return the header of the raw frame of *template*; checksums default to zero."""
    rows = _raw_rows(template.layout)
    if checksums is not None:
        rows = rows.copy()
        rows["checksum"] = checksums
        rows.flags.writeable = False
    t = template
    return FrameHeader(
        t.key, t.parent, t.representation, t.content, t.layout, t.position, t.prefill_flops,
        t.flags, codec_id=RawCodec.codec_id, codec_revision=RawCodec.revision,
        accuracy=RawCodec.accuracy, frame_bytes=raw_frame_bytes(t.layout), segments=rows,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _raw_rows(layout: KVLayout) -> NDArray[Any]:
    """Return the segment table of *layout* under this codec, without checksums.

    Raises InvalidFrameError for a layout beyond a frame's limits.
    """
    check_limits(len(layout.components), layout.segment_count, layout.raw_bytes)
    rows = np.zeros(layout.segment_count, SEGMENT_DTYPE)
    index, offset = 0, header_bytes(layout)
    for number, component in enumerate(layout.components):
        for layer in range(component.layers):
            rows[index] = (number, 0, layer, offset, component.layer_bytes, 0)
            offset += -(-component.layer_bytes // ALIGN_BYTES) * ALIGN_BYTES
            index += 1
    rows.flags.writeable = False
    return rows
