"""One seed, one schedule: operations at random, a check after each, and an end in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulation.core import BREAKER_RETRY_S
from simulation.oracle import Oracle
from simulation.readers import Readers
from simulation.universe import REPRESENTATION, TENANTS, universe
from simulation.world import SESSION_TTL_S, World
from simulation.writers import Writers

from kvstore.proto.errors import QuotaExceededError
from kvstore.server.security.sessions import Session
from kvstore.server.store.reads import ReadTerms

_FULL_CHECK_EVERY = 8


@dataclass(frozen=True, slots=True)
class Report:
    """How a schedule went, for tests of the simulation itself."""

    counters: dict[str, int]
    operations: tuple[str, ...]
    ended_at: float


class Schedule:
    """Run with ``run``; it raises AssertionError at the first thing that must not be."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.draw = self.world.draw
        self.oracle = Oracle(self.world)
        self.readers = Readers(self.world, self.oracle)
        self.writers = Writers(self.world, self.oracle)
        self.sessions: list[Session] = []
        self.operations: list[str] = []
        readers, writers = self.readers, self.writers
        self._of_a_session: dict[Callable[[Session], object], int] = {
            writers.put_all: 9, writers.begin: 4, readers.look_up: 6, readers.get: 7,
            readers.begin: 3, readers.release: 4, readers.ask_beyond_the_lease: 1, writers.pin: 1,
            writers.unpin: 1, writers.delete: 3, writers.clear: 1, writers.harden_known: 3,
            readers.hog: 2,
        }  # fmt: skip
        self._of_nobody: dict[Callable[[], object], int] = {
            writers.finish: 4, writers.abort: 1, readers.step: 6, self.open_session: 3,
            self.close_session: 1, self.step_work_queue: 8, self.settle: 1, self.tick: 3,
            self.sleep: 3, self.spoil: 8, self.others: 3, self.crash: 1, self.drain: 1,
        }  # fmt: skip

    def run(self) -> Report:
        draw = self.draw
        weights: dict[Any, int] = {**self._of_a_session, **self._of_nobody}
        self.open_session()
        for number, operation in enumerate(
            draw.choices(list(weights), list(weights.values()), k=draw.randrange(40, 81))
        ):
            self.operations.append(operation.__name__)
            if operation in self._of_nobody:
                operation()
            elif self.sessions:
                operation(draw.choice(self.sessions))
            self.oracle.check(thoroughly=number % _FULL_CHECK_EVERY == 0)
            for reader in self.readers.open:
                self.readers.check_last(reader)
        self.oracle.check(thoroughly=True)
        self.end()
        return Report(self.world.totals, tuple(self.operations), self.world.clock())

    # --- sessions and time

    def open_session(self) -> None:
        tenant = self.draw.choice((*TENANTS, TENANTS[0]))
        try:
            self.sessions.append(self.world.sessions.open(REPRESENTATION, "simulated", tenant))
        except QuotaExceededError:
            assert len(self.sessions) == len(self.world.sessions)

    def close_session(self) -> None:
        """A process dies with whatever it had open."""
        if len(self.sessions) > 1:
            session = self.sessions[self.draw.randrange(len(self.sessions))]
            assert self.world.sessions.close(session.session_id)
            self._forget(session)

    def _forget(self, session: Session) -> None:
        self.sessions.remove(session)
        self.oracle.note_session_end(session)
        self.readers.forget_session(session)

    def tick(self) -> None:
        for session in self.sessions:
            if self.draw.random() < 0.7:
                self.world.sessions.get(session.session_id)
        self.world.store.tick()
        self.oracle.note_tick()
        silent = self.world.clock() - SESSION_TTL_S
        late = [session for session in self.sessions if session.active_at < silent]
        expired = self.world.sessions.expire()
        self.world.counters.add("expired_sessions", expired)
        assert expired == len(late)
        for session in late:
            self._forget(session)

    def settle(self) -> None:
        self.world.settle()

    def sleep(self) -> None:
        self.world.clock.advance(self.draw.choice((0.01, 0.3, 0.6, 1.2, 3.5)))

    def step_work_queue(self) -> None:
        for _ in range(self.draw.randrange(1, 4)):
            self.world.work_queue.step(self.draw.choice([None, *self.world.work_queue.depth()]))

    # --- what happens to media

    def spoil(self) -> None:
        """A medium forgets a chunk, or one bit of it turns."""
        if not (self.world.plan.spoils and self.world.lower):
            return
        tier = self.draw.choice(self.world.lower)
        # What is in CPU memory too would not be read from below for a long while.
        low = [key for key in tier.medium.chunks if self.world.cpu.find([key]) == [None]]
        if low:
            key = self.draw.choice(low)
            if self.draw.random() < 0.6:
                tier.lose(key)
            else:
                tier.flip(key, self.draw.randrange(8 * 4096))
            tenant = universe().chunks[key].tenant
            for session in [s for s in self.sessions if s.tenant == tenant][:1]:
                self.readers.get_one(session, key)

    def others(self) -> None:
        """Another node puts over a chunk, with bytes and a codec of its own."""
        redis = self.world.redis
        if self.world.plan.spoils and redis is not None:
            chunk = self.draw.choice(list(universe().chunks.values()))
            version = self.draw.choice(chunk.versions)
            packed = self.draw.random() < 0.5
            info, frame = version.info, version.frame
            if packed:
                info, frame = version.packed_info, version.packed
            if redis.others_put(info, frame):
                self.oracle.note_stored(version)

    # --- ends

    def crash(self) -> None:
        """The power fails; what was acknowledged as durable is there, and right."""
        if self.draw.random() < 0.5:
            return
        self._restart()

    def drain(self) -> None:
        """The server stops in order and another takes its place."""
        if self.sessions and self.draw.random() < 0.5:
            self.writers.drain(self.sessions[0])
            self._restart()

    def _restart(self) -> None:
        self.readers.forget_all()
        self.sessions.clear()
        self.oracle.forget_what_is_gone()
        self.oracle.note_restart()
        recovered = self.world.restart()
        disk = self.world.disk
        assert recovered == (len(disk.medium.chunks) if disk is not None else 0)
        for key in self.oracle.durable:
            assert disk is not None
            assert "disk" in self.world.catalog.copies(key), "a durable chunk was not recovered"
            self.oracle.check_frame(key, disk.medium.chunks[key].frame)
        self.open_session()

    def end(self) -> None:
        """Everything is given back, everything that should be readable is, nothing is left."""
        world = self.world
        world.faults.end()
        self.readers.forget_all()
        while self.sessions:
            session = self.sessions[0]
            assert world.sessions.close(session.session_id)
            self._forget(session)
        world.clock.advance(10.0 + BREAKER_RETRY_S)
        self.oracle.pins.clear()
        world.store.tick()
        world.settle()
        self.oracle.check(thoroughly=True)
        assert world.catalog.leases.pins.total() == world.catalog.in_flight.writers.total() == 0
        assert world.work_queue.is_idle()
        self._read_everything()
        self._clear_everything()
        world.close()

    def _read_everything(self) -> None:
        """With no faults left and nobody else there, every sound chunk is delivered."""
        world = self.world
        for key in universe().chunks:
            lost = {tier.name for tier in world.lower if key in tier.lost}
            if not set(world.catalog.copies(key)) - lost:
                continue
            tenant = universe().chunks[key].tenant
            session = world.sessions.open(REPRESENTATION, "the end", tenant)
            lease_id, count = world.store.open_get(session, [key], 0)
            assert count == 1
            results = list(world.store.reads.get([key], ReadTerms(session, world.clock() + 1)))
            assert len(results) == 1, "a sound chunk that the catalog names did not arrive"
            self.oracle.check_frame(key, results[0].data)
            assert world.store.release(session, lease_id)
            assert world.sessions.close(session.session_id)

    def _clear_everything(self) -> None:
        """After a clear nothing is left, and a put still works."""
        world = self.world
        for tenant in TENANTS:
            session = world.sessions.open(REPRESENTATION, "the end", tenant)
            mine = world.catalog.queries.keys_from(session.namespace)
            world.store.delete(mine, world.clock() + 1)
            assert not list(world.catalog.queries.page(session.namespace))
            self.writers.put_one(session, universe().chains[tenant][0][0])
            assert world.sessions.close(session.session_id)
        world.settle()
        self.oracle.check(thoroughly=True)
        assert world.cpu.stats().chunks == len(TENANTS)
        if world.disk is not None and world.plan.write_through:
            self.oracle.check_nothing_leaked(world.disk)
