"""What one call has to say to one server: over one connection, or a few when it is much."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from socket import socket

from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    ReadOnlyError,
    TimeoutError,
)

from kvstore.tiers.redis_lines import Lines
from kvstore.tiers.redis_reply import MovedError, MovingError, Reply, SlotLostError
from kvstore.tiers.redis_wire import AskTalk, Command, FillTalk, Step, Talk

LINES_PER_CALL = 4
"""Connections that one large call uses, as far as they are free."""
SHARE_BYTES = 8 << 20
"""Payload that is worth a connection of its own: fewer cost Redis less (see benchmarks.md)."""
MAX_REPLY_BYTES = 16 << 10
"""Limit of the mean reply to a command whose reply is parsed."""

ELSEWHERE = (
    MovedError, MovingError, ReadOnlyError, BusyLoadingError, ClusterDownError, SlotLostError,
)  # fmt: skip
"""A server that answers with one of these did nothing of what it was asked."""
UNREACHED = (OSError, ConnectionError, TimeoutError, SlotLostError)
"""Why a server could not be asked."""


class Exchange(ABC):
    """One server's part of a call. ``error`` is why it failed, if it did."""

    def __init__(self, lines: Lines, size_bytes: int) -> None:
        self.lines = lines
        self.error: Exception | None = None
        self.talks: list[Talk] = []
        self._size_bytes = size_bytes
        self._held: list[socket] = []

    @abstractmethod
    def _talk(self, sock: socket, share: int, shares: int) -> Talk:
        """Return the talk on the *share*-th of *shares* connections."""

    def open(self, deadline: float) -> None:
        """Take connections."""
        try:
            self._held.append(self.lines.borrow(deadline))
        except UNREACHED as error:
            self.error = error
            return
        most = min(LINES_PER_CALL, self._size_bytes // SHARE_BYTES)
        with suppress(*UNREACHED):
            while len(self._held) < most:
                spare = self.lines.borrow_spare(deadline)
                if spare is None:
                    break
                self._held.append(spare)
        count = len(self._held)
        self.talks = [self._talk(line, at, count) for at, line in enumerate(self._held)]

    def close(self) -> None:
        """Give the connections back, and keep why a talk failed."""
        for line, talk in zip_longest(self._held, self.talks):
            is_clean = talk is not None and talk.is_done and talk.error is None
            self.lines.give_back(line, is_clean=is_clean)
            if talk is not None and self.error is None:
                self.error = talk.error
        self._held.clear()

    @property
    def is_unsent(self) -> bool:
        """Whether the server was asked nothing, or did nothing of what it was asked."""
        return not self.talks or isinstance(self.error, ELSEWHERE)


class Asking(Exchange):
    """Numbered commands whose replies are parsed. Small ones are carried out in order."""

    def __init__(
        self, lines: Lines, commands: Sequence[tuple[int, Command]], reply_bytes: int
    ) -> None:
        size_bytes = sum(
            len(argument)
            for _, command in commands
            for argument in command
            if isinstance(argument, memoryview)
        )
        super().__init__(lines, size_bytes)
        self.commands = commands
        self._reply_bytes = reply_bytes
        self._asked: list[tuple[AskTalk, Sequence[tuple[int, Command]]]] = []

    def _talk(self, sock: socket, share: int, shares: int) -> AskTalk:
        part = self.commands[share::shares]
        limit_bytes = self._reply_bytes * len(part)
        talk = AskTalk(sock, [command for _, command in part], limit_bytes)
        self._asked.append((talk, part))
        return talk

    def replies(self) -> Iterator[tuple[int, Reply]]:
        """Yield each command's number and reply."""
        for talk, part in self._asked:
            yield from zip((number for number, _ in part), talk.replies, strict=True)


class Filling(Exchange):
    """Steps with known replies; those that bring payload are dealt to all connections."""

    def __init__(self, lines: Lines, steps: Sequence[Step]) -> None:
        super().__init__(lines, sum(len(step.room) for step in steps if step.room is not None))
        self._steps = steps

    def _talk(self, sock: socket, share: int, shares: int) -> FillTalk:
        mine = [
            step
            for at, step in enumerate(self._steps)
            if (at % shares if step.room is not None else 0) == share
        ]
        return FillTalk(sock, mine)
