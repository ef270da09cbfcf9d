"""A server without sockets, threads or real time, drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from simulation.clock import FakeClock
from simulation.core import Core, settings
from simulation.stepped import SteppedWorkQueue
from simulation.tiers import DictTier, Faults, SimDisk, SimRedis
from typing_extensions import override

from kvstore.proto.errors import KVStoreError
from kvstore.proto.plans import NO_HINTS, Hints, Reuse
from kvstore.server.eviction.policy import make_policy
from kvstore.server.index.hints import ChunkMetadata
from kvstore.server.tiering.work_queue import Ticket

LEASE_TTL_S = 1.0
SESSION_TTL_S = 2.0
MOVE_TIMEOUT_S = 0.4
MAX_SESSIONS = 4
LEASES_PER_SESSION = 6
PUTS_PER_SESSION = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """What a schedule's server is made of. 0 bytes: without that tier."""

    slabs: int
    disk_bytes: int
    redis_bytes: int
    disk_codec: str
    queue_limit: int
    bypass_bytes: int
    headroom_percent: int
    write_through: bool
    fail: float
    slow: float
    full: float
    spoils: bool
    """Whether media lose and damage what they hold."""
    policy: str
    hints: tuple[Hints, ...]
    """What puts say of their chunks, one after another: nothing that makes them go or stay."""

    @classmethod
    def drawn(cls, draw: random.Random) -> Plan:
        quiet = draw.random() < 0.4
        tiers = draw.choice(("disk", "disk", "redis", "both", "both", "none"))
        return cls(
            slabs=draw.choice((2, 2, 3, 4)),
            disk_bytes=draw.randrange(3_000, 24_000) if tiers in ("disk", "both") else 0,
            redis_bytes=draw.randrange(3_000, 24_000) if tiers in ("redis", "both") else 0,
            disk_codec=draw.choice(("raw", "raw", "lossless")),
            queue_limit=1000 if quiet else draw.choice((2, 8, 1000)),
            bypass_bytes=1 << 20 if quiet else draw.choice((0, 3_000, 1 << 20)),
            headroom_percent=draw.choice((0, 5, 40)),
            write_through=draw.random() < 0.7,
            fail=0.0 if quiet else draw.choice((0.0, 0.02, 0.1, 0.4)),
            slow=0.0 if quiet else draw.choice((0.0, 0.05, 0.3)),
            full=0.0 if quiet else draw.choice((0.0, 0.0, 0.1)),
            spoils=not quiet and draw.random() < 0.5,
            policy=draw.choice(("lru", "lru", "hit_density", "marconi", "discard_hint")),
            hints=tuple(
                Hints(draw.choice(tuple(Reuse)), draw.randrange(101), category=draw.choice("ab"))
                for _ in range(draw.randrange(4))
            )
            or (NO_HINTS,),
        )

    @property
    def is_quiet(self) -> bool:
        """Whether nothing goes wrong, so that every answer can be told beforehand."""
        troubled = self.fail or self.slow or self.full or self.spoils
        return not troubled and self.queue_limit == 1000 and self.bypass_bytes == 1 << 20


class WatchedWorkQueue(SteppedWorkQueue):
    """A stepped WorkQueue that remembers when work ran and what it raised."""

    started = ended = 0.0
    """When the last piece of work that no other was waiting for began and ended."""
    _depth = 0

    def __init__(self, *terms: Any) -> None:
        super().__init__(*terms)
        self.surprises: list[Exception] = []

    @override
    def _do(self, ticket: Ticket) -> None:
        if not self._depth:
            self.started = self._clock()
        self._depth += 1
        super()._do(ticket)
        self._depth -= 1
        if not self._depth:
            self.ended = self._clock()
        if ticket.error is not None and not isinstance(ticket.error, KVStoreError):
            self.surprises.append(ticket.error)


class World:
    """One server and the media under it. ``restart`` is a power cut."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.plan = Plan.drawn(self.draw)
        self.clock = FakeClock()
        plan = self.plan
        self.faults = Faults(self.draw, self.clock, plan.fail, plan.slow, MOVE_TIMEOUT_S, plan.full)
        self.disk = SimDisk(plan.disk_bytes, self.faults) if plan.disk_bytes else None
        self.redis = SimRedis(plan.redis_bytes, self.faults) if plan.redis_bytes else None
        self._ids = count(1)
        self._hinted = 0
        self.totals: dict[str, int] = {}
        self.start()

    def next_hints(self) -> Hints:
        """What the next put says of its chunk."""
        self._hinted += 1
        return self.plan.hints[self._hinted % len(self.plan.hints)]

    @property
    def lower(self) -> list[DictTier]:
        return [tier for tier in (self.disk, self.redis) if tier is not None]

    def start(self) -> None:
        """Put a server together over what the media hold."""
        plan = self.plan
        core = Core(
            self.lower,
            slabs=plan.slabs,
            codecs={"disk": plan.disk_codec},
            write="through" if plan.write_through else "evict",
            config=settings(
                lease_ttl_ms=round(1000 * LEASE_TTL_S),
                session_ttl_ms=round(1000 * SESSION_TTL_S),
                max_sessions=MAX_SESSIONS,
                max_leases_per_session=LEASES_PER_SESSION,
                max_reservations_per_session=PUTS_PER_SESSION,
                load_headroom_percent=plan.headroom_percent,
                max_frame_bytes=plan.bypass_bytes,
            ),
            queue_limit=plan.queue_limit,
            move_timeout_ms=round(1000 * MOVE_TIMEOUT_S),
            pin_share=2,
            clock=self.clock,
            metadata=ChunkMetadata(evicted_limit=8),
            policy=lambda _, metadata: make_policy(plan.policy, metadata.history),
            queue_type=WatchedWorkQueue,
            ids=self._ids,
        )
        assert isinstance(core.work_queue, WatchedWorkQueue)
        self.core, self.work_queue, self.cpu = core, core.work_queue, core.cpu
        self.catalog, self.store, self.sessions = core.catalog, core.store, core.sessions
        self.counters, self.settle = core.counters, core.settle
        self.slots = list(core.moves.tiers.slots.values())

    def restart(self) -> int:
        """Cut the power; return how many chunks the next server recovered."""
        self.close()
        if self.disk is not None:
            self.disk = self.disk.restarted()
        if self.redis is not None:
            lost = self.redis.lost
            self.redis = SimRedis(self.redis.capacity_bytes, self.faults, self.redis.medium)
            self.redis.lost = lost
        self.start()
        return self.store.recover()

    def close(self) -> None:
        """End this server, keeping what it counted."""
        for name, value in self.counters.snapshot().items():
            self.totals[name] = self.totals.get(name, 0) + value
        self.core.close()


@contextmanager
def bounded(world: World, deadline: float) -> Iterator[None]:
    """Fail when work begins after *deadline*, or time passes that no running work explains.

    A stepped WorkQueue cannot leave work that has begun, as a waiting thread can: that one piece
    may end late.
    """
    work_queue, began = world.work_queue, world.clock()
    work_queue.started = work_queue.ended = began
    yield
    if work_queue.started > began:
        assert work_queue.started < deadline, "work was begun for a caller whose time was up"
    assert world.clock() <= max(deadline, work_queue.ended), "somebody waited beyond the deadline"
