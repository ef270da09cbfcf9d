"""The suite every codec passes.

A codec's test file subclasses ``CodecContract`` and names the codec. What this asks of all and
what of those that give the very same bytes are two classes: lossy codecs have one of their own
beside the second, LossyCodecContract.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations, product
from threading import Barrier
from typing import Any, ClassVar

import numpy as np
import pytest
from golden.samples import template_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.codecs.base import Codec, EncodeTerms, Part, codec_by_id, empty_tensors
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    LayoutMismatchError,
    UnknownCodecError,
)
from kvstore.proto.frame import (
    NO_ASSET,
    FrameHeader,
    FrameTemplate,
    FrameWriter,
    check_frame,
    parse_header,
)
from kvstore.proto.types import ChainDigest, ChunkKey, Component, DType, KVLayout, LayerKind

Tensors = list[list[list[Part]]]

SCRATCH_BYTES = 2 << 20
"""What decoding may hold beside one layer, whatever the layer's size."""


def layouts(dtype: DType) -> dict[str, KVLayout]:
    """Return the shapes a codec meets, by name."""
    gqa = Component(LayerKind.attention, dtype, 3, 2, 64, 128)
    mla = Component(LayerKind.mla, dtype, 2, 1, 72, 64)
    return {
        "mha": KVLayout((Component(LayerKind.attention, dtype, 2, 4, 16, 32),)),
        "gqa": KVLayout((gqa,)),
        "mla": KVLayout((mla,)),
        "several": KVLayout((gqa, mla, Component(LayerKind.window, dtype, 1, 3, 5, 7))),
        "partial": KVLayout((Component(LayerKind.attention, dtype, 2, 2, 8, 16),)),
        "hybrid": KVLayout(
            (
                Component(LayerKind.attention, dtype, 2, 2, 64, 64),
                Component(LayerKind.window, dtype, 2, 2, 64, 33, 64),
                Component(LayerKind.state, dtype, 2, 1, 601, 1, 64),
            )
        ),
        "state": KVLayout((Component(LayerKind.state, dtype, 2, 1, 601, 1, 64),)),
        "wide": KVLayout((Component(LayerKind.mla, dtype, 1, 1, 576, 256),)),
    }


def paged_layouts(dtype: DType) -> dict[str, KVLayout]:
    """Return those of which an engine's pages hold every token."""
    return {
        name: layout
        for name, layout in layouts(dtype).items()
        if not any(c.first_token or c.kind is LayerKind.state for c in layout.components)
    }


INFINITIES = {
    1: [0x7C, 0xFC],
    2: [0x7F80, 0xFF80, 0x7C00, 0xFC00, 0x7FC1, 0x7C01],
    4: [0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001],
}


def random_bits(shape: tuple[int, ...], width: int, rng: np.random.Generator) -> Part:
    return rng.integers(0, 1 << (8 * width), shape, dtype=f"u{width}")


def normal_values(shape: tuple[int, ...], width: int, rng: np.random.Generator) -> Part:
    wide = rng.standard_normal(shape, dtype=np.float32).view(np.uint32)
    return (wide >> (32 - 8 * width)).astype(f"u{width}")


def special_values(shape: tuple[int, ...], width: int, rng: np.random.Generator) -> Part:
    """Zeros and denormals of both signs, and every exponent-heavy or all-ones pattern."""
    sign, ones = 1 << (8 * width - 1), (1 << (8 * width)) - 1
    nan_payloads = [ones, ones - 1, ones ^ sign, sign - 2]
    chosen = np.array([0, sign, 1, sign | 1, *nan_payloads, *INFINITIES[width]], f"u{width}")
    return chosen[rng.integers(0, len(chosen), shape)]


def all_zero(shape: tuple[int, ...], width: int, rng: np.random.Generator) -> Part:
    return np.zeros(shape, dtype=f"u{width}")


Fill = Callable[[tuple[int, ...], int, np.random.Generator], Part]
FILLS: list[Fill] = [random_bits, normal_values, special_values, all_zero]


def filled(layout: KVLayout, fill: Fill = normal_values, seed: int = 0) -> Tensors:
    """Return contiguous tensors of *layout*."""
    rng = np.random.default_rng(seed)
    return [
        [[fill(c.shape, c.dtype.item_bytes, rng) for _ in range(c.parts)] for _ in range(c.layers)]
        for c in layout.components
    ]


def strided(tensors: Tensors) -> Tensors:
    """Return the same values as an engine would hand them over: (tokens, heads, dim) pages."""

    def page(part: Part) -> Part:
        heads, tokens, dim = part.shape
        base = np.full((tokens, heads + 1, 2 * dim), 0xA5, dtype=part.dtype)
        view = base[::-1, 1:, ::2].transpose(1, 0, 2)
        view[...] = part
        return view

    return [[[page(part) for part in parts] for parts in layers] for layers in tensors]


