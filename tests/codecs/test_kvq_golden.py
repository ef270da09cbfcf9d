from __future__ import annotations

import numpy as np
import pytest
from contracts.codec import decoded, same
from contracts.lossy_codec import largest_error, promise_held
from golden.kvq_samples import LAYOUT, codecs, template, tensors
from golden.samples import FOLDER

from kvstore.codecs.base import Part
from kvstore.codecs.kvq import KvqCodec
from kvstore.codecs.kvq_tiles import NUMPY as NUMPY_TILES
from kvstore.codecs.mixed import MixedCodec
from kvstore.codecs.rans import NUMPY as NUMPY_RANS
from kvstore.proto.buffers import Bytes, checksum
from kvstore.proto.frame import FrameTemplate, check_frame, parse_header
from kvstore.proto.types import Fidelity

SUMS = {
    "kvq-r1.frame": (0x6C0301C6C16346C0, 0x5FFCA67321124C6C),
    "kvq-turned-r1.frame": (0xA83FE95A8843048C, 0x633AC9D878621D3C),
    "kvq-layered-r1.frame": (0x4A6C86C087D70B6E, 0x5995330DCAAC5C57),
    "mixed-r1.frame": (0xFD48CC89206C158B, 0xDF98568070B69576),
}
"""xxh3_64 of the file, and of the numbers that come out of it."""
_every_file = pytest.mark.parametrize("name", SUMS)
_not_turned = pytest.mark.parametrize(
    "name", ["kvq-r1.frame", "kvq-layered-r1.frame", "mixed-r1.frame"]
)


def golden(name: str) -> Bytes:
    return np.fromfile(FOLDER / name, np.uint8)


def sum_of(numbers: list[list[list[Part]]]) -> int:
    parts = (part for layers in numbers for parts in layers for part in parts)
    return checksum(b"".join(part.tobytes() for part in parts))


@_every_file
def test_golden_frames_hold_what_was_put_into_them(name: str) -> None:
    frame = golden(name)
    assert checksum(frame) == SUMS[name][0]
    header = check_frame(frame, template().key)
    assert FrameTemplate.of(header) == template()
    assert header.fidelity is Fidelity.bounded
    assert promise_held(frame, tensors()) is Fidelity.bounded


@_not_turned
def test_golden_frames_give_the_same_numbers_for_ever(name: str) -> None:
    frame = golden(name)
    assert sum_of(decoded(frame)) == SUMS[name][1]
    header = parse_header(frame)
    is_mixed = header.codec_id == MixedCodec.codec_id
    reference = MixedCodec(0, NUMPY_RANS) if is_mixed else KvqCodec(0, NUMPY_TILES, NUMPY_RANS)
    out = [[[np.empty_like(part) for part in parts] for parts in tensors()[0]]]
    reference.decode_into(header, frame, out)
    assert sum_of(out) == SUMS[name][1]


@_not_turned
def test_golden_frames_are_written_again_byte_by_byte(name: str) -> None:
    codec, terms = codecs()[name]
    out = np.empty(codec.max_frame_bytes(LAYOUT), np.uint8)
    header = codec.encode(template(), tensors(), out, terms)
    assert np.array_equal(out[: header.frame_bytes], golden(name))


def test_turned_keys_differ_at_most_by_a_rounding_of_another_machine() -> None:
    # Cosines are the machine's own: their last bit, and so that of a key, may be another.
    frame = golden("kvq-turned-r1.frame")
    found = decoded(frame)
    codec, terms = codecs()["kvq-turned-r1.frame"]
    out = np.empty(codec.max_frame_bytes(LAYOUT), np.uint8)
    again = decoded(out[: codec.encode(template(), tensors(), out, terms).frame_bytes])
    values, values_again = ([[[parts[1]] for parts in x[0]]] for x in (found, again))
    assert same(values, values_again)
    assert largest_error(LAYOUT, found, again) <= parse_header(frame).error_bound
