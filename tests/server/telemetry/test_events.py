"""Events: whoever follows them ends up knowing what the catalog holds, however it falls behind."""

from __future__ import annotations

import tracemalloc
from itertools import count

import pytest
from contracts.chunks import make_info
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.clock import FakeClock

from kvstore.proto.types import DIGEST_BYTES, ROOT, Accuracy, ChunkInfo, ChunkKey, Namespace
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.policy import EvictionPolicy
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.holds import Leases
from kvstore.server.index.queries import HELD_ROWS
from kvstore.server.telemetry import events as module
from kvstore.server.telemetry.events import (
    MAX_DETAIL_CHARS,
    Event,
    EventLog,
    EventReader,
    Fate,
    Outcomes,
    Page,
)

TIERS = ("cpu", "disk", "redis")
LOCAL = TIERS[:2]
SEEDS = 9


def world(kept: int = 1000) -> tuple[Catalog, EventLog]:
    """Return a catalog with a shared tier, and the log of the others."""
    ids = count(1)
    policies: dict[str, EvictionPolicy] = {tier: LruEviction() for tier in TIERS}
    catalog = Catalog(policies, Leases(10, lambda: next(ids)), 1000, FakeClock())
    log = EventLog(LOCAL, kept, catalog.queries.held_from)
    catalog.listeners.append(log)
    return catalog, log


def chunk(seed: int) -> ChunkInfo:
    """Return one of SEEDS chunks of three namespaces."""
    return make_info(seed, 100 + seed)


def space_of(seed: int) -> Namespace:
    return Namespace(chunk(seed).key[:DIGEST_BYTES])


class Follower:
    """What somebody knows who only reads pages."""

    def __init__(self, catalog: Catalog, log: EventLog, space: Namespace | None = None) -> None:
        self.known: set[tuple[ChunkKey, str]] = set()
        self.pages: list[Page] = []
        self._catalog, self._log, self._space = catalog, log, space
        self.reader = EventReader(log, space)
        self._cursor = 0

    def read(self, pages: int = 1_000) -> None:
        """Take in what comes, *pages* at most."""
        for _ in range(pages):
            page = self.reader.poll()
            if page is None:
                return
            self.pages.append(page)
            self._cursor = page.cursor
            if page.cleared:
                self.known.clear()
            for event in page.events:
                put = self.known.add if event.tokens else self.known.discard
                put((event.key, event.tier))

    def connect_again(self) -> None:
        """Begin another call behind the last page."""
        self.reader = EventReader(self._log, self._space)
        self.reader.go_on(self._cursor)

    def truth(self) -> set[tuple[ChunkKey, str]]:
        """Return what there is to know."""
        infos = [chunk(seed) for seed in range(SEEDS)]
        return {
            (info.key, tier)
            for info in infos
            for tier in self._catalog.copies(info.key)
            if tier in LOCAL and self._space in (None, info.key[:DIGEST_BYTES])
        }


steps = st.one_of(
    st.tuples(st.just("store"), st.sampled_from(TIERS), st.integers(0, SEEDS - 1)),
    st.tuples(st.just("lose"), st.sampled_from(TIERS), st.integers(0, SEEDS - 1)),
    st.tuples(st.sampled_from(["read", "connect"]), st.just(""), st.integers(1, 3)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=60), st.integers(2, 40), st.integers(1, 5), st.booleans())
