"""Limits that hardly anybody has to change: ``--limits NAME=VALUE,...``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from kvstore.server.settings.values import (
    GET_BYTES,
    KIB,
    MAX_RATIO,
    MIB,
    Count,
    GateTerms,
    Millis,
    RedisConnections,
    Share,
    Size,
    format_size,
)

_GATES = GateTerms()


def _slab(size_bytes: int) -> int:
    if 0 < size_bytes < 64 * KIB:
        raise ValueError("it must be greater than or equal to 65536, or 0 for one from --cpu")
    if size_bytes % (4 * KIB):
        raise ValueError("give a multiple of 4KiB, the size of a page")
    return size_bytes


def limits_by_name(text: str) -> dict[str, object]:
    """Return the limits that ``NAME=VALUE,...`` gives; of one given twice the later.

    Raises ValueError.
    """
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if not all(name and equals for name, equals, _ in pairs):
        raise ValueError("give NAME=VALUE, such as mover_queue=4096; with commas between them")
    return {name.strip(): given.strip() for name, _, given in pairs}


def parse_limits(value: object) -> object:
    """Return the limits that a text gives; nothing else is changed. Raises ValueError."""
    if value is None:
        return {}
    return limits_by_name(value) if isinstance(value, str) else value


class Limits(BaseModel):
    """The limits by name, each with its default, its bounds and what it is."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    cpu_slab_bytes: Annotated[Size, AfterValidator(_slab)] = Field(
        default=0, description="memory is shared in slabs of this size; 0: from --cpu"
    )
    mover_queue: Count = Field(default=1024, description="background moves waiting in each lane")
    prefetch_bytes: Size = Field(
        default=64 * MIB,
        description="most that is loaded ahead of gets at once, for chains that were just found;"
        " 0: nothing",
    )
    load_headroom_percent: Annotated[int, "N"] = Field(
        default=5, ge=0, lt=50, description="share of the cpu tier kept for loads"
    )
    ghost_limit: Count = Field(
        default=1 << 18, description="evicted chunks that the policies remember, at least"
    )
    breaker_failures: Count = Field(
        default=3, description="failures in a row that put a tier aside"
    )
    breaker_retry_ms: Millis = Field(
        default=1000, description="a tier put aside is tried again after"
    )
    redis_connections: RedisConnections = Field(
        default=16, description="connections to each Redis server; further calls wait"
    )
    max_batch_chunks: Count = Field(default=4096, description="chunks in one request")
    max_leases_per_session: Count = Field(default=1024, description="leases one session may hold")
    max_reservations_per_session: Count = Field(
        default=4096, description="unfinished puts one session may hold"
    )
    session_ttl_ms: Millis = Field(
        default=15_000, description="a silent session is closed after this"
    )
    peer_requests: Count = Field(
        default=8, description="requests of peers that are answered at once; more are misses"
    )
    peer_bytes: Size = Field(
        default=8 * GET_BYTES,
        ge=GET_BYTES,
        description="bytes that may be under way to peers at once",
    )
    peer_timeout_ms: Millis = Field(
        default=200, description="longest wait for one answer of a peer"
    )
    directory_ttl_ms: Annotated[Millis, Field(ge=500)] = Field(
        default=10_000, description="a node that is silent in the directory for so long is gone"
    )
    directory_chunks: Count = Field(
        default=1 << 18, description="chunks that this node names in the directory, at most"
    )
    events_kept: Annotated[int, "N"] = Field(
        default=1 << 16,
        ge=0,
        le=1 << 20,
        description="latest events that readers may have missed; 0: no events at all",
    )
    audit_bytes: Size = Field(
        default=64 * MIB,
        ge=64 * KIB,
        description="a file of the audit log is set aside at this size; 8 are kept",
    )
    blend_ratio: Annotated[float, "SHARE"] = Field(
        default=_GATES.ratio,
        ge=0.0,
        le=MAX_RATIO,
        description="share of tokens to recompute that a gate of blending begins with",
    )
    blend_shadows: Share = Field(
        default=_GATES.shadow_share,
        description="share of blended requests that are compared with a full prefill",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return parse_limits(value)

    def texts(self) -> dict[str, str]:
        """Return each limit as text."""
        fields = type(self).model_fields
        return {name: _text(getattr(self, name), fields[name].metadata) for name in fields}

    def __str__(self) -> str:
        return ",".join(f"{name}={text}" for name, text in self.texts().items())


def _text(value: Any, metadata: list[Any]) -> str:
    return format_size(value) if "SIZE" in metadata else str(value)
