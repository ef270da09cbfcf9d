"""Queues that are bounded and join what is asked twice; prefetches, and loads nobody waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial

import pytest
from helpers.local_server import eventually
from simulation.clock import FakeClock
from simulation.core import Core, frames_of, keys_of, prompt, settings
from simulation.stepped import SteppedWorkQueue
from simulation.tiers import SimDisk, SimRedis, no_faults
from simulation.universe import Version

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import DeadlineError, TierFullError
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkKey
from kvstore.server.store.reads import ReadTerms
from kvstore.server.tiering.work_queue import Expect, Ticket, WorkQueue

FOREVER = 1e12
PATIENCE_S = 20.0


def nothing() -> None:
    """Do nothing."""


def stepped(limit: int = 100, clock: Callable[[], float] = time.monotonic) -> SteppedWorkQueue:
    return SteppedWorkQueue({"up": 0, "down": 0}, limit, clock)


@contextmanager
def running(
    queues: dict[str, int], expect: Mapping[str, Expect] | None = None
) -> Iterator[SteppedWorkQueue]:
    with closing(SteppedWorkQueue(queues, 100, time.monotonic, expect=expect)) as work_queue:
        yield work_queue


def submit(
    work_queue: WorkQueue, name: str, work: Callable[[], object], queue: str = "up", **terms: object
) -> Ticket:
    ticket = work_queue.submit(queue, name.encode(), work, **terms)  # type: ignore[arg-type]
    assert ticket is not None
    return ticket


def in_time() -> float:
    return time.monotonic() + PATIENCE_S


class Block:
    """Work that has begun and goes on when it is let."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.began.set()
        assert self.go_on.wait(PATIENCE_S)

    def await_begin(self) -> None:
        assert self.began.wait(PATIENCE_S)


def test_work_runs_in_the_order_it_came_and_urgent_work_first() -> None:
    work_queue, done = stepped(limit=3), list[str]()
    for name in "abc":
        submit(work_queue, name, partial(done.append, name))
    assert work_queue.depth() == {"up": 3, "down": 0}
    for name in "uv":  # past the limit
        submit(work_queue, name, partial(done.append, name), urgent=True)
    submit(work_queue, "c", nothing, urgent=True)  # it is joined, and hurried
    assert [work_queue.step() for _ in range(6)] == [True] * 5 + [False]
    assert done == ["u", "v", "c", "a", "b"], "or a durable prompt would be written last first"
    assert work_queue.is_idle()


def test_a_full_queue_takes_no_more_and_the_others_do() -> None:
    work_queue = stepped(limit=2)
    submit(work_queue, "a", nothing)
    submit(work_queue, "b", nothing)
    assert work_queue.submit("up", b"c", nothing) is None
    assert work_queue.submit("down", b"c", nothing) is not None
    work_queue.step("up")
    assert work_queue.submit("up", b"c", nothing) is not None


def test_work_of_one_name_is_joined_and_runs_once() -> None:
    work_queue, done = stepped(limit=1), list[int]()
    first = submit(work_queue, "a", lambda: done.append(1))
    assert submit(work_queue, "a", lambda: done.append(2)) is first
    other = submit(work_queue, "a", lambda: done.append(3), "down")
    assert work_queue.named(b"a") == [first, other]
    work_queue.wait(first, FOREVER)
    assert done == [1]
    assert submit(work_queue, "a", nothing) is not first


def test_wait_returns_the_result_or_raises_the_error_until_the_deadline() -> None:
    def fail() -> None:
        raise TierFullError("cpu", 2, 1)

    clock = FakeClock(10.0)
    work_queue = stepped(clock=clock)
    late = submit(work_queue, "a", lambda: 42)
    with pytest.raises(DeadlineError):
        work_queue.wait(late, 10.0)
    assert work_queue.await_any(["up"], 10.0) is False
    assert not late.done
    assert work_queue.wait(late, 10.5) == work_queue.wait(late, 0.0) == 42
    ticket = submit(work_queue, "b", fail)
    for _ in range(2):
        with pytest.raises(TierFullError):
            work_queue.wait(ticket, FOREVER)
    assert work_queue.named(b"b") == []


