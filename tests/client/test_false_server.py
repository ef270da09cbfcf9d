"""A server that does not keep to the protocol: what a client makes of its replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.coarse_codec import coarse_codec
from helpers.local_server import LocalServer
from helpers.lossy_copies import leave_on_disk
from helpers.prompts import assert_reads, equal, store, tensors_of

from kvstore.client import Client, chunk_reads
from kvstore.client.options import TransportName
from kvstore.client.transports import base
from kvstore.client.transports.base import ReadPlan
from kvstore.proto.messages import accuracy_number
from kvstore.proto.types import Accuracy, ChunkKey

CHUNKS = 3


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with coarse_codec():
        yield


@pytest.fixture
def server(make_server: Callable[..., LocalServer]) -> LocalServer:
    """A server whose disk keeps the half of each element."""
    return make_server("--codec", "disk=coarse", "--bulk", "127.0.0.1:0")


@pytest.fixture(params=["shm", "grpc", "tcp"])
def client(server: LocalServer, request: pytest.FixtureRequest) -> Client:
    name: TransportName = request.param
    return server.connect(name)


def test_copies_that_are_less_accurate_than_was_asked_for_are_a_miss(
    server: LocalServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = store(client, 1, CHUNKS)
    leave_on_disk(server, keys[1:])
    with monkeypatch.context() as patch:
        for module in (base, chunk_reads):  # as of a server that does not look at what is asked
            patch.setattr(module, "accuracy_number", lambda _: accuracy_number(Accuracy.bounded))
        for _ in range(2):
            assert len(client.get_chunks(keys)) == 1
            assert {len(layer.tensors) for layer in client.get_chunk_layers(keys)} == {1}
            assert client.frame(keys[0]) is not None
            assert client.frame(keys[1]) is None
            assert client.get_chunks(keys[1:]) == []
            assert list(client.get_chunk_layers(keys[1:])) == []
    found = client.get_chunks(keys, accuracy=Accuracy.bounded)
    assert len(found) == CHUNKS, "no fault of the chunks, which stay"


def test_frames_that_nobody_asked_for_are_left_and_the_others_read(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = store(client, 1, CHUNKS)
    more: list[ChunkKey] = []

    def with_more(digests: bytes, *terms: Any, **others: Any) -> ReadPlan:
        return ReadPlan(digests + b"".join(key[16:] for key in more), *terms, **others)

    monkeypatch.setattr(chunk_reads, "ReadPlan", with_more)
    more += keys[1:]
    (found,) = client.get_chunks(keys[:1])
    assert equal(found, tensors_of(keys[0], client.model, 16))
    assert {len(layer.tensors) for layer in client.get_chunk_layers(keys[:1])} == {1}
    more.clear()
    assert_reads(client, keys)
