"""The loops that quantise a block of tokens for kvq, compiled by numba.

Loops run over the arrays' own shapes. Heads are taken in groups that fill whole tiles, so that
a group's numbers stay in the second-level cache.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvstore.codecs.jit import inner
from kvstore.codecs.kvq_loops import ONE, escapes_in, turn
from kvstore.codecs.kvq_models import (
    ESCAPE,
    MAX_QUOTIENT,
    PADDING_MODEL,
    SCALES,
    SHAPES,
    SYMBOLS,
    ZERO,
)
from kvstore.codecs.kvq_tiles import LARGEST, LARGEST_MEAN, LEAST_STEP, TILE_CHANNELS, TOLERANCE

REACH = 2
"""Scales that are tried on both sides of a channel's own."""

OUT_OF_RANGE = int(LARGEST.view(np.uint32))
_STEP = np.float32(LEAST_STEP)
_NORMAL_HALF, _HALVES = np.float32(2.0**-14), np.float32(2.0**24)


@inner
def _half(value: Any, place: Any, word: Any) -> Any:
    """Round a float32 to the nearest float16, ties to even; *word* is the memory of *place*."""
    if abs(value) < _NORMAL_HALF:
        return np.float32(np.rint(value * _HALVES) / _HALVES)
    place[0] = value
    bits = word[0]
    word[0] = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(
        0xFFFFE000
    )
    return place[0]


@inner
def load(bits: Any, shift: Any, angles: Any, head: int, group: Any) -> Any:
    """Widen heads from *head* on into the tiles *group*, turned back; return the heads taken.

    *group* is (x f32 (tiles, tokens, 128), largest magnitudes u32 (tiles,)).
    """
    x, largest = group
    heads, tokens, dim = bits.shape
    room = x.shape[0] * TILE_CHANNELS // dim
    taken = min(room, heads - head)
    row = np.empty(dim, np.float32)
    word = row.view(np.uint32)
    for index in range(taken):
        sizes = np.zeros(dim, np.uint32)
        for token in range(tokens):
            _widen(bits[head + index, token], shift, word, sizes)
            if len(angles[0]):
                turn(row, angles[0][token], angles[1][token], np.float32(-1))
            at = 0
            while at < dim:
                tile, channel = divmod(index * dim + at, TILE_CHANNELS)
                run = min(dim - at, TILE_CHANNELS - channel)
                x[tile, token, channel : channel + run] = row[at : at + run]
                at += run
        for i in range(dim):
            tile = (index * dim + i) // TILE_CHANNELS
            largest[tile] = max(largest[tile], sizes[i])
    return taken


@inner
def _widen(bits: Any, shift: Any, word: Any, largest: Any) -> None:
    """Fill a row of *word* and keep the largest magnitude of each channel so far."""
    for i in range(len(word)):
        wide = np.uint32(np.uint32(bits[i]) << shift)
        word[i] = wide
        size = np.uint32(wide & np.uint32(0x7FFFFFFF))
        largest[i] = size if size > largest[i] else largest[i]


@inner
def centre(x: Any, width: int, means: Any, squares: Any, half: Any) -> bool:
    """Fill *means* and the sums of squares about them; False for means too large."""
    tokens = x.shape[0]
    sums = np.zeros(TILE_CHANNELS, np.float64)
    for token in range(tokens):
        for c in range(width):
            sums[c] += np.float64(x[token, c])
    for c in range(width):
        mean = np.float32(sums[c] / tokens)
        if abs(mean) > LARGEST_MEAN:
            return False
        means[c] = _half(mean, half[0], half[1])
    for token in range(tokens):
        for c in range(width):
            difference = np.float64(x[token, c] - means[c])
            squares[c] += difference * difference
    return True


@inner
def step_of(squares: Any, width: int, tokens: int, ratio: Any) -> Any:
    """Return the tile's step, f32: *ratio* of the deviation whose sums of *squares* these are."""
    total = 0.0
    for c in range(width):
        total += squares[c]
    deviation = math.sqrt(total / (width * tokens))
    step = np.float32(deviation * ratio) if deviation != 0 else ONE
    return max(step, _STEP)


@inner
def _divide(x: Any, means: Any, step: Any, q: Any, counts: Any) -> Any:
    """Fill the quotients *q* i16, each channel's histogram, least and largest q.

    Returns the largest error.
    """
    histogram, ends = counts
    tokens, width = q.shape[0], len(means)
    inverse = ONE / step
    errors = np.zeros(TILE_CHANNELS, np.float32)
    symbols = np.zeros(TILE_CHANNELS, np.uint8)
    reaches = np.full(TILE_CHANNELS, MAX_QUOTIENT, np.int16)
    for token in range(tokens):
        _divide_row(x[token], means, (inverse, step), q[token], errors)
        _reach_out(q[token, :width], ends)
        _near(q[token, :width], reaches, symbols)
        for c in range(width):
            histogram[c, symbols[c]] += np.uint16(1)
    return errors.max()


@inner
def _divide_row(x: Any, means: Any, steps: Any, q: Any, errors: Any) -> None:
    inverse, step = steps
    for c in range(len(means)):
        quotient = np.rint((x[c] - means[c]) * inverse)
        error = abs(x[c] - (quotient * step + means[c]))
        errors[c] = error if error > errors[c] else errors[c]
        q[c] = np.int16(np.int32(quotient))


