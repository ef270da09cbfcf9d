"""The file of encryption keys: one a line, each of an epoch. The last epoch's is written with.

A line is a JSON object: ``epoch`` (1 and up), ``key`` (32 bytes as 64 hexadecimal digits) and
``made`` (seconds). A key that is taken out is gone: what was encrypted with it is missing.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.proto.errors import InvalidRequestError

KEY_BYTES = 32
MAX_EPOCHS = 1024
MAX_EPOCH = (1 << 32) - 1

_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class EncryptionKey:
    """A row of the file. ``made`` is in seconds of the wall clock."""

    epoch: int
    key: bytes = field(repr=False)
    made: int = 0

    def line(self) -> str:
        """Return the row as it stands in the file."""
        return json.dumps({"epoch": self.epoch, "key": self.key.hex(), "made": self.made})


def parse_encryption_keys(data: bytes) -> dict[int, EncryptionKey]:
    """Return the keys in a file's bytes, by epoch. Raises InvalidRequestError that repeats none."""
    found: dict[int, EncryptionKey] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = _row(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            row = None
        if row is None or row.epoch in found or len(found) >= MAX_EPOCHS:
            fix = "no key, or an epoch twice; make keys with kvstore keys new"
            raise InvalidRequestError("encryption_keys", f"line {number}", fix)
        found[row.epoch] = row
    return found


def _row(fields: object) -> EncryptionKey | None:
    if not isinstance(fields, dict) or set(fields) != {"epoch", "key", "made"}:
        return None
    epoch, key, made = fields["epoch"], fields["key"], fields["made"]
    if type(epoch) is not int or type(made) is not int or not 1 <= epoch <= MAX_EPOCH:
        return None
    if not isinstance(key, str) or not _HEX.fullmatch(key):
        return None
    return EncryptionKey(epoch, bytes.fromhex(key), made)


def next_key(
    rows: Iterable[EncryptionKey], random_bytes: Callable[[int], bytes], now_s: float
) -> EncryptionKey:
    """Return a key of the epoch behind all of *rows*."""
    last = max((row.epoch for row in rows), default=0)
    return EncryptionKey(last + 1, random_bytes(KEY_BYTES), int(now_s))


def write_encryption_keys(path: Path, rows: Iterable[EncryptionKey]) -> None:
    """Replace the file at *path*, as a whole. Raises InvalidRequestError."""
    text = "".join(row.line() + "\n" for row in rows)
    parse_encryption_keys(text.encode())
    replace_file(path, text.encode())


def replace_file(path: Path, data: bytes) -> None:
    """Put *data* in the place of *path*, all of it or nothing, for this user's eyes only.

    Raises InvalidRequestError.
    """
    try:
        descriptor, draft = tempfile.mkstemp(dir=path.absolute().parent)  # of mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(draft).replace(path)
        except OSError:
            Path(draft).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InvalidRequestError("file", str(path), f"{error.strerror}; name another") from None
