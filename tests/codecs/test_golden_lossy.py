"""Golden frames of the lossy codecs: read as ever, written byte by byte as ever."""

from __future__ import annotations

import numpy as np
import pytest
from golden.lossy_samples import ASSET_FILES, codecs, template, tensors
from golden.samples import FOLDER, template_of

from kvstore.codecs.assets import read_asset
from kvstore.codecs.base import LossyCodec, empty_tensors
from kvstore.codecs.floats import to_float32
from kvstore.proto.buffers import Bytes, checksum
from kvstore.proto.frame import check_frame
from kvstore.proto.types import Accuracy, DType

DECODED = {
    "kivi-8-r1.frame": "2e648273fa63d973",
    "kivi-4-r1.frame": "ed6f164d4af78f14",
    "kivi-2-r1.frame": "6f00c101325ecc4b",
    "cachegen-r1.frame": "5120ce3436d3a07a",
    "kvtc-r1.frame": "1967a18876863d51",
    "kvq-static-r1.frame": "12fdba19fc38435c",
}
"""xxh3_64 of K and V as each frame decodes."""

DIGESTS = {
    "cachegen-v1.kvasset": "9f0f78e42993e5a0e43d5c8fb2fa8be9",
    "kvtc-v1.kvasset": "dd39e5788305327701a459a6ef3b52d4",
    "kvq-static-v1.kvasset": "ce0a22e5cc31b9f954c1bcf45d6ef385",
}

_every_frame = pytest.mark.parametrize(("name", "codec"), list(codecs()), ids=lambda v: str(v)[:8])


def golden(name: str) -> Bytes:
    return np.fromfile(FOLDER / name, np.uint8)


@_every_frame
def test_golden_frames_decode_to_the_same_bits_as_ever(name: str, codec: LossyCodec) -> None:
    frame = golden(name)
    header = check_frame(frame, template().key)
    assert template_of(header) == template()
    out = empty_tensors(header.layout)
    codec.decode_into(header, frame, out)
    assert f"{checksum(np.array(out[0][0]).tobytes()):016x}" == DECODED[name]
    error = max(
        float(np.abs(to_float32(a, DType.bfloat16) - to_float32(b, DType.bfloat16)).max())
        for a, b in zip(out[0][0], tensors()[0][0], strict=True)
    )
    if header.accuracy is Accuracy.bounded:
        # kvq:static adds what rounding the largest number to its type could have made.
        slack = 2 if name.startswith("kvq-static") else 1 + 2**-20
        assert error <= header.error_bound <= error * slack
    assert 0 < error < 50


@_every_frame
def test_golden_frames_are_written_again_byte_by_byte(name: str, codec: LossyCodec) -> None:
    out = np.full(codec.max_frame_bytes(template().layout), 0x5A, np.uint8)
    header = codec.encode(template(), tensors(), out)
    assert np.array_equal(out[: header.frame_bytes], golden(name))


@pytest.mark.parametrize(("name", "digest"), list(DIGESTS.items()))
def test_golden_assets_are_written_and_read_as_ever(name: str, digest: str) -> None:
    path = FOLDER / name
    assert path.read_bytes() == ASSET_FILES[name]()
    assert read_asset(path).digest.hex() == digest
