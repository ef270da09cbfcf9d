"""Values of settings: sizes, addresses, files, and the limits of ``--limits``."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

KIB, MIB, GIB, TIB = (1 << 10 * power for power in (1, 2, 3, 4))
MIN_TIER_BYTES = 4 * MIB
MAX_SLAB_BYTES = 256 * MIB
MAX_SIZE_BYTES = 1 << 50
MAX_PASSWORD_BYTES = 4096
MAX_QUERIED_PEERS = 16
"""Limit of peers per lookup, and in a fixed list."""
GET_BYTES = 16 << 20
"""Bytes counted per get: about what the sockets of both ends can buffer."""
DIRECTORY = "directory"
"""In ``peers``: the servers in the node directory."""
EVERY_OTHER = "*"
"""In lists of tenants: every tenant that is not listed."""
POOL_PREFIX = "pool:"
"""Prefix of a shared pool's name as a tenant; real tenants' names have no colon."""
MAX_LIMIT = 1 << 40
BUCKETS = 4096
"""Limit of tenants with limits, and of rate limiters."""
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
TENANT_FIX = "use letters, digits and _.-, 128 at most"
TIER_NAMES = ("gpu", "cpu", "disk", "redis")
"""Fastest first."""
MAX_RATIO = 0.75
"""A blending gate that must recompute more closes: full prefill is then as good."""

TierName = Literal["gpu", "cpu", "disk", "redis"]
StateRule = Literal["all", "judicious"]

_SIZE = re.compile(r"([0-9]{1,18})\s*([KkMmGgTt][Ii]?)?[Bb]?")


def parse_size(value: object) -> int:
    """Return bytes from a number or text such as ``512MiB``. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("give bytes as 8GiB, 512MiB, 1GB or 1048576")
    unit = (match[2] or " ").lower()
    factor: int = (1024 if unit[1:] else 1000) ** " kmgt".index(unit[0])
    return int(match[1]) * factor


def format_size(size_bytes: int) -> str:
    """Return *size_bytes* in the largest exact unit; the inverse of parse_size."""
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return str(size_bytes)


def text_by_tier(values: Mapping[str, object]) -> str:
    """Return *values* by tier as text: the most common value, then the exceptions."""
    texts = {t: format_size(v) if isinstance(v, int) else str(v) for t, v in values.items()}
    usual = Counter(texts.values()).most_common(1)[0][0]
    return ",".join([usual, *(f"{tier}={text}" for tier, text in texts.items() if text != usual)])


def named_values(value: object, fix: str, comma: str = ",") -> list[list[tuple[str, object]]]:
    """Return the ``NAME=VALUE`` pairs of a text or mapping, or of each in a list; "" for no name.

    *comma* matches the separator. Raises ValueError with *fix*.
    """
    found: list[list[tuple[str, object]]] = []
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, Mapping):
            found.append(list(one.items()))
        elif isinstance(one, str):
            parts = (part.strip() for part in re.split(comma, one))
            named = (re.fullmatch(r"(?s:(?:([\w-]+)\s*=\s*)?(.*))", part) for part in parts if part)
            found.append([(match[1] or "", match[2]) for match in named if match])
        elif one is not None:
            raise ValueError(fix)
    return found


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
    """Return the endpoint as text; the inverse of ``parse_endpoint``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unresolved(host: str) -> str:
    """Return the fix for a name that does not resolve; empty for one that does."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return f"{host!r} does not resolve; give a name or an address of this host"
    return ""


