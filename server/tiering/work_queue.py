"""The WorkQueue: bounded background queues of promotions, demotions and slow questions.

There is one for each direction and medium, so that a stuck medium holds up nobody else. Nothing
here knows what is moved.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
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
STUCK_S = 0.1
"""A worker that has been at one ticket for so long leaves its batch_key to others, too."""

logger = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Ticket:
    """One queued piece of work; ``result`` or ``error`` is set once ``done``."""

    queue: str
    name: bytes
    work: Work
    done: bool = False
    result: object = None
    error: Exception | None = None
    claims: int | None = None
    """How many want it, of those that may lose interest; None: it is done whatever they want."""
    batch_key: object = None
    """What it has in common with others that are better done one after the other by one worker."""


@dataclass(slots=True, eq=False)
class _Run:
    """What one worker does of one batch_key: a ticket since ``since``, then *tickets*."""

    queue: str
    batch_key: object
    since: float
    tickets: deque[Ticket]


class WorkQueue:
    """Bounded queues of tickets, and their threads.

    *queues* says how many workers each has; *clock* returns monotonic seconds. As many workers as
    *parallelism* says of a queue, else one, share the tickets of one batch_key; a worker that has
    been at one for STUCK_S does not count, and the rest of its run goes to others. *expect* is
    called by a worker of its queue before each ticket of a run, with the names of what it does
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
        self._workers = dict(queues)
        self._expect = expect or {}
        self._idle = dict.fromkeys(queues, 0)
        self._limit = limit_per_queue
        self._clock = clock
        self._waiting: dict[str, deque[Ticket]] = {queue: deque() for queue in queues}
        self._urgent: dict[str, deque[Ticket]] = {queue: deque() for queue in queues}
        self._open: dict[tuple[str, bytes], Ticket] = {}
        self._runs: list[_Run] = []
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
        takes several of the same *batch_key*, in order, and says so to the queue's ``expect``.
        """
        with self._changed:
            tickets, rush = self._waiting[queue], self._urgent[queue]
            known = self._open.get((queue, name))
            if known is not None:
                if known.claims is not None:
                    known.claims = known.claims + 1 if claimed else None
                if urgent and known in tickets:
                    tickets.remove(known)
                    rush.append(known)
                return known
            if self._closed or (len(tickets) + len(rush) >= self._limit and not urgent):
                return None
            # In the context of who asks: its request id, and its span.
            work = partial(copy_context().run, work)
            ticket = Ticket(queue, name, work, claims=1 if claimed else None, batch_key=batch_key)
            self._open[queue, name] = ticket
            (rush if urgent else tickets).append(ticket)
            self._queued[queue].notify()
            return ticket

    def let_go(self, ticket: Ticket) -> bool:
        """Undo one claim. Return whether the work ends, or never begins, for that.

        What is running ends where it next calls ``is_cancelled``.
        """
        with self._changed:
            if ticket.done or not ticket.claims:
                return False
            ticket.claims -= 1
            if ticket.claims:
                return False
            runs = (run.tickets for run in self._runs)
            for tickets in (self._waiting[ticket.queue], self._urgent[ticket.queue], *runs):
                if ticket in tickets:
                    tickets.remove(ticket)
                    ticket.error = DeadlineError(f"{ticket.queue}: nobody waits for it any more")
                    self._end(ticket)
            return True

    def is_cancelled(self) -> bool:
        """Whether nobody wants the work that this thread does; from then on nobody joins it."""
        ticket: Ticket | None = getattr(self._this_thread, "ticket", None)
        if ticket is None or ticket.claims != 0:
            return False
        with self._changed:
            if ticket.claims == 0 and self._open.get((ticket.queue, ticket.name)) is ticket:
                del self._open[ticket.queue, ticket.name]
            return ticket.claims == 0

    def wait(self, ticket: Ticket, deadline: float) -> object:
        """Return the ticket's result. Raises its error, or DeadlineError when time is up."""
        with self._changed:
            while not ticket.done and not self._closed:
                left_s = deadline - self._clock()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
        if not ticket.done:
            raise DeadlineError(f"{ticket.queue}: not done by the deadline")
        if ticket.error is not None:
            raise ticket.error
        return ticket.result

    def await_any(self, queues: Sequence[str], deadline: float) -> bool:
        """Wait until a ticket of *queues* is done; False if none is open or time is up."""
        with self._changed:
            tickets = [ticket for (queue, _), ticket in self._open.items() if queue in queues]
            if not tickets:
                return False
            while not any(ticket.done for ticket in tickets) and not self._closed:
                left_s = deadline - self._clock()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    def named(self, name: bytes) -> list[Ticket]:
        """Return the tickets of any queue that have *name* and are not done."""
        with self._changed:
            return [
                self._open[queue, name] for queue in self._waiting if (queue, name) in self._open
            ]

    def _take(self, queue: str) -> Ticket | None:
        """Take the next ticket: of a run that is stuck, urgent, or the first that waits."""
        full, stuck = self._at_work(queue)
        if stuck:
            return stuck.pop()  # the last: the next may be on its way to who is stuck
        for tickets in (self._urgent[queue], self._waiting[queue]):
            for ticket in tickets:
                if ticket.batch_key not in full:
                    tickets.remove(ticket)
                    return ticket
        return None

    def _at_work(self, queue: str) -> tuple[set[object], deque[Ticket] | None]:
        """Return the batch keys that no more workers may take up, and a run that is stuck.

        Workers that are stuck leave one of the queue to other batch keys.
        """
        runs = [run for run in self._runs if run.queue == queue]
        if not runs:
            return set(), None
        at_it = Counter(run.batch_key for run in runs)
        moving = Counter(run.batch_key for run in runs if run.since > self._clock() - STUCK_S)
        parallelism = self._parallelism[queue]
        most = max(parallelism, self._workers[queue] - 1)
        full = {key for key in at_it if at_it[key] >= most or moving[key] >= parallelism}
        left = (run for run in reversed(runs) if run.tickets and not moving[run.batch_key])
        return full, next((run.tickets for run in left if run.batch_key not in full), None)

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
        with self._changed:
            self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        ticket.done = True
        if self._open.get((ticket.queue, ticket.name)) is ticket:
            del self._open[ticket.queue, ticket.name]
        self._changed.notify_all()

    def _work(self, queue: str) -> None:
        while True:
            with self._changed:
                while (ticket := self._take(queue)) is None:
                    if self._closed:
                        return
                    self._idle[queue] += 1
                    # What is left may be for others once who is at it is stuck.
                    self._queued[queue].wait(STUCK_S if self._has_more(queue) else None)
                    self._idle[queue] -= 1
                run = self._begin(ticket)
            if run is None:
                self._do(ticket)
            else:
                self._do_run(run)

    def _has_more(self, queue: str) -> bool:
        runs = any(run.tickets for run in self._runs if run.queue == queue)
        return runs or bool(self._waiting[queue] or self._urgent[queue])

    def _begin(self, first: Ticket) -> _Run | None:
        """Take what waits in a row of the batch_key of *first*: this worker's share."""
        if first.batch_key is None:
            return None
        tickets = self._waiting[first.queue]
        alike = list(takewhile(lambda one: one.batch_key == first.batch_key, tickets))
        share = min(self._parallelism[first.queue], 1 + self._idle[first.queue])
        mine = alike[share - 1 :: share][: MAX_BATCH - 1]
        for ticket in mine:
            tickets.remove(ticket)
        run = _Run(first.queue, first.batch_key, self._clock(), deque([first, *mine]))
        self._runs.append(run)
        return run

    def _do_run(self, run: _Run) -> None:
        """Do the tickets of *run*, as far as others leave them."""
        expect = self._expect.get(run.queue, bool)
        ticket = None
        try:
            while True:
                with self._changed:
                    names = [one.name for one in run.tickets]
                    if not names:
                        break
                    ticket, run.since = run.tickets.popleft(), self._clock()
                expect(names)
                self._do(ticket)
            expect(())
        finally:
            with self._changed:
                self._runs.remove(run)
                self._waiting[run.queue].extendleft(reversed(run.tickets))
                if ticket is not None and not ticket.done:
                    ticket.error = DeadlineError(f"{run.queue}: its worker has ended")
                    self._end(ticket)
                self._queued[run.queue].notify()  # who found too many at what waits

    def depth(self) -> dict[str, int]:
        """Return how many tickets wait in each queue."""
        with self._changed:
            return {
                queue: len(tickets) + len(self._urgent[queue])
                for queue, tickets in self._waiting.items()
            }

    def fullness(self, queue: str) -> float:
        """Return how full a queue is, from 0 to 1; 0 for one that does not exist."""
        with self._changed:
            waiting = len(self._waiting.get(queue, ())) + len(self._urgent.get(queue, ()))
            return min(1.0, waiting / self._limit)

    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        with self._changed:
            return not self._open

    def is_alive(self) -> bool:
        """Whether every worker lives: a dead one must fail health, not go unnoticed."""
        return all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Finish what runs, drop what waits, stop the threads. Idempotent."""
        with self._changed:
            self._closed = True
            runs = (run.tickets for run in self._runs)
            for tickets in (*self._waiting.values(), *self._urgent.values(), *runs):
                for ticket in tickets:
                    self._open.pop((ticket.queue, ticket.name), None)
                tickets.clear()
            for changed in (self._changed, *self._queued.values()):
                changed.notify_all()
        for thread in self._threads:
            thread.join()
