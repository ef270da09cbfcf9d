from __future__ import annotations

import contextlib
import struct
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

from kvstore.codecs import rans
from kvstore.codecs.planes import numpy_splitter
from kvstore.codecs.xans import (
    ESCAPE,
    MAX_FIRST,
    XansCodec,
    pack_frequencies,
    tile_frequencies,
    unpack_frequencies,
)
from kvstore.proto.buffers import as_bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.frame import header_bytes, parse_header
from kvstore.proto.types import Component, DType, KVLayout, LayerKind

COMPONENT = Component(LayerKind.attention, DType.bfloat16, 1, 1, 24, 17)
ITEMS = 24 * 17
RECORD_BYTES = 176


def codec_of(name: str) -> XansCodec:
    found = rans.backends()
    if name not in found:
        pytest.skip(f"{name} does not run on this machine")
    return XansCodec(found[name], numpy_splitter if name == "numpy" else XansCodec()._splitter_of)


class TestXansCodec(CodecContract):
    codec = XansCodec()


class TestXansCodecOfNumpyAlone(CodecContract):
    codec = XansCodec(rans.NUMPY, numpy_splitter)


class TestXansCodecInScalarCode(CodecContract):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _choose(cls) -> None:
        cls.codec = codec_of("numba")


def gaussian(component: Component, seed: int = 0, spread: float = 0.6) -> list[Any]:
    """Return parts of a layer with channels of different scales, as bits."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(component.parts):
        scale = np.exp(rng.normal(0, spread, (component.kv_heads, 1, component.head_dim)))
        wide = (rng.standard_normal(component.shape) * scale).astype(np.float32).view(np.uint32)
        parts.append(wide if component.dtype is DType.float32 else (wide >> 16).astype(np.uint16))
    return parts


def segment_of(parts: list[Any], component: Component = COMPONENT) -> bytes:
    codec = XansCodec()
    out = np.zeros(codec.max_segment_bytes(component), np.uint8)
    return bytes(out[: codec.encode_segment(parts, component, out)])


def decode(segment: bytes, component: Component = COMPONENT) -> list[Any]:
    width = component.dtype.item_bytes
    out = [np.full(component.shape, 0x5A, f"u{width}") for _ in range(component.parts)]
    XansCodec().decode_segment(as_bytes(segment), component, out)
    return out


def by_the_format_page(segment: bytes, component: Component) -> list[list[int]]:
    """Decode a segment as docs/format.md says, in integers of Python; its parts' words."""
    width, rows = component.dtype.item_bytes, component.kv_heads * component.tokens
    step = (1 << 15) // component.head_dim
    sizes = [min(step, rows - at) * component.head_dim for at in range(0, rows, step)]
    tiles = [size for _ in range(component.parts) for size in sizes]
    items = sum(tiles)
    records = [segment[176 * k : 176 * (k + 1)] for k in range(len(tiles))]
    at = 176 * len(tiles)
    planes = [segment[at + k * items : at + (k + 1) * items] for k in range(width - 1)]
    at += (width - 1) * items
    counts = [struct.unpack_from("<II", record, 40) for record in records]
    escaped = at + 2 * sum(words for words, _ in counts)
    exponents: list[int] = []
    for record, size, (words, escapes) in zip(records, tiles, counts, strict=True):
        values = segment[escaped : escaped + escapes]
        if escapes == size:
            exponents += values
        else:
            stream = struct.unpack_from(f"<{words}H", segment, at)
            found = _exponents(record, stream, -(-size // 64) * 64)[:size]
            left = iter(values)
            exponents += [next(left) if symbol == 255 else symbol for symbol in found]
            assert list(left) == []
        at, escaped = at + 2 * words, escaped + escapes
    assert escaped == len(segment)
    words = [
        (rest & 0x80) << 8 | exponent << 7 | rest & 0x7F
        for exponent, rest in zip(exponents, planes[0], strict=True)
    ]
    for plane in planes[1:]:
        words = [word << 8 | byte for word, byte in zip(words, plane, strict=True)]
    share = items // component.parts
    return [words[k * share : (k + 1) * share] for k in range(component.parts)]


def _exponents(record: bytes, words: tuple[int, ...], count: int) -> list[int]:
    first, packed = record[0], int.from_bytes(record[1:40], "little")
    values = [0, *range(first, first + 24), 255]
    table = [(value, packed >> 12 * k & 0xFFF) for k, value in enumerate(values)]
    slots = [(value, f, j) for value, f in table for j in range(f)]
    assert len(slots) == 4096
    states = list(struct.unpack("<32I", record[48:]))
    found = [0] * count
    left = iter(words)
    for group in range(0, count, 64):
        for parity in (0, 1):
            for lane in range(32):
                value, f, j = slots[states[lane] & 4095]
                found[group + 2 * lane + parity] = value
                x = f * (states[lane] >> 12) + j
                states[lane] = x if x >= 1 << 16 else x << 16 | next(left)
    assert states == [1 << 16] * 32
    assert list(left) == []
    return found


@pytest.mark.parametrize(
    "component",
    [
        COMPONENT,
        Component(LayerKind.mla, DType.bfloat16, 1, 1, 576, 60),
        Component(LayerKind.attention, DType.float32, 1, 3, 64, 173),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["numpy", "numba", "avx512"])
def test_segments_decode_by_the_prose_of_the_format_page(name: str, component: Component) -> None:
    parts = gaussian(component)
    parts[0][0, 3, 5:9] = [0x7F81, 0xFFFF, 1, 0x8000]
    codec = codec_of(name)
    out = np.zeros(codec.max_segment_bytes(component), np.uint8)
    segment = bytes(out[: codec.encode_segment(parts, component, out)])
    assert segment == segment_of(parts, component)
    words = by_the_format_page(segment, component)
    assert words == [part.reshape(-1).tolist() for part in parts]


@pytest.mark.parametrize(
    ("dtype", "share"), [(DType.bfloat16, 0.69), (DType.float32, 0.85)], ids=str
)
def test_normal_values_take_less_room(dtype: DType, share: float) -> None:
    component = Component(LayerKind.attention, dtype, 1, 4, 128, 256)
    parts = gaussian(component)
    segment = segment_of(parts, component)
    assert len(segment) < share * component.layer_bytes
    assert same([[decode(segment, component)]], [[parts]])


def test_values_that_are_the_same_take_their_rest_and_a_record_only() -> None:
    component = Component(LayerKind.attention, DType.bfloat16, 1, 4, 128, 256)
    parts = [np.full(component.shape, 0x3F85, np.uint16)] * 2
    assert len(segment_of(parts, component)) < component.layer_bytes // 2 + 8 * 300


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float32], ids=str)
def test_noise_is_stored_as_it_is_with_a_record_a_tile(dtype: DType) -> None:
    layout = KVLayout((Component(LayerKind.attention, dtype, 1, 4, 64, 512),))
    tensors = filled(layout, random_bits)
    frame = encoded(XansCodec(), tensors, layout)
    assert len(frame) == header_bytes(layout) + layout.raw_bytes + 8 * RECORD_BYTES
    assert same(decoded(frame), tensors)


@pytest.mark.parametrize("dtype", [DType.float16, DType.int8, DType.float8_e4m3fn], ids=str)
def test_types_without_such_exponents_are_stored_as_they_are(dtype: DType) -> None:
    layout = KVLayout((Component(LayerKind.attention, dtype, 1, 2, 8, 64),))
    frame = encoded(XansCodec(), filled(layout), layout)
    assert len(frame) == header_bytes(layout) + layout.raw_bytes


def test_parts_of_several_batches_and_kinds_of_tiles_survive() -> None:
    long = Component(LayerKind.attention, DType.bfloat16, 1, 3, 96, 1800)
    wide = Component(LayerKind.attention, DType.bfloat16, 1, 1, 40_000, 3)
    layout = KVLayout((long, wide))
    tensors = filled(layout)
    tensors[0][0][0][:, 700:1100] = filled(layout, random_bits)[0][0][0][:, 700:1100]
    tensors[0][0][1][:, 300:340] = filled(layout, special_values)[0][0][1][:, 300:340]
    tensors[0][0][1][:, 900:1400] = 0
    frame = encoded(XansCodec(), tensors, layout)
    assert len(frame) < 0.85 * layout.raw_bytes
    assert same(decoded(frame), tensors)
    assert np.array_equal(encoded(XansCodec(), strided(tensors), layout), frame)
    pages = strided(filled(layout, all_zero))
    XansCodec(rans.NUMPY, numpy_splitter).decode_into(parse_header(frame), frame, pages)
    assert same(pages, tensors)


# --- tables


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32 - 1), st.floats(0.001, 100))
def test_tables_give_every_exponent_a_slot_or_an_escape(seed: int, skew: float) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(256, skew), 3)
    counts = np.array([rng.multinomial(5000, row) for row in shares], np.uint32)
    first, frequencies = tile_frequencies(counts)
    rans.ModelTable(frequencies)
    assert (first >= 1).all()
    assert (first <= MAX_FIRST).all()
    assert (frequencies[:, [0, ESCAPE]] > 0).all()
    for row in range(3):
        window = slice(int(first[row]), int(first[row]) + 24)
        assert (frequencies[row, window][counts[row, window] > 0] > 0).all()
        kept = counts[row, window].sum()
        assert all(counts[row, k : k + 24].sum() <= kept for k in range(1, MAX_FIRST + 1))
    assert np.array_equal(
        unpack_frequencies(first, pack_frequencies(first, frequencies)), frequencies
    )


