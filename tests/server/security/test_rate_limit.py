"""So many a second: taken, left out and counted."""

from __future__ import annotations

import pytest
import structlog
from simulation.clock import FakeClock

from kvstore.server.security.rate_limit import LINES_PER_S, REFUSED, LogLimit, RateLimit


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
