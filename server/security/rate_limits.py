"""What tenants may have besides bytes: chunks, requests a second, leases. May change later."""

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
"""Of log lines of one kind; more are counted in the next one."""

REFUSED = "refused"
"""The event of a refused call; its ``error`` is a class's name."""


class RateLimit:
    """A token bucket that a second fills: *per_s* at once, and so many a second in the long run.

    Thread-safe. ``left_out`` counts what was refused since something was taken.
    """

    def __init__(self, per_s: int, clock: Callable[[], float]) -> None:
        self._per_s = float(per_s)
        self._clock = clock
        self._left, self._at = self._per_s, clock()
        self.left_out = 0
        self._lock = Lock()  # guards the three above

    def take(self) -> int | None:
        """Take one. Return how many were left out before it; None when it is left out itself."""
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
    """A processor for structlog: LINES_PER_S of each event, of refusals by class of error."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._limits: Mapping[tuple[str, str], RateLimit]
        self._limits = defaultdict(lambda: RateLimit(LINES_PER_S, clock))

    def __call__(
        self, logger: object, name: str, fields: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Return *fields*, with what was left out before; raise DropEvent to leave it out too."""
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
    """Of one tenant: chunks on each tier, requests a second, leases at once. 0: no limit."""

    chunks: int = 0
    requests_per_s: int = 0
    leases: int = 0

    def __post_init__(self) -> None:
        for name in ("chunks", "requests_per_s", "leases"):
            if not 0 <= getattr(self, name) <= MAX_LIMIT:
                raise InvalidRequestError(name, getattr(self, name), "give 0 or more; 0: no limit")


NO_LIMITS = Limits()


class TenantLimits:
    """The limits of every tenant, and the rates they are held to. Thread-safe."""

    def __init__(self, limits: Mapping[str, Limits], clock: Callable[[], float]) -> None:
        self.by_tenant = dict(limits)
        """What is set; read it without the lock."""
        self._clock = clock
        # One that is pushed out may begin with a full bucket again.
        self._bucket = lru_cache(BUCKETS)(lambda tenant, rate: RateLimit(rate, self._clock))
        self._lock = Lock()  # guards the table

    def of(self, tenant: str) -> Limits:
        """Return the limits of *tenant*."""
        return self.by_tenant.get(tenant) or self.by_tenant.get(EVERY_OTHER, NO_LIMITS)

    def set(self, tenant: str, limits: Limits) -> None:
        """Hold *tenant* to *limits* from now on."""
        with self._lock:
            if tenant not in self.by_tenant and len(self.by_tenant) >= BUCKETS:
                raise InvalidRequestError("tenant", tenant, f"at most {BUCKETS} have limits")
            self.by_tenant[tenant] = limits

    def tenants(self) -> list[str]:
        """Return the tenants that have limits of their own."""
        with self._lock:
            return sorted(set(self.by_tenant) - {EVERY_OTHER})

    def take_request(self, tenant: str) -> None:
        """Count one request. Raises QuotaExceededError when the tenant's second is spent."""
        rate = self.of(tenant).requests_per_s
        if rate and self._bucket(tenant, rate).take() is None:
            raise QuotaExceededError("requests_per_s", rate, f"tenant {tenant!r}")
