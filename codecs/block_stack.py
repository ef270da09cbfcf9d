"""A BlockStack: the layers of a component that lie in blocks of one array, to be copied at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.codecs.block_part import BlockPart, BlockSpan
from kvstore.proto.errors import LayoutMismatchError


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
