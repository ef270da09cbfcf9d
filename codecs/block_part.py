"""A BlockPart: one tensor of one layer of a chunk that lies in blocks of an engine's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError

Index: TypeAlias = "slice | NDArray[np.intp]"


class Piece(NamedTuple):
    """Tokens start:stop of a chunk: slots *slots* of each of *blocks*, one block after another."""

    start: int
    stop: int
    blocks: Index
    slots: slice


@dataclass(frozen=True, slots=True, eq=False)
class BlockSpan:
    """Which slots of which blocks a chunk's tokens are in, cut into pieces for numpy.

    ``scattered`` has as few pieces as can be assigned to; ``gathered`` has runs of neighbours
    only, which are read without a copy.
    """

    tokens: int
    block_tokens: int
    scattered: tuple[Piece, ...]
    gathered: tuple[Piece, ...]

    @classmethod
    def of(cls, block_ids: NDArray[np.intp], block_tokens: int, start: int, stop: int) -> BlockSpan:
        """Return the span of tokens *start* to *stop* of a request in the blocks *block_ids*.

        Token t is in block ``block_ids[t // block_tokens]``. Raises InvalidRequestError when
        there are too few blocks.
        """
        if not 0 <= start < stop <= len(block_ids) * block_tokens:
            raise InvalidRequestError(
                "block_ids", len(block_ids),
                f"tokens {start} to {stop} do not fit that many blocks of {block_tokens}",
            )  # fmt: skip
        scattered: list[Piece] = []
        gathered: list[Piece] = []
        first_whole, last_whole = -(-start // block_tokens), stop // block_tokens
        if first_whole > last_whole:  # all within one block
            edges = [(start, stop)]
        else:
            edges = [(start, first_whole * block_tokens), (last_whole * block_tokens, stop)]
            body = block_ids[first_whole:last_whole]
            at = first_whole * block_tokens - start
            gathered = list(_runs(body, at, block_tokens))
            if len(gathered) > 1:
                scattered = [Piece(at, at + len(body) * block_tokens, body, slice(None))]
            else:
                scattered = gathered.copy()
        for low, high in edges:
            if low < high:
                block, slot = int(block_ids[low // block_tokens]), low % block_tokens
                slots = slice(slot, slot + high - low)
                piece = Piece(low - start, high - start, slice(block, block + 1), slots)
                scattered.append(piece)
                gathered.append(piece)
        return cls(stop - start, block_tokens, tuple(scattered), tuple(gathered))


def _runs(block_ids: NDArray[np.intp], at: int, block_tokens: int) -> Iterator[Piece]:
    """Yield a piece for each run of blocks that follow each other in memory."""
    breaks = np.flatnonzero(np.diff(block_ids) != 1) + 1
    for run in np.split(block_ids, breaks):
        if len(run):
            stop = at + len(run) * block_tokens
            yield Piece(at, stop, slice(int(run[0]), int(run[-1]) + 1), slice(None))
            at = stop


@dataclass(frozen=True, slots=True, eq=False)
class BlockPart:
    """A tensor of (kv_heads, tokens, head_dim) in blocks. Codecs fill it and read from it.

    ``pages``: (blocks, kv_heads, block_tokens, head_dim), any strides. Nothing but the span's
    slots is touched.
    """

    pages: NDArray[Any]
    span: BlockSpan

    def __post_init__(self) -> None:
        if self.pages.ndim != 4 or self.pages.shape[2] != self.span.block_tokens:
            raise LayoutMismatchError(
                "pages", self.pages.shape,
                f"give (blocks, kv_heads, {self.span.block_tokens}, head_dim)",
            )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int, int]:
        """(kv_heads, tokens, head_dim)."""
        return (self.pages.shape[1], self.span.tokens, self.pages.shape[3])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""
        return self.pages.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        heads, tokens, head_dim = self.shape
        return heads * tokens * head_dim * self.pages.itemsize

    def view(self, dtype: DTypeLike) -> BlockPart:
        """Return the same slots as elements of another type of the same size."""
        return BlockPart(self.pages.view(dtype), self.span)

    def __getitem__(self, heads: slice) -> BlockPart:
        """Return some of the heads."""
        return BlockPart(self.pages[:, heads], self.span)

    def scatter(self, part: NDArray[Any]) -> None:
        """Copy *part*, a tensor of this shape and type, into the blocks."""
        is_turned = self.pages.strides[2] < self.pages.strides[3]
        for piece in self.span.scattered:
            ours = self._in_blocks(part, piece)
            # numpy lets go of the interpreter lock and goes block by block, in one call. It goes
            # by the order of what it writes to: where that is turned, so is what it is told.
            if is_turned:
                self.pages.swapaxes(2, 3)[piece.blocks, :, :, piece.slots] = ours.swapaxes(2, 3)
            else:
                self.pages[piece.blocks, :, piece.slots] = ours

    def gather(self, part: NDArray[Any]) -> None:
        """Fill *part*, a tensor of this shape and type, from the blocks."""
        for piece in self.span.gathered:
            np.copyto(self._in_blocks(part, piece), self.pages[piece.blocks, :, piece.slots])

    def _in_blocks(self, part: NDArray[Any], piece: Piece) -> NDArray[Any]:
        """Return the piece's tokens of *part* as (blocks, kv_heads, slots, head_dim)."""
        heads, _, head_dim = part.shape
        tokens = piece.stop - piece.start
        slots = min(self.span.block_tokens, tokens)
        cut = part[:, piece.start : piece.stop]
        return cut.reshape(heads, tokens // slots, slots, head_dim).swapaxes(0, 1)


def to_dense(part: NDArray[Any] | BlockPart) -> NDArray[Any]:
    """Return *part* as one array: itself, or a copy of what lies in blocks."""
    if not isinstance(part, BlockPart):
        return part
    dense = np.empty(part.shape, part.dtype)
    part.gather(dense)
    return dense


def check_block_ids(block_ids: Sequence[int], blocks: int) -> NDArray[np.intp]:
    """Return *block_ids* as an index. Raises InvalidRequestError unless all are of *blocks*
    blocks, each there once.
    """
    try:
        ids = np.asarray(block_ids)
    except (TypeError, ValueError):
        raise InvalidRequestError("block_ids", block_ids, "give a flat list of numbers") from None
    if isinstance(block_ids, Sequence) and bool in set(map(type, block_ids)):
        raise InvalidRequestError("block_ids", "bool", "give a flat list of numbers")
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise InvalidRequestError("block_ids", str(ids.dtype), "give a flat list of numbers")
    ids = ids.astype(np.intp)
    if len(ids) and not (ids.min() >= 0 and ids.max() < blocks):
        raise InvalidRequestError(
            "block_ids", (int(ids.min()), int(ids.max())), f"the pages have {blocks} blocks"
        )
    if len(np.unique(ids)) != len(ids):
        raise InvalidRequestError("block_ids", len(ids), "name each block once")
    return ids
