from __future__ import annotations

import contextlib
import itertools
import struct
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from contracts.codec import (
    CodecContract,
    all_zero,
    decoded,
    encoded,
    filled,
    frame_of_bodies,
    peak_bytes,
    random_bits,
    same,
    special_values,
    strided,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codecs.exponents import best_count, count_by_numpy
from kvstore.codecs.planes import numpy_splitter
from kvstore.codecs.xpack import NUMPY, Packer, XpackCodec, best_packer, packs_alike
from kvstore.proto.buffers import as_bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.frame import header_bytes, parse_header
from kvstore.proto.types import Component, DType, KVLayout, LayerKind

COMPONENT = Component(LayerKind.attention, DType.bfloat16, 1, 1, 24, 33)
ITEMS = 24 * 33
RECORD_BYTES = 20


class TestXpackCodec(CodecContract):
    codec = XpackCodec()


class TestXpackCodecOfNumpyAlone(CodecContract):
    codec = XpackCodec(NUMPY, numpy_splitter)


def gaussian(component: Component, seed: int = 0) -> list[Any]:
    """Return parts of a layer of normal numbers, as bits, some beyond every table."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(component.parts):
        wide = rng.standard_normal(component.shape, np.float32).view(np.uint32)
        wide[0, 0, :20] = (1 + 12 * np.arange(20, dtype=np.uint32)) << 23
        wide[0, 0, 21:23] = 0x7FC10000
        wide[-1, -1, 1] = 0x80000000
        parts.append(wide if component.dtype is DType.float32 else (wide >> 16).astype(np.uint16))
    return parts


def segment_of(
    parts: list[Any], component: Component = COMPONENT, codec: XpackCodec | None = None
) -> bytes:
    codec = codec or XpackCodec()
    out = np.zeros(codec.max_segment_bytes(component), np.uint8)
    return bytes(out[: codec.encode_segment(parts, component, out)])


def decode(segment: bytes) -> list[Any]:
    out = [np.full(COMPONENT.shape, 0x5A, np.uint16) for _ in range(2)]
    XpackCodec().decode_segment(as_bytes(segment), COMPONENT, out)
    return out


def by_the_format_page(segment: bytes, component: Component) -> list[list[int]]:
    """Decode a segment as docs/format.md says, in integers of Python; its parts' words."""
    width, rows = component.dtype.item_bytes, component.kv_heads * component.tokens
    step = (1 << 15) // component.head_dim
    sizes = [min(step, rows - at) * component.head_dim for at in range(0, rows, step)]
    tiles = [size for _ in range(component.parts) for size in sizes]
    items = sum(tiles)
    records = [struct.unpack_from("<16sI", segment, 20 * k) for k in range(len(tiles))]
    at = 20 * len(tiles)
    planes = [segment[at + k * items : at + (k + 1) * items] for k in range(width - 1)]
    at += (width - 1) * items
    found = []
    for (common, escapes), size in zip(records, tiles, strict=True):
        if escapes == 0xFFFFFFFF:
            found.append(list(segment[at : at + size]))
            at += size
        else:
            nibbles = [byte >> shift & 15 for byte in segment[at : at + (size + 1) // 2]
                       for shift in (0, 4)]  # fmt: skip
            found.append([common[code] for code in nibbles[:size]])
            at += (size + 1) // 2
    counts = [0 if escapes == 0xFFFFFFFF else escapes for _, escapes in records]
    values = at + 2 * sum(counts)
    for exponents, count in zip(found, counts, strict=True):
        for _ in range(count):
            (place,) = struct.unpack_from("<H", segment, at)
            exponents[place] = segment[values]
            at, values = at + 2, values + 1
    assert values == len(segment)
    words = [
        (rest & 0x80) << 8 | exponent << 7 | rest & 0x7F
        for exponent, rest in zip(itertools.chain(*found), planes[0], strict=True)
    ]
    for plane in planes[1:]:
        words = [word << 8 | byte for word, byte in zip(words, plane, strict=True)]
    share = items // component.parts
    return [words[k * share : (k + 1) * share] for k in range(component.parts)]


@pytest.mark.parametrize(
    "component",
    [
        COMPONENT,
        Component(LayerKind.mla, DType.bfloat16, 1, 1, 577, 61),
        Component(LayerKind.attention, DType.float32, 1, 3, 64, 173),
    ],
    ids=str,
)
def test_segments_decode_by_the_prose_of_the_format_page(component: Component) -> None:
    parts = gaussian(component)
    segment = segment_of(parts, component)
    assert segment == segment_of(parts, component, XpackCodec(NUMPY, numpy_splitter))
    words = by_the_format_page(segment, component)
    assert words == [part.reshape(-1).tolist() for part in parts]


def test_normal_values_take_twelve_bits_each() -> None:
    component = Component(LayerKind.attention, DType.bfloat16, 1, 4, 128, 256)
    wide = np.random.default_rng(0).standard_normal((2, *component.shape), np.float32)
    segment = segment_of(list((wide.view(np.uint32) >> 16).astype(np.uint16)), component)
    assert len(segment) < 0.752 * component.layer_bytes


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float32], ids=str)
def test_noise_is_stored_as_it_is_with_a_record_a_tile(dtype: DType) -> None:
    layout = KVLayout((Component(LayerKind.attention, dtype, 1, 4, 64, 512),))
    tensors = filled(layout, random_bits)
    frame = encoded(XpackCodec(), tensors, layout)
    assert len(frame) == header_bytes(layout) + layout.raw_bytes + 8 * RECORD_BYTES
    assert same(decoded(frame), tensors)


