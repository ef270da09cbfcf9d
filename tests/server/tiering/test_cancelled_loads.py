"""Loads that nobody waits for any more: they end between parts, and their room comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from helpers.local_server import eventually
from simulation.core import Core, frames_of, keys_of, prompt, settings
from simulation.stepped import SteppedWorkQueue
from simulation.tiers import SimDisk, SimRedis, no_faults
from simulation.universe import Version

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import DeadlineError
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkKey
from kvstore.server.security.sessions import Session
from kvstore.server.store.reads import ReadTerms

PARTS = 8


class Gate:
    """Lets parts of loads through one by one, or all of them."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.opened = threading.Event()
        self.parts = 0
        self.hold_after = 1

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


def put_below(core: Core, session: Session, count: int) -> list[Version]:
    """Put a prompt and have it evicted from memory by another."""
    versions = prompt(count)
    core.put(session, versions)
    core.put(session, prompt(12, seed=9))
    assert eventually(core.work_queue.is_idle)
    assert not any("cpu" in core.tiers_of(version) for version in versions)
    return versions


def assert_nothing_left(core: Core) -> None:
    assert eventually(core.work_queue.is_idle)
    assert core.cpu.stats().reservations == 0
    held = sum(core.catalog.size_bytes("cpu", key) > 0 for key in keys_of(prompt(12, seed=9)))
    assert core.cpu.stats().chunks >= held
    assert len(core.catalog.leases) == core.catalog.leases.pins.total() == 0


@pytest.mark.parametrize("tier", [SlowDisk, SlowRedis], indirect=True)
def test_a_load_ends_when_its_get_is_late(core: Core, tier: SlowDisk) -> None:
    session = core.open_session()
    versions = put_below(core, session, 4)
    started = time.monotonic()
    assert core.get(session, keys_of(versions), 0.2) == []
    assert time.monotonic() - started < 15.0
    assert core.counters["given_up_loads"] == 4, "one that runs and three that wait"
    tier.gate.opened.set()
    assert_nothing_left(core)
    assert not any("cpu" in core.tiers_of(version) for version in versions)
    assert tier.gate.parts == 1, "it ends before the next part"
    assert core.get(session, keys_of(versions)) == frames_of(versions)


def test_a_load_that_is_past_its_half_is_finished(core: Core, tier: SlowDisk) -> None:
    session = core.open_session()
    versions = put_below(core, session, 1)
    tier.gate.hold_after = PARTS // 2
    assert core.get(session, keys_of(versions), 0.2) == []
    tier.gate.opened.set()
    assert eventually(lambda: "cpu" in core.tiers_of(versions[0]))
    assert_nothing_left(core)


def test_a_reader_that_goes_away_takes_its_loads_along(core: Core, tier: SlowDisk) -> None:
    session = core.open_session()
    versions = put_below(core, session, 4)
    tier.gate.hold_after = PARTS  # the first comes, the second stops at its first part
    lease_id, known = core.store.open_get(session, keys_of(versions), 0)
    results = core.store.reads.get(keys_of(versions)[:known], ReadTerms(session, core.later()))
    assert next(results).data.tobytes() == versions[0].frame.tobytes()
    assert tier.gate.begun.wait(20.0)
    results.close()  # type: ignore[attr-defined]
    assert core.store.release(session, lease_id)
    tier.gate.opened.set()
    assert_nothing_left(core)
    assert core.counters["given_up_loads"] == 3
    assert [len(core.tiers_of(version)) for version in versions] == [2, 1, 1, 1]


@pytest.mark.parametrize("ends", ["released", "expired", "session"])
def test_a_prefetch_ends_with_its_lease(core: Core, tier: SlowDisk, ends: str) -> None:
    session = core.open_session()
    versions = put_below(core, session, 4)
    match = core.store.lookup(session, keys_of(versions), core.later(), lease=True)
    assert core.counters["prefetched_chunks"] == 4
    assert tier.gate.begun.wait(20.0)
    if ends == "released":
        core.store.release(session, match.lease_id)
    elif ends == "session":
        core.sessions.close(session.session_id)
        core.store.tick()
    else:
        core.catalog.leases.drop(lambda lease: True)
        core.store.tick()
    assert core.counters["given_up_loads"] == 4
    tier.gate.opened.set()
    assert_nothing_left(core)
    assert not any("cpu" in core.tiers_of(version) for version in versions)


