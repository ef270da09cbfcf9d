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

_STREAM_BYTES = 1 << 17
"""Pieces from this size on are stored past the caches: what follows would drive them out anyway."""
_STREAM_ALIGN_BYTES = 16
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

    def __call__(self, pieces: Pieces) -> int:
        """Copy all *pieces*; return xxh3_64 of what was stored, one behind the other.

        Raises ValueError for a piece that does not fit where it is to go, or is no Piece.
        """
        rows: list[int] = []
        size = 0
        streams = True
        for out, data in pieces:
            blocks, rest = divmod(data.nbytes, LOOP_UNIT_BYTES)
            if rest or not blocks or not _fits(out, data):
                raise ValueError(f"could not broadcast or copy {data.nbytes} to {out.nbytes} bytes")
            address = out.ctypes.data
            rows += (address, data.ctypes.data, blocks)
            size += data.nbytes
            streams = streams and not address % _STREAM_ALIGN_BYTES
        if not rows:
            raise ValueError("give at least one piece")
        loop = self._streaming if streams and size >= _STREAM_BYTES else self._near
        return loop(rows, size)


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
        kind = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
        self._run = kind(self._engine.get_function_address(_NAME))

    def __call__(self, rows: Sequence[int], size: int) -> int:
        table = (ctypes.c_uint64 * len(rows))(*rows)
        found: int = self._run(ctypes.addressof(table), len(rows) // 3, size)
        return found


_NAME = "copy_summed"


class _Loop:
    """Emits ``u64 copy_summed(rows, count, size)``; a row is an address to store at, one to load
    from, and a number of blocks.
    """

    def __init__(self, is_streaming: bool) -> None:
        self.module = ir.Module(_NAME)
        self._is_streaming = is_streaming
        pointer = _I64.as_pointer()
        kind = ir.FunctionType(_I64, [pointer, _I64, _I64])
        function = ir.Function(self.module, kind, _NAME)
        self._rows, self._count, self._size = function.args
        self._b = ir.IRBuilder(function.append_basic_block("entry"))
        self._sums = self._b.alloca(_VECTOR)
        self._out, self._data, self._left, self._row = (self._b.alloca(_I64) for _ in range(4))
        self._emit()

    def _emit(self) -> None:
        b = self._b
        b.store(_vector(_STARTS), self._sums)
        b.store(_word(0), self._row)
        with self._while(lambda: b.icmp_unsigned("<", b.load(self._row), self._count)):
            self._take_row()
            # The very last block is summed otherwise.
            with self._while(self._has_more):
                self._block(is_last=False)
        self._block(is_last=True)
        if self._is_streaming:
            b.fence("seq_cst")  # such stores pass others: nobody may hear of them too early
        b.ret(self._digest())

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

    def _take_row(self) -> None:
        b = self._b
        row = b.load(self._row)
        first = b.mul(row, _word(3))
        for at, kept in enumerate((self._out, self._data, self._left)):
            b.store(b.load(b.gep(self._rows, [b.add(first, _word(at))])), kept)
        b.store(b.add(row, _word(1)), self._row)

    def _has_more(self) -> Any:
        b = self._b
        is_last = b.zext(b.icmp_unsigned("==", b.load(self._row), self._count), _I64)
        return b.icmp_unsigned(">", b.load(self._left), is_last)

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

    def _digest(self) -> Any:
        b = self._b
        sums = b.load(self._sums)
        digest = b.mul(self._size, _word(_P64[0]))
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


def agrees(loop: Callable[[Pieces], int]) -> bool:
    """Whether *loop* copies, and sums as xxhash does, in both its forms."""
    data = np.random.default_rng(0).integers(0, 256, 2 * _STREAM_BYTES + 64, np.uint8)
    room = np.zeros(len(data) + 64, np.uint8)
    start = -room.ctypes.data % 64
    for out_at, cut, size in ((0, 2, 8), (1, 5, 8), (0, 128, 256), (3, 1, 255), (0, 0, 1)):
        stop, middle = size * LOOP_UNIT_BYTES, cut * LOOP_UNIT_BYTES
        out = room[start + out_at :][:stop]
        source = data[out_at:][:stop]
        pieces = [(out[a:b], source[a:b]) for a, b in ((0, middle), (middle, stop)) if b > a]
        out[:] = 0
        if loop(pieces) != checksum(source) or not np.array_equal(out, source):
            return False
    return True
