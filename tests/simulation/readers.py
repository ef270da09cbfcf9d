"""Operations that look up, lease and read, each checked against the oracle as it happens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simulation.oracle import LiveLease, Oracle
from simulation.universe import universe
from simulation.world import LEASE_TTL_S, World, bounded

from kvstore.proto.errors import InvalidRequestError, LeaseExpiredError, QuotaExceededError
from kvstore.proto.types import ChunkKey
from kvstore.server.security.sessions import Session
from kvstore.server.store.reads import LayerPart, ReadTerms


@dataclass(slots=True)
class Reader:
    """A get that is under way: what it is to deliver and what came last."""

    session: Session
    lease_id: int
    keys: list[ChunkKey]
    deadline: float
    results: Iterator[LayerPart]
    delivered: int = 0
    last: tuple[LayerPart, bytes] | None = None


class Readers:
    """Sessions that look up and get."""

    def __init__(self, world: World, oracle: Oracle) -> None:
        self.world = world
        self.oracle = oracle
        self.draw = world.draw
        self.open: list[Reader] = []

    def deadline(self) -> float:
        return self.world.clock() + self.draw.choice((0.0, 0.05, 0.5, 5.0))

    def chain(self, tenant: str) -> list[ChunkKey]:
        chain = self.draw.choice(universe().chains[tenant])
        return list(chain[: self.draw.randrange(1, len(chain) + 1)])

    # --- lookups and leases

    def look_up(self, session: Session) -> None:
        """The answer is the longest prefix that can be read, each chunk from its fastest tier."""
        keys = self.chain(session.tenant)
        deadline = self.deadline()
        lease = self.draw.random() < 0.6
        raised = self.world.faults.raised
        with bounded(self.world, deadline):
            try:
                match = self.world.store.lookup(session, keys, deadline, lease=lease)
            except QuotaExceededError:
                return
        copies = [self.world.catalog.copies(key) for key in keys]
        prefix = next((at for at, held in enumerate(copies) if not held), len(keys))
        assert match.ready <= prefix
        barred = {slot.name for slot in self.world.slots if slot.breaker.is_open}
        readable = next(
            (at for at, held in enumerate(copies) if not held.keys() - barred), len(keys)
        )
        if self.world.faults.raised == raised and deadline > self.world.clock():
            assert match.ready == readable
        assert match.ready + match.pending + match.missing == len(keys)
        order = [slot.name for slot in self.world.slots]
        found = list(zip(match.tiers, copies, strict=False))
        assert all(tier in held for tier, held in found)
        if self.world.faults.raised == raised:  # else a tier may have been barred since
            assert [tier for tier, _ in found] == [
                min(held.keys() - barred, key=order.index) for _, held in found
            ]
        assert len(match.load_us) == match.ready
        assert bool(match.lease_id) == (lease and match.ready > 0)
        if match.lease_id:
            self._note_lease(session, match.lease_id, keys[: match.ready])

    def _note_lease(self, session: Session, lease_id: int, keys: list[ChunkKey]) -> None:
        until = self.world.clock() + LEASE_TTL_S
        self.oracle.leases[lease_id] = LiveLease(session, keys, until)

    def release(self, session: Session) -> None:
        """A lease ends once, and only for the session that has it."""
        if not self.oracle.leases:
            return
        lease_id = self.draw.choice(list(self.oracle.leases))
        held = self.oracle.leases[lease_id]
        assert self.world.store.release(session, lease_id) == (held.session is session)
        if held.session is session:
            del self.oracle.leases[lease_id]
            assert not self.world.store.release(session, lease_id)

    # --- gets

    def begin(self, session: Session) -> Reader | None:
        """Open a get, under a lease of the session's or one of its own."""
        keys, lease_id = self._choose(session)
        try:
            lease_id, known = self.world.store.open_get(session, keys, lease_id)
        except LeaseExpiredError:
            assert self.oracle.leases[lease_id].deadline <= self.world.clock()
            return None
        except QuotaExceededError:
            return None
        if lease_id not in self.oracle.leases:
            self._note_lease(session, lease_id, keys[:known])
        deadline = self.deadline()
        results = self.world.store.reads.get(keys[:known], ReadTerms(session, deadline))
        reader = Reader(session, lease_id, keys[:known], deadline, results)
        self.open.append(reader)
        return reader

    def _choose(self, session: Session) -> tuple[list[ChunkKey], int]:
        own = [i for i, held in self.oracle.leases.items() if held.session is session]
        if not own or self.draw.random() < 0.4:
            return self.chain(session.tenant), 0
        lease_id = self.draw.choice(own)
        return list(self.oracle.leases[lease_id].keys), lease_id

    def ask_beyond_the_lease(self, session: Session) -> None:
        """A lease opens what it names and nothing else."""
        own = [i for i, held in self.oracle.leases.items() if held.session is session]
        if own:
            lease_id = self.draw.choice(own)
            held = self.oracle.leases[lease_id]
            beyond = next(key for key in universe().chunks if key not in held.keys)
            try:
                self.world.store.open_get(session, [*held.keys, beyond], lease_id)
            except (InvalidRequestError, LeaseExpiredError):
                return
            raise AssertionError("a get was opened beyond its lease")

    def advance(self, reader: Reader) -> bool:
        """Take the next chunk of a get; return whether one came."""
        self.check_last(reader)
        with bounded(self.world, reader.deadline):
            result = next(reader.results, None)
        if result is None:
            self.end(reader)
            return False
        assert result.chunk == reader.delivered
        key = reader.keys[result.chunk]
        self.oracle.check_frame(key, result.data)
        reader.delivered += 1
        reader.last = result, result.data.tobytes()
        return True

    def check_last(self, reader: Reader) -> None:
        """What was delivered last stays as it is while the lease lives."""
        held = self.oracle.leases.get(reader.lease_id)
        if reader.last is not None and held is not None and held.deadline > self.world.clock():
            self.oracle.check_unchanged(*reader.last)

    def end(self, reader: Reader) -> None:
        reader.results.close()  # type: ignore[attr-defined]
        self.open.remove(reader)

    def step(self) -> None:
        if self.open:
            self.advance(self.draw.choice(self.open))

    def get(self, session: Session) -> None:
        """A whole get. Where nothing goes wrong, all that is known and leased arrives."""
        reader = self.begin(session)
        if reader is None:
            return
        while self.advance(reader):
            pass
        if self.world.plan.is_quiet and reader.deadline > self.world.clock():
            assert reader.delivered == len(reader.keys), "a leased chunk did not arrive"

    def hog(self, session: Session) -> None:
        """Lease all of CPU memory that can be leased, then read what is not in it."""
        chains = universe().chains[session.tenant]
        for chain in chains:
            try:
                lease_id, known = self.world.store.open_get(session, chain, 0)
            except QuotaExceededError:
                break
            self._note_lease(session, lease_id, list(chain[:known]))
        leased = [key for held in self.oracle.leases.values() for key in held.keys]
        low = [key for key in leased if "cpu" not in self.world.catalog.copies(key)]
        for key in [key for key in low if key in (k for chain in chains for k in chain)][:3]:
            self.get_one(session, key)

    def get_one(self, session: Session, key: ChunkKey) -> None:
        """Read a chunk wherever it is: it arrives right or not at all."""
        try:
            lease_id, known = self.world.store.open_get(session, [key], 0)
        except QuotaExceededError:
            return
        deadline = self.deadline()
        arrived = 0
        with bounded(self.world, deadline):
            for result in self.world.store.reads.get([key][:known], ReadTerms(session, deadline)):
                self.oracle.check_frame(key, result.data)
                arrived += 1
        if self.world.plan.is_quiet and deadline > self.world.clock():
            assert arrived == known, "a leased chunk did not arrive"
        assert self.world.store.release(session, lease_id)

    def forget_session(self, session: Session) -> None:
        for reader in [reader for reader in self.open if reader.session is session]:
            self.end(reader)

    def forget_all(self) -> None:
        for reader in list(self.open):
            self.end(reader)
