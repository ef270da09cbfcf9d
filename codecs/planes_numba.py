"""The loops of ``planes`` compiled by numba: one pass over the words, many at a time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kvstore.codecs.jit import compiled, read_only, u8, u16, u32, void, written
from kvstore.codecs.planes import Splitter
from kvstore.proto.buffers import Bytes

_READ, _WRITTEN = read_only(u8), written(u8)


@lru_cache(maxsize=4)
def compiled_splitter(kind: str) -> Splitter:
    """Compile and return the splitter of words of *kind*; unchecked."""
    split, join = {
        "bfloat16": _bfloat16, "float16": _float16, "float32": _float32
    }[kind]()  # fmt: skip
    return Splitter(
        "numba",
        lambda words, planes: split(words, *planes),
        lambda words, planes: join(words, *planes),
    )


def _bfloat16() -> tuple[Any, Any]:
    @compiled(void, read_only(u16), _WRITTEN, _WRITTEN)
    def split(words: Any, exponent: Bytes, rest: Bytes) -> None:
        for k in range(min(words.size, exponent.size, rest.size)):
            exponent[k] = np.uint8(words[k] >> 7)
            rest[k] = np.uint8((words[k] >> 8) & 0x80 | words[k] & 0x7F)

    @compiled(void, written(u16), _READ, _READ)
    def join(words: Any, exponent: Bytes, rest: Bytes) -> None:
        for k in range(min(words.size, exponent.size, rest.size)):
            low = np.uint16(rest[k])
            words[k] = (low & 0x80) << 8 | np.uint16(exponent[k]) << 7 | low & 0x7F

    return split, join


def _float16() -> tuple[Any, Any]:
    @compiled(void, read_only(u16), _WRITTEN, _WRITTEN)
    def split(words: Any, high: Bytes, low: Bytes) -> None:
        for k in range(min(words.size, high.size, low.size)):
            high[k] = np.uint8(words[k] >> 8)
            low[k] = np.uint8(words[k])

    @compiled(void, written(u16), _READ, _READ)
    def join(words: Any, high: Bytes, low: Bytes) -> None:
        for k in range(min(words.size, high.size, low.size)):
            words[k] = np.uint16(high[k]) << 8 | np.uint16(low[k])

    return split, join


def _float32() -> tuple[Any, Any]:
    @compiled(void, read_only(u32), _WRITTEN, _WRITTEN, _WRITTEN, _WRITTEN)
    def split(words: Any, exponent: Bytes, rest: Bytes, high: Bytes, low: Bytes) -> None:
        for k in range(min(words.size, exponent.size, rest.size, high.size, low.size)):
            exponent[k] = np.uint8(words[k] >> 23)
            rest[k] = np.uint8((words[k] >> 24) & 0x80 | (words[k] >> 16) & 0x7F)
            high[k] = np.uint8(words[k] >> 8)
            low[k] = np.uint8(words[k])

    @compiled(void, written(u32), _READ, _READ, _READ, _READ)
    def join(words: Any, exponent: Bytes, rest: Bytes, high: Bytes, low: Bytes) -> None:
        for k in range(min(words.size, exponent.size, rest.size, high.size, low.size)):
            top = np.uint32(rest[k])
            top = (top & 0x80) << 8 | np.uint32(exponent[k]) << 7 | top & 0x7F
            words[k] = top << 16 | np.uint32(high[k]) << 8 | np.uint32(low[k])

    return split, join
