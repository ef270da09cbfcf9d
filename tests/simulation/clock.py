"""Time that passes only when somebody says so."""

from __future__ import annotations


class FakeClock:
    """Monotonic seconds; call it to read it."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
