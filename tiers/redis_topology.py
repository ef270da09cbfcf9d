"""Which server holds a key: what every kind of deployment of Redis has to say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from redis.exceptions import RedisError

from kvstore.tiers.redis_lines import Lines
from kvstore.tiers.redis_open import LineOptions
from kvstore.tiers.redis_reply import Reply
from kvstore.tiers.redis_url import RedisUrl
from kvstore.tiers.redis_wire import AskTalk, Command, converse

MAX_ANSWER_BYTES = 1 << 20


class Topology(ABC):
    """The servers behind one URL. Thread-safe."""

    moves: ClassVar[bool] = False
    """Whether another server may come to hold a key."""

    def has_others(self) -> bool:
        """Whether servers that hold other keys go on when one fails."""
        return False

    @abstractmethod
    def lines_of(self, name: bytes, deadline: float) -> Lines:
        """Return the connections to the server of the key called *name*. Raises redis' errors."""

    @abstractmethod
    def masters(self, deadline: float) -> list[Lines]:
        """Return the connections to each server that holds keys."""

    @abstractmethod
    def note_failure(self, lines: Lines, error: Exception) -> None:
        """Take note that a server failed, or sent us elsewhere."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect. Idempotent."""


class SingleServer(Topology):
    """One server that holds everything."""

    def __init__(self, url: RedisUrl, options: LineOptions) -> None:
        self._lines = Lines(url.hosts[0], options)

    def lines_of(self, name: bytes, deadline: float) -> Lines:
        """Return the connections to the server."""
        return self._lines

    def masters(self, deadline: float) -> list[Lines]:
        """Return the server."""
        return [self._lines]

    def note_failure(self, lines: Lines, error: Exception) -> None:
        """Do nothing: there is no other server."""

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._lines.close()


def ask(
    lines: Lines, commands: Sequence[Command], deadline: float, silence_s: float
) -> list[Reply]:
    """Send *commands* to one server and return the replies; the first error is raised."""
    line = lines.borrow(deadline)
    talk = AskTalk(line, commands, MAX_ANSWER_BYTES)
    try:
        converse([talk], deadline, silence_s)
    finally:
        lines.give_back(line, is_clean=talk.is_done and talk.error is None)
    if talk.error is not None:
        raise talk.error
    for reply in talk.replies:
        if isinstance(reply, RedisError):
            raise reply
    return talk.replies
