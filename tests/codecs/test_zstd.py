from __future__ import annotations

import struct

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
)
from golden.samples import vectors

from kvstore.codecs.base import Part
from kvstore.codecs.zstd import ZstdCodec
from kvstore.proto.buffers import as_bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.frame import header_bytes, raw_frame_bytes
from kvstore.proto.types import Component, DType, KVLayout, LayerKind

COMPONENT = Component(LayerKind.mla, DType.bfloat16, 1, 1, 64, 4096)
PLANE_BYTES = COMPONENT.layer_bytes // 2
ONE_LAYER = KVLayout((COMPONENT,))


class TestZstdCodec(CodecContract):
    codec = ZstdCodec()


def body(*planes: tuple[int, int, bytes]) -> bytes:
    table = b"".join(struct.pack("<II", method, size) for method, size, _ in planes)
    return table + b"".join(data for _, _, data in planes)


def compressed(data: bytes, **options: int | bool) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=17, **options)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)


def decode(segment: bytes) -> list[Part]:
    out = [np.empty(COMPONENT.shape, np.uint16)]
    ZstdCodec().decode_segment(as_bytes(segment), COMPONENT, out)
    return out


STORED = (0, PLANE_BYTES, bytes(PLANE_BYTES))
ZEROS = compressed(bytes(PLANE_BYTES))
NOISE = compressed(np.random.default_rng(3).bytes(PLANE_BYTES))


def test_planes_are_as_the_format_page_says() -> None:
    component = Component(LayerKind.mla, DType.bfloat16, 1, 1, 4, 1)
    words = np.array([0x3F80, 0xBF80, 0x7FC1, 0x8000], np.uint16).reshape(component.shape)
    out = np.zeros(ZstdCodec().max_segment_bytes(component), np.uint8)
    used = ZstdCodec().encode_segment([words], component, out)
    assert out[:used].tobytes().hex() == vectors()["zstd_planes"]


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_planes_decode_by_the_prose_of_the_format_page(dtype: DType) -> None:
    component = Component(LayerKind.attention, dtype, 1, 2, 48, 1024)
    parts = filled(KVLayout((component,)), normal_values)[0][0]
    out = np.zeros(ZstdCodec().max_segment_bytes(component), np.uint8)
    segment = out[: ZstdCodec().encode_segment(parts, component, out)].tobytes()
    width = dtype.item_bytes
    count = component.layer_bytes // width
    at, words = 8 * width, [0] * count
    for plane in range(width):
        method, size = struct.unpack_from("<II", segment, 8 * plane)
        data = segment[at : at + size]
        if method == 1:
            data = zstandard.ZstdDecompressor().decompress(data)
        words = [word | byte << 8 * plane for word, byte in zip(words, data, strict=True)]
        at += size
    if dtype in (DType.bfloat16, DType.float32):
        top = 8 * width - 1
        words = [word >> 1 | (word & 1) << top for word in words]
    assert at == len(segment)
    assert words == [int(x) for part in parts for x in part.reshape(-1)]


