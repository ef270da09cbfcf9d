"""What every operation with a deadline is held to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from simulation.world import World


@contextmanager
def bounded(world: World, deadline: float) -> Iterator[None]:
    """Fail when work begins after *deadline*, or time passes that no running work explains.

    A stepped WorkQueue cannot leave work that has begun, as a waiting thread can: that one piece
    may end late.
    """
    work_queue, began = world.work_queue, world.clock()
    work_queue.started = work_queue.ended = began
    yield
    if work_queue.started > began:
        assert work_queue.started < deadline, "work was begun for a caller whose time was up"
    assert world.clock() <= max(deadline, work_queue.ended), "somebody waited beyond the deadline"