def test_a_queue_that_hangs_holds_up_no_other_and_errors_end_no_worker() -> None:
    def explode() -> None:
        raise RuntimeError("not an error of ours")

    stuck = Block()
    with running({"up": 1, "down": 1}) as work_queue:
        submit(work_queue, "stuck", stuck)
        stuck.await_begin()
        assert (work_queue.depth(), work_queue.is_idle()) == ({"up": 0, "down": 0}, False)
        behind = submit(work_queue, "behind", lambda: "late")
        assert work_queue.depth() == {"up": 1, "down": 0}
        with pytest.raises(RuntimeError, match="not an error of ours"):
            work_queue.wait(submit(work_queue, "a", explode, "down"), in_time())
        assert work_queue.wait(submit(work_queue, "a", lambda: 1, "down"), in_time()) == 1
        with pytest.raises(DeadlineError):
            work_queue.wait(behind, time.monotonic())
        assert work_queue.is_alive()
        stuck.go_on.set()
        assert work_queue.wait(behind, in_time()) == "late"
    assert not work_queue.is_alive()
    assert stepped().is_alive(), "it has no threads"


def test_a_closed_queue_releases_who_waits_and_drops_what_waited() -> None:
    stuck, raised = Block(), list[Exception]()
    work_queue = WorkQueue({"up": 1}, 10, time.monotonic)
    first = submit(work_queue, "stuck", stuck)
    dropped = submit(work_queue, "dropped", nothing)
    stuck.await_begin()

    def wait() -> None:
        try:
            work_queue.wait(dropped, in_time())
        except DeadlineError as error:
            raised.append(error)

    threads = [threading.Thread(target=one, daemon=True) for one in (wait, work_queue.close)]
    for one in threads:
        one.start()
    threads[0].join(PATIENCE_S)
    assert len(raised) == 1
    stuck.go_on.set()
    threads[1].join(PATIENCE_S)
    assert not threads[1].is_alive()
    assert (first.done, dropped.done) == (True, False)
    assert work_queue.submit("up", b"late", nothing) is None
    assert work_queue.is_idle()
    work_queue.close()


def batched(work_queue: WorkQueue, name: str, work: Callable[[], object], key: str) -> Ticket:
    return submit(work_queue, name, work, claimed=True, batch_key=key)


def test_a_worker_takes_along_what_is_of_one_batch_and_says_what_follows() -> None:
    seen: list[str | list[bytes]] = []
    hold = Block()
    expect = {"up": lambda names: seen.append(list(names))}
    with running({"up": 2}, expect) as work_queue:
        batched(work_queue, "hold", hold, "a")
        hold.await_begin()
        for name in ("one", "two", "other", "three"):
            key = "b" if name == "other" else "a"
            tickets = [batched(work_queue, name, partial(seen.append, name), key)]
        other = [[b"hold"], [b"other"], "other", []]
        assert eventually(lambda: seen == other), "another batch_key's does not wait"
        hold.go_on.set()
        for ticket in tickets:
            work_queue.wait(ticket, in_time())
        assert eventually(lambda: seen[-2:] == ["three", []])
    row = [[b"one", b"two", b"three"], "one", [b"two", b"three"], "two", [b"three"], "three", []]
    assert seen[4:] == [[], *row]


