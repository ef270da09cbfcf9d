"""The compiled loop that reads a file and sums: against the file's bytes and xxhash."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from kvstore.proto import native
from kvstore.proto.buffers import (
    LOOP_UNIT_BYTES,
    READ_LOOP_FROM_BYTES,
    Bytes,
    FileGroups,
    checksum,
    read_by_loop,
    read_summed,
)

Loop: TypeAlias = "Callable[[int, FileGroups], list[int] | None]"
SIZE = 4 * READ_LOOP_FROM_BYTES
DATA = np.random.default_rng(0).integers(0, 256, SIZE + 77, np.uint8)


@pytest.fixture(params=native.paths())
def loop(request: pytest.FixtureRequest) -> Loop:
    return partial(read_by_loop, native=native.loops(request.param))


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(DATA.tobytes())
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def cut(room: Bytes, units: Sequence[int]) -> list[Bytes]:
    stops = (np.cumsum(units) * LOOP_UNIT_BYTES).tolist()
    return [room[a:b] for a, b in zip([0, *stops], stops, strict=False)]


def test_all_pieces_arrive_and_nothing_around_them(loop: Loop, file: int) -> None:
    for offset in [0, 1, 77]:
        for units in [[1], [2], [1, 1], [255, 1, 2], [256], [257], [256, 256, 1], [1000, 3]]:
            size = sum(units) * LOOP_UNIT_BYTES
            framed = np.ones(size + 2, np.uint8)
            pieces = cut(framed[1:-1], units)
            starts = np.cumsum([0, *map(len, pieces)])[:-1].tolist()
            alone = [(offset + at, [piece]) for at, piece in zip(starts, pieces, strict=True)]
            for groups in ([(offset, pieces)], alone, alone[::-1]):
                framed[1:-1] = 0
                wanted = [checksum(DATA[at : at + sum(map(len, outs))]) for at, outs in groups]
                assert loop(file, groups) == wanted
                assert np.array_equal(framed[1:-1], DATA[offset : offset + size])
                assert framed[0] == framed[-1] == 1


def test_what_ends_early_has_no_sums(loop: Loop, file: int) -> None:
    for offset in [78, SIZE, 1 << 40]:
        groups = [(0, [np.zeros(1024, np.uint8)]), (offset, [np.zeros(SIZE, np.uint8)])]
        assert loop(file, groups) is None


def test_what_cannot_be_read_has_no_sums(loop: Loop, tmp_path: Path) -> None:
    groups = [(0, [np.zeros(SIZE, np.uint8)])]
    only_written = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    os.close(only_written)
    assert loop(only_written, groups) is None


def unfit() -> Iterator[tuple[str, FileGroups]]:
    fixed = np.zeros(1024, np.uint8)
    fixed.flags.writeable = False
    yield "no unit", [(0, [np.zeros(1000, np.uint8)])]
    yield "empty", [(0, [np.zeros(0, np.uint8)])]
    yield "read-only", [(0, [fixed])]
    yield "strided", [(0, [np.zeros(2048, np.uint8)[::2]])]
    yield "none", [(0, [])]


def test_what_it_cannot_fill_is_refused_untouched(loop: Loop, file: int) -> None:
    for _name, groups in unfit():
        sound = np.zeros(1024, np.uint8)
        with pytest.raises(ValueError, match=r"fill|piece"):
            loop(file, [(0, [sound]), *groups])
        assert not sound.any()


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
