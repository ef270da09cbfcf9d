"""The RPC Events and its clients, through real servers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ServerMaker
from helpers.credentials import KeyRing
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import SMALL, store

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
from kvstore.proto.types import ChunkKey
from kvstore.server.telemetry.events import EVENT_READERS, EVENT_READERS_PER_TENANT

OPTIONS = ClientOptions("grpc", chunk_tokens=16, deadline_ms=DEADLINE_MS)


class Heard:
    """What pages said, read one by one."""

    def __init__(self, pages: Iterator[EventPage]) -> None:
        self._pages = pages
        self.known: dict[ChunkKey, set[str]] = {}
        self.place: Place | None = None
        self.cleared = 0

    def until(self, keys: list[ChunkKey], *tiers: str) -> None:
        """Read until just these are where they are said to be, and nothing is anywhere else."""
        wanted = {key: set(tiers) for key in keys} if tiers else {}
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
            held = self.known.setdefault(event.key, set())
            (held.add if event.is_stored else held.discard)(event.tier)
            if not held:
                del self.known[event.key]


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
        more = store(client, 2, 2)
        heard.until(keys + more, "cpu", "disk")
        client.delete(keys=keys)
        heard.until(more, "cpu", "disk")
        client.clear()
        heard.until([])
    assert heard.cleared == 1


def test_events_say_what_a_chunk_follows_and_how_many_tokens_it_has(server: LocalServer) -> None:
    client = server.connect("grpc")
    keys = store(client, 1, 2)
    with client.events() as pages:
        page = next(pages)
    assert page.cleared
    assert page.boot_id == client.boot_id
    found = {event.key: event for event in page.events if event.tier == "cpu"}
    assert {key: found[key].parent for key in keys} == {keys[0]: None, keys[1]: keys[0]}
    assert {event.tokens for event in page.events} == {16}


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


def test_any_thread_ends_a_stream(server: LocalServer) -> None:
    client = server.connect("grpc")
    stream = client.events()
    seen: list[EventPage] = []
    reading = threading.Thread(target=lambda: seen.extend(stream))
    reading.start()
    assert eventually(lambda: bool(seen))
    stream.close()
    reading.join(DEADLINE_MS / 1000)
    assert not reading.is_alive()
    stream.close()
    assert not client.is_shut


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


def test_asyncio_clients_hear_the_same(server: LocalServer) -> None:
    client = server.connect("grpc")
    keys = store(client, 1, 2)

    async def hear() -> Heard:
        heard = Heard(iter(()))
        async with (
            AsyncClient(server.address, SMALL, OPTIONS) as other,
            aclosing(other.events()) as pages,
        ):
            async for page in pages:
                heard.take(page)
                if heard.known == {key: {"cpu", "disk"} for key in keys}:
                    return heard
        raise AssertionError

    assert asyncio.run(hear()).cleared == 1


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


def test_a_revoked_reader_hears_no_more(make_server: ServerMaker, tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    proof = ring.make("acme")
    server = make_server("--auth-keys", str(ring.path), "--tiers", "cpu")
    client = server.connect(options=replace(OPTIONS, access=Access(token=proof)))
    with client.events() as pages:
        assert next(pages).cleared
        ring.revoke(proof)
        with pytest.raises(KVStoreError):
            for _ in pages:
                pass


def test_a_revoked_admin_hears_no_more_without_a_session_either(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    ring = KeyRing(tmp_path / "keys")
    proof = ring.make("ops", "admin")
    server = make_server("--auth-keys", str(ring.path), "--tiers", "cpu")
    admin = server.connect(options=replace(OPTIONS, access=Access(token=proof)))
    messages = admin._link.connection.stream("Events", pb.EventsRequest(), DEADLINE_MS)
    assert next(messages).cleared
    ring.revoke(proof)
    with pytest.raises(UnauthenticatedError):
        for _ in messages:
            pass


def test_a_server_without_events_says_so(make_server: ServerMaker) -> None:
    client = make_server("--limits", "events_kept=0").connect("grpc")
    with client.events() as pages, pytest.raises(InvalidRequestError, match="keeps no events"):
        next(pages)


def test_events_that_make_no_sense_are_refused() -> None:
    for key, parent in [(b"short", b""), (bytes(32), b"x")]:
        message = pb.EventsResponse(events=[pb.ChunkEvent(key=key, parent=parent)])
        with pytest.raises(InvalidRequestError, match="make no sense"):
            page_from_message(message)


def test_a_stopping_server_does_not_wait_for_its_readers(server: LocalServer) -> None:
    client = server.connect("grpc")
    with client.events() as pages:
        next(pages)
        assert server.stop() is not None
        with pytest.raises(KVStoreError):
            for _ in pages:
                pass