def test_what_was_taken_along_ends_when_nobody_wants_it_any_more() -> None:
    done: list[str] = []
    busy, first = Block(), Block()
    expected: list[list[bytes]] = []
    expect = {"up": lambda names: expected.append(list(names))}
    with running({"up": 1, "down": 1}, expect) as work_queue:
        submit(work_queue, "busy", busy)
        busy.await_begin()
        batched(work_queue, "first", first, "a")
        second, third = (
            batched(work_queue, name, partial(done.append, name), "a") for name in ("2nd", "3rd")
        )
        busy.go_on.set()
        first.await_begin()
        assert work_queue.depth() == {"up": 0, "down": 0}
        assert work_queue.unclaim(second)
        with pytest.raises(DeadlineError):
            work_queue.wait(second, in_time())
        first.go_on.set()
        work_queue.wait(third, in_time())
        assert eventually(lambda: expected[-1] == [])
    assert done == ["3rd"]
    assert expected == [[b"first", b"2nd", b"3rd"], [b"3rd"], []]


def test_workers_share_one_batch_where_they_are_let_and_else_one_is_at_it() -> None:
    both = threading.Barrier(2, timeout=PATIENCE_S)
    with closing(WorkQueue({"up": 4}, 100, time.monotonic, {"up": 2})) as work_queue:
        for ticket in [batched(work_queue, name, both.wait, "a") for name in "wxyz"]:
            work_queue.wait(ticket, in_time())
    assert not both.broken
    at_work, clashes = threading.Lock(), list[bool]()

    def alone() -> None:
        is_alone = at_work.acquire(blocking=False)
        clashes.append(not is_alone)
        time.sleep(0.001)
        if is_alone:
            at_work.release()

    with running({"up": 4}) as work_queue:
        for ticket in [batched(work_queue, str(number), alone, "a") for number in range(40)]:
            work_queue.wait(ticket, in_time())
    assert clashes == [False] * 40


def test_what_waits_is_dropped_with_its_last_claim() -> None:
    work_queue, done = stepped(), []
    one = submit(work_queue, "a", lambda: done.append(1), claimed=True)
    assert submit(work_queue, "a", lambda: done.append(2), claimed=True) is one
    assert not work_queue.unclaim(one)
    assert work_queue.unclaim(one)
    assert not work_queue.unclaim(one), "there is nothing left to undo"
    assert work_queue.is_idle()
    assert not work_queue.step()
    with pytest.raises(DeadlineError, match="cancelled"):
        work_queue.wait(one, time.monotonic() + 5)
    assert submit(work_queue, "a", lambda: done.append(3), claimed=True) is not one
    assert work_queue.step()
    assert done == [3]


@pytest.mark.parametrize("is_noticed", [True, False])
def test_who_comes_after_work_was_given_up_gets_work_of_its_own(is_noticed: bool) -> None:
    """Who comes before the work has noticed keeps it going."""
    work_queue, seen = stepped(), list[bool]()

    def note() -> None:
        seen.append(work_queue.is_cancelled())

    def first() -> None:
        note()
        work_queue.unclaim(ticket)
        if is_noticed:
            note()
        assert (submit(work_queue, "a", note, claimed=True) is ticket) is not is_noticed
        note()

    ticket = submit(work_queue, "a", first, claimed=True)
    assert work_queue.step()
    assert work_queue.step() is is_noticed
    assert seen == ([False, True, True, False] if is_noticed else [False, False])
    assert work_queue.is_idle()
    assert not work_queue.is_cancelled(), "this thread does no work"


PARTS = 8


class Gate:
    """Lets parts of loads through one by one, or all of them."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()
        self.parts, self.hold_after = 0, 1

    def pass_through(self) -> None:
        self.parts += 1
        if self.parts >= self.hold_after:
            self.begun.set()
            assert self.opened.wait(20.0)


class Held:
    """Monotonic seconds, none of which pass until a load has begun.

    So a get whose time is short has asked for all of its loads by then, on a busy machine too.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._stood_still_s = 0.0
        self._stands_at_s = time.monotonic()

    def __call__(self) -> float:
        now_s = time.monotonic()
        if not self._gate.begun.is_set():
            self._stood_still_s = now_s - self._stands_at_s
        return now_s - self._stood_still_s


