"""The server's core without its sockets, over the tiers that a test wants to see in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from simulation.stepped import SteppedWorkQueue
from simulation.universe import REPRESENTATION, Version, make_version, salt

from kvstore.proto.keys import tokens_le32
from kvstore.proto.plans import NO_HINTS, EngineTerms, Hints
from kvstore.proto.types import ROOT, Accuracy, ChainDigest, ChunkKey, Match, Model, PutOutcome
from kvstore.server.cluster.refill import attach_refills
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.policy import EvictionPolicy
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.hints import ChunkMetadata
from kvstore.server.index.holds import Leases
from kvstore.server.security.sessions import Session, SessionTable
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import Limits
from kvstore.server.store.reads import ReadTerms
from kvstore.server.store.reservations import PutResult
from kvstore.server.store.store import Store
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.admission import ADMISSIONS
from kvstore.server.tiering.breaker import Breaker
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.tier_slot import TierCodec, Tiers, TierSlot
from kvstore.tiers.base import Tier
from kvstore.tiers.cpu import CpuTier

BREAKER_RETRY_S = 1.0
TOKENS = 60
"""Frames of which three fill a slab of 4 KB."""

FOREVER_S = 60.0


def settings(**terms: object) -> Settings:
    """Settings with *terms*, those of ``limits`` among them, which may be out of bounds."""
    limits: dict[str, object] = {"load_headroom_percent": 0, "prefetch_bytes": 0}
    limits |= {name: terms.pop(name) for name in Limits.model_fields if name in terms}
    return Settings().model_copy(update={"limits": Limits().model_copy(update=limits), **terms})


SETTINGS = settings()


def leaf_lru(tier: Tier, metadata: ChunkMetadata) -> EvictionPolicy:
    return LruEviction()


@dataclass(slots=True)
class Core:
    """A store and everything under it. ``close`` it; the other tiers stay the test's.

    Without *workers* nothing moves by itself and *clock* may stand still.
    """

    lower: Sequence[Tier] = ()
    upper: Sequence[Tier] = ()
    """A gpu tier, or none."""
    model: Model = REPRESENTATION
    slabs: int = 4
    slab_bytes: int = 4096
    workers: int = 0
    codec: str = "raw"
    codecs: Mapping[str, str] = field(default_factory=dict)
    """Those of tiers that have another than *codec*."""
    admissions: Mapping[str, str] = field(default_factory=dict)
    """Those of tiers that do not write as *write* says."""
    exclusive: Collection[str] = ()
    write: str = "evict"
    config: Settings = SETTINGS
    queue_limit: int = 1000
    move_timeout_ms: int = 30_000
    pin_share: int = 1
    """One in so many bytes of CPU memory may be pinned."""
    clock: Callable[[], float] = time.monotonic
    metadata: ChunkMetadata = field(default_factory=ChunkMetadata)
    policy: Callable[[Tier, ChunkMetadata], EvictionPolicy] = leaf_lru
    queue_type: type[SteppedWorkQueue] = SteppedWorkQueue
    ids: Iterator[int] = field(default_factory=partial(count, 1))
    cpu: CpuTier = field(init=False)
    work_queue: SteppedWorkQueue = field(init=False)
    catalog: Catalog = field(init=False)
    counters: Counters = field(init=False)
    moves: Moves = field(init=False)
    store: Store = field(init=False)
    sessions: SessionTable = field(init=False)
    _session: Session | None = None

    def __post_init__(self) -> None:
        ids, limits = self.ids, self.config.limits
        self.cpu = CpuTier(self.slabs * self.slab_bytes, self.slab_bytes)
        slots = [self._slot(tier, "raw") for tier in (*self.upper, self.cpu)]
        slots += [self._slot(t, self.codecs.get(t.name, self.codec)) for t in self.lower]
        queues: dict[str, int] = {"store-cpu": self.workers and 1} if self.upper else {}
        for tier in (*self.upper, *self.lower):
            queues |= {f"load-{tier.name}": self.workers, f"store-{tier.name}": self.workers and 1}
            queues |= {f"ask-{tier.name}": self.workers and 1}
        self.work_queue = self.queue_type(queues, self.queue_limit, self.clock)
        policies: dict[str, EvictionPolicy] = {slot.name: slot.policy for slot in slots}
        leases = Leases(limits.max_leases_per_session, lambda: next(ids))
        self.catalog = Catalog(
            policies, leases, self.cpu.capacity_bytes // self.pin_share, self.clock, self.metadata
        )
        self.counters = Counters()
        self.moves = Moves(
            Tiers(slots), self.catalog, self.work_queue, self.counters, self.clock,
            self.move_timeout_ms,
        )  # fmt: skip
        self.store = Store(self.moves, self.config, lambda: next(ids))
        attach_refills(self.store)
        self.sessions = SessionTable(
            self.config.max_sessions, limits.session_ttl_ms, salt, self.clock,
            lambda size: next(ids).to_bytes(size, "little"),
        )  # fmt: skip
        self.sessions.on_close.append(self.store.end_session)

    def _slot(self, tier: Tier, codec: str) -> TierSlot:
        breaker = Breaker("tier", 3, round(1000 * BREAKER_RETRY_S), self.clock)
        return TierSlot(
            tier, TierCodec(codec), self.policy(tier, self.metadata), breaker, self.clock,
            admission=ADMISSIONS[self.admissions.get(tier.name, self.write)],
            is_exclusive=tier.name in self.exclusive,
        )  # fmt: skip

    def slot(self, name: str) -> TierSlot:
        return self.moves.tiers.slots[name]

    def later(self, seconds: float = FOREVER_S) -> float:
        """A deadline."""
        return self.clock() + seconds

    def open_session(self, tenant: str = "red") -> Session:
        return self.sessions.open(self.model, "a test", tenant)

    @property
    def session(self) -> Session:
        """The one that puts, gets and lookups are of unless they name another."""
        self._session = self._session or self.open_session()
        return self._session

    def put(
        self,
        versions: Sequence[Version],
        session: Session | None = None,
        *,
        durable: bool = False,
        hints: Hints = NO_HINTS,
    ) -> list[PutResult]:
        """Put frames one after another; return what became of each."""
        results, session = [], session or self.session
        for version in versions:
            begun = self.store.writes.begin_all(session, [version.info], self.later(), hints)[0]
            if not isinstance(begun, PutResult):
                ticket = self.store.writes.claim(session, begun.ticket_id)
                begun = self.store.writes.commit(ticket, frame=version.frame)
            results.append(begun)
        if durable:
            return self.store.harden(keys_of(versions), results, self.later())
        return results

    def get(
        self,
        versions: Sequence[Version],
        session: Session | None = None,
        seconds: float = FOREVER_S,
    ) -> list[bytes]:
        """Return the frames that a get under a lease of its own delivers."""
        return self.read(keys_of(versions), session, seconds)

    def read(
        self,
        keys: Sequence[ChunkKey],
        session: Session | None = None,
        seconds: float = FOREVER_S,
    ) -> list[bytes]:
        session = session or self.session
        lease_id, known = self.store.open_get(session, keys, 0)
        results = self.store.reads.get(keys[:known], ReadTerms(session, self.later(seconds)))
        frames = [result.data.tobytes() for result in results]
        assert self.store.release(session, lease_id)
        return frames

    def look_up(
        self,
        versions: Sequence[Version],
        session: Session | None = None,
        *,
        lease: bool = False,
        min_accuracy: Accuracy = Accuracy.exact,
        engine: EngineTerms | None = None,
    ) -> Match:
        return self.store.lookup(
            session or self.session, keys_of(versions), self.later(), lease=lease,
            min_accuracy=min_accuracy, engine=engine,
        )  # fmt: skip

    def copy_down(self, version: Version, tier: str = "disk") -> object:
        """Copy a chunk to a lower tier and wait for that."""
        ticket = self.moves.copy_to(version.info.key, self.slot(tier))
        assert ticket is not None
        return self.work_queue.wait(ticket, self.later())

    def tiers_of(self, version: Version) -> list[str]:
        """The tiers that hold a chunk, fastest first, as the catalog names them."""
        return sorted(self.catalog.copies(version.info.key), key=list(self.moves.tiers.slots).index)

    def settle(self) -> None:
        """Work off everything that waits, in a core without workers."""
        while self.work_queue.step():
            pass

    def close(self) -> None:
        self.work_queue.close()
        self.cpu.close()


def prompt(length: int, seed: int = 0, tokens: int = TOKENS, tenant: str = "red") -> list[Version]:
    """A chain of chunks that no other seed shares."""
    versions: list[Version] = []
    parent = ROOT
    for at in range(length):
        name = 1000 * (seed + 1) + at
        versions.append(make_version(tenant, parent, tokens_le32([name] * tokens), name))
        parent = ChainDigest(versions[-1].info.key[16:])
    return versions


def keys_of(versions: Sequence[Version]) -> list[ChunkKey]:
    return [version.info.key for version in versions]


def frames_of(versions: Sequence[Version]) -> list[bytes]:
    return [version.frame.tobytes() for version in versions]


def outcomes_of(results: Sequence[PutResult]) -> set[PutOutcome]:
    return {result.outcome for result in results}
