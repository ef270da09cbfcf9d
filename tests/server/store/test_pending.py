"""Puts that are pending: chunks that come shard by shard, and promised ones that are waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from helpers.local_server import eventually
from helpers.prompts import frame_of
from helpers.shards import WIDE, shard_frame, shard_of
from simulation.clock import FakeClock
from simulation.core import Core, keys_of, prompt, settings

from kvstore.proto.buffers import Bytes, as_bytes, checksum
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError, InvalidRequestError
from kvstore.proto.frame import (
    FLAG_RESTORED,
    FrameTemplate,
    pack_header,
    parse_header,
    raw_frame_bytes,
)
from kvstore.proto.keys import chain_digest, chunk_key, tokens_le32
from kvstore.proto.plans import Hints
from kvstore.proto.types import ROOT, ChunkInfo, ChunkKey, ChunkShard, KVLayout, Match, PutOutcome
from kvstore.server.index.in_flight import MAX_ANNOUNCED_CHUNKS, MAX_ANNOUNCEMENTS
from kvstore.server.security.sessions import Session
from kvstore.server.store.parallel_writes import ChunkPart, PartTicket
from kvstore.server.store.reservations import PutResult, PutTicket
from kvstore.server.store.store import WORKERS_PER_WAITER

LAYOUT = KVLayout.of(WIDE, 16)
SIZE = raw_frame_bytes(LAYOUT)
TOP, REST = shard_of(LAYOUT, (0, 1)), shard_of(LAYOUT, (1, 3))
LEFT, RIGHT = shard_of(LAYOUT, (0, 3), (0, 2)), shard_of(LAYOUT, (0, 3), (2, 4))
PENDING, STORED, EXISTS = PutOutcome.pending, PutOutcome.stored, PutOutcome.exists


class Writers:
    """A store with memory for a few chunks, and sessions that put shards of one model's."""

    def __init__(self, **limits: float) -> None:
        self.clock = FakeClock()
        terms = {"max_reservations_per_session": 4, "load_headroom_percent": 5, **limits}
        self.core = Core(slab_bytes=1 << 15, config=settings(**terms), clock=self.clock)
        self.writes = self.core.store.writes
        self.one, self.other = self.open(), self.open()

    def open(self) -> Session:
        return self.core.sessions.open(WIDE, "a rank", "red")

    def template(self, number: int = 0) -> FrameTemplate:
        digest = chain_digest(ROOT, tokens_le32(range(number, number + 16)))
        key = chunk_key(self.one.namespace, digest)
        return FrameTemplate(
            key, ROOT, self.one.representation_digest, digest, LAYOUT, prefill_flops=5.0
        )

    def key(self, number: int = 0) -> ChunkKey:
        return self.template(number).key

    def begin(
        self,
        session: Session,
        shard: ChunkShard,
        number: int = 0,
        *,
        is_streamed: bool = False,
        hints: Hints | None = None,
    ) -> PartTicket | PutResult:
        info = ChunkInfo(self.key(number), ROOT, shard.whole, 0, raw_frame_bytes(shard.whole))
        part = ChunkPart(shard, len(self.frame(shard, number)), is_streamed)
        hints = hints or Hints()
        begun = self.writes.begin_all(session, [info], self.core.later(), hints, [part])[0]
        assert isinstance(begun, PartTicket | PutResult)
        return begun

    def frame(self, shard: ChunkShard, number: int = 0, **changes: object) -> Bytes:
        return shard_frame(replace(self.template(number), **changes), WIDE, shard)  # type: ignore[arg-type]

    def finish(self, ticket: PartTicket | PutResult, frame: Bytes) -> PutOutcome:
        if isinstance(ticket, PutResult):
            return ticket.outcome
        claimed = self.writes.claim(ticket.session, ticket.ticket_id)
        return self.writes.commit(claimed, frame=frame).outcome

    def put(self, session: Session, shard: ChunkShard, number: int = 0) -> PutOutcome:
        return self.finish(self.begin(session, shard, number), self.frame(shard, number))

    def found(self, number: int = 0) -> tuple[int, int]:
        match = self.core.store.lookup(self.one, [self.key(number)], self.core.later(), lease=False)
        return match.ready, match.pending

    def is_right(self, number: int = 0) -> bool:
        """Whether the chunk is stored, and its frame is what one writer would have put."""
        frame = as_bytes(self.core.read([self.key(number)], self.one)[0])
        header, right = parse_header(frame), frame_of(self.key(number), WIDE)
        facts = (header.prefill_flops, header.content, header.position)
        is_same = np.array_equal(frame[header.header_bytes :], right[header.header_bytes :])
        return is_same and facts == (5.0, self.template(number).content, 0)

    def assert_nothing_left(self) -> None:
        assert len(self.writes) == self.writes.parallel.used_bytes == 0
        assert (
            self.core.catalog.in_flight.writers.total() == self.core.cpu.stats().reservations == 0
        )


