"""Lookups over all tiers, shared tiers and peers included."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.errors import KVStoreError
from kvstore.proto.plans import EngineTerms, LoadPlan
from kvstore.proto.types import Accuracy, ChunkInfo, ChunkKey, Match
from kvstore.server.index.catalog import PrefixMatch
from kvstore.server.index.holds import LeaseTerms
from kvstore.server.security.sessions import Session
from kvstore.server.store.plans import plan_loads
from kvstore.server.tiering.admission import StateAdmission, Trigger, remember
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.prefetch import Prefetch
from kvstore.server.tiering.tier_slot import TierSlot
from kvstore.server.tiering.work_queue import Ticket

NEGATIVE_TTL_S = 0.1
"""Lifetime of a negative cache entry for shared tiers: within it, new puts of other nodes are
misses."""
MAX_NEGATIVE_KEYS = 4096
MAX_SHARED_CHUNKS = 1 << 18
"""Limit of indexed chunks of a shared tier; chunks beyond it are ignored."""

PEERS_SHARE = 0.25
"""Share of a lookup's time in which peers must answer."""
MAX_PEER_QUERIES = 4
"""Lookups that query peers in their own thread at a time; others use the queue."""
MOST_WAITING = 0.1
"""Lookups skip peers when that queue is fuller than this."""

LEARNT_AT_ONCE = 1024
"""Batch size when a start scans a shared tier, in chunks."""

PROBE_CHUNKS = 16
"""Chunks queried first; if a shared tier has them all, the rest follow."""

Seconds: TypeAlias = NDArray[np.float64]


