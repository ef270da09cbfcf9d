"""Splitting words into planes in numpy: what the compiled loops have to agree with."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.lossless import Planes, Words

_PIECE_ITEMS = 1 << 15
"""Words that numpy takes at a time: their scratch stays in cache."""


class _Numpy:
    """The reference."""

    @staticmethod
    def split_bfloat16(words: Words, planes: Planes) -> None:
        exponent, rest = planes
        for at in range(0, len(words), _PIECE_ITEMS):
            piece = slice(at, at + _PIECE_ITEMS)
            x = words[piece]
            np.copyto(exponent[piece], x >> 7, casting="unsafe")
            np.copyto(rest[piece], x >> 8 & 0x80 | x & 0x7F, casting="unsafe")

    @staticmethod
    def join_bfloat16(words: Words, planes: Planes) -> None:
        exponent, rest = planes
        for at in range(0, len(words), _PIECE_ITEMS):
            piece = slice(at, at + _PIECE_ITEMS)
            x = words[piece]
            np.copyto(x, exponent[piece])
            low = rest[piece].astype(np.uint16)
            x <<= 7
            x |= low & 0x7F
            x |= (low & 0x80) << 8

    @staticmethod
    def split_float32(words: Words, planes: Planes) -> None:
        halves = words.view("<u2")
        _Numpy.split_bfloat16(halves[1::2], planes[:2])
        _Numpy.split_float16(halves[::2], planes[2:])

    @staticmethod
    def join_float32(words: Words, planes: Planes) -> None:
        halves = words.view("<u2")
        _Numpy.join_bfloat16(halves[1::2], planes[:2])
        _Numpy.join_float16(halves[::2], planes[2:])

    @staticmethod
    def split_float16(words: Words, planes: Planes) -> None:
        for at in range(0, len(words), _PIECE_ITEMS):
            piece = slice(at, at + _PIECE_ITEMS)
            np.copyto(planes[0][piece], words[piece] >> 8, casting="unsafe")
            np.copyto(planes[1][piece], words[piece], casting="unsafe")

    @staticmethod
    def join_float16(words: Words, planes: Planes) -> None:
        for at in range(0, len(words), _PIECE_ITEMS):
            piece = slice(at, at + _PIECE_ITEMS)
            np.copyto(words[piece], planes[0][piece])
            words[piece] <<= 8
            words[piece] |= planes[1][piece]


def split(kind: str, words: Words, planes: Planes) -> None:
    if kind == "bytes":
        np.copyto(planes[0], words)
    else:
        getattr(_Numpy, f"split_{kind}")(words, planes)


def join(kind: str, words: Words, planes: Planes) -> None:
    if kind == "bytes":
        np.copyto(words, planes[0])
    else:
        getattr(_Numpy, f"join_{kind}")(words, planes)
