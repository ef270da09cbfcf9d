"""lossless: planes, sieved exponents and zstd, by every path; hostile segments.

Bit exactness over many values: ``pytest THIS -k every_value --exact-values N``.
"""

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
    special_values,
    strided,
)
from golden.samples import vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codecs.base import Part, codec_by_name
from kvstore.codecs.lossless import (
    BLOCK_BYTES,
    Loops,
    LosslessCodec,
    body_bytes,
    commonest,
    kind_of,
    pack_sieved,
    scratch_for,
    unpack_sieved,
)
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.frame import header_bytes, raw_frame_bytes
from kvstore.proto.native import paths
from kvstore.proto.types import Component, DType, KVLayout, LayerKind

COMPONENT = Component(LayerKind.mla, DType.bfloat16, 1, 1, 64, 2048)
PLANE_BYTES = COMPONENT.layer_bytes // 2
ONE_LAYER = KVLayout((COMPONENT,))
SIEVED = 1 << 31


class TestLosslessCodec(CodecContract):
    codec = LosslessCodec()


PLAIN_LOOPS = Loops("portable")
PLAIN = LosslessCodec(PLAIN_LOOPS)
"""Of the plainest loops."""


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


@pytest.mark.parametrize(
    ("dtype", "share"),
    [(DType.bfloat16, 0.69), (DType.float16, 0.89), (DType.float32, 0.85), (DType.int8, 0.90)],
    ids=lambda value: getattr(value, "name", value),
)
def test_normal_values_take_less_room_and_noise_is_stored_as_it_is(
    dtype: DType, share: float
) -> None:
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
    layout = KVLayout((Component(LayerKind.attention, dtype, 1, 4, 64, 512),))
    noise = encoded(LosslessCodec(), filled(layout, random_bits), layout)
    assert len(noise) == header_bytes(layout) + layout.raw_bytes + 8 * dtype.item_bytes
    if dtype is DType.float32:  # bfloat16 kept in it loses its zeros
        wide = [[[part & 0xFFFF0000 for part in parts] for parts in filled(layout)[0]]]
        frame = encoded(LosslessCodec(), wide, layout)
        assert len(frame) < 0.36 * layout.raw_bytes
        assert same(decoded(frame), wide)


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

    assert not decode(body(REST, ZEROS))[0].any()  # what is made once a process is no part of it
    assert peak_bytes(refused) <= 2 * COMPONENT.layer_bytes + (2 << 20)
    with pytest.raises(InvalidFrameError):
        decoded(frame_of_bodies(LosslessCodec(), ONE_LAYER, [segment]))


@settings(deadline=None, max_examples=250)
@given(st.integers(0, 2**32 - 1))
def test_a_changed_segment_is_refused_or_is_the_same_layer_to_all_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    component = Component(LayerKind.attention, DType.bfloat16, 1, 2, 32, 24)
    parts = filled(KVLayout((component,)))[0][0]
    room = np.zeros(LosslessCodec().max_segment_bytes(component), np.uint8)
    right = room[: LosslessCodec().encode_segment(parts, component, room)]
    codecs = [LosslessCodec(Loops(path)) for path in paths()]
    for _ in range(10):
        segment = right.copy()
        segment[rng.integers(0, len(segment), rng.integers(1, 4))] = rng.integers(0, 256)
        cut = rng.choice([0, 0, 0, 1, 7, len(segment)])
        data = segment[: len(segment) - cut]
        found = set()
        for codec in codecs:
            out = [np.zeros_like(part) for part in parts]
            try:
                codec.decode_segment(data, component, out)
            except InvalidFrameError:
                found.add(b"")
            else:
                found.add(b"".join(part.tobytes() for part in out))
        assert len(found) == 1
        assert not cut or found == {b""}


KINDS = ["bfloat16", "float16", "float32", "bytes"]
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "bytes": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_planes_are_those_of_the_format_page_by_every_path(kind: str) -> None:
    width = WIDTHS[kind]
    words = np.random.default_rng(0).integers(0, 1 << 8 * width, 70_001, f"u{width}")
    expected = np.array([by_hand(kind, int(word)) for word in words[:4000]]).T
    for loops in map(Loops, (None, *paths())):
        planes, joined = np.empty((width, len(words)), np.uint8), np.zeros_like(words)
        loops.split(kind, words, planes)
        assert np.array_equal(planes[:, :4000], expected)
        loops.join(kind, joined, planes)
        assert np.array_equal(joined, words)
    assert {kind_of(dtype) for dtype in DType} == set(KINDS)


