"""The Store: put, lookup, get and forget over all tiers of a server."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import structlog

from kvstore.proto.errors import InvalidRequestError, KVStoreError, TierUnavailableError
from kvstore.proto.plans import MAX_HANDOVER_MS, NO_HINTS, Hints
from kvstore.proto.types import ChunkKey, PutOutcome
from kvstore.server.blending.gates import Gates
from kvstore.server.blending.resolver import Blending
from kvstore.server.index.chunk_index import ResumeRequirements
from kvstore.server.index.hints import PutInfo
from kvstore.server.index.holds import LeaseTerms
from kvstore.server.index.known_models import KnownModels, ModelRegistry
from kvstore.server.security.sessions import Session
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import GateTerms
from kvstore.server.store.lookup import Lookup
from kvstore.server.store.parallel_writes import UNFINISHED_PERCENT, UNFINISHED_S, ParallelWrites
from kvstore.server.store.reads import Reads
from kvstore.server.store.reservations import PutResult, Reservations
from kvstore.server.store.writes import Writes
from kvstore.server.telemetry.events import Fate
from kvstore.server.tiering.admission import WRITE_THROUGH, StateAdmission
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.prefetch import Prefetch
from kvstore.server.tiering.tier_slot import TierSlot
from kvstore.server.tiering.work_queue import Ticket

WORKERS_PER_WAITER = 4
"""One thread in this many may wait in a lookup for pending chunks."""
DRAINED_AT_ONCE = 1024
"""Copies that a drain queues at a time: the queue looks at all that wait to add one."""
LOGGED_REASONS = 4

logger = structlog.get_logger(__name__)


class Store:
    """Connects the calls of a server to its tiers. Thread-safe.

    *new_id* returns unpredictable numbers below 2^64. Every ``deadline`` is a time on the
    clock of *moves*.
    """

    def __init__(self, moves: Moves, config: Settings, new_id: Callable[[], int]) -> None:
        limits = config.limits
        self.moves = moves
        self.tiers = moves.tiers
        self.models = KnownModels()
        """Token weights of chunks, shared with the encoders."""
        self.catalog = moves.catalog
        self.counters = moves.counters
        self.spaces = ModelRegistry()
        self.states = StateAdmission() if config.state_admission == "judicious" else None
        self.reservations = Reservations(moves, limits.load_headroom_percent, self.states)
        unfinished_bytes = moves.tiers.cpu_tier.capacity_bytes * UNFINISHED_PERCENT // 100
        parallel = ParallelWrites(self.reservations, unfinished_bytes, UNFINISHED_S)
        per_session = limits.max_reservations_per_session
        self.writes = Writes(self.reservations, parallel, per_session, new_id)
        self._prefetch = Prefetch(moves, limits.prefetch_bytes)
        self.reads = Reads(moves, config.max_frame_bytes, self._prefetch)
        budgets = {tier: size for tier, size in config.write_budget.items() if size}
        moves.placement.set_terms(WRITE_THROUGH, budgets)
        self._work_queue = moves.work_queue
        self.on_tick: list[Callable[[], None]] = []
        """Called a few times a second."""
        self._lease_ttl_ms = config.lease_ttl_ms
        self._new_id = new_id
        lower = moves.tiers.lower
        self._keepers = [s for s in lower if s.tier.survives_restart and not s.tier.shared]
        self._waiters = threading.BoundedSemaphore(max(1, config.workers // WORKERS_PER_WAITER))
        self._lookup = Lookup(moves, config.lease_ttl_ms, self._prefetch, self.states)
        self.lookup = self._lookup.lookup
        ratio, shadows = limits.blend_ratio, limits.blend_shadows
        terms = GateTerms(ratio, config.blend_agreement, config.blend_divergence, shadows)
        gates = Gates(terms, lambda: new_id() / 2**64, self.counters)
        ready, contents = self._lookup.ready, config.blend_contents
        self.blends = Blending(moves, ready, config.lease_ttl_ms, gates, contents)

    @property
    def durable(self) -> TierSlot | None:
        """The tier of this node that survives a restart and stores chunks exactly, if any."""
        exact = (s for s in self._keepers if s.encoder.is_exact and not s.is_exclusive)
        return next(exact, None)

    def harden(
        self, keys: Sequence[ChunkKey], results: Sequence[PutResult], deadline: float
    ) -> list[PutResult]:
        """Wait until the accepted chunks would survive a power cut.

        Return *results*; chunks that are not durable by the deadline are refused. Raises
        InvalidRequestError when no tier of this node survives a restart.
        """
        if (slot := self.durable) is None:
            fix = "start the server with a disk tier whose codec is lossless"
            raise InvalidRequestError("durable", True, fix)
        both = list(zip(keys, results, strict=True))
        done = (PutOutcome.stored, PutOutcome.exists)
        accepted = [key for key, result in both if result.outcome in done]
        copied = self._copied(accepted, slot, deadline)
        failure, lost = self._flushed(accepted, slot, deadline)
        reasons = {
            key: reason or failure or ("lost before it was flushed" if key in lost else "")
            for key, reason in zip(accepted, copied, strict=True)
        }
        refused = PutOutcome.refused
        return [
            PutResult(refused, f"not durable: {why}") if (why := reasons.get(key)) else result
            for key, result in both
        ]

    def _copied(self, keys: Sequence[ChunkKey], slot: TierSlot, deadline: float) -> list[str]:
        tickets = [self.moves.copy_to(key, slot, urgent=True) for key in keys]
        return [self._outcome(ticket, deadline) for ticket in tickets]

    def _flushed(
        self, keys: Sequence[ChunkKey], slot: TierSlot, deadline: float
    ) -> tuple[str, set[ChunkKey]]:
        """Flush *slot*. Return the failure, if any, and the *keys* that the medium lacks."""
        # A unique name: a flush that already runs may have begun before our chunks arrived.
        name = b"flush" + self._new_id().to_bytes(8, "little")
        lost: set[ChunkKey] = set()

        def work() -> bool:
            slot.tier.flush()
            # Check the medium: an earlier failed flush may have lost chunks that the catalog
            # still lists.
            found = slot.tier.find(keys)
            orphans = self.catalog.orphans[slot.name]
            for key, info in zip(keys, found, strict=True):
                if info is None or key in orphans:
                    self.catalog.forget(slot.name, key)
                    lost.add(key)
            return True

        queue, guarded = f"store-{slot.name}", partial(slot.guarded, work)
        ticket = self._work_queue.submit(queue, name, guarded, urgent=True)
        return self._outcome(ticket, deadline), lost

    def _outcome(self, ticket: Ticket | None, deadline: float) -> str:
        if ticket is None:
            return "the server is shutting down"
        try:
            return "" if self._work_queue.wait(ticket, deadline) else "evicted before it was copied"
        except KVStoreError as error:
            return str(error)

    # --- announced puts

    def await_puts(self, keys: Sequence[ChunkKey], deadline: float) -> None:
        """Wait until the pending chunks of the chain *keys* are stored or cancelled.

        Wait until *deadline* at most, and not at all when the limit of waiters is reached.
        """
        in_flight = self.catalog.in_flight
        if not in_flight.is_any_coming(keys):
            return
        if not self._waiters.acquire(blocking=False):
            self.counters.add("refused_waits")
            return
        try:
            self.counters.add("waited_lookups")
            in_flight.await_arrivals(keys, deadline)
        finally:
            self._waiters.release()

    def announce_puts(self, session: Session, keys: Sequence[ChunkKey], ttl_ms: int) -> int:
        """Announce that *session* will put *keys* within *ttl_ms*; 0 withdraws it.

        Return how many chunks are now pending. Raises InvalidRequestError.
        """
        if ttl_ms > MAX_HANDOVER_MS:
            raise InvalidRequestError("ttl_ms", ttl_ms, f"use 0 to {MAX_HANDOVER_MS}")
        announce = self.catalog.in_flight.announce
        count = announce(session.session_id, keys, ttl_ms / 1000, session.owner.tenant)
        if session.is_closed:  # the end of the session missed these announcements
            announce(session.session_id, keys, 0.0)
        if not ttl_ms:
            return 0
        self.counters.add("announced_puts", count)
        return count

    # --- leases

    def release(self, session: Session, lease_id: int, hints: Hints = NO_HINTS) -> bool:
        """End a lease and apply *hints* to its chunks. Return whether the session had it."""
        if hints != NO_HINTS:
            lease = self.catalog.leases.find(lease_id, session.session_id)
            keys = lease.keys if lease is not None else ()
            self.counters.add("ignored_pins", self.catalog.hint(keys, hints))
        released = self.catalog.release(lease_id, session.session_id)
        if lease_id in self._prefetch.by_lease and released:
            self._prefetch.dropped(lease_id)
        return released

    def open_get(
        self, session: Session, keys: Sequence[ChunkKey], lease_id: int
    ) -> tuple[int, int]:
        """Check the lease of a get, or grant one; return it and the length of the known prefix.

        Raises LeaseExpiredError, InvalidRequestError for chunks outside the lease.
        """
        if not lease_id:
            terms = LeaseTerms(session.session_id, self._lease_ttl_ms / 1000)
            lease, known = self.catalog.grant(keys, terms)
            return lease.lease_id, known
        now_s = self.moves.clock()
        leased = set(self.catalog.leases.get(lease_id, session.session_id, now_s).keys)
        for key in keys:
            if key not in leased:
                raise InvalidRequestError(
                    "digests", key.hex(), f"not under lease {lease_id}; look it up with a lease"
                )
        return lease_id, len(keys)

    # --- deletion

    def delete(self, keys: Sequence[ChunkKey], deadline: float, tier: str = "") -> tuple[int, int]:
        """Delete chunks on all tiers, or on *tier*; return how many were deleted and are leased."""
        deleted = leased = 0
        self._lookup.query_shared(keys, deadline)
        for key in keys:
            for ticket in self._work_queue.named(key):  # lest a move makes it visible again
                self._outcome(ticket, deadline)
            names = [name for name in self.catalog.holders(key) if tier in ("", name)]
            gone = [n for n in names if self.catalog.drop_copy(n, key, even_if_held=False)]
            if gone and not tier:
                self.catalog.outcomes.note(key, Fate.deleted)
            for slot in self.tiers.slots.values():  # orphans of this delete or an earlier one
                if key in self.catalog.orphans[slot.name]:
                    deletion = self.moves.eviction.delete_from(slot, key, urgent=True)
                    self._outcome(deletion, deadline)
            self.reads.forget(key)
            deleted += bool(names) and len(gone) == len(names)
            leased += len(gone) < len(names)
        return deleted, leased

    # --- lifecycle

    def recover(self) -> int:
        """Index the chunks that survived a restart on tiers of this node; return how many."""
        count = 0
        for slot in self._keepers:
            for info in slot.tier.scan():
                put_info = PutInfo(slot.tier.tenant_of(info.key))
                self.catalog.note_sealed(slot.name, info, put_info)
                count += 1
        self._lookup.learn_in_background()
        return count

    def weighs(self, tenant: str) -> bool:
        """Whether a codec for the chunks of *tenant* uses token weights."""
        return any(s.encoder.weighs(tenant) for s in self.tiers.slots.values())

    def begin_session(self, session: Session) -> None:
        """Register the model of a new session."""
        self.models.learn(session.representation_digest, session.representation)
        needs = ResumeRequirements.of_groups(session.representation.layer_groups)
        if any(needs):
            self.catalog.needs_ends(session.namespace, needs)

    def end_session(self, session: Session) -> None:
        """Release all leases and puts of a session that ended."""
        self.catalog.release_session(session.session_id)
        self.writes.abort_session(session)

    def tick(self) -> None:
        """Release what has expired, start background work. Called a few times a second."""
        self.counters.add("expired_leases", self.catalog.expire())
        self.writes.expire()
        self._drop_expired()
        self.reads.promote_due()
        self._lookup.drop_remote_hints()
        self._prefetch.sweep(self.catalog.leases)
        self.moves.drop_duplicates()
        for work in self.on_tick:
            work()

    def _drop_expired(self) -> None:
        for key in self.catalog.expired_keys():
            for name in self.catalog.holders(key):
                if self.catalog.drop_copy(name, key, even_if_held=False):
                    self.counters.add("expired_chunks")
                    self.catalog.outcomes.note(key, Fate.expired, name)
                    with suppress(TierUnavailableError):  # an orphan; it is purged later
                        self.moves.eviction.delete_from(self.tiers.slots[name], key)

    def drain(self, deadline: float) -> bool:
        """Refuse new puts and copy chunks that only memory holds to a tier that survives a restart.
        Return whether none is left in memory only by the deadline.
        """
        self.writes.is_draining = True
        self.catalog.in_flight.end_waits()
        # A copy on a peer does not count.
        self._lookup.drop_remote_hints(everything=True)
        volatile = [slot for slot in (self.tiers.gpu, self.tiers.cpu) if slot]
        only_on = partial(self.catalog.queries.only_on, *(slot.name for slot in volatile))
        failure, why, whys = "", "no disk tier", dict[ChunkKey, str]()
        if self._keepers:
            slot = self._keepers[0]
            why = f"{slot.name} evicted it for another"
            # A full tier must not evict chunks that memory has; a smaller one can only swap them.
            used_bytes = sum(one.tier.stats().used_bytes for one in volatile)
            is_enough = used_bytes <= slot.tier.capacity_bytes
            self.catalog.eviction.drains_to = slot.name if is_enough else ""
            whys, failure = self._save(only_on(), slot, deadline)
        left = only_on()
        reasons = Counter(whys.get(key) or why for key in left).most_common(LOGGED_REASONS)
        if left or failure:
            logger.warning(
                "a drain could not save all chunks that only memory has",
                unsaved=len(left),
                reasons=dict(reasons),
                flush=failure or "done",
            )
        return not (left or failure)

    def _save(
        self, keys: Sequence[ChunkKey], slot: TierSlot, deadline: float
    ) -> tuple[dict[ChunkKey, str], str]:
        """Copy *keys* to *slot* and flush it. Return why not, by chunk, and the flush's failure."""
        whys = dict.fromkeys(keys, "not copied by the deadline")
        for start in range(0, len(keys), DRAINED_AT_ONCE):
            if self.moves.clock() < deadline:
                some = keys[start : start + DRAINED_AT_ONCE]
                whys |= zip(some, self._copied(some, slot, deadline), strict=True)
        return whys, self._flushed(keys, slot, deadline)[0]
