"""A WatchedFile: bytes of a file that is replaced while the server runs."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

import structlog

from kvstore.proto.errors import InvalidRequestError

MAX_FILE_BYTES = 16 << 20
_LOOKS = 2

T = TypeVar("T")

logger = structlog.get_logger(__name__)


class WatchedFile(Generic[T]):
    """What *parse* makes of some files, read again once one of them has changed. Thread-safe.

    *parse* gets their bytes in the order of *paths* and raises InvalidRequestError for bytes that
    will not do: the constructor raises it too, later the last value is kept, and the error logged.
    Where *gone* is given, ``value`` is what it returns once a file was missing twice in a row:
    to delete a file of keys revokes them.
    """

    def __init__(
        self,
        paths: tuple[Path, ...],
        parse: Callable[..., T],
        gone: Callable[[], T] | None = None,
    ) -> None:
        self._paths = paths
        self._parse = parse
        self._gone = gone
        self._misses = 0
        self._lock = Lock()  # whoever looks while another reads waits, and has the value, too
        self._seen = list(map(_look, self._paths))
        self.value = parse(*map(read_guarded, paths))

    def refresh(self) -> bool:
        """Read again what has changed. Return whether ``value`` is another now."""
        seen = list(map(_look, self._paths))
        with self._lock:
            if self._gone is not None and None in seen:
                self._misses += 1
                if self._misses != _LOOKS:  # an editor may be about to put another in its place
                    return False
                self._seen = [None]  # whatever comes back is read
                self.value = self._gone()
                what = "a file of keys was deleted: all of its keys are revoked"
                logger.error(what, files=self._paths)
                return True
            self._misses = 0
            if seen == self._seen:
                return False
            self._seen = seen
            try:
                self.value = self._parse(*map(read_guarded, self._paths))
            except InvalidRequestError as error:
                logger.error("kept what was there before", reason=str(error))
                return False
            return True


def _look(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with a file; None for one that is not there."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def read_guarded(path: Path) -> bytes:
    """Return the bytes of a file that nobody but this user and root can change.

    Raises InvalidRequestError.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (
                stat.S_IWGRP | stat.S_IWOTH
            ):
                fix = "others could change it; chown it to this user or root, chmod go-w"
                raise InvalidRequestError("file", str(path), fix)
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError("file", str(path), f"{error.strerror}; name another") from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequestError("file", str(path), f"has over {MAX_FILE_BYTES} bytes")
    return data
