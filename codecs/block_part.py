"""Tensors that lie in blocks of an engine's cache: a BlockPart is one of one layer of a chunk, a
BlockStack all layers of a component.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray
from typing_extensions import override

from kvstore.proto.buffers import LOOP_UNIT_BYTES, Bytes
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


BLOCK_ROW = 8
"""Numbers of a row of ``scatter_summed``, proto/native/sums.c: where to, from where, how many
units, the size of its group for the last of one, the group's sum; tokens, width and item bytes of
what the block has turned, else 0."""
ROW_SUM = 4


def block_rows(
    layers: Sequence[Sequence[NDArray[Any] | BlockPart]], frame: Bytes, starts: Sequence[int]
) -> NDArray[np.uint64] | None:
    """Return the rows by which a compiled loop copies *layers* out of a raw *frame*: uint64 of
    (layers, parts, heads, blocks, BLOCK_ROW).

    A layer begins at its entry of *starts*. None where they do not all lie in whole blocks of one
    shape and order, in which tokens, or elements, follow each other in units of the loop.
    """
    first = layers[0] if layers else ()
    turned = [_is_turned(part) for part in first]
    if not turned or None in turned:
        return None
    span, pages = first[0].span, first[0].pages  # type: ignore[union-attr]
    blocks, heads, tokens, width = pages.shape
    orders = [part.pages.strides for part in first]  # type: ignore[union-attr]
    bases = []
    for layer in layers:
        for part, order in zip(layer, orders, strict=True):
            if not isinstance(part, BlockPart) or part.span is not span:
                return None
            is_alike = part.pages.shape == pages.shape and part.pages.strides == order
            if not (is_alike and part.pages.flags.writeable):
                return None  # where it may not be written, numpy refuses it
            bases.append(part.pages.__array_interface__["data"][0])
    item, named = pages.itemsize, span.scattered[0].blocks
    ids = np.arange(named.start, named.stop) if isinstance(named, slice) else named
    if ids.min() < 0 or ids.max() >= blocks or len({order[:2] for order in orders}) > 1:
        return None
    block_bytes, layer_rows = tokens * width * item, len(first) * heads * len(ids)
    if max(starts) + layer_rows * block_bytes > len(frame) or frame.strides != (1,):
        return None  # to be refused by who takes it layer by layer
    rows = np.zeros((len(layers), len(first), heads, len(ids), BLOCK_ROW), np.uint64)
    within = np.arange(heads)[:, None] * orders[0][1] + ids * orders[0][0]
    rows[..., 0] = np.add.outer(bases, within).reshape(rows.shape[:-1])
    origins = np.array(starts) + frame.ctypes.data
    rows[..., 1] = np.add.outer(origins, np.arange(layer_rows) * block_bytes).reshape(
        rows.shape[:-1]
    )
    rows[..., 2] = block_bytes // LOOP_UNIT_BYTES
    rows[:, -1, -1, -1, 3] = layer_rows * block_bytes
    for at, is_turned in enumerate(turned):
        if is_turned:
            rows[:, at, ..., 5:] = tokens, width, item
    return rows


def _is_turned(part: NDArray[Any] | BlockPart) -> bool | None:
    """Return whether the elements of the tokens of *part* follow each other, and not its tokens.

    None where it is not in whole blocks, or neither does, or blocks are no units of the loop.
    """
    if not isinstance(part, BlockPart):
        return None
    _, _, tokens, width = part.pages.shape
    item, order, pieces = part.pages.itemsize, part.pages.strides[2:], part.span.scattered
    is_whole = len(pieces) == 1 and pieces[0].slots == slice(None)
    if not is_whole or item not in (1, 2, 4) or tokens * width * item % LOOP_UNIT_BYTES:
        return None
    is_turned = order == (item, tokens * item)
    return is_turned if is_turned or order == (width * item, item) else None


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


class BlockStack(Sequence[list[BlockPart]]):
    """Layers of which each has its tokens in the same blocks, one after another.

    *parts*: K and V, or latents, each (layers, blocks, kv_heads, block_tokens, head_dim), any
    strides. A copy of all layers is one call for each part: whoever shares the interpreter with
    the thread that copies is held up by every call.
    """

    def __init__(self, parts: Sequence[NDArray[Any]]) -> None:
        """Raises LayoutMismatchError unless the parts have one shape of five dimensions."""
        shapes = {part.shape for part in parts}
        if len(shapes) != 1 or any(len(shape) != 5 for shape in shapes):
            fix = "give parts of one (layers, blocks, kv_heads, block_tokens, head_dim)"
            raise LayoutMismatchError("parts", sorted(shapes), fix)
        ((layers, blocks, _, tokens, _),) = shapes
        span = BlockSpan.of(np.arange(blocks), tokens, 0, blocks * tokens)
        self._parts = tuple(parts)
        self._layers = [[BlockPart(part[at], span) for part in parts] for at in range(layers)]

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, at: int) -> list[BlockPart]: ...

    @overload
    def __getitem__(self, at: slice) -> list[list[BlockPart]]: ...

    @override
    def __getitem__(self, at: int | slice) -> list[BlockPart] | list[list[BlockPart]]:
        return self._layers[at]

    @override
    def __iter__(self) -> Iterator[list[BlockPart]]:
        return iter(self._layers)

    def gather(self, room: NDArray[np.uint8]) -> None:
        """Fill *room* with the layers as a raw frame has them, their parts one after another."""
        layers, blocks, heads, tokens, width = self._parts[0].shape
        shape = layers, len(self._parts), heads, blocks, tokens, width
        typed = room.view(f"<u{self._parts[0].itemsize}").reshape(shape)
        for number, part in enumerate(self._parts):
            np.copyto(typed[:, number], part.swapaxes(1, 2))
