"""The loops that put a block of tokens together again for kvq, compiled by numba.

Loops run over the arrays' own shapes; how many escapes there are is counted before one is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.codecs.jit import inner
from kvstore.codecs.kvq_loops import ONE, escapes_in, turn
from kvstore.codecs.kvq_models import ESCAPE, ZERO
from kvstore.codecs.kvq_tiles import TILE_CHANNELS


@inner
def store(row: Any, shift: Any, out: Any) -> None:
    """Round a row of float32 to the nearest of 32 - *shift* bits, ties to even."""
    word = row.view(np.uint32)
    if shift == 16:
        for i in range(len(out)):
            bits = word[i]
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            out[i] = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    else:
        for i in range(len(out)):
            out[i] = word[i]


@inner
def patch(row: Any, place: Any, symbols: Any, values: Any) -> None:
    """Put escaped quotients into *row*, which is the *symbols* from a channel on."""
    channel, first = place
    for c in range(channel):
        first += symbols[c] == ESCAPE
    for c in range(len(row)):
        if symbols[channel + c] == ESCAPE:
            row[c] = np.float32(values[first])
            first += 1


@inner
def widen(symbols: Any, row: Any) -> None:
    """Fill *row* f32 with the quotients of *symbols* u8."""
    for c in range(len(row)):
        row[c] = np.float32(np.int32(symbols[c]) - np.int32(ZERO))


@inner
def scale_row(row: Any, step: Any, means: Any) -> None:
    """Turn the quotients *row* f32 into numbers, in place."""
    for c in range(len(row)):
        row[c] = row[c] * step + means[c]


def dequantise(tiles: Any, shift: Any, angles: Any, out: Any) -> bool:
    """Write (heads, tokens, dim); return whether each tile had the escapes it counts."""
    steps, means, symbols, escapes, values = tiles
    heads, tokens, dim = out.shape
    count = len(steps)
    firsts = np.zeros((count, tokens + 1), np.int64)
    used = 0
    for tile in range(count):
        for token in range(tokens):
            firsts[tile, token] = used
            used += escapes_in(symbols[tile, token])
        firsts[tile, tokens] = used
        if used - firsts[tile, 0] != escapes[tile]:
            return False
    if used != len(values):
        return False
    row = np.empty(dim, np.float32)
    for head in range(heads):
        for token in range(tokens):
            at = 0
            while at < dim:
                tile, channel = divmod(head * dim + at, TILE_CHANNELS)
                run = min(dim - at, TILE_CHANNELS - channel)
                piece = row[at : at + run]
                widen(symbols[tile, token, channel : channel + run], piece)
                first = firsts[tile, token]
                if firsts[tile, token + 1] != first:
                    patch(piece, (channel, first), symbols[tile, token], values)
                scale_row(piece, steps[tile], means[tile, channel : channel + run])
                at += run
            if len(angles[0]):
                turn(row, angles[0][token], angles[1][token], ONE)
            store(row, shift, out[head, token])
    return True