def _claims(core: Core, version: Version) -> int | None:
    (ticket,) = core.work_queue.named(version.info.key)
    return ticket.claims


def test_a_prefetch_that_a_get_waits_for_goes_on(core: Core, tier: SlowDisk) -> None:
    session = core.open_session()
    versions = put_below(core, session, 2)
    match = core.store.lookup(session, keys_of(versions), core.later(), lease=True)
    frames: list[list[bytes]] = []
    getter = threading.Thread(target=lambda: frames.append(core.get(session, keys_of(versions))))
    getter.start()
    assert tier.gate.begun.wait(20.0)
    assert eventually(lambda: len(core.catalog.leases) == 2)
    assert eventually(lambda: (_claims(core, versions[0]) or 0) >= 2)
    core.store.release(session, match.lease_id)
    tier.gate.opened.set()
    getter.join()
    assert frames == [frames_of(versions)]
    assert_nothing_left(core)


# --- the WorkQueue by itself


def stepped() -> SteppedWorkQueue:
    return SteppedWorkQueue({"load": 0}, 10, time.monotonic)


def test_what_waits_is_dropped_with_its_last_claim() -> None:
    work_queue, done = stepped(), []
    one = work_queue.submit("load", b"a", lambda: done.append(1), claimed=True)
    same = work_queue.submit("load", b"a", lambda: done.append(2), claimed=True)
    assert one is not None
    assert one is same
    assert not work_queue.let_go(one)
    assert work_queue.let_go(one)
    assert not work_queue.let_go(one), "there is nothing left to undo"
    assert work_queue.is_idle()
    assert not work_queue.step()
    with pytest.raises(DeadlineError, match="nobody waits"):
        work_queue.wait(one, time.monotonic() + 5)
    assert work_queue.submit("load", b"a", lambda: done.append(3), claimed=True) is not one
    assert work_queue.step()
    assert done == [3]


def test_what_somebody_submits_without_a_claim_is_done_in_any_case() -> None:
    work_queue, done = stepped(), []
    for claimed in (True, False, True):
        ticket = work_queue.submit("load", b"a", lambda: done.append(1), claimed=claimed)
    assert ticket is not None
    for _ in range(3):
        assert not work_queue.let_go(ticket)
    assert work_queue.step()
    assert done == [1]


def test_who_comes_after_work_was_given_up_gets_work_of_its_own() -> None:
    work_queue = stepped()
    seen: list[bool] = []

    def first() -> None:
        assert ticket is not None
        seen.append(work_queue.is_cancelled())
        work_queue.let_go(ticket)
        seen.append(work_queue.is_cancelled())
        other = work_queue.submit(
            "load", b"a", lambda: seen.append(work_queue.is_cancelled()), claimed=True
        )
        assert other is not ticket

    ticket = work_queue.submit("load", b"a", first, claimed=True)
    assert work_queue.step()
    assert not work_queue.is_idle()
    assert work_queue.step()
    assert seen == [False, True, False]
    assert work_queue.is_idle()
    assert not work_queue.is_cancelled(), "this thread does no work"


def test_who_comes_before_it_is_noticed_keeps_the_work_going() -> None:
    work_queue = stepped()
    seen: list[bool] = []

    def first() -> None:
        assert ticket is not None
        work_queue.let_go(ticket)
        assert work_queue.submit("load", b"a", lambda: None, claimed=True) is ticket
        seen.append(work_queue.is_cancelled())

    ticket = work_queue.submit("load", b"a", first, claimed=True)
    assert work_queue.step()
    assert seen == [False]
