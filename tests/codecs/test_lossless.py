from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import zstandard
from contracts.codec import (
    CodecContract,
    decoded,
    encoded,
    filled,
    frame_of_bodies,
    normal_values,
    peak_bytes,
    random_bits,
    same,
    strided,
)
from golden.samples import vectors
from golden.sieved import unsieved
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.sieve import NUMPY

from kvstore.codecs.base import Part
from kvstore.codecs.lossless import BLOCK_BYTES, LosslessCodec
from kvstore.proto.buffers import as_bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.frame import header_bytes, raw_frame_bytes
from kvstore.proto.types import Component, DType, KVLayout, LayerKind

COMPONENT = Component(LayerKind.mla, DType.bfloat16, 1, 1, 64, 2048)
PLANE_BYTES = COMPONENT.layer_bytes // 2
ONE_LAYER = KVLayout((COMPONENT,))
SIEVED = 1 << 31


class TestLosslessCodec(CodecContract):
    codec = LosslessCodec()


PLAIN = LosslessCodec(NUMPY)
"""Without compiled loops."""


def body(*planes: bytes) -> bytes:
    """Return a segment of one block with *planes* in the order they are stored."""
    return struct.pack(f"<{len(planes)}I", *map(len, planes)) + b"".join(planes)


def compressed(data: bytes, **options: int | bool) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=17, **options)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)


def decode(segment: bytes) -> list[Part]:
    out = [np.empty(COMPONENT.shape, np.uint16)]
    LosslessCodec().decode_segment(as_bytes(segment), COMPONENT, out)
    return out


def with_sieved(*rows: int, planes: bytes) -> bytes:
    return struct.pack(f"<{len(rows)}I", *rows) + planes


def test_exponents_are_sieved_and_other_planes_never() -> None:
    part = filled(ONE_LAYER, normal_values)[0][0]
    out = np.zeros(LosslessCodec().max_segment_bytes(COMPONENT), np.uint8)
    segment = out[: LosslessCodec().encode_segment(part, COMPONENT, out)].tobytes()
    rest, exponents = struct.unpack_from("<II", segment)
    assert rest == PLANE_BYTES
    assert exponents & SIEVED
    size = exponents & ~SIEVED
    assert np.array_equal(decode(segment)[0], part[0])
    sieved = segment[8 + PLANE_BYTES :]
    swapped = with_sieved(exponents, PLANE_BYTES, planes=sieved + bytes(PLANE_BYTES))
    with pytest.raises(InvalidFrameError, match="only exponents"):
        decode(swapped)
    for wrong in (sieved[:-1], sieved + b"\0", b"", bytes(size)):
        row = len(wrong) | SIEVED
        with pytest.raises(InvalidFrameError, match="sieved plane"):
            decode(with_sieved(PLANE_BYTES, row, planes=bytes(PLANE_BYTES) + wrong))


@pytest.mark.parametrize("dtype", [DType.float16, DType.int8], ids=lambda dtype: dtype.name)
def test_sieved_planes_of_other_types_are_refused(dtype: DType) -> None:
    component = Component(LayerKind.mla, dtype, 1, 1, 64, 64)
    rows = [4096] * (dtype.item_bytes - 1) + [4096 | SIEVED]
    out = [np.empty(component.shape, f"u{dtype.item_bytes}")]
    with pytest.raises(InvalidFrameError, match="only exponents"):
        LosslessCodec().decode_segment(
            as_bytes(with_sieved(*rows, planes=bytes(component.layer_bytes))), component, out
        )


REST = bytes(PLANE_BYTES)
ZEROS = compressed(bytes(PLANE_BYTES))


