"""The audit log: one JSON object per line, each with the hash of the line before.

Changing, removing or inserting a line breaks the chain. Only truncation does not, which ``kvstore
audit`` detects by comparison with a hash recorded elsewhere. No token, token id, prompt or salt is
written: keys appear as the first bytes of their namespace.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Full, Queue
from threading import Lock, Thread
from typing import BinaryIO

import structlog

from kvstore.proto.errors import InvalidRequestError

QUEUE_EVENTS = 4096
"""Limit of queued events; further ones are dropped and counted in the next line."""
KEPT_FILES = 8
"""The current file and the rotated ones; ``.1`` is the latest."""
MAX_LINE_BYTES = 1 << 14
FIRST = "0" * 64
_CLOSE_WITHIN_S = 5.0

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """One call. ``key_prefix`` of the namespace; ``outcome``: OK or an error's class name."""

    who: str
    tenant: str
    rpc: str
    outcome: str
    key_prefix: str = ""
    chunks: int = 0
    peer: str = ""


class AuditLog:
    """Writes events to *path* in a separate thread. Thread-safe; ``note`` never waits.

    A file that reaches *file_bytes* is rotated. *wall_clock* returns seconds since 1970. Raises
    InvalidRequestError for a file that cannot be written or whose chain is broken.
    """

    def __init__(self, path: Path, file_bytes: int, wall_clock: Callable[[], float]) -> None:
        self._path = path
        self._file_bytes = file_bytes
        self._wall_clock = wall_clock
        self._events: Queue[tuple[float, Event] | None] = Queue(QUEUE_EVENTS)
        self._lost = 0
        self._lock = Lock()  # guards what was lost
        self.last, self._count = _end_of(path)
        try:
            self._file: BinaryIO = _open(path)
        except OSError as error:
            raise _refusal(path, error) from None
        self._opened = os.fstat(self._file.fileno())
        self._thread = Thread(target=self._run, name="audit-log", daemon=True)
        self._thread.start()

    def note(self, event: Event) -> None:
        """Queue *event*; it is dropped and counted when the queue is full."""
        try:
            self._events.put_nowait((self._wall_clock(), event))
        except Full:
            with self._lock:
                self._lost += 1

    def close(self) -> None:
        """Write queued events, and stop. Idempotent."""
        with suppress(Full):
            self._events.put(None, timeout=_CLOSE_WITHIN_S)
        self._thread.join(_CLOSE_WITHIN_S)

    def _run(self) -> None:
        while (row := self._events.get()) is not None:
            with self._lock:
                lost, self._lost = self._lost, 0
            try:
                self._write(*row, lost)
            except OSError as error:
                logger.error("audit log cannot be written", reason=str(error), lost=1)
                with self._lock:
                    self._lost += lost + 1
        with suppress(OSError):  # logged when the lines could not be flushed
            self._file.close()

    def _write(self, at_s: float, event: Event, lost: int) -> None:
        is_full = self._file.tell() >= self._file_bytes
        if is_full or self._is_moved():
            try:
                self._turn_over()
            except OSError as error:
                if is_full:
                    raise
                logger.error("audit log has no new file", reason=str(error))
        found = asdict(event) | {"lost": lost}
        known = {n: v[:256] if isinstance(v, str) else v for n, v in found.items() if v}
        line, digest = chained(self.last, {"at": round(at_s, 3), "n": self._count} | known)
        self._file.write(line)
        self.last, self._count = digest, self._count + 1  # once it is in the file's buffer
        if self._events.empty():
            self._file.flush()

    def _turn_over(self) -> None:
        self._file.flush()  # a close that fails would drop the lines
        if not self._is_moved():
            for number in range(KEPT_FILES - 1, 1, -1):
                older = _aside(self._path, number - 1)
                if older.exists():
                    older.replace(_aside(self._path, number))
            self._path.replace(_aside(self._path, 1))
        before, self._file = self._file, _open(self._path)
        self._opened = os.fstat(self._file.fileno())
        before.close()

    def _is_moved(self) -> bool:
        """Whether its path names another file or none, as after logrotate or a failed rotation."""
        try:
            return not os.path.samestat(self._opened, self._path.stat())
        except OSError:
            return True


def chained(before: str, fields: dict[str, object]) -> tuple[bytes, str]:
    """Return the line of *fields* after the line with hash *before*, and its own hash."""
    body = json.dumps(fields | {"before": before}, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body[:-1]}, "hash": "{digest}"}}\n'.encode(), digest


def _open(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def audit_files(path: Path) -> list[Path]:
    """Return the files of a log, the oldest first."""
    older = [_aside(path, number) for number in range(KEPT_FILES - 1, 0, -1)]
    return [one for one in (*older, path) if one.exists()]


def read_chain(paths: list[Path]) -> Iterator[tuple[dict[str, object], str]]:
    """Yield each line's fields and hash. Raises InvalidRequestError at the first invalid line."""
    before: str | None = None
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                fields, digest = _parsed(line, f"{path}:{number}")
                if before is not None and fields["before"] != before:
                    fix = "does not follow the line before it: lines were removed or inserted"
                    raise InvalidRequestError("audit_log", f"{path}:{number}", fix)
                before = digest
                yield fields, digest


def _parsed(line: bytes, where: str) -> tuple[dict[str, object], str]:
    try:
        fields = json.loads(line)
        digest = str(fields.pop("hash"))
        expected = chained(str(fields.pop("before")), fields)
        if expected != (line, digest):
            raise ValueError("its hash differs")
        fields = json.loads(line)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fix = f"was changed, or is not a line of an audit log ({error})"
        raise InvalidRequestError("audit_log", where, fix) from None
    return fields, digest


def _refusal(path: Path, error: OSError) -> InvalidRequestError:
    fix = f"{error.strerror}; name a file that this user can write"
    return InvalidRequestError("audit_log", str(path), fix)


def _end_of(path: Path) -> tuple[str, int]:
    """Return the hash of the last line, and the number of the next. Truncate a partial line."""
    try:
        for one in reversed(audit_files(path)):
            with one.open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 2 * MAX_LINE_BYTES))
                tail = file.read()
                torn = len(tail) - (tail.rfind(b"\n") + 1)
                if torn:
                    file.truncate(size - torn)
            lines = tail[: len(tail) - torn].splitlines(keepends=True)
            if lines:
                fields, digest = _parsed(lines[-1], str(one))
                return digest, int(str(fields["n"])) + 1
    except OSError as error:
        raise _refusal(path, error) from None
    return FIRST, 0
