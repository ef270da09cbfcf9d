"""A Redis Cluster: masters that hold a range of hash slots each."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from redis.crc import key_slot
from redis.exceptions import ConnectionError, RedisError, ResponseError

from kvstore.tiers.redis_lines import Lines
from kvstore.tiers.redis_open import LineOptions
from kvstore.tiers.redis_reply import MovedError, Reply, SlotLostError
from kvstore.tiers.redis_topology import Topology, ask
from kvstore.tiers.redis_url import HostPort, RedisUrl

REST_S = 0.5
"""A server of a Cluster that failed is left alone for this long."""
MIN_RENEW_S = 0.1
"""Least time between two questions who serves what."""
SLOTS = 16384

_MOVED = re.compile(r"([0-9]{1,5}) ([A-Za-z0-9_.:-]{0,255}):([0-9]{1,5})")


class Cluster(Topology):
    """Masters that hold a range of hash slots each (redis.io, Cluster specification).

    A master that failed is left alone for REST_S, during which only its slots are lost. Who
    holds what is asked of any node, and again after a failure.
    """

    moves: ClassVar[bool] = True

    def __init__(
        self,
        url: RedisUrl,
        options: LineOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._clock = clock
        self._seeds = url.hosts
        # Guards the fields below; never held over a question.
        self._lock = threading.Lock()
        self._nodes: dict[HostPort, Lines] = {}
        self._holders: list[Lines | None] = []
        self._is_renewing = False
        self._renewed_at = -MIN_RENEW_S
        self._is_stale = True
        self._reason = "no node of the Cluster has answered yet"
        self._cause: Exception | None = None
        self._is_closed = False

    def lines_of(self, name: bytes, deadline: float) -> Lines:
        """Return the connections to the master of *name*. Raises SlotLostError."""
        self._renew_if_stale(deadline)
        with self._lock:
            lines = self._holders[key_slot(name)] if self._holders else None
        if lines is None:
            raise SlotLostError("no node holds the slot")
        if lines.is_resting:
            raise ConnectionError(f"{lines}: failed a moment ago and is left alone")
        return lines

    def masters(self, deadline: float) -> list[Lines]:
        """Return every master that holds slots."""
        self._renew_if_stale(deadline)
        with self._lock:
            return list(dict.fromkeys(lines for lines in self._holders if lines is not None))

    def has_others(self) -> bool:
        """Whether a master is not known to be down."""
        with self._lock:
            return any(lines is not None and not lines.is_resting for lines in set(self._holders))

    def note_failure(self, lines: Lines, error: Exception) -> None:
        """Follow a slot that moved, and ask who holds what before the next use."""
        moved = _MOVED.fullmatch(str(error)) if isinstance(error, MovedError) else None
        if not isinstance(error, ResponseError):
            lines.rest(REST_S)
        with self._lock:
            self._is_stale = True
            slot, port = (int(moved[1]), int(moved[3])) if moved else (SLOTS, 0)
            if moved and slot < len(self._holders) and 0 < port < 1 << 16:
                self._holders[slot] = self._node((moved[2] or lines.address[0], port))

    def _renew_if_stale(self, deadline: float) -> None:
        with self._lock:
            is_due = self._is_stale and self._clock() - self._renewed_at >= MIN_RENEW_S
            if self._is_renewing or not is_due:
                if self._holders:
                    return
                raise ConnectionError(self._reason) from self._cause
            self._is_renewing = True
        try:
            self._renew(deadline)
        finally:
            with self._lock:
                self._is_renewing = False
                self._renewed_at = self._clock()

    def _renew(self, deadline: float) -> None:
        with self._lock:
            addresses = dict.fromkeys((*self._nodes, *self._seeds))
            nodes = [self._node(address) for address in addresses]
        reasons = []
        for node in sorted(nodes, key=lambda node: node.is_resting):
            try:
                (reply,) = ask(node, [(b"CLUSTER", b"SLOTS")], deadline, self._options.timeout_s)
                ranges = _ranges(reply, node.address[0])
            except (OSError, RedisError) as error:
                reasons.append(f"{node}: {error}")
                self._cause = error
                node.rest(REST_S)
                continue
            self._settle(ranges)
            return
        with self._lock:
            self._reason = f"no node of the Cluster answers: {'; '.join(reasons)}"
            if not self._holders:
                raise ConnectionError(self._reason) from self._cause

    def _settle(self, ranges: Sequence[tuple[int, int, HostPort]]) -> None:
        with self._lock:
            holders: list[Lines | None] = [None] * SLOTS
            for start, stop, address in ranges:
                holders[start:stop] = [self._node(address)] * (stop - start)
            self._holders = holders
            used = {lines.address for lines in holders if lines is not None} | set(self._seeds)
            gone = [self._nodes.pop(address) for address in set(self._nodes) - used]
            # Until each master answers again somebody may be on the way to take its place.
            self._is_stale = any(lines.is_resting for lines in self._nodes.values())
        for lines in gone:
            lines.close()

    def _node(self, address: HostPort) -> Lines:
        if self._is_closed:
            raise ConnectionError("closed")
        if address not in self._nodes:
            self._nodes[address] = Lines(address, self._options, self._clock)
        return self._nodes[address]

    def close(self) -> None:
        """Disconnect. Idempotent."""
        with self._lock:
            self._is_closed = True
            nodes = list(self._nodes.values())
        for lines in nodes:
            lines.close()


def _ranges(reply: Reply, asked_host: str) -> list[tuple[int, int, HostPort]]:
    """Return (first slot, slot after the last, master). Raises ConnectionError."""
    found = []
    for row in reply if isinstance(reply, list) else []:
        match row:
            case [int(first), int(last), [host, int(port), *_], *_] if (
                0 <= first <= last < SLOTS and 0 < port < 1 << 16
            ):
                # a node that does not know its own name means the one it was asked by
                name = host.decode(errors="replace") if isinstance(host, bytes) else ""
                found.append((first, last + 1, (name or asked_host, port)))
            case _:
                raise ConnectionError("CLUSTER SLOTS was answered with something else")
    if not found:
        raise ConnectionError("the node belongs to no Cluster, or knows no slots yet")
    return found