def same(left: Tensors, right: Tensors) -> bool:
    """Whether both hold the same bits."""
    return all(np.array_equal(a, b) for a, b in zip(flat(left), flat(right), strict=True))


def flat(tensors: Tensors) -> list[Part]:
    return [part for layers in tensors for parts in layers for part in parts]


def template(layout: KVLayout, **fields: Any) -> FrameTemplate:
    """Return a template with every field unlike its default."""
    values: dict[str, Any] = {
        "key": ChunkKey(bytes(range(32))),
        "parent": ChainDigest(bytes(range(100, 116))),
        "representation": bytes(range(50, 66)),
        "content": bytes(range(200, 216)),
        "position": 512,
        "prefill_flops": 2.5e12,
        "flags": 1,
    }
    return FrameTemplate(layout=layout, **{**values, **fields})


def encoded(
    codec: Codec, tensors: Tensors, layout: KVLayout, terms: EncodeTerms | None = None,
    position: int = 512,
) -> Bytes:  # fmt: skip
    """Return the frame of *tensors*, no byte too long; its header is the one that was returned."""
    out = np.empty(codec.max_frame_bytes(layout), np.uint8)
    header = codec.encode(template(layout, position=position), tensors, out, terms)
    assert np.array_equal(parse_header(out).segments, header.segments)
    return out[: header.frame_bytes]


def decoded(frame: Bytes) -> Tensors:
    """Read *frame* as a client does: verify everything, then decode by the codec it names."""
    header = check_frame(frame)
    out = empty_tensors(header.layout)
    codec_by_id(header.codec_id).decode_into(header, frame, out)
    return out


