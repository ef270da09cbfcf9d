from __future__ import annotations

import tracemalloc

from contracts.chunks import make_info

from kvstore.proto.types import ROOT, Fidelity
from kvstore.server.telemetry.event_ring import Event, EventRing

SIZE = 8


def event(number: int) -> Event:
    """Return the event of *number*: every third is of a copy that left."""
    info = make_info(number, 1)
    if number % 3 == 0:
        return Event(info.key, "disk", number=number, own=number // 2)
    return Event(info.key, "cpu", 16, info.parent, Fidelity.exact, number, number // 2)


def test_an_event_is_kept_whole_until_as_many_came_as_there_is_room_for() -> None:
    ring = EventRing(("disk", "cpu"), SIZE)
    assert [ring.get(number) for number in range(1, SIZE + 1)] == [None] * SIZE
    for number in range(1, 3 * SIZE):
        ring.put(event(number))
        least = max(1, number - SIZE + 1)
        assert [ring.get(at) for at in range(least, number + 1)] == [
            event(at) for at in range(least, number + 1)
        ]
        assert ring.get(least - 1) is None
    left = ring.get(3 * SIZE - 3)
    assert left is not None
    assert (left.tokens, left.parent, left.fidelity) == (0, ROOT, Fidelity.none)


def test_a_ring_takes_its_memory_at_the_start_and_no_more_when_it_fills() -> None:
    events = [event(number) for number in range(1, 1001)]
    tracemalloc.start()
    try:
        ring = EventRing(("disk", "cpu"), len(events))
        empty, _ = tracemalloc.get_traced_memory()
        for one in events:
            ring.put(one)
        full, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert empty > 64 * len(events)
    assert full - empty < len(events)
