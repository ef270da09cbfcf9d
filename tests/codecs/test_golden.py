"""Golden frames and assets: read as ever, written byte by byte as ever."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from contracts.codec import Tensors, decoded, same
from contracts.lossy_codec import largest_error
from golden import kvq_samples, lossy_samples, samples
from golden.samples import FOLDER, template_of, vectors

from kvstore.codecs.assets import read_asset
from kvstore.codecs.base import EncodeTerms, LossyCodec, codec_by_id, codec_by_name, empty_tensors
from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.kvq_models import RATIOS
from kvstore.codecs.kvq_tiles import KvqLoops
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.transcode import transcode
from kvstore.proto import native
from kvstore.proto.buffers import Bytes, checksum
from kvstore.proto.frame import FrameTemplate, check_frame, parse_header, raw_frame_bytes
from kvstore.proto.types import Accuracy, Component, DType, KVLayout, LayerKind

SUMS = {
    "kivi-8-r1": 0x2E648273FA63D973,
    "kivi-4-r1": 0xED6F164D4AF78F14,
    "kivi-2-r1": 0x6F00C101325ECC4B,
    "cachegen-r1": 0x5120CE3436D3A07A,
    "kvtc-r1": 0x1967A18876863D51,
    "kvq-static-r1": 0x12FDBA19FC38435C,
    "kvq-r2": 0x54155F61B5124DA0,
    "kvq-layered-r2": 0x5995330DCAAC5C57,
    "kvq-importance-r2": 0x9831B665CEA896DD,
}
"""xxh3_64 of the numbers that come out; those of turned keys hang on the machine's cosines."""

DIGESTS = {
    "cachegen-v1.kvasset": "9f0f78e42993e5a0e43d5c8fb2fa8be9",
    "kvtc-v1.kvasset": "dd39e5788305327701a459a6ef3b52d4",
    "kvq-static-v1.kvasset": "ce0a22e5cc31b9f954c1bcf45d6ef385",
}


@dataclass(frozen=True)
class Golden:
    """What a file was made of."""

    codec: LossyCodec
    template: FrameTemplate
    tensors: Tensors
    terms: EncodeTerms | None = None

    def written(self) -> Bytes:
        out = np.full(self.codec.max_frame_bytes(self.template.layout), 0x5A, np.uint8)
        return out[: self.codec.encode(self.template, self.tensors, out, self.terms).frame_bytes]

    def read(self, frame: Bytes) -> Tensors:
        out = empty_tensors(self.template.layout)
        self.codec.decode_into(check_frame(frame, self.template.key), frame, out)
        return out


LOSSY = {
    name.removesuffix(".frame"): Golden(codec, lossy_samples.template(), lossy_samples.tensors())
    for name, codec in lossy_samples.codecs()
} | {
    name: Golden(codec, kvq_samples.template(name), kvq_samples.tensors(), terms)
    for name, (codec, terms) in kvq_samples.codecs().items()
}  # fmt: skip
OTHER_SHAPES = {
    ("2", DType.float16, 3, 66, 41): 0x0517190491C7DC66,
    ("0", DType.float32, 2, 128, 33): 0x88E6DE18D44128EB,
    ("3,sinks=4", DType.bfloat16, 3, 40, 61): 0xCFC0BFE85EA308FE,
    ("1,importance", DType.float16, 5, 80, 257): 0xCCE7002B7EA5A652,
    ("layered,sinks=3", DType.float32, 1, 192, 300): 0x89F93D2C46F50DF5,
}
"""xxh3_64 of frames of kvq: its terms, dtype, heads, head_dim and tokens."""
EXACT = ["raw-r1", "lossless-r1", "lossless-r2"]


def golden(name: str) -> Bytes:
    return np.fromfile(FOLDER / f"{name}.frame", np.uint8)


def sum_of(numbers: Tensors) -> int:
    parts = (part for layers in numbers for parts in layers for part in parts)
    return checksum(b"".join(part.tobytes() for part in parts))


