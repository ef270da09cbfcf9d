"""Watched files, and key files: API keys of callers and encryption keys of tiers, one JSON object
per line.

An API key is ``kvs_ID_SECRET``: an id of 12 hexadecimal digits, and 32 random bytes as 43
characters of base64url. Its line has ``id``, ``tenant``, ``roles``, ``hash`` (SHA-256 of the whole
key, as ``sha256:`` and 64 digits) and ``made`` (seconds). 256 random bits cannot be guessed, so a
slow hash would only slow down the server.

An encryption key's line has ``epoch`` (1 and up; the last one encrypts new data), ``key`` (32 bytes
as 64 hexadecimal digits) and ``made``. Removing a key destroys it: data encrypted with it becomes
missing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Annotated, Generic, TypeVar

import structlog
from pydantic import ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.security.sessions import Principal
from kvstore.server.settings.values import Checked

MAX_KEYS = 65_536
SECRET_BYTES = KEY_BYTES = 32
MAX_EPOCHS = 1024
MAX_FILE_BYTES = 16 << 20
_LOOKS = 2

_KEY = re.compile(r"kvs_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")

T = TypeVar("T")

logger = structlog.get_logger(__name__)


class ApiKey(Checked):
    """An API key's line. ``made`` is in seconds of the wall clock."""

    model_config = ConfigDict(strict=True)

    id: Annotated[str, Field(pattern="^[0-9a-f]{12}$")]
    tenant: str
    roles: Annotated[frozenset[str], PlainSerializer(sorted)]
    hash: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
    made: int

    @model_validator(mode="after")
    def _check(self) -> ApiKey:
        self.principal()
        return self

    def principal(self) -> Principal:
        """Return the key's principal. Raises InvalidRequestError."""
        return Principal(f"key:{self.id}", self.tenant, self.roles)


class EncryptionKey(Checked):
    """An encryption key's line."""

    model_config = ConfigDict(strict=True, val_json_bytes="hex", ser_json_bytes="hex")

    epoch: Annotated[int, Field(ge=1, lt=1 << 32)]
    key: Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES, repr=False)]
    made: int


R = TypeVar("R", ApiKey, EncryptionKey)


def make_key(
    tenant: str, roles: Iterable[str], random_bytes: Callable[[int], bytes], now_s: float
) -> tuple[str, ApiKey]:
    """Return a new key for the caller, and its row for the file. Raises InvalidRequestError."""
    key_id = random_bytes(6).hex()
    secret = base64.urlsafe_b64encode(random_bytes(SECRET_BYTES)).rstrip(b"=").decode()
    text = f"kvs_{key_id}_{secret}"
    known = Principal(f"key:{key_id}", tenant, frozenset(roles))
    row = ApiKey(id=key_id, tenant=tenant, roles=known.roles, hash=_digest(text), made=int(now_s))
    return text, row


def _digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


class ApiKeys:
    """The keys of one version of a file."""

    def __init__(self, rows: Iterable[ApiKey]) -> None:
        self.rows = {row.id: row for row in rows}
        self._principals = {row.id: row.principal() for row in self.rows.values()}

    def principal_of(self, key: str) -> Principal | None:
        """Return the principal of *key*; None if it is unknown."""
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        row = self.rows.get(match[1])
        # An unknown id takes as long as a wrong secret.
        expected = row.hash if row is not None else "sha256:" + 64 * "0"
        is_right = hmac.compare_digest(_digest(key), expected)
        return self._principals[row.id] if row is not None and is_right else None

    def holds(self, principal: Principal) -> bool:
        """Whether the key of *principal* still exists, with the same rights."""
        known = self._principals.get(principal.name.partition(":")[2])
        rights = principal.tenant, principal.roles
        return known is not None and (known.tenant, known.roles) == rights


def parse_keys(data: bytes) -> ApiKeys:
    """Return the keys in a file's bytes. Raises InvalidRequestError with the line number."""
    rows = _parsed(ApiKey, data, "auth_keys", "kvstore token")
    if len({row.id for row in rows}) < len(rows):
        raise InvalidRequestError("auth_keys", len(rows), "name each key once")
    if len(rows) > MAX_KEYS:
        raise InvalidRequestError("auth_keys", len(rows), f"at most {MAX_KEYS}")
    return ApiKeys(rows)


def parse_encryption_keys(data: bytes) -> dict[int, EncryptionKey]:
    """Return the keys in a file's bytes, by epoch. Raises InvalidRequestError without any key."""
    rows = _parsed(EncryptionKey, data, "encryption_keys", "kvstore keys new")
    found = {row.epoch: row for row in rows}
    if len(found) < len(rows) or len(rows) > MAX_EPOCHS:
        fix = f"name each epoch once, {MAX_EPOCHS} at most"
        raise InvalidRequestError("encryption_keys", len(rows), fix)
    return found


def _parsed(kind: type[R], data: bytes, field: str, command: str) -> list[R]:
    rows: list[R] = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            rows += [kind.model_validate_json(line)] if line.strip() else []
        except ValidationError as error:
            fix = f"is not a key ({error.errors()[0]['msg']}); make one with {command}"
            raise InvalidRequestError(field, f"line {number}", fix) from None
    return rows


def next_key(
    rows: Iterable[EncryptionKey], random_bytes: Callable[[int], bytes], now_s: float
) -> EncryptionKey:
    """Return a key of the epoch after all of *rows*."""
    last = max((row.epoch for row in rows), default=0)
    return EncryptionKey(epoch=last + 1, key=random_bytes(KEY_BYTES), made=int(now_s))


def write_keys(path: Path, rows: Sequence[ApiKey] | Sequence[EncryptionKey]) -> None:
    """Replace the file at *path* by *rows*, for this user only. Raises InvalidRequestError."""
    data = "".join(row.model_dump_json() + "\n" for row in rows).encode()
    is_encrypting = any(isinstance(row, EncryptionKey) for row in rows)
    (parse_encryption_keys if is_encrypting else parse_keys)(data)
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


class WatchedFile(Generic[T]):
    """The result of *parse* on some files, reloaded when one changes. Thread-safe.

    *parse* raises InvalidRequestError for invalid bytes, and so does the constructor; later the
    last value is kept and the error logged. With *gone*, ``value`` becomes its result once a file
    was missing twice in a row: deleting a key file revokes its keys.
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
        self._lock = Lock()  # a concurrent refresh waits for the new value
        self._seen = list(map(_look, self._paths))
        self.value = parse(*map(read_guarded, paths))

    def refresh(self) -> bool:
        """Reload changed files. Return whether ``value`` changed."""
        seen = list(map(_look, self._paths))
        with self._lock:
            if self._gone is not None and None in seen:
                self._misses += 1
                if self._misses != _LOOKS:  # an editor may be replacing the file
                    return False
                self._seen = [None]  # reload the file when it returns
                self.value = self._gone()
                what = "key file deleted: all of its keys are revoked"
                logger.error(what, files=self._paths)
                return True
            self._misses = 0
            if seen == self._seen:
                return False
            self._seen = seen
            try:
                self.value = self._parse(*map(read_guarded, self._paths))
            except InvalidRequestError as error:
                logger.error("invalid file: the last valid version stays in use", reason=str(error))
                return False
            return True


def _look(path: Path) -> tuple[int, int, int] | None:
    """Return a fingerprint that changes with the file; None for a missing one."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def read_guarded(path: Path) -> bytes:
    """Return a file's bytes. Raises InvalidRequestError if other users but root can change it."""
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