def by_hand(kind: str, word: int) -> list[int]:
    """Return the planes' bytes of *word*, plane 0 first, as docs/format.md has them."""
    match kind:
        case "bfloat16":
            return [word >> 7 & 0xFF, word >> 8 & 0x80 | word & 0x7F]
        case "float16":
            return [word >> 8, word & 0xFF]
        case "float32":
            return [*by_hand("bfloat16", word >> 16), *by_hand("float16", word & 0xFFFF)]
        case _:
            return [word]


def test_bounds_of_layers_that_no_machine_holds_are_found_at_once() -> None:
    most = (1 << 24) - 1
    for dim in (1, most):
        component = Component(LayerKind.attention, DType.float32, most, most, dim, most)
        bound = codec_by_name("lossless").max_segment_bytes(component)
        assert component.layer_bytes <= bound < 1.1 * component.layer_bytes


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float32, DType.uint8])
def test_nothing_is_decoded_into_memory_that_is_read_only(dtype: DType) -> None:
    words = np.zeros(64, f"u{dtype.item_bytes}")
    planes = np.ones((dtype.item_bytes, 64), np.uint8)
    words.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        Loops().join(kind_of(dtype), words, planes)
    assert not words.any()


HEAD_BYTES = 36
SIEVES = paths()


def exponents_of(items: int, seed: int = 0) -> Bytes:
    """Return the exponents of normal values: some ten values are all but a few of them."""
    normal = np.random.default_rng(seed).standard_normal(items).astype(np.float32)
    return (normal.view(np.uint32) >> 23 & 255).astype(np.uint8)


def sieved(plane: Bytes, sieve: Loops = PLAIN_LOOPS) -> bytes:
    out = np.zeros(len(plane) + HEAD_BYTES + 128, np.uint8)
    found = pack_sieved(plane, sieve, scratch_for(len(plane)), out)
    assert found is not None
    return found.tobytes()


def unpacked(data: bytes, items: int, sieve: Loops) -> Bytes:
    out = np.zeros(items, np.uint8)
    unpack_sieved(as_bytes(data), sieve, scratch_for(items), out)
    return out


