"""Sizes, addresses and files as people write them, and the kinds of value that settings have."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from kvstore.proto.errors import InvalidRequestError

KIB, MIB, GIB, TIB = (1 << 10 * power for power in (1, 2, 3, 4))
MIN_TIER_BYTES = 4 * MIB
MAX_SLAB_BYTES = 256 * MIB
MAX_SIZE_BYTES = 1 << 50
SOCKET_PATH_BYTES = 107
"""What a Unix socket's address holds."""
MAX_PASSWORD_BYTES = 4096
MIN_SECRET_BYTES = 16
MAX_ASKED_PEERS = 16
"""In one lookup, and in a fixed list."""
GET_BYTES = 16 << 20
"""What one get is counted with: about what the sockets of both ends can hold of it."""
DIRECTORY = "directory"
"""In ``peers``: the servers that the node directory names."""
EVERY_OTHER = "*"
"""In lists of tenants: each that is not named."""
MAX_LIMIT = 1 << 40
BUCKETS = 4096
"""Tenants that have limits, and whose rate is watched."""
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
TENANT_FIX = "use letters, digits and _.-, 128 at most"
TIER_NAMES = ("gpu", "cpu", "disk", "redis")
"""From the fastest to the farthest."""
MAX_RATIO = 0.75
"""A gate of blending that would have to recompute more closes: full prefill is then as good."""

TierName = Literal["gpu", "cpu", "disk", "redis"]
StateRule = Literal["all", "judicious"]

