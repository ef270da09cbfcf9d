"""The WorkQueue: bounded background queues of promotions, demotions and slow questions.

There is one for each direction and medium, so that a stuck medium holds up nobody else. Nothing
here knows what is moved.
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
"""Called with what a thread does next."""

MAX_BATCH = 16
"""Tickets that a worker takes at once, of one batch_key."""

logger = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Ticket:
    """One queued piece of work; ``result`` or ``error`` is set once ``done``."""

    queue: str
    name: bytes
    work: Work
    is_urgent: bool
    claims: int | None
    """How many want it, of those that may lose interest; None: it is done whatever they want."""
    batch_key: object
    """What it has in common with others that are better done one after the other by one worker."""
    is_begun: bool = False
    done: bool = False
    result: object = None
    error: Exception | None = None


class WorkQueue:
    """Bounded queues of tickets, and their threads.

    *queues* says how many workers each has; *clock* returns monotonic seconds. As many workers as
    *parallelism* says of a queue, else one, share the tickets of one batch_key. *expect* is
    called by a worker of its queue before each ticket that has one, with the names of what it does
    next, and with none after the last. It raises nothing.
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
        """The batch_key of each worker that has one."""
        self._idle = dict.fromkeys(queues, 0)
        self._closed = False
        self._this_thread = threading.local()
        # Guards all fields above; held for queue operations only.
        self._lock = threading.Lock()
        # Notified when a ticket is done; one of a queue when one is queued there. Apart, as to wake
        # every worker for each ticket takes the interpreter from those who wait for an answer.
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

        Urgent work goes before the rest, in the order it came, and past the limit: each piece
        has a caller who waits for it, and callers are bounded. Work of a name that still
        waits or runs in the queue is joined, not repeated. What is *claimed* goes on only until
        each who claimed it has called ``let_go``, unless somebody else submits it too. A worker
        takes several of the same *batch_key*, in order.
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
            # In the context of who asks: its request id, and its span.
            work = partial(copy_context().run, work)
            ticket = Ticket(queue, name, work, urgent, 1 if claimed else None, batch_key)
            self._open[queue, name] = ticket
            tickets.insert(self._urgent_count(queue) if urgent else len(tickets), ticket)
            self._queued[queue].notify()
            return ticket

    def _urgent_count(self, queue: str) -> int:
        """Return how many urgent tickets wait: they come first."""
        return sum(1 for _ in takewhile(lambda ticket: ticket.is_urgent, self._waiting[queue]))

    def let_go(self, ticket: Ticket) -> bool:
        """Undo one claim. Return whether the work ends, or never begins, for that.

        What is running ends where it next calls ``is_cancelled``.
        """
        with self._lock:
            if ticket.done or not ticket.claims:
                return False
            ticket.claims -= 1
            if ticket.claims:
                return False
            if not ticket.is_begun:
                with suppress(ValueError):  # a worker has taken it along
                    self._waiting[ticket.queue].remove(ticket)
                ticket.error = DeadlineError(f"{ticket.queue}: nobody waits for it any more")
                self._end(ticket)
            return True

    def is_cancelled(self) -> bool:
        """Whether nobody wants the work that this thread does; from then on nobody joins it."""
        ticket: Ticket | None = getattr(self._this_thread, "ticket", None)
        if ticket is None or ticket.claims != 0:
            return False
        with self._lock:
            if ticket.claims == 0 and self._open.get((ticket.queue, ticket.name)) is ticket:
                del self._open[ticket.queue, ticket.name]
            return ticket.claims == 0

    def wait(self, ticket: Ticket, deadline: float) -> object:
        """Return the ticket's result. Raises its error, or DeadlineError when time is up."""
        with self._changed:
            self._changed.wait_for(lambda: ticket.done or self._closed, deadline - self._clock())
        if not ticket.done:
            raise DeadlineError(f"{ticket.queue}: not done by the deadline")
        if ticket.error is not None:
            raise ticket.error
        return ticket.result

    def await_any(self, queues: Sequence[str], deadline: float) -> bool:
        """Wait until a ticket of *queues* is done; False if none is open or time is up."""
        with self._changed:
            tickets = [ticket for (queue, _), ticket in self._open.items() if queue in queues]
            return bool(tickets) and self._changed.wait_for(
                lambda: self._closed or any(ticket.done for ticket in tickets),
                deadline - self._clock(),
            )

    def named(self, name: bytes) -> list[Ticket]:
        """Return the tickets of any queue that have *name* and are not done."""
        with self._lock:
            return [self._open[at] for queue in self._idle if (at := (queue, name)) in self._open]

    def _next(self, queue: str) -> Ticket | None:
        """Take the first ticket of whose batch_key there are not too many at work."""
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
                        self._queued[queue].notify()  # who found too many at what waits
            expect(())

    def _do(self, ticket: Ticket) -> None:
        outer = getattr(self._this_thread, "ticket", None)  # who waits may step, one in another
        self._this_thread.ticket = ticket
        try:
            ticket.result = ticket.work()
        except Exception as error:  # noqa: BLE001
            # The loop outlives any piece of work; whoever waits gets the error.
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
        """Return how full a queue is, from 0 to 1; 0 for one that does not exist."""
        return min(1.0, len(self._waiting.get(queue, ())) / self._limit)

    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        with self._lock:
            return not self._open

    def is_alive(self) -> bool:
        """Whether every worker lives: a dead one must fail health, not go unnoticed."""
        return all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Finish what runs, drop what waits, stop the threads. Idempotent."""
        with self._lock:
            self._closed = True
            for tickets in self._waiting.values():
                tickets.clear()
            self._open = {at: ticket for at, ticket in self._open.items() if ticket.is_begun}
            for changed in (self._changed, *self._queued.values()):
                changed.notify_all()
        for thread in self._threads:
            thread.join()