def test_the_segment_is_that_of_the_format_page() -> None:
    component = Component(LayerKind.mla, DType.bfloat16, 1, 1, 4, 1)
    words = np.array([0x3F80, 0xBF80, 0x7FC1, 0x8000], np.uint16).reshape(component.shape)
    out = np.zeros(LosslessCodec().max_segment_bytes(component), np.uint8)
    used = LosslessCodec().encode_segment([words], component, out)
    assert out[:used].tobytes().hex() == vectors()["lossless_segment"]


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_segments_decode_by_the_prose_of_the_format_page(dtype: DType) -> None:
    component = Component(LayerKind.attention, dtype, 1, 3, 96, 1100)
    parts = filled(KVLayout((component,)), normal_values)[0][0]
    out = np.zeros(LosslessCodec().max_segment_bytes(component), np.uint8)
    segment = out[: LosslessCodec().encode_segment(parts, component, out)].tobytes()
    width = dtype.item_bytes
    step = max(1, (1 << 19) // width // 96)
    blocks = [min(step, 3300 - row) * 96 for row in range(0, 3300, step)] * 2
    sizes = struct.unpack_from(f"<{width * len(blocks)}I", segment)
    at = 4 * len(sizes)
    words: list[int] = []
    for index, items in enumerate(blocks):
        planes: list[Any] = []
        for row in sizes[width * index : width * (index + 1)]:
            size = row & ~SIEVED
            data = segment[at : at + size]
            if row & SIEVED:
                data = unsieved(data, items)
            elif size < items:
                data = zstandard.ZstdDecompressor().decompress(data)
            planes.insert(0, np.frombuffer(data, np.uint8).astype(np.uint64))
            at += size
        words += _joined(dtype, planes).tolist()
    assert at == len(segment)
    assert words == [int(x) for part in parts for x in part.reshape(-1)]


def _joined(dtype: DType, planes: list[Any]) -> Any:
    if dtype.item_bytes == 1:
        return planes[0]
    exponent, rest, *low = planes
    if dtype is DType.float16:
        return exponent << np.uint64(8) | rest
    word = (
        (rest >> np.uint64(7)) << np.uint64(15) | exponent << np.uint64(7) | rest & np.uint64(127)
    )
    for plane in low:
        word = word << np.uint64(8) | plane
    return word


@pytest.mark.parametrize(
    ("dtype", "share"),
    [(DType.bfloat16, 0.69), (DType.float16, 0.89), (DType.float32, 0.85), (DType.int8, 0.90)],
    ids=lambda value: getattr(value, "name", value),
)
def test_normal_values_take_less_room(dtype: DType, share: float) -> None:
    layout = KVLayout((Component(LayerKind.attention, dtype, 2, 4, 64, 256),))
    rng = np.random.default_rng(5)
    tensors = filled(layout)
    for parts in tensors[0]:
        for part in parts:
            value = rng.standard_normal(part.shape)
            if dtype is DType.float16:
                part[...] = value.astype(np.float16).view(np.uint16)
            elif dtype is DType.int8:
                part[...] = np.rint(20 * value).astype(np.int8).view(np.uint8)
    frame = encoded(LosslessCodec(), tensors, layout)
    assert len(frame) < share * raw_frame_bytes(layout)
    assert same(decoded(frame), tensors)


def test_noise_is_stored_as_it_is() -> None:
    for dtype in DType:
        layout = KVLayout((Component(LayerKind.attention, dtype, 1, 4, 64, 512),))
        frame = encoded(LosslessCodec(), filled(layout, random_bits), layout)
        assert len(frame) == header_bytes(layout) + layout.raw_bytes + 8 * dtype.item_bytes


def test_words_of_bfloat16_kept_as_float32_lose_their_zeros() -> None:
    layout = KVLayout((Component(LayerKind.attention, DType.float32, 1, 4, 64, 512),))
    tensors = [[[part & 0xFFFF0000 for part in parts] for parts in filled(layout)[0]]]
    frame = encoded(LosslessCodec(), tensors, layout)
    assert len(frame) < 0.36 * layout.raw_bytes
    assert same(decoded(frame), tensors)


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float32], ids=lambda dtype: dtype.name)
def test_parts_of_several_blocks_and_rows_wider_than_one_survive(dtype: DType) -> None:
    wide = Component(LayerKind.attention, dtype, 1, 2, BLOCK_BYTES // 4 + 999, 2)
    many = Component(LayerKind.attention, dtype, 1, 3, 80, 2500)
    layout = KVLayout((wide, many))
    tensors = filled(layout)
    frame = encoded(LosslessCodec(), tensors, layout)
    assert same(decoded(frame), tensors)
    assert np.array_equal(encoded(LosslessCodec(), strided(tensors), layout), frame)
    assert np.array_equal(encoded(PLAIN, tensors, layout), frame)


def test_planes_of_other_writers_are_read() -> None:
    data = np.random.default_rng(1).integers(0, 9, PLANE_BYTES, np.uint8).tobytes()
    for packed in (compressed(data, write_checksum=True), data):
        exponents = decode(body(REST, packed))[0].reshape(-1) >> 7
        assert np.array_equal(exponents, np.frombuffer(data, np.uint8))


def declaring(content_bytes: int) -> bytes:
    """A header with an eight-byte content size and a small window, then a block of 1,000 zeros."""
    run_of_zeros = struct.pack("<I", 1 | 1 << 1 | 1000 << 3)[:3] + b"\0"
    return b"\x28\xb5\x2f\xfd\xc0\x38" + struct.pack("<Q", content_bytes) + run_of_zeros


def with_dictionary() -> bytes:
    samples: list[bytes | bytearray | memoryview[int]] = [
        np.random.default_rng(i).integers(0, 4, 2000, np.uint8).tobytes() for i in range(64)
    ]
    dictionary = zstandard.train_dictionary(4096, samples)
    return zstandard.ZstdCompressor(level=1, dict_data=dictionary).compress(bytes(PLANE_BYTES))


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "half a table": struct.pack("<I", PLANE_BYTES),
    "a table alone": struct.pack("<II", PLANE_BYTES, PLANE_BYTES),
    "one plane short": body(REST, bytes(PLANE_BYTES - 1)),
    "one byte behind": body(REST, REST) + b"\0",
    "one byte missing": body(REST, REST)[:-1],
    "a size of nearly 4 GiB": struct.pack("<II", (1 << 32) - 1, 1) + ZEROS,
    "sizes that wrap to the right sum": struct.pack("<II", (1 << 32) - 8, 16) + bytes(8),
    "a plane longer than itself": body(REST, compressed(bytes(PLANE_BYTES)).ljust(PLANE_BYTES + 1)),
    "an empty plane": body(REST, b""),
    "a plane that is no zstd": body(REST, b"\xff" * 64),
    "64 MiB of zeros": body(REST, compressed(bytes(1 << 26))),
    "one byte more": body(REST, compressed(bytes(PLANE_BYTES + 1))),
    "one byte less": body(REST, compressed(bytes(PLANE_BYTES - 1))),
    "no content size": body(REST, compressed(bytes(PLANE_BYTES), write_content_size=False)),
    "no content size, without end": body(
        REST, compressed(bytes(1 << 26), write_content_size=False)
    ),
    "a terabyte declared": body(REST, declaring(1 << 40)),
    "2^64-1 declared": body(REST, declaring((1 << 64) - 1)),
    "the right size declared, a thousand bytes held": body(REST, declaring(PLANE_BYTES)),
    "a frame cut": body(REST, ZEROS[:-1]),
    "only a zstd header": body(REST, ZEROS[:9]),
    "an empty frame first": body(REST, compressed(b"") + ZEROS),
    "a skippable frame first": body(
        REST, b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + bytes(4) + ZEROS
    ),
    "a dictionary that nobody has": body(REST, with_dictionary()),
    "bytes behind": body(REST, ZEROS + b"\0"),
    "another frame behind": body(REST, ZEROS + ZEROS),
    "a skippable frame": body(REST, b"\x50\x2a\x4d\x18" + struct.pack("<I", PLANE_BYTES)),
    "a window of 128 MiB": body(
        REST, b"\x28\xb5\x2f\xfd\xc0\x88" + struct.pack("<Q", PLANE_BYTES) + b"\x43\x1f\x00\x00"
    ),
}


