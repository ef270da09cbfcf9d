"""The kernels of kvq, run on the CPU and compiled for CUDA, against the host's loops."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from contracts.codec import Tensors, encoded, layouts, paged_layouts, pairwise, template
from contracts.lossy_codec import centred, large, numbers, outliers, tiny
from helpers.cpu_kernels import compile_kernels
from helpers.cuda_compiler import ARCHITECTURES, compile_cuda, resources
from helpers.device_frames import CPU, Place, decoded, is_refused

from kvstore.codecs import kvq_kernels
from kvstore.codecs.base import EncodeTerms
from kvstore.codecs.frame_kernels import COMPILER_FLAGS
from kvstore.codecs.kvq import KvqCodec, Options
from kvstore.codecs.kvq_kernels import SOURCES, THREADS, KvqKernels, open_kvq_kernels, search_tables
from kvstore.codecs.kvq_layer import Body, parse_body
from kvstore.codecs.kvq_models import ESCAPE, MODELS, kvq_models
from kvstore.codecs.kvq_tiles import TILE_CHANNELS, Cut
from kvstore.codecs.rans import SLOTS, Stream, native_backend
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.frame import FrameWriter, parse_header
from kvstore.proto.types import Component, DType, KVLayout, LayerKind, RopeParameters

KERNELS = ["kvq_open", "kvq_symbols"]
KERNELS += [f"kvq_numbers_{name}" for name in ("bfloat16", "float16", "float32")]
FLOATS = [DType.bfloat16, DType.float16, DType.float32]
EMULATED_THREADS = 64
"""Fewer than on a device: every kernel goes on until all is done, and each has its own stack."""
HOSTILE_CASES = 300

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
_every_float = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> KvqKernels:
    """The CUDA source, compiled for the CPU with checks for undefined behaviour."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("kvq")
    return KvqKernels(CPU, compile_kernels(folder, SOURCES, KERNELS, EMULATED_THREADS))


def with_sinks(sinks: int, importance: bool = False) -> KvqCodec:
    return KvqCodec(3, options=Options(sinks, importance))


def read(frame: Bytes) -> Tensors:
    """Return what the host reads."""
    return decoded(frame, KvqCodec(3).decode_into)


def decode(kernels: KvqKernels, place: Place) -> None:
    for frame in place.frames:
        stop = frame.offset + frame.header.frame_bytes
        data = place.memory[frame.offset : stop].cpu().numpy()
        kernels.decode(place.memory, frame, place.paged, data)()


def assert_decoded(
    kernels: KvqKernels, frames: Sequence[Bytes], device: torch.device = CPU
) -> None:
    """The kernels put what the host decodes where it belongs, and nothing anywhere else."""
    found, expected = Place.of(frames, device), Place.of(frames)
    before = expected.contents()
    for frame, at in zip(frames, expected.frames, strict=True):
        expected.write(at, read(frame))
    decode(kernels, found)
    assert found.contents() == expected.contents()
    assert found.contents() != before


def shapes(dtype: DType) -> dict[str, KVLayout]:
    """Layouts of every relation between heads and tiles."""

    def attention(heads: int, dim: int, tokens: int, layers: int = 1) -> KVLayout:
        return KVLayout((Component(LayerKind.attention, dtype, layers, heads, dim, tokens),))

    ours = {
        "a head a tile": attention(3, 128, 40, 2),
        "across tiles": attention(3, 80, 33),
        "two tiles a head": attention(1, 192, 17),
        "more than a block": attention(1, 64, 300),
        "odd": attention(1, 66, 16),
    }
    return paged_layouts(dtype) | ours


ROPES = {
    "as they are": None,
    "turned back": EncodeTerms(rope=RopeParameters(10000.0, 64)),
    "partly": EncodeTerms(rope=RopeParameters(10000.0, 6)),
}
_every_rope = pytest.mark.parametrize("terms", list(ROPES.values()), ids=list(ROPES))