@pytest.fixture
def writers() -> Iterator[Writers]:
    made = Writers()
    yield made
    made.core.close()


@pytest.mark.parametrize(
    "shards",
    [
        (TOP, TOP, REST),
        (shard_of(LAYOUT, (0, 2), (0, 3)), shard_of(LAYOUT, (1, 3), (1, 4)), LEFT, RIGHT),
    ],
    ids=["twice", "corners"],
)
def test_a_chunk_is_pending_until_its_last_shard_and_then_what_one_writer_puts(
    writers: Writers, shards: tuple[ChunkShard, ...]
) -> None:
    *first, last = shards
    for shard in first:
        assert writers.put(writers.one, shard) is PENDING
        assert writers.found() == (0, 1)
    assert writers.put(writers.other, last) is STORED
    assert writers.found() == (1, 0)
    assert writers.is_right()
    assert writers.put(writers.one, TOP) is EXISTS
    writers.assert_nothing_left()


def test_a_later_shard_does_not_overwrite_what_another_writer_put(writers: Writers) -> None:
    assert writers.put(writers.one, TOP) is PENDING
    other = writers.frame(LEFT)
    header = parse_header(other, takes_shards=True)
    other[int(header.segments[0]["offset"]) :][:64] = 7  # other bytes of layer 0
    segments = header.segments.copy()
    segments["checksum"] = [checksum(header.segment(other, i)) for i in range(len(segments))]
    fixed = pack_header(replace(header, segments=segments))
    other[: len(fixed)] = as_bytes(fixed)
    assert writers.finish(writers.begin(writers.other, LEFT), other) is PENDING
    assert writers.put(writers.one, RIGHT) is STORED
    assert writers.is_right()


def test_only_the_shard_that_was_announced_is_taken_raw_exact_and_original(
    writers: Writers,
) -> None:
    wrong = (
        (writers.frame(REST), InvalidRequestError),
        (writers.frame(TOP, representation=bytes(16)), InvalidRequestError),
        (writers.frame(TOP, flags=FLAG_RESTORED), InvalidRequestError),
        (writers.frame(TOP, 1), ChunkCorruptError),
        (frame_of(writers.key(), WIDE), InvalidRequestError),
        (writers.frame(TOP)[:-1], ChunkCorruptError),
        (np.zeros(10, np.uint8), InvalidFrameError),
    )
    for frame, error in wrong:
        with pytest.raises(error):
            writers.finish(writers.begin(writers.one, TOP), frame)
    assert writers.found() == (0, 1)


@pytest.mark.parametrize("waited_s", [0, 31], ids=["at once", "when its time was up"])
def test_a_chunk_put_whole_meanwhile_needs_no_further_shard(
    writers: Writers, waited_s: float
) -> None:
    assert writers.put(writers.one, TOP) is PENDING
    late = writers.begin(writers.one, REST)
    frame = frame_of(writers.key(), WIDE)
    header = parse_header(frame)
    header = replace(header, representation=writers.one.representation_digest)
    info = replace(header.info(), key=writers.key())
    begun = writers.writes.begin_all(writers.other, [info], writers.core.later())[0]
    assert not isinstance(begun, PutResult)
    writers.writes.commit(writers.writes.claim(writers.other, begun.ticket_id), frame=frame)
    writers.clock.now += waited_s
    writers.core.store.tick()
    assert writers.found() == (1, 0)
    assert writers.finish(late, writers.frame(REST)) is EXISTS
    writers.assert_nothing_left()