def slab_bytes(cpu_bytes: int) -> int:
    """Return the slab size of a cpu tier: the power of two below a sixteenth of it, plus 1/32,
    plus an equal part of the remainder.

    Few slabs to share, each large enough for a frame. The extra 1/32 is for headers: a frame is a
    power of two plus a header, and a slab of a power of two would hold one frame less.
    """
    near = 1 << (cpu_bytes // 16).bit_length() - 1
    near = max(MIN_TIER_BYTES, min(near, MAX_SLAB_BYTES))
    slabs = max(1, cpu_bytes // (near + near // 32))
    return cpu_bytes // slabs // (4 * KIB) * (4 * KIB)


def check_tenant_name(name: str) -> str:
    """Return *name*. Raises ValueError for an invalid tenant name."""
    if not TENANT_NAME.fullmatch(name):
        raise ValueError(f"invalid tenant name: {TENANT_FIX}")
    return name


def _tenant_or_pool(name: str) -> str:
    check_tenant_name(name.removeprefix(POOL_PREFIX))
    return name


def _tenant_or_other(name: str) -> str:
    return name if name == EVERY_OTHER else check_tenant_name(name)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach *host*."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def absolute(path: Path) -> Path:
    """Return *path* as an absolute path, with ``~`` expanded."""
    return path.expanduser().absolute()


def read_password(path: Path) -> str:
    """Return the single line of text in the file. Raises ValueError."""
    with path.open("rb") as file:
        data = file.read(MAX_PASSWORD_BYTES + 1)
    try:
        text = data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        text = ""
    if not text or len(data) > MAX_PASSWORD_BYTES or "\n" in text:
        raise ValueError(f"put one line of text into it, of {MAX_PASSWORD_BYTES} bytes at most")
    return text


@dataclass(frozen=True)
class GateTerms:
    """Bounds of blending gates. ``ratio`` is the initial one of a gate, ``shadow_share`` the share
    of requests compared once a gate has been stable for long.
    """

    ratio: float = 0.3
    min_agreement: float = 0.95
    max_divergence: float = 0.03
    shadow_share: float = 0.005


# --- types of settings; the text at the end of each is its metavar in --help


def checked_size(value: object) -> int:
    """Like ``parse_size``, up to MAX_SIZE_BYTES."""
    size_bytes = parse_size(value)
    if size_bytes > MAX_SIZE_BYTES:
        raise ValueError(f"give at most {format_size(MAX_SIZE_BYTES)}")
    return size_bytes


def _tier_size(size_bytes: int) -> int:
    if size_bytes < MIN_TIER_BYTES:
        raise ValueError(f"a tier has at least {format_size(MIN_TIER_BYTES)}")
    return size_bytes


def _slab(size_bytes: int) -> int:
    if 0 < size_bytes < 64 * KIB:
        raise ValueError("it must be greater than or equal to 65536, or 0 for one from --cpu")
    if size_bytes % (4 * KIB):
        raise ValueError("give a multiple of 4KiB, the size of a page")
    return size_bytes


_SIZE_SCHEMA = {"type": ["string", "integer"], "pattern": f"^{_SIZE.pattern}$"}
Size = Annotated[int, PlainValidator(checked_size), WithJsonSchema(_SIZE_SCHEMA), "SIZE"]
TierSize = Annotated[Size, AfterValidator(_tier_size)]
Count = Annotated[int, Field(ge=1, le=1 << 20), "N"]
Millis = Annotated[int, Field(ge=1, le=86_400_000), "MS"]
MAX_DEADLINE_MS = 600_000
Share = Annotated[float, Field(ge=0.0, le=1.0), "SHARE"]
Tenant = Annotated[str, AfterValidator(check_tenant_name)]
TenantOrPool = Annotated[str, AfterValidator(_tenant_or_pool)]
AnyTenant = Annotated[str, AfterValidator(_tenant_or_other)]
OwnPath = Annotated[Path, AfterValidator(absolute), "PATH"]


class Checked(BaseModel):
    """Immutable values, validated once."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class Limits(Checked):
    """Rarely changed limits, with their defaults and bounds."""

    cpu_slab_bytes: Annotated[Size, AfterValidator(_slab)] = 0
    """size of shared-memory slabs; 0: derived from --cpu"""
    mover_queue: Count = 1024
    """background moves per queue"""
    prefetch_bytes: Size = 64 * MIB
    """bytes prefetched at once for chains that a lookup found; 0: no prefetch"""
    load_headroom_percent: Annotated[int, Field(ge=0, lt=50), "N"] = 5
    """share of the cpu tier reserved for loads"""
    ghost_limit: Count = 1 << 18
    """evicted chunks that the policies remember, at least"""
    breaker_failures: Count = 3
    """successive failures that open a tier's circuit breaker"""
    breaker_retry_ms: Millis = 1000
    """time after which an open circuit breaker retries the tier"""
    redis_connections: Annotated[int, Field(ge=1, le=64), "N"] = 16
    """connections to each Redis server; further calls wait"""
    max_batch_chunks: Count = 4096
    """chunks per request"""
    max_leases_per_session: Count = 1024
    """leases per session"""
    max_reservations_per_session: Count = 4096
    """unfinished puts per session"""
    session_ttl_ms: Millis = 15_000
    """idle time after which a session is closed"""
    peer_requests: Count = 8
    """concurrent requests of peers; further ones are misses"""
    peer_bytes: Annotated[Size, Field(ge=GET_BYTES)] = 8 * GET_BYTES
    """bytes in flight to peers"""
    peer_timeout_ms: Millis = 200
    """timeout of one peer request"""
    directory_ttl_ms: Annotated[Millis, Field(ge=500)] = 10_000
    """TTL of a node in the directory without a heartbeat"""
    directory_chunks: Count = 1 << 18
    """chunks that this node advertises in the directory, at most"""
    events_kept: Annotated[int, Field(ge=0, le=1 << 20), "N"] = 1 << 16
    """events kept for replay; 0 disables events"""
    audit_bytes: Annotated[Size, Field(ge=64 * KIB)] = 64 * MIB
    """size at which an audit log file is rotated; 8 are kept"""
    blend_ratio: Annotated[float, Field(ge=0.0, le=MAX_RATIO), "SHARE"] = GateTerms.ratio
    """initial share of tokens that a blending gate recomputes"""
    blend_shadows: Share = GateTerms.shadow_share
    """share of blended requests compared with a full prefill"""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if isinstance(value, cls):
            return value
        fix = "give NAME=VALUE, such as mover_queue=4096; with commas between them"
        pairs = [pair for source in named_values(value, fix) for pair in source]
        if not all(name for name, _ in pairs):
            raise ValueError(fix)
        return dict(pairs)

    def texts(self) -> dict[str, str]:
        """Return each limit as text."""
        sizes = [n for n, field in type(self).model_fields.items() if "SIZE" in field.metadata]
        return {n: format_size(v) if n in sizes else str(v) for n, v in self}

    def __str__(self) -> str:
        return ",".join(f"{name}={text}" for name, text in self.texts().items())
