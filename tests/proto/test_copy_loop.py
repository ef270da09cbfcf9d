"""The compiled loop that copies and sums: against numpy and xxhash, and against who writes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.proto import native
from kvstore.proto.buffers import (
    LOOP_FROM_BYTES,
    LOOP_UNIT_BYTES,
    Pieces,
    checksum,
    copy_by_loop,
    copy_groups,
    copy_many,
)

Loop: TypeAlias = "Callable[[Sequence[Pieces]], list[int]]"
LARGE = 2 * LOOP_FROM_BYTES


@pytest.fixture(params=native.paths())
def loop(request: pytest.FixtureRequest) -> Loop:
    return partial(copy_by_loop, native=native.loops(request.param))


def noise(size: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def room(size: int, offset: int) -> NDArray[np.uint8]:
    """Return *size* bytes at *offset* from an address that 64 divides, with 64 ones around."""
    memory = np.ones(size + 256, np.uint8)
    start = -memory.ctypes.data % 64 + 64 + offset
    return memory[start - 64 : start + size + 64]


def test_all_pieces_arrive_and_nothing_around_them(loop: Loop) -> None:
    for offset in [0, 1, 16, 40]:
        for units in [
            [1],
            [2],
            [1, 1],
            [3, 1, 2],
            [64],
            [255, 1],
            [1, 256],
            [512, 512],
            [128, 1, 300],
        ]:
            size = sum(units) * LOOP_UNIT_BYTES
            data, framed = noise(size + offset)[offset:], room(size, offset)
            out = framed[64:-64]
            stops = np.cumsum(units) * LOOP_UNIT_BYTES
            cuts = [
                slice(int(stop) - n * LOOP_UNIT_BYTES, int(stop))
                for n, stop in zip(units, stops, strict=True)
            ]
            pieces = [(out[cut], data[cut]) for cut in cuts]
            for groups in (
                [pieces],
                [[piece] for piece in pieces],
                [pieces[:1], pieces[1:] or pieces],
            ):
                out[:] = 0
                wanted = [checksum(np.concatenate([each for _, each in group])) for group in groups]
                assert loop(groups) == wanted
                assert np.array_equal(out, data)
                assert framed[:64].sum() == framed[-64:].sum() == 64


def test_pieces_may_lie_anywhere(loop: Loop) -> None:
    ones, others = noise(LARGE, 1), noise(LARGE, 2)
    here, there = np.zeros(LARGE, np.uint8), np.zeros(LARGE, np.uint8)
    found = loop([[(there, others), (here, ones)]])
    assert found == [checksum(np.concatenate([others, ones]))]
    assert np.array_equal(here, ones)
    assert np.array_equal(there, others)


def refused() -> Iterator[tuple[str, Pieces]]:
    data, out = noise(4096), np.zeros(4096, np.uint8)
    fixed = np.zeros(4096, np.uint8)
    fixed.flags.writeable = False
    yield "longer", [(out[:2048], data)]
    yield "shorter", [(out, data[:2048])]
    yield "no unit", [(out[:1000], data[:1000])]
    yield "empty", [(out[:0], data[:0])]
    yield "empty behind another", [(out, data), (out[:0], data[:0])]
    yield "read-only", [(fixed, data)]
    yield "strided out", [(np.zeros(8192, np.uint8)[::2], data)]
    yield "strided data", [(out, np.zeros(8192, np.uint8)[::2])]
    yield "none", []


def test_what_it_cannot_copy_is_refused_untouched(loop: Loop) -> None:
    for _name, pieces in refused():
        before = [out.copy() for out, _ in pieces]
        sound = (np.zeros(4096, np.uint8), noise(4096))
        for groups in ([pieces], [[sound], pieces]):
            with pytest.raises(ValueError, match=r"bytes|piece"):
                loop(groups)
        assert not sound[0].any()
        assert all(np.array_equal(out, was) for (out, _), was in zip(pieces, before, strict=True))


@pytest.mark.parametrize("offset", [0, 1])
def test_the_sum_is_of_what_was_stored_while_somebody_writes(loop: Loop, offset: int) -> None:
    data = noise(LARGE + offset)[offset:]
    framed = room(LARGE, offset)
    out = framed[64:-64]
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            np.bitwise_not(data, out=data)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            assert loop([[(out, data)]]) == [checksum(out)]
    finally:
        is_over.set()
        writer.join()


def test_what_the_loop_takes_and_what_it_does_not_is_copied_and_summed_alike() -> None:
    for size in [LOOP_FROM_BYTES - 1024, LOOP_FROM_BYTES, LARGE, LARGE + 5]:
        data, out = noise(size), np.zeros(size, np.uint8)
        assert copy_groups([[(out, data)]]) == [checksum(data)]
        assert np.array_equal(out, data)
        half = size // 2
        out[:] = 0
        pieces = [(out[:half], data[:half]), (out[half:], data[half:])]
        assert copy_groups([pieces]) == [checksum(data)]
        assert np.array_equal(out, data)
        out[:] = 0
        assert copy_groups([pieces[:1], pieces[1:]]) == [
            checksum(data[:half]),
            checksum(data[half:]),
        ]
        assert np.array_equal(out, data)
        out[:] = 0
        copy_many(pieces)
        assert np.array_equal(out, data)


def test_a_piece_of_another_length_is_refused() -> None:
    for size in [LARGE, LARGE + 5]:
        with pytest.raises(ValueError, match="broadcast"):
            copy_groups([[(np.zeros(size - 1024, np.uint8), noise(size))]])
