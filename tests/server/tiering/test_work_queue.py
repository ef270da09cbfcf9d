"""The WorkQueue: queues that are bounded, join what is asked twice, and hold up nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import pytest
from helpers.local_server import eventually
from simulation.clock import FakeClock
from simulation.stepped import SteppedWorkQueue

from kvstore.proto.errors import DeadlineError, TierFullError
from kvstore.server.tiering.work_queue import Expect, Ticket, WorkQueue

FOREVER = 1e12
PATIENCE_S = 20.0


def nothing() -> None:
    """Do nothing."""


def stepped(limit: int = 100, clock: Callable[[], float] = time.monotonic) -> SteppedWorkQueue:
    return SteppedWorkQueue({"up": 0, "down": 0}, limit, clock)


@contextmanager
def running(
    queues: dict[str, int],
    limit: int = 100,
    expect: Mapping[str, Expect] | None = None,
) -> Iterator[SteppedWorkQueue]:
    work_queue = SteppedWorkQueue(queues, limit, time.monotonic, expect=expect)
    try:
        yield work_queue
    finally:
        work_queue.close()


def submit(
    work_queue: WorkQueue, name: str, work: Callable[[], object], queue: str = "up"
) -> Ticket:
    ticket = work_queue.submit(queue, name.encode(), work)
    assert ticket is not None
    return ticket


def in_time() -> float:
    return time.monotonic() + PATIENCE_S


def test_work_runs_in_the_order_it_came() -> None:
    work_queue, done = stepped(), list[str]()
    for name in "abc":
        submit(work_queue, name, lambda name=name: done.append(name))  # type: ignore[misc]
    assert work_queue.depth() == {"up": 3, "down": 0}
    assert [work_queue.step() for _ in range(4)] == [True, True, True, False]
    assert done == ["a", "b", "c"]
    assert work_queue.is_idle()


def test_a_full_queue_takes_no_more_and_the_others_do() -> None:
    work_queue = stepped(limit=2)
    submit(work_queue, "a", nothing)
    submit(work_queue, "b", nothing)
    assert work_queue.submit("up", b"c", nothing) is None
    assert work_queue.submit("down", b"c", nothing) is not None
    work_queue.step("up")
    assert work_queue.submit("up", b"c", nothing) is not None


def test_urgent_work_comes_first_and_past_the_limit() -> None:
    work_queue, done = stepped(limit=2), list[str]()
    for name in "ab":
        submit(work_queue, name, lambda name=name: done.append(name))  # type: ignore[misc]
    for name in "uv":
        urgent = work_queue.submit("up", name.encode(), partial(done.append, name), urgent=True)
        assert urgent is not None
    while work_queue.step():
        pass
    assert done == ["u", "v", "a", "b"], "or a durable prompt would be written last first"


def test_work_of_one_name_is_joined_and_runs_once() -> None:
    work_queue, done = stepped(limit=1), list[int]()
    first = submit(work_queue, "a", lambda: done.append(1))
    assert submit(work_queue, "a", lambda: done.append(2)) is first
    assert work_queue.submit("down", b"a", lambda: done.append(3)) is not first
    assert work_queue.named(b"a") == [first, *[t for t in work_queue.named(b"a") if t is not first]]
    assert len(work_queue.named(b"a")) == 2
    work_queue.wait(first, FOREVER)
    assert done == [1]
    assert submit(work_queue, "a", nothing) is not first


def test_joining_urgently_hurries_what_waits() -> None:
    work_queue, done = stepped(), list[str]()
    for name in "abc":
        submit(work_queue, name, lambda name=name: done.append(name))  # type: ignore[misc]
    known = work_queue.submit("up", b"c", nothing, urgent=True)
    assert known is not None
    work_queue.wait(known, FOREVER)
    assert done == ["c"]


def test_wait_returns_the_result_or_raises_the_error() -> None:
    def fail() -> None:
        raise TierFullError("cpu", 2, 1)

    work_queue = stepped()
    assert work_queue.wait(submit(work_queue, "a", lambda: 42), FOREVER) == 42
    ticket = submit(work_queue, "b", fail)
    for _ in range(2):
        with pytest.raises(TierFullError):
            work_queue.wait(ticket, FOREVER)
    assert work_queue.named(b"b") == []


def test_a_stepped_wait_begins_nothing_after_the_deadline() -> None:
    clock = FakeClock(10.0)
    work_queue, done = stepped(clock=clock), list[int]()
    late = submit(work_queue, "a", lambda: done.append(1))
    with pytest.raises(DeadlineError):
        work_queue.wait(late, 10.0)
    assert work_queue.await_any(["up"], 10.0) is False
    assert done == []
    work_queue.wait(late, 10.5)
    assert done == [1]
    assert work_queue.wait(late, 0.0) is None


def test_waiting_for_any_ends_with_the_first_and_says_whether_there_was_one() -> None:
    work_queue = stepped()
    assert work_queue.await_any(["up", "down"], FOREVER) is False
    ticket = submit(work_queue, "a", nothing, queue="down")
    assert work_queue.await_any(["up"], FOREVER) is False
    assert work_queue.await_any(["up", "down"], FOREVER) is True
    assert ticket.done


def test_a_queue_that_hangs_holds_up_no_other() -> None:
    hang, began = threading.Event(), threading.Event()

    def stuck() -> None:
        began.set()
        hang.wait()

    with running({"up": 1, "down": 1}) as work_queue:
        submit(work_queue, "stuck", stuck)
        assert began.wait(PATIENCE_S)
        assert (work_queue.depth(), work_queue.is_idle()) == ({"up": 0, "down": 0}, False)
        behind = submit(work_queue, "behind", lambda: "late")
        assert work_queue.depth() == {"up": 1, "down": 0}
        assert (
            work_queue.wait(submit(work_queue, "a", lambda: "in time", "down"), in_time())
            == "in time"
        )
        with pytest.raises(DeadlineError):
            work_queue.wait(behind, time.monotonic())
        assert work_queue.is_alive()
        hang.set()
        assert work_queue.wait(behind, in_time()) == "late"
    assert not work_queue.is_alive()
    assert stepped().is_alive(), "it has no threads"


def test_a_worker_survives_whatever_its_work_raises() -> None:
    def explode() -> None:
        raise RuntimeError("not an error of ours")

    with running({"up": 1}) as work_queue:
        ticket = submit(work_queue, "a", explode)
        with pytest.raises(RuntimeError, match="not an error of ours"):
            work_queue.wait(ticket, in_time())
        assert work_queue.wait(submit(work_queue, "b", lambda: 1), in_time()) == 1
        assert work_queue.is_alive()


def test_a_closed_mover_releases_who_waits_and_drops_what_waited() -> None:
    hang, began, raised = threading.Event(), threading.Event(), list[Exception]()

    def stuck() -> None:
        began.set()
        hang.wait()

    work_queue = WorkQueue({"up": 1}, 10, time.monotonic)
    running_ticket = submit(work_queue, "stuck", stuck)
    dropped = submit(work_queue, "dropped", nothing)
    assert began.wait(PATIENCE_S)

    def wait() -> None:
        try:
            work_queue.wait(dropped, in_time())
        except DeadlineError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    closer = threading.Thread(target=work_queue.close, daemon=True)
    closer.start()
    waiter.join(PATIENCE_S)
    hang.set()
    assert len(raised) == 1
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert running_ticket.done
    assert not dropped.done
    assert work_queue.submit("up", b"late", nothing) is None
    assert work_queue.is_idle()
    work_queue.close()


def test_a_worker_takes_along_what_is_of_one_batch_and_says_what_follows() -> None:
    seen: list[str | list[bytes]] = []
    started, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        assert go_on.wait(PATIENCE_S)

    expect = {"up": lambda names: seen.append(list(names))}
    with running({"up": 2}, expect=expect) as work_queue:
        submit_batched(work_queue, "hold", hold, "a")
        assert started.wait(PATIENCE_S)
        for name in ("one", "two", "other", "three"):
            batch_key = "b" if name == "other" else "a"
            tickets = [submit_batched(work_queue, name, partial(seen.append, name), batch_key)]
        other = [[b"hold"], [b"other"], "other", []]
        assert eventually(lambda: seen == other), "another batch_key's does not wait"
        go_on.set()
        for ticket in tickets:
            work_queue.wait(ticket, in_time())
        assert eventually(lambda: seen[-2:] == ["three", []])
    row = [[b"one", b"two", b"three"], "one", [b"two", b"three"], "two", [b"three"], "three", []]
    assert seen[4:] == [[], *row]


def test_what_was_taken_along_ends_when_nobody_wants_it_any_more() -> None:
    done: list[str] = []
    started, go_on = threading.Event(), threading.Event()
    expected: list[list[bytes]] = []

    def hold() -> None:
        started.set()
        assert go_on.wait(PATIENCE_S)

    queues = {"up": 1, "down": 1}
    with running(queues, expect={"up": lambda names: expected.append(list(names))}) as work_queue:
        submit(work_queue, "busy", hold)
        assert started.wait(PATIENCE_S)
        started.clear()
        tickets = [submit_batched(work_queue, "first", hold, "a")]
        rest = ("second", "third")
        tickets += [
            submit_batched(work_queue, name, partial(done.append, name), "a") for name in rest
        ]
        go_on.set()
        go_on = threading.Event()
        assert started.wait(PATIENCE_S)
        assert work_queue.depth() == {"up": 0, "down": 0}
        assert work_queue.let_go(tickets[1])
        with pytest.raises(DeadlineError):
            work_queue.wait(tickets[1], in_time())
        go_on.set()
        work_queue.wait(tickets[2], in_time())
        assert eventually(lambda: expected[-1] == [])
    assert done == ["third"]
    assert expected == [[b"first", b"second", b"third"], [b"third"], []]


def test_workers_share_one_kin_where_they_are_let() -> None:
    both = threading.Barrier(2, timeout=PATIENCE_S)
    work_queue = WorkQueue({"up": 4}, 100, time.monotonic, {"up": 2})
    try:
        for ticket in [submit_batched(work_queue, name, both.wait, "a") for name in "wxyz"]:
            work_queue.wait(ticket, in_time())
    finally:
        work_queue.close()
    assert not both.broken


def test_else_one_worker_is_at_it_and_the_others_leave_it_to_that() -> None:
    at_work = threading.Lock()
    clashes: list[bool] = []

    def alone() -> None:
        is_alone = at_work.acquire(blocking=False)
        clashes.append(not is_alone)
        time.sleep(0.001)
        if is_alone:
            at_work.release()

    with running({"up": 4}) as work_queue:
        for ticket in [submit_batched(work_queue, str(number), alone, "a") for number in range(40)]:
            work_queue.wait(ticket, in_time())
    assert clashes == [False] * 40


def submit_batched(
    work_queue: WorkQueue, name: str, work: Callable[[], object], batch_key: str
) -> Ticket:
    ticket = work_queue.submit("up", name.encode(), work, claimed=True, batch_key=batch_key)
    assert ticket is not None
    return ticket