def test_whoever_follows_knows_what_is_here_in_the_end(
    todo: list[tuple[str, str, int]], kept: int, page_events: int, of_one_space: bool
) -> None:
    catalog, log = world(kept)
    follower = Follower(catalog, log, space_of(1) if of_one_space else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PAGE_EVENTS", page_events)
        for what, tier, number in todo:
            if what == "store":
                catalog.note_sealed(tier, chunk(number))
            elif what == "lose":
                catalog.forget(tier, chunk(number).key)
            elif what == "read":
                follower.read(number)
            else:
                follower.connect_again()
        follower.read()
    assert follower.known == follower.truth()
    assert follower.pages[0].cleared


def test_what_changes_while_what_is_here_is_told_comes_after_it() -> None:
    catalog, log = world()
    for number in range(2 * HELD_ROWS):
        catalog.note_sealed("cpu", make_info(number, 1))
    follower = Follower(catalog, log)
    follower.read(1)
    (first,) = follower.pages
    assert first.cleared
    assert first.cursor == 0
    known, unknown = (make_info(number, 1) for number in (0, 2 * HELD_ROWS - 1))
    assert known.key in {event.key for event in first.events}
    for info in (known, unknown):
        catalog.forget("cpu", info.key)
    follower.read()
    assert {key for key, _ in follower.known} & {known.key, unknown.key} == set()
    assert len(follower.known) == 2 * HELD_ROWS - 2
    assert follower.pages[-1].cursor == log.last


def test_a_reader_that_falls_behind_begins_anew_and_that_is_counted() -> None:
    catalog, log = world(kept=4)
    restarts: list[int] = []
    follower = Follower(catalog, log)
    log.on_restart = lambda: restarts.append(1)
    follower.read()
    for number in range(SEEDS):
        catalog.note_sealed("cpu", chunk(number))
    follower.read()
    assert [page.cleared for page in follower.pages] == [True, True]
    assert restarts == [1]
    assert follower.known == follower.truth()


def test_numbers_of_one_namespace_say_nothing_about_others() -> None:
    catalog, log = world()
    alone, crowded = (Follower(catalog, log, space_of(1)) for _ in range(2))
    alone.read()
    crowded.read()
    catalog.note_sealed("cpu", chunk(1))
    alone.read()
    for number in (0, 3, 6):  # of another namespace
        catalog.note_sealed("cpu", chunk(number))
    crowded.read()
    assert alone.pages == crowded.pages[: len(alone.pages)]
    assert crowded.pages[-1].cursor == alone.pages[-1].cursor
    assert {event.key for page in crowded.pages for event in page.events} == {chunk(1).key}


def test_more_namespaces_than_are_counted_cost_a_reader_a_new_beginning_and_no_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_SPACES", 2)
    catalog, log = world()
    follower = Follower(catalog, log, space_of(0))
    for number in (0, 1, 2, 0, 1, 2):
        catalog.note_sealed("disk", chunk(number))
        follower.connect_again()
        follower.read()
    assert follower.known == follower.truth()
    assert [page.cleared for page in follower.pages].count(True) > 1


def test_a_cursor_that_nobody_was_given_begins_anew() -> None:
    catalog, log = world()
    catalog.note_sealed("cpu", chunk(0))
    for space in (None, space_of(0)):
        reader = EventReader(log, space)
        reader.go_on(1 << 40)
        page = reader.poll()
        assert page is not None
        assert page.cleared


SIZE = 8


def note(log: EventLog, seed: int) -> Event:
    """Have *log* note something of chunk *seed*, of every third that it left. Return it."""
    info, number = make_info(seed, 1), log.last + 1
    own = log.count(Namespace(info.key[:DIGEST_BYTES])) + 1
    if seed % 3 == 0:
        log.removed("disk", info.key, is_last=True)
        return Event(info.key, "disk", number=number, own=own)
    log.stored("cpu", [info])
    return Event(info.key, "cpu", info.layout.tokens, info.parent, info.accuracy, number, own)


def test_an_event_is_kept_whole_until_as_many_came_as_there_is_room_for() -> None:
    _, log = world(SIZE)
    assert [log.get(number) for number in range(1, SIZE + 1)] == [None] * SIZE
    noted: list[Event] = []
    for seed in range(1, 3 * SIZE):
        noted.append(note(log, seed))
        kept = noted[-SIZE:]
        assert [log.get(one.number) for one in kept] == kept
        assert [log.get(one.number) for one in noted[:-SIZE]] == [None] * len(noted[:-SIZE])
    left = next(one for one in reversed(noted) if not one.tokens)
    assert (left.parent, left.accuracy) == (ROOT, Accuracy.approximate)


def test_a_log_takes_its_memory_at_the_start_and_no_more_when_it_fills() -> None:
    infos = [make_info(1, 1)] * 1000
    tracemalloc.start()
    try:
        _, log = world(len(infos))
        empty, _ = tracemalloc.get_traced_memory()
        log.stored("cpu", infos)
        full, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert empty > 64 * len(infos)
    assert full - empty < len(infos)


# --- what became of chunks


def outcome_key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "little"))


def test_the_last_outcome_of_a_chunk_is_what_is_told() -> None:
    clock = FakeClock()
    table = Outcomes(clock)
    assert table.of(outcome_key(1)) is None
    table.note(outcome_key(1), Fate.evicted, "cpu")
    clock.advance(5.0)
    table.note(outcome_key(1), Fate.refused, detail="no room")
    found = table.of(outcome_key(1))
    assert found == (Fate.refused, "", "no room", clock())


def test_the_oldest_outcomes_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OUTCOMES", 3)
    table = Outcomes(FakeClock())
    for number in (1, 2, 3, 1, 4):
        table.note(outcome_key(number), Fate.evicted, "cpu")
    assert [number for number in range(5) if table.of(outcome_key(number))] == [1, 3, 4]


def test_a_long_detail_is_cut() -> None:
    table = Outcomes(FakeClock())
    table.note(outcome_key(1), Fate.invalid, detail="x" * 10_000)
    found = table.of(outcome_key(1))
    assert found is not None
    assert len(found.detail) == MAX_DETAIL_CHARS
