"""What may be seen of a server from outside, kept in plain dictionaries."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulation.tiers import DictTier
from simulation.universe import Version
from simulation.world import World

from kvstore.proto.buffers import Bytes
from kvstore.proto.types import ChunkKey
from kvstore.server.security.sessions import Session
from kvstore.server.store.reads import LayerPart
from kvstore.server.store.reservations import PutTicket


@dataclass(slots=True)
class LiveLease:
    """A lease that was granted and neither released nor expired."""

    session: Session
    keys: list[ChunkKey]
    deadline: float


@dataclass(slots=True)
class OpenPut:
    """A put that was begun and neither committed nor aborted."""

    ticket: PutTicket
    version: Version


@dataclass(slots=True)
class Oracle:
    """The model, and the comparison of a World with it. Every check raises AssertionError."""

    world: World
    leases: dict[int, LiveLease] = field(default_factory=dict)
    pins: dict[ChunkKey, float] = field(default_factory=dict)
    puts: dict[int, OpenPut] = field(default_factory=dict)
    durable: set[ChunkKey] = field(default_factory=set)
    """Acknowledged as durable, and nothing that may end that has happened since."""
    _offered: dict[ChunkKey, set[bytes]] = field(default_factory=dict)

    # --- what happened

    def note_stored(self, version: Version) -> None:
        frames = self._offered.setdefault(version.info.key, set())
        frames |= {version.frame.tobytes(), version.packed.tobytes()}

    def note_restart(self) -> None:
        self.leases.clear()
        self.pins.clear()
        self.puts.clear()

    def note_session_end(self, session: Session) -> None:
        self.leases = {i: held for i, held in self.leases.items() if held.session is not session}
        self.puts = {i: put for i, put in self.puts.items() if put.ticket.session is not session}

    def note_tick(self) -> None:
        now = self.world.clock()
        self.leases = {i: held for i, held in self.leases.items() if held.deadline > now}
        self.pins = {key: until for key, until in self.pins.items() if until > now}

    def is_held(self, key: ChunkKey) -> bool:
        return key in self.pins or any(key in held.keys for held in self.leases.values())

    # --- what may be delivered

    def check_frame(self, key: ChunkKey, frame: Bytes) -> None:
        assert frame.tobytes() in self._offered.get(key, set()), (
            f"wrong bytes for {key.hex()}: no put offered them since it was last absent"
        )

    def check_unchanged(self, result: LayerPart, seen: bytes) -> None:
        assert result.data.tobytes() == seen, "a leased frame changed under its reader"

    # --- what must hold between operations

    def check(self, *, thoroughly: bool) -> None:
        world = self.world
        assert not world.work_queue.surprises, world.work_queue.surprises
        leased = sum(len(held.keys) for held in self.leases.values())
        assert world.catalog.leases.pins.total() == leased, "pins do not add up to the live leases"
        assert len(world.catalog.leases) == len(self.leases)
        assert world.catalog.in_flight.writers.total() == len(self.puts) == len(world.store.writes)
        stats = world.cpu.stats()
        assert stats.used_bytes <= stats.capacity_bytes
        assert stats.reservations == len(self.puts)
        for tier in world.lower:
            stats = tier.stats()
            assert stats.used_bytes <= stats.capacity_bytes
            assert stats.reservations == 0, f"{tier.name} has a reservation that nobody owns"
        self.forget_what_is_gone()
        if thoroughly:
            self._check_accounts()
            self._check_catalog()

    def forget_what_is_gone(self) -> None:
        """What is nowhere, and is not being put, must never be seen again."""
        world = self.world
        if world.disk is not None:
            self.durable -= world.disk.gone
            world.disk.gone.clear()
        chunks = [tier.medium.chunks for tier in world.lower]
        unflushed = world.disk.durable if world.disk is not None else {}
        keys = [key for key, frames in self._offered.items() if frames]
        for key, block in zip(keys, world.cpu.find(keys), strict=True):
            if block is None and key not in unflushed and not any(key in c for c in chunks):
                self._offered[key].clear()

    def _check_accounts(self) -> None:
        world = self.world
        sealed = [info.size_bytes for info in world.cpu.scan()]
        being_put = [put.ticket.reservation.reserved_bytes for put in self.puts.values()]
        used_bytes = sum(map(world.cpu.allocated_bytes, sealed)) + sum(being_put)
        assert world.cpu.stats().used_bytes == used_bytes
        for tier in world.lower:
            sealed = [info.size_bytes for info in tier.scan()]
            assert tier.stats().used_bytes == sum(map(tier.allocated_bytes, sealed))

    def _check_catalog(self) -> None:
        world = self.world
        named = self.named()
        assert named["cpu"] == {info.key for info in world.cpu.scan()}
        for tier in world.lower:
            astray = named[tier.name] - set(tier.medium.chunks) - tier.lost
            assert not astray, f"{tier.name} does not have what the catalog names: {astray}"
        world.catalog.state.access_log.apply_all()
        for slot in world.slots:
            rows = slot.policy.victims(lambda _: False, 0.0)
            known = [world.catalog.state.index.key(row) for row in rows]
            assert len(known) == len(set(known)) == len(slot.policy)
            assert set(known) == named[slot.name], f"the policy of {slot.name} lost step"

    def named(self) -> dict[str, set[ChunkKey]]:
        """Keys of the catalog's copies by tier."""
        names: dict[str, set[ChunkKey]] = {slot.name: set() for slot in self.world.slots}
        for space in {key[:16] for key in self._offered}:
            for holding in self.world.catalog.queries.page(space):  # type: ignore[arg-type]
                for name in holding.copies:
                    names[name].add(holding.key)
        return names

    def check_nothing_leaked(self, tier: DictTier) -> None:
        """The tier has exactly what the catalog names there: no chunk that nobody will free."""
        astray = set(tier.medium.chunks) - self.named()[tier.name]
        assert not astray, f"{tier.name} keeps {len(astray)} chunks that nobody knows of"
