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
from typing_extensions import override

from kvstore.tiers.redis_fill import FILL_WINDOW, MAX_FILL_WINDOW, Fill, FillTalk
from kvstore.tiers.redis_lines import Lines
from kvstore.tiers.redis_reply import MovedError, MovingError, Reply, SlotLostError
from kvstore.tiers.redis_row import Rows
from kvstore.tiers.redis_wire import AskTalk, Command, Talk

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
        self._borrow(deadline)
        count = len(self._held)
        self.talks = [self._talk(line, at, count) for at, line in enumerate(self._held)]

    def _borrow(self, deadline: float) -> None:
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

    def close(self) -> None:
        """Give the connections back, and keep why a talk failed."""
        for line, talk in zip_longest(self._held, self.talks):
            # With half a command on it, a line is of no use to the next.
            is_clean = talk is not None and talk.is_done and not talk.is_sending and not talk.error
            self._give_back(line, is_clean=is_clean)
            if talk is not None and self.error is None:
                self.error = talk.error
        self._held.clear()

    def _give_back(self, line: socket, *, is_clean: bool) -> None:
        self.lines.give_back(line, is_clean=is_clean)

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

    @override
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
    """A Fill; what brings payload is dealt to all connections.

    *rows* keep the connection on which the next fill has been asked for.
    """

    def __init__(self, lines: Lines, fill: Fill, rows: Rows) -> None:
        super().__init__(lines, fill.payload_bytes)
        self._fill = fill
        self._rows = rows
        self._asked = 0
        self._fill_talks: list[FillTalk] = []

    @override
    def _borrow(self, deadline: float) -> None:
        kept = self._rows.take(self.lines, self._fill.steps)
        if kept is None:
            super()._borrow(deadline)
        else:
            line, self._asked = kept
            self._held.append(line)

    @override
    def _talk(self, sock: socket, share: int, shares: int) -> FillTalk:
        fill = self._fill if shares == 1 else self._fill.share(share, shares)
        window = self.lines.slices_ahead(FILL_WINDOW, MAX_FILL_WINDOW)
        talk = FillTalk(sock, fill, self._asked, window)
        self._fill_talks.append(talk)
        return talk

    @override
    def _give_back(self, line: socket, *, is_clean: bool) -> None:
        asked = self._fill_talks[0].asked_ahead if is_clean else 0
        if asked:
            self._rows.keep(self.lines, line, self._fill.ahead[:asked])
        else:
            super()._give_back(line, is_clean=is_clean)

    @override
    def close(self) -> None:
        super().close()
        for talk in self._fill_talks:
            if talk.first_s is not None:
                self.lines.note_first(talk.first_s)

    @property
    @override
    def is_unsent(self) -> bool:
        """As of any exchange; but what somebody was told has come is not asked for again."""
        return super().is_unsent and not self._is_told

    @property
    def is_stale(self) -> bool:
        """Whether the line was kept from the fill before, and was gone when it was to be used."""
        is_gone = isinstance(self.error, OSError) or type(self.error) is ConnectionError
        return is_gone and self._asked > 0 and not self._fill_talks[0].filled_bytes

    @property
    def _is_told(self) -> bool:
        arrived = self._fill.arrived if len(self._fill_talks) == 1 else None
        return arrived is not None and self._fill_talks[0].filled_bytes > 0
