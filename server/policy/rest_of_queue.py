"""What is left of a queue while its rows are named as victims, and nothing has changed yet."""

from __future__ import annotations

from kvstore.proto.key_table import NO_ROW
from kvstore.server.policy.class_queues import ClassQueues


class RestOfQueue:
    """What is left of a class: its queue from both ends on, and who was bared since."""

    __slots__ = ("_queues", "_walk", "bared", "first", "last")

    def __init__(self, queues: ClassQueues, kind: int) -> None:
        self._queues = queues
        self._walk = queues.walk(kind) if queues.has_late(kind) else None
        self.first = queues.head(kind) if self._walk is None else next(self._walk, NO_ROW)
        self.last = queues.tail(kind)
        self.bared: list[tuple[int, int]] = []
        """In the order of use."""

    def skip(self, taken: set[int]) -> None:
        """Let the first be one that was not taken."""
        while self.first in taken:
            walk = self._walk
            self.first = self._queues.after(self.first) if walk is None else next(walk, NO_ROW)

    def skip_back(self, taken: set[int]) -> None:
        """Let the last be one that was not taken."""
        while self.last in taken:
            self.last = self._queues.before(self.last)
