from __future__ import annotations

import numpy as np
import pytest
from contracts.codec import decoded, same
from contracts.lossy_codec import largest_error, promise_held
from golden.kvq_samples import LAYOUT, codecs, template, tensors
from golden.samples import FOLDER, template_of
from oracles.kvq_numpy import NUMPY_KVQ

from kvstore.codecs.base import Part
from kvstore.codecs.kvq import KvqCodec
from kvstore.proto.buffers import Bytes, checksum
from kvstore.proto.frame import check_frame, parse_header
from kvstore.proto.types import Accuracy

SUMS = {
    "kvq-r2": (0x9C9585595F7F62E2, 0x54155F61B5124DA0),
    "kvq-turned-r2": (0x5303EF8F849265CD, 0x6011BB294E5439BF),
    "kvq-layered-r2": (0x733D9271EE23F348, 0x5995330DCAAC5C57),
    "kvq-importance-r2": (0x97E02803EA3736FF, 0x9831B665CEA896DD),
}
"""xxh3_64 of the file, and of the numbers that come out of it."""
_every_file = pytest.mark.parametrize("name", SUMS)
_not_turned = pytest.mark.parametrize("name", [name for name in SUMS if "turned" not in name])


def golden(name: str) -> Bytes:
    return np.fromfile(FOLDER / f"{name}.frame", np.uint8)


def sum_of(numbers: list[list[list[Part]]]) -> int:
    parts = (part for layers in numbers for parts in layers for part in parts)
    return checksum(b"".join(part.tobytes() for part in parts))


@_every_file
def test_golden_frames_hold_what_was_put_into_them(name: str) -> None:
    frame = golden(name)
    assert checksum(frame) == SUMS[name][0]
    header = check_frame(frame, template(name).key)
    assert template_of(header) == template(name)
    assert header.accuracy is Accuracy.bounded
    assert promise_held(frame, tensors()) is Accuracy.bounded


@_not_turned
def test_golden_frames_give_the_same_numbers_for_ever(name: str) -> None:
    frame = golden(name)
    assert sum_of(decoded(frame)) == SUMS[name][1]
    header = parse_header(frame)
    reference = KvqCodec(0, NUMPY_KVQ)
    out = [[[np.empty_like(part) for part in parts] for parts in tensors()[0]]]
    reference.decode_into(header, frame, out)
    assert sum_of(out) == SUMS[name][1]


@_not_turned
def test_golden_frames_are_written_again_byte_by_byte(name: str) -> None:
    codec, terms = codecs()[name]
    out = np.empty(codec.max_frame_bytes(LAYOUT), np.uint8)
    header = codec.encode(template(name), tensors(), out, terms)
    assert np.array_equal(out[: header.frame_bytes], golden(name))


def test_turned_keys_differ_at_most_by_a_rounding_of_another_machine() -> None:
    # Cosines are the machine's own: their last bit, and so that of a key, may be another.
    name = "kvq-turned-r2"
    frame = golden(name)
    found = decoded(frame)
    codec, terms = codecs()[name]
    out = np.empty(codec.max_frame_bytes(LAYOUT), np.uint8)
    again = decoded(out[: codec.encode(template(name), tensors(), out, terms).frame_bytes])
    values, values_again = ([[[parts[1]] for parts in x[0]]] for x in (found, again))
    assert same(values, values_again)
    assert largest_error(LAYOUT, found, again) <= parse_header(frame).error_bound
