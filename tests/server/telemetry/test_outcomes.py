"""What becomes of chunks is remembered by key, and no more of it than the limit says."""

from __future__ import annotations

import pytest
from simulation.clock import FakeClock

from kvstore.proto.types import ChunkKey
from kvstore.server.telemetry import events as outcomes
from kvstore.server.telemetry.events import MAX_DETAIL_CHARS, Fate, Outcomes


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "little"))


def test_the_last_outcome_of_a_chunk_is_what_is_told() -> None:
    clock = FakeClock()
    table = Outcomes(clock)
    assert table.of(key(1)) is None
    table.note(key(1), Fate.evicted, "cpu")
    clock.advance(5.0)
    table.note(key(1), Fate.refused, detail="no room")
    found = table.of(key(1))
    assert found == (Fate.refused, "", "no room", clock())


def test_the_oldest_outcomes_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "MAX_OUTCOMES", 3)
    table = Outcomes(FakeClock())
    for number in (1, 2, 3, 1, 4):
        table.note(key(number), Fate.evicted, "cpu")
    assert [number for number in range(5) if table.of(key(number))] == [1, 3, 4]


def test_a_long_detail_is_cut() -> None:
    table = Outcomes(FakeClock())
    table.note(key(1), Fate.invalid, detail="x" * 10_000)
    found = table.of(key(1))
    assert found is not None
    assert len(found.detail) == MAX_DETAIL_CHARS
