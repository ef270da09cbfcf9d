"""What tenants may have besides bytes: chunks, requests a second, leases. May change later."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock

from kvstore.proto.errors import InvalidRequestError, QuotaExceededError
from kvstore.server.security.rate_limit import RateLimit
from kvstore.server.settings.values import BUCKETS, EVERY_OTHER, MAX_LIMIT


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
    """The limits of every tenant, and the rates they are held to. Thread-safe.

    *clock* returns monotonic seconds.
    """

    def __init__(self, limits: Mapping[str, Limits], clock: Callable[[], float]) -> None:
        self._limits = dict(limits)
        self._clock = clock
        self._buckets: OrderedDict[str, RateLimit] = OrderedDict()
        self._lock = Lock()  # guards both tables

    def of(self, tenant: str) -> Limits:
        """Return the limits of *tenant*."""
        found = self._limits.get(tenant)
        return self._limits.get(EVERY_OTHER, NO_LIMITS) if found is None else found

    def set(self, tenant: str, limits: Limits) -> None:
        """Hold *tenant* to *limits* from now on."""
        with self._lock:
            if tenant not in self._limits and len(self._limits) >= BUCKETS:
                raise InvalidRequestError("tenant", tenant, f"at most {BUCKETS} have limits")
            self._limits[tenant] = limits
            self._buckets.pop(tenant, None)

    def tenants(self) -> list[str]:
        """Return the tenants that have limits of their own."""
        with self._lock:
            return sorted(set(self._limits) - {EVERY_OTHER})

    def take_request(self, tenant: str) -> None:
        """Count one request. Raises QuotaExceededError when the tenant's second is spent."""
        if not self._limits:
            return
        rate = self.of(tenant).requests_per_s
        if not rate:
            return
        with self._lock:
            bucket = self._buckets.get(tenant)
            if bucket is None:
                bucket = self._buckets[tenant] = RateLimit(rate, self._clock)
            self._buckets.move_to_end(tenant)
            while len(self._buckets) > BUCKETS:  # which may begin with a full bucket again
                self._buckets.popitem(last=False)
        if bucket.take() is None:
            raise QuotaExceededError("requests_per_s", rate, f"tenant {tenant!r}")
