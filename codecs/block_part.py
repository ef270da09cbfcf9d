"""Tensors in blocks of an engine's cache: a BlockPart is one tensor of a layer of a chunk,
BlockLayers are all layers of a component, and a BlockStack layers in one array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

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
    """The slots and blocks of a chunk's tokens, cut into pieces for numpy.

    ``scattered`` has the fewest pieces that can be assigned to; ``gathered`` has only runs of
    adjacent blocks, which are read without a copy.
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
    """Yield a piece for each run of adjacent blocks."""
    ids = block_ids.tolist()  # faster than numpy calls for a chunk's few blocks
    first = 0
    for last, block in enumerate(ids):
        if last + 1 == len(ids) or ids[last + 1] != block + 1:
            stop = at + (last + 1 - first) * block_tokens
            yield Piece(at, stop, slice(ids[first], block + 1), slice(None))
            first, at = last + 1, stop


@dataclass(frozen=True, slots=True, eq=False)
class BlockPart:
    """A tensor of (kv_heads, tokens, head_dim) in blocks. Codecs fill it and read from it.

    ``pages``: (blocks, kv_heads, block_tokens, head_dim), any strides. Only the span's slots are
    accessed.
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
        is_transposed = self.pages.strides[2] < self.pages.strides[3]
        for piece in self.span.scattered:
            ours = self._in_blocks(part, piece)
            # One numpy call, without the interpreter lock. It iterates in the order of its
            # destination, so for transposed pages both sides are transposed.
            if is_transposed:
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
"""Numbers of a row of ``scatter_summed``, proto/native/sums.c: destination, source, units, size of
the group in its last row, the group's sum; tokens, width and item bytes if the block is transposed,
else 0."""
ROW_SUM = 4


class Alike(NamedTuple):
    """Layout of layers whose parts lie in arrays of one shape and order, for ``block_rows``.

    ``heads``: address of each head of each part, (layers, parts, heads, 1). ``transposed``: for
    each part whether it is transposed, with tokens as the innermost dimension.
    """

    shape: tuple[int, ...]
    item_bytes: int
    block_step: int
    heads: NDArray[np.int64]
    transposed: tuple[bool, ...]

    @classmethod
    def of(cls, layers: Sequence[Sequence[NDArray[Any]]]) -> Alike | None:
        """Return the layout of the pages of *layers*; None if no compiled loop can copy to them."""
        first = layers[0] if layers else ()
        transposed = [_is_transposed(pages) for pages in first]
        orders = [pages.strides for pages in first]
        if not first or None in transposed or len({order[:2] for order in orders}) > 1:
            return None
        shape, bases = first[0].shape, list[int]()
        for layer in layers:
            for pages, order in zip(layer, orders, strict=True):
                is_alike = pages.shape == shape and pages.strides == order
                is_alike = is_alike and pages.dtype == first[0].dtype
                if not (is_alike and pages.flags.writeable):
                    return None  # numpy refuses read-only pages
                bases.append(pages.__array_interface__["data"][0])
        block_step, head_step = orders[0][:2]
        starts = np.array(bases, np.int64).reshape(len(layers), len(first), 1, 1)
        heads = starts + np.arange(shape[1])[:, None] * head_step
        is_transposed = tuple(map(bool, transposed))
        return cls(shape, first[0].itemsize, block_step, heads, is_transposed)


class BlockLayers(Sequence[list[BlockPart]]):
    """Layers with a chunk in the same blocks, those of *span*; *alike* is their layout or None.

    The layout is computed once for an engine: for every chunk it would cost as much as the copy.
    *pages*: those of each part of each layer.
    """

    def __init__(
        self, pages: Sequence[Sequence[NDArray[Any]]], alike: Alike | None, span: BlockSpan
    ) -> None:
        self.alike = alike
        self.span = span
        self._pages = pages

    def __len__(self) -> int:
        return len(self._pages)

    @override
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[index] for index in range(len(self))[at]]
        return [BlockPart(one, self.span) for one in self._pages[at]]


class BlockStack(BlockLayers):
    """Layers in one array per part.

    *parts*: K and V, or latents, each (layers, blocks, kv_heads, block_tokens, head_dim), any
    strides. A copy of all layers is one call per part, as every call delays the interpreter's other
    threads.
    """

    def __init__(self, parts: Sequence[NDArray[Any]]) -> None:
        """Raise LayoutMismatchError unless the parts have one shape of five dimensions."""
        shapes = {part.shape for part in parts}
        if len(shapes) != 1 or any(len(shape) != 5 for shape in shapes):
            fix = "give parts of one (layers, blocks, kv_heads, block_tokens, head_dim)"
            raise LayoutMismatchError("parts", sorted(shapes), fix)
        ((_, blocks, _, tokens, _),) = shapes
        span = BlockSpan.of(np.arange(blocks), tokens, 0, blocks * tokens)
        pages = list(zip(*parts, strict=True))
        super().__init__(pages, Alike.of(pages), span)
        self._parts = tuple(parts)

    def gather(self, out: NDArray[np.uint8]) -> None:
        """Fill *out* with the layers in the order of a raw frame, part after part."""
        layers, blocks, heads, tokens, width = self._parts[0].shape
        shape = layers, len(self._parts), heads, blocks, tokens, width
        typed = out.view(f"<u{self._parts[0].itemsize}").reshape(shape)
        for number, part in enumerate(self._parts):
            np.copyto(typed[:, number], part.swapaxes(1, 2))


def block_rows(
    layers: Sequence[Sequence[NDArray[Any] | BlockPart]], frame: Bytes, starts: Sequence[int]
) -> NDArray[np.uint64] | None:
    """Return the rows for a compiled loop that copies *layers* out of a raw *frame*: uint64 of
    (layers, parts, heads, blocks, BLOCK_ROW).

    A layer begins at its entry of *starts*. None unless all lie in whole blocks of one shape and
    order, contiguous by tokens or by elements, in multiples of the loop's unit.
    """
    if isinstance(layers, BlockLayers):
        alike, span = layers.alike, layers.span
    else:
        parts = [part for layer in layers for part in layer if isinstance(part, BlockPart)]
        if not parts or len(parts) < sum(map(len, layers)) or len({id(p.span) for p in parts}) > 1:
            return None
        alike, span = Alike.of([[part.pages for part in layer] for layer in layers]), parts[0].span  # type: ignore[union-attr]
    if alike is None or len(span.scattered) != 1 or span.scattered[0].slots != slice(None):
        return None
    blocks, heads, tokens, width = alike.shape
    named = span.scattered[0].blocks
    ids = np.arange(named.start, named.stop) if isinstance(named, slice) else named
    if ids.min() < 0 or ids.max() >= blocks:
        return None
    block_bytes = tokens * width * alike.item_bytes
    layer_rows = len(alike.transposed) * heads * len(ids)
    if max(starts) + layer_rows * block_bytes > len(frame) or frame.strides != (1,):
        return None  # the copy layer by layer raises
    rows = np.zeros((len(layers), len(alike.transposed), heads, len(ids), BLOCK_ROW), np.uint64)
    rows[..., 0] = alike.heads + ids * alike.block_step
    origins = np.array(starts) + frame.ctypes.data
    steps = np.arange(0, layer_rows * block_bytes, block_bytes)
    rows[..., 1] = (origins[:, None] + steps).reshape(rows.shape[:-1])
    rows[..., 2] = block_bytes // LOOP_UNIT_BYTES
    rows[:, -1, -1, -1, 3] = layer_rows * block_bytes
    for at, is_transposed in enumerate(alike.transposed):
        if is_transposed:
            rows[:, at, ..., 5:] = tokens, width, alike.item_bytes
    return rows


def _is_transposed(pages: NDArray[Any]) -> bool | None:
    """Return whether *pages* are transposed, with tokens as the innermost dimension.

    None if neither order is contiguous, or blocks are no multiples of the loop's unit.
    """
    _, _, tokens, width = pages.shape
    item, order = pages.itemsize, pages.strides[2:]
    if item not in (1, 2, 4) or tokens * width * item % LOOP_UNIT_BYTES:
        return None
    is_transposed = order == (item, tokens * item)
    return is_transposed if is_transposed or order == (width * item, item) else None


def to_dense(part: NDArray[Any] | BlockPart) -> NDArray[Any]:
    """Return *part* as one array: itself, or a copy of its blocks."""
    if not isinstance(part, BlockPart):
        return part
    dense = np.empty(part.shape, part.dtype)
    part.gather(dense)
    return dense


def check_block_ids(block_ids: Sequence[int], blocks: int) -> NDArray[np.intp]:
    """Return *block_ids* as an index. Raises InvalidRequestError unless all are below *blocks* and
    distinct.
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
