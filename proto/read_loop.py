"""Reading a file and summing in one call: each step is summed while it is in cache.

A thread that reads and sums step by step asks for the interpreter's lock twice a step, and
threads that do so side by side wait for each other. This loop, of the kind of ``copy_loop``, calls
the kernel itself.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from llvmlite import ir

from kvstore.proto.buffers import LOOP_UNIT_BYTES, Bytes, checksum
from kvstore.proto.file_sums import FileGroups
from kvstore.proto.loop_code import (
    COLUMNS,
    I32,
    I64,
    SIZE,
    SUM,
    SummingCode,
    address_of,
    machine_code,
    sums_of,
    word,
)

_PREAD = "pread"
_STEP_UNITS = (1 << 18) // LOOP_UNIT_BYTES
"""Read, then summed: larger steps have left a core's own cache, smaller ones cost more calls."""


class ReadLoop:
    """The loop, compiled. It holds no lock. Thread-safe."""

    def __init__(self) -> None:
        """Raise OSError where the C library has no such call."""
        call = getattr(ctypes.CDLL(None), _PREAD, None)
        address = None if call is None else ctypes.cast(call, ctypes.c_void_p).value
        if address is None:
            raise OSError(f"there is no {_PREAD} here")
        kind = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int)
        self._run, self._engine = machine_code(_Loop(address).module, kind)

    def __call__(self, descriptor: int, groups: FileGroups) -> list[int] | None:
        """Fill the pieces of each group from its offset; return xxh3_64 of each group.

        None when a read failed or was short; what the pieces hold is then anything. Raises
        ValueError for a piece that it cannot fill, and for a group of none.
        """
        rows: list[int] = []
        for offset, pieces in groups:
            at = offset
            for out in pieces:
                units, rest = divmod(out.nbytes, LOOP_UNIT_BYTES)
                if rest or not units or not _takes(out):
                    raise ValueError(f"cannot fill {out.nbytes} bytes")
                rows += (address_of(out), at, units, 0, 0)
                at += out.nbytes
            if at == offset:
                raise ValueError("give at least one piece in each group")
            rows[SIZE - COLUMNS] = at - offset
        table = (ctypes.c_uint64 * len(rows))(*rows)
        count = len(rows) // COLUMNS
        if self._run(ctypes.addressof(table), count, descriptor) != count:
            return None
        return sums_of(table[:])


def _takes(out: Bytes) -> bool:
    return out.flags.c_contiguous and out.flags.writeable


_OUT, _AT, _UNITS = range(SIZE)


class _Loop(SummingCode):
    """Emits ``uint64_t read_summed(rows, count, descriptor)``.

    It returns how many rows were read: all of them, or up to one that could not be. *pread* is
    where the C library's is.
    """

    def __init__(self, pread: int) -> None:
        super().__init__("read_summed", I64, [I32])
        kind = ir.FunctionType(I64, [I32, I64, I64, I64])
        self._pread = self.b.inttoptr(word(pread), kind.as_pointer())
        self._data, self._at, self._left, self._unsummed = (self.b.alloca(I64) for _ in range(4))
        self._failed = self.function.append_basic_block("failed")
        self._emit()

    def _emit(self) -> None:
        b = self.b
        with self.each_row():
            for number, kept in ((_OUT, self._data), (_AT, self._at), (_UNITS, self._left)):
                b.store(b.load(self.column(number)), kept)
            size = b.load(self.column(SIZE))
            is_end = b.icmp_unsigned("!=", size, word(0))
            with self.loop(lambda: b.icmp_unsigned("!=", b.load(self._left), word(0))):
                self._step(is_end)
            with b.if_then(is_end):
                b.store(self.digest(size), self.column(SUM))
                self.begin_group()
        b.ret(b.load(self.row))
        b.position_at_end(self._failed)
        b.ret(b.load(self.row))

    def _step(self, is_end: Any) -> None:
        """Read a step and sum it; the last unit of a group is summed otherwise."""
        b = self.b
        left = b.load(self._left)
        is_short = b.icmp_unsigned("<", left, word(_STEP_UNITS))
        units = b.select(is_short, left, word(_STEP_UNITS))
        self._read(b.mul(units, word(LOOP_UNIT_BYTES)))
        rest = b.sub(left, units)
        b.store(rest, self._left)
        is_last = b.and_(is_end, b.icmp_unsigned("==", rest, word(0)))
        b.store(b.sub(units, b.zext(is_last, I64)), self._unsummed)
        with self.loop(lambda: b.icmp_unsigned("!=", b.load(self._unsummed), word(0))):
            self._sum(is_last=False)
            b.store(b.sub(b.load(self._unsummed), word(1)), self._unsummed)
        with b.if_then(is_last):
            self._sum(is_last=True)

    def _read(self, size: Any) -> None:
        b = self.b
        at = b.load(self._at)
        got = b.call(self._pread, [self.further[0], b.load(self._data), size, at])
        whole = b.append_basic_block("whole")
        b.cbranch(b.icmp_unsigned("==", got, size), whole, self._failed)
        b.position_at_end(whole)
        b.store(b.add(at, size), self._at)

    def _sum(self, *, is_last: bool) -> None:
        b = self.b
        data = b.load(self._data)
        self.unit(data, is_last=is_last, on_stripe=lambda value, offset: None)
        b.store(b.add(data, word(LOOP_UNIT_BYTES)), self._data)


def agrees(loop: Callable[[int, FileGroups], Sequence[int] | None]) -> bool:
    """Whether *loop* reads, sums as xxhash does, and says when it could not."""
    units = 3 * _STEP_UNITS
    data = np.random.default_rng(0).integers(0, 256, units * LOOP_UNIT_BYTES + 100, np.uint8)
    stops = [cut * LOOP_UNIT_BYTES for cut in (0, 1, 3, _STEP_UNITS, _STEP_UNITS + 1, units)]
    room = np.zeros(stops[-1] + 1, np.uint8)[1:]
    descriptor = os.memfd_create("kvstore-agrees", os.MFD_CLOEXEC)
    try:
        os.pwrite(descriptor, data.tobytes(), 0)
        cuts = list(pairwise(stops))
        alone = [(100 + start, [room[start:stop]]) for start, stop in cuts]
        together = [(100, [room[start:stop] for start, stop in cuts])]
        for groups in (alone, together):
            room[:] = 0
            wanted = [checksum(data[at : at + sum(map(len, outs))]) for at, outs in groups]
            if loop(descriptor, groups) != wanted or not np.array_equal(room, data[100:]):
                return False
        return loop(descriptor, [(101, [room])]) is None and loop(-1, alone) is None
    finally:
        os.close(descriptor)