@pytest.mark.gpu
@needs_gpu
@_every_float
def test_kernels_on_cuda_read_what_the_host_reads(dtype: DType) -> None:
    for name in shapes(DType.uint8):
        device = torch.device("cuda", 0)
        layout = shapes(dtype)[name]
        for terms in ROPES.values():
            tensors = numbers(layout, outliers)
            frames = [encoded(KvqCodec(q), tensors, layout, terms, position=0) for q in range(4)]
            assert_decoded(open_kvq_kernels(device), frames, device)


@pytest.mark.parametrize("name", shapes(DType.uint8))
def test_kernels_read_what_the_host_reads_and_exact_tokens_in_front(
    compiled: KvqKernels, name: str
) -> None:
    fills = (centred, outliers, tiny, large)
    for row in pairwise(FLOATS, (0, 1, 3, 4), list(ROPES.values()), fills):
        dtype, sinks, terms, fill = row
        layout = shapes(dtype)[name]
        frame = encoded(with_sinks(sinks), numbers(layout, fill), layout, terms, position=0)
        assert_decoded(compiled, [frame])
        if name == "odd":
            component = replace(SMALL.components[0], dtype=dtype)
            body = frame_of(all_escapes(component, sinks), KVLayout((component,)))
            assert_decoded(compiled, [body])


@_every_rope
def test_layers_whose_tokens_have_classes_are_decoded_by_the_host(
    compiled: KvqKernels, terms: EncodeTerms | None
) -> None:
    layout = shapes(DType.bfloat16)["a head a tile"]
    weights = np.arange(layout.tokens, dtype=np.float32)
    weighed = replace(terms or EncodeTerms(), importance=weights)
    frame = encoded(with_sinks(1, importance=True), numbers(layout), layout, weighed, position=0)
    plain = encoded(with_sinks(1), numbers(layout), layout, terms, position=0)
    assert_decoded(compiled, [frame, plain])


def test_frames_with_unlike_counts_of_exact_tokens_are_decoded(compiled: KvqKernels) -> None:
    layout = shapes(DType.bfloat16)["more than a block"]
    tensors, terms = numbers(layout), ROPES["turned back"]
    frames = [encoded(with_sinks(4), tensors, layout, terms, at) for at in (0, 3, 300, 1)]
    assert_decoded(compiled, frames)


@_every_rope
def test_heads_are_read_from_host_memory_where_it_is_given(
    compiled: KvqKernels, terms: EncodeTerms | None
) -> None:
    layout = layouts(DType.bfloat16)["several"]
    tensors = numbers(layout)
    tensors[0][1][0][0, 3, 5] = 0x7FC1  # a layer that is kept exactly
    tensors[1][0][0][0, 0, 0] = 0xFF80
    frame = encoded(KvqCodec(3), tensors, layout, terms)
    assert_decoded(compiled, [frame])
    found, expected = Place.of([frame]), Place.of([frame])
    decode(compiled, expected)
    for segment in found.frames[0].header.segments[:2]:
        found.memory[int(segment["offset"])] ^= 1
    compiled.decode(found.memory, found.frames[0], found.paged, frame)()
    assert found.contents() == expected.contents()


def test_little_memory_takes_several_launches(
    compiled: KvqKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvq_kernels, "SCRATCH_BYTES", 1)
    layout = shapes(DType.float16)["more than a block"]
    frames = [encoded(KvqCodec(3), numbers(layout), layout, ROPES["turned back"])] * 2
    assert_decoded(compiled, frames)


def test_frames_with_levels_are_left_to_the_host(compiled: KvqKernels) -> None:
    layout = layouts(DType.bfloat16)["mha"]
    codec = KvqCodec(None)
    place = Place.of([encoded(codec, numbers(layout), layout)])
    before = place.contents()
    with pytest.raises(InvalidFrameError, match="levels"):
        decode(compiled, place)
    assert place.contents() == before


# --- bodies that no encoder writes

