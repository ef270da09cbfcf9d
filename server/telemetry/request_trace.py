"""The RequestLog: anonymised recordings of the latest lookups."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple
from urllib.parse import unquote

from blake3 import blake3

from kvstore.proto.errors import InvalidRequestError, PermissionDeniedError
from kvstore.proto.types import ChunkKey
from kvstore.server.settings.values import is_loopback

LOG_CHUNKS = 1 << 20
"""Limit of recorded chunk names, 8 bytes each; the oldest lookups are dropped."""

LOG_LOOKUPS = 1 << 16
PAGE_LOOKUPS = 1 << 12
PAGE_CHUNKS = 1 << 16
"""Limit of one page, so that it fits a message."""

IDLE_S = 30.0
"""A recording that is not read for this time ends."""

NAME_BYTES = 8


class LoggedLookup(NamedTuple):
    """One lookup. *at_s* is since the recording began, *names* has 8 bytes per requested chunk,
    *ready* counts the hits, *tokens* those of the prompt, 0: unknown.
    """

    at_s: float
    names: bytes
    ready: int
    tokens: int


class LogPage(NamedTuple):
    """Successive lookups; *last* is the number of the last; *lost* earlier ones were dropped."""

    recording: int
    lookups: list[LoggedLookup]
    last: int
    lost: int


@dataclass(slots=True, eq=False)
class _Recording:
    began_s: float
    read_s: float
    number: int = field(default_factory=lambda: secrets.randbits(64) | 1)
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    lookups: deque[LoggedLookup] = field(default_factory=deque)
    names_bytes: int = 0
    last: int = 0
    """The number of the latest lookup; the first is 1."""


class RequestLog:
    """A bounded log that is on only while it is read.

    A chunk's name is 8 bytes of a keyed hash, under a secret key that is new for each recording:
    equal chunks have equal names, and no name can be matched with a prompt. *clock* is monotonic,
    in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._recording: _Recording | None = None
        self._lock = threading.Lock()  # guards it; held for appends and copies of lists only

    def note(self, keys: Sequence[ChunkKey], ready: int, tokens: int) -> None:
        """Record the lookup of a prompt; does nothing without a recording."""
        recording = self._recording
        if recording is None:
            return
        now_s = self._clock()
        names = b"".join(blake3(one, key=recording.key).digest(NAME_BYTES) for one in keys)
        with self._lock:
            if self._live(now_s) is not recording:
                return
            recording.last += 1
            lookups = recording.lookups
            lookups.append(LoggedLookup(now_s - recording.began_s, names, ready, tokens))
            recording.names_bytes += len(names)
            while len(lookups) > LOG_LOOKUPS or recording.names_bytes > LOG_CHUNKS * NAME_BYTES:
                recording.names_bytes -= len(lookups.popleft().names)

    def _live(self, now_s: float) -> _Recording | None:
        if self._recording is not None and now_s - self._recording.read_s > IDLE_S:
            self._recording = None
        return self._recording

    def read(self, recording: int, after: int) -> LogPage:
        """Return lookups after number *after* of a recording; 0 joins one, or begins it.

        Raises InvalidRequestError for a recording that has ended.
        """
        now_s = self._clock()
        with self._lock:
            live = self._live(now_s)
            if live is None and not recording:
                live = self._recording = _Recording(now_s, now_s)
            if live is None or recording not in (0, live.number):
                fix = f"not read for {IDLE_S:g} s, or the server restarted: begin another"
                raise InvalidRequestError("recording", recording, fix)
            live.read_s = now_s
            if not recording:
                return LogPage(live.number, [], live.last, 0)
            first = live.last - len(live.lookups) + 1
            skipped = max(0, min(after, live.last) + 1 - first)
            page: list[LoggedLookup] = []
            size = 0
            for one in islice(live.lookups, skipped, None):
                size += len(one.names)
                if page and (size > PAGE_CHUNKS * NAME_BYTES or len(page) == PAGE_LOOKUPS):
                    break
                page.append(one)
            last, lost = first + skipped + len(page) - 1, max(0, first - after - 1)
            return LogPage(recording, page, last, lost)


def check_local(peer: str, what: str = "Trace") -> None:
    """Raise PermissionDeniedError, about *what*, unless gRPC's *peer* is on this host."""
    kind, _, address = peer.partition(":")
    host = unquote(address).rpartition(":")[0].strip("[]")
    if kind != "unix" and not (kind in ("ipv4", "ipv6") and is_loopback(host)):
        raise PermissionDeniedError(f"{what}: call from the server's own host")
