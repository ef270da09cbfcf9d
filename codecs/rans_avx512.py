"""The rANS steps of 32 lanes in AVX-512, written in LLVM's language and compiled by numba.

Two registers hold the 32 states. A step gathers each lane's table entry; lanes that need a word
take the next ones in order with one expansion (decode) or leave theirs with one compression
(encode). Several tiles go in step, which hides the latency of the gathers. The instructions
are those of AVX512F and AVX512BW, so Intel's and AMD's processors run the same code.
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

from kvstore.codecs.rans import GROUP_CHANNELS, LANES, MIN_STATE, SLOTS

_HALF = 16
"""Lanes of one register."""
_I1, _I8, _I16, _I32, _I64 = map(ir.IntType, (1, 8, 16, 32, 64))
_POINTER = _I8.as_pointer()

_new_slot: Any = cgutils.alloca_once
_unpack: Any = cgutils.unpack_tuple


def is_supported() -> bool:
    """Whether this processor has the instructions."""
    features = llvmlite.binding.get_host_cpu_features()
    return all(features.get(name) for name in ("avx512f", "avx512bw", "avx512vl"))


def _vector(kind: Any, lanes: int = _HALF) -> Any:
    return ir.VectorType(kind, lanes)


def _all(value: int, kind: Any = _I32, lanes: int = _HALF) -> Any:
    return ir.Constant(_vector(kind, lanes), [value] * lanes)


def _i64(value: int) -> Any:
    return ir.Constant(_I64, value)


class _Code:
    """Emit the instructions that the steps are made of."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def call(self, name: str, returned: Any, *arguments: Any) -> Any:
        """Call the intrinsic *name* of LLVM."""
        kind = ir.FunctionType(returned, [a.type for a in arguments])
        function = self.b.module.globals.get(name) or ir.Function(self.b.module, kind, name)
        return self.b.call(function, arguments)

    def at(self, base: Any, offset_bytes: Any) -> Any:
        return self.b.gep(base, [offset_bytes])

    def load(self, base: Any, offset_bytes: Any, kind: Any) -> Any:
        pointer = self.b.bitcast(self.at(base, offset_bytes), kind.as_pointer())
        return self.b.load(pointer, align=1)

    def store(self, value: Any, base: Any, offset_bytes: Any) -> None:
        pointer = self.b.bitcast(self.at(base, offset_bytes), value.type.as_pointer())
        self.b.store(value, pointer, align=1)

    def gather32(self, table: Any, index: Any) -> Any:
        """Return sixteen u32 of *table*."""
        return self.call(
            "llvm.x86.avx512.mask.gather.dpi.512", _vector(_I32),
            _all(0), table, index, _all(1, _I1), ir.Constant(_I32, 4),
        )  # fmt: skip

    def gather64(self, table: Any, index: Any) -> tuple[Any, Any]:
        """Return the low and the high halves of sixteen u64 of *table*."""
        halves = []
        for first in (0, 8):
            lanes = ir.Constant(_vector(_I32, 8), list(range(first, first + 8)))
            found = self.call(
                "llvm.x86.avx512.mask.gather.dpq.512", _vector(_I64, 8),
                _all(0, _I64, 8), table, self.b.shuffle_vector(index, index, lanes),
                _all(1, _I1, 8), ir.Constant(_I32, 8),
            )  # fmt: skip
            halves.append(self.b.bitcast(found, _vector(_I32)))
        low, high = (ir.Constant(_vector(_I32), list(range(odd, 32, 2))) for odd in (0, 1))
        return self.b.shuffle_vector(*halves, low), self.b.shuffle_vector(*halves, high)

    def expand(self, dense: Any, mask: Any) -> Any:
        """Return *dense*'s first lanes spread over the lanes of *mask*, the others zero."""
        name = "llvm.x86.avx512.mask.expand.v16i32"
        return self.call(name, _vector(_I32), dense, _all(0), mask)

    def compress(self, sparse: Any, mask: Any) -> Any:
        """Return the lanes of *mask* in front, zeros behind."""
        name = "llvm.x86.avx512.mask.compress.v16i32"
        return self.call(name, _vector(_I32), sparse, _all(0), mask)

    def count(self, mask: Any) -> Any:
        """Return how many lanes *mask* has, as i64."""
        bits = self.b.bitcast(mask, _I16)
        return self.b.zext(self.call("llvm.ctpop.i16", _I16, bits), _I64)

    def high_product(self, left: Any, right: Any) -> Any:
        """Return the upper 32 bits of each lane's product."""
        wide = _vector(_I64)
        product = self.b.mul(self.b.zext(left, wide), self.b.zext(right, wide))
        return self.b.trunc(self.b.lshr(product, _all(32, _I64)), _vector(_I32))

    def loop_while(self, condition: Callable[[], Any]) -> AbstractContextManager[None]:
        """Repeat the body for as long as *condition* emits a true value."""
        return loop_while(self.b, condition)


