"""Buffers, and the compiled loops that copy or read and sum: against numpy, files and xxhash."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.proto import native
from kvstore.proto.buffers import (
    BLOCK_BYTES,
    LOOP_FROM_BYTES,
    LOOP_UNIT_BYTES,
    READ_LOOP_FROM_BYTES,
    Bytes,
    FileGroups,
    Pieces,
    address,
    as_bytes,
    checksum,
    copy_by_loop,
    copy_bytes,
    copy_groups,
    read_by_loop,
    read_summed,
)

Copy = Callable[[Sequence[Pieces]], list[int]]
Read = Callable[[int, FileGroups], "list[int] | None"]
LARGE = 2 * LOOP_FROM_BYTES
SIZE = 4 * READ_LOOP_FROM_BYTES
UNITS = [[1], [1, 1], [3, 1, 2], [255, 1, 2], [256], [257], [1, 256], [512, 512], [128, 1, 300]]


@pytest.fixture(params=native.paths())
def copy(request: pytest.FixtureRequest) -> Copy:
    return partial(copy_by_loop, native=native.loops(request.param))


@pytest.fixture(params=native.paths())
def read(request: pytest.FixtureRequest) -> Read:
    return partial(read_by_loop, native=native.loops(request.param))


def noise(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


DATA = noise(SIZE + 77)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(DATA.tobytes())
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def room(size: int, offset: int) -> Bytes:
    """Return *size* bytes at *offset* from an address that 64 divides, with 64 ones around."""
    memory = np.ones(size + 256, np.uint8)
    start = -memory.ctypes.data % 64 + 64 + offset
    return memory[start - 64 : start + size + 64]


def cuts(units: Sequence[int]) -> list[slice]:
    stops = [0, *(np.cumsum(units) * LOOP_UNIT_BYTES).tolist()]
    return [slice(a, b) for a, b in pairwise(stops)]


def test_all_pieces_are_copied_and_nothing_around_them(copy: Copy) -> None:
    for offset in [0, 1, 16, 40]:
        for units in UNITS:
            size = sum(units) * LOOP_UNIT_BYTES
            data, framed = noise(size + offset)[offset:], room(size, offset)
            out = framed[64:-64]
            pieces = [(out[cut], data[cut]) for cut in cuts(units)]
            for groups in (
                [pieces], [pieces[::-1]], [[piece] for piece in pieces],
                [pieces[:1], pieces[1:] or pieces],
            ):  # fmt: skip
                out[:] = 0
                wanted = [checksum(np.concatenate([each for _, each in group])) for group in groups]
                assert copy(groups) == wanted
                assert np.array_equal(out, data)
                assert framed[:64].sum() == framed[-64:].sum() == 64


def test_all_pieces_are_read_and_nothing_around_them(read: Read, file: int) -> None:
    for offset in [0, 1, 77]:
        for units in UNITS:
            size = sum(units) * LOOP_UNIT_BYTES
            framed = np.ones(size + 2, np.uint8)
            pieces = [framed[1:-1][cut] for cut in cuts(units)]
            starts = [offset + cut.start for cut in cuts(units)]
            alone = [(at, [piece]) for at, piece in zip(starts, pieces, strict=True)]
            for groups in ([(offset, pieces)], alone, alone[::-1]):
                framed[1:-1] = 0
                wanted = [checksum(DATA[at : at + sum(map(len, outs))]) for at, outs in groups]
                assert read(file, groups) == wanted
                assert np.array_equal(framed[1:-1], DATA[offset : offset + size])
                assert framed[0] == framed[-1] == 1


def unfit() -> Iterator[Pieces]:
    data, out, fixed = noise(4096), np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    fixed.flags.writeable = False
    yield [(out[:1000], data[:1000])]
    yield [(out[:0], data[:0])]
    yield [(out, data), (out[:0], data[:0])]
    yield [(fixed, data)]
    yield [(np.zeros(8192, np.uint8)[::2], data)]
    yield []


def test_what_cannot_be_copied_or_filled_is_refused_untouched(
    copy: Copy, read: Read, file: int
) -> None:
    data, out = noise(4096), np.zeros(4096, np.uint8)
    uneven: list[Pieces] = [
        [(out[:2048], data)], [(out, data[:2048])], [(out, np.zeros(8192, np.uint8)[::2])]
    ]  # fmt: skip
    sound = np.zeros(4096, np.uint8)
    for pieces in [*unfit(), *uneven]:
        for groups in ([pieces], [[(sound, data)], pieces]):
            with pytest.raises(ValueError, match=r"bytes|piece"):
                copy(groups)
    for pieces in unfit():
        with pytest.raises(ValueError, match=r"fill|piece"):
            read(file, [(0, [sound]), (0, [piece for piece, _ in pieces])])
    assert not sound.any()
    assert not out.any()


@pytest.mark.parametrize("offset", [0, 1])
def test_the_sum_is_of_what_was_stored_while_somebody_writes(copy: Copy, offset: int) -> None:
    data = noise(LARGE + offset)[offset:]
    out = room(LARGE, offset)[64:-64]
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            np.bitwise_not(data, out=data)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            assert copy([[(out, data)]]) == [checksum(out)]
    finally:
        is_over.set()
        writer.join()


def test_what_ends_early_or_cannot_be_read_has_no_sums(
    read: Read, file: int, tmp_path: Path
) -> None:
    for offset in [78, SIZE, 1 << 40]:
        groups = [(0, [np.zeros(1024, np.uint8)]), (offset, [np.zeros(SIZE, np.uint8)])]
        assert read(file, groups) is None
    only_written = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    os.close(only_written)
    assert read(only_written, [(0, [np.zeros(SIZE, np.uint8)])]) is None


def test_what_the_loop_takes_and_what_it_does_not_is_copied_and_summed_alike() -> None:
    sizes = [LOOP_FROM_BYTES - 1024, LOOP_FROM_BYTES, LARGE, LARGE + 5, 0, 1, 63, 4096]
    for size in [*sizes, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 77]:
        data, framed = noise(size), np.zeros(size + 2, np.uint8)
        out, half = framed[1:-1], size // 2
        pieces = [(out[:half], data[:half]), (out[half:], data[half:])]
        for groups in ([[(out, data)]], [pieces], [pieces[:1], pieces[1:]]):
            out[:] = 0
            wanted = [checksum(b"".join(each.tobytes() for _, each in group)) for group in groups]
            assert copy_groups(groups) == wanted
            assert np.array_equal(out, data)
            assert (framed[0], framed[-1]) == (0, 0)


def test_memory_of_a_dtype_that_no_buffer_has_is_found_too() -> None:
    times = np.zeros(4, "M8[s]")
    assert address(times) == times.ctypes.data


def test_a_piece_of_another_length_is_refused() -> None:
    for size in [10, BLOCK_BYTES + 10, LARGE, LARGE + 5]:
        out, data = np.zeros(size - min(size // 2, 1024), np.uint8), noise(size)
        with pytest.raises(ValueError, match="broadcast"):
            copy_bytes(out, data)
        with pytest.raises(ValueError, match="broadcast"):
            copy_groups([[(out, data)]])


def test_sums_are_those_of_the_file_or_none_at_all(file: int) -> None:
    for size in [READ_LOOP_FROM_BYTES - 1024, READ_LOOP_FROM_BYTES, SIZE, SIZE + 5, 0]:
        out = np.zeros(size, np.uint8)
        found = read_summed(file, [(5, [out])])
        if size in (READ_LOOP_FROM_BYTES, SIZE):
            assert found == [checksum(DATA[5 : 5 + size])]
            assert np.array_equal(out, DATA[5 : 5 + size])
        else:
            assert found is None
            assert not out.any()


def test_checksums_have_not_changed() -> None:
    assert checksum(b"") == 0x2D06800538D394C2
    assert checksum(memoryview(b"kvstore")) == checksum(as_bytes(b"kvstore"))
    for data in (b"kvstore", DATA.tobytes()):
        assert checksum(data) == xxhash.xxh3_64_intdigest(data, seed=0)


def test_bytes_of_any_buffer_share_its_memory() -> None:
    for kind in (bytes, bytearray, memoryview):
        buffer = kind(b"\x01\x02\x03")
        view = as_bytes(buffer)
        assert view.tolist() == [1, 2, 3]
        assert view.flags.writeable == (kind is bytearray)
        if isinstance(buffer, bytearray):
            view[0] = 9
            assert buffer[0] == 9
    array = np.zeros((2, 3), np.uint16)
    as_bytes(array)[2] = 7  # type: ignore[arg-type]
    assert array[0, 1] == 7
    assert len(as_bytes(array)) == 12  # type: ignore[arg-type]