@pytest.mark.parametrize("name", LOSSY)
def test_golden_frames_of_lossy_codecs_are_read_and_written_as_ever(name: str) -> None:
    frame, made = golden(name), LOSSY[name]
    header = check_frame(frame, made.template.key)
    assert template_of(header) == made.template
    assert header.accuracy is (Accuracy.approximate if "kvtc" in name else Accuracy.bounded)
    found = made.read(frame)
    error = largest_error(made.template.layout, made.tensors, found)
    assert 0 < error < 50
    if header.accuracy is Accuracy.bounded:
        assert error <= header.error_bound
    if name.startswith(("kivi", "cachegen", "kvq-static")):
        # kvq:static adds what rounding the largest number to its type could have made.
        slack = 2 if name == "kvq-static-r1" else 1 + 2**-20
        assert header.error_bound <= error * slack
    if "turned" not in name:
        assert np.array_equal(made.written(), frame)
        assert sum_of(found) == SUMS[name]
        return
    # Cosines are the machine's own: their last bit, and so that of a key, may be another.
    again = made.read(made.written())
    assert same(*([[[parts[1]] for parts in x[0]]] for x in (found, again)))
    assert largest_error(made.template.layout, found, again) <= header.error_bound


@pytest.mark.parametrize("path", native.paths())
def test_frames_of_kvq_of_other_types_and_shapes_are_written_as_ever(path: str) -> None:
    for (terms, dtype, heads, dim, tokens), expected in OTHER_SHAPES.items():
        layout = KVLayout((Component(LayerKind.attention, dtype, 2, heads, dim, tokens),))
        named = codec_by_name(f"kvq:{terms}")
        assert isinstance(named, KvqCodec)
        quality = None if named.levels else RATIOS.index(named.ratio)
        codec = KvqCodec(quality, KvqLoops(path), named.options)
        template = replace(lossy_samples.template(), layout=layout, position=1)
        weights = EncodeTerms(importance=kvq_samples.importance(tokens))
        made = Golden(codec, template, kvq_samples.tensors(layout), weights)
        assert checksum(made.written()) == expected


@pytest.mark.parametrize("name", EXACT)
def test_golden_frames_of_exact_codecs_hold_what_the_format_page_says(name: str) -> None:
    frame = golden(name)
    header = check_frame(frame, samples.template().key)
    assert template_of(header) == samples.template()
    assert (header.position, header.prefill_flops, header.flags) == (16, 1.5e9, 0)
    assert (header.accuracy, header.error_bound) == (Accuracy.exact, 0)
    codec = codec_by_id(header.codec_id)
    assert name == f"{codec.name}-r{header.codec_revision}"
    assert header.codec_revision <= codec.revision
    assert same(decoded(frame), samples.tensors())
    kind = name.removesuffix("-r1").replace("-", "_")
    assert len(frame) == int(vectors()[f"{kind}_frame_bytes"])
    assert f"{checksum(frame):016x}" == vectors()[f"{kind}_frame_xxh3_64"]


def test_the_raw_golden_frame_is_written_again_and_is_what_the_lossless_one_becomes() -> None:
    right = golden("raw-r1")
    layout = samples.template().layout
    encode: Callable[[Bytes], object] = partial(
        RawCodec().encode, samples.template(), samples.tensors()
    )
    for write in (encode, lambda out: transcode(golden("lossless-r2"), RawCodec(), out)):
        out = np.full(raw_frame_bytes(layout), 0x5A, np.uint8)
        write(out)
        assert np.array_equal(out, right)
    header = parse_header(right)
    assert right[: header.header_bytes].tobytes().hex() == vectors()["raw_header"]
    assert header.segment(right, 0)[:16].tobytes().hex() == vectors()["raw_segment_0_start"]
    body = b"".join(header.segment(right, index).tobytes() for index in range(2))
    assert struct.unpack("<1024H", body) == tuple(
        0x8000 * (i % 2) + 0x3F80 + 0x80 * (i % 5) + (37 * i) % 128 for i in range(1024)
    )


@pytest.mark.parametrize(("name", "digest"), list(DIGESTS.items()))
def test_golden_assets_are_written_and_read_as_ever(name: str, digest: str) -> None:
    path = FOLDER / name
    assert path.read_bytes() == lossy_samples.ASSET_FILES[name]()
    assert read_asset(path).digest.hex() == digest
