"""What a failed call becomes, and when the gate lets the next one through."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kvstore.client.connection import CircuitBreaker, Until, translate
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    QuotaExceededError,
    ShuttingDownError,
    TierUnavailableError,
)


class _Failure(grpc.RpcError):
    """A failed call, as gRPC raises it."""

    def __init__(self, code: grpc.StatusCode, details: str | None, metadata: Any = ()) -> None:
        super().__init__()
        self._values = (code, details, metadata)

    def code(self) -> grpc.StatusCode:
        return self._values[0]

    def details(self) -> str | None:
        return self._values[1]

    def trailing_metadata(self) -> Any:
        return self._values[2]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, QuotaExceededError),
        (grpc.StatusCode.UNAVAILABLE, TierUnavailableError),
        (grpc.StatusCode.CANCELLED, DeadlineError),
        (grpc.StatusCode.UNIMPLEMENTED, KVStoreError),
    ],
)
@pytest.mark.parametrize("metadata", [(), None, (("other", "LeaseExpiredError"),)])
def test_failure_of_grpc_s_own_becomes_an_error_of_the_store(
    code: grpc.StatusCode, kind: type[KVStoreError], metadata: Any
) -> None:
    error = translate(_Failure(code, "for a reason", metadata))
    assert type(error) is kind
    assert "for a reason" in str(error)
    assert type(translate(_Failure(code, None, metadata))) is kind


def test_error_that_the_server_named_is_that_error_whatever_the_status() -> None:
    named = (("kvstore-error", "LeaseExpiredError"),)
    error = translate(_Failure(grpc.StatusCode.UNAVAILABLE, "lease_id=3: gone", named))
    assert type(error) is LeaseExpiredError
    assert str(error) == "lease_id=3: gone"


def test_error_of_a_newer_server_is_an_error_of_the_store() -> None:
    named = (("kvstore-error", "MoonPhaseError"),)
    error = translate(_Failure(grpc.StatusCode.ABORTED, "waxing", named))
    assert type(error) is KVStoreError
    assert str(error) == "waxing"


@pytest.mark.parametrize(
    "error",
    [DeadlineError("late"), TierUnavailableError("server", "connection refused")],
)
def test_gate_shuts_after_silence_and_opens_when_its_time_is_up(error: KVStoreError) -> None:
    clock = Clock()
    gate = CircuitBreaker(500, clock)
    gate.check()
    assert gate.note(error)
    for _ in range(3):
        with pytest.raises(TierUnavailableError, match=r"did not answer; tried again in 0\.5 s"):
            gate.check()
    clock.now += 0.499
    with pytest.raises(TierUnavailableError):
        gate.check()
    clock.now += 0.002
    gate.check()


@pytest.mark.parametrize(
    "error",
    [
        None,
        InvalidRequestError("x", 1, "use 2"),
        LeaseExpiredError("gone"),
        ShuttingDownError("bye"),
        TierUnavailableError("disk", "broken"),
    ],
)
def test_any_answer_opens_the_gate(error: KVStoreError | None) -> None:
    gate = CircuitBreaker(500, Clock())
    gate.note(DeadlineError("late"))
    assert not gate.note(error)
    gate.check()


def test_calls_that_wait_at_the_same_time_count_once() -> None:
    clock = Clock()
    gate = CircuitBreaker(500, clock, 1000)
    short = Until(200, clock(), clock)
    for _ in range(9):
        assert not gate.note(DeadlineError("late"), short)
    clock.now += 0.2
    assert not gate.note(DeadlineError("late"), short)
    gate.note(None)
    for is_open in (False, False, True):
        clock.now += 0.2
        assert gate.note(DeadlineError("late"), short) == is_open
    clock.now += 0.6
    assert gate.note(DeadlineError("late"), short), "a server that is dead costs once"
