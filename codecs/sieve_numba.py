"""The passes of a sieve, compiled by numba around what ``sieve_vectors`` does with groups."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from kvstore.codecs.jit import compiled, i64, inner, read_only, u8, written
from kvstore.codecs.sieve import GROUP, GROUP_BYTES, PAD_BYTES, PASSES, VALUES, Sieve
from kvstore.codecs.sieve_vectors import restorer, sifter
from kvstore.proto.buffers import Bytes

_HALF_BYTES = GROUP_BYTES // 2


@inner
def _put_bits(bits: Any, at: Any, low: Any, high: Any) -> None:
    for k in range(_HALF_BYTES):
        shift = np.uint64(8 * k)
        bits[at + k] = np.uint8(low >> shift)
        bits[at + _HALF_BYTES + k] = np.uint8(high >> shift)


@inner
def _sift_some(source: Any, kept: Any, left: Any, end: Any) -> Any:
    """Return the bits of *source*, less than a group, and how many are then in *left*."""
    low = high = np.uint64(0)
    for k in range(source.size):
        value, bit = source[k], np.uint64(1) << np.uint64(k)
        if value == kept[1]:
            low |= bit
        elif value == kept[2]:
            high |= bit
        elif value != kept[0]:
            low |= bit
            high |= bit
            left[end] = value
            end += 1
    return low, high, end


@inner
def _restore_some(bits: Any, kept: Any, left: Any, out: Any, total: Any) -> Any:
    """Fill *out*, less than a group; return how many of *left* all bits so far ask for."""
    for k in range(out.size):
        low = bits[k // 8] >> (k % 8) & 1
        high = bits[_HALF_BYTES + k // 8] >> (k % 8) & 1
        kind = low + 2 * high
        if kind < VALUES:
            out[k] = kept[kind]
        else:
            if total < left.size:
                out[k] = left[total]
            total += 1
    return total


@lru_cache(maxsize=2)
def compiled_sieve(*, at_once: bool) -> Sieve:
    """Compile and return the sieve, *at_once* for processors with an expansion; unchecked."""
    squeeze, spread = _squeezer(sifter(at_once)), _spreader(restorer(at_once))
    return _wrapped("avx512" if at_once else "numba", squeeze, spread)


def _squeezer(sift_groups: Any) -> Any:
    @inner
    def sift_pass(source: Any, kept: Any, bits: Any, left: Any) -> Any:
        groups = source.size // GROUP
        end = sift_groups(source, kept, bits, left, groups)
        if source.size % GROUP:
            rest = source[groups * GROUP :]
            low, high, end = _sift_some(rest, kept, left, end)
            _put_bits(bits, groups * GROUP_BYTES, low, high)
        return end

    @compiled(types.boolean, read_only(u8), read_only(u8), written(u8), written(u8), written(i64))
    def squeeze(data: Any, values: Any, scratch: Any, out: Any, counts: Any) -> Any:
        room = scratch.size // 2
        if data.size + PAD_BYTES > room or values.size != PASSES * VALUES or counts.size != PASSES:
            return False
        source, left = scratch[:room], scratch[room:]
        items, end = data.size, 0
        for number in range(PASSES):
            size = GROUP_BYTES * ((items + GROUP - 1) // GROUP)
            if end + size > out.size:
                return False
            kept, bits = values[VALUES * number :], out[end : end + size]
            if number == 0:
                items = sift_pass(data, kept, bits, left)
            else:
                items = sift_pass(source[:items], kept, bits, left)
            counts[number] = items
            end += size
            source, left = left, source
        if end + items > out.size:
            return False
        out[end : end + items] = source[:items]
        return True

    return squeeze


def _spreader(restore_groups: Any) -> Any:
    @inner
    def restore_pass(bits: Any, kept: Any, left: Any, out: Any) -> Any:
        groups = out.size // GROUP
        total = restore_groups(bits, kept, left, out, groups)
        if out.size % GROUP:
            rest = out[groups * GROUP :]
            total = _restore_some(bits[groups * GROUP_BYTES :], kept, left, rest, total)
        return total

    @compiled(types.boolean, read_only(u8), read_only(u8), read_only(i64), written(u8), written(u8))
    def spread(body: Any, values: Any, counts: Any, scratch: Any, out: Any) -> Any:
        room = scratch.size // 2
        if out.size + PAD_BYTES > room or values.size != PASSES * VALUES or counts.size != PASSES:
            return False
        source, left = scratch[:room], scratch[room:]
        limit = counts[PASSES - 1]
        end = body.size - limit
        left[:limit] = body[end:]
        for number in range(PASSES - 1, -1, -1):
            items = out.size if number == 0 else counts[number - 1]
            end -= GROUP_BYTES * ((items + GROUP - 1) // GROUP)
            kept, bits = values[VALUES * number :], body[end:]
            if number == 0:
                total = restore_pass(bits, kept, left[:limit], out)
            else:
                total = restore_pass(bits, kept, left[:limit], source[:items])
            if total != limit:
                return False
            limit = items
            source, left = left, source
        return True

    return spread


def _wrapped(name: str, squeeze: Any, spread: Any) -> Sieve:
    def squeezed(data: Bytes, values: Bytes, scratch: Bytes, out: Bytes) -> list[int] | None:
        counts = np.empty(PASSES, np.int64)
        return counts.tolist() if squeeze(data, values, scratch, out, counts) else None

    def is_spread(
        body: Bytes, values: Bytes, counts: list[int], scratch: Bytes, out: Bytes
    ) -> bool:
        return bool(spread(body, values, np.array(counts, np.int64), scratch, out))

    return Sieve(name, squeezed, is_spread)