@inner
def _reach_out(q: Any, ends: Any) -> None:
    least, most = ends
    for c in range(len(q)):
        least[c] = q[c] if q[c] < least[c] else least[c]
        most[c] = q[c] if q[c] > most[c] else most[c]


@inner
def _pick(histogram: Any, peak: Any, spread: Any, family: Any) -> Any:
    """Return the channel's cheapest model of the five scales about its deviation.

    *peak* is the largest |q|: no symbol farther out occurs.
    """
    costs, edges = family
    scale = 0
    while scale < len(edges) and edges[scale] < spread:
        scale += 1
    first: Any = 0
    last: Any = SYMBOLS
    if peak <= MAX_QUOTIENT:
        first, last = ZERO - np.int64(peak), ZERO + np.int64(peak) + 1
    best: Any = 0
    least: Any = np.int64(1) << 62
    for model in range(SHAPES * max(0, scale - REACH), SHAPES * min(SCALES, scale + REACH + 1)):
        cost = cost_of(histogram[first:last], costs[model, first:last])
        best = model if cost < least else best
        least = min(cost, least)
    return best


@inner
def cost_of(histogram: Any, costs: Any) -> Any:
    """Return what coding *histogram* costs, in the unit of *costs* a symbol."""
    cost = np.int64(0)
    for symbol in range(len(histogram)):
        cost += np.int64(histogram[symbol]) * np.int64(costs[symbol])
    return cost


@inner
def _near(q: Any, reaches: Any, symbols: Any) -> None:
    for c in range(len(q)):
        is_far = (q[c] > reaches[c]) | (q[c] < -reaches[c])
        symbols[c] = np.uint8(ESCAPE) if is_far else np.uint8(q[c] + ZERO)


@inner
def note_escapes(q: Any, symbols: Any, values: Any, used: int) -> int:
    """Append the *q* (width,) that *symbols* (128,) escape behind the *used* of *values*.

    Fills the padding of *symbols*. Returns how many were appended, or -1 when there is no room.
    """
    width, count = len(q), 0
    if escapes_in(symbols[:width]):
        for c in range(width):
            if symbols[c] == ESCAPE:
                if used + count >= len(values):
                    return -1
                values[used + count] = q[c]
                count += 1
    for c in range(width, TILE_CHANNELS):
        symbols[c] = np.uint8(ZERO)
    return count


@inner
def _name(q: Any, models: Any, reach: Any, width: int, room: Any, symbols: Any) -> int:
    """Fill *symbols* and append escapes to *room*; return how many, or -1 when it is full."""
    values, used = room
    reaches = np.empty(TILE_CHANNELS, np.int16)
    for c in range(width):
        reaches[c] = reach[models[c]]
    count = 0
    for token in range(q.shape[0]):
        _near(q[token, :width], reaches, symbols[token])
        found = note_escapes(q[token, :width], symbols[token], values, used + count)
        if found < 0:
            return -1
        count += found
    return count


def quantise(bits: Any, shift: Any, angles: Any, ratio: Any, family: Any, out: Any) -> int:
    """Quantise (heads, tokens, dim); return how many escapes there are, or -1: not codable."""
    costs, edges, reach = family
    steps, means, models, symbols, escapes, values, errors, magnitudes = out
    heads, tokens, dim = bits.shape
    step_heads = TILE_CHANNELS // math.gcd(dim, TILE_CHANNELS)
    size = min(len(steps), step_heads * dim // TILE_CHANNELS)
    x = np.zeros((size, tokens, TILE_CHANNELS), np.float32)
    q = np.zeros((tokens, TILE_CHANNELS), np.int16)
    half = np.zeros(1, np.float32)
    head = tile = used = 0
    while head < heads:
        largest = np.zeros(size, np.uint32)
        if head + step_heads > heads:
            x[:] = np.float32(0)
        head += load(bits, shift, angles, head, (x, largest))
        for index in range(min(size, len(steps) - tile)):
            width = min(TILE_CHANNELS, heads * dim - tile * TILE_CHANNELS)
            if largest[index] >= OUT_OF_RANGE:
                return -1
            squares = np.zeros(TILE_CHANNELS, np.float64)
            if not centre(x[index], width, means[tile], squares, (half, half.view(np.uint32))):
                return -1
            step = step_of(squares, width, tokens, ratio)
            histogram = np.zeros((TILE_CHANNELS, SYMBOLS), np.uint16)
            least, most = np.zeros(TILE_CHANNELS, np.int16), np.zeros(TILE_CHANNELS, np.int16)
            counts = (histogram, (least, most))
            error = _divide(x[index], means[tile, :width], step, q, counts)
            if not error <= step * TOLERANCE:
                return -1
            square = np.float64(step) * np.float64(step)
            for c in range(width):
                spread = squares[c] / tokens / square
                models[tile, c] = _pick(
                    histogram[c], max(most[c], -least[c]), spread, (costs, edges)
                )
            for c in range(width, TILE_CHANNELS):
                models[tile, c] = PADDING_MODEL
            count = _name(q, models[tile], reach, width, (values, used), symbols[tile])
            if count < 0:
                return -1
            steps[tile], errors[tile] = step, error
            magnitudes[tile] = largest[index]
            escapes[tile] = count
            used += count
            tile += 1
    return used
