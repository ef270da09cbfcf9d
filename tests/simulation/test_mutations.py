"""A simulation is worth what it finds: each promise is broken on purpose, and it must notice."""

from __future__ import annotations

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

SEEDS = range(1500)
"""Schedules within which each mutation has to show: most do in the first hundred."""

flushed, delete_from = Store._flushed, Eviction.delete_from
wait, found, match = SteppedWorkQueue.wait, Reads._found, Catalog.match


def nothing(*_: object, **__: object) -> None:
    """Do nothing, whatever is asked."""


def read_unverified(slot: TierSlot, info: ChunkInfo, out: Bytes, *_: object) -> FrameHeader | None:
    header = FrameHeader(
        info.key, info.parent, b"", b"", info.layout, codec_id=0, codec_revision=1,
        accuracy=info.accuracy, frame_bytes=info.size_bytes, segments=np.zeros(0),
    )  # fmt: skip
    return header if slot.guarded(lambda: slot.tier.read(info.key, out)) else None


def write_without_abort(_: Moves, target: TierSlot, reservation: Any, frame: Bytes) -> bool:
    def work() -> bool:
        target.tier.write(reservation, frame)
        return target.tier.seal(reservation)

    return target.guarded(work)


def discard_without_count(_: Reservations, ticket: PutTicket) -> None:
    ticket.slot.tier.abort(ticket.reservation)


def cast_out_of_nothing(
    self: Catalog, tier: str, key: ChunkKey, *, even_if_held: bool = True
) -> bool:
    self.orphans[tier].add(key)
    return even_if_held or not self.is_held(key)


def drop_without_delete(self: Eviction, slot: TierSlot, key: ChunkKey) -> None:
    self._catalog.forget(slot.name, key)


def flush_unasked(self: Store, _: object, slot: TierSlot, by: float) -> object:
    return flushed(self, [], slot, by)[0], set()


def delete_unless_orphan(self: Eviction, slot: TierSlot, key: ChunkKey, **terms: Any) -> Any:
    is_orphan = key in self._catalog.orphans[slot.name]
    return None if is_orphan else delete_from(self, slot, key, **terms)


def find_the_first(self: Reads, index: int, key: ChunkKey, *where: Any) -> object:
    return found(self, index, next(self.moves.tiers.cpu_tier.scan()).key, *where)


def match_less_one(*asked: Any, again: bool) -> object:
    whole = match(*asked, again=again)
    return replace(whole, sources=whole.sources[:-1], sizes=whole.sizes[:-1])


MUTATIONS: dict[str, list[tuple[object, str, object]]] = {
    "reads_are_not_verified": [(TierSlot, "read_verified", read_unverified)],
    "puts_are_not_verified": [(writes, "check_frame", lambda frame, _: parse_header(frame))],
    "restored_frames_are_taken_for_originals": [(writes, "check_put", nothing)],
    "what_is_aborted_keeps_its_room": [(CpuTier, "abort", nothing)],
    "failed_writes_keep_their_room": [(Moves, "write", write_without_abort)],
    "a_dead_session_keeps_its_leases": [(Catalog, "release_session", nothing)],
    "a_dead_session_keeps_its_puts": [(Writes, "abort_session", nothing)],
    "leases_do_not_pin": [(Holds, "is_held", lambda *_: False)],
    "leases_do_not_expire": [(Holds, "expire", lambda *_: 0)],
    "moves_are_never_let_go": [(Catalog, "release_hold", nothing)],
    "a_put_is_counted_forever": [(Reservations, "discard", discard_without_count)],
    "evicted_chunks_stay_in_the_catalog": [(Catalog, "drop_copy", cast_out_of_nothing)],
    "the_policy_forgets_to_forget": [(LruEviction, "remove", nothing)],
    "damaged_chunks_vanish_with_their_room": [(Eviction, "drop_corrupt", drop_without_delete)],
    "lost_copies_are_kept": [(Catalog, "forget", lambda *_: True)],
    "durable_is_acknowledged_without_a_flush": [(Store, "_flushed", lambda *_: ("", set()))],
    "a_flush_is_believed_without_asking_the_medium": [(Store, "_flushed", flush_unasked)],
    "deletes_do_not_reach_the_medium": [(Eviction, "delete_from", nothing)],
    "orphans_are_never_purged": [
        (Eviction, "purge", nothing), (Eviction, "delete_from", delete_unless_orphan),
    ],
    "whatever_was_sealed_first_counts_as_a_copy": [
        (Moves, "_adopt", lambda *_: True), (Eviction, "purge", nothing),
    ],
    "a_lease_opens_every_chunk": [
        (Store, "open_get", lambda _, session, keys, lease_id: (lease_id, len(keys)))
    ],
    "work_begins_after_the_deadline": [
        (SteppedWorkQueue, "wait", lambda self, ticket, _: wait(self, ticket, 1e12))
    ],
    "a_full_cpu_tier_is_a_miss": [(Reads, "_read_bypass", nothing)],
    "gets_give_the_next_chunk": [(Reads, "_found", find_the_first)],
    "lookups_stop_one_short": [(Catalog, "match", match_less_one)],
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_simulation_notices_when(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, replacement in MUTATIONS[mutation]:
        monkeypatch.setattr(owner, name, replacement)
    for seed in SEEDS:
        try:
            Schedule(seed).run()
        except (AssertionError, KVStoreError):
            return
    raise AssertionError(f"{len(SEEDS)} schedules passed although {mutation}")
