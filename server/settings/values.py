"""Sizes and addresses as people write them, and the kinds of value that settings have."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from kvstore.proto.errors import InvalidRequestError
from kvstore.tiers.redis_url import parse_redis_url

KIB, MIB, GIB, TIB = (1 << 10 * power for power in (1, 2, 3, 4))
MIN_TIER_BYTES = 4 * MIB
MAX_SLAB_BYTES = 256 * MIB
MAX_SIZE_BYTES = 1 << 50
SOCKET_PATH_BYTES = 107
"""What a Unix socket's address holds."""

_BINARY = {"kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS = {"": 1, "b": 1} | _BINARY | _DECIMAL
_SIZE = re.compile(r"([0-9]{1,18})\s*([a-zA-Z]*)")


def parse_size(value: object) -> int:
    """Return bytes from a number or from text such as ``512MiB``. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("give bytes as 8GiB, 512MiB, 1GB or 1048576")
    return int(match[1]) * _UNITS[match[2].lower()]


def format_size(size_bytes: int) -> str:
    """Return *size_bytes* in the largest unit that shows it exactly; parse_size reads it."""
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return str(size_bytes)


def parse_endpoint(value: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[v6]:port``. Raises ValueError."""
    host, _, port = value.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not host or (":" in host) != bracketed or not re.fullmatch("[0-9]{1,5}", port):
        raise ValueError("give host:port, such as 127.0.0.1:7420 or [::1]:7420; port 0 is any")
    if int(port) > 65535:
        raise ValueError("a port is at most 65535")
    return host, int(port)


def join_endpoint(host: str, port: int) -> str:
    """Return what ``parse_endpoint`` splits so."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unresolved(host: str) -> str:
    """Return what is wrong with a name that does not resolve; empty for one that does."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return f"{host!r} does not resolve; give a name or an address of this host"
    return ""


def slab_bytes(cpu_bytes: int) -> int:
    """Return a size of slabs for a cpu tier: near a power of two near a sixteenth of it, a 32nd
    more, and what is left over.

    Few slabs to pass, room for a frame; the odd 32nd because a frame is a power of two and its
    header, of which a slab of a power of two would hold one less than it could.
    """
    near = 1 << (cpu_bytes // 16).bit_length() - 1
    near = max(MIN_TIER_BYTES, min(near, MAX_SLAB_BYTES))
    slabs = max(1, cpu_bytes // (near + near // 32))
    return cpu_bytes // slabs // (4 * KIB) * (4 * KIB)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach *host*."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bulk_endpoint(value: str) -> str:
    """Check an address of the bulk channel: host:port or off."""
    if value != "off":
        parse_endpoint(value)
    return value


def _event_endpoint(value: str) -> str:
    """Check an address of published events: host:port, ipc:PATH or off."""
    if value.startswith("ipc:"):
        path = value.removeprefix("ipc:")
        if not os.path.isabs(path) or len(os.fsencode(path)) > SOCKET_PATH_BYTES:
            raise ValueError(f"give ipc: and an absolute path of {SOCKET_PATH_BYTES} bytes at most")
        return value
    return _bulk_endpoint(value)


def is_redis_url(url: str) -> bool:
    """Whether *url* names a Redis, its Sentinels or some nodes of a Redis Cluster."""
    try:
        parse_redis_url(url)
    except InvalidRequestError:
        return False
    return True


def _bound_size(size_bytes: int) -> int:
    if size_bytes > MAX_SIZE_BYTES:
        raise ValueError(f"give at most {format_size(MAX_SIZE_BYTES)}")
    return size_bytes


def _tier_size(size_bytes: int) -> int:
    if size_bytes < MIN_TIER_BYTES:
        raise ValueError(f"a tier has at least {format_size(MIN_TIER_BYTES)}")
    return size_bytes


def _off(value: object) -> object:
    return "off" if value is False else value  # what YAML makes of a bare off


# The text at the end of each is what --help calls the value.
Size = Annotated[int, BeforeValidator(parse_size), AfterValidator(_bound_size), "SIZE"]
TierSize = Annotated[Size, AfterValidator(_tier_size)]
Count = Annotated[int, Field(ge=1, le=1 << 20), "N"]
Workers = Annotated[int, Field(ge=1, le=1024), "N"]
RedisConnections = Annotated[int, Field(ge=1, le=64), "N"]
Millis = Annotated[int, Field(ge=1, le=86_400_000), "MS"]
Endpoint = Annotated[str, BeforeValidator(_off), "HOST:PORT"]
BulkEndpoint = Annotated[str, BeforeValidator(_off), AfterValidator(_bulk_endpoint), "HOST:PORT"]
EventEndpoint = Annotated[str, BeforeValidator(_off), AfterValidator(_event_endpoint), "HOST:PORT"]
SocketPath = Annotated[str, BeforeValidator(_off), "PATH"]
