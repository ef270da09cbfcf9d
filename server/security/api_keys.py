"""API keys: secrets that name a tenant and its roles, of which a file keeps only hashes.

A key is ``kvs_ID_SECRET``: 12 hexadecimal digits that say which it is, and 32 random bytes as
43 characters of base64url. The file has one JSON object a line: ``id``, ``tenant``, ``roles``,
``hash`` (SHA-256 of the whole key, as ``sha256:`` and 64 digits) and ``made`` (seconds). Nobody
guesses 256 random bits, so that a slow hash would only slow down the server.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.security.encryption_keys import replace_file
from kvstore.server.security.sessions import Principal

MAX_KEYS = 65_536
SECRET_BYTES = 32

_KEY = re.compile(r"kvs_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
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
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(json.loads(line)))
        except (ValueError, TypeError, RecursionError) as error:
            fix = f"line {number} is no key ({error}); make one with kvstore token"
            raise InvalidRequestError("auth_keys", f"line {number}", fix) from None
    if len({row.key_id for row in rows}) < len(rows):
        raise InvalidRequestError("auth_keys", len(rows), "name each key once")
    if len(rows) > MAX_KEYS:
        raise InvalidRequestError("auth_keys", len(rows), f"at most {MAX_KEYS}")
    return ApiKeys(rows)


def _row(fields: Mapping[str, object]) -> ApiKey:
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


def write_keys(path: Path, rows: Iterable[ApiKey]) -> None:
    """Replace the file at *path*, as a whole. Raises InvalidRequestError."""
    text = "".join(row.line() + "\n" for row in rows)
    parse_keys(text.encode())
    replace_file(path, text.encode())
