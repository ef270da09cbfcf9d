"""The groups of a sieve's passes, written in LLVM's language and compiled by numba.

A group of 64 bytes is one vector: three comparisons make its bits. Where the processor has the
instructions of AVX512BW and VBMI2 (Intel since Ice Lake, AMD since Zen 4), what the pass leaves is
one compression, and put back by one expansion; else it goes byte by byte, by the bits. Who calls
has checked what the arrays hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvstore.codecs.rans_avx512 import loop_while
from kvstore.codecs.sieve import GROUP, GROUP_BYTES, VALUES

_I1, _I8, _I64 = map(ir.IntType, (1, 8, 64))
_BYTES = ir.VectorType(_I8, GROUP)
_LANES = ir.VectorType(_I1, GROUP)

_new_slot: Any = cgutils.alloca_once
_HALF_BYTES = GROUP_BYTES // 2


def has_expansion() -> bool:
    """Whether this processor has the instructions that move a vector's bytes by a mask."""
    features = llvmlite.binding.get_host_cpu_features()
    return all(features.get(name) for name in ("avx512f", "avx512bw", "avx512vbmi2", "popcnt"))


class _Code:
    """Emit the instructions that a pass is made of."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context = context
        self.b = builder

    def pointer(self, kind: Any, array: Any) -> Any:
        data = self.context.make_array(kind)(self.context, self.b, array).data
        return self.b.bitcast(data, _I8.as_pointer())

    def items(self, kind: Any, array: Any) -> Any:
        return self.context.make_array(kind)(self.context, self.b, array).nitems

    def call(self, name: str, returned: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(returned, [a.type for a in arguments])
        function = self.b.module.globals.get(name) or ir.Function(self.b.module, kind, name)
        return self.b.call(function, arguments)

    def load(self, base: Any, at: Any, kind: Any) -> Any:
        return self.b.load(self.b.bitcast(self.b.gep(base, [at]), kind.as_pointer()), align=1)

    def store(self, value: Any, base: Any, at: Any) -> None:
        place = self.b.bitcast(self.b.gep(base, [at]), value.type.as_pointer())
        self.b.store(value, place, align=1)

    def splat(self, byte: Any) -> Any:
        first = ir.Constant(ir.IntType(32), 0)
        one = self.b.insert_element(ir.Constant(_BYTES, ir.Undefined), byte, first)
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), GROUP), [0] * GROUP)
        return self.b.shuffle_vector(one, one, lanes)

    def count(self, bits: Any) -> Any:
        return self.call("llvm.ctpop.i64", _I64, bits)

    def times(self, value: Any, factor: int) -> Any:
        return self.b.mul(value, ir.Constant(_I64, factor))

    def loop_while(self, condition: Callable[[], Any]) -> AbstractContextManager[None]:
        """Repeat the body for as long as *condition* emits a true value."""
        return loop_while(self.b, condition)

    @contextmanager
    def groups(self, number: Any) -> Iterator[Any]:
        """Repeat the body, which is given the group, *number* times."""
        b = self.b
        at = _zero_slot(b)
        with self.loop_while(lambda: b.icmp_unsigned("<", b.load(at), number)):
            here = b.load(at)
            yield here
            b.store(b.add(here, _i64(1)), at)

    @contextmanager
    def each_bit(self, bits: Any) -> Iterator[tuple[Any, Any]]:
        """Repeat the body, which is given the number of a set bit and how many were before it."""
        b = self.b
        rest, before = _zero_slot(b), _zero_slot(b)
        b.store(bits, rest)
        b.store(_i64(0), before)
        with self.loop_while(lambda: b.icmp_unsigned("!=", b.load(rest), _i64(0))):
            here, number = b.load(rest), b.load(before)
            yield self.call("llvm.cttz.i64", _I64, here, ir.Constant(_I1, 1)), number
            b.store(b.and_(here, b.sub(here, _i64(1))), rest)
            b.store(b.add(number, _i64(1)), before)


def _i64(value: int) -> Any:
    return ir.Constant(_I64, value)


def _zero_slot(builder: Any) -> Any:
    slot = _new_slot(builder, _I64)
    builder.store(_i64(0), slot)
    return slot


def _emit_sift(at_once: bool, context: Any, builder: Any, signature: Any, values: Any) -> Any:
    code, b = _Code(context, builder), builder
    source, kept, bits, left = (code.pointer(signature.args[k], values[k]) for k in range(4))
    wanted = [code.splat(code.load(kept, _i64(k), _I8)) for k in range(VALUES)]
    end = _zero_slot(b)
    with code.groups(values[4]) as group:
        start, place = code.times(group, GROUP), code.times(group, GROUP_BYTES)
        found = code.load(source, start, _BYTES)
        first, second, third = (b.icmp_unsigned("==", found, value) for value in wanted)
        none = b.not_(b.or_(b.or_(first, second), third))
        low, high, rest = (
            b.bitcast(lanes, _I64) for lanes in (b.or_(second, none), b.or_(third, none), none)
        )
        code.store(low, bits, place)
        code.store(high, bits, b.add(place, _i64(_HALF_BYTES)))
        at = b.load(end)
        if at_once:
            zeros = ir.Constant(_BYTES, [0] * GROUP)
            dense = code.call("llvm.x86.avx512.mask.compress.v64i8", _BYTES, found, zeros, none)
            code.store(dense, left, at)
        else:
            with code.each_bit(rest) as (bit, before):
                value = code.load(source, b.add(start, bit), _I8)
                code.store(value, left, b.add(at, before))
        b.store(b.add(at, code.count(rest)), end)
    return b.load(end)


def _emit_restore(at_once: bool, context: Any, builder: Any, signature: Any, values: Any) -> Any:
    code, b = _Code(context, builder), builder
    bits, kept, left, out = (code.pointer(signature.args[k], values[k]) for k in range(4))
    wanted = [code.splat(code.load(kept, _i64(k), _I8)) for k in range(VALUES)]
    limit = code.items(signature.args[2], values[2])
    end, total = _zero_slot(b), _zero_slot(b)
    with code.groups(values[4]) as group:
        start, place = code.times(group, GROUP), code.times(group, GROUP_BYTES)
        low = code.load(bits, place, _I64)
        high = code.load(bits, b.add(place, _i64(_HALF_BYTES)), _I64)
        both = b.and_(low, high)
        at, count = b.load(end), code.count(both)
        found = b.select(b.bitcast(low, _LANES), wanted[1], wanted[0])
        found = b.select(b.bitcast(high, _LANES), wanted[2], found)
        if at_once:
            dense, lanes = code.load(left, at, _BYTES), b.bitcast(both, _LANES)
            found = code.call("llvm.x86.avx512.mask.expand.v64i8", _BYTES, dense, found, lanes)
        code.store(found, out, start)
        if not at_once:
            with code.each_bit(both) as (bit, before):
                value = code.load(left, b.add(at, before), _I8)
                code.store(value, out, b.add(start, bit))
        b.store(b.add(b.load(total), count), total)
        # Hostile bits may want more than there is: the place then stays within the array.
        behind = b.add(at, count)
        b.store(b.select(b.icmp_unsigned(">", behind, limit), limit, behind), end)
    return b.load(total)


def sifter(at_once: bool) -> Any:
    """Return a function for compiled loops: it writes the bits of *groups* whole groups.

    It returns how many bytes are in *left*, behind which it may write PAD_BYTES. *at_once* for
    processors with those instructions.
    """

    @intrinsic
    def sift(typing: Any, source: Any, kept: Any, bits: Any, left: Any, groups: Any) -> Any:
        return types.int64(source, kept, bits, left, types.int64), partial(_emit_sift, at_once)

    return sift


def restorer(at_once: bool) -> Any:
    """Return a function for compiled loops: it writes *groups* whole groups of *out*.

    It returns how many bytes of *left* the bits ask for; whatever that is, it reads no more than
    PAD_BYTES behind them.
    """

    @intrinsic
    def restore(typing: Any, bits: Any, kept: Any, left: Any, out: Any, groups: Any) -> Any:
        return types.int64(bits, kept, left, out, types.int64), partial(_emit_restore, at_once)

    return restore
