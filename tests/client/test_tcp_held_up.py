"""Gets and puts over TCP to a server that is held up: a deadline, an error, or another way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from contracts.bulk_channel import BULK, ServerMaker
from helpers.local_server import DEADLINE_MS, eventually
from helpers.prompts import assert_reads, chunks_of, keys_of, store

from kvstore.client import Client, ClientOptions
from kvstore.client.transports.grpc import StreamTransport
from kvstore.client.transports.tcp import BulkTransport
from kvstore.proto.errors import DeadlineError, KVStoreError, TierUnavailableError
from kvstore.proto.types import ChunkKey
from kvstore.server.bulk.service import BulkService

SOON_S = 20.0


def test_a_server_that_falls_silent_is_a_miss_by_the_deadline_and_found_again(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(*BULK)
    client = server.connect(options=ClientOptions("tcp", 16, deadline_ms=300, retry_after_ms=1))
    keys = store(server.connect("grpc"), 1, 2)

    def is_found() -> bool:
        with suppress(DeadlineError, TierUnavailableError):
            return len(client.get_chunks(keys)) == 2
        return False

    assert eventually(is_found)
    go_on = threading.Event()

    def waits(*_: object) -> Iterator[float]:
        go_on.wait(DEADLINE_MS / 1000)
        yield from ()

    monkeypatch.setattr(BulkService, "get", waits)
    with pytest.raises(DeadlineError):
        client.get_chunks(keys)
    go_on.set()
    monkeypatch.undo()
    assert eventually(is_found)
    assert_reads(server.connect("tcp"), keys)
    assert server.settled().leases == 0


def test_a_put_to_a_server_that_stores_nothing_in_time_is_an_error(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(*BULK)
    client = server.connect(options=ClientOptions("tcp", 16, deadline_ms=300))
    chunks = chunks_of(client, keys_of(client, 1, 2))
    monkeypatch.setattr(BulkService, "put", lambda *_: threading.Event().wait(0.6))
    with pytest.raises(KVStoreError):
        client.put_chunks(chunks)


def ended_get(client: Client, keys: list[ChunkKey]) -> None:
    """Get, whatever error the end of its server is."""
    with suppress(KVStoreError):
        client.get_chunks(keys)


def test_a_server_that_stops_does_not_wait_for_a_get_that_waits_for_a_tier(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(*BULK)
    client = server.connect("tcp")
    keys = store(client, 1, 2)
    assert server.node.bulk is not None
    began, go_on = threading.Event(), threading.Event()
    ended: list[bool] = []

    def waits(*_: object) -> None:
        began.set()
        ended.append(go_on.wait(SOON_S))

    monkeypatch.setattr(server.node.bulk.service, "get", waits)
    reader = threading.Thread(target=ended_get, args=(client, keys))
    reader.start()
    assert began.wait(SOON_S)
    server.stop()
    assert not ended
    go_on.set()
    reader.join()
    assert eventually(lambda: bool(ended))


def test_a_server_whose_threads_for_gets_are_all_held_up_answers_others_through_grpc(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(*BULK, "--workers", "1")
    slow, other = server.connect("tcp"), server.connect("tcp")
    keys = store(slow, 1, 2)
    began, go_on = threading.Event(), threading.Event()
    answer = BulkService.get

    def held_up(*terms: Any) -> Any:
        began.set()
        assert go_on.wait(SOON_S)
        return answer(*terms)

    monkeypatch.setattr(BulkService, "get", held_up)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(slow.get_chunks, keys)
        assert began.wait(SOON_S)
        assert_reads(other, keys)
        assert not held.done()
        transport = other._link.connected()
        assert isinstance(transport, BulkTransport)
        assert not transport.streams.idle, "it was hung up on"
        go_on.set()
        assert len(held.result(SOON_S)) == 2
    monkeypatch.setattr(BulkService, "get", answer)
    monkeypatch.setattr(StreamTransport, "read", None)
    for _ in range(3):  # and its threads are there for all again
        assert_reads(slow, keys)
