"""Where a chunk that is loaded goes: the engine's blocks, as far as they are to be written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.client.engines.vllm_layout import NULL_BLOCK, EnginePages, LayerPages
from kvstore.codecs.base import AnyPart, AnyTensors, Part
from kvstore.proto.errors import LayoutMismatchError
from kvstore.proto.types import END_KINDS, Component, KVLayout


class ChunkRoom:
    """Room for one chunk in an engine's *pages*.

    *tables*: the blocks of the chunk in each of the request's block tables. The first
    *kept_blocks* of them hold what the engine found in its own cache, and may be in use: they are
    not written to, nor are null blocks. What has to go elsewhere for that goes beside, and is
    brought in by ``settle``.
    """

    def __init__(
        self, pages: EnginePages, tables: Sequence[Sequence[int]], kept_blocks: int = 0
    ) -> None:
        self._pages = pages
        self._ids = [np.array(table, np.intp) for table in tables]
        for ids in self._ids:
            ids[:kept_blocks] = NULL_BLOCK
        self._beside: list[tuple[LayerPages, list[Part]]] = []

    def tensors(self, layout: KVLayout) -> AnyTensors:
        """Return where the tensors of the chunk, which is of *layout*, go.

        Raises LayoutMismatchError when it does not have what this load needs of it.
        """
        tokens = len(self._ids[0]) * self._pages.shape.block_tokens
        if layout.tokens != tokens:
            raise LayoutMismatchError("tokens", layout.tokens, f"give {tokens}")
        self._beside.clear()  # of a read that was begun again
        components = iter([*layout.components, None])
        component = next(components)
        found = []
        for group, layers in zip(self._pages.shape.groups, self._pages.groups, strict=True):
            is_wanted = group.kind not in END_KINDS or any(
                self._ids[layer.table].any() for layer in layers
            )
            if component is not None and component.kind is group.kind:
                found.append([self._layer(one, component) for one in layers if is_wanted])
                component = next(components)
            elif is_wanted:
                raise LayoutMismatchError("layout", group.kind.name, "the chunk is without it")
        return found

    def _layer(self, layer: LayerPages, component: Component) -> list[AnyPart]:
        ids = self._last(layer, component.tokens)
        if self._ids[layer.table][: -len(ids)].any():
            fix = "the engine wants more of it than a chunk has"
            raise LayoutMismatchError("tokens", component.tokens, fix)
        if ids.all():
            return list(layer.blocks(ids.tolist()))
        beside = [_empty(component) for _ in range(component.parts)]
        self._beside.append((layer, beside))
        return list(beside)

    def _last(self, layer: LayerPages, tokens: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        ids = self._ids[layer.table]
        return ids[len(ids) - tokens // layer.parts[0].shape[2] :]

    def settle(self) -> None:
        """Bring in what was read beside the blocks. Call once, when the chunk has been read."""
        for layer, beside in self._beside:
            tokens = layer.parts[0].shape[2]
            ids = self._last(layer, beside[0].shape[1])
            for part, found in zip(layer.parts, beside, strict=True):
                for at in np.flatnonzero(ids):
                    part[ids[at]] = found[:, at * tokens : (at + 1) * tokens]


def _empty(component: Component) -> Part:
    return np.empty(component.shape, f"u{component.dtype.item_bytes}")
