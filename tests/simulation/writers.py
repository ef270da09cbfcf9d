"""Operations that put and forget, each checked against the oracle as it happens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from simulation.oracle import OpenPut, Oracle
from simulation.universe import TENANTS, Version, universe
from simulation.world import World, bounded

from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    InvalidRequestError,
    QuotaExceededError,
    ShuttingDownError,
)
from kvstore.proto.types import ChunkInfo, ChunkKey, PutOutcome
from kvstore.server.security.sessions import Session
from kvstore.server.store.reservations import PutResult, PutTicket


class Writers:
    """Sessions that put, harden, pin, delete and clear."""

    def __init__(self, world: World, oracle: Oracle) -> None:
        self.world = world
        self.oracle = oracle
        self.draw = world.draw

    def deadline(self) -> float:
        return self.world.clock() + self.draw.choice((0.0, 0.05, 0.5, 5.0))

    def keys_of(self, tenant: str) -> list[ChunkKey]:
        """Some of a tenant's keys: a run of a chain, as a prompt would ask for."""
        chain = self.draw.choice(universe().chains[tenant])
        start = self.draw.choice((0, 0, 0, self.draw.randrange(len(chain))))
        return list(chain[start : start + self.draw.randrange(1, len(chain) + 1)])

    # --- puts

    def begin(self, session: Session) -> None:
        """Begin a put and leave it open, whatever others do with the key meanwhile."""
        key = self.draw.choice(self.keys_of(session.tenant))
        version = self.draw.choice(universe().chunks[key].versions)
        deadline = self.deadline()
        slots = self.world.store.tiers.slots
        existed = any(not slots[name].breaker.is_open for name in self.world.catalog.copies(key))
        for begun in self._begin(session, [version.info], deadline):
            if isinstance(begun, PutTicket):
                self.oracle.puts[begun.ticket_id] = OpenPut(begun, version)
            answer = begun.outcome if isinstance(begun, PutResult) else None
            assert existed == (answer is PutOutcome.exists)

    def _begin(
        self, session: Session, infos: list[ChunkInfo], deadline: float
    ) -> Sequence[PutTicket | PutResult]:
        """Begin puts; nothing where the server takes no more."""
        with bounded(self.world, deadline), suppress(QuotaExceededError, ShuttingDownError):
            hints = self.world.next_hints()
            return self.world.store.writes.begin_all(session, infos, deadline, hints)  # type: ignore[return-value]
        return []

    def finish(self) -> None:
        """Write an open put, sometimes wrongly, and commit it."""
        if not self.oracle.puts:
            return
        ticket_id = self.draw.choice(list(self.oracle.puts))
        put = self.oracle.puts.pop(ticket_id)
        writes = self.world.store.writes
        frame = put.ticket.buffer
        assert frame is not None
        frame[:] = put.version.frame
        spoilt = self.draw.random() < 0.25
        if spoilt:
            self._spoil(frame, put)
        ticket = writes.claim(put.ticket.session, ticket_id)
        if not spoilt:
            self.note(put.version, writes.commit(ticket))
            return
        try:
            writes.commit(ticket)
        except (InvalidFrameError, ChunkCorruptError, InvalidRequestError):
            return
        raise AssertionError("a frame that is not what was reserved was committed")

    def _spoil(self, frame: np.ndarray[tuple[int], np.dtype[np.uint8]], put: OpenPut) -> None:
        kind = self.draw.randrange(3)
        if kind == 0:
            # Bytes of padding may be anything; headers and payload may not.
            bit = self.draw.choice((self.draw.randrange(184 * 8), 8 * len(frame) - 1))
            frame[bit // 8] ^= np.uint8(1 << bit % 8)
        elif kind == 1:
            frame[:] = put.version.restored
        else:
            other = universe().chains[put.ticket.session.tenant][2][0]
            others = universe().chunks[other].versions[0].frame
            size = min(len(frame), len(others))
            frame[:size] = others[:size]
            if put.version.info.key == other:
                frame[-1] ^= 1

    def note(self, version: Version, result: PutResult) -> None:
        if result.outcome is PutOutcome.stored:
            self.oracle.note_stored(version)
            assert "cpu" in self.world.catalog.copies(version.info.key)

    def put_all(self, session: Session) -> None:
        """Put a run of a chain in one batch, now and then durably or with a bad frame in it."""
        keys = self.keys_of(session.tenant)
        versions = [self.draw.choice(universe().chunks[key].versions) for key in keys]
        packed = self.draw.random() < 0.2
        infos = [v.packed_info if packed else v.info for v in versions]
        frames = [v.packed if packed else v.frame for v in versions]
        writes = self.world.store.writes
        begun = self._begin(session, infos, self.deadline())
        tickets = [b for b in begun if isinstance(b, PutTicket)]
        taken = [at for at, b in enumerate(begun) if isinstance(b, PutTicket)]
        for ticket in tickets:
            writes.claim(session, ticket.ticket_id)
        chosen = [frames[at] for at in taken]
        bad = self.draw.randrange(len(taken)) if taken and self.draw.random() < 0.1 else None
        if bad is not None:
            cut = self.draw.choice((0, 0, 1))
            chosen[bad] = chosen[bad][: len(chosen[bad]) - cut].copy()
            chosen[bad][-1] ^= 1
        for at in taken[:bad]:
            self.oracle.note_stored(versions[at])
        results: list[PutResult] = []
        try:
            for ticket, frame in zip(tickets, chosen, strict=True):
                results.append(writes.commit(ticket, frame=frame))
        except (ChunkCorruptError, InvalidFrameError, InvalidRequestError):
            assert bad is not None
            for ticket in tickets[len(results) + 1 :]:
                writes.discard(ticket)
            return
        assert bad is None
        for at, result in zip(taken, results, strict=True):
            self.note(versions[at], result)
        if self.draw.random() < 0.3:
            self.harden([keys[at] for at in taken], results)

    def put_one(self, session: Session, key: ChunkKey) -> None:
        """Put one chunk where nothing is in the way."""
        writes, version = self.world.store.writes, universe().chunks[key].versions[0]
        begun = writes.begin_all(session, [version.info], self.world.clock() + 1)[0]
        assert isinstance(begun, PutTicket)
        result = writes.commit(writes.claim(session, begun.ticket_id), frame=version.frame)
        assert result.outcome is PutOutcome.stored
        self.note(version, result)

    def abort(self) -> None:
        if self.oracle.puts:
            ticket_id = self.draw.choice(list(self.oracle.puts))
            session = self.oracle.puts.pop(ticket_id).ticket.session
            assert self.world.store.writes.abort(session, ticket_id)
            assert not self.world.store.writes.abort(session, ticket_id)

    def harden_known(self, session: Session) -> None:
        keys = self.keys_of(session.tenant)
        self.harden(keys, [PutResult(PutOutcome.exists)] * len(keys))

    def harden(self, keys: list[ChunkKey], results: list[PutResult]) -> None:
        """What is acknowledged as durable is on the disk, flushed, when the answer comes."""
        store, disk = self.world.store, self.world.disk
        assert (store.durable is None) == (disk is None)
        if disk is None:
            return
        deadline = self.deadline()
        with bounded(self.world, deadline):
            hardened = store.harden(keys, results, deadline)
        self.oracle.forget_what_is_gone()
        for key, result in zip(keys, hardened, strict=True):
            if result.outcome is not PutOutcome.refused:
                assert key in disk.durable, "acknowledged as durable and not on the disk"
                if key not in disk.lost:
                    assert "disk" in self.world.catalog.copies(key)
                    self.oracle.durable.add(key)

    # --- keeping and forgetting

    def pin(self, session: Session) -> None:
        keys = self.keys_of(session.tenant)
        ttl_ms = self.draw.choice((100, 1_000, 5_000))
        until = self.world.clock() + ttl_ms / 1000
        known = [key for key in keys if self.world.catalog.copies(key)]
        try:
            count = self.world.catalog.pin(keys, ttl_ms / 1000)
        except QuotaExceededError:
            details = self.world.catalog.queries.details
            held = [one for key in keys if (one := details(key)) is not None]
            self.oracle.pins |= {h.key: until for h in held if h.is_pinned}
            return
        assert count == len(known)
        self.oracle.pins |= dict.fromkeys(known, until)

    def unpin(self, session: Session) -> None:
        keys = self.keys_of(session.tenant)
        assert self.world.catalog.unpin(keys) == sum(key in self.oracle.pins for key in keys)
        for key in keys:
            self.oracle.pins.pop(key, None)

    def delete(self, session: Session) -> None:
        """What is deleted is nowhere afterwards, unless a medium did not answer."""
        keys = self.keys_of(session.tenant)
        deadline = self.deadline()
        redis = self.world.redis
        shared = set(redis.medium.chunks) if redis is not None else set()
        shared -= self.world.catalog.orphans["redis"] if redis is not None else set()
        known = [key for key in keys if key in shared or self.world.catalog.copies(key)]
        raised = self.world.faults.raised
        with bounded(self.world, deadline):
            deleted, leased = self.world.store.delete(keys, deadline)
        self.oracle.durable.difference_update(keys)
        assert deleted + leased <= len(keys)
        if self.world.plan.is_quiet and deadline > self.world.clock():
            held = sum(self.oracle.is_held(key) for key in known)
            assert leased == held
            assert deleted <= len(known) - held  # waiting for moves may have evicted some
        if self.world.faults.raised == raised and deadline > self.world.clock():
            self._check_gone([key for key in known if not self.oracle.is_held(key)])

    def _check_gone(self, keys: list[ChunkKey]) -> None:
        self.oracle.check(thoroughly=False)
        for key in keys:
            assert not self.world.catalog.copies(key)
            assert self.world.cpu.find([key]) == [None]
            for tier in self.world.lower:
                if key in tier.medium.chunks:
                    asked = self.world.plan.queue_limit == 1000 and not self.world.faults.raised
                    assert not asked, "a deleted chunk is still there"
                    assert tier.shared or key in self.world.catalog.orphans[tier.name]

    def clear(self, session: Session) -> None:
        """Other tenants keep what they have."""
        others = [tenant for tenant in TENANTS if tenant != session.tenant]
        theirs = [key for tenant in others for chain in universe().chains[tenant] for key in chain]
        # What they do not hold may be evicted meanwhile, as ever.
        kept = [k for k in theirs if self.oracle.is_held(k) and self.world.catalog.copies(k)]
        known = {holding.key for holding in self.world.catalog.queries.page(session.namespace)}
        deadline = self.deadline()
        with bounded(self.world, deadline):
            mine = self.world.catalog.queries.keys_from(session.namespace)
            self.world.store.delete(mine, deadline)
        self.oracle.durable = {k for k in self.oracle.durable if k[:16] != session.namespace}
        if self.world.plan.is_quiet:
            assert all(self.world.catalog.copies(key) for key in kept)
            left = {holding.key for holding in self.world.catalog.queries.page(session.namespace)}
            if deadline > self.world.clock():
                assert all(self.oracle.is_held(key) for key in known & left)

    def drain(self, session: Session) -> None:
        """Nothing is in CPU memory alone after a clean drain, and no put begins."""
        deadline = self.deadline()
        with bounded(self.world, deadline):
            clean = self.world.store.drain(deadline)
        self.oracle.forget_what_is_gone()
        if clean:
            assert self.world.catalog.queries.only_on("cpu") == []
        if clean and self.world.disk is not None:
            self.oracle.durable |= self.oracle.named()["disk"] - self.world.disk.lost
        chunk = self.draw.choice(list(universe().chunks.values()))
        try:
            self.world.store.writes.begin_all(session, [chunk.versions[0].info], deadline)
        except ShuttingDownError:
            return
        raise AssertionError("a put began after the drain")
