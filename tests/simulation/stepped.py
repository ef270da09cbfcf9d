"""A WorkQueue without threads: whoever waits does the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from typing_extensions import override

from kvstore.server.tiering.work_queue import Expect, Ticket, WorkQueue


class SteppedWorkQueue(WorkQueue):
    """With no workers in any queue nothing runs by itself: tests call ``step``, and ``wait`` steps
    until its ticket is done.
    """

    def __init__(
        self,
        queues: Mapping[str, int],
        limit_per_queue: int,
        clock: Callable[[], float],
        expect: Mapping[str, Expect] | None = None,
    ) -> None:
        super().__init__(queues, limit_per_queue, clock, expect=expect)
        self._is_stepped = not any(queues.values())

    def step(self, queue: str | None = None) -> bool:
        """Do the next piece of work of *queue*, or of any. Return whether there was one."""
        for name in self._waiting if queue is None else (queue,):
            with self._lock:
                ticket = self._next(name)
            if ticket is not None:
                self._do(ticket)
                return True
        return False

    @override
    def wait(self, ticket: Ticket, deadline: float) -> object:
        if self._is_stepped:
            while not ticket.done and self._clock() < deadline and self.step(ticket.queue):
                pass
            deadline = self._clock()
        return super().wait(ticket, deadline)

    @override
    def await_any(self, queues: Sequence[str], deadline: float) -> bool:
        if not self._is_stepped:
            return super().await_any(queues, deadline)
        with self._lock:
            waiting = [queue for queue, _ in self._open if queue in queues]
        return bool(waiting) and self._clock() < deadline and self.step(waiting[0])
