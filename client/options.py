"""Options of a client, and its credentials. Values only; nothing here reads the environment."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from threading import Lock
from typing import Any, Literal, get_args

import grpc

from kvstore.client.chunk import Shard
from kvstore.proto.errors import InvalidRequestError, check_text, is_whole
from kvstore.proto.keys import check_chunk_tokens
from kvstore.proto.types import DEFAULT_CHUNK_TOKENS

MAX_TOKEN_CHARS = 8192
FIRST_LOGIN_UID = 1000
"""Users below are system users. Those from here on log in, and may listen on any port that a server
has freed (login.defs(5), UID_MIN)."""
_LISTENS = "0A"
_TARGET = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f:.%\w]+\]):([0-9]{1,5})")
SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")
"""Schemes of gRPC targets, besides HOST:PORT."""
_HEADER = "authorization"
_NO_PROXY = ("grpc.enable_http_proxy", 0)
"""Else gRPC uses the environment's proxy, even for loopback and cluster addresses."""
TransportName = Literal["auto", "shm", "tcp", "grpc"]
MAX_DEADLINE_MS = 600_000
"""The longest deadline that a server grants."""
MAX_NAME_CHARS = 128
"""Limit of a client's name and of a tenant's."""


@dataclass(frozen=True, slots=True)
class Access:
    """``tls`` encrypts; ``ca`` is the CA bundle that verifies servers, by default gRPC's root
    certificates. ``cert`` and ``key``, all PEM files, are the client certificate and key for
    mutual TLS; once replaced, they are read again when a call has failed. ``server_name`` is the
    name in the server's certificate, if not the address.
    ``token`` is an API key or a JWT; ``token_file`` has one, and is read again when it is replaced.
    Without TLS a token is sent only to this host, and only if this user, root or a system user
    listens there; ``insecure`` permits it in plain text anywhere.
    """

    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidRequestError("cert", self.cert, "give cert and key, or neither")
        if self.token and self.token_file is not None:
            raise InvalidRequestError("token_file", self.token_file, "give token or token_file")
        if self.ca is not None or self.cert is not None:
            object.__setattr__(self, "tls", True)

    def open(self, address: str, options: list[tuple[str, Any]]) -> grpc.Channel:
        """Return a channel to *address*. Raises InvalidRequestError for unusable files or token."""
        options = [*options, _NO_PROXY]
        if not self.tls:
            if (self.token or self.token_file) and not self.insecure:
                _check_plain(address)
            return grpc.insecure_channel(address, options=options)
        if self.server_name:
            options = [*options, ("grpc.ssl_target_name_override", self.server_name)]
        ca, cert = _certificates("ca", self.ca), _certificates("cert", self.cert)
        key = None if self.key is None else _read("key", self.key)
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        return grpc.secure_channel(address, credentials, options=options)

    def seen(self) -> list[tuple[int, int]]:
        """Return what changes when the client certificate and its key are replaced."""
        files = {"cert": self.cert, "key": self.key}
        return [_seen(name, path) for name, path in files.items() if path is not None]


OPEN = Access()
"""Plain text, without credentials."""


def check_address(address: str) -> None:
    """Raise InvalidRequestError unless it is HOST:PORT, [IPV6]:PORT or a gRPC target."""
    if isinstance(address, str):
        found = _TARGET.fullmatch(address)
        if address.startswith(SCHEMES) or (found and 0 < int(found[1]) < 1 << 16):
            return
    raise InvalidRequestError("address", address, "give HOST:PORT, or [IPV6]:PORT")


class Bearer:
    """The call metadata with the token. Thread-safe. Raises InvalidRequestError for a wrong one."""

    def __init__(self, access: Access) -> None:
        self._path = access.token_file
        self._metadata = _metadata(access.token) if access.token else None
        self._seen: tuple[int, int] | None = None
        self._lock = Lock()  # guards the two above
        if self._path is not None:
            self.metadata()

    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """Return the metadata of a call; None without a token."""
        path = self._path
        if path is None:
            return self._metadata
        seen = _seen("token_file", path)
        with self._lock:
            if seen != self._seen:
                token = _read("token_file", path).decode("ascii", "replace")
                self._metadata = _metadata(token.strip())
                self._seen = seen
            return self._metadata


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    if not token or not token.isascii() or not token.isprintable() or len(token) > MAX_TOKEN_CHARS:
        raise InvalidRequestError(
            "token", "...", f"give printable ASCII, {MAX_TOKEN_CHARS} at most"
        )
    return ((_HEADER, f"Bearer {token}"),)


