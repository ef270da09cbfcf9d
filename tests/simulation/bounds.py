"""What every operation with a deadline is held to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from simulation.world import World


@contextmanager
def bounded(world: World, deadline: float) -> Iterator[None]:
    """Fail when work begins after *deadline*, or time passes that no running work explains.

    A stepped Mover cannot leave work that has begun, as a waiting thread can: that one piece
    may end late.
    """
    mover, began = world.mover, world.clock()
    mover.started = mover.ended = began
    yield
    if mover.started > began:
        assert mover.started < deadline, "work was begun for a caller whose time was up"
    assert world.clock() <= max(deadline, mover.ended), "somebody waited beyond the deadline"
