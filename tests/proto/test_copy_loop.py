"""The compiled loop that copies and sums: against numpy and xxhash, and against who writes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.proto import buffers
from kvstore.proto.buffers import (
    LOOP_FROM_BYTES,
    LOOP_UNIT_BYTES,
    Pieces,
    checksum,
    copy_checked,
    copy_groups,
    copy_many,
    copy_pieces,
)

pytest.importorskip("llvmlite")

from kvstore.proto import checksum_loops
from kvstore.proto.checksum_loops import CopyLoop, copies_agree

LARGE = 2 * LOOP_FROM_BYTES


@pytest.fixture(scope="module")
def loop() -> CopyLoop:
    return CopyLoop()


def noise(size: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def room(size: int, offset: int) -> NDArray[np.uint8]:
    """Return *size* bytes at *offset* from an address that 64 divides, with 64 ones around."""
    memory = np.ones(size + 256, np.uint8)
    start = -memory.ctypes.data % 64 + 64 + offset
    return memory[start - 64 : start + size + 64]


@pytest.mark.parametrize("offset", [0, 1, 16, 40])
@pytest.mark.parametrize(
    "units", [[1], [2], [1, 1], [3, 1, 2], [64], [255, 1], [1, 256], [512, 512], [128, 1, 300]]
)
def test_all_pieces_arrive_and_nothing_around_them(
    loop: CopyLoop, units: list[int], offset: int
) -> None:
    size = sum(units) * LOOP_UNIT_BYTES
    data, framed = noise(size + offset)[offset:], room(size, offset)
    out = framed[64:-64]
    stops = np.cumsum(units) * LOOP_UNIT_BYTES
    cuts = [
        slice(int(stop) - n * LOOP_UNIT_BYTES, int(stop))
        for n, stop in zip(units, stops, strict=True)
    ]
    pieces = [(out[cut], data[cut]) for cut in cuts]
    for groups in ([pieces], [[piece] for piece in pieces], [pieces[:1], pieces[1:] or pieces]):
        out[:] = 0
        wanted = [checksum(np.concatenate([each for _, each in group])) for group in groups]
        assert loop(groups) == wanted
        assert np.array_equal(out, data)
        assert framed[:64].sum() == framed[-64:].sum() == 64


def test_pieces_may_lie_anywhere(loop: CopyLoop) -> None:
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


@pytest.mark.parametrize(("name", "pieces"), list(refused()))
def test_what_it_cannot_copy_is_refused_untouched(
    loop: CopyLoop, name: str, pieces: Pieces
) -> None:
    before = [out.copy() for out, _ in pieces]
    sound = (np.zeros(4096, np.uint8), noise(4096))
    for groups in ([pieces], [[sound], pieces]):
        with pytest.raises(ValueError, match=r"bytes|piece"):
            loop(groups)
    assert not sound[0].any()
    assert all(np.array_equal(out, was) for (out, _), was in zip(pieces, before, strict=True))


@pytest.mark.parametrize("offset", [0, 1])
def test_the_sum_is_of_what_was_stored_while_somebody_writes(loop: CopyLoop, offset: int) -> None:
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


@pytest.mark.parametrize("size", [LOOP_FROM_BYTES, LARGE, LARGE + 5])
@pytest.mark.parametrize("has_loop", [True, False])
def test_both_ways_copy_and_sum_alike(
    monkeypatch: pytest.MonkeyPatch, size: int, has_loop: bool
) -> None:
    calls = 0
    compiled = CopyLoop() if has_loop else None

    def counted(groups: Sequence[Pieces]) -> list[int]:
        nonlocal calls
        assert compiled is not None
        calls += 1
        return compiled(groups)

    monkeypatch.setattr(buffers, "_best_loop", lambda: counted if has_loop else None)
    data, out = noise(size), np.zeros(size, np.uint8)
    assert copy_checked(out, data) == checksum(data)
    assert np.array_equal(out, data)
    half = size // 2
    out[:] = 0
    pieces = [(out[:half], data[:half]), (out[half:], data[half:])]
    assert copy_pieces(pieces) == checksum(data)
    assert np.array_equal(out, data)
    out[:] = 0
    assert copy_groups([pieces[:1], pieces[1:]]) == [checksum(data[:half]), checksum(data[half:])]
    assert np.array_equal(out, data)
    out[:] = 0
    copy_many(pieces)
    assert np.array_equal(out, data)
    assert calls == (4 if has_loop and size % LOOP_UNIT_BYTES == 0 else 0)


def test_a_piece_of_another_length_is_refused_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    for made in (CopyLoop(), None):
        monkeypatch.setattr(buffers, "_best_loop", lambda made=made: made)
        with pytest.raises(ValueError, match="broadcast"):
            copy_checked(np.zeros(LARGE - 1024, np.uint8), noise(LARGE))


def test_a_loop_that_does_not_agree_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    make = buffers._best_loop.__wrapped__
    assert make() is not None
    monkeypatch.setattr(checksum_loops, "copies_agree", lambda loop: False)
    assert make() is None

    def broken() -> CopyLoop:
        raise RuntimeError("LLVM ERROR: no such target")

    monkeypatch.setattr(checksum_loops, "CopyLoop", broken)
    assert make() is None


def test_agreement_is_of_sums_and_of_bytes(loop: CopyLoop) -> None:
    assert copies_agree(loop)

    def forgets(groups: Sequence[Pieces]) -> list[int]:
        return [checksum(np.concatenate([data for _, data in pieces])) for pieces in groups]

    def mistakes(groups: Sequence[Pieces]) -> list[int]:
        return [found ^ 1 for found in loop(groups)]

    def joins(groups: Sequence[Pieces]) -> list[int]:
        return loop([[piece for pieces in groups for piece in pieces]]) * len(groups)

    assert not copies_agree(forgets)
    assert not copies_agree(mistakes)
    assert not copies_agree(joins)
