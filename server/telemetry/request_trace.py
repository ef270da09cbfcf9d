"""The RequestLog: the latest lookups under names that lead back to nobody, while they are read."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple
from urllib.parse import unquote

from blake3 import blake3

from kvstore.proto.errors import InvalidRequestError, PermissionDeniedError
from kvstore.proto.types import ChunkKey
from kvstore.server.settings.values import is_loopback

LOG_CHUNKS = 1 << 20
"""Names of chunks that are kept, 8 bytes each; the oldest lookups go first."""

LOG_LOOKUPS = 1 << 16
PAGE_LOOKUPS = 1 << 12
PAGE_CHUNKS = 1 << 16
"""What one page has at most, so that it fits a message."""

IDLE_S = 30.0
"""A recording that nobody read from for so long is over."""

NAME_BYTES = 8
_KEY_BYTES = 32


class LoggedLookup(NamedTuple):
    """One lookup. *at_s* is since the recording began, *names* 8 bytes for each chunk asked for,
    *ready* of which were there, *tokens* those of the prompt, 0 for unknown.
    """

    at_s: float
    names: bytes
    ready: int
    tokens: int


class LogPage(NamedTuple):
    """Lookups in a row, *last* the number of the last; *lost* came before them and are gone."""

    recording: int
    lookups: list[LoggedLookup]
    last: int
    lost: int


class RequestLog:
    """A bounded log that is off until somebody reads it, and off again when nobody does.

    Chunks get 8 bytes of a keyed hash under a key of *draw*, new for each recording and secret:
    equal chunks have equal names, and no name can be tried against a prompt. *clock* is in seconds
    and does not jump back; *draw* returns so many random bytes.
    """

    def __init__(
        self, clock: Callable[[], float], draw: Callable[[int], bytes] = secrets.token_bytes
    ) -> None:
        self._clock = clock
        self._draw = draw
        self._recording = 0
        self._key = b""
        self._began_s = self._read_s = 0.0
        self._lookups: deque[LoggedLookup] = deque()
        self._names_bytes = 0
        self._last = 0
        """The number of the latest lookup; the first of a recording is 1."""
        # Guards all of the above; held for appends and copies of lists only.
        self._lock = threading.Lock()

    def note(self, keys: Sequence[ChunkKey], ready: int, tokens: int) -> None:
        """A prompt was looked up. Costs nothing while nobody reads."""
        if not self._recording:
            return
        now_s = self._clock()
        with self._lock:
            recording, key = self._recording, self._key
            if not recording:
                return
        names = b"".join(blake3(one, key=key).digest(NAME_BYTES) for one in keys)
        with self._lock:
            if recording != self._recording:
                return
            if now_s - self._read_s > IDLE_S:
                self._stop()
                return
            self._last += 1
            self._lookups.append(LoggedLookup(now_s - self._began_s, names, ready, tokens))
            self._names_bytes += len(names)
            while len(self._lookups) > LOG_LOOKUPS or self._names_bytes > LOG_CHUNKS * NAME_BYTES:
                self._names_bytes -= len(self._lookups.popleft().names)

    def read(self, recording: int, after: int) -> LogPage:
        """Return what came after lookup *after* of a recording; 0 joins one, or begins it.

        Raises InvalidRequestError for a recording that is over.
        """
        now_s = self._clock()
        with self._lock:
            if self._recording and now_s - self._read_s > IDLE_S:
                self._stop()
            if not recording and not self._recording:
                self._recording = int.from_bytes(self._draw(8), "little") | 1
                self._key = self._draw(_KEY_BYTES)
                self._began_s = now_s
            if recording not in (0, self._recording):
                fix = f"nobody read it for {IDLE_S:g} s, or the server started anew: begin another"
                raise InvalidRequestError("recording", recording, fix)
            self._read_s = now_s
            if not recording:
                return LogPage(self._recording, [], self._last, 0)
            first = self._last - len(self._lookups) + 1
            skipped = max(0, min(after, self._last) + 1 - first)
            page: list[LoggedLookup] = []
            size = 0
            for one in islice(self._lookups, skipped, None):
                size += len(one.names)
                if page and (size > PAGE_CHUNKS * NAME_BYTES or len(page) == PAGE_LOOKUPS):
                    break
                page.append(one)
            last, lost = first + skipped + len(page) - 1, max(0, first - after - 1)
            return LogPage(recording, page, last, lost)

    def _stop(self) -> None:
        self._recording = 0
        self._key = b""
        self._lookups.clear()
        self._names_bytes = 0
        self._last = 0


def check_local(peer: str, what: str = "Trace") -> None:
    """Raise PermissionDeniedError, about *what*, unless gRPC's *peer* is on this host."""
    kind, _, address = peer.partition(":")
    host = unquote(address).rpartition(":")[0].strip("[]")
    if kind != "unix" and not (kind in ("ipv4", "ipv6") and is_loopback(host)):
        raise PermissionDeniedError(f"{what}: call from the server's own host")
