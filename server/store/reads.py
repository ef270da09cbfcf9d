"""Reads of leased chunks, each from the fastest copy that proves right."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    TierFullError,
    TierUnavailableError,
)
from kvstore.proto.types import ChunkKey, Fidelity
from kvstore.proto.unix_socket import PLACE_ROW, Reach
from kvstore.server.security.sessions import Session
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.promotion import PromoteOnSecondHit
from kvstore.server.tiering.tier_slot import TierSlot
from kvstore.server.tiering.work_queue import Ticket
from kvstore.tiers.allocator import SlabPlace
from kvstore.tiers.base import FilePlace, PeerPlace


@dataclass(frozen=True, slots=True)
class ReadResult:
    """A chunk in reach of its reader. ``tier`` is where it was when asked for.

    ``place`` is None when CPU memory had no room, and ``frame`` then a copy of its own. A place
    in a file, in the arena of a device or on another server comes without the frame's bytes.
    """

    index: int
    tier: str
    frame: Bytes
    place: SlabPlace | FilePlace | PeerPlace | None

    @property
    def size_bytes(self) -> int:
        """Size of the frame, wherever it is."""
        return len(self.frame) if self.place is None else self.place.size_bytes


READ_AHEAD_CHUNKS = 8
"""Of the chain, which media are told of at once that can use that."""
LOADS_AHEAD_CHUNKS = 16
"""Loads of one get that run before the reader asks for them, begun several at a time: a peer is
asked for so many at once.
"""
REMEMBERED_READS = 1 << 16
"""Chunks read once that a promotion may follow from; about 10 MB."""
MAX_DUE = 1024
"""Promotions that wait for the next tick; the oldest are forgotten beyond them."""
IN_MEMORY = frozenset({Reach.memory})
_NOT_HERE: Bytes = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class _Near:
    """The slots that a reader reads in place, nearest first, and what fidelity it asks for."""

    slots: Sequence[TierSlot]
    least: Fidelity
    peers: Collection[int] = ()
    """The other servers from which the reader reads itself, by their numbers."""
    claims: list[Ticket] = field(default_factory=list)
    """Loads of this get, which end with it unless somebody else waits for them."""


class Reads:
    """The gets of a server. Thread-safe.

    What is not in CPU memory is promoted first, but for what the reader reads in place: in GPU
    memory, in a file or from another server, which spares it one of two copies. ``bypass_bytes``
    bounds the copies made for readers while CPU memory is full of leases.
    """

    def __init__(
        self,
        moves: Moves,
        bypass_bytes: int,
        on_read: Callable[[ChunkKey], None] = lambda key: None,
    ) -> None:
        self._moves = moves
        self._catalog = moves.catalog
        self._work_queue = moves.work_queue
        self._counters = moves.counters
        self._bypass_limit_bytes = bypass_bytes
        self._on_read = on_read
        self._bypass_bytes = 0
        self._reads = PromoteOnSecondHit(REMEMBERED_READS)
        self._due: OrderedDict[ChunkKey, tuple[str, str]] = OrderedDict()
        """Whose and from where."""
        self._lock = threading.Lock()  # guards the three above

    def get(
        self,
        session: Session,
        keys: Sequence[ChunkKey],
        deadline: float,
        reach: Collection[Reach] = IN_MEMORY,
        least: Fidelity = Fidelity.exact,
        peers: Collection[int] = (),
    ) -> Iterator[ReadResult]:
        """Yield leased chunks in order, up to the first that is lost or late.

        The caller holds the lease until it is done with what it got. *reach*: where it can read
        in place, and *peers* from which other servers. *least*: copies of lower fidelity are
        passed over, as if they were not there.
        """
        near = _Near(self._near(reach), least, peers)
        delivered = 0
        origins: list[str] = []
        plan: list[list[str]] = []
        try:
            for index, key in enumerate(keys):
                if index % READ_AHEAD_CHUNKS == 0:
                    told = index + READ_AHEAD_CHUNKS if index else 1
                    self._read_ahead(keys[told : index + 2 * READ_AHEAD_CHUNKS])
                if len(origins) <= index + LOADS_AHEAD_CHUNKS // 2:
                    ahead = keys[len(origins) : index + 1 + LOADS_AHEAD_CHUNKS]
                    plan += self._catalog.read_plan(ahead, least)
                    for key_ahead, holders in zip(ahead, plan[len(origins) :], strict=True):
                        origins.append(self._load(session, key_ahead, near, holders)[0])
                result = self._leased(index, key, near, plan[index])
                result = result or self._read(session, index, key, deadline, near)
                if result is None:
                    break
                delivered += 1
                self._on_read(key)
                self._counters.add("get_bytes", result.size_bytes)
                self._promote_if_due(session, key, result.tier)
                try:
                    yield replace(result, tier=origins[index] or result.tier)
                finally:
                    if result.place is None:
                        self.release_bypass(len(result.frame))
        finally:
            self._moves.let_go_of_loads(near.claims)
            self._counters.add("get_chunks", delivered)
            self._counters.add("get_missed_chunks", len(keys) - delivered)

    def in_place(
        self,
        keys: Sequence[ChunkKey],
        reach: Collection[Reach],
        least: Fidelity,
        peers: Collection[int] = (),
    ) -> NDArray[Any]:
        """Return where the longest prefix of leased *keys* is that the reader can read in place.

        As PLACE_ROWs, their tiers numbered as in ``place_names``. They count as delivered:
        hundreds at the price of a few through ``get``. Call ``note_in_place`` when the reader knows
        them. Where there is GPU memory, to which a second read would promote others, only those
        that are there.
        """
        moves = self._moves
        if moves.tiers.gpu is not None:
            return self._in_gpu(keys, least) if Reach.device in reach else np.empty(0, PLACE_ROW)
        in_cpu, *in_files = self._catalog.held(self.place_names(reach), keys, least)
        rows = np.frombuffer(moves.tiers.cpu_tier.place_rows(keys[: len(in_cpu)]), PLACE_ROW).copy()
        rows["reach"][~in_cpu] = Reach.none
        held = in_files[0] if in_files else np.zeros(len(rows), np.bool_)
        rows = rows[: self._add_others(keys, rows, held, least, peers)]
        rows["tier"][rows["reach"] == Reach.peer] = len(self.place_names(reach))
        return self._counted(rows)

    def _in_gpu(self, keys: Sequence[ChunkKey], least: Fidelity) -> NDArray[Any]:
        """Do what ``in_place`` does, of GPU memory alone."""
        gpu, tier = self._moves.tiers.gpu, self._moves.tiers.gpu_tier
        assert gpu is not None
        assert tier is not None
        (held,) = self._catalog.held([gpu.name], keys, least)
        count = len(held) if held.all() else int(held.argmin())
        return self._counted(np.frombuffer(tier.place_rows(keys[:count]), PLACE_ROW))

    def _counted(self, rows: NDArray[Any]) -> NDArray[Any]:
        self._counters.add("get_chunks", len(rows))
        self._counters.add("get_bytes", int(rows["size_bytes"].sum()))
        return rows

    def place_names(self, reach: Collection[Reach], peers: Collection[int] = ()) -> list[str]:
        """Return the tiers that a reader of *reach* and *peers* reads in place.

        That of a device is the first, that of peers the last.
        """
        gpu = self._moves.tiers.gpu if Reach.device in reach else None
        filed = self._moves.tiers.file_backed if Reach.file in reach else None
        there = (gpu, self._moves.tiers.cpu, filed, self._moves.tiers.remote if peers else None)
        return [slot.name for slot in there if slot is not None]

    def _add_others(
        self,
        keys: Sequence[ChunkKey],
        rows: NDArray[Any],
        held: NDArray[np.bool_],
        least: Fidelity,
        peers: Collection[int],
    ) -> int:
        """Fill the *rows* of those *held* in files, and of what *peers* have, up to the first that
        is nowhere; return where that is.
        """
        filed = self._moves.tiers.file_backed
        for index in np.flatnonzero(rows["reach"] == Reach.none).tolist():
            place = None
            if filed is not None and held[index] and not filed.breaker.is_open:
                place = filed.tier.file_place(keys[index])
            if place is not None:
                rows[index] = (place.extent, Reach.file, 1, place.offset, place.size_bytes, 0)
                continue
            holders = self._catalog.holders(keys[index], least) if peers else ()
            lent = self._moves.lent_place(keys[index], holders, peers)
            if lent is None:
                return int(index)
            rows[index] = (lent.number, Reach.peer, 0, 0, lent.size_bytes, 0)
            self._counters.add("peer_lent_chunks")
        return len(rows)

    def note_in_place(self, session: Session, keys: Sequence[ChunkKey], rows: NDArray[Any]) -> None:
        """The reader of *keys* begins to read *rows*: what follows from reading files."""
        filed, peers = self._moves.tiers.file_backed, self._moves.tiers.remote
        if peers is not None:
            for index in np.flatnonzero(rows["reach"] == Reach.peer).tolist():
                self._promote_if_due(session, keys[index], peers.name)
        told = [keys[index] for index in np.flatnonzero(rows["reach"] == Reach.file).tolist()]
        if filed is None or not told:
            return
        for start in range(0, len(told), READ_AHEAD_CHUNKS):
            self._read_ahead(told[max(1, start) : start + READ_AHEAD_CHUNKS])
        for key in told:
            self._promote_if_due(session, key, filed.name)

    def _read_ahead(self, keys: Sequence[ChunkKey]) -> None:
        """Tell a medium that can use it what of the chain is read next, and wait for nothing."""
        for slot in self._moves.tiers.slots.values():
            if not slot.tier.reads_ahead or slot.breaker.is_open:
                continue
            holders = ((key, self._catalog.holders(key)) for key in keys)
            cpu = self._moves.tiers.cpu.name
            ahead = [key for key, names in holders if slot.name in names and cpu not in names]
            if ahead:
                work = partial(_prefetched, slot, ahead)
                self._work_queue.submit(f"load-{slot.name}", b"ahead" + ahead[0], work)

    def in_reach(
        self,
        key: ChunkKey,
        reach: Collection[Reach] = IN_MEMORY,
        least: Fidelity = Fidelity.exact,
        peers: Collection[int] = (),
    ) -> bool:
        """Whether *key* can be delivered without a load."""
        holders = self._catalog.holders(key, least)
        if any(_is_in_place(slot, key, holders) for slot in self._near(reach)):
            return True
        return self._moves.lent_place(key, holders, peers) is not None

    def _near(self, reach: Collection[Reach]) -> list[TierSlot]:
        """Return the slots that the reader reads in place, nearest first."""
        moves = self._moves
        gpu = moves.tiers.gpu if Reach.device in reach else None
        filed = moves.tiers.file_backed if Reach.file in reach else None
        return [slot for slot in (gpu, moves.tiers.cpu, filed) if slot is not None]

    def _promote_if_due(self, session: Session, key: ChunkKey, name: str) -> None:
        """Copy a chunk up, in the background, when it is read a second time and worth its room."""
        gpu = self._moves.tiers.gpu
        elsewhere = (self._moves.tiers.file_backed, self._moves.tiers.remote)
        source = next((slot for slot in elsewhere if slot and slot.name == name), None)
        wants_gpu = gpu is not None and gpu.name not in self._catalog.holders(key)
        if not (source or wants_gpu):
            return
        with self._lock:
            is_due = self._reads.is_due(key)
        if not is_due:
            return
        placement, cpu = self._moves.placement, self._moves.tiers.cpu
        if source and placement.promotes(key, source, cpu):
            # Not now: the copy would take a core from the reader, who is reading it there.
            self._promote_soon(key, session.tenant, name)
        if wants_gpu and gpu and placement.promotes(key, cpu, gpu):
            self._moves.copy_up(key, session.tenant)

    def forget(self, key: ChunkKey) -> None:
        """It was deleted: what comes by its name has been read by nobody."""
        with self._lock:
            self._reads.forget(key)
            self._due.pop(key, None)

    def _promote_soon(self, key: ChunkKey, tenant: str, name: str) -> None:
        with self._lock:
            self._due[key] = (tenant, name)
            if len(self._due) > MAX_DUE:
                self._due.popitem(last=False)

    def promote_due(self) -> None:
        """Begin to copy to CPU memory what was read elsewhere twice, or past a lesser copy.

        Called at every tick.
        """
        with self._lock:
            due = list(self._due.items())
            self._due.clear()
        for key, (tenant, name) in due:
            if name in self._catalog.holders(key):
                self._moves.load(key, self._moves.tiers.slots[name], tenant)

    def _load(
        self, session: Session, key: ChunkKey, near: _Near, holders: Sequence[str]
    ) -> tuple[str, Ticket | None]:
        """Start loading *key* unless it is on a slot of *near*; return the best holder's name."""
        for slot in near.slots:
            if _is_in_place(slot, key, holders):
                return slot.name, None
        for slot in self._moves.nearest(key, holders):
            if slot.tier.peer_place(key, near.peers) is not None:
                return slot.name, None
            ticket = self._moves.load(key, slot, session.tenant, claimed=True)
            near.claims.extend([ticket] if ticket else [])
            return slot.name, ticket
        return "", None

    def _leased(
        self, index: int, key: ChunkKey, near: _Near, holders: Sequence[str]
    ) -> ReadResult | None:
        """Return a chunk that a reader finds first in CPU memory, without another question.

        What is found damaged leaves CPU memory at once, and other tiers later.
        """
        cpu = self._moves.tiers.cpu
        first = next((slot for slot in near.slots if slot.name in holders), None)
        return self._in_cpu(index, key) if first is cpu else None

    def _read(
        self,
        session: Session,
        index: int,
        key: ChunkKey,
        deadline: float,
        near: _Near,
    ) -> ReadResult | None:
        # Each failed attempt removes or bars a copy, so this ends.
        for _ in range(2 * len(self._moves.tiers.slots)):
            holders = self._catalog.holders(key, near.least)
            name, ticket = self._load(session, key, near, holders)
            if ticket is None:
                return self._in_place(index, key, name, near.peers) if name else None
            try:
                self._work_queue.wait(ticket, deadline)
                if self._is_barred(key, near.least):
                    self._promote_soon(key, session.tenant, name)
                    return self._read_bypass(index, key, name, deadline)
            except (TierFullError, InvalidRequestError):  # no room, or none large enough ever
                return self._read_bypass(index, key, name, deadline)
            except DeadlineError:
                self._counters.add("get_late_chunks")
                return None
            except (ChunkCorruptError, TierUnavailableError):
                continue
        return None

    def _is_barred(self, key: ChunkKey, least: Fidelity) -> bool:
        """Whether a copy of too low fidelity has the chunk's place in CPU memory."""
        cpu = self._moves.tiers.cpu.name
        holders = self._catalog.holders
        return cpu in holders(key) and cpu not in holders(key, least)

    def _in_place(
        self, index: int, key: ChunkKey, name: str, peers: Collection[int]
    ) -> ReadResult | None:
        if name == self._moves.tiers.cpu.name:
            return self._in_cpu(index, key)
        slot = self._moves.tiers.slots[name]
        gpu = self._moves.tiers.gpu_tier
        place: SlabPlace | FilePlace | PeerPlace | None
        if slot is self._moves.tiers.remote:
            place = slot.tier.peer_place(key, peers)
            self._counters.add("peer_lent_chunks", place is not None)
        else:
            place = gpu.locate(key) if gpu is slot.tier else slot.tier.file_place(key)
        return None if place is None else ReadResult(index, name, _NOT_HERE, place)

    def _in_cpu(self, index: int, key: ChunkKey) -> ReadResult | None:
        cpu = self._moves.tiers.cpu_tier
        place, frame = cpu.locate(key), cpu.peek(key)
        if place is None or frame is None:
            return None
        return ReadResult(index, self._moves.tiers.cpu.name, frame, place)

    def _read_bypass(
        self, index: int, key: ChunkKey, name: str, deadline: float
    ) -> ReadResult | None:
        """Read past a CPU tier that is full of leases or has a lesser copy, within a bound."""
        slot = self._moves.tiers.slots[name]
        info = self._catalog.copies(key).get(name)
        if info is None or not self.reserve_bypass(info.size_bytes):
            return None
        work = partial(self._moves.read_bypass, info, slot)
        ticket = self._work_queue.submit(f"load-{name}", b"loose" + key, work, claimed=True)
        frame = None
        try:
            frame = None if ticket is None else self._work_queue.wait(ticket, deadline)
        except KVStoreError:
            self._counters.add("get_late_chunks")
        self._moves.let_go_of_loads([ticket] if ticket else [])
        if frame is None:
            self.release_bypass(info.size_bytes)
            return None
        self._counters.add("read_throughs")
        return ReadResult(index, name, frame, None)  # type: ignore[arg-type]

    def reserve_bypass(self, size_bytes: int) -> bool:
        """Account for memory of a reader's own; False when there is too much of it already."""
        with self._lock:
            if self._bypass_bytes + size_bytes > self._bypass_limit_bytes:
                return False
            self._bypass_bytes += size_bytes
            return True

    def release_bypass(self, size_bytes: int) -> None:
        """Account for it no more."""
        with self._lock:
            self._bypass_bytes -= size_bytes


def _prefetched(slot: TierSlot, keys: Sequence[ChunkKey]) -> bool:
    slot.tier.prefetch(keys)
    return True


def _is_in_place(slot: TierSlot, key: ChunkKey, holders: Container[str]) -> bool:
    if slot.name not in holders:
        return False
    is_local_disk = slot.tier.survives_restart
    return not is_local_disk or not (slot.breaker.is_open or slot.tier.file_place(key) is None)