def test_many_writers_at_once_make_one_chunk() -> None:
    writers = Writers(max_reservations_per_session=100)
    corners = [
        shard_of(LAYOUT, (layer, layer + 1), (head, head + 1))
        for layer in range(3)
        for head in range(4)
    ]
    shards = [*corners, LEFT, RIGHT, TOP, REST]
    frames = [writers.frame(shard) for shard in shards]
    barrier = threading.Barrier(4)
    outcomes: list[PutOutcome] = []

    def put(mine: int) -> None:
        barrier.wait()
        for number in range(mine, len(shards), 4):
            ticket = writers.begin(writers.one, shards[number])
            outcomes.append(writers.finish(ticket, frames[number]))

    threads = [threading.Thread(target=put, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(STORED) == 1
    assert set(outcomes) <= {STORED, PENDING, EXISTS}
    assert writers.is_right()
    writers.assert_nothing_left()
    writers.core.close()


def test_unfinished_chunks_are_dropped_when_their_time_is_up(writers: Writers) -> None:
    assert writers.put(writers.one, TOP) is PENDING
    late = writers.begin(writers.other, REST)
    writers.clock.now += 29
    writers.core.store.tick()
    assert writers.found() == (0, 1)
    writers.clock.now += 2
    writers.core.store.tick()
    assert writers.found() == (0, 0)
    assert writers.core.counters["dropped_unfinished_chunks"] == 1
    assert writers.finish(late, writers.frame(REST)) is PutOutcome.refused
    writers.assert_nothing_left()


def test_an_unfinished_chunk_ends_with_the_last_session_that_has_a_part_in_it(
    writers: Writers,
) -> None:
    assert writers.put(writers.one, TOP) is PENDING
    assert isinstance(writers.begin(writers.other, REST), PartTicket)
    writers.core.sessions.close(writers.one.session_id)
    writers.one = writers.open()
    assert writers.found() == (0, 1)
    writers.core.sessions.close(writers.other.session_id)
    assert writers.found() == (0, 0)
    writers.assert_nothing_left()


def test_unfinished_chunks_have_a_quarter_of_the_memory_and_streams_count(writers: Writers) -> None:
    limit = writers.core.cpu.capacity_bytes // 4
    count = limit // SIZE
    assert [writers.put(writers.one, TOP, n) for n in range(count)] == [PENDING] * count
    refused = writers.begin(writers.one, TOP, count)
    assert isinstance(refused, PutResult)
    assert refused.outcome is PutOutcome.refused
    assert str(limit) in refused.reason
    assert writers.found(count) == (0, 0)
    assert writers.put(writers.one, REST, 0) is STORED
    streamed = writers.begin(writers.one, TOP, count, is_streamed=True)
    assert isinstance(streamed, PutResult)
    assert writers.writes.parallel.used_bytes <= limit


def test_what_a_streamed_shard_waited_in_is_given_back_whether_it_is_taken_or_refused(
    writers: Writers,
) -> None:
    frame = writers.frame(TOP)
    ticket = writers.begin(writers.one, TOP, is_streamed=True)
    assert writers.writes.parallel.used_bytes == SIZE + len(frame)
    with pytest.raises(ChunkCorruptError):
        writers.finish(ticket, frame[:-1])
    assert writers.writes.parallel.used_bytes == SIZE, "the chunk waits for another writer"
    ticket = writers.begin(writers.one, TOP, is_streamed=True)
    assert writers.finish(ticket, frame) is PENDING
    assert writers.writes.parallel.used_bytes == SIZE
    assert writers.put(writers.other, REST) is STORED
    assert writers.finish(writers.begin(writers.one, TOP, is_streamed=True), frame) is EXISTS
    writers.assert_nothing_left()


# --- promises and those who wait


LONG_S = 30.0


@pytest.fixture
def core() -> Iterator[Core]:
    core = Core(config=settings(workers=2 * WORKERS_PER_WAITER))
    yield core
    core.close()


class Waiting:
    """A lookup that waits in a thread."""

    def __init__(self, core: Core, session: Session, keys: list[ChunkKey]) -> None:
        self.match: Match | None = None
        self.thread = threading.Thread(target=self._run, args=(core, session, keys))
        self.thread.start()

    def _run(self, core: Core, session: Session, keys: list[ChunkKey]) -> None:
        core.store.await_puts(keys, core.later(LONG_S))
        self.match = core.store.lookup(session, keys, core.later(), lease=False)

    def answer(self) -> tuple[int, int]:
        self.thread.join(LONG_S)
        assert self.match is not None
        return self.match.ready, self.match.pending


def waits(core: Core, count: int = 1) -> bool:
    return eventually(lambda: core.counters["waited_lookups"] == count)


def die(core: Core, writer: Session, keys: list[ChunkKey]) -> None:
    core.sessions.close(writer.session_id)


def change_its_mind(core: Core, writer: Session, keys: list[ChunkKey]) -> None:
    core.store.announce_puts(writer, keys, 0)


def drain(core: Core, writer: Session, keys: list[ChunkKey]) -> None:
    core.store.drain(core.later())


@pytest.mark.parametrize("end", [die, change_its_mind, drain])
def test_whoever_waits_for_a_writer_that_ends_is_answered_at_once(
    core: Core, end: Callable[[Core, Session, list[ChunkKey]], None]
) -> None:
    writer, reader = core.open_session(), core.open_session()
    versions = prompt(2)
    keys = keys_of(versions)
    core.store.announce_puts(writer, keys, 60_000)
    core.put(versions[:1], writer)
    waiting = Waiting(core, reader, keys)
    assert waits(core)
    started = time.monotonic()
    end(core, writer, keys)
    assert waiting.answer()[0] == 1
    assert time.monotonic() - started < LONG_S / 2


def test_no_more_lookups_wait_than_may(core: Core) -> None:
    writer = core.open_session()
    keys = keys_of(prompt(1))
    core.store.announce_puts(writer, keys, 60_000)
    both = [Waiting(core, writer, keys) for _ in range(2)]
    assert waits(core, 2)
    core.store.await_puts(keys, core.later())
    assert core.counters["refused_waits"] == 1
    begun = core.store.writes.begin_all(writer, [prompt(1)[0].info], core.later())[0]
    assert isinstance(begun, PutTicket)
    core.store.announce_puts(writer, keys, 0)  # they wait for the put that is under way
    core.store.writes.commit(
        core.store.writes.claim(writer, begun.ticket_id), frame=prompt(1)[0].frame
    )
    assert [waiting.answer() for waiting in both] == [(1, 0)] * 2
    core.store.await_puts(keys_of(prompt(2)), core.later())
    assert core.counters["waited_lookups"] == 2, "nobody waits for what nobody puts"


def test_promises_are_bounded_in_time_and_number(core: Core) -> None:
    session = core.open_session()
    with pytest.raises(InvalidRequestError, match="ttl_ms"):
        core.store.announce_puts(session, [], 600_001)
    for handover_ms in (-1, 600_001, 1.5):
        with pytest.raises(InvalidRequestError, match="handover_ms"):
            Hints(handover_ms=handover_ms)  # type: ignore[arg-type]
    in_flight = core.catalog.in_flight
    keys = [ChunkKey(n.to_bytes(32, "little")) for n in range(MAX_ANNOUNCED_CHUNKS + 5)]
    most, count, spared = MAX_ANNOUNCED_CHUNKS, MAX_ANNOUNCEMENTS, MAX_ANNOUNCEMENTS // 8
    assert in_flight.announce(1, keys, 1.0) == most - most // 8
    assert in_flight.announce(2, keys[::-1], 1.0, "other") == most // 8
    assert len(in_flight.announced) == most
    assert in_flight.announce(1, keys, 0.0) == most - most // 8
    core.catalog.release_session(2)
    made = [in_flight.announce(1, [key], 1.0 + n) for n, key in enumerate(keys[:count])]
    assert made == [1] * (count - spared) + [0] * spared
    made = [
        in_flight.announce(2, [key], 1.0 + n, "other") for n, key in enumerate(keys[:-count:-1])
    ]
    assert sum(made) == spared
    assert in_flight.announce(2, keys[:count], 0.0) == 0
    assert in_flight.announce(1, keys[:3], 0.0) == 3
    core.catalog.release_session(2)
    core.catalog.release_session(1)
    assert not in_flight.announced


def test_what_is_handed_over_stays_until_it_was_read_once_or_its_time_is_up() -> None:
    clock = FakeClock()
    with closing(Core(clock=clock)) as core:
        writer, reader = core.open_session("red"), core.open_session("red")
        versions = prompt(2)
        read, unread = keys_of(versions)
        core.put(versions, writer, hints=Hints(handover_ms=60_000))
        assert core.catalog.eviction.claim("cpu", [read]) == []
        core.read([read], reader)
        assert core.catalog.eviction.claim("cpu", [read]) == [read]
        clock.advance(59)
        core.store.tick()
        assert core.catalog.eviction.claim("cpu", [unread]) == []
        clock.advance(1)
        core.store.tick()
        assert core.catalog.eviction.claim("cpu", [unread]) == [unread]
