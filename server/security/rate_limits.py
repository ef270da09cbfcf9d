"""Limits of tenants besides bytes: chunks, requests per second, leases. Changeable at run time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any

import structlog

from kvstore.proto.errors import InvalidRequestError, QuotaExceededError
from kvstore.server.settings.values import BUCKETS, EVERY_OTHER, MAX_LIMIT

LINES_PER_S = 20
"""Log lines of one kind per second; further ones are counted in the next line."""

REFUSED = "refused"
"""Log event of a refused call; its ``error`` is a class name."""


class RateLimit:
    """A token bucket of *per_s* tokens per second, with bursts of *per_s*. Thread-safe.

    ``left_out`` counts refusals since the last success.
    """

    def __init__(self, per_s: int, clock: Callable[[], float]) -> None:
        self._per_s = float(per_s)
        self._clock = clock
        self._left, self._at = self._per_s, clock()
        self.left_out = 0
        self._lock = Lock()  # guards the three above

    def take(self) -> int | None:
        """Take a token. Return how many were refused before it; None when it is refused."""
        with self._lock:
            now = self._clock()
            self._left = min(self._per_s, self._left + self._per_s * (now - self._at))
            self._at = now
            if self._left < 1.0:
                self.left_out += 1
                return None
            self._left -= 1.0
            left_out, self.left_out = self.left_out, 0
            return left_out


class LogLimit:
    """A structlog processor that limits each event, refusals by class of error, to LINES_PER_S."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._limits: Mapping[tuple[str, str], RateLimit]
        self._limits = defaultdict(lambda: RateLimit(LINES_PER_S, clock))

    def __call__(
        self, logger: object, name: str, fields: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Return *fields* with the count of dropped lines before; raise DropEvent to drop it."""
        event = str(fields.get("event"))
        kind = (event, str(fields.get("error")) if event == REFUSED else "")
        left_out = self._limits[kind].take()
        if left_out is None:
            raise structlog.DropEvent
        if left_out:
            fields["left_out"] = left_out
        return fields


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one tenant: chunks on each tier, requests per second, leases. 0: no limit."""

    chunks: int = 0
    requests_per_s: int = 0
    leases: int = 0

    def __post_init__(self) -> None:
        for name in ("chunks", "requests_per_s", "leases"):
            if not 0 <= getattr(self, name) <= MAX_LIMIT:
                raise InvalidRequestError(name, getattr(self, name), "give 0 or more; 0: no limit")


NO_LIMITS = Limits()


class TenantLimits:
    """The limits of all tenants, and their token buckets. Thread-safe."""

    def __init__(self, limits: Mapping[str, Limits], clock: Callable[[], float]) -> None:
        self.by_tenant = dict(limits)
        """Explicit limits; read without the lock."""
        self._clock = clock
        # A tenant dropped from the cache starts again with a full bucket.
        self._bucket = lru_cache(BUCKETS)(lambda tenant, rate: RateLimit(rate, self._clock))
        self._lock = Lock()  # guards the table

    def of(self, tenant: str) -> Limits:
        """Return the limits of *tenant*."""
        return self.by_tenant.get(tenant) or self.by_tenant.get(EVERY_OTHER, NO_LIMITS)

    def set(self, tenant: str, limits: Limits) -> None:
        """Set the limits of *tenant*."""
        with self._lock:
            if tenant not in self.by_tenant and len(self.by_tenant) >= BUCKETS:
                raise InvalidRequestError("tenant", tenant, f"at most {BUCKETS} have limits")
            self.by_tenant[tenant] = limits

    def tenants(self) -> list[str]:
        """Return the tenants with explicit limits."""
        with self._lock:
            return sorted(set(self.by_tenant) - {EVERY_OTHER})

    def take_request(self, tenant: str) -> None:
        """Count one request. Raises QuotaExceededError when the tenant's bucket is empty."""
        rate = self.of(tenant).requests_per_s
        if rate and self._bucket(tenant, rate).take() is None:
            raise QuotaExceededError("requests_per_s", rate, f"tenant {tenant!r}")