@pytest.mark.parametrize(
    ("dtype", "share"),
    [(DType.bfloat16, 0.70), (DType.float16, 0.90), (DType.float32, 0.87), (DType.int8, 0.90)],
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
    frame = encoded(ZstdCodec(), tensors, layout)
    assert len(frame) < share * raw_frame_bytes(layout)
    assert same(decoded(frame), tensors)


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
def test_noise_is_stored_as_it_is(dtype: DType) -> None:
    layout = KVLayout((Component(LayerKind.attention, dtype, 1, 4, 64, 512),))
    frame = encoded(ZstdCodec(), filled(layout, random_bits), layout)
    assert len(frame) == header_bytes(layout) + layout.raw_bytes + 8 * dtype.item_bytes


def test_rows_wider_than_a_box_survive() -> None:
    layout = KVLayout((Component(LayerKind.attention, DType.float32, 1, 2, 70000, 2),))
    assert same(decoded(encoded(ZstdCodec(), filled(layout), layout)), filled(layout))


def test_planes_of_other_writers_are_read() -> None:
    data = np.random.default_rng(1).integers(0, 9, PLANE_BYTES, np.uint8).tobytes()
    whole = zstandard.ZstdCompressionParameters.from_level(19, window_log=20)
    single_segment = zstandard.ZstdCompressor(compression_params=whole).compress(data)
    assert zstandard.get_frame_parameters(single_segment).window_size == PLANE_BYTES > 1 << 17
    for packed in (single_segment, compressed(data, write_checksum=True)):
        out = decode(body((1, len(packed), packed), STORED))
        assert np.array_equal(out[0].reshape(-1) & 0x7F, np.frombuffer(data, np.uint8) >> 1)


HOSTILE_PLANES: dict[str, bytes] = {
    "no table": b"",
    "half a table": struct.pack("<III", 0, PLANE_BYTES, 0),
    "a table alone": struct.pack("<IIII", 0, PLANE_BYTES, 0, PLANE_BYTES),
    "one plane short": body(STORED, (0, PLANE_BYTES - 1, bytes(PLANE_BYTES - 1))),
    "one byte behind": body(STORED, STORED) + b"\0",
    "one byte missing": body(STORED, STORED)[:-1],
    "a size of nearly 4 GiB": body(STORED, (1, (1 << 32) - 1, ZEROS)),
    "sizes that wrap to the right sum": body((0, (1 << 32) - 8, b""), (0, 8, bytes(8))),
    "an unknown method": body((2, PLANE_BYTES, bytes(PLANE_BYTES)), STORED),
    "an unknown method over a right plane": body((2, len(ZEROS), ZEROS), STORED),
    "a right plane longer than it would be stored": body((1, len(NOISE), NOISE), STORED),
    "a method of 2^31": body((1 << 31, PLANE_BYTES, bytes(PLANE_BYTES)), STORED),
    "an empty zstd plane": body((1, 0, b""), STORED),
    "a plane that is no zstd": body((1, 64, b"\xff" * 64), STORED),
    "too short a content": body((1, 64, compressed(bytes(64))[:64].ljust(64)), STORED),
    "a zstd plane larger than raw": body(
        (1, PLANE_BYTES + 40, ZEROS.ljust(PLANE_BYTES + 40)), STORED
    ),
}


def zstd_plane(packed: bytes) -> bytes:
    return body((1, len(packed), packed), STORED)


def declaring(content_bytes: int) -> bytes:
    """A frame header with an eight-byte content size and a small window, then one block."""
    header = b"\x28\xb5\x2f\xfd" + bytes([0b11000000, 0x38]) + struct.pack("<Q", content_bytes)
    run_of_zeros = struct.pack("<I", 1 | 1 << 1 | 1000 << 3)[:3] + b"\0"
    return header + run_of_zeros


HOSTILE_ZSTD: dict[str, bytes] = {
    "64 MiB of zeros": compressed(bytes(1 << 26)),
    "one byte more": compressed(bytes(PLANE_BYTES + 1)),
    "one byte less": compressed(bytes(PLANE_BYTES - 1)),
    "no content size": compressed(bytes(PLANE_BYTES), write_content_size=False),
    "no content size, without end": compressed(bytes(1 << 26), write_content_size=False),
    "a terabyte declared": declaring(1 << 40),
    "2^64-1 declared": declaring((1 << 64) - 1),
    "the right size declared, a thousand bytes held": declaring(PLANE_BYTES),
    "a frame cut": ZEROS[:-1],
    "only a zstd header": ZEROS[:9],
    "bytes behind": ZEROS + b"\0",
    "another frame behind": ZEROS + ZEROS,
    "an empty frame first": compressed(b"") + ZEROS,
    "a skippable frame": b"\x50\x2a\x4d\x18" + struct.pack("<I", PLANE_BYTES),
    "a skippable frame first": b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + bytes(4) + ZEROS,
}


@pytest.mark.parametrize("segment", HOSTILE_PLANES.values(), ids=HOSTILE_PLANES)
def test_a_hostile_plane_table_is_refused(segment: bytes) -> None:
    with pytest.raises(InvalidFrameError):
        decode(segment)


@pytest.mark.parametrize("packed", HOSTILE_ZSTD.values(), ids=HOSTILE_ZSTD)
def test_a_hostile_zstd_plane_is_refused_without_allocation_beyond_a_layer(packed: bytes) -> None:
    def refused() -> None:
        with pytest.raises(InvalidFrameError):
            decode(zstd_plane(packed))

    assert peak_bytes(refused) <= 2 * COMPONENT.layer_bytes + (2 << 20)
    with pytest.raises(InvalidFrameError):
        decoded(frame_of_bodies(ZstdCodec(), ONE_LAYER, [zstd_plane(packed)]))


def test_a_plane_with_too_large_a_window_is_refused() -> None:
    huge = zstandard.ZstdCompressionParameters.from_level(1, window_log=27, write_content_size=True)
    compressor = zstandard.ZstdCompressor(compression_params=huge).compressobj()
    packed = compressor.compress(bytes(PLANE_BYTES)) + compressor.flush()
    assert zstandard.get_frame_parameters(packed).window_size == 1 << 27
    with pytest.raises(InvalidFrameError, match="must declare"):
        decode(zstd_plane(packed))
    with_size = bytearray(declaring(PLANE_BYTES))
    with_size[5] = 0x88
    assert zstandard.get_frame_parameters(bytes(with_size)).window_size == 1 << 27
    with pytest.raises(InvalidFrameError, match=r"^window=134217728"):
        decode(zstd_plane(bytes(with_size)))


def test_a_plane_that_needs_a_dictionary_is_refused() -> None:
    samples: list[bytes | bytearray | memoryview[int]] = [
        np.random.default_rng(i).integers(0, 4, 2000, np.uint8).tobytes() for i in range(64)
    ]
    dictionary = zstandard.train_dictionary(4096, samples)
    packed = zstandard.ZstdCompressor(level=1, dict_data=dictionary).compress(bytes(PLANE_BYTES))
    assert zstandard.get_frame_parameters(packed).dict_id != 0
    with pytest.raises(InvalidFrameError, match=r"[Dd]ictionary"):
        decode(zstd_plane(packed))


def test_a_right_plane_passes_where_the_hostile_ones_fail() -> None:
    assert not decode(zstd_plane(ZEROS))[0].any()


def test_encoding_uses_no_state_of_earlier_frames() -> None:
    layout = KVLayout((Component(LayerKind.attention, DType.bfloat16, 2, 2, 64, 256),))
    first = encoded(ZstdCodec(), filled(layout), layout).tobytes()
    for seed in range(4):
        encoded(ZstdCodec(), filled(layout, seed=seed), layout)
    assert encoded(ZstdCodec(), filled(layout), layout).tobytes() == first
