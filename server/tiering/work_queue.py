"""The Mover: a bounded background queue of promotions, demotions and slow questions.

Work is queued in lanes, one per direction and medium, so that a stuck medium holds up
nobody else. Nothing here knows what is moved.
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

MAX_ALONG = 16
"""Tickets that a worker takes at once, of one kin."""
STUCK_S = 0.1
"""A worker that has been at one ticket for so long leaves its kin to others, too."""

logger = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Ticket:
    """One queued piece of work; ``result`` or ``error`` is set once ``done``."""

    lane: str
    name: bytes
    work: Work
    done: bool = False
    result: object = None
    error: Exception | None = None
    claims: int | None = None
    """How many want it, of those that may lose interest; None: it is done whatever they want."""
    is_given_up: bool = False
    """Nobody wants it any more, and it has ended for that, or is about to."""
    kin: object = None
    """What it has in common with others that are better done one after the other by one worker."""


class Mover:
    """Lanes of tickets and the threads that work them off.

    With ``workers`` of 0 for every lane nothing runs by itself: ``step`` is driven by a test,
    and ``wait`` steps until its ticket is done. *clock* returns monotonic seconds. Tickets of one
    kin that wait are shared between as many workers as *sharers* says of their lane, else one; who
    has been at one for STUCK_S is not counted, and what it has taken along goes to others.
    *expect* is called by a worker of its lane before each of a row of one kin, with the names of
    what it does next, and with none after the last. It raises nothing.
    """

    def __init__(
        self,
        lanes: Mapping[str, int],
        limit_per_lane: int,
        clock: Callable[[], float],
        sharers: Mapping[str, int] | None = None,
        expect: Mapping[str, Expect] | None = None,
    ) -> None:
        self._sharers = dict.fromkeys(lanes, 1) | dict(sharers or {})
        self._workers = dict(lanes)
        self._expect = expect or {}
        self._idle = dict.fromkeys(lanes, 0)
        self._limit = limit_per_lane
        self._clock = clock
        self._queues: dict[str, deque[Ticket]] = {lane: deque() for lane in lanes}
        self._urgent: dict[str, deque[Ticket]] = {lane: deque() for lane in lanes}
        self._open: dict[tuple[str, bytes], Ticket] = {}
        self._along: deque[Ticket] = deque()
        """Taken by workers that are still at what was before."""
        self._at_kin: dict[object, dict[int, float]] = {}
        """Which threads are at each kin that is worked on, and since when at one ticket of it."""
        self._closed = False
        self._stepped = not any(lanes.values())
        self._at_work = threading.local()
        # Guards all fields above; held for queue operations only.
        self._lock = threading.Lock()
        # Notified when a ticket is done; one of a lane when one is queued there. Apart, as to wake
        # every worker for each ticket takes the interpreter from those who wait for an answer.
        self._changed = threading.Condition(self._lock)
        self._queued = {lane: threading.Condition(self._lock) for lane in lanes}
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"mover-{lane}", daemon=True)
            for lane, workers in lanes.items()
            for _ in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        lane: str,
        name: bytes,
        work: Work,
        *,
        urgent: bool = False,
        claimed: bool = False,
        kin: object = None,
    ) -> Ticket | None:
        """Queue *work*; None when the lane is full or the Mover closed.

        Urgent work goes before the rest, in the order it came, and past the limit: each piece
        has a caller who waits for it, and callers are bounded. Work of a name that still
        waits or runs in the lane is joined, not repeated. What is *claimed* goes on only until
        each who claimed it has called ``let_go``, unless somebody else submits it too. A worker
        takes several of the same *kin* along, in order, and says so to the lane's ``expect``.
        """
        with self._changed:
            known = self._open.get((lane, name))
            if known is not None:
                if known.claims is not None:
                    known.claims = known.claims + 1 if claimed else None
                if urgent:
                    self._hurry(known)
                return known
            queue, rush = self._queues[lane], self._urgent[lane]
            if self._closed or (len(queue) + len(rush) >= self._limit and not urgent):
                return None
            # In the context of who asks: its request id, and its span.
            work = partial(copy_context().run, work)
            ticket = Ticket(lane, name, work, claims=1 if claimed else None, kin=kin)
            self._open[lane, name] = ticket
            (rush if urgent else queue).append(ticket)
            self._queued[lane].notify()
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
            for queue in (self._queues[ticket.lane], self._urgent[ticket.lane], self._along):
                if ticket in queue:
                    queue.remove(ticket)
                    ticket.error = DeadlineError(f"{ticket.lane}: nobody waits for it any more")
                    ticket.is_given_up = ticket.done = True
                    self._open.pop((ticket.lane, ticket.name), None)
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
            if self._open.get((ticket.lane, ticket.name)) is ticket:
                del self._open[ticket.lane, ticket.name]
            return True

    def _hurry(self, ticket: Ticket) -> None:
        queue = self._queues[ticket.lane]
        if ticket in queue:
            queue.remove(ticket)
            self._urgent[ticket.lane].append(ticket)

    def wait(self, ticket: Ticket, deadline: float) -> object:
        """Return the ticket's result. Raises its error, or DeadlineError when time is up."""
        if self._stepped:
            while not ticket.done and self._clock() < deadline and self.step(ticket.lane):
                pass
        else:
            with self._changed:
                while not ticket.done and not self._closed:
                    left_s = deadline - self._clock()
                    if left_s <= 0:
                        break
                    self._changed.wait(left_s)
        if not ticket.done:
            raise DeadlineError(f"{ticket.lane}: not done by the deadline")
        if ticket.error is not None:
            raise ticket.error
        return ticket.result

    def await_any(self, lanes: Sequence[str], deadline: float) -> bool:
        """Wait until a ticket of *lanes* is done; False if none is open or time is up."""
        with self._changed:
            tickets = [ticket for (lane, _), ticket in self._open.items() if lane in lanes]
        if not tickets:
            return False
        if self._stepped:
            return self._clock() < deadline and self.step(tickets[0].lane)
        with self._changed:
            while not any(ticket.done for ticket in tickets) and not self._closed:
                left_s = deadline - self._clock()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    def named(self, name: bytes) -> list[Ticket]:
        """Return the tickets of any lane that have *name* and are not done."""
        with self._changed:
            return [self._open[lane, name] for lane in self._queues if (lane, name) in self._open]

    def step(self, lane: str | None = None) -> bool:
        """Do the next piece of work of *lane*, or of any. Return whether there was one."""
        with self._changed:
            ticket = self._take(lane)
        if ticket is None:
            return False
        self._do(ticket)
        return True

    def _take(self, lane: str | None) -> Ticket | None:
        """Take the first ticket of whose kin not as many are at work as may be."""
        now = self._clock()
        for name in self._queues if lane is None else (lane,):
            # Of what a stuck worker took along the last first: the next may be on its way to it.
            along = [ticket for ticket in reversed(self._along) if ticket.lane == name]
            for source, queue in (
                (self._urgent[name], self._urgent[name]),
                (along, self._along),
                (self._queues[name], self._queues[name]),
            ):
                refused: set[object] = set()
                for ticket in source:
                    if ticket.kin in refused:
                        continue
                    if self._may_take(ticket, now, is_others=source is along):
                        queue.remove(ticket)
                        return ticket
                    refused.add(ticket.kin)
        return None

    def _may_take(self, ticket: Ticket, now: float, *, is_others: bool) -> bool:
        """Whether one more may be at the ticket's kin; for what others took along all of those at
        it have to be stuck. Those leave a worker of the lane to other kins, however many they are.
        """
        at_it = self._at_kin.get(ticket.kin)
        if not at_it:
            return True
        sharers = self._sharers[ticket.lane]
        moving = sum(since > now - STUCK_S for since in at_it.values())
        most = max(sharers, self._workers[ticket.lane] - 1)
        return len(at_it) < most and moving < (1 if is_others else sharers)

    def _do(self, ticket: Ticket) -> None:
        outer = getattr(self._at_work, "ticket", None)  # who waits may step, one in another
        self._at_work.ticket = ticket
        try:
            ticket.result = ticket.work()
        except Exception as error:  # noqa: BLE001
            # The loop outlives any piece of work; whoever waits gets the error.
            ticket.error = error
            logger.debug("move failed", lane=ticket.lane, error=str(error))
        self._at_work.ticket = outer
        with self._changed:
            ticket.done = True
            if self._open.get((ticket.lane, ticket.name)) is ticket:
                del self._open[ticket.lane, ticket.name]
            self._changed.notify_all()

    def _take_along(self, first: Ticket) -> list[Ticket]:
        """Take what waits right behind *first* and is of its kin: this worker's share."""
        queue = self._queues[first.lane]
        if first.kin is None:
            return []
        self._at_kin.setdefault(first.kin, {})[threading.get_ident()] = self._clock()
        alike = list(takewhile(lambda one: one.kin == first.kin, queue))
        share = min(self._sharers[first.lane], 1 + self._idle[first.lane])
        mine = alike[share - 1 :: share][: MAX_ALONG - 1]
        for ticket in mine:
            queue.remove(ticket)
        self._along.extend(mine)
        return mine

    def _run(self, lane: str) -> None:
        while True:
            with self._changed:
                ticket = self._take(lane)
                while ticket is None:
                    if self._closed:
                        return
                    self._idle[lane] += 1
                    self._queued[lane].wait(STUCK_S if self._has_more(lane) else None)
                    self._idle[lane] -= 1
                    ticket = self._take(lane)
                row = deque([ticket, *self._take_along(ticket)])
            if ticket.kin is None:
                self._do(ticket)
            else:
                self._do_row(lane, row)

    def _has_more(self, lane: str) -> bool:
        """Whether something waits there, or was taken along, that may be others' in a while."""
        is_waiting = bool(self._queues[lane] or self._urgent[lane])
        return is_waiting or any(ticket.lane == lane for ticket in self._along)

    def _do_row(self, lane: str, row: deque[Ticket]) -> None:
        """Do what this worker took along of one kin, as far as it is still its to do."""
        expect = self._expect.get(lane, bool)
        ticket = row.popleft()
        kin = ticket.kin
        try:
            while True:
                with self._changed:
                    names = [ticket.name, *(one.name for one in row if one in self._along)]
                expect(names)
                self._do(ticket)
                following = self._next_of(row, kin)
                if following is None:
                    break
                ticket = following
            expect(())
        finally:
            self._leave(ticket, kin)

    def _next_of(self, row: deque[Ticket], kin: object) -> Ticket | None:
        """Take the next of *row* that is wanted and that nobody else has taken."""
        with self._changed:
            self._at_kin[kin][threading.get_ident()] = self._clock()
            while row:
                ticket = row.popleft()
                if ticket in self._along:
                    self._along.remove(ticket)
                    return ticket
        return None

    def _leave(self, last: Ticket, kin: object) -> None:
        """This thread is at no work of *kin* any more, the *last* of which it did or died of."""
        with self._changed:
            del self._at_kin[kin][threading.get_ident()]
            if not self._at_kin[kin]:
                del self._at_kin[kin]
            if not last.done:
                last.error, last.done = DeadlineError(f"{last.lane}: its worker has ended"), True
                self._open.pop((last.lane, last.name), None)
                self._changed.notify_all()
            self._queued[last.lane].notify()  # who found too many at what waits

    def depth(self) -> dict[str, int]:
        """Return how many tickets wait in each lane."""
        with self._changed:
            return {
                lane: len(queue) + len(self._urgent[lane]) for lane, queue in self._queues.items()
            }

    def fullness(self, lane: str) -> float:
        """Return how full a lane is, from 0 to 1; 0 for one that does not exist."""
        with self._changed:
            waiting = len(self._queues.get(lane, ())) + len(self._urgent.get(lane, ()))
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
            for queue in (*self._queues.values(), *self._urgent.values(), self._along):
                for ticket in queue:
                    self._open.pop((ticket.lane, ticket.name), None)
                queue.clear()
            for changed in (self._changed, *self._queued.values()):
                changed.notify_all()
        for thread in self._threads:
            thread.join()