def test_tables_follow_what_is_there() -> None:
    counts = np.zeros((2, 256), np.uint32)
    counts[0, 120], counts[1, [0, 126]] = 1000, 500
    _, frequencies = tile_frequencies(counts)
    assert frequencies[0, 120] == 4096 - 2
    assert frequencies[1, 126] + frequencies[1, 0] == 4095


# --- hostile segments


def edited(**fields: Any) -> bytes:
    """Return a segment whose first tile's record has *fields* instead."""
    segment = bytearray(segment_of(gaussian(COMPONENT)))
    record = np.frombuffer(segment, XansCodec.record, 1)
    for name, value in fields.items():
        record[name] = value
    return bytes(segment)


@cache
def right() -> bytes:
    return segment_of(gaussian(COMPONENT))


def counts() -> tuple[int, int]:
    words, escapes = struct.unpack_from("<II", right(), 40)
    return words, escapes


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "records cut": lambda: right()[: 2 * RECORD_BYTES - 1],
    "planes cut": lambda: right()[: 2 * RECORD_BYTES + 100],
    "a byte less": lambda: right()[:-1],
    "a byte more": lambda: right() + b"\0",
    "a word less": lambda: edited(words=counts()[0] - 1, escapes=counts()[1] + 2),
    "words of 8 GiB": lambda: edited(words=0xFFFFFFFF),
    "sizes that wrap to the right sum": lambda: edited(words=counts()[0] + (1 << 31)),
    "escapes of 4 GiB": lambda: edited(escapes=0xFFFFFFFF),
    "more escapes than elements": lambda: edited(words=0, escapes=ITEMS + 1),
    "a stream beside a tile of escapes": lambda: edited(escapes=ITEMS),
    "a window at 0": lambda: edited(first=0),
    "a window beyond 254": lambda: edited(first=232),
    "frequencies of zero": lambda: edited(frequencies=0),
    "frequencies of 4095 each": lambda: edited(frequencies=255),
    "states of zero": lambda: edited(states=0),
    "states of 2^32-1": lambda: edited(states=0xFFFFFFFF),
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
        decoded(frame_of_bodies(XansCodec(), KVLayout((COMPONENT,)), [segment]))


