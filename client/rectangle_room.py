"""A RectangleRoom: where what one rank needs of each chunk goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.client.rectangle import Rectangle
from kvstore.proto.types import KVLayout, Model, Shard


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

    def behind(self, first: int) -> RectangleRoom:
        """Return the same for a get whose first chunk is number *first* here."""

        def room(index: int, layout: KVLayout) -> Any:
            return self._room(first + index, layout)

        return RectangleRoom(room, self._rectangle, self._representation)

    def __call__(self, index: int, layout: KVLayout) -> Any:
        """Return where the tensors of chunk number *index* go, which as a whole has *layout*."""
        return self._room(index, self.shard(layout).layout)