def unsieved(data: bytes, items: int) -> bytes:
    """Return the *items* bytes of a sieved plane, as docs/format.md tells it."""
    values, counts = data[:15], struct.unpack_from("<5I", data, 16)
    passes, at = [], HEAD_BYTES
    for number, count in enumerate((items, *counts[:4])):
        kinds = []
        for place in range(count):
            low, high = struct.unpack_from("<QQ", data, at + 16 * (place // 64))
            kinds.append((low >> place % 64 & 1) + 2 * (high >> place % 64 & 1))
        at += 16 * -(-count // 64)
        passes.append((values[3 * number : 3 * number + 3], kinds))
    assert at + counts[4] == len(data)
    left = data[at:]
    for kept, kinds in reversed(passes):
        rest = iter(left)
        left = bytes(next(rest) if kind == 3 else kept[kind] for kind in kinds)
    return left


@pytest.mark.parametrize("name", SIEVES)
def test_a_sieved_plane_reads_by_the_prose_of_the_format_page(name: str) -> None:
    for items in [150, 2048, 6007]:
        plane = exponents_of(items)
        data = sieved(plane, Loops(name))
        assert unsieved(data, items) == plane.tobytes()
        assert np.array_equal(unpacked(data, items, Loops(name)), plane)
        assert len(data) < 0.40 * items + HEAD_BYTES + 64


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 700), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_all_sieves_agree_on_any_plane_and_any_values(items: int, spread: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    plane = rng.integers(0, spread, items, np.uint8)
    values = rng.permutation(max(15, 2 * spread))[:15].astype(np.uint8)
    bodies = []
    for sieve in map(Loops, SIEVES):
        out = np.zeros(3 * items + 200, np.uint8)
        counts = sieve.squeeze(plane, values, scratch_for(items), out)
        assert counts is not None
        body = out[: body_bytes(items, counts)]
        bodies.append((counts, body.tobytes()))
        short = np.zeros(len(body) - 1, np.uint8)
        assert sieve.squeeze(plane, values, scratch_for(items), short) is None
        back = np.zeros(items, np.uint8)
        assert sieve.spread(body, values, counts, scratch_for(items), back)
        assert np.array_equal(back, plane)
    assert all(body == bodies[0] for body in bodies)


@pytest.mark.parametrize("values", [1, 2, 60, 256])
def test_planes_of_very_few_or_many_values_are_not_sieved(values: int) -> None:
    plane = np.random.default_rng(3).integers(0, values, 9000, np.uint8)
    assert commonest(plane) is None
    out = np.zeros(20_000, np.uint8)
    assert pack_sieved(plane, PLAIN_LOOPS, scratch_for(9000), out) is None


def test_a_plane_that_would_not_fit_is_not_sieved() -> None:
    plane = exponents_of(4000)
    size = len(sieved(plane))
    for room, is_found in ((size, True), (size - 1, False), (HEAD_BYTES, False), (0, False)):
        for name in SIEVES:
            sieve, out = Loops(name), np.zeros(room, np.uint8)
            assert (pack_sieved(plane, sieve, scratch_for(4000), out) is not None) == is_found


ITEMS = 1000
RIGHT = sieved(exponents_of(ITEMS))


def with_counts(*counts: int) -> bytes:
    return RIGHT[:16] + struct.pack("<5I", *counts) + RIGHT[HEAD_BYTES:]


COUNTS = struct.unpack_from("<5I", RIGHT, 16)
FIRST = HEAD_BYTES + 16 * -(-ITEMS // 64)
HOSTILE_PLANES = {
    "nothing": b"",
    "half a head": RIGHT[:20],
    "a head alone": RIGHT[:HEAD_BYTES],
    "one byte missing": RIGHT[:-1],
    "one byte behind": RIGHT + b"\0",
    "a byte that is not 0": RIGHT[:15] + b"\1" + RIGHT[16:],
    "counts of 4 GiB": with_counts(*[(1 << 32) - 1] * 5),
    "a pass that leaves more than it was given": with_counts(COUNTS[0], COUNTS[0] + 1, *COUNTS[2:]),
    "a first pass that leaves more than the plane": with_counts(ITEMS + 1, *COUNTS[1:]),
    "one more left than the bits say": with_counts(COUNTS[0] + 1, *COUNTS[1:]),
    "all bits set": RIGHT[:HEAD_BYTES] + b"\xff" * (FIRST - HEAD_BYTES) + RIGHT[FIRST:],
    "no bits set": RIGHT[:HEAD_BYTES] + bytes(FIRST - HEAD_BYTES) + RIGHT[FIRST:],
    "all bits of all passes set": RIGHT[:HEAD_BYTES] + b"\xff" * (len(RIGHT) - HEAD_BYTES),
}


@pytest.mark.parametrize("name", SIEVES)
def test_a_hostile_sieved_plane_is_refused(name: str) -> None:
    for data in HOSTILE_PLANES.values():
        with pytest.raises(InvalidFrameError, match="sieved plane"):
            unpacked(data, ITEMS, Loops(name))


WIDE = Component(LayerKind.attention, DType.bfloat16, 1, 4, 128, 256)
VALUES = WIDE.layer_bytes // 2


def every_word(shape: tuple[int, ...], width: int, rng: np.random.Generator) -> Any:
    """Every bit pattern equally often, in random order."""
    size = int(np.prod(shape))
    words = np.arange(size, dtype=np.uint64) % (1 << 8 * width)
    return rng.permutation(words).astype(f"u{width}").reshape(shape)


def every_exponent_in_turn(shape: tuple[int, ...], width: int, rng: np.random.Generator) -> Any:
    """Rows that each have exponents of a few kinds, from one to many."""
    spread = rng.integers(1, 60, (*shape[:2], 1))
    first = rng.integers(0, 256, (*shape[:2], 1))
    exponents = (first + rng.integers(0, 1 << 30, shape) % spread) & 0xFF
    rest = rng.integers(0, 1 << 16, shape) & 0x807F
    return (exponents << 7 | rest).astype(np.uint16)


def mostly_normal(shape: tuple[int, ...], width: int, rng: np.random.Generator) -> Any:
    """Normal numbers, and here and there what no table expects."""
    words = normal_values(shape, width, rng)
    odd = rng.random(shape) < 10.0 ** -rng.integers(1, 6)
    words[odd] = special_values(shape, width, rng)[odd]
    return words


FILLS = [every_word, every_exponent_in_turn, mostly_normal, random_bits]


@pytest.mark.timeout(0)
def test_every_value_comes_back_bit_by_bit(request: pytest.FixtureRequest) -> None:
    codec = codec_by_name("lossless")
    room = np.empty(codec.max_segment_bytes(WIDE), np.uint8)
    out = [np.empty(WIDE.shape, np.uint16) for _ in range(2)]
    rng = np.random.default_rng(2024)
    todo = request.config.getoption("--exact-values")
    for turn in range(-(-todo // VALUES)):
        fill = FILLS[turn % len(FILLS)]
        parts = [fill(WIDE.shape, 2, rng) for _ in range(2)]
        used = codec.encode_segment(parts, WIDE, room)
        codec.decode_segment(room[:used].copy(), WIDE, out)
        for part, found in zip(parts, out, strict=True):
            assert np.array_equal(part, found), f"{fill.__name__}, turn {turn}"
