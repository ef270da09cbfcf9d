"""The WorkQueue: bounded background queues of promotions, demotions and slow questions.

There is one for each direction and medium, so that a stuck medium holds up nobody else. Nothing
here knows what is moved.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import structlog

from kvstore.proto.errors import DeadlineError

Work = Callable[[], object]
Expect = Callable[[Sequence[bytes]], object]
"""Told what a thread does next."""

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
    is_given_up: bool = False
    """Nobody wants it any more, and it has ended for that, or is about to."""
    batch_key: object = None
    """What it has in common with others that are better done one after the other by one worker."""


class WorkQueue:
    """Bounded queues of tickets, and their threads.

    With ``workers`` of 0 for every queue nothing runs by itself: ``step`` is driven by a test,
    and ``wait`` steps until its ticket is done. *clock* returns monotonic seconds. Tickets of one
    batch_key that wait are shared between as many workers as *parallelism* says of their queue,
    else one; who has been at one for STUCK_S is not counted, and the rest of its batch goes to
    others. *expect* is called by a worker of its queue before each of a batch, with the names of
    what it does next, and with none after the last. It raises nothing.
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
        self._batch: deque[Ticket] = deque()
        """Taken by workers that are still at what was before."""
        self._at_batch: dict[object, dict[int, float]] = {}
        """Which threads work on each batch_key, and since when at one ticket of it."""
        self._closed = False
        self._stepped = not any(queues.values())
        self._at_work = threading.local()
        # Guards all fields above; held for queue operations only.
        self._lock = threading.Lock()
        # Notified when a ticket is done; one of a queue when one is queued there. Apart, as to wake
        # every worker for each ticket takes the interpreter from those who wait for an answer.
        self._changed = threading.Condition(self._lock)
        self._queued = {queue: threading.Condition(self._lock) for queue in queues}
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=queue, daemon=True)
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
            known = self._open.get((queue, name))
            if known is not None:
                if known.claims is not None:
                    known.claims = known.claims + 1 if claimed else None
                if urgent:
                    self._hurry(known)
                return known
            tickets, rush = self._waiting[queue], self._urgent[queue]
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

        What is running ends where it next asks ``is_given_up``.
        """
        with self._changed:
            if ticket.done or not ticket.claims:
                return False
            ticket.claims -= 1
            if ticket.claims:
                return False
            for tickets in (self._waiting[ticket.queue], self._urgent[ticket.queue], self._batch):
                if ticket in tickets:
                    tickets.remove(ticket)
                    ticket.error = DeadlineError(f"{ticket.queue}: nobody waits for it any more")
                    ticket.is_given_up = ticket.done = True
                    self._open.pop((ticket.queue, ticket.name), None)
                    self._changed.notify_all()
            return True

    def is_given_up(self) -> bool:
        """Whether nobody wants the work that this thread does; from then on nobody joins it."""
        ticket: Ticket | None = getattr(self._at_work, "ticket", None)
        if ticket is None or ticket.claims != 0:
            return False
        with self._changed:
            if ticket.claims != 0:
                return False
            ticket.is_given_up = True
            if self._open.get((ticket.queue, ticket.name)) is ticket:
                del self._open[ticket.queue, ticket.name]
            return True

    def _hurry(self, ticket: Ticket) -> None:
        tickets = self._waiting[ticket.queue]
        if ticket in tickets:
            tickets.remove(ticket)
            self._urgent[ticket.queue].append(ticket)

    def wait(self, ticket: Ticket, deadline: float) -> object:
        """Return the ticket's result. Raises its error, or DeadlineError when time is up."""
        if self._stepped:
            while not ticket.done and self._clock() < deadline and self.step(ticket.queue):
                pass
        else:
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
        if self._stepped:
            return self._clock() < deadline and self.step(tickets[0].queue)
        with self._changed:
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

    def step(self, queue: str | None = None) -> bool:
        """Do the next piece of work of *queue*, or of any. Return whether there was one."""
        with self._changed:
            ticket = self._take(queue)
        if ticket is None:
            return False
        self._do(ticket)
        return True

    def _take(self, queue: str | None) -> Ticket | None:
        """Take the first ticket of whose batch_key not as many are at work as may be."""
        now = self._clock()
        for name in self._waiting if queue is None else (queue,):
            # Of what a stuck worker took batch the last first: the next may be on its way to it.
            batch = [ticket for ticket in reversed(self._batch) if ticket.queue == name]
            for source, tickets in (
                (self._urgent[name], self._urgent[name]),
                (batch, self._batch),
                (self._waiting[name], self._waiting[name]),
            ):
                refused: set[object] = set()
                for ticket in source:
                    if ticket.batch_key in refused:
                        continue
                    if self._may_take(ticket, now, is_others=source is batch):
                        tickets.remove(ticket)
                        return ticket
                    refused.add(ticket.batch_key)
        return None

    def _may_take(self, ticket: Ticket, now: float, *, is_others: bool) -> bool:
        """Whether one more may work on the ticket's batch_key; for what others took all of those
        at it have to be stuck. They leave a worker of the queue to other batch keys.
        """
        at_it = self._at_batch.get(ticket.batch_key)
        if not at_it:
            return True
        parallelism = self._parallelism[ticket.queue]
        moving = sum(since > now - STUCK_S for since in at_it.values())
        most = max(parallelism, self._workers[ticket.queue] - 1)
        return len(at_it) < most and moving < (1 if is_others else parallelism)

    def _do(self, ticket: Ticket) -> None:
        outer = getattr(self._at_work, "ticket", None)  # who waits may step, one in another
        self._at_work.ticket = ticket
        try:
            ticket.result = ticket.work()
        except Exception as error:  # noqa: BLE001
            # The loop outlives any piece of work; whoever waits gets the error.
            ticket.error = error
            logger.debug("move failed", queue=ticket.queue, error=str(error))
        self._at_work.ticket = outer
        with self._changed:
            ticket.done = True
            if self._open.get((ticket.queue, ticket.name)) is ticket:
                del self._open[ticket.queue, ticket.name]
            self._changed.notify_all()

    def _take_batch(self, first: Ticket) -> list[Ticket]:
        """Take what waits right behind *first* and is of its batch_key: this worker's share."""
        tickets = self._waiting[first.queue]
        if first.batch_key is None:
            return []
        self._at_batch.setdefault(first.batch_key, {})[threading.get_ident()] = self._clock()
        alike = list(takewhile(lambda one: one.batch_key == first.batch_key, tickets))
        share = min(self._parallelism[first.queue], 1 + self._idle[first.queue])
        mine = alike[share - 1 :: share][: MAX_BATCH - 1]
        for ticket in mine:
            tickets.remove(ticket)
        self._batch.extend(mine)
        return mine

    def _run(self, queue: str) -> None:
        while True:
            with self._changed:
                ticket = self._take(queue)
                while ticket is None:
                    if self._closed:
                        return
                    self._idle[queue] += 1
                    self._queued[queue].wait(STUCK_S if self._has_more(queue) else None)
                    self._idle[queue] -= 1
                    ticket = self._take(queue)
                row = deque([ticket, *self._take_batch(ticket)])
            if ticket.batch_key is None:
                self._do(ticket)
            else:
                self._do_row(queue, row)

    def _has_more(self, queue: str) -> bool:
        """Whether something waits there, or was taken batch, that may be others' in a while."""
        is_waiting = bool(self._waiting[queue] or self._urgent[queue])
        return is_waiting or any(ticket.queue == queue for ticket in self._batch)

    def _do_row(self, queue: str, row: deque[Ticket]) -> None:
        """Do what this worker took batch of one batch_key, as far as it is still its to do."""
        expect = self._expect.get(queue, bool)
        ticket = row.popleft()
        batch_key = ticket.batch_key
        try:
            while True:
                with self._changed:
                    names = [ticket.name, *(one.name for one in row if one in self._batch)]
                expect(names)
                self._do(ticket)
                following = self._next_of(row, batch_key)
                if following is None:
                    break
                ticket = following
            expect(())
        finally:
            self._leave(ticket, batch_key)

    def _next_of(self, row: deque[Ticket], batch_key: object) -> Ticket | None:
        """Take the next of *row* that is wanted and that nobody else has taken."""
        with self._changed:
            self._at_batch[batch_key][threading.get_ident()] = self._clock()
            while row:
                ticket = row.popleft()
                if ticket in self._batch:
                    self._batch.remove(ticket)
                    return ticket
        return None

    def _leave(self, last: Ticket, batch_key: object) -> None:
        """This thread works on *batch_key* no more; *last* is what it did, or died of."""
        with self._changed:
            del self._at_batch[batch_key][threading.get_ident()]
            if not self._at_batch[batch_key]:
                del self._at_batch[batch_key]
            if not last.done:
                last.error, last.done = DeadlineError(f"{last.queue}: its worker has ended"), True
                self._open.pop((last.queue, last.name), None)
                self._changed.notify_all()
            self._queued[last.queue].notify()  # who found too many at what waits

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
            for tickets in (*self._waiting.values(), *self._urgent.values(), self._batch):
                for ticket in tickets:
                    self._open.pop((ticket.queue, ticket.name), None)
                tickets.clear()
            for changed in (self._changed, *self._queued.values()):
                changed.notify_all()
        for thread in self._threads:
            thread.join()