@contextmanager
def loop_while(builder: Any, condition: Callable[[], Any]) -> Iterator[None]:
    """Emit with *builder* a loop: the body is repeated for as long as *condition* emits a true
    value.
    """
    head, body, done = (builder.append_basic_block(name) for name in ("head", "body", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    builder.cbranch(condition(), body, done)
    builder.position_at_end(body)
    yield
    builder.branch(head)
    builder.position_at_end(done)


class _Tile:
    """One tile's registers and addresses while code is emitted for it."""

    def __init__(self, code: _Code, arrays: dict[str, Any], tile: Any) -> None:
        b = code.b
        self.code = code
        self.x = code.at(arrays["states"], b.mul(tile, _i64(4 * LANES)))
        self.rows = code.at(arrays["rows"], b.mul(tile, b.mul(arrays["channels"], _i64(4))))
        self.symbols = code.at(arrays["symbols"], b.mul(tile, arrays["size"]))
        self.at_place = b.mul(tile, _i64(16))
        self.arrays = arrays
        self.at = _new_slot(b, _I64)
        b.store(code.load(arrays["at"], self.at_place, _I64), self.at)
        self.limit = code.load(arrays["at"], b.add(self.at_place, _i64(8)), _I64)
        self.states = [_new_slot(b, _vector(_I32)) for _ in range(2)]
        for half, slot in enumerate(self.states):
            b.store(code.load(self.x, _i64(64 * half), _vector(_I32)), slot)

    def put_back(self) -> None:
        b = self.code.b
        self.code.store(b.load(self.at), self.arrays["at"], self.at_place)
        for half, slot in enumerate(self.states):
            self.code.store(b.load(slot), self.x, _i64(64 * half))

    def row(self, column: Any, parity: int, half: int) -> Any:
        """Return where the tables' rows of a step's sixteen channels start."""
        place = self.code.b.add(column, _i64(LANES * parity + _HALF * half))
        return self.code.load(self.rows, self.code.b.mul(place, _i64(4)), _vector(_I32))

    def decode_group(self, base: Any, column: Any) -> None:
        b = self.code.b
        found: list[list[Any]] = [[], []]
        for parity in (0, 1):
            for half in (0, 1):
                found[half].append(self._decode_step(self.row(column, parity, half), half))
        for half, (even, odd) in enumerate(found):
            pairs = b.or_(b.and_(even, _all(0xFF)), b.shl(b.and_(odd, _all(0xFF)), _all(8)))
            place = b.add(base, _i64(2 * _HALF * half))
            self.code.store(b.trunc(pairs, _vector(_I16)), self.symbols, place)

    def _decode_step(self, row: Any, half: int) -> Any:
        code, b = self.code, self.code.b
        x = b.load(self.states[half])
        entry = code.gather32(self.arrays["table"], b.add(b.and_(x, _all(SLOTS - 1)), row))
        frequency = b.and_(b.lshr(entry, _all(8)), _all(0xFFF))
        x = b.add(b.mul(frequency, b.lshr(x, _all(12))), b.lshr(entry, _all(20)))
        needs = b.icmp_unsigned("<", x, _all(MIN_STATE))
        at = b.load(self.at)
        words = code.load(self.arrays["words"], b.mul(at, _i64(2)), _vector(_I16))
        fresh = code.expand(b.zext(words, _vector(_I32)), needs)
        x = b.select(needs, b.or_(b.shl(x, _all(16)), fresh), x)
        b.store(x, self.states[half])
        b.store(b.add(at, code.count(needs)), self.at)
        return entry

    def encode_group(self, base: Any, column: Any, missing: Any) -> None:
        code, b = self.code, self.code.b
        pairs = [
            b.zext(
                code.load(self.symbols, b.add(base, _i64(2 * _HALF * half)), _vector(_I16)),
                _vector(_I32),
            )
            for half in (0, 1)
        ]
        for parity in (1, 0):
            for half in (1, 0):
                pair = pairs[half]
                symbol = b.lshr(pair, _all(8)) if parity else b.and_(pair, _all(0xFF))
                index = b.add(symbol, self.row(column, parity, half))
                self._encode_step(index, half, missing)

    def _encode_step(self, index: Any, half: int, missing: Any) -> None:
        code, b = self.code, self.code.b
        x = b.load(self.states[half])
        entry, reciprocal = code.gather64(self.arrays["table"], index)
        frequency = b.and_(entry, _all(0xFFF))
        start = b.and_(b.lshr(entry, _all(12)), _all(0xFFF))
        zero = b.icmp_unsigned("==", frequency, _all(0))
        b.store(b.or_(b.load(missing), zero), missing)
        full = b.icmp_unsigned(">=", x, b.shl(frequency, _all(20)))
        self._leave(x, full)
        x = b.select(full, b.lshr(x, _all(16)), x)
        quotient = code.high_product(x, reciprocal)
        rest = b.sub(x, b.mul(quotient, frequency))
        is_short = b.icmp_unsigned(">=", rest, frequency)  # the quotient, by one
        rounds = b.sub(_all(SLOTS), frequency)
        x = b.add(b.add(x, start), b.mul(quotient, rounds))
        b.store(b.select(is_short, b.add(x, rounds), x), self.states[half])

    def _leave(self, x: Any, full: Any) -> None:
        """Write the low halves of the lanes *full* before all words so far, in lane order.

        Sixteen places are written, of which the first are written again: the buffer has as
        many before its first.
        """
        code, b = self.code, self.code.b
        count = code.count(full)
        dense = code.compress(x, full)
        shift = b.trunc(count, _I32)
        lanes = b.insert_element(_all(0), shift, ir.Constant(_I32, 0))
        lanes = b.shuffle_vector(lanes, lanes, _all(0))
        lanes = b.add(lanes, ir.Constant(_vector(_I32), list(range(_HALF))))
        last = code.call("llvm.x86.avx512.permvar.si.512", _vector(_I32), dense, lanes)
        at = b.load(self.at)
        place = b.mul(b.sub(at, _i64(_HALF)), _i64(2))
        code.store(b.trunc(last, _vector(_I16)), self.arrays["words"], place)
        b.store(b.sub(at, count), self.at)


def _arrays(context: Any, builder: Any, kinds: Any, values: Any) -> dict[str, Any]:
    """Return the addresses of the arrays of a call, and the extents of its tiles."""
    batch, words, at = values[:3]
    kinds = [*kinds[0].types, *kinds[1:3]]
    values = [*_unpack(builder, batch), words, at]
    found: dict[str, Any] = {}
    names = ("symbols", "rows", "table", "states", "words", "at")
    for name, kind, value in zip(names, kinds, values, strict=True):
        array = context.make_array(kind)(context, builder, value)
        found[name] = builder.bitcast(array.data, _POINTER)
        if name in ("symbols", "rows"):
            extent = _unpack(builder, array.shape, 2)[1]
            found["size" if name == "symbols" else "channels"] = extent
    return found


def _emit_decode(tiles: int, context: Any, builder: Any, signature: Any, values: Any) -> Any:
    code = _Code(builder)
    arrays = _arrays(context, builder, signature.args, values)
    group = [_Tile(code, arrays, builder.add(values[3], _i64(k))) for k in range(tiles)]
    base, column = (_new_slot(builder, _I64) for _ in range(2))
    builder.store(values[4], base)
    builder.store(builder.urem(values[4], arrays["channels"]), column)

    def is_safe() -> Any:
        goes_on = builder.icmp_unsigned("<", builder.load(base), arrays["size"])
        for tile in group:
            has_words = builder.icmp_signed("<=", builder.load(tile.at), tile.limit)
            goes_on = builder.and_(goes_on, has_words)
        return goes_on

    with code.loop_while(is_safe):
        here, place = builder.load(base), builder.load(column)
        for tile in group:
            tile.decode_group(here, place)
        step = _i64(GROUP_CHANNELS)
        builder.store(builder.add(here, step), base)
        behind = builder.add(place, step)
        is_last = builder.icmp_unsigned("==", behind, arrays["channels"])
        builder.store(builder.select(is_last, _i64(0), behind), column)
    for tile in group:
        tile.put_back()
    return builder.load(base)


def _emit_encode(tiles: int, context: Any, builder: Any, signature: Any, values: Any) -> Any:
    code = _Code(builder)
    arrays = _arrays(context, builder, signature.args, values)
    group = [_Tile(code, arrays, builder.add(values[3], _i64(k))) for k in range(tiles)]
    missing = _new_slot(builder, _vector(_I1))
    builder.store(_all(0, _I1), missing)
    base, column = (_new_slot(builder, _I64) for _ in range(2))
    builder.store(arrays["size"], base)
    builder.store(arrays["channels"], column)

    def is_left() -> Any:
        return builder.icmp_unsigned("!=", builder.load(base), _i64(0))

    with code.loop_while(is_left):
        step = _i64(GROUP_CHANNELS)
        here = builder.sub(builder.load(base), step)
        place = builder.sub(builder.load(column), step)
        for tile in group:
            tile.encode_group(here, place, missing)
        builder.store(here, base)
        is_first = builder.icmp_unsigned("==", place, _i64(0))
        builder.store(builder.select(is_first, arrays["channels"], place), column)
    for tile in group:
        tile.put_back()
    bits = builder.bitcast(builder.load(missing), _I16)
    return builder.icmp_unsigned("==", bits, ir.Constant(_I16, 0))


def decoder(tiles: int) -> Any:
    """Return ``rans_numba``'s loop over a tile as one over *tiles* tiles in step.

    It ends where the first of them may run out of words.
    """

    @intrinsic
    def decode(typing: Any, batch: Any, words: Any, at: Any, first: Any, base: Any) -> Any:
        arguments = (batch, words, at, types.int64, types.int64)
        return types.int64(*arguments), partial(_emit_decode, tiles)

    return decode


def encoder(tiles: int) -> Any:
    """Return ``rans_numba``'s loop that encodes a tile as one over *tiles* tiles in step."""

    @intrinsic
    def encode(typing: Any, batch: Any, words: Any, at: Any, first: Any) -> Any:
        return types.boolean(batch, words, at, types.int64), partial(_emit_encode, tiles)

    return encode
