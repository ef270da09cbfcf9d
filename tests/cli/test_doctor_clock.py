"""What the doctor says of a clock that is wrong, by that of a real Redis."""

from __future__ import annotations

import time

import pytest
from redis_process import RedisProcess

from kvstore.cli.doctor_checks import CHECKS
from kvstore.cli.doctor_clock import check_clock
from kvstore.cli.finding import Finding
from kvstore.server.settings.settings import load_config


def findings(url: str, skew_s: float = 0.0) -> list[Finding]:
    config = load_config(["--tiers", "cpu,redis", "--cpu", "64MiB", "--redis", url])
    return list(check_clock(config, lambda: time.time() + skew_s))


@pytest.mark.parametrize(("skew_s", "where"), [(3600.0, "ahead of"), (-90.0, "behind")])
def test_a_clock_that_is_far_off_is_named_with_what_to_do(
    own_redis: RedisProcess, skew_s: float, where: str
) -> None:
    own_redis.start()
    (found,) = findings(own_redis.url, skew_s)
    assert found.state == "warn"
    assert found.saw.startswith(f"{abs(skew_s):.0f}")
    assert where in found.saw
    assert "NTP" in found.fix


def test_a_clock_that_agrees_is_ok(own_redis: RedisProcess) -> None:
    own_redis.start()
    (found,) = findings(own_redis.url)
    assert (found.state, found.fix) == ("ok", "")


def test_who_may_not_ask_or_gets_no_answer_is_told_nothing(own_redis: RedisProcess) -> None:
    own_redis.start()
    own_redis.client.acl_setuser("default", enabled=True, nopass=True, commands=["-time"])
    assert findings(own_redis.url) == []
    assert findings("redis://127.0.0.1:1/0") == []


def test_the_doctor_looks_at_the_clock() -> None:
    assert check_clock in CHECKS
