"""What the compiled loops share: XXH3 and loops in LLVM's language, and machine code of them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from kvstore.proto.buffers import LOOP_UNIT_BYTES, Bytes

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
