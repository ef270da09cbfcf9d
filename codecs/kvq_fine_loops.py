"""Compiled loops of what is finer than one step a tile: refinements, and tokens by class.

Every float32 operation is that of the reference, ``kvq_levels`` and ``kvq_tiles``, rounded by
itself. Loops run over the arrays' own shapes; how many escapes there are is counted first.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvstore.codecs.jit import inner
from kvstore.codecs.kvq_dequantise_loops import patch, scale_row, store, widen
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
from kvstore.codecs.kvq_quantise_loops import (
    OUT_OF_RANGE,
    REACH,
    centre,
    cost_of,
    load,
    note_escapes,
    step_of,
)
from kvstore.codecs.kvq_tiles import TILE_CHANNELS, TOLERANCE

_THREE, _FAR = np.float32(3), np.float32(2)
_LEAST, _NONE = np.float32(-1), np.float32(0)
KINDS = 4
"""Classes of tokens."""
_PLAIN = 2
_SCALES_OF_TWO = 4


def quotients(symbols: Any, escapes: Any, values: Any, out: Any) -> bool:
    """Fill *out* f32 (n, tokens, 128); return whether each tile had the escapes it counts."""
    used = 0
    for tile in range(len(symbols)):
        first = used
        for token in range(symbols.shape[1]):
            count = escapes_in(symbols[tile, token])
            if used + count > len(values):
                return False
            row = out[tile, token]
            widen(symbols[tile, token], row)
            if count:
                patch(row, (0, used), symbols[tile, token], values)
            used += count
        if used - first != escapes[tile]:
            return False
    return used == len(values)


def contexts(q: Any, rows: Any, out: Any) -> None:
    """Fill *out* u8 (n, tokens, 128): *rows* u8 (n, 128) and how far out each number is."""
    for tile in range(len(q)):
        row = rows[tile]
        for token in range(q.shape[1]):
            _context(q[tile, token], row, out[tile, token])


@inner
def _context(q: Any, row: Any, out: Any) -> None:
    for c in range(len(row)):
        size = abs(q[c])
        out[c] = row[c] + np.uint8(size if size < _FAR else _FAR)


def add(q: Any, thirds: Any) -> None:
    """Make *q* f32 (n,) those of the next level by *thirds* u8 (n,): 0 towards zero to 2 away."""
    for i in range(len(q)):
        third = np.float32(np.int32(thirds[i]) - np.int32(1))
        q[i] = q[i] * _THREE + (-third if q[i] < _NONE else third)


def write(q: Any, tiles: Any, shift: Any, angles: Any, out: Any) -> None:
    """Write (heads, tokens, dim) from *q* f32 (n, tokens, 128) times its token's factor."""
    steps, means, factors = tiles
    heads, tokens, dim = out.shape
    row = np.empty(dim, np.float32)
    for head in range(heads):
        for token in range(tokens):
            factor, at = factors[token], 0
            while at < dim:
                tile, channel = divmod(head * dim + at, TILE_CHANNELS)
                run = min(dim - at, TILE_CHANNELS - channel)
                piece, source = row[at : at + run], q[tile, token, channel : channel + run]
                for c in range(run):
                    piece[c] = source[c] * factor
                scale_row(piece, steps[tile], means[tile, channel : channel + run])
                at += run
            if len(angles[0]):
                turn(row, angles[0][token], angles[1][token], ONE)
            store(row, shift, out[head, token])


@inner
def _third(x: Any, means: Any, steps: Any, q: Any, out: Any) -> None:
    """Refine a row: *q* becomes that of the finer step, *out* has symbols, contexts and errors."""
    step, inverse, row = steps
    symbols, found, errors = out
    _context(q, row, found)
    for c in range(len(q)):
        whole = _THREE * q[c]
        third = np.rint((x[c] - means[c]) * inverse) - whole
        third = max(min(third, ONE), _LEAST)
        sign = -third if q[c] < _NONE else third
        symbols[c] = np.uint8(np.int32(sign + ONE))
        finer = whole + third
        error = abs(x[c] - (finer * step + means[c]))
        errors[c] = error if error > errors[c] else errors[c]
        q[c] = finer


