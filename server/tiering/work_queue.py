"""The WorkQueue: bounded background queues of promotions, demotions and slow queries.

Each direction of each medium has its own queue, so that a stuck medium delays no other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import structlog

from kvstore.proto.errors import DeadlineError

Work = Callable[[], object]
Expect = Callable[[Sequence[bytes]], object]
"""Called with the names of a thread's next tickets."""

MAX_BATCH = 16
"""Tickets of one batch_key that a worker takes at once."""

logger = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Ticket:
    """One queued piece of work; ``result`` or ``error`` is set once ``done``."""

    queue: str
    name: bytes
    work: Work
    is_urgent: bool
    claims: int | None
    """Claims left; at 0 the work is cancelled. None: it cannot be cancelled."""
    batch_key: object
    """Tickets of equal keys are best done in sequence by one worker; None: no batching."""
    is_begun: bool = False
    done: bool = False
    result: object = None
    error: Exception | None = None


class WorkQueue:
    """Bounded queues of tickets, and their threads.

    *queues* gives the workers of each queue; *clock* returns monotonic seconds. Up to *parallelism*
    workers of a queue, by default one, share the tickets of one batch_key. Before each ticket that
    has one, a worker calls *expect* of its queue with the names of its next tickets, and with none
    after the last; it must not raise.
    """

    def __init__(
        self,
        queues: Mapping[str, int],
        limit_per_queue: int,
        clock: Callable[[], float],
        parallelism: Mapping[str, int] | None = None,
        expect: Mapping[str, Expect] | None = None,
    ) -> None:
        self._parallelism = dict.fromkeys(queues, 1) | dict(parallelism or {})
        self._expect = expect or {}
        self._limit = limit_per_queue
        self._clock = clock
        self._waiting: dict[str, deque[Ticket]] = {queue: deque() for queue in queues}
        self._open: dict[tuple[str, bytes], Ticket] = {}
        self._at_work: dict[str, list[object]] = {queue: [] for queue in queues}
        """The batch_keys of busy workers, None included."""
        self._idle = dict.fromkeys(queues, 0)
        self._closed = False
        self._this_thread = threading.local()
        # Guards all fields above; held for queue operations only.
        self._lock = threading.Lock()
        # _changed is notified when a ticket is done, _queued when one is queued. Two conditions, as
        # waking all workers for each ticket takes the interpreter lock from waiting callers.
        self._changed = threading.Condition(self._lock)
        self._queued = {queue: threading.Condition(self._lock) for queue in queues}
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name=queue, daemon=True)
            for queue, workers in queues.items()
            for _ in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        queue: str,
        name: bytes,
        work: Work,
        *,
        urgent: bool = False,
        claimed: bool = False,
        batch_key: object = None,
    ) -> Ticket | None:
        """Queue *work*; None when the queue is full or the WorkQueue closed.

        Urgent work goes before the rest, in order of arrival, and past the limit: a caller waits
        for each piece, and callers are bounded. Work whose name still waits or runs in the queue is
        joined, not repeated. *claimed* work is cancelled once each claimer has called ``unclaim``,
        unless it is also submitted without a claim. A worker takes several of the same *batch_key*,
        in order.
        """
        with self._lock:
            tickets, known = self._waiting[queue], self._open.get((queue, name))
            if known is not None:
                if known.claims is not None:
                    known.claims = known.claims + 1 if claimed else None
                if urgent and not known.is_urgent and known in tickets:
                    tickets.remove(known)
                    known.is_urgent = True
                    tickets.insert(self._urgent_count(queue), known)
                return known
            if self._closed or (len(tickets) >= self._limit and not urgent):
                return None
            # In the caller's context: its request id and span.
            work = partial(copy_context().run, work)
            ticket = Ticket(queue, name, work, urgent, 1 if claimed else None, batch_key)
            self._open[queue, name] = ticket
            tickets.insert(self._urgent_count(queue) if urgent else len(tickets), ticket)
            self._queued[queue].notify()
            return ticket

    def _urgent_count(self, queue: str) -> int:
        """Return how many urgent tickets wait, all at the head."""
        return sum(1 for _ in takewhile(lambda ticket: ticket.is_urgent, self._waiting[queue]))

    def unclaim(self, ticket: Ticket) -> bool:
        """End one claim. Return whether that cancels the work.

        Running work ends where it next calls ``is_cancelled``.
        """
        with self._lock:
            if ticket.done or not ticket.claims:
                return False
            ticket.claims -= 1
            if ticket.claims:
                return False
            if not ticket.is_begun:
                with suppress(ValueError):  # a worker has taken it in a batch
                    self._waiting[ticket.queue].remove(ticket)
                ticket.error = DeadlineError(f"{ticket.queue}: cancelled")
                self._end(ticket)
            return True

    def is_cancelled(self) -> bool:
        """Whether this thread's work is cancelled; if so, later submits no longer join it."""
        ticket: Ticket | None = getattr(self._this_thread, "ticket", None)
        if ticket is None or ticket.claims != 0:
            return False
        with self._lock:
            if ticket.claims == 0 and self._open.get((ticket.queue, ticket.name)) is ticket:
                del self._open[ticket.queue, ticket.name]
            return ticket.claims == 0

    def wait(self, ticket: Ticket, deadline: float) -> object:
        """Return the ticket's result. Raises its error, or DeadlineError."""
        with self._changed:
            self._changed.wait_for(lambda: ticket.done or self._closed, deadline - self._clock())
        if not ticket.done:
            raise DeadlineError(f"{ticket.queue}: not done by the deadline")
        if ticket.error is not None:
            raise ticket.error
        return ticket.result

    def await_any(self, queues: Sequence[str], deadline: float) -> bool:
        """Wait until a ticket of *queues* is done; False if none is open or at the deadline."""
        with self._changed:
            tickets = [ticket for (queue, _), ticket in self._open.items() if queue in queues]
            return bool(tickets) and self._changed.wait_for(
                lambda: self._closed or any(ticket.done for ticket in tickets),
                deadline - self._clock(),
            )

    def named(self, name: bytes) -> list[Ticket]:
        """Return the open tickets called *name* of all queues."""
        with self._lock:
            return [self._open[at] for queue in self._idle if (at := (queue, name)) in self._open]

    def _next(self, queue: str) -> Ticket | None:
        """Take the first ticket whose batch_key has fewer workers than the parallelism."""
        at_work, most = self._at_work[queue], self._parallelism[queue]
        for ticket in self._waiting[queue]:
            if ticket.batch_key is None or at_work.count(ticket.batch_key) < most:
                self._waiting[queue].remove(ticket)
                ticket.is_begun = True
                return ticket
        return None

    def _next_run(self, queue: str) -> list[Ticket]:
        """Return the next ticket and this worker's share of its batch; nothing once closed."""
        with self._lock:
            while (first := self._next(queue)) is None:
                if self._closed:
                    return []
                self._idle[queue] += 1
                self._queued[queue].wait()
                self._idle[queue] -= 1
            key, waiting, run = first.batch_key, self._waiting[queue], [first]
            self._at_work[queue].append(key)
            if key is not None:
                alike = list(takewhile(lambda one: one.batch_key == key, waiting))
                share = min(self._parallelism[queue], 1 + self._idle[queue])
                run += alike[share - 1 :: share][: MAX_BATCH - 1]
                for ticket in run[1:]:
                    waiting.remove(ticket)
            return run

    def _work(self, queue: str) -> None:
        while run := self._next_run(queue):
            key = run[0].batch_key
            expect = bool if key is None else self._expect.get(queue, bool)
            while run:
                expect([ticket.name for ticket in run])
                self._do(run[0])
                with self._lock:
                    run = [] if self._closed else [ticket for ticket in run if not ticket.done]
                    if run:
                        run[0].is_begun = True
                    else:
                        self._at_work[queue].remove(key)
                        self._queued[queue].notify()  # a worker that waited for this batch_key
            expect(())

    def _do(self, ticket: Ticket) -> None:
        outer = getattr(self._this_thread, "ticket", None)  # tickets may nest in one thread
        self._this_thread.ticket = ticket
        try:
            ticket.result = ticket.work()
        except Exception as error:  # noqa: BLE001
            # The loop outlives any piece of work; its waiters get the error.
            ticket.error = error
            logger.debug("move failed", queue=ticket.queue, error=str(error))
        self._this_thread.ticket = outer
        with self._lock:
            self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        ticket.done = True
        if self._open.get((ticket.queue, ticket.name)) is ticket:
            del self._open[ticket.queue, ticket.name]
        self._changed.notify_all()

    def depth(self) -> dict[str, int]:
        """Return how many tickets wait in each queue."""
        with self._lock:
            return {queue: len(tickets) for queue, tickets in self._waiting.items()}

    def fullness(self, queue: str) -> float:
        """Return how full a queue is, from 0 to 1; 0 for an unknown one."""
        return min(1.0, len(self._waiting.get(queue, ())) / self._limit)

    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        with self._lock:
            return not self._open

    def is_alive(self) -> bool:
        """Whether all workers are alive; a dead one must fail the health check."""
        return all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Finish running work, drop queued work, stop the threads. Idempotent."""
        with self._lock:
            self._closed = True
            for tickets in self._waiting.values():
                tickets.clear()
            self._open = {at: ticket for at, ticket in self._open.items() if ticket.is_begun}
            for changed in (self._changed, *self._queued.values()):
                changed.notify_all()
        for thread in self._threads:
            thread.join()