@pytest.mark.parametrize("dtype", [DType.float16, DType.int8, DType.float8_e4m3fn], ids=str)
def test_types_without_such_exponents_are_stored_as_they_are(dtype: DType) -> None:
    layout = KVLayout((Component(LayerKind.attention, dtype, 1, 2, 8, 64),))
    frame = encoded(XpackCodec(), filled(layout), layout)
    assert len(frame) == header_bytes(layout) + layout.raw_bytes


def test_parts_of_several_batches_and_kinds_of_tiles_survive() -> None:
    long = Component(LayerKind.attention, DType.bfloat16, 1, 3, 96, 1800)
    odd = Component(LayerKind.attention, DType.bfloat16, 1, 1, 2731, 37)
    layout = KVLayout((long, odd, Component(LayerKind.mla, DType.bfloat16, 1, 1, 40_000, 3)))
    tensors = filled(layout)
    tensors[0][0][0][:, 700:1100] = filled(layout, random_bits)[0][0][0][:, 700:1100]
    tensors[0][0][1][:, 300:340] = filled(layout, special_values)[0][0][1][:, 300:340]
    frame = encoded(XpackCodec(), tensors, layout)
    assert len(frame) < 0.95 * layout.raw_bytes
    assert same(decoded(frame), tensors)
    assert np.array_equal(encoded(XpackCodec(), strided(tensors), layout), frame)
    pages = strided(filled(layout, all_zero))
    XpackCodec(NUMPY, numpy_splitter).decode_into(parse_header(frame), frame, pages)
    assert same(pages, tensors)


# --- packers


def test_numba_is_used_where_it_is_installed() -> None:
    pytest.importorskip("numba")
    assert best_packer().name == "numba"
    assert best_count() is not count_by_numpy


def test_without_numba_the_references_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvstore.codecs.exponents_numba", None)
    assert best_packer.__wrapped__() is NUMPY
    assert best_count.__wrapped__() is count_by_numpy


@pytest.mark.parametrize("fault", ["pack", "places", "count", "unpack"])
def test_a_packer_that_errs_once_is_found(fault: str) -> None:
    def pack(exponents: Any, codes: Any, out: Any, places: Any) -> int:
        count = NUMPY.pack(exponents, codes, out, places)
        out[-1] ^= fault == "pack"
        places[count - 1] ^= fault == "places"
        return count + (fault == "count")

    def unpack(packed: Any, pairs: Any, out: Any) -> None:
        NUMPY.unpack(packed, pairs, out)
        out[-1] ^= fault == "unpack"

    assert packs_alike(NUMPY)
    assert not packs_alike(Packer("wrong", pack, unpack))


# --- hostile segments


def edited(tile: int = 0, **fields: Any) -> bytes:
    """Return a segment where the record of *tile* has *fields* instead."""
    segment = bytearray(right())
    record = np.frombuffer(segment, XpackCodec.record, 1, RECORD_BYTES * tile)
    for name, value in fields.items():
        record[name] = value
    return bytes(segment)


@cache
def right() -> bytes:
    return segment_of(gaussian(COMPONENT))


def escapes() -> list[int]:
    return [struct.unpack_from("<I", right(), 20 * k + 16)[0] for k in range(2)]


def first_place() -> int:
    return len(right()) - 3 * sum(escapes())


def placed(place: int) -> bytes:
    """Return a segment whose first escape is of *place*."""
    at = first_place()
    return right()[:at] + struct.pack("<H", place) + right()[at + 2 :]


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "records cut": lambda: right()[: 2 * RECORD_BYTES - 1],
    "planes cut": lambda: right()[: 2 * RECORD_BYTES + 100],
    "a byte less": lambda: right()[:-1],
    "a byte more": lambda: right() + b"\0",
    "an escape less": lambda: edited(escapes=escapes()[0] - 1),
    "escapes of 4 GiB": lambda: edited(escapes=0xFFFFFFFE),
    "more escapes than elements": lambda: edited(escapes=ITEMS + 1),
    "a tile said to be as it is": lambda: edited(escapes=0xFFFFFFFF),
    "a place beyond the tile": lambda: placed(ITEMS),
    "a place of 65535": lambda: placed(0xFFFF),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_segment_is_refused_without_allocation_beyond_a_layer(name: str) -> None:
    assert same([[decode(right())]], [[gaussian(COMPONENT)]])
    segment = HOSTILE[name]()

    def refused() -> None:
        with pytest.raises(InvalidFrameError):
            decode(segment)

    assert peak_bytes(refused) <= COMPONENT.layer_bytes + (2 << 20)
    with pytest.raises(InvalidFrameError):
        decoded(frame_of_bodies(XpackCodec(), KVLayout((COMPONENT,)), [segment]))


@settings(deadline=None, max_examples=250)
@given(st.integers(0, 2**32 - 1))
def test_a_changed_segment_is_refused_or_is_a_layer_by_every_packer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(10):
        segment = np.frombuffer(right(), np.uint8).copy()
        places = [(0, 2 * RECORD_BYTES), (first_place(), len(segment)), (0, len(segment))]
        segment[rng.integers(*places[rng.integers(3)], rng.integers(1, 4))] = rng.integers(0, 256)
        answers = []
        for codec in (XpackCodec(NUMPY, numpy_splitter), XpackCodec()):
            out = [np.zeros(COMPONENT.shape, np.uint16) for _ in range(2)]
            found = b"refused"
            with contextlib.suppress(InvalidFrameError):
                codec.decode_segment(segment, COMPONENT, out)
                found = b"".join(part.tobytes() for part in out)
            answers.append(found)
        assert answers[0] == answers[1]