def frame_of_bodies(codec: Codec, layout: KVLayout, bodies: list[bytes]) -> Bytes:
    """Return a frame with right checksums around *bodies*, whatever they are."""
    out = np.zeros(4096 * (2 + len(bodies)) + sum(map(len, bodies)), np.uint8)
    writer = FrameWriter(template(layout), out)
    for body in bodies:
        writer.reserve(len(body))[:] = np.frombuffer(body, np.uint8)
        writer.commit(len(body))
    header = writer.finish(codec.codec_id, codec.revision, codec.accuracy)
    return out[: header.frame_bytes]


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most memory that *call* held at a time, numpy's and bytes objects included."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _payload_positions(header: FrameHeader) -> set[int]:
    covered = set(range(header.header_bytes))
    for row in header.segments:
        covered |= set(range(int(row["offset"]), int(row["offset"] + row["stored_bytes"])))
    return covered


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return few rows in which every two values of different axes meet.

    What only three values together would break is rare (Kuhn, Wallace, Gallo, IEEE TSE 30(6),
    2004), and a codec's axes are taken apart by different code.
    """
    rows = list(product(*axes))
    left = {pair for row in rows for pair in combinations(enumerate(row), 2)}
    chosen = []
    while left:
        row = max(rows, key=lambda row: len(left.intersection(combinations(enumerate(row), 2))))
        left -= set(combinations(enumerate(row), 2))
        chosen.append(row)
    return chosen


SMALL = layouts(DType.bfloat16)["partial"]
ROWS = pairwise(list(DType), list(layouts(DType.uint8)), FILLS)
every_dtype = pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.name)
inherited = partial(
    settings, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
)


class AnyCodecContract:
    """What exact and lossy codecs promise alike."""

    codec: ClassVar[Codec]
    small: ClassVar[KVLayout] = SMALL
    dtypes: ClassVar[Sequence[DType]] = tuple(DType)

    def tensors(self, layout: KVLayout, seed: int = 0) -> Tensors:
        """Return what the codec is made for."""
        return filled(layout, seed=seed)

    def assert_right(self, frame: Bytes, tensors: Tensors) -> None:
        """Fail unless *frame* gives of *tensors* what the codec promises."""
        assert same(decoded(frame), tensors)

    def frame(self) -> Bytes:
        return encoded(self.codec, self.tensors(self.small), self.small)

    def bounds_hold(self, tensors: Tensors, layout: KVLayout) -> None:
        """A layer and a frame fit the rooms that the codec asks for, and touch nothing else."""
        for component, layers in zip(layout.components, tensors, strict=True):
            bound = self.codec.max_segment_bytes(component)
            room = np.full(bound + 16, 0x5A, np.uint8)
            used = self.codec.encode_segment(layers[0], component, room[3 : 3 + bound])
            assert used <= bound
            assert (room[:3] == 0x5A).all()
            assert (room[3 + bound :] == 0x5A).all()
            out = [np.empty_like(part) for part in layers[0]]
            self.codec.decode_segment(room[3 : 3 + used], component, out)
        frame = encoded(self.codec, tensors, layout)
        assert len(frame) <= self.codec.max_frame_bytes(layout)
        self.assert_right(frame, tensors)

    def test_encoding_the_same_twice_gives_the_same_bytes(self) -> None:
        layout = layouts(DType.float16)["several"]
        first = encoded(self.codec, self.tensors(layout), layout)
        encoded(self.codec, filled(layout, random_bits), layout)
        assert np.array_equal(first, encoded(self.codec, self.tensors(layout), layout))

    def test_frames_and_rooms_may_lie_at_odd_addresses(self) -> None:
        for dtype in self.dtypes:
            layout = layouts(dtype)["several"]
            frame = encoded(self.codec, self.tensors(layout), layout)
            room = np.empty(self.codec.max_frame_bytes(layout) + 1, np.uint8)[1:]
            header = self.codec.encode(template(layout), self.tensors(layout), room)
            odd = room[: header.frame_bytes]
            assert np.array_equal(odd, frame)
            assert same(decoded(odd), decoded(frame))

    def test_room_too_small_is_refused(self) -> None:
        room = np.empty(len(self.frame()) // 2, np.uint8)
        with pytest.raises(InvalidFrameError, match=r"^out="):
            self.codec.encode(template(self.small), self.tensors(self.small), room)

    @pytest.mark.parametrize("fault", ["shape", "dtype", "parts", "layers", "components"])
    def test_tensors_of_another_layout_are_refused_and_nothing_written(self, fault: str) -> None:
        wrong = self.tensors(self.small)
        match fault:
            case "shape":
                wrong[0][1][0] = wrong[0][1][0].transpose(1, 0, 2)
            case "dtype":
                wrong[0][1][1] = wrong[0][1][1].astype(np.uint32)
            case "parts":
                wrong[0][1].pop()
            case "layers":
                wrong[0].pop()
            case _:
                wrong.append(wrong[0])
        before = [part.copy() for part in flat(wrong)]
        out = np.full(self.codec.max_frame_bytes(self.small), 0x5A, np.uint8)
        with pytest.raises(LayoutMismatchError, match=fault):
            self.codec.encode(template(self.small), wrong, out)
        assert (out == 0x5A).all()
        frame = self.frame()
        with pytest.raises(LayoutMismatchError, match=fault):
            self.codec.decode_into(parse_header(frame), frame, wrong)
        assert all(map(np.array_equal, before, flat(wrong)))

    def test_frames_of_another_codec_revision_or_asset_are_refused(self) -> None:
        frame = self.frame()
        header, out = parse_header(frame), filled(self.small, all_zero)
        codec_id, revision, asset = header.codec_id, header.codec_revision, header.asset
        writer = FrameWriter(template(self.small), np.zeros(len(frame), np.uint8), header.levels)
        for size in header.segments["stored_bytes"]:
            writer.reserve(int(size))
            writer.commit(int(size))
        for other in (
            (codec_id ^ 1, revision, asset),
            (codec_id, revision + 1, asset),
            (codec_id, revision, b"x" * 16),
        ):
            wrong = writer.finish(*other[:2], header.accuracy, asset=other[2])
            with pytest.raises(UnknownCodecError):
                self.codec.check_header(wrong)
            if other[2] == asset or asset != NO_ASSET:
                with pytest.raises(UnknownCodecError):
                    self.codec.decode_into(wrong, frame, out)
        assert same(out, filled(self.small, all_zero))

    @inherited(max_examples=60)
    @given(data=st.data(), mask=st.integers(1, 255))
    def test_a_changed_byte_is_found_or_does_not_matter(
        self, data: st.DataObject, mask: int
    ) -> None:
        frame = self.frame()
        header, right = check_frame(frame), decoded(frame)
        assert header.accuracy is self.codec.accuracy
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] ^= mask
        if at in _payload_positions(header):
            with pytest.raises((InvalidFrameError, ChunkCorruptError)):
                decoded(frame)
        else:
            assert same(decoded(frame), right)

    @inherited(max_examples=60)
    @given(data=st.data(), mask=st.integers(1, 255))
    def test_decoding_verifies_what_a_reader_did_not(self, data: st.DataObject, mask: int) -> None:
        frame = self.frame()
        header = check_frame(frame)
        row = header.segments[data.draw(st.integers(0, len(header.segments) - 1))]
        frame[int(row["offset"]) + data.draw(st.integers(0, int(row["stored_bytes"]) - 1))] ^= mask
        with pytest.raises(ChunkCorruptError, match="checksum"):
            self.codec.decode_into(header, frame, empty_tensors(self.small))

    @inherited(max_examples=60)
    @given(data=st.data())
    def test_a_frame_cut_or_extended_is_refused(self, data: st.DataObject) -> None:
        frame = self.frame()
        with pytest.raises((InvalidFrameError, ChunkCorruptError)):
            decoded(frame[: data.draw(st.integers(0, len(frame) - 1))])
        with pytest.raises(ChunkCorruptError, match="bytes of"):
            decoded(np.append(frame, np.uint8(0)))

    def test_decoding_holds_no_more_than_a_layer_and_a_fixed_scratch(self) -> None:
        for dtype in self.dtypes:
            layout = KVLayout((Component(LayerKind.attention, dtype, 1, 8, 128, 2048),))
            frame = encoded(self.codec, self.tensors(layout), layout)
            header, out = parse_header(frame), empty_tensors(layout)
            decode = partial(self.codec.decode_into, header, frame, out)
            decode()  # what is compiled or loaded once
            assert peak_bytes(decode) <= layout.components[0].layer_bytes + SCRATCH_BYTES

    def test_eight_threads_share_one_codec(self) -> None:
        layout = layouts(DType.bfloat16)["gqa"]
        barrier = Barrier(8)
        encoded(self.codec, self.tensors(layout), layout)  # what is made once

        def work(seed: int) -> None:
            tensors = self.tensors(layout, seed)
            barrier.wait()
            frames = [encoded(self.codec, tensors, layout) for _ in range(6)]
            assert all(np.array_equal(frames[0], frame) for frame in frames)
            self.assert_right(frames[0], tensors)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))


class CodecContract(AnyCodecContract):
    """Subclass as ``TestX`` and set ``codec``: the very same bytes come back."""

    @every_dtype
    def test_what_was_encoded_comes_back_bit_by_bit(self, dtype: DType) -> None:
        for name, fill in [row[1:] for row in ROWS if row[0] is dtype]:
            layout = layouts(dtype)[name]
            tensors = filled(layout, fill)
            frame = encoded(self.codec, tensors, layout)
            header = check_frame(frame, ChunkKey(bytes(range(32))))
            assert template_of(header) == template(layout)
            assert header.accuracy is self.codec.accuracy
            self.codec.check_header(header)
            assert same(decoded(frame), tensors)
            assert np.array_equal(frame, encoded(self.codec, strided(tensors), layout))
            pages = strided(filled(layout, all_zero))
            self.codec.decode_into(header, frame, pages)
            assert same(pages, tensors)

    @every_dtype
    def test_bounds_hold_and_such_rooms_are_enough(self, dtype: DType) -> None:
        for layout, fill in product(layouts(dtype).values(), FILLS):
            self.bounds_hold(filled(layout, fill), layout)

    def test_numbers_of_any_kind_are_taken_as_bits(self) -> None:
        kinds = {"float16": "f2", "bfloat16": ">i2", "float32": "f4", "int8": "i1"}
        for name, kind in kinds.items():
            layout = layouts(DType[name])["mha"]
            bits = filled(layout, special_values)
            numbers, out = (
                [[[part.view(kind) for part in parts] for parts in layers] for layers in tensors]
                for tensors in (bits, filled(layout, all_zero))
            )
            frame = encoded(self.codec, numbers, layout)
            assert np.array_equal(frame, encoded(self.codec, bits, layout))
            self.codec.decode_into(parse_header(frame), frame, out)
            for found, wanted in zip(flat(out), flat(bits), strict=True):
                assert found.tobytes() == wanted.tobytes()

    @inherited(max_examples=60)
    @given(data=st.data())
    def test_rubbish_under_a_right_checksum_is_refused_or_is_the_contents(
        self, data: st.DataObject
    ) -> None:
        layer_bytes = SMALL.components[0].layer_bytes
        sizes = st.sampled_from([0, 1, 15, 16, 17, layer_bytes - 1, layer_bytes, layer_bytes + 16])
        bodies = [
            bytes(np.random.default_rng(data.draw(st.integers(0, 99))).bytes(data.draw(sizes)))
            for _ in range(2)
        ]
        self._reads_as_contents_or_is_refused(bodies)

    @inherited(max_examples=60)
    @given(data=st.data())
    def test_a_segment_changed_and_signed_again_is_refused_or_is_the_contents(
        self, data: st.DataObject
    ) -> None:
        frame = self.frame()
        header = check_frame(frame)
        bodies = [bytearray(header.segment(frame, index).tobytes()) for index in range(2)]
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(bodies[0]) - 1) | st.integers(0, 31))
            bodies[0][at] = data.draw(st.integers(0, 255))
        del bodies[0][data.draw(st.integers(len(bodies[0]) - 2, len(bodies[0]))) :]
        self._reads_as_contents_or_is_refused(list(map(bytes, bodies)))

    def _reads_as_contents_or_is_refused(self, bodies: list[bytes]) -> None:
        frame = frame_of_bodies(self.codec, SMALL, bodies)
        try:
            contents = decoded(frame)
        except InvalidFrameError:
            return
        again = encoded(self.codec, contents, SMALL)
        assert same(decoded(again), contents)
