"""A RectangleRoom: where what one rank needs of each chunk goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.client.rectangle import Rectangle
from kvstore.proto.portion import Portion
from kvstore.proto.types import KVLayout, Representation


class RectangleRoom:
    """A Room for chunks of which only *rectangle* is read: *room* is asked for those layouts."""

    def __init__(
        self,
        room: Callable[[int, KVLayout], Any],
        rectangle: Rectangle,
        representation: Representation,
    ) -> None:
        self._room = room
        self._rectangle = rectangle
        self._representation = representation

    def portion(self, layout: KVLayout) -> Portion:
        """Return what is read of a chunk of *layout*. Raises LayoutMismatchError."""
        return self._rectangle.portion(self._representation, layout)

    def __call__(self, index: int, layout: KVLayout) -> Any:
        """Return where the tensors of chunk number *index* go, which as a whole has *layout*."""
        return self._room(index, self.portion(layout).layout)
