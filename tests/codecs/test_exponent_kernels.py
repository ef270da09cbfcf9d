"""The kernels of xans and xpack, run on the CPU and compiled for CUDA, against the host."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.codec import (
    FILLS,
    Fill,
    Tensors,
    encoded,
    filled,
    frame_of_bodies,
    layouts,
    paged_layouts,
    random_bits,
)
from cpu_kernels import compile_kernels
from cuda_compiler import ARCHITECTURES, compile_cuda, resources
from device_frames import CPU, Place, decoded, is_refused

from kvstore.codecs import frame_kernels
from kvstore.codecs.exponent_kernels import (
    SOURCES,
    THREADS,
    ExponentKernels,
    open_exponent_kernels,
)
from kvstore.codecs.exponents import ExponentCodec, batches, tile_items
from kvstore.codecs.frame_kernels import COMPILER_FLAGS
from kvstore.codecs.planes import numpy_splitter
from kvstore.codecs.rans import NUMPY as NUMPY_RANS
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.xans import XansCodec
from kvstore.codecs.xpack import NUMPY as NUMPY_PACKER
from kvstore.codecs.xpack import XpackCodec
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, UnknownCodecError
from kvstore.proto.frame import parse_header
from kvstore.proto.types import Component, DType, KVLayout, LayerKind

KERNELS = [
    f"{codec}_{name}" for codec in ("xans", "xpack") for name in ("open", "bfloat16", "float32")
]
GOLDEN = Path(__file__).parents[1] / "golden"
EMULATED_THREADS = 64
HOSTILE_CASES = 300
XANS, XPACK = XansCodec(NUMPY_RANS, numpy_splitter), XpackCodec(NUMPY_PACKER, numpy_splitter)
CODECS: list[ExponentCodec] = [XANS, XPACK]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
_every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
_every_dtype = pytest.mark.parametrize(
    "dtype", [DType.bfloat16, DType.float32], ids=lambda dtype: dtype.name
)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ExponentKernels:
    """The CUDA source, compiled for the CPU with checks for undefined behaviour."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("exponents")
    return ExponentKernels(CPU, compile_kernels(folder, SOURCES, KERNELS, EMULATED_THREADS))


def normal(shape: tuple[int, ...], item_bytes: int, rng: np.random.Generator) -> np.ndarray:
    """Normal numbers, and a few of any bits."""
    wide = rng.standard_normal(shape, np.float32).view(np.uint32)
    odd = rng.integers(0, 1 << 32, shape, np.uint32)
    wide = np.where(rng.random(shape) < 0.01, odd, wide)
    return (wide >> np.uint32(8 * (4 - item_bytes))).astype(f"u{item_bytes}")


def shapes(dtype: DType) -> dict[str, KVLayout]:
    """Layouts of every relation between rows, groups of 64, and tiles."""

    def latents(dim: int, tokens: int) -> KVLayout:
        return KVLayout((Component(LayerKind.mla, dtype, 1, 1, dim, tokens),))

    ours = {
        "odd planes": latents(37, 19),
        "a row a tile": latents(20_000, 3),
        "several tiles": KVLayout((Component(LayerKind.attention, dtype, 1, 3, 128, 300),)),
        "rows of one": latents(1, 77),
    }
    return paged_layouts(dtype) | ours


def decode(kernels: ExponentKernels, place: Place) -> None:
    kernels.decode(place.memory, place.frames, place.paged)()


def read(codec: ExponentCodec, frame: Bytes) -> Tensors:
    """Return what the host's codec reads."""
    return decoded(frame, codec.decode_into)


def assert_decoded(
    kernels: ExponentKernels, codec: ExponentCodec, frames: Sequence[Bytes],
    device: torch.device = CPU,
) -> None:  # fmt: skip
    """The kernels put what the host decodes where it belongs, and nothing anywhere else."""
    found, expected = Place.of(frames, device), Place.of(frames)
    before = expected.contents()
    for frame, at in zip(frames, expected.frames, strict=True):
        expected.write(at, read(codec, frame))
    decode(kernels, found)
    assert found.contents() == expected.contents()
    assert found.contents() != before


def frames_of(codec: ExponentCodec, layout: KVLayout, fills: Sequence[Fill]) -> list[Bytes]:
    return [encoded(codec, filled(layout, fill), layout) for fill in fills]


@pytest.mark.parametrize("name", shapes(DType.uint8))
@_every_dtype
@_every_codec
def test_kernels_read_what_the_host_reads(
    compiled: ExponentKernels, codec: ExponentCodec, dtype: DType, name: str
) -> None:
    assert_decoded(compiled, codec, frames_of(codec, shapes(dtype)[name], [normal]))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", shapes(DType.uint8))
