"""A RectangleRoom: where what one rank needs of each chunk goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.client.rectangle import Rectangle
from kvstore.proto.types import END_KINDS, KVLayout, Model, Shard


class RectangleRoom:
    """A Room for chunks of which only *rectangle* is read: *room* is asked for those layouts."""

    def __init__(
        self,
        room: Callable[[int, KVLayout], Any],
        rectangle: Rectangle,
        representation: Model,
    ) -> None:
        self._room = room
        self._rectangle = rectangle
        self._representation = representation

    def shard(self, layout: KVLayout) -> Shard:
        """Return what is read of a chunk of *layout*. Raises LayoutMismatchError."""
        return self._rectangle.shard(self._representation, layout)

    def usual_shard(self, chunk_tokens: int) -> Shard | None:
        """Return what is read of a chunk of *chunk_tokens*, if that leaves out some layers.

        None also for models whose chunks do not all have the same layers.
        """
        groups = self._representation.layer_groups
        if self._rectangle.layers is None or any(group.kind in END_KINDS for group in groups):
            return None
        shard = self.shard(KVLayout.of(self._representation, chunk_tokens))
        is_all = shard.layout.segment_count == shard.whole.segment_count
        return None if is_all else shard

    def behind(self, first: int) -> RectangleRoom:
        """Return the same for a get whose first chunk is number *first* here."""

        def room(index: int, layout: KVLayout) -> Any:
            return self._room(first + index, layout)

        return RectangleRoom(room, self._rectangle, self._representation)

    def __call__(self, index: int, layout: KVLayout) -> Any:
        """Return where the tensors of chunk number *index* go, which as a whole has *layout*."""
        return self._room(index, self.shard(layout).layout)
