"""Splitting words into byte planes and joining them again.

Plane 0 holds what is worth coding: the exponent of bfloat16 and float32, sign and exponent of
float16. The planes behind it hold the sign and the mantissa, which are noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import Part
from kvstore.proto.buffers import Bytes, address, addresses
from kvstore.proto.native import loops
from kvstore.proto.types import Component, DType

Words: TypeAlias = NDArray[Any]
"""A flat, contiguous array of u8, u16 or u32, at any address."""

Planes: TypeAlias = "Sequence[Bytes] | NDArray[np.uint8]"
"""As many flat arrays of bytes as a word has bytes, plane 0 first."""

Split: TypeAlias = Callable[[Words, Planes], None]


@dataclass(frozen=True, slots=True)
class Splitter:
    """One way to split: ``split(words, planes)`` and ``join(words, planes)``, both flat."""

    name: str
    split: Split = field(repr=False)
    join: Split = field(repr=False)


def kind_of(dtype: DType) -> str:
    """Return how words of *dtype* are split: by its name, or ``bytes`` for all of one byte."""
    return dtype.name if dtype.item_bytes > 1 else "bytes"


def _split_bytes(words: Words, planes: Planes) -> None:
    np.copyto(planes[0], words)


def _join_bytes(words: Words, planes: Planes) -> None:
    np.copyto(words, planes[0])


BYTES = Splitter("numpy", _split_bytes, _join_bytes)


def best_splitter(kind: str) -> Splitter:
    """Return the fastest splitter of words of *kind*."""
    return BYTES if kind == "bytes" else native_splitter(kind)


@lru_cache(maxsize=16)
def native_splitter(kind: str, path: str | None = None) -> Splitter:
    """Return the compiled loops of *path*; of this processor's best where it is None."""
    native = loops(path)
    split, join = getattr(native, f"split_{kind}"), getattr(native, f"join_{kind}")
    return Splitter(native.path, partial(_split, split), partial(_join, join))


def _split(loop: Callable[..., int], words: Words, planes: Planes) -> None:
    _check(words, planes)
    loop(address(words), *map(_out_address, planes), words.size)


def _join(loop: Callable[..., int], words: Words, planes: Planes) -> None:
    _check(words, planes)
    loop(_out_address(words), *addresses(*planes), words.size)


def _out_address(data: NDArray[Any]) -> int:
    """Return where *data* lies, to be written there. Raises ValueError where it is read-only."""
    if not data.flags.writeable:
        raise ValueError("assignment destination is read-only")
    return address(data)


def _check(words: Words, planes: Planes) -> None:
    sizes = {words.size, *(plane.size for plane in planes)}
    if len(sizes) > 1 or not all(each.flags.c_contiguous for each in (words, *planes)):
        raise ValueError(f"planes of one size, C-ordered; not {sorted(sizes)}")


# --- parts as runs of rows


def row_blocks(component: Component, block_items: int) -> Iterator[tuple[int, int]]:
    """Yield where each block of a part starts and stops, in rows.

    A part has kv_heads x tokens rows of head_dim elements; a block has at most *block_items*
    elements, or one row where that is longer.
    """
    rows, step = _rows_and_step(component, block_items)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def block_count(component: Component, block_items: int) -> int:
    """Return how many blocks ``row_blocks`` yields, in constant time."""
    rows, step = _rows_and_step(component, block_items)
    return -(-rows // step)


def _rows_and_step(component: Component, block_items: int) -> tuple[int, int]:
    return component.kv_heads * component.tokens, max(1, block_items // component.head_dim)


def flat_rows(part: Part, start: int, stop: int) -> Words | None:
    """Return rows *start* to *stop* of *part* where they lie; None where they are no run."""
    if not part.flags.c_contiguous:
        return None
    return part.reshape(-1)[start * part.shape[2] : stop * part.shape[2]]


def gather_rows(part: Part, start: int, stop: int, out: Words) -> Words:
    """Copy rows *start* to *stop* of *part*, which has any strides, to *out*; return them."""
    dim = part.shape[2]
    found = out[: (stop - start) * dim]
    for box, at, until in _boxes(part.shape, start, stop):
        np.copyto(found[at * dim : until * dim].reshape(part[box].shape), part[box])
    return found


def scatter_rows(part: Part, start: int, stop: int, words: Words) -> None:
    """Copy *words* to rows *start* to *stop* of *part*, which has any strides."""
    dim = part.shape[2]
    for box, at, until in _boxes(part.shape, start, stop):
        np.copyto(part[box], words[at * dim : until * dim].reshape(part[box].shape))


def _boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[slice, slice], int, int]]:
    """Cut rows *start* to *stop* into at most three boxes: a head's end, heads, a head's start."""
    tokens = shape[1]
    at = start
    while at < stop:
        head, token = divmod(at, tokens)
        heads = (stop - at) // tokens if token == 0 else 0
        if heads:
            box, until = (slice(head, head + heads), slice(None)), at + heads * tokens
        else:
            until = min(stop, (head + 1) * tokens)
            box = (slice(head, head + 1), slice(token, token + until - at))
        yield box, at - start, until - start
        at = until
