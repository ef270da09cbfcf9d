"""The rANS coder in numpy: what the compiled loops have to agree with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.rans import (
    GROUP_CHANNELS,
    LANES,
    MIN_STATE,
    PROBABILITY_BITS,
    SLOTS,
    U8,
    U16,
    U32,
    Backend,
    ModelTable,
    Stream,
    uncodable,
)

_RENORM_SHIFT = 32 - PROBABILITY_BITS


def _by_step(channels: NDArray[Any]) -> NDArray[Any]:
    """Return (..., channels) as (steps, ..., 32): lane j, step g is channel g//2*64 + 2j + g%2."""
    *outer, size = channels.shape
    split = channels.reshape(*outer, size // GROUP_CHANNELS, LANES, 2)
    order = (split.ndim - 3, split.ndim - 1, *range(split.ndim - 3), split.ndim - 2)
    return split.transpose(order).reshape(size // LANES, *outer, LANES)


def _encode(symbols: U8, models: U8, table: ModelTable) -> Stream:
    tiles, tokens, channels = symbols.shape
    rows = _by_step(models).astype(np.intp)
    by_step = _by_step(symbols)  # (steps, tiles, tokens, lanes)
    states = np.full((tiles, LANES), MIN_STATE, np.uint64)
    shape = (tokens, channels // LANES, tiles, LANES)
    emitted, is_emitted = np.empty(shape, np.uint16), np.empty(shape, np.bool_)
    entries = table.encode_symbols
    for token in range(tokens - 1, -1, -1):
        for step in range(len(rows) - 1, -1, -1):
            entry = entries[rows[step], by_step[step, :, token]]
            frequency, start = entry & np.uint64(0xFFF), entry >> np.uint64(12) & np.uint64(0xFFF)
            if not frequency.all():
                raise uncodable()
            is_emitted[token, step] = full = states >= frequency << np.uint64(_RENORM_SHIFT)
            emitted[token, step] = states & np.uint64(0xFFFF)
            states = np.where(full, states >> np.uint64(16), states)
            quotient, rest = np.divmod(states, frequency)
            states = (quotient << np.uint64(PROBABILITY_BITS)) + rest + start
    taken = is_emitted.transpose(2, 0, 1, 3)  # the decoder takes them in this order
    counts = taken.sum(axis=(1, 2, 3), dtype=np.uint32)
    return Stream(states.astype(np.uint32), counts, emitted.transpose(2, 0, 1, 3)[taken])


def _decode(states: U32, counts: U32, words: U16, models: U8, table: ModelTable, out: U8) -> bool:
    tiles, tokens, channels = out.shape
    ends = np.cumsum(counts, dtype=np.int64)
    at = (ends - counts)[:, None] - 1  # the word before the next
    padded = np.append(words, np.uint16(0)).astype(np.int64)  # one more: what is never used
    rows = _by_step(models).astype(np.int64) * SLOTS
    slots = table.decode_slots.reshape(-1).astype(np.int64)
    x = states.astype(np.int64)
    flat = x.reshape(-1)
    entries = np.empty(rows.shape, np.int64)
    pairs = out.reshape(tiles, tokens, channels // GROUP_CHANNELS, LANES, 2)
    for token in range(tokens):
        for step, entry in enumerate(entries):
            index = x & (SLOTS - 1)
            index += rows[step]
            np.take(slots, index, out=entry, mode="clip")
            x >>= PROBABILITY_BITS
            x *= entry >> 8 & 0xFFF
            x += entry >> 20
            needs = x < MIN_STATE
            behind = np.cumsum(needs, axis=1, dtype=np.int64)
            behind += at
            at = behind[:, -1:]
            needy = np.flatnonzero(needs)
            place = np.minimum(behind.reshape(-1)[needy], len(words))
            flat[needy] = flat[needy] << 16 | padded[place]
        in_order = entries.reshape(channels // GROUP_CHANNELS, 2, tiles, LANES)
        pairs[:, token] = in_order.transpose(2, 0, 3, 1)
    return bool((at[:, 0] == ends - 1).all() and (x == MIN_STATE).all())


class NumpyBackend(Backend):
    """The reference in place of the compiled loops."""

    encode = staticmethod(_encode)
    decode = staticmethod(_decode)


NUMPY = NumpyBackend()