@_every_dtype
@_every_codec
def test_kernels_on_cuda_read_what_the_host_reads(
    codec: ExponentCodec, dtype: DType, name: str
) -> None:
    device = torch.device("cuda", 0)
    frames = frames_of(codec, shapes(dtype)[name], [normal, *FILLS])
    assert_decoded(open_exponent_kernels(device), codec, frames, device)


@_every_dtype
@_every_codec
def test_any_bits_come_back(compiled: ExponentKernels, codec: ExponentCodec, dtype: DType) -> None:
    """NaN payloads, signed zeros, denormals; tiles that are nothing but escapes."""
    layout = layouts(dtype)["mla"]
    assert_decoded(compiled, codec, frames_of(codec, layout, [*FILLS, random_bits, normal]))


@_every_codec
def test_golden_frames_are_read_as_the_host_reads_them(
    compiled: ExponentKernels, codec: ExponentCodec
) -> None:
    data = (GOLDEN / f"{codec.name}-r1.frame").read_bytes()
    assert_decoded(compiled, codec, [np.frombuffer(data, np.uint8)])


@_every_codec
def test_types_without_exponents_are_copied(
    compiled: ExponentKernels, codec: ExponentCodec
) -> None:
    for dtype in (DType.float16, DType.float8_e4m3fn):
        assert_decoded(compiled, codec, frames_of(codec, layouts(dtype)["mha"], [random_bits]))


@_every_codec
def test_what_no_grid_holds_takes_several_launches(
    compiled: ExponentKernels, codec: ExponentCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_kernels, "MAX_GRID_Y", 2)
    assert_decoded(compiled, codec, frames_of(codec, layouts(DType.bfloat16)["gqa"], [normal] * 2))


def test_frames_of_other_codecs_are_refused_by_name(compiled: ExponentKernels) -> None:
    layout = layouts(DType.bfloat16)["mha"]
    place = Place.of([encoded(RawCodec(), filled(layout, normal), layout)])
    with pytest.raises(UnknownCodecError, match="xans"):
        decode(compiled, place)
    both = [encoded(codec, filled(layout, normal), layout) for codec in CODECS]
    with pytest.raises(UnknownCodecError):
        decode(compiled, Place.of(both))


# --- bodies that no encoder writes

SMALL = KVLayout((Component(LayerKind.attention, DType.bfloat16, 1, 2, 24, 33),))


def damaged_bodies(codec: ExponentCodec, count: int) -> list[bytes]:
    """Return bodies changed in a few bytes, in the records more often than not."""
    rng = np.random.default_rng(9)
    frames = frames_of(codec, SMALL, [normal, random_bits])
    bodies = [parse_header(frame).segment(frame, 0).tobytes() for frame in frames]
    records = codec.record.itemsize * len(tile_items(SMALL.components[0]))
    found = []
    for _ in range(count):
        body = bytearray(bodies[rng.random() < 0.2])
        for _ in range(rng.integers(1, 4)):
            at = rng.integers(0, records if rng.random() < 0.5 else len(body))
            body[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(0, 256))])
        if rng.random() < 0.1:
            del body[int(rng.integers(0, len(body))) :]
        found.append(bytes(body))
    return found


@_every_codec
def test_damaged_bodies_are_refused_or_read_as_the_host_does(
    compiled: ExponentKernels, codec: ExponentCodec
) -> None:
    refusals = 0
    for body in damaged_bodies(codec, HOSTILE_CASES):
        frame = frame_of_bodies(codec, SMALL, [body])
        found, expected = Place.of([frame]), Place.of([frame])
        refused = is_refused(partial(read, codec, frame))
        assert is_refused(partial(decode, compiled, found)) == refused
        refusals += refused
        if not refused:
            expected.write(expected.frames[0], read(codec, frame))
            assert found.contents() == expected.contents()
    assert 0.1 * HOSTILE_CASES < refusals < HOSTILE_CASES


def changed(codec: ExponentCodec, fields: dict[str, Any], more_bytes: int) -> Bytes:
    """Return a frame whose last tile has other *fields*, and *more_bytes* behind its escapes."""
    (frame,) = frames_of(codec, SMALL, [normal])
    body = parse_header(frame).segment(frame, 0)
    size = codec.record.itemsize * len(tile_items(SMALL.components[0]))
    records = np.frombuffer(body[:size].tobytes(), codec.record).copy()
    for name, value in fields.items():
        records[name][-1] = value
    data = records.tobytes() + body[size:].tobytes() + bytes(more_bytes)
    return frame_of_bodies(codec, SMALL, [data])


