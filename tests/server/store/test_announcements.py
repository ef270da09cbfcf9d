"""Hand-over: chunks that were announced, lookups that wait, and what is kept until it was read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from helpers.local_server import eventually
from simulation.clock import FakeClock
from simulation.core import Core, keys_of, prompt, settings

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import Hints
from kvstore.proto.types import ChunkKey, Match
from kvstore.server.index.in_flight import MAX_ANNOUNCED_CHUNKS, MAX_ANNOUNCEMENTS
from kvstore.server.security.sessions import Session
from kvstore.server.store.reservations import PutTicket
from kvstore.server.store.store import WORKERS_PER_WAITER

LONG_S = 30.0


@pytest.fixture
def core() -> Iterator[Core]:
    core = Core(config=settings(workers=2 * WORKERS_PER_WAITER))
    yield core
    core.close()


def look(core: Core, session: Session, keys: list[ChunkKey]) -> Match:
    return core.store.lookup(session, keys, core.later(), lease=False)


class Waiting:
    """A lookup that waits in a thread."""

    def __init__(self, core: Core, session: Session, keys: list[ChunkKey]) -> None:
        self.match: Match | None = None
        self.thread = threading.Thread(target=self._run, args=(core, session, keys))
        self.thread.start()

    def _run(self, core: Core, session: Session, keys: list[ChunkKey]) -> None:
        core.store.await_puts(keys, core.later(LONG_S))
        self.match = look(core, session, keys)

    def answer(self) -> tuple[int, int]:
        self.thread.join(LONG_S)
        assert self.match is not None
        return self.match.ready, self.match.pending


def waits(core: Core, count: int = 1) -> bool:
    return eventually(lambda: core.counters["waited_lookups"] == count)


def die(core: Core, writer: Session, keys: list[ChunkKey]) -> None:
    core.sessions.close(writer.session_id)


def change_its_mind(core: Core, writer: Session, keys: list[ChunkKey]) -> None:
    core.store.announce_puts(writer, keys, 0)


def drain(core: Core, writer: Session, keys: list[ChunkKey]) -> None:
    core.store.drain(core.later())


@pytest.mark.parametrize("end", [die, change_its_mind, drain])
def test_whoever_waits_for_a_writer_that_ends_is_answered_at_once(
    core: Core, end: Callable[[Core, Session, list[ChunkKey]], None]
) -> None:
    writer, reader = core.open_session(), core.open_session()
    versions = prompt(2)
    keys = keys_of(versions)
    core.store.announce_puts(writer, keys, 60_000)
    core.put(writer, versions[:1])
    waiting = Waiting(core, reader, keys)
    assert waits(core)
    started = time.monotonic()
    end(core, writer, keys)
    assert waiting.answer()[0] == 1
    assert time.monotonic() - started < LONG_S / 2


def test_a_promise_and_a_wait_end_with_their_time(core: Core) -> None:
    writer = core.open_session()
    keys = keys_of(prompt(1))
    core.store.announce_puts(writer, keys, 60_000)
    core.store.await_puts(keys, core.later(0.05))
    assert look(core, writer, keys).pending == 1
    core.store.announce_puts(writer, keys, 0)
    core.store.announce_puts(writer, keys, 1)
    waiting = Waiting(core, writer, keys)

    def is_over() -> bool:
        core.store.tick()
        return not waiting.thread.is_alive()

    assert eventually(is_over)
    assert waiting.answer() == (0, 0)


def test_no_more_lookups_wait_than_may(core: Core) -> None:
    writer = core.open_session()
    keys = keys_of(prompt(1))
    core.store.announce_puts(writer, keys, 60_000)
    both = [Waiting(core, writer, keys) for _ in range(2)]
    assert waits(core, 2)
    core.store.await_puts(keys, core.later())
    assert core.counters["refused_waits"] == 1
    begun = core.store.writes.begin_all(writer, [prompt(1)[0].info], core.later())[0]
    assert isinstance(begun, PutTicket)
    core.store.announce_puts(writer, keys, 0)  # they wait for the put that is under way
    core.store.writes.commit(
        core.store.writes.claim(writer, begun.ticket_id), frame=prompt(1)[0].frame
    )
    assert [waiting.answer() for waiting in both] == [(1, 0)] * 2
    core.store.await_puts(keys_of(prompt(2)), core.later())
    assert core.counters["waited_lookups"] == 2, "nobody waits for what nobody puts"


def test_promises_are_bounded_in_time_and_number(core: Core) -> None:
    session = core.open_session()
    with pytest.raises(InvalidRequestError, match="ttl_ms"):
        core.store.announce_puts(session, [], 600_001)
    for handover_ms in (-1, 600_001, 1.5):
        with pytest.raises(InvalidRequestError, match="handover_ms"):
            Hints(handover_ms=handover_ms)  # type: ignore[arg-type]
    in_flight = core.catalog.in_flight
    keys = [ChunkKey(n.to_bytes(32, "little")) for n in range(MAX_ANNOUNCED_CHUNKS + 5)]
    assert in_flight.announce(1, keys, 1.0) == len(in_flight.announced) == MAX_ANNOUNCED_CHUNKS
    assert in_flight.announce(1, keys, 0.0) == MAX_ANNOUNCED_CHUNKS
    made = [
        in_flight.announce(1, [key], 1.0 + n) for n, key in enumerate(keys[: MAX_ANNOUNCEMENTS + 1])
    ]
    assert made == [1] * MAX_ANNOUNCEMENTS + [0]
    assert in_flight.announce(2, keys, 0.0) == 0
    assert in_flight.announce(1, keys[:3], 0.0) == 3
    core.catalog.release_session(1)
    assert not in_flight.announced


def test_what_is_handed_over_stays_until_it_was_read_once_or_its_time_is_up() -> None:
    clock = FakeClock()
    with closing(Core(clock=clock)) as core:
        writer, reader = core.open_session("red"), core.open_session("red")
        versions = prompt(2)
        read, unread = keys_of(versions)
        core.put(writer, versions, hints=Hints(handover_ms=60_000))
        assert core.catalog.eviction.claim("cpu", [read]) == []
        core.get(reader, [read])
        assert core.catalog.eviction.claim("cpu", [read]) == [read]
        clock.advance(59)
        core.store.tick()
        assert core.catalog.eviction.claim("cpu", [unread]) == []
        clock.advance(1)
        core.store.tick()
        assert core.catalog.eviction.claim("cpu", [unread]) == [unread]