SMALL = KVLayout((Component(LayerKind.attention, DType.bfloat16, 1, 2, 64, 20),))


def frame_of(body: bytes, layout: KVLayout) -> Bytes:
    out = np.zeros(8192 + len(body), np.uint8)
    codec = KvqCodec(3)
    writer = FrameWriter(template(layout), out)
    writer.reserve(len(body))[:] = np.frombuffer(body, np.uint8)
    writer.commit(len(body))
    header = writer.finish(codec.codec_id, codec.revision, codec.accuracy, 1.0, codec.asset)
    return out[: header.frame_bytes]


def all_escapes(component: Component, seed: int) -> bytes:
    """Return a body whose every symbol is an escape; quotients, steps and means of any size."""
    rng = np.random.default_rng(seed)
    cut = Cut.of(component)
    count = component.parts * cut.columns * len(cut.blocks)
    models = rng.integers(0, MODELS, (count, TILE_CHANNELS)).astype(np.uint8)
    symbols = np.full((count, component.tokens, TILE_CHANNELS), ESCAPE, np.uint8)
    stream = native_backend().encode_tiles(symbols, models, kvq_models().table)
    halves = rng.integers(0, 0x7C00, models.shape) | rng.choice([0, 0x8000], models.shape)
    body = Body(
        3, 1.0, np.float32(100.0) ** -np.linspace(0, 1, 32, dtype=np.float32),
        (10.0 ** rng.uniform(-40, 33, count)).astype(np.float32),
        np.full(count, component.tokens * TILE_CHANNELS, np.uint32),
        halves.astype(np.uint16).view(np.float16), models, stream,
        rng.choice([-32768, 32767, -1, 0, 1, 64, -63], symbols.size).astype(np.int16),
    )  # fmt: skip
    out = np.empty(body.stored_bytes, np.uint8)
    body.pack(out)
    return out.tobytes()


def damaged_bodies(count: int) -> list[bytes]:
    """Return bodies changed in a few bytes, in the head and the counts more often than not."""
    rng = np.random.default_rng(9)
    terms = ROPES["turned back"]
    frames = [
        encoded(KvqCodec(3), numbers(SMALL, fill), SMALL, terms, position=0)
        for fill in (centred, outliers)
    ]
    bodies = [parse_header(f).segment(f, 0).tobytes() for f in frames] + [
        all_escapes(SMALL.components[0], 1)
    ]
    found = []
    for _ in range(count):
        body = bytearray(bodies[rng.integers(len(bodies))])
        ends = [24, 24 + 128 + 24, 24 + 128 + 24 + 256 + 768, len(body)]
        for _ in range(rng.integers(1, 4)):
            at = rng.integers(0, ends[rng.integers(1, 4) if rng.random() < 0.9 else 0])
            body[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(0, 256))])
        if rng.random() < 0.1:
            del body[int(rng.integers(0, len(body))) :]
        found.append(bytes(body))
    return found


def test_damaged_bodies_are_refused_or_read_as_the_host_does(compiled: KvqKernels) -> None:
    refusals = 0
    for body in damaged_bodies(HOSTILE_CASES):
        frame = frame_of(body, SMALL)
        found, expected = Place.of([frame]), Place.of([frame])
        with np.errstate(all="ignore"):
            refused = is_refused(partial(read, frame))
        assert is_refused(partial(decode, compiled, found)) == refused
        refusals += refused
        if not refused:
            with np.errstate(all="ignore"):
                expected.write(expected.frames[0], read(frame))
            for ours, theirs in zip(found.contents(), expected.contents(), strict=True):
                words, right = (np.frombuffer(each, np.uint16) for each in (ours, theirs))
                is_number = right & 0x7F80 != 0x7F80  # infinities less infinities have any sign
                assert np.array_equal(words[is_number], right[is_number])
    assert 0.2 * HOSTILE_CASES < refusals < HOSTILE_CASES


