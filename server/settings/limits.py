"""Limits that hardly anybody has to change: ``--limits NAME=VALUE,...``."""

from __future__ import annotations

from typing import Annotated

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


class Limits(BaseModel):
    """The limits by name, each with its default, its bounds and what it is."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True
    )

    cpu_slab_bytes: Annotated[Size, AfterValidator(_slab)] = 0
    """memory is shared in slabs of this size; 0: from --cpu"""
    mover_queue: Count = 1024
    """background moves waiting in each queue"""
    prefetch_bytes: Size = 64 * MIB
    """most that is loaded ahead of gets at once, for chains that were just found; 0: nothing"""
    load_headroom_percent: Annotated[int, Field(ge=0, lt=50), "N"] = 5
    """share of the cpu tier kept for loads"""
    ghost_limit: Count = 1 << 18
    """evicted chunks that the policies remember, at least"""
    breaker_failures: Count = 3
    """failures in a row that put a tier aside"""
    breaker_retry_ms: Millis = 1000
    """a tier put aside is tried again after"""
    redis_connections: RedisConnections = 16
    """connections to each Redis server; further calls wait"""
    max_batch_chunks: Count = 4096
    """chunks in one request"""
    max_leases_per_session: Count = 1024
    """leases one session may hold"""
    max_reservations_per_session: Count = 4096
    """unfinished puts one session may hold"""
    session_ttl_ms: Millis = 15_000
    """a silent session is closed after this"""
    peer_requests: Count = 8
    """requests of peers that are answered at once; more are misses"""
    peer_bytes: Annotated[Size, Field(ge=GET_BYTES)] = 8 * GET_BYTES
    """bytes that may be under way to peers at once"""
    peer_timeout_ms: Millis = 200
    """longest wait for one answer of a peer"""
    directory_ttl_ms: Annotated[Millis, Field(ge=500)] = 10_000
    """a node that is silent in the directory for so long is gone"""
    directory_chunks: Count = 1 << 18
    """chunks that this node names in the directory, at most"""
    events_kept: Annotated[int, Field(ge=0, le=1 << 20), "N"] = 1 << 16
    """latest events that readers may have missed; 0: no events at all"""
    audit_bytes: Annotated[Size, Field(ge=64 * KIB)] = 64 * MIB
    """a file of the audit log is set aside at this size; 8 are kept"""
    blend_ratio: Annotated[float, Field(ge=0.0, le=MAX_RATIO), "SHARE"] = _GATES.ratio
    """share of tokens to recompute that a gate of blending begins with"""
    blend_shadows: Share = _GATES.shadow_share
    """share of blended requests that are compared with a full prefill"""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if value is None:
            return {}
        return limits_by_name(value) if isinstance(value, str) else value

    def texts(self) -> dict[str, str]:
        """Return each limit as text."""
        sizes = [n for n, field in type(self).model_fields.items() if "SIZE" in field.metadata]
        return {n: format_size(v) if n in sizes else str(v) for n, v in self}

    def __str__(self) -> str:
        return ",".join(f"{name}={text}" for name, text in self.texts().items())
