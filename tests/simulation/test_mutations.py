"""A simulation is worth what it finds: each promise is broken on purpose, and it must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulation.schedule import Schedule
from simulation.stepped import SteppedWorkQueue

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import KVStoreError
from kvstore.proto.frame import FrameHeader, parse_header
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.holds import Holds
from kvstore.server.store import writes
from kvstore.server.store.reads import Reads
from kvstore.server.store.reservations import PutTicket, Reservations
from kvstore.server.store.store import Store
from kvstore.server.store.writes import Writes
from kvstore.server.tiering.eviction import Eviction
from kvstore.server.tiering.moves import Moves
from kvstore.server.tiering.tier_slot import TierSlot
from kvstore.tiers.cpu import CpuTier

SEEDS = 1500
"""Schedules within which each mutation has to show."""

Break = Callable[[pytest.MonkeyPatch], None]


def nothing(*_: object, **__: object) -> None:
    """Do nothing, whatever is asked."""


def reads_are_not_verified(patch: pytest.MonkeyPatch) -> None:
    def read(slot: TierSlot, info: ChunkInfo, out: Bytes, *_: object) -> FrameHeader | None:
        found = slot.guarded(lambda: slot.tier.read(info.key, out))
        return _any_header(info) if found else None

    patch.setattr(TierSlot, "read_verified", read)


def _any_header(info: ChunkInfo) -> FrameHeader:
    return FrameHeader(
        info.key, info.parent, b"", b"", info.layout, codec_id=0, codec_revision=1,
        accuracy=info.accuracy, frame_bytes=info.size_bytes, segments=np.zeros(0),
    )  # fmt: skip


def puts_are_not_verified(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writes, "check_frame", lambda frame, _: parse_header(frame))


def restored_frames_are_taken_for_originals(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writes, "check_put", nothing)


def what_is_aborted_keeps_its_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CpuTier, "abort", nothing)


def failed_writes_keep_their_room(patch: pytest.MonkeyPatch) -> None:
    def write(_: Moves, target: TierSlot, reservation: object, frame: Bytes) -> bool:
        def work() -> bool:
            target.tier.write(reservation, frame)  # type: ignore[arg-type]
            return target.tier.seal(reservation)  # type: ignore[arg-type]

        return target.guarded(work)

    patch.setattr(Moves, "write", write)


def a_dead_session_keeps_its_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Catalog, "release_session", nothing)


def a_dead_session_keeps_its_puts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Writes, "abort_session", nothing)


def leases_do_not_pin(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holds, "is_held", lambda *_: False)


def leases_do_not_expire(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holds, "expire", lambda *_: 0)


def moves_are_never_let_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Catalog, "let_go", nothing)


def a_put_is_counted_forever(patch: pytest.MonkeyPatch) -> None:
    def drop(self: Reservations, ticket: PutTicket) -> None:
        ticket.slot.tier.abort(ticket.reservation)

    patch.setattr(Reservations, "discard", drop)


def evicted_chunks_stay_in_the_catalog(patch: pytest.MonkeyPatch) -> None:
    def cast_out(self: Catalog, tier: str, key: ChunkKey, *, even_if_held: bool = True) -> bool:
        self.orphans[tier].add(key)
        return even_if_held or not self.is_held(key)

    patch.setattr(Catalog, "cast_out", cast_out)


def the_policy_forgets_to_forget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LruEviction, "remove", nothing)


def damaged_chunks_vanish_with_their_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Eviction, "drop_corrupt", lambda self, s, key: self._catalog.forget(s.name, key))


def lost_copies_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Catalog, "forget", lambda *_: True)


def durable_is_acknowledged_without_a_flush(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "_flushed", lambda *_: ("", set()))


def a_flush_is_believed_without_asking_the_medium(patch: pytest.MonkeyPatch) -> None:
    flushed = Store._flushed

    def believe(self: Store, keys: list[ChunkKey], slot: TierSlot, by: float) -> object:
        return flushed(self, [], slot, by)[0], set()

    patch.setattr(Store, "_flushed", believe)


def deletes_do_not_reach_the_medium(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Eviction, "delete_from", nothing)


def orphans_are_never_purged(patch: pytest.MonkeyPatch) -> None:
    delete_from = Eviction.delete_from

    def delete(self: Eviction, slot: TierSlot, key: ChunkKey, **terms: Any) -> Any:
        is_orphan = key in self._catalog.orphans[slot.name]
        return None if is_orphan else delete_from(self, slot, key, **terms)

    patch.setattr(Eviction, "purge", nothing)
    patch.setattr(Eviction, "delete_from", delete)


def whatever_was_sealed_first_counts_as_a_copy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Moves, "_adopt", lambda *_: True)
    patch.setattr(Eviction, "purge", nothing)


def a_lease_opens_every_chunk(patch: pytest.MonkeyPatch) -> None:
    def open_get(
        self: Store, session: object, keys: list[ChunkKey], lease_id: int
    ) -> tuple[int, int]:
        return lease_id, len(keys)

    patch.setattr(Store, "open_get", open_get)


def work_begins_after_the_deadline(patch: pytest.MonkeyPatch) -> None:
    wait = SteppedWorkQueue.wait
    patch.setattr(SteppedWorkQueue, "wait", lambda self, ticket, _: wait(self, ticket, 1e12))


def a_full_cpu_tier_is_a_miss(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reads, "_read_bypass", nothing)


def gets_give_the_next_chunk(patch: pytest.MonkeyPatch) -> None:
    found = Reads._found

    def other(self: Reads, index: int, key: ChunkKey, *where: Any) -> object:
        first = next(self.moves.tiers.cpu_tier.scan()).key
        return found(self, index, first, *where)

    patch.setattr(Reads, "_found", other)


def lookups_stop_one_short(patch: pytest.MonkeyPatch) -> None:
    match = Catalog.match

    def short(*asked: object, again: bool) -> object:
        found = match(*asked, again=again)  # type: ignore[arg-type]
        return replace(found, sources=found.sources[:-1], sizes=found.sizes[:-1])

    patch.setattr(Catalog, "match", short)


MUTATIONS: list[Break] = [
    reads_are_not_verified, puts_are_not_verified, restored_frames_are_taken_for_originals,
    what_is_aborted_keeps_its_room, failed_writes_keep_their_room, a_dead_session_keeps_its_leases,
    a_dead_session_keeps_its_puts, leases_do_not_pin, leases_do_not_expire,
    moves_are_never_let_go, a_put_is_counted_forever, evicted_chunks_stay_in_the_catalog,
    the_policy_forgets_to_forget, damaged_chunks_vanish_with_their_room, lost_copies_are_kept,
    durable_is_acknowledged_without_a_flush, a_flush_is_believed_without_asking_the_medium,
    deletes_do_not_reach_the_medium, orphans_are_never_purged,
    whatever_was_sealed_first_counts_as_a_copy,
    a_lease_opens_every_chunk, work_begins_after_the_deadline, a_full_cpu_tier_is_a_miss,
    gets_give_the_next_chunk, lookups_stop_one_short,
]  # fmt: skip


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_simulation_notices_when(mutation: Break, patch: pytest.MonkeyPatch) -> None:
    mutation(patch)
    for seed in range(SEEDS):
        try:
            Schedule(seed).run()
        except (AssertionError, KVStoreError):
            return
    raise AssertionError(f"{SEEDS} schedules passed although {mutation.__name__}")
