"""Copying and summing in one pass: each word is loaded once, stored and added to its XXH3.

numpy and xxhash pass over the bytes twice, and their stores read into the caches what they then
overwrite. This loop is written in LLVM's language and compiled for the processor at hand, by what
the extra ``cpu-fast`` brings.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from kvstore.proto.buffers import LOOP_UNIT_BYTES, Bytes, Pieces, checksum

_STREAM_ALIGN_BYTES = 16
"""Stores past the caches are of so many bytes, at a multiple of them."""
_STRIPE_BYTES, _STRIPES, _LANES = 64, 16, 8
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
_I32, _I64, _I128 = map(ir.IntType, (32, 64, 128))
_VECTOR = ir.VectorType(_I64, _LANES)
_QUARTER = ir.VectorType(_I64, 2)
"""As much as is aligned wherever malloc put an array."""


class CopyLoop:
    """The loop, compiled. It holds no lock. Thread-safe."""

    def __init__(self) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
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
                place = out.ctypes.data
                rows += (place, data.ctypes.data, blocks, 0, 0)
                size += data.nbytes
                places |= place
            if not size:
                raise ValueError("give at least one piece in each group")
            rows[_SIZE - _COLUMNS] = size
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
        # A load that is made twice could sum what it did not store, while a writer writes on.
        text = str(_Loop(is_streaming).module).replace("= load <8", "= load volatile <8")
        module = llvm.parse_assembly(text)
        target = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
        )
        self._engine = llvm.create_mcjit_compiler(module, target)
        self._engine.finalize_object()
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64)
        self._run = kind(self._engine.get_function_address(_NAME))

    def __call__(self, rows: Sequence[int]) -> list[int]:
        table = (ctypes.c_uint64 * len(rows))(*rows)
        self._run(ctypes.addressof(table), len(rows) // _COLUMNS)
        ends = range(_SIZE, len(rows), _COLUMNS)
        return [table[at - _SIZE + _SUM] for at in ends if rows[at]]


_NAME = "copy_summed"
_COLUMNS = 5
_OUT, _DATA, _BLOCKS, _SIZE, _SUM = range(_COLUMNS)
"""Of a row: where to, where from, how much; for the last of a group its size, and the sum."""


class _Loop:
    """Emits ``void copy_summed(rows, count)``."""

    def __init__(self, is_streaming: bool) -> None:
        self.module = ir.Module(_NAME)
        self._is_streaming = is_streaming
        kind = ir.FunctionType(ir.VoidType(), [_I64.as_pointer(), _I64])
        function = ir.Function(self.module, kind, _NAME)
        self._rows, self._count = function.args
        self._b = ir.IRBuilder(function.append_basic_block("entry"))
        self._sums = self._b.alloca(_VECTOR)
        self._row, self._out, self._data, self._left = (self._b.alloca(_I64) for _ in range(4))
        self._emit()

    def _emit(self) -> None:
        b = self._b
        b.store(_vector(_STARTS), self._sums)
        b.store(_word(0), self._row)
        with self._while(lambda: b.icmp_unsigned("<", b.load(self._row), self._count)):
            size = self._begin_row()
            is_end = b.icmp_unsigned("!=", size, _word(0))
            kept = b.zext(is_end, _I64)  # the last block of a group is summed otherwise
            with self._while(lambda: b.icmp_unsigned(">", b.load(self._left), kept)):
                self._block(is_last=False)
            with b.if_then(is_end):
                self._block(is_last=True)
                b.store(self._digest(size), self._column(_SUM))
                b.store(_vector(_STARTS), self._sums)
            b.store(b.add(b.load(self._row), _word(1)), self._row)
        if self._is_streaming:
            b.fence("seq_cst")  # such stores pass others: nobody may hear of them too early
        b.ret_void()

    def _begin_row(self) -> Any:
        """Load a row; return its size."""
        b = self._b
        for at, kept in ((_OUT, self._out), (_DATA, self._data), (_BLOCKS, self._left)):
            b.store(b.load(self._column(at)), kept)
        return b.load(self._column(_SIZE))

    def _column(self, number: int) -> Any:
        b = self._b
        first = b.mul(b.load(self._row), _word(_COLUMNS))
        return b.gep(self._rows, [b.add(first, _word(number))])

    @contextmanager
    def _while(self, condition: Callable[[], Any]) -> Iterator[None]:
        b = self._b
        head, body, done = (b.append_basic_block(name) for name in ("head", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        b.cbranch(condition(), body, done)
        b.position_at_end(body)
        yield
        b.branch(head)
        b.position_at_end(done)

    def _block(self, *, is_last: bool) -> None:
        b = self._b
        sums = b.load(self._sums)
        out, data = b.load(self._out), b.load(self._data)
        for stripe in range(_STRIPES):
            at = 8 * stripe
            if is_last and stripe == _STRIPES - 1:
                at = len(_SECRET) - _STRIPE_BYTES - 7
            sums = self._stripe(sums, out, data, stripe * _STRIPE_BYTES, at)
        if not is_last:
            sums = b.xor(sums, b.lshr(sums, _vector([47] * _LANES)))
            sums = b.xor(sums, _vector(_keys(len(_SECRET) - _STRIPE_BYTES)))
            sums = b.mul(sums, _vector([_P32_1] * _LANES))
        b.store(sums, self._sums)
        b.store(b.add(out, _word(LOOP_UNIT_BYTES)), self._out)
        b.store(b.add(data, _word(LOOP_UNIT_BYTES)), self._data)
        b.store(b.sub(b.load(self._left), _word(1)), self._left)

    def _stripe(self, sums: Any, out: Any, data: Any, offset: int, secret_at: int) -> Any:
        b = self._b
        source = b.inttoptr(b.add(data, _word(offset)), _VECTOR.as_pointer())
        value = b.load(source, align=1)
        self._store(value, b.add(out, _word(offset)))
        keyed = b.xor(value, _vector(_keys(secret_at)))
        low = b.and_(keyed, _vector([0xFFFFFFFF] * _LANES))
        high = b.lshr(keyed, _vector([32] * _LANES))
        crossed = b.shuffle_vector(value, value, _order([lane ^ 1 for lane in range(_LANES)]))
        return b.add(b.add(sums, crossed), b.mul(low, high))

    def _store(self, value: Any, address: Any) -> None:
        b = self._b
        if not self._is_streaming:
            b.store(value, b.inttoptr(address, _VECTOR.as_pointer()), align=1)
            return
        hint = self.module.add_metadata([ir.Constant(_I32, 1)])
        for first in range(0, _LANES, 2):
            two = b.shuffle_vector(value, value, _order([first, first + 1]))
            at = b.inttoptr(b.add(address, _word(8 * first)), _QUARTER.as_pointer())
            b.store(two, at, align=_STREAM_ALIGN_BYTES).set_metadata("nontemporal", hint)

    def _digest(self, size: Any) -> Any:
        b = self._b
        sums = b.load(self._sums)
        digest = b.mul(size, _word(_P64[0]))
        keys = _keys(11)
        for lane in range(0, _LANES, 2):
            one, other = (
                b.zext(b.xor(b.extract_element(sums, ir.Constant(_I32, i)), _word(keys[i])), _I128)
                for i in (lane, lane + 1)
            )
            product = b.mul(one, other)
            high = b.trunc(b.lshr(product, ir.Constant(_I128, 64)), _I64)
            digest = b.add(digest, b.xor(b.trunc(product, _I64), high))
        digest = b.mul(b.xor(digest, b.lshr(digest, _word(37))), _word(_AVALANCHE))
        return b.xor(digest, b.lshr(digest, _word(32)))


def _keys(secret_at: int) -> list[int]:
    return list(struct.unpack_from("<8Q", _SECRET, secret_at))


def _word(value: int) -> Any:
    return ir.Constant(_I64, value)


def _vector(values: Sequence[int]) -> Any:
    return ir.Constant(_VECTOR, list(values))


def _order(lanes: Sequence[int]) -> Any:
    return ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes))


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
