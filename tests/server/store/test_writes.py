"""Puts on their way in: reserved, written, verified, visible, or gone without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from contracts.chunks import make_frame, make_representation
from simulation.core import TOKENS, Core, frames_of, keys_of, prompt, settings
from simulation.tiers import SimDisk, no_faults
from simulation.universe import REPRESENTATION, Version, make_template, universe, write_frame

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    ShuttingDownError,
)
from kvstore.proto.frame import header_bytes
from kvstore.proto.keys import tokens_le32
from kvstore.proto.types import ROOT, KVLayout, PutOutcome
from kvstore.server.security.sessions import Session
from kvstore.server.store.reservations import PutTicket

STORED, EXISTS, REFUSED = PutOutcome.stored, PutOutcome.exists, PutOutcome.refused


@pytest.fixture
def core() -> Iterator[Core]:
    core = Core(config=settings(max_reservations_per_session=3, load_headroom_percent=5))
    yield core
    core.close()


def begin(core: Core, session: Session, version: Version) -> PutTicket:
    ticket = core.store.writes.begin_all(session, [version.info], core.later())[0]
    assert isinstance(ticket, PutTicket)
    return ticket


def finish(core: Core, ticket: PutTicket, frame: Bytes) -> PutOutcome:
    writes = core.store.writes
    claimed = writes.claim(ticket.session, ticket.ticket_id)
    assert claimed.room is not None
    claimed.room[:] = frame
    return writes.commit(claimed).outcome


def assert_nothing_left(core: Core) -> None:
    assert len(core.store.writes) == len(core.catalog.in_flight.writers) == len(core.catalog) == 0
    assert core.cpu.stats().used_bytes == core.cpu.stats().reservations == 0


def test_a_put_is_invisible_until_it_is_committed(core: Core, session: Session) -> None:
    (version,) = prompt(1)
    ticket = begin(core, session, version)
    match = core.store.lookup(session, [version.info.key], core.later(), lease=False)
    assert (match.ready, match.pending) == (0, 1)
    assert finish(core, ticket, version.frame) is STORED
    match = core.store.lookup(session, [version.info.key], core.later(), lease=False)
    assert (match.ready, match.pending, match.tiers) == (1, 0, ("cpu",))
    assert core.get(session, [version.info.key]) == frames_of([version])
    assert core.counters["put_bytes"] == version.info.size_bytes


def test_of_two_writers_the_first_to_commit_wins_whole(core: Core, session: Session) -> None:
    chunk = next(c for c in universe().chunks.values() if c.tenant == "red")
    early, late, third = chunk.versions
    tickets = [begin(core, session, version) for version in (late, early, third)]
    assert finish(core, tickets[1], early.frame) is STORED
    assert finish(core, tickets[0], late.frame) is EXISTS
    assert core.store.writes.abort(session, tickets[2].ticket_id)
    assert core.get(session, [chunk.key]) == [early.frame.tobytes()]
    assert (core.cpu.stats().chunks, core.cpu.stats().reservations) == (1, 0)
    assert core.catalog.in_flight.writers.total() == 0


def flipped(frame: Bytes, at: int) -> Bytes:
    spoilt = frame.copy()
    spoilt[at] ^= 1
    return spoilt


def other_parent(version: Version) -> Bytes:
    template = make_template("red", ROOT, tokens_le32([1000] * TOKENS))
    return write_frame(replace(template, parent=version.info.key[:16]), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda v: flipped(v.frame, 100), InvalidFrameError),
        (lambda v: flipped(v.frame, header_bytes(v.info.layout)), ChunkCorruptError),
        (lambda _: prompt(1, seed=5)[0].frame, ChunkCorruptError),
        (lambda v: v.restored, InvalidRequestError),
        (other_parent, InvalidRequestError),
    ],
    ids=["header", "payload", "other key", "restored", "other parent"],
)
def test_a_frame_that_is_not_what_was_reserved_leaves_nothing(
    core: Core,
    session: Session,
    spoil: Callable[[Version], Bytes],
    error: type[KVStoreError],
) -> None:
    (version,) = prompt(1)
    ticket = begin(core, session, version)
    with pytest.raises(error):
        finish(core, ticket, spoil(version))
    assert_nothing_left(core)
    assert core.counters["put_invalid_chunks"] == 1
    assert core.put(session, [version])[0].outcome is STORED


def test_a_frame_of_another_layout_than_reserved_is_refused(core: Core, session: Session) -> None:
    (version,) = prompt(1, tokens=64)
    wide = KVLayout.of(make_representation(1, 2, 2), 64)
    assert wide.raw_bytes == version.info.layout.raw_bytes
    info = replace(version.info, layout=wide)
    begun = core.store.writes.begin_all(session, [info], core.later())[0]
    assert isinstance(begun, PutTicket)
    with pytest.raises(InvalidRequestError, match="layout"):
        finish(core, begun, version.frame)
    assert_nothing_left(core)


def test_a_bad_frame_of_a_batch_leaves_those_before_it(core: Core, session: Session) -> None:
    versions = prompt(3)
    tickets = [begin(core, session, version) for version in versions]
    claimed = [core.store.writes.claim(session, ticket.ticket_id) for ticket in tickets]
    frames = [version.frame for version in versions]
    frames[1] = flipped(frames[1], len(frames[1]) - 1)
    core.store.writes.commit(claimed[0], frame=frames[0])
    with pytest.raises(ChunkCorruptError):
        core.store.writes.commit(claimed[1], frame=frames[1])
    core.store.writes.discard(claimed[2])
    assert [core.tiers_of(version) for version in versions] == [["cpu"], [], []]
    assert core.catalog.in_flight.writers.total() == core.cpu.stats().reservations == 0


def test_a_frame_that_no_empty_tier_holds_is_refused_as_invalid(
    core: Core, session: Session
) -> None:
    info, _ = make_frame(1, 250, representation=REPRESENTATION)
    assert info.size_bytes > core.cpu.max_frame_bytes
    with pytest.raises(InvalidRequestError, match="frame_bytes"):
        core.store.writes.begin_all(session, [info], core.later())[0]
    assert_nothing_left(core)


def test_no_put_begins_after_the_drain_and_begun_ones_end(core: Core, session: Session) -> None:
    first, second = prompt(2)
    ticket = begin(core, session, first)
    core.store.writes.is_draining = True
    assert core.store.writes.is_draining
    with pytest.raises(ShuttingDownError):
        core.store.writes.begin_all(session, [second.info], core.later())[0]
    assert finish(core, ticket, first.frame) is STORED


def test_puts_leave_the_headroom_to_loads() -> None:
    disk = SimDisk(1 << 20, no_faults())
    core = Core([disk], slabs=4, config=settings(load_headroom_percent=50), write="through")
    session = core.open_session()
    versions = prompt(24)
    core.put(session, versions)
    core.settle()
    assert core.cpu.stats().used_bytes <= core.cpu.capacity_bytes // 2
    assert core.get(session, keys_of(versions)) == frames_of(versions)
    assert core.cpu.stats().used_bytes > core.cpu.capacity_bytes // 2
    core.close()


def test_write_through_queues_a_copy_to_each_lower_tier_and_counts_what_it_cannot() -> None:
    disk = SimDisk(1 << 20, no_faults())
    core = Core([disk], queue_limit=2, write="through")
    session = core.open_session()
    versions = prompt(3)
    core.put(session, versions)
    assert core.work_queue.depth()["store-disk"] == 2
    assert core.counters["skipped_copies"] == 1
    core.settle()
    assert [core.tiers_of(v) for v in versions] == [["cpu", "disk"], ["cpu", "disk"], ["cpu"]]
    core.close()


def test_a_put_begun_for_a_session_that_has_ended_leaves_no_room_taken(
    core: Core, session: Session
) -> None:
    core.sessions.close(session.session_id)
    (version,) = prompt(1)
    with pytest.raises(LeaseExpiredError, match="open a session"):
        core.store.writes.begin_all(session, [version.info], core.later())[0]
    assert core.cpu.stats().used_bytes == 0
    assert core.catalog.in_flight.writers.total() == 0
