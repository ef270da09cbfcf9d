"""Events: whoever follows them knows what the catalog holds; what became of chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from conftest import ServerMaker
from contracts.chunks import make_info
from helpers.credentials import KeyRing
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import SMALL, store
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.clock import FakeClock

from kvstore.client import Access, AsyncClient, Client, ClientOptions
from kvstore.client.server_state import EventPage, EventStream, Place, page_from_message
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    PermissionDeniedError,
    QuotaExceededError,
    UnauthenticatedError,
)
from kvstore.proto.types import DIGEST_BYTES, ChunkInfo, ChunkKey, Namespace
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.policy import EvictionPolicy
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.holds import Leases
from kvstore.server.index.queries import HELD_ROWS
from kvstore.server.telemetry import events as module
from kvstore.server.telemetry.events import (
    EVENT_READERS,
    EVENT_READERS_PER_TENANT,
    MAX_DETAIL_CHARS,
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
@given(
    st.lists(steps, max_size=60), st.integers(2, 40), st.integers(1, 5), st.booleans(),
    st.sampled_from([2, 1000]),
)  # fmt: skip
def test_whoever_follows_knows_what_is_here_in_the_end(
    todo: list[tuple[str, str, int]], kept: int, page_events: int, of_one_space: bool, spaces: int
) -> None:
    catalog, log = world(kept)
    follower = Follower(catalog, log, space_of(1) if of_one_space else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PAGE_EVENTS", page_events)
        patch.setattr(module, "MAX_SPACES", spaces)
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


def test_a_reader_that_falls_behind_begins_anew_and_that_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_SPACES", 2)
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
    assert len(log._counts) == 2, "as many namespaces as are counted"


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


def outcome_key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "little"))


def test_the_oldest_outcomes_are_forgotten_first_and_long_details_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_OUTCOMES", 3)
    table = Outcomes(FakeClock())
    for number in (1, 2, 3, 1, 4):
        table.note(outcome_key(number), Fate.invalid, detail="x" * 10_000)
    found = [table.of(outcome_key(number)) for number in range(5)]
    assert [one and len(one.detail) for one in found] == [
        None, MAX_DETAIL_CHARS, None, MAX_DETAIL_CHARS, MAX_DETAIL_CHARS,
    ]  # fmt: skip


OPTIONS = ClientOptions("grpc", chunk_tokens=16, deadline_ms=DEADLINE_MS)


class Heard:
    """What pages said, read one by one."""

    def __init__(self, pages: Iterator[EventPage]) -> None:
        self._pages = pages
        self.known: set[tuple[ChunkKey, str]] = set()
        self.parents: dict[ChunkKey, ChunkKey | None] = {}
        self.tokens: set[int] = set()
        self.place: Place | None = None
        self.cleared = 0

    def until(self, keys: list[ChunkKey], *tiers: str) -> None:
        """Read until just these are where they are said to be, and nothing is anywhere else."""
        wanted = {(key, tier) for key in keys for tier in tiers}
        deadline = time.monotonic() + DEADLINE_MS / 1000
        for page in self._pages:
            self.take(page)
            if self.known == wanted and self.place:
                return
            assert time.monotonic() < deadline, (self.known, wanted)

    def take(self, page: EventPage) -> None:
        self.place = page.place or self.place
        if page.cleared:
            self.known.clear()
            self.cleared += 1
        for event in page.events:
            if event.is_stored:
                self.parents[event.key] = event.parent
                self.tokens.add(event.tokens)
            change = self.known.add if event.is_stored else self.known.discard
            change((event.key, event.tier))


@contextmanager
def following(client: Client, since: Place | None = None) -> Iterator[tuple[EventStream, Heard]]:
    with client.events(since) as stream:
        yield stream, Heard(stream)


def is_reached(client: Client) -> bool:
    try:
        return bool(client.status().version)
    except KVStoreError:
        return False


def test_a_client_hears_what_comes_and_goes_in_each_tier(server: LocalServer) -> None:
    client = server.connect("grpc")
    keys = store(client, 1, 3)
    with following(client) as (_, heard):
        heard.until(keys, "cpu", "disk")
        assert heard.parents == {keys[0]: None, keys[1]: keys[0], keys[2]: keys[1]}
        assert heard.tokens == {16}
        more = store(client, 2, 2)
        heard.until(keys + more, "cpu", "disk")
        client.delete(keys=keys)
        heard.until(more, "cpu", "disk")
        client.clear()
        heard.until([])
    assert heard.cleared == 1

    async def hear() -> EventPage:
        async with (
            AsyncClient(server.address, SMALL, OPTIONS) as other,
            aclosing(other.events()) as pages,
        ):
            return await anext(pages)

    assert asyncio.run(hear()).cleared


def test_who_was_away_hears_only_what_was_missed(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.server.api.service.BEAT_S", 0.1)
    client = server.connect("grpc")
    keys = store(client, 1, 2)
    with following(client) as (_, heard):
        heard.until(keys, "cpu", "disk")
    more = store(client, 2, 1)
    with following(client, heard.place) as (_, again):
        again.known = heard.known  # what came while it was first told is told again
        again.until(keys + more, "cpu", "disk")
    assert again.cleared == 0
    with client.events(again.place) as pages:
        assert next(pages).place == again.place  # of a page that only says that the node lives


def test_a_restart_clears_what_was_known_and_a_new_session_is_made_for_it(tmp_path: Path) -> None:
    first = LocalServer(tmp_path, "--tiers", "cpu")
    with Client(first.address, SMALL, replace(OPTIONS, retry_after_ms=1)) as client:
        with following(client) as (stream, heard):
            heard.until(store(client, 1, 2), "cpu")
            first.close()
            with pytest.raises(KVStoreError):
                for _ in stream:
                    pass
        second = LocalServer(tmp_path, "--tiers", "cpu", "--listen", first.address)
        try:
            assert eventually(lambda: is_reached(client))
            with following(client, heard.place) as (_, again):
                again.until([])
                again.until(store(client, 3, 1), "cpu")
            assert again.cleared == 1
            assert heard.place is not None
            assert again.place is not None
            assert heard.place.boot_id != again.place.boot_id
        finally:
            client.close()
            second.close()


def test_readers_have_limits_and_leave_their_seats(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.connect("grpc")
    streams = [client.events() for _ in range(EVENT_READERS_PER_TENANT)]
    for stream in streams:
        next(stream)
    with client.events() as more, pytest.raises(QuotaExceededError, match="tenant 'default'"):
        next(more)
    for stream in streams:
        stream.close()

    def may_read() -> bool:
        with client.events() as pages:
            try:
                return next(pages).cleared
            except QuotaExceededError:
                return False

    assert eventually(may_read)
    monkeypatch.setattr("kvstore.server.api.service.EVENT_READERS", 0)
    assert eventually(lambda: not may_read())
    assert EVENT_READERS > EVENT_READERS_PER_TENANT
    assert client.status().version


def test_tenants_hear_of_their_own_chunks_and_admins_of_all(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    ring = KeyRing(tmp_path / "keys")
    proofs = [
        ring.make("acme"),
        ring.make("zeta"),
        ring.make("ops", "admin"),
        ring.make("w", "write"),
    ]
    server = make_server("--auth-keys", str(ring.path), "--tiers", "cpu")

    def connect(proof: str) -> Client:
        return server.connect(options=replace(OPTIONS, access=Access(token=proof)))

    acme, zeta, admin, writer = map(connect, proofs)
    ours, theirs = store(acme, 1, 2), store(zeta, 1, 2)
    assert set(ours).isdisjoint(theirs)
    for client, keys in ((acme, ours), (zeta, theirs)):
        with following(client) as (_, heard):
            heard.until(keys, "cpu")
    with writer.events() as pages, pytest.raises(PermissionDeniedError, match="Events"):
        next(pages)
    session = zeta._link.connected().session.terms.session_id
    for caller, request, refusal in (
        (acme, pb.EventsRequest(session_id=session), LeaseExpiredError),
        (acme, pb.EventsRequest(), PermissionDeniedError),
    ):
        with pytest.raises(refusal):
            next(caller._link.connection.stream("Events", request, DEADLINE_MS))
    all_of_it = admin._link.connection.stream("Events", pb.EventsRequest(), DEADLINE_MS)
    page = page_from_message(next(all_of_it))
    all_of_it.close()
    assert {event.key for event in page.events} == {*ours, *theirs}


def test_a_revoked_reader_hears_no_more_with_a_session_or_without(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    ring = KeyRing(tmp_path / "keys")
    proofs = ring.make("acme"), ring.make("ops", "admin")
    server = make_server("--auth-keys", str(ring.path), "--tiers", "cpu")
    acme, ops = (
        server.connect(options=replace(OPTIONS, access=Access(token=proof))) for proof in proofs
    )
    messages = ops._link.connection.stream("Events", pb.EventsRequest(), DEADLINE_MS)
    with acme.events() as pages:
        assert next(pages).cleared
        assert next(messages).cleared
        for proof, stream, error in (
            (proofs[0], pages, KVStoreError),
            (proofs[1], messages, UnauthenticatedError),
        ):
            ring.revoke(proof)
            with pytest.raises(error):
                for _ in stream:
                    pass


def test_a_server_without_events_says_so_and_events_that_make_no_sense_are_refused(
    make_server: ServerMaker,
) -> None:
    for key, parent in [(b"short", b""), (bytes(32), b"x")]:
        message = pb.EventsResponse(events=[pb.ChunkEvent(key=key, parent=parent)])
        with pytest.raises(InvalidRequestError, match="invalid event"):
            page_from_message(message)
    client = make_server("--limits", "events_kept=0").connect("grpc")
    with client.events() as pages, pytest.raises(InvalidRequestError, match="keeps no events"):
        next(pages)
