"""Loops compiled for this processor that sum in XXH3 what they copy, or what they read of a file.

numpy and xxhash pass over copied bytes twice, and their stores read into the caches what they then
overwrite: here each word is loaded once, stored and added to its sum. A thread that reads a file
and sums step by step asks for the interpreter's lock twice a step, and threads that do so side by
side wait for each other: here the loop calls the kernel itself, and sums each step while it is in
cache. They are written in LLVM's language and compiled by what the extra ``cpu-fast`` brings.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from kvstore.proto.buffers import LOOP_UNIT_BYTES, Bytes, FileGroups, Pieces, checksum

STRIPE_BYTES, LANES = 64, 8
_STRIPES = LOOP_UNIT_BYTES // STRIPE_BYTES
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64 = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)  # fmt: skip
_AVALANCHE = 0x165667919E3779F9
_STARTS = (_P32_3, *_P64[:4], _P32_2, _P64[4], _P32_1)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
I32, I64, _I128 = map(ir.IntType, (32, 64, 128))
VECTOR = ir.VectorType(I64, LANES)
SIZE, SUM = 3, 4
COLUMNS = 5
"""Of a row: where to, where from, how many units; for the last of a group its size, and the sum."""


class SummingCode:
    """Emits a function over rows that sums groups of units as XXH3 does.

    *name* and *result* are the function's; *further* are its arguments behind the rows and their
    count.
    """

    def __init__(self, name: str, result: ir.Type, further: Sequence[ir.Type] = ()) -> None:
        self.module = ir.Module(name)
        kind = ir.FunctionType(result, [I64.as_pointer(), I64, *further])
        self.function = ir.Function(self.module, kind, name)
        self._rows, self._count, *self.further = self.function.args
        self.b = ir.IRBuilder(self.function.append_basic_block("entry"))
        self._sums = self.b.alloca(VECTOR)
        self.row = self.b.alloca(I64)
        self.begin_group()

    def begin_group(self) -> None:
        """Have what follows summed from the start."""
        self.b.store(vector(_STARTS), self._sums)

    @contextmanager
    def each_row(self) -> Iterator[None]:
        """Emit once what is done for each row."""
        b = self.b
        b.store(word(0), self.row)
        with self.loop(lambda: b.icmp_unsigned("<", b.load(self.row), self._count)):
            yield
            b.store(b.add(b.load(self.row), word(1)), self.row)

    def column(self, number: int) -> Any:
        """Return the address of a column of the row."""
        b = self.b
        first = b.mul(b.load(self.row), word(COLUMNS))
        return b.gep(self._rows, [b.add(first, word(number))])

    @contextmanager
    def loop(self, condition: Callable[[], Any]) -> Iterator[None]:
        """Emit once what is done while *condition* holds."""
        b = self.b
        head, body, done = (b.append_basic_block(name) for name in ("head", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        b.cbranch(condition(), body, done)
        b.position_at_end(body)
        yield
        b.branch(head)
        b.position_at_end(done)

    def unit(self, data: Any, *, is_last: bool, on_stripe: Callable[[Any, int], None]) -> None:
        """Sum the unit at *data*; a group's last is summed otherwise.

        *on_stripe* is given each of its stripes, and how far it is from the start in bytes.
        """
        b = self.b
        sums = b.load(self._sums)
        for stripe in range(_STRIPES):
            at = 8 * stripe
            if is_last and stripe == _STRIPES - 1:
                at = len(_SECRET) - STRIPE_BYTES - 7
            offset = stripe * STRIPE_BYTES
            source = b.inttoptr(b.add(data, word(offset)), VECTOR.as_pointer())
            value = b.load(source, align=1)
            on_stripe(value, offset)
            sums = self._stripe(sums, value, at)
        if not is_last:
            sums = b.xor(sums, b.lshr(sums, vector([47] * LANES)))
            sums = b.xor(sums, vector(_keys(len(_SECRET) - STRIPE_BYTES)))
            sums = b.mul(sums, vector([_P32_1] * LANES))
        b.store(sums, self._sums)

    def _stripe(self, sums: Any, value: Any, secret_at: int) -> Any:
        b = self.b
        keyed = b.xor(value, vector(_keys(secret_at)))
        low = b.and_(keyed, vector([0xFFFFFFFF] * LANES))
        high = b.lshr(keyed, vector([32] * LANES))
        crossed = b.shuffle_vector(value, value, order([lane ^ 1 for lane in range(LANES)]))
        return b.add(b.add(sums, crossed), b.mul(low, high))

    def digest(self, size: Any) -> Any:
        """Return the sum of a group of *size* bytes, all of them summed."""
        b = self.b
        sums = b.load(self._sums)
        digest = b.mul(size, word(_P64[0]))
        keys = _keys(11)
        for lane in range(0, LANES, 2):
            one, other = (
                b.zext(b.xor(b.extract_element(sums, ir.Constant(I32, i)), word(keys[i])), _I128)
                for i in (lane, lane + 1)
            )
            product = b.mul(one, other)
            high = b.trunc(b.lshr(product, ir.Constant(_I128, 64)), I64)
            digest = b.add(digest, b.xor(b.trunc(product, I64), high))
        digest = b.mul(b.xor(digest, b.lshr(digest, word(37))), word(_AVALANCHE))
        return b.xor(digest, b.lshr(digest, word(32)))


def machine_code(module: ir.Module, kind: Any) -> tuple[Any, Any]:
    """Return the function that *module* is named after, of a ctypes *kind*, and what keeps it."""
    # A load that is made twice could sum what it did not store, while a writer writes on.
    text = str(module).replace("= load <8", "= load volatile <8")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), target)
    engine.finalize_object()
    return kind(engine.get_function_address(module.name)), engine


def address_of(data: Bytes) -> int:
    """Return where *data*, which is not empty, lies in memory."""
    if data.flags.writeable:  # a quarter of what numpy takes to say so
        return ctypes.addressof(ctypes.c_char.from_buffer(data))  # type: ignore[arg-type]
    return int(data.ctypes.data)


def sums_of(table: Sequence[int]) -> list[int]:
    """Return the sum of each group of rows that the function has been over."""
    ends = range(SIZE, len(table), COLUMNS)
    return [table[at - SIZE + SUM] for at in ends if table[at]]


def _keys(secret_at: int) -> list[int]:
    return list(struct.unpack_from("<8Q", _SECRET, secret_at))


def word(value: int) -> Any:
    """Return *value* as a constant of 64 bits."""
    return ir.Constant(I64, value)


def vector(values: Sequence[int]) -> Any:
    """Return a constant of so many lanes."""
    return ir.Constant(VECTOR, list(values))


def order(lanes: Sequence[int]) -> Any:
    """Return which lanes a shuffle takes."""
    return ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))


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
        self._run, self._engine = machine_code(_CopyCode(is_streaming).module, kind)

    def __call__(self, rows: Sequence[int]) -> list[int]:
        table = (ctypes.c_uint64 * len(rows))(*rows)
        self._run(ctypes.addressof(table), len(rows) // COLUMNS)
        return sums_of(table[:])


_OUT, _DATA, _BLOCKS = range(SIZE)


class _CopyCode(SummingCode):
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


def copies_agree(loop: Callable[[Sequence[Pieces]], list[int]]) -> bool:
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
        self._run, self._engine = machine_code(_ReadCode(address).module, kind)

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


class _ReadCode(SummingCode):
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
            for number, kept in ((_OUT, self._data), (_DATA, self._at), (_BLOCKS, self._left)):
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


def reads_agree(loop: Callable[[int, FileGroups], Sequence[int] | None]) -> bool:
    """Whether *loop* reads, sums as xxhash does, and says when it could not."""
    units = 3 * _STEP_UNITS
    data = np.random.default_rng(0).integers(0, 256, units * LOOP_UNIT_BYTES + 100, np.uint8)
    stops = [cut * LOOP_UNIT_BYTES for cut in (0, 1, 3, _STEP_UNITS, _STEP_UNITS + 1, units)]
    room = np.zeros(stops[-1] + 1, np.uint8)[1:]
    descriptor = os.memfd_create("kvstore-reads_agree", os.MFD_CLOEXEC)
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
