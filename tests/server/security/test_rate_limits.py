""""""

from __future__ import annotations

import pytest
import structlog
from simulation.clock import FakeClock

from kvstore.proto.errors import InvalidRequestError, PermissionDeniedError, QuotaExceededError
from kvstore.server.security import rate_limits
from kvstore.server.security.authorization import access_to
from kvstore.server.security.rate_limits import (
    LINES_PER_S,
    REFUSED,
    Limits,
    LogLimit,
    RateLimit,
    TenantLimits,
)
from kvstore.server.security.sessions import Principal
from kvstore.server.settings.settings import load_config


def taken(limits: TenantLimits, tenant: str, asked: int) -> int:
    """Return how many of *asked* requests went through."""
    done = 0
    for _ in range(asked):
        try:
            limits.take_request(tenant)
        except QuotaExceededError:
            continue
        done += 1
    return done


def test_a_tenant_may_ask_a_seconds_worth_at_once_and_the_rate_in_the_long_run() -> None:
    clock = FakeClock()
    limits = TenantLimits({"acme": Limits(requests_per_s=10)}, clock)
    assert taken(limits, "acme", 50) == 10
    clock.advance(0.5)
    assert taken(limits, "acme", 50) == 5
    clock.advance(1000)
    assert taken(limits, "acme", 50) == 10
    assert taken(limits, "zeta", 50) == 50


def test_those_who_are_not_named_have_the_limits_of_all_others_each_for_itself() -> None:
    limits = TenantLimits({"*": Limits(requests_per_s=3), "acme": Limits()}, FakeClock())
    assert [taken(limits, name, 9) for name in ("a", "b", "acme")] == [3, 3, 9]
    limits.set("a", Limits(requests_per_s=5))
    assert taken(limits, "a", 9) == 5
    assert limits.tenants() == ["a", "acme"]


def test_tables_have_limits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "BUCKETS", 4)
    limits = TenantLimits({"*": Limits(requests_per_s=1)}, FakeClock())
    for number in range(20):
        limits.take_request(f"tenant-{number}")
    assert limits._bucket.cache_info().currsize == 4
    for number in range(3):
        limits.set(f"tenant-{number}", Limits(leases=1))
    with pytest.raises(InvalidRequestError, match="at most 4"):
        limits.set("one-more", Limits(leases=1))
    with pytest.raises(InvalidRequestError):
        Limits(leases=-1)


def test_what_a_pool_allows_is_no_more_than_the_callers_own_roles() -> None:
    pools = load_config(["--shared-pools", "library=*:curator,team=acme+zeta:acme"]).shared_pools
    assert ",".join(map(str, pools)) == "library=*:curator,team=acme+zeta:acme"

    def roles(tenant: str, asked: str, *own: str) -> set[str]:
        principal = Principal("key:1", tenant, frozenset(own or ("read", "write", "admin")))
        return set(access_to(pools, principal, asked)[1])

    assert roles("acme", "pool:library") == {"read"}
    assert roles("curator", "pool:library") == {"read", "write"}
    assert roles("curator", "pool:library", "read") == {"read"}
    assert roles("zeta", "pool:team") == {"read"}
    assert roles("acme", "") == {"read", "write", "admin"}
    for tenant, asked in (("other", "pool:team"), ("acme", "zeta"), ("acme", "library")):
        with pytest.raises(PermissionDeniedError):
            roles(tenant, asked)
    with pytest.raises(PermissionDeniedError):
        roles("zeta", "pool:team", "admin")


def test_what_a_second_brings_is_taken_and_the_rest_counted() -> None:
    clock = FakeClock()
    limit = RateLimit(10, clock)
    assert [limit.take() for _ in range(12)] == [0] * 10 + [None] * 2
    clock.advance(0.1)
    assert [limit.take(), limit.take()] == [2, None]
    clock.advance(100.0)
    assert [limit.take() for _ in range(11)] == [1] + [0] * 9 + [None]


def test_refusals_of_strangers_hide_no_others() -> None:
    limit = LogLimit(FakeClock())
    stranger = {"event": REFUSED, "error": "UnauthenticatedError"}
    for _ in range(LINES_PER_S):
        assert limit(None, "info", dict(stranger)) == stranger
    with pytest.raises(structlog.DropEvent):
        limit(None, "info", dict(stranger))
    for other in ({"event": REFUSED, "error": "InvalidRequestError"}, {"event": "a worker died"}):
        assert limit(None, "info", dict(other)) == other