_BINARY = {"kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS = {"": 1, "b": 1} | _BINARY | _DECIMAL
_UNITS |= {name.removesuffix("b"): size for name, size in _UNITS.items()}  # 8G, 8Gi
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


def text_by_tier(values: Mapping[str, object]) -> str:
    """Return *values* by tier as text: what most tiers have, then what the others have."""
    texts = {t: format_size(v) if isinstance(v, int) else str(v) for t, v in values.items()}
    usual = Counter(texts.values()).most_common(1)[0][0]
    return ",".join([usual, *(f"{tier}={text}" for tier, text in texts.items() if text != usual)])


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


def check_tenant_name(name: str) -> None:
    """Raise ValueError for what is no tenant's name."""
    if not TENANT_NAME.fullmatch(name):
        raise ValueError(f"no tenant's name: {TENANT_FIX}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach *host*."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def absolute(path: Path) -> Path:
    """Return *path* with the home folder and the working folder filled in."""
    return path.expanduser().absolute()


def read_password(path: Path) -> str:
    """Return the one line of text that the file holds. Raises ValueError."""
    with path.open("rb") as file:
        data = file.read(MAX_PASSWORD_BYTES + 1)
    try:
        text = data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        text = ""
    if not text or len(data) > MAX_PASSWORD_BYTES or "\n" in text:
        raise ValueError(f"put one line of text into it, of {MAX_PASSWORD_BYTES} bytes at most")
    return text


@dataclass(frozen=True, slots=True)
class GateTerms:
    """What blending is held to. ``ratio`` is what a gate begins with, ``shadow_share`` how many
    of the requests are compared once nothing has changed for long.
    """

    ratio: float = 0.3
    min_agreement: float = 0.95
    max_divergence: float = 0.03
    shadow_share: float = 0.005

    def __post_init__(self) -> None:
        for name, top in (("ratio", MAX_RATIO), ("min_agreement", 1.0), ("shadow_share", 1.0)):
            if not 0.0 <= getattr(self, name) <= top:
                raise InvalidRequestError(name, getattr(self, name), f"use 0 to {top}")
        if not 0.0 < self.max_divergence < 100.0:
            raise InvalidRequestError("max_divergence", self.max_divergence, "nats, above 0")


def _address(value: str) -> str:
    parse_endpoint(value)
    return value


def _address_or_off(value: str) -> str:
    return value if value == "off" else _address(value)


def _event_address(value: str) -> str:
    if not value.startswith("ipc:"):
        return _address_or_off(value)
    path = value.removeprefix("ipc:")
    if not os.path.isabs(path) or len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise ValueError(f"give ipc: and an absolute path of {SOCKET_PATH_BYTES} bytes at most")
    return value


def _socket_path(value: str) -> str:
    if value == "off":
        return value
    path = os.path.expanduser(value)
    if not os.path.isabs(path):
        raise ValueError("give an absolute path, or off to do without shared memory")
    if len(os.fsencode(path.replace("{port}", "65535"))) > SOCKET_PATH_BYTES:
        raise ValueError(f"a socket's path has at most {SOCKET_PATH_BYTES} bytes; shorten it")
    return path


def _collector(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.path.strip("/") or "@" in parts.netloc:
        raise ValueError("give http://host:port, or https://host:port for TLS")
    parse_endpoint(parts.netloc)
    return url


def _size(value: object) -> int:
    size_bytes = parse_size(value)
    if size_bytes > MAX_SIZE_BYTES:
        raise ValueError(f"give at most {format_size(MAX_SIZE_BYTES)}")
    return size_bytes


def _tier_size(size_bytes: int) -> int:
    if size_bytes < MIN_TIER_BYTES:
        raise ValueError(f"a tier has at least {format_size(MIN_TIER_BYTES)}")
    return size_bytes


def _readable(path: Path) -> Path:
    path = absolute(path)
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise ValueError("name a file that this user can read")
    return path


def _password_file(path: Path) -> Path:
    read_password(path)
    return path


def _secret_file(path: Path) -> Path:
    if path.stat().st_size < MIN_SECRET_BYTES:
        raise ValueError(f"put at least {MIN_SECRET_BYTES} random bytes into it")
    return path


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError("name a folder that exists")
    return absolute(path)


def _off(value: object) -> object:
    return "off" if value is False else value  # what YAML makes of a bare off


def split_names(value: object) -> object:
    """Split text at its commas; nothing is left of ``off``."""
    if _off(value) == "off":
        return None
    if not isinstance(value, str):
        return value
    return tuple(name.strip() for name in value.split(",") if name.strip())


def _peers(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if not names:
        return None
    addresses = [name for name in names if name != DIRECTORY]
    for address in addresses:
        if not parse_endpoint(address)[1]:
            raise ValueError("give each peer's port")
    if len(set(names)) < len(names) or len(addresses) > MAX_ASKED_PEERS:
        raise ValueError(f"name each peer once, {MAX_ASKED_PEERS} at most; of more, use directory")
    return names


# The text at the end of each is what --help calls the value.
Size = Annotated[int, BeforeValidator(_size), "SIZE"]
TierSize = Annotated[Size, AfterValidator(_tier_size)]
Count = Annotated[int, Field(ge=1, le=1 << 20), "N"]
Workers = Annotated[int, Field(ge=1, le=1024), "N"]
RedisConnections = Annotated[int, Field(ge=1, le=64), "N"]
Millis = Annotated[int, Field(ge=1, le=86_400_000), "MS"]
Share = Annotated[float, Field(ge=0.0, le=1.0), "SHARE"]
Text = Annotated[str | None, "TEXT"]
Listen = Annotated[str, BeforeValidator(_off), AfterValidator(_address), "HOST:PORT"]
Endpoint = Annotated[str, BeforeValidator(_off), AfterValidator(_address_or_off), "HOST:PORT"]
EventEndpoint = Annotated[str, BeforeValidator(_off), AfterValidator(_event_address), "HOST:PORT"]
SocketPath = Annotated[str, BeforeValidator(_off), AfterValidator(_socket_path), "PATH"]
Collector = Annotated[Annotated[str, AfterValidator(_collector)] | None, "URL"]
OwnPath = Annotated[Path, AfterValidator(absolute), "PATH"]
ReadableFile = Annotated[Path, AfterValidator(_readable)]
OwnFile = Annotated[ReadableFile | None, "PATH"]
PasswordFile = Annotated[Annotated[ReadableFile, AfterValidator(_password_file)] | None, "PATH"]
SecretFile = Annotated[Annotated[ReadableFile, AfterValidator(_secret_file)] | None, "PATH"]
Folder = Annotated[Annotated[Path, AfterValidator(_folder)] | None, "PATH"]
ScrubTiers = Annotated[tuple[TierName, ...], BeforeValidator(split_names), "NAMES"]
Peers = Annotated[
    tuple[str, ...] | None, BeforeValidator(split_names), AfterValidator(_peers), "HOST:PORT"
]