ITEMS = tile_items(SMALL.components[0])[-1]
WrongTile = tuple[ExponentCodec, Callable[[Any], dict[str, Any]], Callable[[Any], int], str]
WRONG_TILES: dict[str, WrongTile] = {
    "no window": (XANS, lambda r: {"first": 0}, lambda r: 0, "models"),
    "a window beyond 254": (XANS, lambda r: {"first": 232}, lambda r: 0, "models"),
    "too few slots": (
        XANS, lambda r: {"frequencies": np.where(np.arange(39) == 38, 0xFF, r["frequencies"])},
        lambda r: 0, "models",
    ),
    "another state": (XANS, lambda r: {"states": r["states"] + np.uint32(1)}, lambda r: 0, "words"),
    "a word more": (XANS, lambda r: {"words": r["words"] + 1}, lambda r: 2, "words"),
    "an escape more": (XANS, lambda r: {"escapes": r["escapes"] + 1}, lambda r: 1, "escapes"),
    "escapes alone, and words": (
        XANS, lambda r: {"escapes": ITEMS}, lambda r: ITEMS - int(r["escapes"]), "counts",
    ),
    "a count beyond the payload": (XANS, lambda r: {"words": 1 << 31}, lambda r: 0, "counts"),
    "more escapes than elements": (
        XPACK, lambda r: {"escapes": ITEMS + 1}, lambda r: 3 * (ITEMS + 1 - int(r["escapes"])),
        "counts",
    ),
    "an escape less": (XPACK, lambda r: {"escapes": r["escapes"] - 1}, lambda r: 0, "counts"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_TILES)
def test_a_tile_that_contradicts_itself_is_refused(compiled: ExponentKernels, name: str) -> None:
    codec, fields_of, more_of, field = WRONG_TILES[name]
    (right,) = frames_of(codec, SMALL, [normal])
    count = len(tile_items(SMALL.components[0]))
    body = parse_header(right).segment(right, 0)
    record = np.frombuffer(body[: codec.record.itemsize * count].tobytes(), codec.record)[-1]
    frame = changed(codec, fields_of(record), more_of(record))
    assert is_refused(partial(read, codec, frame))
    with pytest.raises(InvalidFrameError, match=field):
        decode(compiled, Place.of([frame]))


def test_an_escape_beyond_its_tile_is_refused_and_written_nowhere(
    compiled: ExponentKernels,
) -> None:
    body, places = first_escapes()
    places[:3] = [ITEMS, 40_000, 65_535]
    frame = frame_of_bodies(XPACK, SMALL, [body.tobytes()])
    assert is_refused(partial(read, XPACK, frame))
    found, before = Place.of([frame]), Place.of([frame])
    with pytest.raises(InvalidFrameError, match="escapes"):
        decode(compiled, found)
    zeros = [[[np.zeros(c.shape, np.uint16)] * c.parts] for c in SMALL.components]
    for place in (found, before):  # all that the chunk's own slots hold
        place.write(place.frames[0], zeros)
    assert found.contents() == before.contents()


def first_escapes() -> tuple[Bytes, np.ndarray]:
    """Return a body of xpack, and where the escapes of its first tile say that they are."""
    (frame,) = frames_of(XPACK, SMALL, [normal])
    body = parse_header(frame).segment(frame, 0).copy()
    items = tile_items(SMALL.components[0])
    records = np.frombuffer(body[: 20 * len(items)].tobytes(), XPACK.record)
    at = 20 * len(items) + sum(items) + sum(-(-n // 2) for n in items)
    count = int(records["escapes"][0])
    assert count > 3
    return body, body[at : at + 2 * count].view("<u2")


def test_of_escapes_at_one_place_the_last_counts(compiled: ExponentKernels) -> None:
    body, places = first_escapes()
    places[:] = 5
    assert_decoded(compiled, XPACK, [frame_of_bodies(XPACK, SMALL, [body.tobytes()])])


# --- compilers


def test_tiles_are_cut_as_the_host_cuts_them() -> None:
    from kvstore.codecs.exponent_kernels import _tile_rows, tiles_of

    for layout in shapes(DType.bfloat16).values():
        for component in layout.components:
            assert tiles_of(component) == len(tile_items(component))
            assert batches(component)[0].items <= _tile_rows(component) * component.head_dim


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cudas_own_compiler_takes_the_source(architecture: str) -> None:
    status, log, binary = compile_cuda(SOURCES, architecture, *COMPILER_FLAGS)
    assert (status, log) == (0, ""), "not even a warning"
    assert all(name.encode() in binary for name in KERNELS)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nothing_is_spilled_and_half_of_a_multiprocessor_is_full(architecture: str) -> None:
    found = resources(SOURCES, architecture, *COMPILER_FLAGS)
    assert set(KERNELS) < set(found), "and those that encode"
    assert {each.spilled_bytes for each in found.values()} == {0}
    assert all(each.registers <= 64 for each in found.values()), "32 warps of 64 have room"
    assert THREADS <= 512