def test_exact_tokens_beyond_a_layers_are_refused(compiled: KvqKernels) -> None:
    frame = encoded(with_sinks(2), numbers(SMALL), SMALL, position=0)
    whole = parse_header(frame).segment(frame, 0)
    bodies = [whole[:-2], *(whole.copy() for _ in range(6))]
    for body, count in zip(bodies[1:], (0, 1, 3, 5, 20, 255), strict=True):
        body[1] = count
    for body in bodies:
        with pytest.raises(InvalidFrameError):
            decode(compiled, Place.of([frame_of(body.tobytes(), SMALL)]))


@pytest.mark.parametrize("which", ["a word more", "an escape more", "a model more"])
def test_what_a_tile_has_too_much_of_is_refused(compiled: KvqKernels, which: str) -> None:
    component = SMALL.components[0]
    frame = encoded(KvqCodec(3), numbers(SMALL), SMALL)
    body = parse_body(parse_header(frame).segment(frame, 0), component)
    stream, first = body.stream, np.array([1, 0], np.uint32)
    if which == "a word more":
        words = np.insert(stream.words, stream.counts[0], 7)
        body = replace(body, stream=Stream(stream.states, stream.counts + first, words))
    elif which == "an escape more":
        body = replace(
            body, escapes=body.escapes + first, values=np.append(body.values, np.int16(1))
        )
    else:
        body = replace(body, models=np.where(body.models == body.models[0, 0], MODELS, body.models))
    out = np.empty(body.stored_bytes, np.uint8)
    body.pack(out)
    damaged = frame_of(out.tobytes(), SMALL)
    assert is_refused(partial(read, damaged))
    with pytest.raises(InvalidFrameError, match=which.split()[1]):
        decode(compiled, Place.of([damaged]))


def test_a_head_that_promises_more_than_is_there_launches_nothing() -> None:
    launched: list[str] = []
    kernels = KvqKernels(CPU, lambda name, grid, arguments: launched.append(name))
    body = bytearray(all_escapes(SMALL.components[0], 2))
    places = [(0, 2), (1, 1), (1, 5), (2, 33), (8, 255), (15, 255), (19, 255), (20, 1), (20, 2)]
    for at, value in places:
        changed = body.copy()
        changed[at] = value if changed[at] != value else value + 1
        place = Place.of([frame_of(bytes(changed), SMALL)])
        with pytest.raises(InvalidFrameError):
            decode(kernels, place)
    assert launched == []


# --- tables and compilers


def test_every_slot_is_found_from_its_bucket() -> None:
    table = kvq_models().table
    entries, buckets = search_tables(table)
    slots = np.arange(SLOTS)
    probes = 0
    for model in range(MODELS):
        symbol = buckets[model, slots // 32].astype(np.int64)
        while (
            far := slots - (entries[model, symbol] & 0xFFFF) >= entries[model, symbol] >> 16
        ).any():
            symbol += far
            probes += int(far.sum())
        assert np.array_equal(symbol, table.decode_slots[model] & 0xFF)
    assert probes < MODELS * SLOTS


@pytest.mark.parametrize("architecture", [ARCHITECTURES[0], ARCHITECTURES[-1]])
def test_cudas_own_compiler_takes_the_source(architecture: str) -> None:
    status, log, binary = compile_cuda(SOURCES, architecture, *COMPILER_FLAGS)
    assert (status, log) == (0, ""), "not even a warning"
    assert all(name.encode() in binary for name in KERNELS)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_registers_and_shared_memory_let_a_multiprocessor_be_full(architecture: str) -> None:
    found = resources(SOURCES, architecture, *COMPILER_FLAGS)
    assert sorted(found) == sorted(KERNELS)
    assert {each.spilled_bytes for each in found.values()} == {0}
    assert all(each.registers * THREADS <= 1 << 16 for each in found.values())
    symbols = found["kvq_symbols"]
    assert symbols.registers * 2048 <= 1 << 16, "64 warps have room"
    assert symbols.shared_bytes <= 48 << 10
