"""The master that Sentinels name, and the one they name after it."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import ClassVar

import structlog
from redis.exceptions import ConnectionError, RedisError

from kvstore.tiers.redis_lines import Lines
from kvstore.tiers.redis_open import LineOptions
from kvstore.tiers.redis_reply import Reply
from kvstore.tiers.redis_topology import Topology, ask
from kvstore.tiers.redis_url import HostPort, RedisUrl

logger = structlog.get_logger(__name__)


class SentinelMaster(Topology):
    """The master of one service, as the Sentinels name it (redis.io, Sentinel clients).

    They are asked again after each failure of the master, one after the other, the one that
    answered last first.
    """

    moves: ClassVar[bool] = True

    def __init__(self, url: RedisUrl, options: LineOptions) -> None:
        self._service = url.service
        self._options = options
        own = replace(options, login=url.sentinel_login, database=0, limit=1)
        self._sentinels = [Lines(address, own) for address in url.hosts]
        # Guards the fields below and the order of _sentinels; never held over a question.
        self._lock = threading.Lock()
        self._master: Lines | None = None
        self._is_trusted = False

    def lines_of(self, name: bytes, deadline: float) -> Lines:
        """Return the connections to the master."""
        with self._lock:
            if self._master is not None and self._is_trusted:
                return self._master
        return self._adopt(self._discover(deadline))

    def masters(self, deadline: float) -> list[Lines]:
        """Return the master."""
        return [self.lines_of(b"", deadline)]

    def note_failure(self, lines: Lines, error: Exception) -> None:
        """Ask the Sentinels before the next use."""
        with self._lock:
            if lines is self._master:
                self._is_trusted = False

    def _adopt(self, address: HostPort) -> Lines:
        with self._lock:
            old = self._master
            if old is None or old.address != address:
                self._master = Lines(address, self._options)
            self._is_trusted = True
            master = self._master
        assert master is not None
        if old is not None and old is not master:
            logger.info("redis has a new master", old=str(old), new=str(master))
            old.close()
        return master

    def _discover(self, deadline: float) -> HostPort:
        with self._lock:
            sentinels = list(self._sentinels)
        command = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._service.encode())
        reasons, cause = [], None
        for sentinel in sentinels:
            try:
                (reply,) = ask(sentinel, [command], deadline, self._options.timeout_s)
                address = _address(reply)
            except (OSError, RedisError) as error:
                reasons.append(f"{sentinel}: {error}")
                cause = error
                self._move(sentinel, last=True)
                continue
            if address is not None:
                self._move(sentinel, last=False)
                return address
            reasons.append(f"{sentinel}: knows no service {self._service!r}")
        raise ConnectionError(f"no Sentinel names a master: {'; '.join(reasons)}") from cause

    def _move(self, sentinel: Lines, *, last: bool) -> None:
        with self._lock:
            self._sentinels.remove(sentinel)
            self._sentinels.insert(len(self._sentinels) if last else 0, sentinel)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        for lines in (*self._sentinels, self._master):
            if lines is not None:
                lines.close()


def _address(reply: Reply) -> HostPort | None:
    match reply:
        case [bytes(host), bytes(port)] if port.isdigit() and 0 < int(port) < 1 << 16:
            return host.decode(errors="replace"), int(port)
        case _:
            return None