@pytest.mark.parametrize("segment", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_segment_is_refused_without_allocation_beyond_a_layer(segment: bytes) -> None:
    def refused() -> None:
        with pytest.raises(InvalidFrameError):
            decode(segment)

    refused()  # what is made once a process is no part of it
    assert peak_bytes(refused) <= 2 * COMPONENT.layer_bytes + (2 << 20)
    with pytest.raises(InvalidFrameError):
        decoded(frame_of_bodies(LosslessCodec(), ONE_LAYER, [segment]))


def test_a_right_plane_passes_where_the_hostile_ones_fail() -> None:
    assert not decode(body(REST, ZEROS))[0].any()


@settings(deadline=None, max_examples=250)
@given(st.integers(0, 2**32 - 1))
def test_a_changed_segment_is_refused_or_is_the_same_layer_to_all_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    component = Component(LayerKind.attention, DType.bfloat16, 1, 2, 32, 24)
    parts = filled(KVLayout((component,)))[0][0]
    room = np.zeros(LosslessCodec().max_segment_bytes(component), np.uint8)
    right = room[: LosslessCodec().encode_segment(parts, component, room)]
    out, plain = ([np.empty_like(part) for part in parts] for _ in range(2))
    for _ in range(10):
        segment = right.copy()
        segment[rng.integers(0, len(segment), rng.integers(1, 4))] = rng.integers(0, 256)
        cut = rng.choice([0, 0, 0, 1, 7, len(segment)])
        data = segment[: len(segment) - cut]
        try:
            LosslessCodec().decode_segment(data, component, out)
        except InvalidFrameError:
            with pytest.raises(InvalidFrameError):
                PLAIN.decode_segment(data, component, plain)
        else:
            assert cut == 0
            PLAIN.decode_segment(data, component, plain)
            assert same([[out]], [[plain]])