def refine(bits: Any, shift: Any, angles: Any, tiles: Any, out: Any) -> bool:
    """Fill *out*, symbols and contexts u8 (levels, n, tokens, 128) and errors f32 (levels, n).

    *tiles*: steps, means, quotients and rows u8 (levels, n, 128) of contexts. False when float32
    is too coarse.
    """
    steps, means, numbers, rows = tiles
    symbols, found, errors = out
    heads, tokens, dim = bits.shape
    step_heads = TILE_CHANNELS // math.gcd(dim, TILE_CHANNELS)
    size = min(len(steps), step_heads * dim // TILE_CHANNELS)
    x = np.zeros((size, tokens, TILE_CHANNELS), np.float32)
    head = tile = 0
    while head < heads:
        largest = np.zeros(size, np.uint32)
        if head + step_heads > heads:
            x[:] = np.float32(0)
        head += load(bits, shift, angles, head, (x, largest))
        for index in range(min(size, len(steps) - tile)):
            step = steps[tile]
            for level in range(len(symbols)):
                step = step / _THREE
                each = np.zeros(TILE_CHANNELS, np.float32)
                terms = (step, ONE / step, rows[level, tile])
                for token in range(tokens):
                    _third(
                        x[index, token], means[tile], terms, numbers[tile, token],
                        (symbols[level, tile, token], found[level, tile, token], each),
                    )  # fmt: skip
                errors[level, tile] = each.max()
                if not errors[level, tile] <= step * TOLERANCE:
                    return False
            tile += 1
    return True


@inner
def _moved(model: Any, kind: Any) -> Any:
    """Return the model of the same channel in tokens of another class."""
    scale: Any = np.int64(model) // SHAPES + _SCALES_OF_TWO * (_PLAIN - np.int64(kind))
    return SHAPES * min(max(scale, 0), SCALES - 1) + np.int64(model) % SHAPES


@inner
def _move_all(models: Any, kinds: Any) -> None:
    """Fill *kinds* u8 (classes, 128) with the models of each class."""
    for kind in range(KINDS):
        for c in range(TILE_CHANNELS):
            kinds[kind, c] = np.uint8(_moved(models[c], kind))


def move(models: Any, classes: Any, out: Any) -> None:
    """Fill *out* u8 (n, tokens, 128): the model of each number of *models* u8 (n, 128)."""
    kinds = np.empty((KINDS, TILE_CHANNELS), np.uint8)
    for tile in range(len(models)):
        _move_all(models[tile], kinds)
        for token in range(len(classes)):
            out[tile, token] = kinds[classes[token]]


@inner
def _divide(x: Any, means: Any, step: Any, classes: Any, out: Any) -> Any:
    """Fill quotients i16, histograms and largest |q| by class; return the largest error."""
    q, histogram, peaks = out
    inverse, width = ONE / step, len(means)
    errors = np.zeros(TILE_CHANNELS, np.float32)
    symbols = np.zeros(TILE_CHANNELS, np.uint8)
    for token in range(len(q)):
        kind = classes[token]
        factor = np.float32(np.ldexp(1.0, np.int64(kind) - _PLAIN))
        _divide_row(x[token], means, (inverse, ONE / factor, factor, step), q[token], errors)
        _reach_out(q[token, :width], peaks[kind], symbols)
        counts = histogram[kind]
        for c in range(width):
            counts[c, symbols[c]] += np.uint16(1)
    return errors.max()


@inner
def _reach_out(q: Any, peak: Any, symbols: Any) -> None:
    """Keep the largest |q| of each channel so far; fill the symbols of the widest model."""
    for c in range(len(q)):
        size = np.int16(-q[c]) if q[c] < 0 else q[c]
        peak[c] = size if size > peak[c] else peak[c]
        symbols[c] = np.uint8(q[c] + ZERO) if size <= MAX_QUOTIENT else np.uint8(ESCAPE)


@inner
def _divide_row(x: Any, means: Any, terms: Any, q: Any, errors: Any) -> None:
    inverse, finer, factor, step = terms
    for c in range(len(means)):
        quotient = np.rint((x[c] - means[c]) * inverse * finer)
        error = abs(x[c] - (quotient * factor * step + means[c]))
        errors[c] = error if error > errors[c] else errors[c]
        q[c] = np.int16(np.int32(quotient))


@inner
def _pick(histogram: Any, peaks: Any, spread: Any, family: Any, c: int) -> Any:
    """Return channel *c*'s cheapest model, of the five scales about its deviation, over classes."""
    costs, edges = family
    scale = 0
    while scale < len(edges) and edges[scale] < spread:
        scale += 1
    best: Any = 0
    least: Any = np.int64(1) << 62
    for model in range(SHAPES * max(0, scale - REACH), SHAPES * min(SCALES, scale + REACH + 1)):
        cost = np.int64(0)
        for kind in range(KINDS):
            peak = np.int64(peaks[kind, c])
            if peak < 0:
                continue  # no such token
            first: Any = 0
            last: Any = SYMBOLS
            if peak <= MAX_QUOTIENT:
                first, last = ZERO - peak, ZERO + peak + 1
            row = costs[_moved(model, kind)]
            cost += cost_of(histogram[kind, c, first:last], row[first:last])
        best = model if cost < least else best
        least = min(cost, least)
    return best


@inner
def _name(q: Any, kinds: Any, classes: Any, reach: Any, room: Any, symbols: Any) -> int:
    """Fill *symbols* and append escapes to *room*; return how many, or -1 when it is full."""
    values, used, width = room
    reaches = np.empty((KINDS, TILE_CHANNELS), np.int16)
    for kind in range(KINDS):
        for c in range(TILE_CHANNELS):
            reaches[kind, c] = reach[kinds[kind, c]]
    count = 0
    for token in range(len(q)):
        far = reaches[classes[token]]
        for c in range(width):
            is_far = (q[token, c] > far[c]) | (q[token, c] < -far[c])
            symbols[token, c] = np.uint8(ESCAPE) if is_far else np.uint8(q[token, c] + ZERO)
        found = note_escapes(q[token, :width], symbols[token], values, used + count)
        if found < 0:
            return -1
        count += found
    return count


@inner
def _tile(x: Any, width: int, terms: Any, family: Any, out: Any) -> Any:
    """Quantise one tile; return its step, error and escapes, of which -1: not codable."""
    ratio, classes, loosest, used = terms
    costs, edges, reach = family
    means, models, symbols, values = out
    tokens = len(x)
    half, squares = np.zeros(1, np.float32), np.zeros(TILE_CHANNELS, np.float64)
    if not centre(x, width, means, squares, (half, half.view(np.uint32))):
        return _NONE, _NONE, -1
    step = step_of(squares, width, tokens, ratio)
    q = np.zeros((tokens, TILE_CHANNELS), np.int16)
    histogram = np.zeros((KINDS, TILE_CHANNELS, SYMBOLS), np.uint16)
    peaks = np.full((KINDS, TILE_CHANNELS), -1, np.int16)
    for token in range(tokens):
        peaks[classes[token]] = 0
    error = _divide(x, means[:width], step, classes, (q, histogram, peaks))
    if not error <= step * loosest:
        return step, error, -1
    square = np.float64(step) * np.float64(step)
    for c in range(width):
        spread = squares[c] / tokens / square
        models[c] = _pick(histogram, peaks, spread, (costs, edges), c)
    for c in range(width, TILE_CHANNELS):
        models[c] = PADDING_MODEL
    kinds = np.empty((KINDS, TILE_CHANNELS), np.uint8)
    _move_all(models, kinds)
    return step, error, _name(q, kinds, classes, reach, (values, used, width), symbols)


def quantise_by_class(bits: Any, shift: Any, angles: Any, terms: Any, family: Any, out: Any) -> int:
    """Quantise (heads, tokens, dim); return how many escapes there are, or -1: not codable.

    *terms*: the ratio, and classes u8 (tokens,).
    """
    ratio, classes = terms
    steps, means, models, symbols, escapes, values, errors, magnitudes = out
    heads, tokens, dim = bits.shape
    step_heads = TILE_CHANNELS // math.gcd(dim, TILE_CHANNELS)
    size = min(len(steps), step_heads * dim // TILE_CHANNELS)
    x = np.zeros((size, tokens, TILE_CHANNELS), np.float32)
    loosest = np.float32(np.ldexp(1.0, np.int64(classes.max()) - _PLAIN)) * TOLERANCE
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
            steps[tile], errors[tile], count = _tile(
                x[index], width, (ratio, classes, loosest, used), family,
                (means[tile], models[tile], symbols[tile], values),
            )  # fmt: skip
            if count < 0:
                return -1
            magnitudes[tile] = largest[index]
            escapes[tile] = count
            used += count
            tile += 1
    return used
