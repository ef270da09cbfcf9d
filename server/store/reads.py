"""Reads of leased chunks, whole or by ranges, each from the fastest copy that verifies."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import codec_by_id
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    TierFullError,
    TierUnavailableError,
    UnknownCodecError,
)
from kvstore.proto.types import Accuracy, ChunkInfo, ChunkKey
from kvstore.proto.unix_socket import PLACE_ROW, Place, Reach
from kvstore.server.security.sessions import Session
from kvstore.server.tiering.admission import PromoteOnSecondHit, remember
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.prefetch import Prefetch
from kvstore.server.tiering.tier_slot import TierSlot
from kvstore.server.tiering.work_queue import Ticket, Work


class LayerPart(NamedTuple):
    """A piece of a frame, from ``offset`` on, or the ``place`` where its reader finds the frame.

    ``chunk`` is its number in the request, ``tier`` the tier it was read from.
    """

    chunk: int
    tier: str
    frame_bytes: int
    offset: int
    data: Bytes
    place: Place | None = None


READ_AHEAD_CHUNKS = 8
"""Chunks of the chain in one read-ahead hint to a medium."""
LOADS_AHEAD_CHUNKS = 16
"""Loads of one get in flight ahead of delivery, begun in batches, which peers serve faster."""
REMEMBERED_READS = 1 << 16
"""Chunks read once, remembered for promotion on a second read; about 10 MB."""
MAX_DUE = 1024
"""Promotions that wait for the next tick; beyond it the oldest are dropped."""
LEAST_MEASURED_BYTES = 64 << 10
"""Shorter reads do not count as a measurement of the medium's bandwidth."""
NO_REACH: frozenset[Reach] = frozenset()
"""Reach of a reader that receives bytes."""
IN_MEMORY = frozenset({Reach.memory})
_NOT_HERE: Bytes = np.empty(0, np.uint8)
_numbers = count()


@dataclass(frozen=True, slots=True)
class ReadTerms:
    """The reader, and its deadline on the clock of the store.

    The reader reads in place in ``reach`` and from the servers ``peers``. Copies of an accuracy
    below ``least`` are ignored.
    """

    session: Session
    deadline: float
    least: Accuracy = Accuracy.exact
    reach: Collection[Reach] = NO_REACH
    peers: Collection[int] = ()


@dataclass(slots=True)
class Loads:
    """The loads of one get, in its thread. They end with it, unless another get waits for one."""

    moves: Moves
    terms: ReadTerms
    claims: list[Ticket] = field(default_factory=list)
    own_bytes: int = 0
    """Size of the delivered frame if it is in memory of this get only, else 0."""

    def load(self, key: ChunkKey, source: TierSlot) -> Ticket | None:
        """Begin to copy a chunk to CPU memory; None when the queue of *source* is full."""
        return self._claimed(self.moves.load(key, source, self.terms.session.tenant, claimed=True))

    def submit(self, source: TierSlot, name: bytes, work: Work) -> Ticket | None:
        """Begin another read of *source*; None when its queue is full."""
        queue = f"load-{source.name}"
        return self._claimed(self.moves.work_queue.submit(queue, name, work, claimed=True))

    def _claimed(self, ticket: Ticket | None) -> Ticket | None:
        if ticket is not None:
            self.claims.append(ticket)
        return ticket

    def wait(self, ticket: Ticket) -> object:
        """Return what a read returned. Raises its error, or DeadlineError, which is counted."""
        try:
            return self.moves.work_queue.wait(ticket, self.terms.deadline)
        except DeadlineError:
            self.moves.counters.add("get_late_chunks")
            raise

    def result(self, ticket: Ticket | None) -> object:
        """Return what a read returned; None if it could not begin, failed or is late."""
        with suppress(KVStoreError):
            return None if ticket is None else self.wait(ticket)
        return None

    def close(self) -> None:
        """Cancel unfinished loads. Idempotent."""
        self.moves.unclaim_loads(self.claims)


