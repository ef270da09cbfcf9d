"""What a client is given of lossy copies: nothing, unless it says so; and what nobody asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import ServerMaker
from helpers.coarse_codec import coarse_codec
from helpers.local_server import LocalServer
from helpers.lossy_copies import leave_on_disk
from helpers.prompts import MEDIUM, chunks_of, parts_of, store, tokens

from kvstore.client import Client, chunk_reads
from kvstore.client.transports import base
from kvstore.proto.messages import accuracy_number
from kvstore.proto.types import EXACT, Accuracy, ChunkKey, Stated

CHUNKS = 3


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with coarse_codec():
        yield


@pytest.fixture
def server(make_server: ServerMaker) -> LocalServer:
    """A server whose disk keeps the half of each element."""
    return make_server("--codec", "disk=coarse", "--bulk", "127.0.0.1:0")


EVERY = pytest.mark.parametrize("client", ["shm", "grpc", "tcp"], indirect=True)
"""Over every transport."""


@pytest.fixture
def lossy(server: LocalServer, client: Client) -> list[ChunkKey]:
    """Keys of a prompt of which only the copies on disk are left."""
    keys = store(client, 1, CHUNKS)
    leave_on_disk(server, keys)
    return keys


@EVERY
def test_who_asks_is_told_how_true_each_chunk_is(server: LocalServer, client: Client) -> None:
    keys = store(client, 2, CHUNKS)
    leave_on_disk(server, keys[1:2])
    for _ in range(2):
        stated = [Stated(Accuracy.approximate)] * 5
        found = client.get_chunks(keys, accuracy=Accuracy.bounded, stated=stated)
        assert len(found) == CHUNKS
        assert stated == [EXACT, Stated(Accuracy.bounded), EXACT]
    assert len(client.get_chunks(keys, stated=stated)) == 1
    assert stated == [EXACT]


@EVERY
def test_who_says_nothing_is_given_nothing_lossy(client: Client, lossy: list[ChunkKey]) -> None:
    for _ in range(2):
        assert client.lookup(keys=lossy).ready == 0
        assert client.get_chunks(lossy) == []
        assert list(client.get_chunk_layers(lossy)) == []
        with client.lease(keys=lossy) as lease:
            assert lease.match.ready == 0
        assert len(client.get_chunks(lossy, accuracy=Accuracy.bounded)) == CHUNKS


def test_a_client_that_allows_a_loss_is_given_the_high_half_of_each_element(
    client: Client, lossy: list[ChunkKey]
) -> None:
    assert client.lookup(keys=lossy, accuracy=Accuracy.approximate).ready == CHUNKS
    found = client.get_chunks(lossy, accuracy=Accuracy.bounded)
    for chunk, tensors in zip(chunks_of(client, lossy), found, strict=True):
        originals = parts_of(chunk.tensors)  # type: ignore[arg-type]
        for part, original in zip(parts_of(tensors), originals, strict=True):
            assert (part == original & 0xFF00).all()
    layers = list(client.get_chunk_layers(lossy, accuracy=Accuracy.bounded))
    assert layers
    assert len(layers[-1].tensors) == CHUNKS


def test_what_several_prompts_begin_with_stays_exact_once_it_left_memory(
    make_server: ServerMaker,
) -> None:
    server = make_server("--codec", "disk=coarse", "--cpu", "4MiB")
    client, catalog = server.connect("auto", MEDIUM), server.node.store.catalog
    size = client.options.chunk_tokens
    system = tokens(1, CHUNKS * size)
    prompts = [client.keys([*system, *tokens(seed, 2 * size)]) for seed in (100, 101)]
    alone = client.keys(tokens(102, 5 * size))
    for keys in (alone, *prompts):
        client.put_chunks(chunks_of(client, keys))
        server.settled()
    assert catalog.holders(prompts[0][0], Accuracy.exact) == ["cpu"], "nobody shared it then"
    every = {*alone, *prompts[0], *prompts[1]}
    for seed in range(2, 30):
        store(client, seed, 16)
        if not any("cpu" in catalog.holders(key) for key in every):
            break
    server.settled()
    for keys, exact in ((prompts[0], CHUNKS), (prompts[1], CHUNKS), (alone, 0)):
        truth = [catalog.holders(key, Accuracy.exact) for key in keys]
        assert truth == [["disk"]] * exact + [[]] * (5 - exact)
        stated: list[Stated] = []
        client.get_chunks(keys, accuracy=Accuracy.approximate, stated=stated)
        assert stated == [EXACT] * exact + [Stated(Accuracy.bounded)] * (5 - exact)


@EVERY
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
