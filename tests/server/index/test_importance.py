"""Which tokens matter: said with a put, kept within a bound, and used when a chunk is encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from helpers.local_server import LocalServer, eventually
from helpers.prompts import MEDIUM, keys_of, parts_of

from kvstore.client import Chunk, Client, ClientOptions
from kvstore.client.options import TransportName
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout, PutOutcome
from kvstore.server.index.known_models import OVERHEAD_BYTES, KnownModels
from kvstore.tiers.base import DEFAULT_TENANT

ServerMaker = Callable[..., LocalServer]
TOKENS = 64
IMPORTANT = (3, 40)
"""As many as get a quarter of the step."""


def numbers() -> ChunkTensors:
    out = empty_tensors(KVLayout.of(MEDIUM, TOKENS))
    draw = np.random.default_rng(0)
    for part in parts_of(out):
        part[...] = draw.normal(0, 1, part.shape).astype(np.float32).view(np.uint32) >> 16
    return out


def errors(one: ChunkTensors, other: ChunkTensors) -> np.ndarray:
    """Return each token's root mean square error."""
    pairs = zip(parts_of(one), parts_of(other), strict=True)
    squares = [
        ((a.astype(np.uint32) << 16).view("f4") - (b.astype(np.uint32) << 16).view("f4")) ** 2
        for a, b in pairs
    ]
    found: np.ndarray = np.sqrt(np.concatenate(squares).mean((0, 2)))
    return found


def weights() -> np.ndarray:
    found = np.full(TOKENS, 0.5, np.float32)
    found[list(IMPORTANT)] = 9
    found[10] = 0
    return found


def left_on_disk(server: LocalServer, keys: list[ChunkKey]) -> None:
    catalog, moves = server.node.store.catalog, server.node.store.moves
    assert eventually(lambda: catalog.eviction.count_on("disk") == len(keys))
    server.settled()
    for key in keys:
        assert catalog.cast_out("cpu", key)
        moves.eviction.delete_from(moves.tiers.cpu, key)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_tokens_that_were_said_to_matter_are_kept_more_exactly(
    make_server: ServerMaker, transport: TransportName
) -> None:
    server = make_server("--codec", "disk=kvq:1,importance")
    options = ClientOptions(transport, chunk_tokens=TOKENS, deadline_ms=20_000)
    client = server.connect(representation=MEDIUM, options=options)
    told, silent = keys_of(client, 1, 1)[0], keys_of(client, 2, 1)[0]
    tensors = numbers()
    chunk = Chunk(told, tensors, position=TOKENS, importance=weights())
    puts = client.put_chunks([chunk, replace(chunk, key=silent, importance=None)])
    assert {put.outcome for put in puts} == {PutOutcome.stored}
    left_on_disk(server, [told, silent])
    one, other = (
        client.get_chunks([told], accuracy=Accuracy.bounded),
        client.get_chunks([silent], accuracy=Accuracy.bounded),
    )
    weighed, plain = errors(one[0], tensors), errors(other[0], tensors)
    assert (weighed[list(IMPORTANT)] < 0.5 * plain[list(IMPORTANT)]).all()
    assert weighed[10] > 1.5 * plain[10]


@pytest.mark.parametrize(
    ("flags", "is_told"),
    [
        (("--codec", "disk=kvq:1"), False),
        (("--codec", "disk=kvq:1,importance"), True),
        (("--tenant-codecs", f"{DEFAULT_TENANT}/disk=kvq:1,importance"), True),
        (("--tenant-codecs", "acme/disk=kvq:1,importance"), False),
    ],
)
def test_what_matters_is_said_where_a_codec_asks_alone(
    make_server: ServerMaker, flags: tuple[str, str], is_told: bool
) -> None:
    server = make_server(*flags)
    options = ClientOptions("shm", chunk_tokens=TOKENS)
    client = server.connect(representation=MEDIUM, options=options)
    assert not client.weighs  # no session yet
    client.put_chunks([Chunk(keys_of(client, 1, 1)[0], numbers(), importance=weights())])
    assert client.weighs is is_told
    assert bool(server.node.store.models.weights_bytes) is is_told


@pytest.mark.parametrize(
    "wrong",
    [
        np.ones(TOKENS - 1, np.float32),
        np.ones(TOKENS, np.float64),
        np.full(TOKENS, np.nan, np.float32),
        np.full(TOKENS, -1, np.float32),
    ],
    ids=["short", "double", "nan", "negative"],
)
def test_importance_that_is_not_the_chunks_is_refused_before_anything_is_sent(
    make_server: ServerMaker, wrong: np.ndarray
) -> None:
    server = make_server()
    options = ClientOptions("shm", chunk_tokens=TOKENS)
    client = server.connect(representation=MEDIUM, options=options)
    key = keys_of(client, 1, 1)[0]
    with pytest.raises(InvalidRequestError, match="importance"):
        client.put_chunks([Chunk(key, numbers(), importance=wrong)])
    assert client.lookup(keys=[key]).ready == 0


@pytest.mark.parametrize(
    "weights", [[], [b""], [b"1", b"2"], [bytes(8193)]], ids=["none", "empty", "more", "long"]
)
def test_weights_that_cannot_be_are_refused_by_name(
    make_server: ServerMaker, weights: list[bytes]
) -> None:
    client: Client = make_server().connect("grpc")
    key = keys_of(client, 1, 1)[0]
    with pytest.raises(InvalidRequestError, match="weights"):
        client._link.ask("Weigh", pb.WeighRequest(weights=weights), [key], pb.WeighResponse)


def test_no_more_is_kept_than_the_limit_and_the_oldest_goes() -> None:
    table = KnownModels(3 * (OVERHEAD_BYTES + 10))
    keys = [ChunkKey(bytes([i]) * 32) for i in range(5)]
    for key in keys:
        table.note_importance(key, bytes(10))
        table.note_importance(key, bytes(10))
    assert table.weights_bytes == 3 * (OVERHEAD_BYTES + 10)
    assert set(table._weights) == set(keys[2:])
