"""xpack's encoder for CUDA, run on the CPU, against the host's: the same frames."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from contracts.codec import (
    FILLS,
    Fill,
    encoded,
    filled,
    layouts,
    paged_layouts,
    random_bits,
    template,
)
from cpu_kernels import compile_kernels
from device_frames import CPU, Place

from kvstore.codecs import frame_kernels
from kvstore.codecs.exponent_kernels import SOURCES
from kvstore.codecs.paged import HostKernels
from kvstore.codecs.planes import numpy_splitter
from kvstore.codecs.xpack import NUMPY, XpackCodec
from kvstore.codecs.xpack_kernels import XpackEncoder, open_xpack_encoder
from kvstore.proto.buffers import as_bytes
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Component, DType, KVLayout, LayerKind

CODEC = XpackCodec(NUMPY, numpy_splitter)
KERNELS = ["xpack_open"]
KERNELS += [f"xpack_{way}_{name}" for way in ("count", "pack") for name in ("bfloat16", "float32")]
EMULATED_THREADS = 64

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> XpackEncoder:
    """The CUDA source, compiled for the CPU with checks for undefined behaviour."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("xpack")
    launch = compile_kernels(folder, SOURCES, KERNELS, EMULATED_THREADS)
    return XpackEncoder(CPU, launch, HostKernels())


def normal(shape: tuple[int, ...], item_bytes: int, rng: np.random.Generator) -> np.ndarray:
    """Normal numbers, and a few of any bits."""
    wide = rng.standard_normal(shape, np.float32).view(np.uint32)
    odd = rng.integers(0, 1 << 32, shape, np.uint32)
    wide = np.where(rng.random(shape) < 0.01, odd, wide)
    return (wide >> np.uint32(8 * (4 - item_bytes))).astype(f"u{item_bytes}")


def shapes(dtype: DType) -> dict[str, KVLayout]:
    """Layouts of every relation between rows, pairs, and tiles."""

    def latents(dim: int, tokens: int) -> KVLayout:
        return KVLayout((Component(LayerKind.mla, dtype, 1, 1, dim, tokens),))

    ours = {
        "odd planes": latents(37, 19),
        "a row a tile": latents(20_000, 3),
        "several tiles": KVLayout((Component(LayerKind.attention, dtype, 1, 3, 128, 300),)),
    }
    return paged_layouts(dtype) | ours


def assert_encoded(
    encoder: XpackEncoder, layout: KVLayout, fills: Sequence[Fill], device: torch.device = CPU
) -> None:
    """The frame is the host's, byte for byte, and nothing behind it is touched."""
    for fill in fills:
        tensors = filled(layout, fill)
        wanted = encoded(CODEC, tensors, layout)
        place = Place.of([wanted], device)
        place.write(place.frames[0], tensors)
        room = CODEC.max_frame_bytes(layout)
        out = torch.full((room + 64,), 0xA5, dtype=torch.uint8, device=device)
        first_token = place.frames[0].first_token
        header = encoder.encode(template(layout), first_token, place.paged, out)
        found = as_bytes(out.cpu().numpy())
        assert header.frame_bytes == len(wanted)
        assert np.array_equal(found[: len(wanted)], wanted)
        assert (found[len(wanted) :] == 0xA5).all()


@pytest.mark.parametrize("name", shapes(DType.uint8))
@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float32], ids=lambda dtype: dtype.name)
def test_kernels_write_what_the_host_writes(
    compiled: XpackEncoder, dtype: DType, name: str
) -> None:
    assert_encoded(compiled, shapes(dtype)[name], [normal])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", shapes(DType.uint8))
@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float32], ids=lambda dtype: dtype.name)
def test_kernels_on_cuda_write_what_the_host_writes(dtype: DType, name: str) -> None:
    device = torch.device("cuda", 0)
    fills = [normal, random_bits, *FILLS]
    assert_encoded(open_xpack_encoder(device), shapes(dtype)[name], fills, device)


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float32], ids=lambda dtype: dtype.name)
def test_any_bits_are_packed_or_kept_as_they_are(compiled: XpackEncoder, dtype: DType) -> None:
    assert_encoded(compiled, layouts(dtype)["mla"], [*FILLS, random_bits])


def test_types_without_exponents_are_copied(compiled: XpackEncoder) -> None:
    assert_encoded(compiled, layouts(DType.float16)["mha"], [random_bits])


def test_what_no_grid_holds_takes_several_launches(
    compiled: XpackEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_kernels, "MAX_GRID_Y", 2)
    assert_encoded(compiled, layouts(DType.bfloat16)["gqa"], [normal])


def test_too_little_room_is_refused_before_anything_is_written(compiled: XpackEncoder) -> None:
    layout = layouts(DType.bfloat16)["mha"]
    place = Place.of([encoded(CODEC, filled(layout, normal), layout)])
    out = torch.zeros(CODEC.max_frame_bytes(layout) - 1, dtype=torch.uint8)
    with pytest.raises(InvalidRequestError, match="out"):
        compiled.encode(template(layout), place.frames[0].first_token, place.paged, out)
    assert not out.any()
