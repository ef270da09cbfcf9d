"""The circuit breaker: when a medium is left alone, and when it is tried again."""

from __future__ import annotations

import threading

import pytest
from simulation.clock import FakeClock
from structlog.testing import capture_logs

from kvstore.server.tiering.breaker import Breaker


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def breaker(clock: FakeClock) -> Breaker:
    return Breaker("tier redis", 3, 500, clock)


def open_it(breaker: Breaker) -> None:
    for number in range(3):
        breaker.fail(f"failure {number}")


def test_it_opens_at_the_limit_and_says_why(breaker: Breaker) -> None:
    breaker.fail("one")
    breaker.fail("two")
    assert breaker.allows()
    assert (breaker.is_open, breaker.reason) == (False, "")
    breaker.fail("three")
    assert not breaker.allows()
    assert (breaker.is_open, breaker.reason) == (True, "three")


def test_a_success_between_failures_starts_the_count_anew(breaker: Breaker) -> None:
    for _ in range(5):
        breaker.fail("one")
        breaker.fail("two")
        breaker.succeed()
    assert breaker.allows()
    assert breaker.reason == ""


def test_an_open_breaker_lets_one_attempt_a_period(breaker: Breaker, clock: FakeClock) -> None:
    open_it(breaker)
    clock.advance(0.499)
    assert not breaker.allows()
    clock.advance(0.002)
    assert not breaker.is_open
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    assert breaker.is_open
    clock.advance(0.501)
    assert [breaker.allows() for _ in range(2)] == [True, False]


def test_an_attempt_that_fails_opens_it_for_another_period(
    breaker: Breaker, clock: FakeClock
) -> None:
    open_it(breaker)
    clock.advance(0.6)
    assert breaker.allows()
    clock.advance(0.3)
    breaker.fail("still down")
    clock.advance(0.4)
    assert not breaker.allows()
    assert breaker.reason == "still down"
    clock.advance(0.2)
    assert breaker.allows()


def test_an_attempt_that_succeeds_closes_it(breaker: Breaker, clock: FakeClock) -> None:
    open_it(breaker)
    clock.advance(0.6)
    assert breaker.allows()
    breaker.succeed()
    assert [breaker.allows() for _ in range(3)] == [True, True, True]
    assert breaker.reason == ""
    breaker.fail("one")
    assert breaker.allows()


def test_of_many_threads_one_gets_the_attempt(breaker: Breaker, clock: FakeClock) -> None:
    open_it(breaker)
    clock.advance(0.6)
    barrier, allowed = threading.Barrier(8, timeout=30), list[bool]()

    def ask() -> None:
        barrier.wait()
        allowed.append(breaker.allows())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(allowed) == [False] * 7 + [True]


def test_the_log_has_one_line_for_each_opening_and_each_closing(
    breaker: Breaker, clock: FakeClock
) -> None:
    with capture_logs() as logs:
        breaker.succeed()
        breaker.fail("one")
        breaker.succeed()
        assert logs == []
        for _ in range(2):
            open_it(breaker)
            clock.advance(0.6)
            breaker.fail("still down")
            breaker.succeed()
            breaker.succeed()
    assert [(log["event"].partition(":")[0], log["log_level"]) for log in logs] == [
        ("circuit breaker opened", "warning"),
        ("circuit breaker closed", "warning"),
    ] * 2
    assert {log["medium"] for log in logs} == {"tier redis"}
    assert logs[0]["reason"] == "failure 2"