class Lookup:
    """Finds chunks and estimates their load times. Thread-safe.

    Every ``deadline`` is a time on the clock of *moves*. Queries of shared tiers, and of peers
    when there are many at once, run in the queue ``ask-TIER``.
    """

    def __init__(
        self, moves: Moves, lease_ttl_ms: int, prefetch: Prefetch, states: StateAdmission | None
    ) -> None:
        self._catalog = moves.catalog
        self._counters = moves.counters
        self._work_queue = moves.work_queue
        self._lease_ttl_ms = lease_ttl_ms
        self._sources = moves.tiers.sources
        self._moves = moves
        self._prefetch = prefetch
        lower = moves.tiers.lower
        # Their admission copies a chunk on its second lookup.
        self._watching = [s for s in lower if moves.placement.admits_on_lookup(s)]
        self._names = tuple(slot.name for slot in self._sources)
        self._shared = [slot for slot in lower if slot.tier.shared]
        self._peers = moves.tiers.remote
        self._peer_tier: Any = self._peers and self._peers.tier  # a PeerTier, of a folder above
        self._peer_queries = threading.BoundedSemaphore(MAX_PEER_QUERIES)
        self._absent: OrderedDict[ChunkKey, float] = OrderedDict()
        """Negative cache: the first chunk that shared tiers lacked, and when the entry expires."""
        self._lock = threading.Lock()  # guards changes of it
        self._states = states

    def lookup(
        self,
        session: Session,
        keys: Sequence[ChunkKey],
        deadline: float,
        *,
        lease: bool | Literal["ranged"],
        min_accuracy: Accuracy = Accuracy.exact,
        engine: EngineTerms | None = None,
    ) -> Match:
        """Find the longest prefix of *keys* that can be read. *lease* leases it; "ranged", for a
        get of ranges, skips prefetching. *engine* adds a plan to the result.
        """
        terms = LeaseTerms(session.session_id, self._lease_ttl_ms / 1000) if lease else None
        if self._shared or self._peers is not None:
            found = self._match(keys, min_accuracy)
            found = self._with_shared(keys, min_accuracy, found, deadline)
            lease_id, ready = self._grant(keys[: len(found.sources)], terms)
        else:
            found = self._match(keys, min_accuracy, terms)
            lease_id, ready = found.lease_id, len(found.sources)
        self._counters.add("lookups")
        self._counters.add("lookup_chunks", len(keys))
        self._counters.add("lookup_ready_chunks", ready)
        self._counters.note_lookup(session.tenant, len(keys), found.sources[:ready], self._names)
        if found.shared and self._states is not None:
            self._states.parted(keys[found.shared - 1])
        if found.evicted:
            self._counters.add("lookup_ghost_chunks", found.evicted)
        placement = self._moves.placement
        for slot in self._watching:
            for key in self._catalog.queries.looked_up_again(keys[:ready], slot.name):
                is_due = placement.admits(slot, key, Trigger.asked)
                if is_due and self._moves.copy_to(key, slot) is None:
                    placement.note_write(slot.name, key)
        sources, sizes = found.sources[:ready], found.sizes[:ready]
        load_s = np.zeros(ready)
        for number in set(sources.tobytes()):
            here = sources == number
            load_s[here] = self._sources[number].fetch_s(sizes[here])
        plan = None
        if engine:
            placement.note_engine(session.namespace, engine.prefill)
            rates = np.array([slot.decode_s_per_byte for slot in self._sources])
            plan = self._plan(keys, load_s, rates[sources] * sizes, engine)
        if lease_id and lease != "ranged":
            self._prefetch.found(session, keys[:ready], sources, sizes, lease_id)
        return Match(
            ready=ready,
            pending=found.pending,
            missing=len(keys) - ready - found.pending,
            tier_names=self._names,
            sources=sources.tobytes(),
            loads=np.minimum(1e6 * load_s, 0xFFFFFFFF).astype("<u4").tobytes(),
            lease_id=lease_id,
            lease_ttl_ms=self._lease_ttl_ms if lease_id else 0,
            plan=plan,
            shared=found.shared,
        )

    def ready(
        self, session: Session, keys: Sequence[ChunkKey], deadline: float, least: Accuracy
    ) -> int:
        """Return the length of the prefix that can be read; take no lease."""
        return self.lookup(session, keys, deadline, lease=False, min_accuracy=least).ready

    def _plan(
        self, keys: Sequence[ChunkKey], load_s: Seconds, decode_s: Seconds, engine: EngineTerms
    ) -> LoadPlan:
        tokens = self._catalog.queries.tokens(keys[: len(load_s)])
        if 0 in tokens:  # evicted since
            del tokens[tokens.index(0) :]
        ready, chunks = len(tokens), len(keys)
        loads, decodes = load_s[:ready].tolist(), decode_s[:ready].tolist()
        total = max(engine.prompt_tokens, sum(tokens) + (chunks - ready) * max(tokens, default=0))
        return plan_loads(tokens, loads, decodes, chunks, total, engine.prefill)

    def _match(
        self,
        keys: Sequence[ChunkKey],
        min_accuracy: Accuracy,
        lease: LeaseTerms | None = None,
        *,
        again: bool = False,
    ) -> PrefixMatch:
        in_use = [None if slot.breaker.is_open else slot.name for slot in self._sources]
        return self._catalog.match(keys, min_accuracy, in_use, lease, again=again)

    def _grant(self, keys: Sequence[ChunkKey], terms: LeaseTerms | None) -> tuple[int, int]:
        if terms is None or not keys:
            return 0, len(keys)
        lease, known = self._catalog.grant(keys, terms)
        if not known:
            self._catalog.release(lease.lease_id, terms.session_id)
        return lease.lease_id if known else 0, known

    def _with_shared(
        self, keys: Sequence[ChunkKey], min_accuracy: Accuracy, found: PrefixMatch, deadline: float
    ) -> PrefixMatch:
        """Query shared tiers for the rest of the chain: a few chunks, then all if those exist.

        Mostly none exists. Peers answer quickly: the first round queries them for all.
        """
        for count in (PROBE_CHUNKS, len(keys)):
            missing = found.first_missing
            if missing >= len(keys):
                break
            if self._absent.get(keys[missing], 0.0) > self._moves.clock():
                self._counters.add("spared_questions")
                break
            end = min(missing + count, len(keys))
            peer_keys = keys[found.known :] if count == PROBE_CHUNKS else ()
            news, all_answered = self.query_shared(keys[found.known : end], deadline, peer_keys)
            if news:
                found = self._match(keys, min_accuracy, again=True)
            if found.first_missing < end:
                if all_answered:
                    until = self._moves.clock() + NEGATIVE_TTL_S
                    with self._lock:
                        key = keys[found.first_missing]
                        remember(self._absent, key, until, MAX_NEGATIVE_KEYS)
                break
        return found

    def _query_peers(self, keys: Sequence[ChunkKey], deadline: float) -> bool | None:
        """Return whether peers have any; None when they are late.

        Run in this thread while few do: the queue adds 0.1 ms.
        """
        slot, now, news = self._peers, self._moves.clock(), False
        if slot is None:
            return False
        until = now + PEERS_SHARE * (deadline - now)
        is_mine = self._peer_queries.acquire(blocking=False)
        try:
            if is_mine:
                news = self._find(slot, keys, until)
            elif self._work_queue.fullness(f"ask-{slot.name}") > MOST_WAITING:
                return False
            else:
                ticket = self._submit(slot, keys)
                return None if ticket is None else bool(self._work_queue.wait(ticket, until))
        except KVStoreError:
            until = now
        finally:
            if is_mine:
                self._peer_queries.release()
        if self._moves.clock() >= until and not news:
            self._counters.add("unanswered_lookups")
            return None
        return news

    def _submit(self, slot: TierSlot, keys: Sequence[ChunkKey]) -> Ticket | None:
        """Queue a query of a tier; return None if its breaker is open or its queue is full."""
        if slot.breaker.is_open:
            return None
        work = partial(self._find, slot, keys)
        return self._work_queue.submit(f"ask-{slot.name}", b"".join(keys), work)

    def query_shared(
        self, keys: Sequence[ChunkKey], deadline: float, peer_keys: Sequence[ChunkKey] = ()
    ) -> tuple[bool, bool]:
        """Index copies of *keys* on shared tiers; return whether any exists and all answered."""
        tickets = [self._submit(slot, keys) for slot in self._shared]
        from_peers = self._query_peers(peer_keys, deadline) if peer_keys else False
        news, all_answered = bool(from_peers), from_peers is not None
        for ticket in tickets:
            answer = None
            try:
                answer = ticket and self._work_queue.wait(ticket, deadline)
            except KVStoreError:
                self._counters.add("unanswered_lookups")
            news |= bool(answer)
            all_answered &= answer is not None
        return news, all_answered

    def _find(self, slot: TierSlot, keys: Sequence[ChunkKey], until: float | None = None) -> bool:
        found: list[ChunkInfo | None] = []
        find = slot.tier.find if until is None else partial(self._peer_tier.find, until=until)

        def work() -> bool:
            found.extend(find(keys))
            return True

        slot.guarded(work, "find")
        orphans = self._catalog.orphans[slot.name]
        infos = [info for info in found if info is not None and info.key not in orphans]
        if infos:
            self._learn(slot, infos)
        return bool(infos)  # they were unknown before the query, even if indexed by now

    def drop_remote_hints(self, *, everything: bool = False) -> None:
        """Drop stale entries of peers from the index."""
        if self._peers is not None:
            tier, catalog = self._peer_tier, self._catalog
            for key in tier.stale(everything=everything):
                if catalog.drop_copy(tier.name, key, even_if_held=False):
                    catalog.purged(tier.name, key)
                if tier.name not in catalog.holders(key):
                    tier.delete(key)

    def learn_in_background(self) -> None:
        """Index the contents of shared tiers at start: chunks not in the index are never evicted.

        Runs in the background: a tier may be slow or down.
        """
        for slot in self._shared:
            work = partial(slot.guarded, partial(self._learn_all, slot))
            self._work_queue.submit(f"ask-{slot.name}", b"scan", work)

    def _learn_all(self, slot: TierSlot) -> bool:
        known = iter(slot.tier.scan())
        while some := list(islice(known, LEARNT_AT_ONCE)):
            self._learn(slot, some)
        return True

    def _learn(self, slot: TierSlot, infos: Sequence[ChunkInfo]) -> None:
        if slot is not self._peers:
            infos = infos[: max(0, MAX_SHARED_CHUNKS - self._catalog.eviction.count_on(slot.name))]
        others = self._catalog.note_found(slot.name, infos)
        if slot is self._peers:  # a peer's report replaces no local chunk
            return
        for info in others:
            is_old = self._catalog.is_less_complete(info.key, info.layout)
            if is_old and not self._moves.eviction.replace(info):
                continue
            self._catalog.note_sealed(slot.name, info)