class Reads:
    """The gets of a server. Thread-safe.

    Chunks outside CPU memory are promoted first, unless the reader reads them in place: in GPU
    memory, in a file or from another server, which saves one of two copies. ``bypass_bytes``
    bounds the copies made for readers while CPU memory is full of leases.
    """

    def __init__(self, moves: Moves, bypass_bytes: int, prefetch: Prefetch) -> None:
        self.moves = moves
        self._tiers = tiers = moves.tiers
        self._catalog = moves.catalog
        self._counters = moves.counters
        self._bypass_limit_bytes = bypass_bytes
        self._prefetch = prefetch
        self._bypass_bytes = 0
        self._reads = PromoteOnSecondHit(REMEMBERED_READS)
        self._due: OrderedDict[ChunkKey, tuple[str, str]] = OrderedDict()
        """Tenant and source tier of chunks to promote."""
        self._lock = threading.Lock()  # guards the three above
        self._ahead = [slot for slot in tiers.slots.values() if slot.tier.reads_ahead]

    def get(self, keys: Sequence[ChunkKey], terms: ReadTerms) -> Iterator[LayerPart]:
        """Yield leased chunks in order up to the first that is lost or late."""
        cpu = self._tiers.cpu.name
        loads = Loads(self.moves, terms)
        delivered = size_bytes = 0
        origins: list[str] = []
        try:
            for index, key in enumerate(keys):
                self._begin(index, keys, origins, loads)
                # A corrupt chunk leaves CPU memory at once and other tiers later: for those the
                # catalog is read again.
                origin, result = origins[index], None
                if origin == cpu:
                    result = self._found(index, key, terms)
                result = result or self._read(index, key, loads)
                if result is None:
                    break
                delivered += 1
                size_bytes += result.frame_bytes
                if key in self._prefetch.awaited:
                    self._prefetch.was_read(key)
                if result.tier != cpu or self._tiers.gpu is not None:
                    self._promote_if_due(terms.session.tenant, key, result.tier)
                if origin not in ("", result.tier):
                    result = result._replace(tier=origin)
                try:
                    yield result
                finally:
                    if loads.own_bytes:
                        self._release_bypass(loads.own_bytes)
                        loads.own_bytes = 0
        finally:
            if loads.claims:
                loads.close()
            self._counters.add("get_chunks", delivered)
            self._counters.add("get_bytes", size_bytes)
            self._counters.add("get_missed_chunks", len(keys) - delivered)

    def in_place(self, keys: Sequence[ChunkKey], terms: ReadTerms) -> NDArray[Any]:
        """Return the places of the longest prefix of leased *keys* that the reader can read in
        place, as PLACE_ROWs; tiers are numbered as in ``place_names``. They count as delivered.

        Call ``note_in_place`` once the reader has them. With a GPU tier, to which a second read
        promotes, only chunks in GPU memory qualify.
        """
        tiers, reach, least = self._tiers, terms.reach, terms.least
        if tiers.gpu is not None:
            if Reach.device not in reach or tiers.gpu_tier is None:
                return np.empty(0, PLACE_ROW)
            held = self._catalog.held(tiers.gpu.name, keys, least)
            count = len(held) if held.all() else int(held.argmin())
            rows = np.frombuffer(tiers.gpu_tier.place_rows(keys[:count]), PLACE_ROW)
        else:
            in_cpu = self._catalog.held(tiers.cpu.name, keys, least)
            rows = np.frombuffer(tiers.cpu_tier.place_rows(keys[: len(in_cpu)]), PLACE_ROW).copy()
            rows["reach"][~in_cpu] = Reach.none
            elsewhere = np.flatnonzero(rows["reach"] == Reach.none).tolist()
            plan = self._catalog.read_plan([keys[at] for at in elsewhere], least)
            for index, holders in zip(elsewhere, plan, strict=True):
                found = self._place(keys[index], holders, terms)
                if found is None:
                    rows = rows[:index]
                    break
                self._counters.add("peer_lent_chunks", found[0] is tiers.remote)
                rows[index] = found[1]
            rows["tier"][rows["reach"] == Reach.file] = 1
            rows["tier"][rows["reach"] == Reach.peer] = len(self._slots_of(reach))
        self._counters.add("get_chunks", len(rows))
        self._counters.add("get_bytes", int(rows["size_bytes"].sum()))
        return rows

    def place_names(self, terms: ReadTerms) -> list[str]:
        """Return the tiers that are read in place: the device first, peers last."""
        names = [slot.name for slot in self._slots_of(terms.reach)]
        remote = self._tiers.remote if terms.peers else None
        return names if remote is None else [*names, remote.name]

    def note_in_place(self, keys: Sequence[ChunkKey], rows: NDArray[Any], terms: ReadTerms) -> None:
        """Start read-ahead and promotions for a reader that begins to read *rows* of *keys*."""
        tenant = terms.session.tenant
        filed, peers = self._tiers.file_backed, self._tiers.remote
        if peers is not None:
            for index in np.flatnonzero(rows["reach"] == Reach.peer).tolist():
                self._promote_if_due(tenant, keys[index], peers.name)
        in_files = [keys[index] for index in np.flatnonzero(rows["reach"] == Reach.file).tolist()]
        if filed is None or not in_files:
            return
        for start in range(0, len(in_files), READ_AHEAD_CHUNKS):
            self._read_ahead(in_files[max(1, start) : start + READ_AHEAD_CHUNKS])
        for key in in_files:
            self._promote_if_due(tenant, key, filed.name)

    def _read_ahead(self, keys: Sequence[ChunkKey]) -> None:
        """Hint to media with read-ahead which chunks are read next; do not wait."""
        cpu = self._tiers.cpu.name
        plan = self._catalog.read_plan(keys, Accuracy.approximate)
        for slot in self._ahead:
            held = zip(keys, plan, strict=True)
            ahead = [key for key, names in held if slot.name in names and cpu not in names]
            if ahead and not slot.breaker.is_open:
                work = partial(slot.tier.prefetch, ahead)
                self.moves.work_queue.submit(f"load-{slot.name}", b"ahead" + ahead[0], work)

    def in_reach(self, key: ChunkKey, terms: ReadTerms) -> bool:
        """Whether *key* can be delivered without a load."""
        return self._place(key, self._catalog.holders(key, terms.least), terms) is not None

    def _place(
        self, key: ChunkKey, holders: Sequence[str], terms: ReadTerms
    ) -> tuple[TierSlot, Place] | None:
        """Return where the reader finds *key* without a load; on a peer if no copy is nearer."""
        for slot in self._slots_of(terms.reach):
            is_left_alone = slot is self._tiers.file_backed and slot.breaker.is_open
            if slot.name in holders and not is_left_alone and (place := self.place_of(slot, key)):
                return slot, place
        remote = self._tiers.remote
        if remote is None or not terms.peers or self.moves.nearest(key, holders)[:1] != [remote]:
            return None
        place = remote.tier.peer_place(key, terms.peers)
        return None if place is None else (remote, place)

    def _slots_of(self, reach: Collection[Reach]) -> list[TierSlot]:
        """Return the slots that the reader reads in place, nearest first."""
        gpu = self._tiers.gpu if Reach.device in reach else None
        filed = self._tiers.file_backed if Reach.file in reach else None
        return [slot for slot in (gpu, self._tiers.cpu, filed) if slot is not None]

    def place_of(self, slot: TierSlot, key: ChunkKey) -> Place | None:
        """Return the place of the copy on *slot* for readers in place; None if it has none."""
        tiers = self._tiers
        if slot is tiers.cpu:
            return tiers.cpu_tier.locate(key)
        gpu = tiers.gpu_tier if slot is tiers.gpu else None
        return slot.tier.file_place(key) if gpu is None else gpu.locate(key)

    def _promote_if_due(self, tenant: str, key: ChunkKey, name: str) -> None:
        """Promote a chunk in the background on its second read if it is worth its space."""
        gpu = self._tiers.gpu
        elsewhere = (self._tiers.file_backed, self._tiers.remote)
        source = next((slot for slot in elsewhere if slot and slot.name == name), None)
        wants_gpu = gpu is not None and gpu.name not in self._catalog.holders(key)
        if not (source or wants_gpu):
            return
        with self._lock:
            is_due = self._reads.is_due(key)
        if not is_due:
            return
        placement, cpu = self.moves.placement, self._tiers.cpu
        if source and placement.promotes(key, source, cpu):
            # At the next tick: the copy would take a core from the reader, which reads in place.
            with self._lock:
                remember(self._due, key, (tenant, name), MAX_DUE)
        if wants_gpu and gpu and not gpu.breaker.is_open and placement.promotes(key, cpu, gpu):
            self.moves.copy_to(key, gpu, tenant)

    def forget(self, key: ChunkKey) -> None:
        """Forget the reads of a deleted chunk: a new one of this key counts as unread."""
        with self._lock:
            self._reads.forget(key)
            self._due.pop(key, None)

    def promote_due(self) -> None:
        """Promote chunks read twice in place, or past a less accurate copy. Called at each tick."""
        with self._lock:
            due = list(self._due.items())
            self._due.clear()
        for key, (tenant, name) in due:
            if name in self._catalog.holders(key):
                self.moves.load(key, self._tiers.slots[name], tenant)

    def _begin(
        self, index: int, keys: Sequence[ChunkKey], origins: list[str], loads: Loads
    ) -> None:
        """Begin loads after chunk *index*; append the tier of each key to *origins*, "" if none."""
        if index % READ_AHEAD_CHUNKS == 0 and self._ahead:
            start = index + READ_AHEAD_CHUNKS if index else 1
            if following := keys[start : index + 2 * READ_AHEAD_CHUNKS]:
                self._read_ahead(following)
        if len(origins) >= min(len(keys), index + 1 + LOADS_AHEAD_CHUNKS // 2):
            return
        keys = keys[len(origins) : index + 1 + LOADS_AHEAD_CHUNKS]
        is_device = Reach.device in loads.terms.reach
        first = (self._tiers.gpu if is_device else None) or self._tiers.cpu
        plan = self._catalog.read_plan(keys, loads.terms.least)
        for key, holders in zip(keys, plan, strict=True):
            is_first = first.name in holders
            origins.append(first.name if is_first else self._load(key, loads, holders)[0])

    def _load(
        self, key: ChunkKey, loads: Loads, holders: Sequence[str]
    ) -> tuple[str, Ticket | None]:
        """Begin to load *key* unless the reader can reach it; return the best holder's name."""
        place = self._place(key, holders, loads.terms) if loads.terms.reach else None
        if place is not None:
            return place[0].name, None
        if self._tiers.cpu.name in holders:
            return self._tiers.cpu.name, None
        nearest = next(iter(self.moves.nearest(key, holders)), None)
        return ("", None) if nearest is None else (nearest.name, loads.load(key, nearest))

    def _read(self, index: int, key: ChunkKey, loads: Loads) -> LayerPart | None:
        cpu, holders_of = self._tiers.cpu.name, self._catalog.holders
        # Each failed attempt removes or bars a copy, so this ends.
        for _ in range(2 * len(self._tiers.slots)):
            name, ticket = self._load(key, loads, holders_of(key, loads.terms.least))
            if ticket is None:
                is_here = name == cpu or loads.terms.reach
                return self._found(index, key, loads.terms) if is_here else None
            try:
                loads.wait(ticket)
                # A copy of too low accuracy is in CPU memory instead.
                if cpu in holders_of(key) and cpu not in holders_of(key, loads.terms.least):
                    with self._lock:
                        remember(self._due, key, (loads.terms.session.tenant, name), MAX_DUE)
                    return self._read_bypass(index, key, name, loads)
            except (TierFullError, InvalidRequestError):  # CPU memory is full, or too small
                return self._read_bypass(index, key, name, loads)
            except DeadlineError:
                return None
            except (ChunkCorruptError, TierUnavailableError):
                continue
        return None

    def _found(self, index: int, key: ChunkKey, terms: ReadTerms) -> LayerPart | None:
        """Return a chunk that needs no load: its bytes in CPU memory or its place."""
        if not terms.reach:
            name, frame = self._tiers.cpu.name, self._tiers.cpu_tier.peek(key)
            return None if frame is None else LayerPart(index, name, len(frame), 0, frame)
        found = self._place(key, self._catalog.holders(key, terms.least), terms)
        if found is None:
            return None
        slot, place = found
        self._counters.add("peer_lent_chunks", slot is self._tiers.remote)
        return LayerPart(index, slot.name, place.size_bytes, 0, _NOT_HERE, place)

    def _read_bypass(self, index: int, key: ChunkKey, name: str, loads: Loads) -> LayerPart | None:
        """Read past a CPU tier that is full of leases or has a less accurate copy; bounded."""
        slot = self._tiers.slots[name]
        info = self._catalog.copies(key).get(name)
        if info is None or not self._reserve_bypass(info.size_bytes):
            return None
        work = partial(self.moves.read_bypass, info, slot)
        frame: Bytes | None = None
        try:
            ticket = loads.submit(slot, b"bypass" + key, work)
            frame = cast("Bytes | None", loads.result(ticket))
        finally:
            if frame is None:
                self._release_bypass(info.size_bytes)
        if frame is None:
            return None
        self._counters.add("read_throughs")
        loads.own_bytes = info.size_bytes
        return LayerPart(index, name, info.size_bytes, 0, frame)

    def _reserve_bypass(self, size_bytes: int) -> bool:
        """Reserve bypass memory for a reader; return False when it would exceed the limit."""
        with self._lock:
            if self._bypass_bytes + size_bytes > self._bypass_limit_bytes:
                return False
            self._bypass_bytes += size_bytes
            return True

    def _release_bypass(self, size_bytes: int) -> None:
        with self._lock:
            self._bypass_bytes -= size_bytes

    # --- ranges: of the smallest copy with levels, or else of the smallest copy

    def chosen_place(self, key: ChunkKey, terms: ReadTerms) -> tuple[str, Place] | None:
        """Return the tier of the chosen copy and where the reader reads it in place."""
        name, _ = self._chosen(key, terms)
        slot, tiers, reach = self._tiers.slots.get(name), self._tiers, terms.reach
        is_here = slot is tiers.cpu and Reach.memory in reach
        if slot is None or not (is_here or (slot is tiers.file_backed and Reach.file in reach)):
            return None
        place = self.place_of(slot, key)
        return None if place is None else (name, place)

    def ranges(
        self, index: int, key: ChunkKey, spans: Iterable[tuple[int, int]], terms: ReadTerms
    ) -> Iterator[LayerPart]:
        """Yield the byte *spans* (start, stop) of the chosen copy of chunk *index*, cut at its
        end; nothing without a copy or when late. Each is valid until the next one.
        """
        name, info = self._chosen(key, terms)
        if info is None:
            return
        if name == self._tiers.cpu.name:
            frame = self._tiers.cpu_tier.peek(key)
            for start, stop in spans:
                if frame is not None and len(data := frame[start:stop]):
                    yield LayerPart(index, name, len(frame), start, data)
            return
        size, slot, moves = info.size_bytes, self._tiers.slots[name], self.moves
        cut = [(start, min(stop, size) - start) for start, stop in spans if start < size]
        ranges = [(start, np.empty(count, np.uint8)) for start, count in cut if count > 0]
        size_bytes = sum(len(out) for _, out in ranges)

        def read() -> bool:
            started = moves.clock()
            is_read = all(slot.tier.read(key, out, start) for start, out in ranges)
            if is_read and size_bytes >= LEAST_MEASURED_BYTES:
                slot.note_load(size_bytes, moves.clock() - started)
            return is_read

        if not self._reserve_bypass(size_bytes):
            return
        loads, number = Loads(moves, terms), next(_numbers).to_bytes(8, "little")
        work = partial(moves.read_from, slot, key, partial(slot.guarded, read, "read"))
        try:
            if loads.result(loads.submit(slot, b"ranges" + key + number, work)):
                self._counters.add("get_bytes", size_bytes)
                for start, out in ranges:
                    yield LayerPart(index, name, size, start, out)
        finally:
            loads.close()
            self._release_bypass(size_bytes)

    def _chosen(self, key: ChunkKey, terms: ReadTerms) -> tuple[str, ChunkInfo | None]:
        fit = [
            (name, info)
            for name, info in self._catalog.copies(key).items()
            if info.accuracy >= terms.least and not self._tiers.slots[name].breaker.is_open
        ]
        return min(fit, key=_levels_then_size, default=("", None))


def _levels_then_size(copy: tuple[str, ChunkInfo]) -> tuple[bool, int]:
    has_levels = False
    with suppress(UnknownCodecError):
        has_levels = codec_by_id(copy[1].codec_id).max_levels > 0
    return not has_levels, copy[1].size_bytes
