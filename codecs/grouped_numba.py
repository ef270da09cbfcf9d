"""The grouped codecs' loops compiled. Loaded only where the extra ``cpu-fast`` is there.

Each operation is rounded by itself, as in the reference; every index comes from the shape of
the array it goes into, and scales have a row for each group because the callers made them so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kvstore.codecs.floats import Floats
from kvstore.codecs.grouped_loops import GROUP, HALF, SLACK, Codes, Loops, Quantised
from kvstore.codecs.jit import compiled, inner, read_only, u8, written

_F32 = types.float32
_ONE = np.float32(1)


@compiled(types.void, read_only(_F32, 3), types.boolean, written(_F32, 3), written(_F32, 3))
def _fill_bounds(values: Floats, by_token: bool, low: Floats, high: Floats) -> None:
    heads, tokens, dim = values.shape
    for head in range(heads):
        for token in range(tokens):
            given = values[head, token]
            if by_token:
                least, most = low[head, token // GROUP], high[head, token // GROUP]
                if token % GROUP == 0:
                    least[:] = given
                    most[:] = given
                for channel in range(dim):
                    value = given[channel]
                    least[channel] = value if value < least[channel] else least[channel]
                    most[channel] = value if value > most[channel] else most[channel]
                continue
            for group in range((dim + GROUP - 1) // GROUP):
                least_of = most_of = given[group * GROUP]
                for channel in range(group * GROUP, min(dim, (group + 1) * GROUP)):
                    value = given[channel]
                    least_of = value if value < least_of else least_of
                    most_of = value if value > most_of else most_of
                low[head, token, group] = least_of
                high[head, token, group] = most_of


@inner
def _code(value: Any, wide: Any, centre: Any, least: Any, most: Any) -> Any:
    """Return the code of *value* before it is a byte."""
    step = np.rint((value - centre) / (wide if wide != 0 else _ONE))
    step = step if step > least else least
    return step if step < most else most


@inner
def _is_off(found: Any, value: Any, wide: Any) -> Any:
    """Return 1 where *found* is too far from *value*."""
    return np.int32(not abs(found - value) <= abs(value) * SLACK + wide * HALF)


@compiled(
    types.int32, read_only(_F32, 3), read_only(_F32, 4), read_only(_F32), types.boolean,
    written(u8, 3), written(_F32, 3),
)  # fmt: skip
def _fill_codes(
    values: Floats, groups: Floats, ends: Floats, by_token: bool, codes: Codes, back: Floats
) -> np.int32:
    """Return how many numbers are too far off. *groups* has scales, then minima."""
    heads, tokens, dim = values.shape
    least, most = ends[0], ends[1]
    off = np.int32(0)
    for head in range(heads):
        for token in range(tokens):
            given, coded, found = values[head, token], codes[head, token], back[head, token]
            if by_token:
                wide, centre = groups[0, head, token // GROUP], groups[1, head, token // GROUP]
                for channel in range(dim):
                    value = given[channel]
                    step = _code(value, wide[channel], centre[channel], least, most)
                    coded[channel] = np.uint8(np.int32(step))
                    found[channel] = step * wide[channel] + centre[channel]
                    off += _is_off(found[channel], value, wide[channel])
                continue
            for group in range((dim + GROUP - 1) // GROUP):
                scale, base = groups[0, head, token, group], groups[1, head, token, group]
                for channel in range(group * GROUP, min(dim, (group + 1) * GROUP)):
                    value = given[channel]
                    step = _code(value, scale, base, least, most)
                    coded[channel] = np.uint8(np.int32(step))
                    found[channel] = step * scale + base
                    off += _is_off(found[channel], value, scale)
    return off


@compiled(
    types.void, read_only(u8, 3), read_only(_F32, 4), types.boolean, types.boolean,
    written(_F32, 3),
)  # fmt: skip
def _fill_values(
    codes: Codes, groups: Floats, is_signed: bool, by_token: bool, values: Floats
) -> None:
    heads, tokens, dim = codes.shape
    flip = np.int32(128) if is_signed else np.int32(0)
    for head in range(heads):
        for token in range(tokens):
            coded, found = codes[head, token], values[head, token]
            if by_token:
                wide, centre = groups[0, head, token // GROUP], groups[1, head, token // GROUP]
                for channel in range(dim):
                    whole = np.float32((np.int32(coded[channel]) ^ flip) - flip)
                    found[channel] = whole * wide[channel] + centre[channel]
                continue
            for group in range((dim + GROUP - 1) // GROUP):
                scale, base = groups[0, head, token, group], groups[1, head, token, group]
                for channel in range(group * GROUP, min(dim, (group + 1) * GROUP)):
                    whole = np.float32((np.int32(coded[channel]) ^ flip) - flip)
                    found[channel] = whole * scale + base


def _bounds(values: Floats, by_token: bool) -> tuple[Floats, Floats]:
    heads, tokens, dim = values.shape
    shape = (heads, -(-tokens // GROUP), dim) if by_token else (heads, tokens, -(-dim // GROUP))
    low, high = np.empty(shape, np.float32), np.empty(shape, np.float32)
    _fill_bounds(values, by_token, low, high)
    return low, high


def _quantise(
    values: Floats, scale: Floats, base: Floats | None, levels: int, by_token: bool
) -> Quantised | None:
    codes, back = np.empty(values.shape, np.uint8), np.empty(values.shape, np.float32)
    ends = np.array([-levels if base is None else 0, levels], np.float32)
    if _fill_codes(values, _groups(scale, base), ends, by_token, codes, back):
        return None
    return codes, back


def _expand(codes: Codes, scale: Floats, base: Floats | None, by_token: bool) -> Floats:
    values = np.empty(codes.shape, np.float32)
    _fill_values(codes, _groups(scale, base), base is None, by_token, values)
    return values


def _groups(scale: Floats, base: Floats | None) -> Floats:
    return np.stack([scale, np.zeros_like(scale) if base is None else base])


NUMBA = Loops("numba", _bounds, _quantise, _expand)
