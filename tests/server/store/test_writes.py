"""Puts on their way in: reserved, written, verified, visible, or gone without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
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
    QuotaExceededError,
    ShuttingDownError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameWriter, header_bytes, parse_header
from kvstore.proto.keys import tokens_le32
from kvstore.proto.types import ROOT, Accuracy, KVLayout, PutOutcome
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
    """No writer, no reservation, no chunk: as if nothing had been put."""
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


def test_a_chunk_that_exists_is_not_put_again(core: Core, session: Session) -> None:
    (version,) = prompt(1)
    assert [core.put(session, [version])[0].outcome for _ in range(2)] == [STORED, EXISTS]
    assert core.cpu.stats().chunks == 1
    assert core.counters["put_existing_chunks"] == 1


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


def other_model(version: Version) -> Bytes:
    """The same key and shape, under the identity of another model."""
    template = make_template("red", ROOT, tokens_le32([1000] * TOKENS))
    assert template.key == version.info.key
    return write_frame(replace(template, representation=bytes(16)), 1)


def other_parent(version: Version) -> Bytes:
    template = make_template("red", ROOT, tokens_le32([1000] * TOKENS))
    return write_frame(replace(template, parent=version.info.key[:16]), 1)  # type: ignore[arg-type]


def lossy(version: Version) -> Bytes:
    return _finished(version, codec_id=0, accuracy=Accuracy.bounded)


def of_no_known_codec(version: Version) -> Bytes:
    return _finished(version, codec_id=77, accuracy=Accuracy.exact)


def _finished(version: Version, codec_id: int, accuracy: Accuracy) -> Bytes:
    frame = np.zeros_like(version.frame)
    header = parse_header(version.frame)
    template = make_template("red", ROOT, tokens_le32([1000] * TOKENS))
    assert template.key == header.key
    writer = FrameWriter(template, frame)
    for component in template.layout.components:
        writer.reserve(component.layer_bytes)[:] = 1
        writer.commit(component.layer_bytes)
    writer.finish(codec_id, 1, accuracy)
    return frame


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda v: flipped(v.frame, 0), InvalidFrameError),
        (lambda v: flipped(v.frame, 100), InvalidFrameError),
        (lambda v: flipped(v.frame, len(v.frame) - 1), ChunkCorruptError),
        (lambda v: flipped(v.frame, header_bytes(v.info.layout)), ChunkCorruptError),
        (lambda v: np.zeros_like(v.frame), InvalidFrameError),
        (lambda _: prompt(1, seed=5)[0].frame, ChunkCorruptError),
        (lambda v: v.restored, InvalidRequestError),
        (other_model, InvalidRequestError),
        (other_parent, InvalidRequestError),
        (lossy, InvalidRequestError),
        (of_no_known_codec, UnknownCodecError),
    ],
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


@pytest.mark.parametrize("size_bytes", [0, 10, 191, 192, 1000])
def test_a_frame_that_ends_early_leaves_nothing(
    core: Core, session: Session, size_bytes: int
) -> None:
    (version,) = prompt(1)
    ticket = begin(core, session, version)
    claimed = core.store.writes.claim(session, ticket.ticket_id)
    with pytest.raises(InvalidFrameError):
        core.store.writes.commit(claimed, frame=version.frame[:size_bytes])
    assert_nothing_left(core)


def test_a_batch_that_cannot_begin_whole_does_not_begin(core: Core, session: Session) -> None:
    infos = [version.info for version in prompt(4)]
    with pytest.raises(QuotaExceededError, match="max_reservations_per_session=3"):
        core.store.writes.begin_all(session, infos, core.later())
    assert_nothing_left(core)
    assert len(core.store.writes.begin_all(session, infos[:3], core.later())) == 3


def test_a_frame_that_no_empty_tier_holds_is_refused_as_invalid(
    core: Core, session: Session
) -> None:
    info, _ = make_frame(1, 250, representation=REPRESENTATION)
    assert info.size_bytes > core.cpu.max_frame_bytes
    with pytest.raises(InvalidRequestError, match="frame_bytes"):
        core.store.writes.begin_all(session, [info], core.later())[0]
    assert_nothing_left(core)


def test_a_put_belongs_to_its_session_alone_and_is_finished_once(
    core: Core, session: Session
) -> None:
    (version,) = prompt(1)
    ticket = begin(core, session, version)
    with pytest.raises(LeaseExpiredError, match=f"reservation_id={ticket.ticket_id}"):
        core.store.writes.claim(core.open_session(), ticket.ticket_id)
    assert not core.store.writes.abort(core.open_session(), ticket.ticket_id)
    assert core.store.writes.abort(session, ticket.ticket_id)
    assert not core.store.writes.abort(session, ticket.ticket_id)
    with pytest.raises(LeaseExpiredError):
        core.store.writes.claim(session, ticket.ticket_id)
    assert_nothing_left(core)


def test_a_session_that_ends_leaves_no_put_behind(core: Core, session: Session) -> None:
    other = core.open_session()
    for version in prompt(3):
        begin(core, session, version)
    kept = begin(core, other, prompt(1, seed=1)[0])
    core.sessions.close(session.session_id)
    assert len(core.store.writes) == core.cpu.stats().reservations == 1
    core.store.writes.abort(other, kept.ticket_id)
    assert_nothing_left(core)


def test_no_put_begins_after_the_drain_and_begun_ones_end(core: Core, session: Session) -> None:
    first, second = prompt(2)
    ticket = begin(core, session, first)
    core.store.writes.is_draining = True
    assert core.store.writes.is_draining
    with pytest.raises(ShuttingDownError):
        core.store.writes.begin_all(session, [second.info], core.later())[0]
    assert finish(core, ticket, first.frame) is STORED


def test_a_put_while_everything_is_leased_is_refused_and_not_hung(
    core: Core, session: Session
) -> None:
    versions = prompt(20)
    assert {result.outcome for result in core.put(session, versions)} == {STORED}
    held = [v for v in versions if core.tiers_of(v)]
    for version in held:
        core.store.open_get(session, [version.info.key], 0)
    before = core.cpu.stats()
    (result,) = core.put(session, prompt(1, seed=9))
    assert result.outcome is REFUSED
    assert "tier 'cpu' needs" in result.reason
    assert core.cpu.stats() == before
    assert core.catalog.in_flight.writers.total() == 0
    assert core.counters["put_refused_chunks"] == 1


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