def _seen(name: str, path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise InvalidRequestError(name, str(path), f"{error.strerror}") from None
    return found.st_ino, found.st_mtime_ns


def _read(name: str, path: Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequestError(name, str(path), f"{error.strerror}") from None


def _certificates(name: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    found, context = _read(name, path), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:  # of a file without any, gRPC says only that it knows no address
        context.load_verify_locations(cadata=found.decode("ascii", "ignore"))  # comments may not be
    except (OSError, ValueError):
        raise InvalidRequestError(name, str(path), "give certificates in PEM") from None
    return found


def _check_plain(address: str) -> None:
    """Raise InvalidRequestError where a token in plain text might leak."""
    if not _is_near(address):
        fix = "the token would be sent in plain text: give tls or ca, or insecure"
        raise InvalidRequestError("access", address, fix)
    strangers = [uid for uid in _listeners(address) - {os.geteuid()} if uid >= FIRST_LOGIN_UID]
    if strangers:
        fix = f"user {strangers[0]} listens there and would receive the token: give tls or ca"
        raise InvalidRequestError("access", address, fix)


def _listeners(address: str) -> set[int]:
    """Return the users who listen on a port of this host, by /proc."""
    port = address.rpartition(":")[2]
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            _, local, _, state, _, _, _, uid, *_ = row.split()
            if state == _LISTENS and port.isdecimal() and int(local[-4:], 16) == int(port):
                found.add(int(uid))
    return found


def _is_near(address: str) -> bool:
    host = address.rpartition("/")[2].rpartition(":")[0].strip("[]")
    try:
        return address.startswith("unix:") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """``transport`` auto uses shared memory on the server's host; elsewhere tcp if the server
    offers it, else gRPC.

    ``deadline_ms`` bounds every call. ``staging_bytes`` of memory, at least four frames, are shared
    with the server for puts. After the server did not answer, calls fail at once for
    ``retry_after_ms`` rather than wait again. ``name`` shows in the server's log and status.
    ``copy_threads`` verify and copy the chunks of a get. ``assets`` is a folder of model assets,
    as ``kvstore calibrate`` writes them, for frames read as stored on a tier. ``access`` has the
    credentials; ``tenant`` owns the chunks: empty for the caller's own, or ``pool:NAME`` for a pool
    that tenants share. With ``read_peers``, chunks in another node's memory are read from there,
    if the server directs so and that port is reachable. With ``sglang_names``, prompts keyed by
    tokens alone have SGLang's names, which match its pages of ``chunk_tokens`` tokens. With a
    ``shard``, KV is put and got for one rank of a parallel engine, of ``shard.part_of(model)``;
    layer by layer there are whole chunks only.
    """

    transport: TransportName = "auto"
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    deadline_ms: int = 2000
    staging_bytes: int = 34 << 20
    retry_after_ms: int = 1000
    name: str = ""
    copy_threads: int = 2
    assets: Path | None = None
    access: Access = OPEN
    tenant: str = ""
    read_peers: bool = True
    sglang_names: bool = False
    shard: Shard | None = None

    def __post_init__(self) -> None:
        if self.transport not in get_args(TransportName):
            fix = "use auto, shm, tcp or grpc"
            if str(self.transport) == "zmq":
                fix = "it was removed; use tcp"
            raise InvalidRequestError("transport", self.transport, fix)
        check_chunk_tokens(self.chunk_tokens)
        if not isinstance(self.access, Access):
            raise InvalidRequestError("access", type(self.access).__name__, "give Access(...)")
        if not isinstance(self.shard, Shard | None):
            raise InvalidRequestError("shard", self.shard, "give a Shard, such as Shard.of_rank's")
        for name in ("deadline_ms", "staging_bytes", "retry_after_ms", "copy_threads"):
            value = getattr(self, name)
            if not is_whole(value) or value < 1:
                raise InvalidRequestError(name, value, "give a positive whole number")
        for name in ("name", "tenant"):
            check_text(name, getattr(self, name), MAX_NAME_CHARS)
        if self.deadline_ms > MAX_DEADLINE_MS:
            raise InvalidRequestError("deadline_ms", self.deadline_ms, f"at most {MAX_DEADLINE_MS}")


def milliseconds(name: str, seconds: float, most_s: float, least_s: float = 0) -> int:
    """Return *seconds*, the argument *name*, in milliseconds. Raises InvalidRequestError."""
    is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not is_number or not least_s <= seconds <= most_s:
        raise InvalidRequestError(name, seconds, f"give {least_s:g} to {most_s:g} seconds")
    return round(1000 * float(seconds))
