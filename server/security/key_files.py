"""Files of keys, one JSON object a line: API keys of callers, and keys that tiers encrypt with.

An API key is ``kvs_ID_SECRET``: 12 hexadecimal digits that say which it is, and 32 random bytes as
43 characters of base64url. It names a tenant and its roles; its line has ``id``, ``tenant``,
``roles``, ``hash`` (SHA-256 of the whole key, as ``sha256:`` and 64 digits) and ``made`` (seconds).
Nobody guesses 256 random bits, so that a slow hash would only slow down the server.

An encryption key's line has ``epoch`` (1 and up; the last one's key is written with), ``key`` (32
bytes as 64 hexadecimal digits) and ``made``. A key that is taken out is gone: what was encrypted
with it is missing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.security.sessions import Principal

MAX_KEYS = 65_536
SECRET_BYTES = 32
KEY_BYTES = 32
MAX_EPOCHS = 1024
MAX_EPOCH = (1 << 32) - 1

_KEY = re.compile(r"kvs_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_HEX = re.compile(r"[0-9a-f]{64}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_FIELDS = ("id", "tenant", "roles", "hash", "made")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A row of the file. ``made`` is in seconds of the wall clock."""

    key_id: str
    tenant: str
    roles: frozenset[str]
    digest: str
    made: int

    def principal(self) -> Principal:
        """Return whose key it is. Raises InvalidRequestError."""
        return Principal(f"key:{self.key_id}", self.tenant, self.roles)

    def line(self) -> str:
        """Return the row as it stands in the file."""
        values = (self.key_id, self.tenant, sorted(self.roles), self.digest, self.made)
        return json.dumps(dict(zip(_FIELDS, values, strict=True)))


def make_key(
    tenant: str, roles: Iterable[str], random_bytes: Callable[[int], bytes], now_s: float
) -> tuple[str, ApiKey]:
    """Return a new key, to be given away, and its row, to be kept. Raises InvalidRequestError."""
    key_id = random_bytes(6).hex()
    secret = base64.urlsafe_b64encode(random_bytes(SECRET_BYTES)).rstrip(b"=").decode()
    text = f"kvs_{key_id}_{secret}"
    row = ApiKey(key_id, tenant, frozenset(roles), _digest(text), int(now_s))
    row.principal()
    return text, row


def _digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


class ApiKeys:
    """The keys of one file, as it stood when it was read."""

    def __init__(self, rows: Iterable[ApiKey]) -> None:
        self.rows = {row.key_id: row for row in rows}
        self._principals = {row.key_id: row.principal() for row in self.rows.values()}

    def principal_of(self, key: str) -> Principal | None:
        """Return whose *key* is; None for one that is not among them."""
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        row = self.rows.get(match[1])
        # An unknown id takes as long as a wrong secret.
        expected = row.digest if row is not None else "sha256:" + 64 * "0"
        is_right = hmac.compare_digest(_digest(key), expected)
        return self._principals[row.key_id] if row is not None and is_right else None

    def holds(self, principal: Principal) -> bool:
        """Whether the key of *principal* is still among them, with the same rights."""
        return self._principals.get(principal.name.partition(":")[2]) == principal


def parse_keys(data: bytes) -> ApiKeys:
    """Return the keys in a file's bytes. Raises InvalidRequestError that names the line."""
    rows: list[ApiKey] = []
    for number, line in _lines(data):
        try:
            rows.append(_api_key(json.loads(line)))
        except (ValueError, TypeError, RecursionError) as error:
            fix = f"line {number} is no key ({error}); make one with kvstore token"
            raise InvalidRequestError("auth_keys", f"line {number}", fix) from None
    if len({row.key_id for row in rows}) < len(rows):
        raise InvalidRequestError("auth_keys", len(rows), "name each key once")
    if len(rows) > MAX_KEYS:
        raise InvalidRequestError("auth_keys", len(rows), f"at most {MAX_KEYS}")
    return ApiKeys(rows)


def _api_key(fields: object) -> ApiKey:
    if not isinstance(fields, dict) or set(fields) != set(_FIELDS):
        raise ValueError(f"a key has {', '.join(sorted(_FIELDS))}")
    key_id, tenant, roles, digest, made = (fields[name] for name in _FIELDS)
    if not isinstance(key_id, str) or not re.fullmatch("[0-9a-f]{12}", key_id):
        raise ValueError("id has 12 hexadecimal digits")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise ValueError("hash is sha256: and 64 digits")
    if not isinstance(tenant, str) or not isinstance(roles, list) or not isinstance(made, int):
        raise ValueError("tenant is text, roles a list, made a number")
    row = ApiKey(key_id, tenant, frozenset(map(str, roles)), digest, made)
    row.principal()
    return row


@dataclass(frozen=True, slots=True)
class EncryptionKey:
    """A row of its file."""

    epoch: int
    key: bytes = field(repr=False)
    made: int = 0

    def line(self) -> str:
        """Return the row as it stands in the file."""
        return json.dumps({"epoch": self.epoch, "key": self.key.hex(), "made": self.made})


def parse_encryption_keys(data: bytes) -> dict[int, EncryptionKey]:
    """Return the keys in a file's bytes, by epoch. Raises InvalidRequestError that repeats none."""
    found: dict[int, EncryptionKey] = {}
    for number, line in _lines(data):
        try:
            row = _encryption_key(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            row = None
        if row is None or row.epoch in found or len(found) >= MAX_EPOCHS:
            fix = "no key, or an epoch twice; make keys with kvstore keys new"
            raise InvalidRequestError("encryption_keys", f"line {number}", fix)
        found[row.epoch] = row
    return found


def _encryption_key(fields: object) -> EncryptionKey | None:
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


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, and their numbers."""
    return ((at, line) for at, line in enumerate(data.splitlines(), 1) if line.strip())


def write_keys(path: Path, rows: Sequence[ApiKey] | Sequence[EncryptionKey]) -> None:
    """Put *rows* in the place of the file at *path*, all or nothing, for this user's eyes only.

    Raises InvalidRequestError.
    """
    data = "".join(row.line() + "\n" for row in rows).encode()
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
