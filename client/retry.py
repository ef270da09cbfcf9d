"""What a failed call becomes, when it is worth calling again, and what time is left for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from kvstore.proto.errors import (
    DeadlineError,
    KVStoreError,
    QuotaExceededError,
    TierUnavailableError,
    revive,
)
from kvstore.proto.messages import ERROR_NAME


def translate(error: grpc.RpcError) -> KVStoreError:
    """Return the store's error that a failed call stands for."""
    code, details = error.code(), error.details() or ""
    metadata: Any = error.trailing_metadata() or ()
    names = [value for name, value in metadata if name == ERROR_NAME]
    if names:
        return revive(str(names[0]), details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"the server did not answer in time: {details}")
    if code is grpc.StatusCode.CANCELLED:  # by ``Connection.hang_up``, or a server that stops
        return DeadlineError(f"the call was ended: {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return revive(QuotaExceededError.__name__, details)
    if code is grpc.StatusCode.UNAVAILABLE:
        return TierUnavailableError("server", details)
    return KVStoreError(f"{code.name}: {details}")


def countdown(deadline_ms: int) -> Callable[[], int]:
    """Return what says how much of *deadline_ms* is left for the next of several calls.

    Raises DeadlineError once nothing is.
    """
    until = time.monotonic() + deadline_ms / 1000

    def left_ms() -> int:
        left = round(1000 * (until - time.monotonic()))
        if left < 1:
            raise DeadlineError(f"deadline_ms={deadline_ms} passed before the next request")
        return left

    return left_ms


class Gate:
    """Shut for a while after the server did not answer, so that a dead one costs once.

    Thread-safe. *clock* returns monotonic seconds.
    """

    def __init__(self, retry_after_ms: int, clock: Callable[[], float]) -> None:
        self._retry_after_s = retry_after_ms / 1000
        self._clock = clock
        self._shut_until = 0.0
        self._lock = threading.Lock()

    @property
    def is_shut(self) -> bool:
        """Whether calls fail at once."""
        return self._left_s() > 0

    def _left_s(self) -> float:
        with self._lock:
            return self._shut_until - self._clock()

    def check(self) -> None:
        """Raise TierUnavailableError while the gate is shut."""
        left_s = self._left_s()
        if left_s > 0:
            raise TierUnavailableError("server", f"did not answer; tried again in {left_s:.1f} s")

    def note(self, error: KVStoreError | None) -> bool:
        """Take note of how a call went: None, or its error. Return whether that shut the gate."""
        silent = isinstance(error, DeadlineError) or (
            isinstance(error, TierUnavailableError) and error.args[0].startswith("tier 'server'")
        )
        with self._lock:
            self._shut_until = self._clock() + self._retry_after_s if silent else 0.0
        return silent