class _Slow:
    """Comes in parts, each through a gate."""

    gate: Gate

    def read(
        self, key: ChunkKey, out: Bytes, offset: int = 0, verifier: FrameVerifier | None = None
    ) -> bool:
        assert verifier is not None
        if not super().read(key, out, offset):  # type: ignore[misc]
            return False
        size = len(out) // PARTS
        for part in range(1, PARTS):
            verifier.update(part * size)
            self.gate.pass_through()
        verifier.update(len(out))
        return True


class SlowDisk(_Slow, SimDisk):
    pass


class SlowRedis(_Slow, SimRedis):
    pass


@pytest.fixture
def tier(request: pytest.FixtureRequest) -> SimDisk | SimRedis:
    """A disk; where a test says so, a Redis."""
    tier: SlowDisk | SlowRedis = getattr(request, "param", SlowDisk)(4 << 20, no_faults())
    tier.gate = Gate()
    return tier


@pytest.fixture
def core(tier: SimDisk) -> Iterator[Core]:
    gate: Gate = tier.gate  # type: ignore[attr-defined]
    config = settings(prefetch_bytes=1 << 20)
    core = Core([tier], workers=1, config=config, clock=Held(gate))
    yield core
    gate.opened.set()
    core.close()


def put_below(core: Core, count: int) -> list[Version]:
    """Put a prompt and have it evicted from memory by another."""
    versions = prompt(count)
    core.put(versions)
    core.put(prompt(12, seed=9))
    assert eventually(core.work_queue.is_idle)
    assert not any("cpu" in core.tiers_of(version) for version in versions)
    return versions


def assert_nothing_left(core: Core, tier: SlowDisk) -> None:
    tier.gate.opened.set()
    assert eventually(core.work_queue.is_idle)
    assert core.cpu.stats().reservations == 0
    held = sum(core.catalog.size_bytes("cpu", key) > 0 for key in keys_of(prompt(12, seed=9)))
    assert core.cpu.stats().chunks >= held
    assert len(core.catalog.leases) == core.catalog.leases.pins.total() == 0


@pytest.mark.parametrize("tier", [SlowDisk, SlowRedis], indirect=True)
def test_a_load_ends_when_its_get_is_late(core: Core, tier: SlowDisk) -> None:
    versions = put_below(core, 4)
    started = time.monotonic()
    assert core.get(versions, seconds=0.2) == []
    assert time.monotonic() - started < 15.0
    assert core.counters["given_up_loads"] == 4, "one that runs and three that wait"
    assert_nothing_left(core, tier)
    assert not any("cpu" in core.tiers_of(version) for version in versions)
    assert tier.gate.parts == 1, "it ends before the next part"
    assert core.get(versions) == frames_of(versions)


def test_a_load_that_is_past_its_half_is_finished(core: Core, tier: SlowDisk) -> None:
    versions = put_below(core, 1)
    tier.gate.hold_after = PARTS // 2
    assert core.get(versions, seconds=0.2) == []
    tier.gate.opened.set()
    assert eventually(lambda: "cpu" in core.tiers_of(versions[0]))
    assert_nothing_left(core, tier)


def test_a_reader_that_goes_away_takes_its_loads_along(core: Core, tier: SlowDisk) -> None:
    versions = put_below(core, 4)
    tier.gate.hold_after = PARTS  # the first comes, the second stops at its first part
    lease_id, known = core.store.open_get(core.session, keys_of(versions), 0)
    results = core.store.reads.get(keys_of(versions)[:known], ReadTerms(core.session, core.later()))
    assert next(results).data.tobytes() == versions[0].frame.tobytes()
    assert tier.gate.begun.wait(20.0)
    results.close()  # type: ignore[attr-defined]
    assert core.store.release(core.session, lease_id)
    assert_nothing_left(core, tier)
    assert core.counters["given_up_loads"] == 3
    assert [len(core.tiers_of(version)) for version in versions] == [2, 1, 1, 1]


