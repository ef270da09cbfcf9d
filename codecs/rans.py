"""Interleaved rANS: 32 lanes over one stream of 16-bit words, static models per channel.

Range asymmetric numeral systems (Duda 2013, arXiv 1311.2540, section 3; Giesen 2014, arXiv
1402.3392, on interleaving). A lane's state is a u32 in [2^16, 2^32), frequencies have 12 bits, and
a state grows or shrinks by one u16 word at a time. Decoding ends at 2^16 in every lane, which
checks the stream for free. docs/format.md specifies the stream. The loops are `native/rans.c`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.buffers import addresses
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.native import done, loops

U8: TypeAlias = NDArray[np.uint8]
U16: TypeAlias = NDArray[np.uint16]
U32: TypeAlias = NDArray[np.uint32]
U64: TypeAlias = NDArray[np.uint64]

LANES = 32
GROUP_CHANNELS = 2 * LANES
"""Lane j codes channels 2j and 2j+1 of each group: two steps make one packed store."""
PROBABILITY_BITS = 12
SLOTS = 1 << PROBABILITY_BITS
MIN_STATE = 1 << 16
MAX_FREQUENCY = SLOTS - 1
MAX_MODELS = 256
MAX_SYMBOLS = 256


@dataclass(frozen=True, eq=False)
class ModelTable:
    """Static distributions: ``frequencies`` u16 (models, symbols), each row of sum 4096.

    A symbol of frequency 0 cannot be coded. No frequency exceeds 4095, so that it fits 12 bits: a
    row has at least two symbols. Raises InvalidFrameError, as tables may come from files.
    """

    frequencies: U16

    def __post_init__(self) -> None:
        rows = self.frequencies
        if rows.dtype != np.uint16 or rows.ndim != 2:
            raise InvalidFrameError("frequencies", rows.dtype.name, "give u16 (models, symbols)")
        models, symbols = rows.shape
        if not (1 <= models <= MAX_MODELS and 2 <= symbols <= MAX_SYMBOLS):
            raise InvalidFrameError("frequencies", rows.shape, "1..256 models of 2..256 symbols")
        if (rows > MAX_FREQUENCY).any() or (rows.sum(1, dtype=np.int64) != SLOTS).any():
            raise InvalidFrameError("frequencies", int(rows.max()), f"rows sum to {SLOTS}")

    @cached_property
    def decode_slots(self) -> U32:
        """Per model and slot: symbol | frequency << 8 | (slot - start) << 20; u32 (m, 4096)."""
        rows = self.frequencies.astype(np.uint32)
        starts = np.cumsum(rows, axis=1, dtype=np.uint32) - rows
        symbols = np.arange(rows.shape[1], dtype=np.uint32)
        entries = (symbols | rows << np.uint32(8)) - (starts << np.uint32(20))  # modulo 2^32
        slots = np.repeat(entries.reshape(-1), rows.reshape(-1)).reshape(-1, SLOTS)
        slots += np.arange(SLOTS, dtype=np.uint32) << np.uint32(20)
        return slots

    @cached_property
    def encode_symbols(self) -> U64:
        """Per model and symbol: frequency | start << 12 | floor(2^32 / frequency) << 32.

        u64 (models, 256), so that no u8 symbol indexes outside. A state before coding is less than
        frequency * 2^20, hence ``state * reciprocal >> 32`` is its quotient by the frequency or one
        less: the remainder decides, and no lane divides.
        """
        rows = self.frequencies.astype(np.uint64)
        starts = np.cumsum(rows, axis=1, dtype=np.uint64) - rows
        reciprocals = np.minimum((1 << 32) // np.maximum(rows, 1), (1 << 32) - 1)
        table = np.zeros((len(rows), MAX_SYMBOLS), np.uint64)
        used = rows | starts << np.uint64(12) | reciprocals << np.uint64(32)
        table[:, : rows.shape[1]] = np.where(rows > 0, used, 0)
        return table


class Stream(NamedTuple):
    """A stream of n tiles: ``states`` u32 (n, 32), ``counts`` of words u32 (n,), ``words`` u16."""

    states: U32
    counts: U32
    words: U16


class Backend:
    """The loops of one path, with the checks of their arguments. Thread-safe."""

    def __init__(self, path: str | None = None) -> None:
        self._native = loops(path)

    def encode_tiles(self, symbols: U8, models: U8, table: ModelTable) -> Stream:
        """Encode *symbols* u8 (tiles, tokens, channels) by *models* u8 (tiles, channels), or one
        model for each symbol, in the shape of *symbols*.

        Channels are a multiple of 64. Raises InvalidRequestError for shapes that disagree or a
        symbol that its model cannot code.
        """
        symbols, models = _by_channel(symbols, models)
        _check_symbols(symbols, models, table)
        contiguous = np.ascontiguousarray
        return self.encode(contiguous(symbols), contiguous(models), table)

    def decode_tiles(
        self, states: U32, counts: U32, words: U16, models: U8, table: ModelTable, out: U8
    ) -> None:
        """Decode a stream of ``encode_tiles`` into *out* u8 (tiles, tokens, channels), C order.

        Raises InvalidFrameError unless every lane ends at 2^16 and each tile uses exactly its
        words; *out* is then undefined. No stream can move an index out of the arrays.
        """
        if not out.flags.c_contiguous:
            raise InvalidRequestError("out", out.strides, "give a C-ordered array")
        out, models = _by_channel(out, models)
        _check_symbols(out, models, table)
        tiles = len(out)
        if states.shape != (tiles, LANES) or counts.shape != (tiles,) or words.ndim != 1:
            raise InvalidFrameError("states", (states.shape, counts.shape), f"are of {tiles} tiles")
        if int(counts.sum(dtype=np.uint64)) != len(words):
            raise InvalidFrameError("words", len(words), "must be as many as the tiles count")
        states, counts = np.ascontiguousarray(states, "<u4"), np.ascontiguousarray(counts, "<u4")
        words, models = np.ascontiguousarray(words, "<u2"), np.ascontiguousarray(models)
        if not self.decode(states, counts, words, models, table, out):
            raise InvalidFrameError("words", len(words), "the stream does not end where it must")

    def encode(self, symbols: U8, models: U8, table: ModelTable) -> Stream:
        """Do what ``encode_tiles`` does, without checks."""
        tiles, tokens, channels = symbols.shape
        states = np.full((tiles, LANES), MIN_STATE, np.uint32)
        counts, words = np.empty(tiles, np.uint32), np.empty(symbols.size, np.uint16)
        arrays = (symbols, models, table.encode_symbols, states, counts, words)
        sizes = (tiles, tokens * channels, channels)
        used = done(self._native.rans_encode(*addresses(*arrays), *sizes))
        if used < 0:
            raise uncodable()
        return Stream(states, counts, words[:used])

    def decode(
        self, states: U32, counts: U32, words: U16, models: U8, table: ModelTable, out: U8
    ) -> bool:
        """Decode without checks of arguments; return whether the stream ended as required."""
        tiles, tokens, channels = out.shape
        arrays = (states.copy(), counts, words, models, table.decode_slots, out)
        sizes = (tiles, tokens * channels, channels)
        return done(self._native.rans_decode(*addresses(*arrays), *sizes)) == 1


@lru_cache(maxsize=4)
def native_backend(path: str | None = None) -> Backend:
    """Return the loops of *path*; None: of the fastest."""
    return Backend(path)


def uncodable() -> InvalidRequestError:
    """Return the error for a symbol of frequency 0 in its model."""
    return InvalidRequestError("symbols", "frequency 0", "code only symbols of the model")


def _by_channel(symbols: U8, models: U8) -> tuple[U8, U8]:
    """Return a model for each symbol as a model for each channel of a single long token."""
    if models.ndim < 3 or models.shape != symbols.shape:
        return symbols, models
    return symbols.reshape(len(symbols), 1, -1), models.reshape(len(models), -1)


def _check_symbols(symbols: U8, models: U8, table: ModelTable) -> None:
    is_whole = symbols.ndim == 3 and symbols.shape[2] > 0 and not symbols.shape[2] % GROUP_CHANNELS
    if symbols.dtype != np.uint8 or not is_whole:
        raise InvalidRequestError(
            "symbols", (symbols.dtype.name, symbols.shape), "u8 (tiles, tokens, 64 k channels)"
        )
    if models.dtype != np.uint8 or models.shape != (len(symbols), symbols.shape[2]):
        raise InvalidRequestError("models", models.shape, "give u8 (tiles, channels)")
    if models.size and int(models.max()) >= len(table.frequencies):
        raise InvalidFrameError("models", int(models.max()), "the table has fewer")