@pytest.mark.parametrize("left", [0, 2])
def test_escapes_that_do_not_meet_their_places_are_refused(left: int) -> None:
    parts = gaussian(COMPONENT)
    parts[0][0, 0, :3] = 0x7F80
    segment = bytearray(segment_of(parts))
    words, escapes = struct.unpack_from("<II", segment, 40)
    assert escapes == 3
    struct.pack_into("<II", segment, 40, words, left)
    with pytest.raises(InvalidFrameError, match="escapes"):
        decode(bytes(segment[: len(segment) - 3 + left]))


def test_an_escape_too_many_is_refused() -> None:
    segment = bytearray(segment_of(gaussian(COMPONENT)))
    words, escapes = struct.unpack_from("<II", segment, 40)
    assert escapes == 0
    struct.pack_into("<II", segment, 40, words, 1)
    with pytest.raises(InvalidFrameError, match="escapes"):
        decode(bytes(segment) + b"\0")


@settings(deadline=None, max_examples=250)
@given(st.integers(0, 2**32 - 1))
def test_a_changed_segment_is_refused_or_is_a_layer_by_every_backend(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(10):
        segment = np.frombuffer(right(), np.uint8).copy()
        behind = 2 * RECORD_BYTES if rng.random() < 0.5 else len(segment)
        segment[rng.integers(0, behind, rng.integers(1, 4))] = rng.integers(0, 256)
        answers = []
        for backend in (rans.NUMPY, rans.best_backend()):
            out = [np.zeros(COMPONENT.shape, np.uint16) for _ in range(2)]
            found = b"refused"
            with contextlib.suppress(InvalidFrameError):
                XansCodec(backend).decode_segment(segment, COMPONENT, out)
                found = b"".join(part.tobytes() for part in out)
            answers.append(found)
        assert answers[0] == answers[1]
