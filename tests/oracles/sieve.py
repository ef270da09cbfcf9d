"""The sieve in numpy: what the compiled loops have to agree with."""

from __future__ import annotations

import numpy as np
from oracles import planes

from kvstore.codecs.lossless import GROUP, GROUP_BYTES, PASSES, VALUES, Loops
from kvstore.proto.buffers import Bytes


def _squeeze(data: Bytes, values: Bytes, scratch: Bytes, out: Bytes) -> list[int] | None:
    counts: list[int] = []
    end = 0
    for number in range(PASSES):
        kept = values[VALUES * number : VALUES * (number + 1)]
        first, second, third = (data == value for value in kept)
        none = ~(first | second | third)
        groups = -(-len(data) // GROUP)
        if end + GROUP_BYTES * groups > len(out):
            return None
        bits = out[end : end + GROUP_BYTES * groups].reshape(groups, 2, GROUP // 8)
        for half, is_set in enumerate((second | none, third | none)):
            packed = np.zeros(groups * GROUP // 8, np.uint8)
            packed[: -(-len(data) // 8)] = np.packbits(is_set, bitorder="little")
            bits[:, half] = packed.reshape(groups, GROUP // 8)
        end += GROUP_BYTES * groups
        data = data[np.flatnonzero(none)]  # not by the mask itself, which takes four times as long
        counts.append(len(data))
    if end + len(data) > len(out):
        return None
    out[end : end + len(data)] = data
    return counts


def _spread(body: Bytes, values: Bytes, counts: list[int], scratch: Bytes, out: Bytes) -> bool:
    end = len(body) - counts[-1]
    left = body[end:]
    for number in reversed(range(PASSES)):
        items = counts[number - 1] if number else len(out)
        groups = -(-items // GROUP)
        bits = body[end - GROUP_BYTES * groups : end].reshape(groups, 2, GROUP // 8)
        end -= GROUP_BYTES * groups
        low, high = (
            np.unpackbits(np.ascontiguousarray(bits[:, half]), count=items, bitorder="little")
            for half in (0, 1)
        )
        is_left = np.flatnonzero((low & high).view(bool))  # eight times as fast as of numbers
        if len(is_left) != len(left):
            return False
        first, second, third = values[VALUES * number : VALUES * (number + 1)]
        found = first ^ low * (first ^ second) ^ high * (first ^ third)
        found[is_left] = left
        left = found
    np.copyto(out, left)
    return True


class NumpyLoops(Loops):
    """The reference in place of the compiled loops."""

    split = staticmethod(planes.split)
    join = staticmethod(planes.join)
    squeeze = staticmethod(_squeeze)
    spread = staticmethod(_spread)


NUMPY = NumpyLoops()
