from __future__ import annotations

import struct

import numpy as np
import pytest
from golden.sieved import unsieved
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.sieve import NUMPY

from kvstore.codecs.lossless import (
    Loops,
    body_bytes,
    commonest,
    pack_sieved,
    scratch_for,
    unpack_sieved,
)
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.errors import InvalidFrameError
from kvstore.proto.native import paths

HEAD_BYTES = 36
SIEVES = [*paths(), "numpy"]


def sieve_called(name: str) -> Loops:
    return NUMPY if name == "numpy" else Loops(name)


def exponents(items: int, seed: int = 0) -> Bytes:
    """Return the exponents of normal values: some ten values are all but a few of them."""
    normal = np.random.default_rng(seed).standard_normal(items).astype(np.float32)
    return (normal.view(np.uint32) >> 23 & 255).astype(np.uint8)


def packed(plane: Bytes, sieve: Loops = NUMPY) -> bytes:
    out = np.zeros(len(plane) + HEAD_BYTES + 128, np.uint8)
    found = pack_sieved(plane, sieve, scratch_for(len(plane)), out)
    assert found is not None
    return found.tobytes()


def unpacked(data: bytes, items: int, sieve: Loops) -> Bytes:
    out = np.zeros(items, np.uint8)
    unpack_sieved(as_bytes(data), sieve, scratch_for(items), out)
    return out


@pytest.mark.parametrize("name", SIEVES)
def test_a_sieved_plane_reads_by_the_prose_of_the_format_page(name: str) -> None:
    for items in [150, 2048, 6007]:
        plane = exponents(items)
        data = packed(plane, sieve_called(name))
        assert unsieved(data, items) == plane.tobytes()
        assert np.array_equal(unpacked(data, items, sieve_called(name)), plane)
        assert len(data) < 0.40 * items + HEAD_BYTES + 64


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 700), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_all_sieves_agree_on_any_plane_and_any_values(items: int, spread: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    plane = rng.integers(0, spread, items, np.uint8)
    values = rng.permutation(max(15, 2 * spread))[:15].astype(np.uint8)
    bodies = []
    for sieve in map(sieve_called, SIEVES):
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


def test_planes_that_another_code_suits_are_not_sieved() -> None:
    for kind in ["zeros", "two values", "noise", "sixty values"]:
        rng = np.random.default_rng(3)
        plane = {
            "zeros": np.zeros(9000, np.uint8),
            "two values": rng.integers(0, 2, 9000, np.uint8),
            "noise": rng.integers(0, 256, 9000, np.uint8),
            "sixty values": rng.integers(0, 60, 9000, np.uint8),
        }[kind]
        assert commonest(plane) is None
        assert pack_sieved(plane, NUMPY, scratch_for(9000), np.zeros(20_000, np.uint8)) is None


def test_a_plane_that_would_not_fit_is_not_sieved() -> None:
    plane = exponents(4000)
    size = len(packed(plane))
    for room, is_found in ((size, True), (size - 1, False), (HEAD_BYTES, False), (0, False)):
        for name in SIEVES:
            sieve, out = sieve_called(name), np.zeros(room, np.uint8)
            assert (pack_sieved(plane, sieve, scratch_for(4000), out) is not None) == is_found


ITEMS = 1000
RIGHT = packed(exponents(ITEMS))


def with_counts(*counts: int) -> bytes:
    return RIGHT[:16] + struct.pack("<5I", *counts) + RIGHT[HEAD_BYTES:]


COUNTS = struct.unpack_from("<5I", RIGHT, 16)
FIRST = HEAD_BYTES + 16 * -(-ITEMS // 64)
HOSTILE = {
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
def test_a_hostile_plane_is_refused(name: str) -> None:
    for data in HOSTILE.values():
        with pytest.raises(InvalidFrameError, match="sieved plane"):
            unpacked(data, ITEMS, sieve_called(name))


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32 - 1))
def test_sieves_agree_on_planes_that_were_changed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = np.frombuffer(RIGHT, np.uint8).copy()
    data[rng.integers(0, len(data), rng.integers(1, 4))] = rng.integers(0, 256)
    found: list[bytes | None] = []
    for name in SIEVES:
        try:
            found.append(unpacked(data.tobytes(), ITEMS, sieve_called(name)).tobytes())
        except InvalidFrameError:
            found.append(None)
    assert all(each == found[0] for each in found)
