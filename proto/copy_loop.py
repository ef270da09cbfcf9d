"""Copying and summing in one pass: each word is loaded once, stored and added to its XXH3.

numpy and xxhash pass over the bytes twice, and their stores read into the caches what they then
overwrite. This loop is written in LLVM's language and compiled for the processor at hand, by what
the extra ``cpu-fast`` brings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir

from kvstore.proto.buffers import LOOP_UNIT_BYTES, Bytes, Pieces, checksum
from kvstore.proto.loop_code import (
    COLUMNS,
    I32,
    I64,
    LANES,
    SIZE,
    SUM,
    VECTOR,
    SummingCode,
    address_of,
    machine_code,
    order,
    sums_of,
    word,
)

_STREAM_ALIGN_BYTES = 16
"""Stores past the caches are of so many bytes, at a multiple of them."""
_QUARTER = ir.VectorType(I64, 2)
"""As much as is aligned wherever malloc put an array."""


class CopyLoop:
    """The loop, compiled. It holds no lock. Thread-safe."""

    def __init__(self) -> None:
        self._near = _Compiled(is_streaming=False)
        self._streaming = _Compiled(is_streaming=True)

    def __call__(self, groups: Sequence[Pieces]) -> list[int]:
        """Copy all pieces of *groups*; return xxh3_64 of what was stored for each group.

        That is of its pieces one behind the other. Raises ValueError for a piece that does not
        fit where it is to go, for one that is no Piece, and for a group of none.
        """
        rows: list[int] = []
        places = 0
        for pieces in groups:
            size = 0
            for out, data in pieces:
                blocks, rest = divmod(data.nbytes, LOOP_UNIT_BYTES)
                if rest or not blocks or not _fits(out, data):
                    fix = f"could not broadcast or copy {data.nbytes} to {out.nbytes} bytes"
                    raise ValueError(fix)
                place = address_of(out)
                rows += (place, address_of(data), blocks, 0, 0)
                size += data.nbytes
                places |= place
            if not size:
                raise ValueError("give at least one piece in each group")
            rows[SIZE - COLUMNS] = size
        return (self._near if places % _STREAM_ALIGN_BYTES else self._streaming)(rows)


def _fits(out: Bytes, data: Bytes) -> bool:
    return (
        out.nbytes == data.nbytes
        and out.flags.c_contiguous
        and data.flags.c_contiguous
        and out.flags.writeable
    )


class _Compiled:
    """One form of the loop as machine code."""

    def __init__(self, *, is_streaming: bool) -> None:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)
        self._run, self._engine = machine_code(_Loop(is_streaming).module, kind)

    def __call__(self, rows: Sequence[int]) -> list[int]:
        table = (ctypes.c_uint64 * len(rows))(*rows)
        self._run(ctypes.addressof(table), len(rows) // COLUMNS)
        return sums_of(table[:])


_OUT, _DATA, _BLOCKS = range(SIZE)


class _Loop(SummingCode):
    """Emits ``void copy_summed(rows, count)``."""

    def __init__(self, is_streaming: bool) -> None:
        super().__init__("copy_summed", ir.VoidType())
        self._is_streaming = is_streaming
        self._out, self._data, self._left = (self.b.alloca(I64) for _ in range(3))
        self._emit()

    def _emit(self) -> None:
        b = self.b
        with self.each_row():
            size = self._begin_row()
            is_end = b.icmp_unsigned("!=", size, word(0))
            kept = b.zext(is_end, I64)  # the last block of a group is summed otherwise
            with self.loop(lambda: b.icmp_unsigned(">", b.load(self._left), kept)):
                self._block(is_last=False)
            with b.if_then(is_end):
                self._block(is_last=True)
                b.store(self.digest(size), self.column(SUM))
                self.begin_group()
        if self._is_streaming:
            b.fence("seq_cst")  # such stores pass others: nobody may hear of them too early
        b.ret_void()

    def _begin_row(self) -> Any:
        """Load a row; return its size."""
        b = self.b
        for at, kept in ((_OUT, self._out), (_DATA, self._data), (_BLOCKS, self._left)):
            b.store(b.load(self.column(at)), kept)
        return b.load(self.column(SIZE))

    def _block(self, *, is_last: bool) -> None:
        b = self.b
        out, data = b.load(self._out), b.load(self._data)
        self.unit(data, is_last=is_last, on_stripe=partial(self._store, out))
        b.store(b.add(out, word(LOOP_UNIT_BYTES)), self._out)
        b.store(b.add(data, word(LOOP_UNIT_BYTES)), self._data)
        b.store(b.sub(b.load(self._left), word(1)), self._left)

    def _store(self, out: Any, value: Any, offset: int) -> None:
        b = self.b
        address = b.add(out, word(offset))
        if not self._is_streaming:
            b.store(value, b.inttoptr(address, VECTOR.as_pointer()), align=1)
            return
        hint = self.module.add_metadata([ir.Constant(I32, 1)])
        for first in range(0, LANES, 2):
            two = b.shuffle_vector(value, value, order([first, first + 1]))
            at = b.inttoptr(b.add(address, word(8 * first)), _QUARTER.as_pointer())
            b.store(two, at, align=_STREAM_ALIGN_BYTES).set_metadata("nontemporal", hint)


def agrees(loop: Callable[[Sequence[Pieces]], list[int]]) -> bool:
    """Whether *loop* copies, and sums as xxhash does, in both its forms."""
    data = np.random.default_rng(0).integers(0, 256, 256 * LOOP_UNIT_BYTES + 64, np.uint8)
    room = np.zeros(len(data) + 64, np.uint8)
    start = -room.ctypes.data % 64
    for out_at, cut, size in ((0, 2, 8), (1, 5, 8), (0, 128, 256), (3, 1, 255)):
        stop, middle = size * LOOP_UNIT_BYTES, cut * LOOP_UNIT_BYTES
        out, source = room[start + out_at :][:stop], data[out_at:][:stop]
        pieces = [(out[a:b], source[a:b]) for a, b in ((0, middle), (middle, stop))]
        for groups in ([pieces], [pieces[:1], pieces[1:]]):
            out[:] = 0
            sums = [checksum(np.concatenate([each for _, each in group])) for group in groups]
            if loop(groups) != sums or not np.array_equal(out, source):
                return False
    return True