@pytest.mark.parametrize("ends", ["released", "expired", "session"])
def test_a_prefetch_ends_with_its_lease(core: Core, tier: SlowDisk, ends: str) -> None:
    versions = put_below(core, 4)
    match = core.look_up(versions, lease=True)
    assert core.counters["prefetched_chunks"] == 4
    assert tier.gate.begun.wait(20.0)
    if ends == "released":
        core.store.release(core.session, match.lease_id)
    elif ends == "session":
        core.sessions.close(core.session.session_id)
    else:
        core.catalog.leases.drop(lambda lease: True)
    core.store.tick()
    assert core.counters["given_up_loads"] == 4
    assert_nothing_left(core, tier)
    assert not any("cpu" in core.tiers_of(version) for version in versions)


def _claims(core: Core, version: Version) -> int | None:
    (ticket,) = core.work_queue.named(version.info.key)
    return ticket.claims


def test_a_prefetch_that_a_get_waits_for_goes_on(core: Core, tier: SlowDisk) -> None:
    versions = put_below(core, 2)
    match = core.look_up(versions, lease=True)
    frames: list[list[bytes]] = []
    getter = threading.Thread(target=lambda: frames.append(core.get(versions)))
    getter.start()
    assert tier.gate.begun.wait(20.0)
    assert eventually(lambda: len(core.catalog.leases) == 2)
    assert eventually(lambda: (_claims(core, versions[0]) or 0) >= 2)
    core.store.release(core.session, match.lease_id)
    tier.gate.opened.set()
    getter.join()
    assert frames == [frames_of(versions)]
    assert_nothing_left(core, tier)


def prefetching(prefetch_bytes: int = 1 << 20, queue_limit: int = 1000) -> Core:
    """A core with room for twelve chunks in memory, and many more on disk."""
    config = settings(prefetch_bytes=prefetch_bytes)
    disk = SimDisk(4 << 20, no_faults())
    return Core([disk], config=config, queue_limit=queue_limit, clock=FakeClock())


def put_on_disk(core: Core, count: int) -> list[Version]:
    versions = prompt(count)
    core.put(versions)
    core.put(prompt(12, seed=9))
    return versions


def test_a_chain_that_was_leased_comes_up_before_its_get() -> None:
    with closing(prefetching()) as core:
        versions = put_on_disk(core, 4)
        core.look_up(versions)
        core.look_up(prompt(4, seed=9), lease=True)
        assert core.counters["prefetched_chunks"] == 0, "none was leased that is not in memory"
        core.look_up(versions, lease=True)
        core.settle()
        assert all("cpu" in core.tiers_of(version) for version in versions)
        for _ in range(2):
            assert core.get(versions) == frames_of(versions)
            assert core.counters["prefetched_chunks"] == core.counters["prefetch_used_chunks"] == 4


def test_no_more_than_the_budget_is_under_way_and_half_the_queue_belongs_to_gets() -> None:
    with closing(prefetching(3 * prompt(1)[0].info.size_bytes)) as core:
        versions = put_on_disk(core, 6)
        for expected in (3, 3):
            core.look_up(versions, lease=True)
            assert core.counters["prefetched_chunks"] == expected
        core.settle()
        core.look_up(versions, lease=True)
        assert core.counters["prefetched_chunks"] == 6
    for terms, count in (((1 << 20, 4), 3), ((0,), 0)):
        with closing(prefetching(*terms)) as core:
            core.look_up(put_on_disk(core, 6), lease=True)
            assert core.counters["prefetched_chunks"] == count


def test_loads_that_nobody_reads_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.server.tiering.prefetch.REMEMBERED", 8)
    begun = []
    with closing(prefetching()) as core:
        for seed in range(20, 70):
            core.put(prompt(6, seed=seed))
        for seed in range(20, 66):
            before = core.counters["prefetched_chunks"]
            match = core.look_up(prompt(6, seed=seed), lease=True)
            core.settle()
            core.store.release(core.session, match.lease_id)
            begun.append(core.counters["prefetched_chunks"] - before)
    assert begun[:5] == [6] * 5
    assert 0 < sum(map(bool, begun[-32:])) <= 2
