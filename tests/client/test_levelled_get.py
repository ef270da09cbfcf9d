"""Gets at the levels that a deadline leaves time for, from a real server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from contracts.lossy_codec import compile_all
from local_server import DEADLINE_MS, LocalServer, eventually
from prompts import MEDIUM, equal, keys_of, parts_of

from kvstore.client import Chunk, Client, ClientOptions
from kvstore.client.client import parents
from kvstore.client.levels import RECOMPUTE, PlanTerms
from kvstore.client.prefill import PrefillModel
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.proto.types import ChunkKey, Fidelity, KVLayout, PutOutcome

ServerMaker = Callable[..., LocalServer]
CHUNKS = 4
TOKENS = 64
TOP = 2
"""The finest level of kvq:layered."""
SLOW_ENGINE = PrefillModel(0.0, 10.0)
TERMS = PlanTerms(
    deadline_s=20.0, prefill=SLOW_ENGINE, decode_bytes_per_s=1e9, least=Fidelity.bounded
)


def numbers_of(key: ChunkKey) -> ChunkTensors:
    """Return tensors like those of a model: each channel about a mean of its own."""
    out = empty_tensors(KVLayout.of(MEDIUM, TOKENS))
    draw = np.random.default_rng(int.from_bytes(key[-8:], "little"))
    for part in parts_of(out):
        heads, _, channels = part.shape
        mean = draw.normal(0, 3, (heads, 1, channels))
        values = (mean + draw.normal(0, 1, part.shape)).astype(np.float32)
        part[...] = values.view(np.uint32) >> 16
    return out


def floats(tensors: ChunkTensors) -> list[np.ndarray]:
    return [(p.astype(np.uint32) << 16).view(np.float32) for p in parts_of(tensors)]


def largest_error(one: ChunkTensors, other: ChunkTensors) -> float:
    pairs = zip(floats(one), floats(other), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Wait here for kvq's loops, once, and not in a server with a deadline."""
    compile_all()


@pytest.fixture
def server(make_server: ServerMaker) -> LocalServer:
    return make_server("--disk-codec", "kvq:layered")


@pytest.fixture(params=["shm", "grpc"])
def client(server: LocalServer, request: pytest.FixtureRequest) -> Client:
    options = ClientOptions(request.param, chunk_tokens=TOKENS, deadline_ms=DEADLINE_MS)
    return server.connect(representation=MEDIUM, options=options)


@pytest.fixture
def keys(server: LocalServer, client: Client) -> list[ChunkKey]:
    """A prompt of which only the layered copies on disk are left."""
    keys = keys_of(client, 1, CHUNKS)
    chunks = [
        Chunk(key, numbers_of(key), parent, position=TOKENS * at)
        for at, (key, parent) in enumerate(zip(keys, parents(keys), strict=True))
    ]
    assert {put.outcome for put in client.put(chunks)} == {PutOutcome.stored}
    catalog, transfers = server.node.manager.catalog, server.node.manager.transfers
    assert eventually(lambda: catalog.count_on("disk") == CHUNKS)
    server.settled()
    for key in keys:
        assert catalog.cast_out("cpu", key)
        transfers.delete_from(transfers.cpu, key)
    return keys


def rooms(count: int) -> list[ChunkTensors]:
    return [empty_tensors(KVLayout.of(MEDIUM, TOKENS)) for _ in range(count)]


def set_link(client: Client, bytes_per_s: float) -> None:
    """Make the client think that its link gives so much."""
    for _ in range(40):
        client._link.observe(int(bytes_per_s), 1.0)


def test_with_time_enough_every_chunk_comes_at_its_finest_level(
    client: Client, keys: list[ChunkKey]
) -> None:
    out = rooms(CHUNKS)
    found = client.get_levelled(keys, TERMS, out)
    assert found.levels == (TOP,) * CHUNKS
    assert found.fidelity == (Fidelity.bounded,) * CHUNKS
    assert found.to_compute == ()
    whole = client.get(keys, min_fidelity=Fidelity.bounded)
    assert all(map(equal, out, whole))


def test_a_slow_link_brings_bases_and_those_are_coarser(
    client: Client, keys: list[ChunkKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = client._connected().session.connection
    stream = connection.stream

    def throttled(method: str, request: pb.GetRequest, deadline_ms: int):  # type: ignore[no-untyped-def]
        for reply in stream(method, request, deadline_ms):
            time.sleep(len(reply.part.data) / 250e3)
            yield reply

    monkeypatch.setattr(connection, "stream", throttled)
    set_link(client, 250e3)
    out, fine = rooms(CHUNKS), rooms(CHUNKS)
    found = client.get_levelled(keys, replace(TERMS, deadline_s=1.0), out)
    assert 0 in found.levels
    assert set(found.levels) <= {0, 1, 2}
    monkeypatch.undo()
    set_link(client, 1e9)
    client.get_levelled(keys, TERMS, fine)
    errors = [largest_error(a, numbers_of(k)) for a, k in zip(out, keys, strict=True)]
    finest = [largest_error(a, numbers_of(k)) for a, k in zip(fine, keys, strict=True)]
    for level, coarse, best in zip(found.levels, errors, finest, strict=True):
        assert coarse <= best * 3 ** (TOP - level) * 1.2
        assert level == TOP or coarse > best


def test_over_a_link_that_gives_nothing_the_engine_computes(
    server: LocalServer, client: Client, keys: list[ChunkKey]
) -> None:
    set_link(client, 10.0)
    told: list[list[int]] = []
    quick = replace(TERMS, prefill=PrefillModel(0.0, 1e-6), deadline_s=1.0)
    found = client.get_levelled(keys, quick, rooms(CHUNKS), lambda at: told.append(list(at)))
    assert told == [[0, 1, 2, 3]]
    assert found.levels == (RECOMPUTE,) * CHUNKS
    assert found.to_compute == (0, 1, 2, 3)
    assert server.usage().leases == 0


def test_exact_chunks_in_memory_come_whole(client: Client, server: LocalServer) -> None:
    keys = keys_of(client, 2, 2)
    chunks = [Chunk(k, numbers_of(k), p) for k, p in zip(keys, parents(keys), strict=True)]
    client.put(chunks)
    out = rooms(2)
    found = client.get_levelled(keys, replace(TERMS, least=Fidelity.exact), out)
    assert found.levels == (0, 0)
    assert found.fidelity == (Fidelity.exact,) * 2
    assert all(equal(one, numbers_of(key)) for one, key in zip(out, keys, strict=True))


def test_what_is_not_stored_is_to_be_computed(client: Client, keys: list[ChunkKey]) -> None:
    longer = keys_of(client, 1, CHUNKS + 2)
    assert longer[:CHUNKS] == keys
    quick = replace(TERMS, prefill=PrefillModel(0.0, 1e-6))
    found = client.get_levelled(longer, quick, rooms(CHUNKS + 2))
    assert found.levels == (TOP,) * CHUNKS + (RECOMPUTE,) * 2
    assert client.get_levelled([], TERMS).levels == ()


def test_a_store_that_fails_halfway_leaves_the_rest_to_the_engine(
    client: Client, keys: list[ChunkKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = client._connected().session.connection
    stream, calls = connection.stream, []

    def failing(method: str, request: pb.GetRequest, deadline_ms: int):  # type: ignore[no-untyped-def]
        calls.append(request)
        if len(calls) > 2:
            raise TierUnavailableError("server", "gone")
        yield from stream(method, request, deadline_ms)

    monkeypatch.setattr(connection, "stream", failing)
    set_link(client, 256 << 10)
    out = rooms(CHUNKS)
    found = client.get_levelled(keys, TERMS, out)
    assert len(calls) == 3
    assert 0 < len(found.to_compute) < CHUNKS
    for at, level in enumerate(found.levels):
        if level != RECOMPUTE:
            assert largest_error(out[at], numbers_of(keys[at])) < 2


def test_bytes_that_were_changed_on_the_way_are_not_used(
    client: Client, keys: list[ChunkKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = client._connected().session.connection
    stream = connection.stream

    def changing(method: str, request: pb.GetRequest, deadline_ms: int):  # type: ignore[no-untyped-def]
        for reply in stream(method, request, deadline_ms):
            if reply.index == 1 and reply.part.offset:
                reply.part.data = reply.part.data[:-1] + bytes([reply.part.data[-1] ^ 1])
            yield reply

    monkeypatch.setattr(connection, "stream", changing)
    found = client.get_levelled(keys, TERMS, rooms(CHUNKS))
    assert found.levels == (TOP, RECOMPUTE, TOP, TOP)
    monkeypatch.undo()
    assert client.lookup(keys, min_fidelity=Fidelity.bounded).ready == 1, "not quarantined"


@pytest.mark.parametrize("ranges", [[(4, 0, 8)], [(0, 8, 8)], [(0, 9, 8)]])
def test_ranges_that_cannot_be_are_refused_by_name(
    client: Client, keys: list[ChunkKey], ranges: Sequence[tuple[int, int, int]]
) -> None:
    session = client._connected().session
    request = pb.GetRequest(
        session_id=session.terms.session_id,
        digests=client._digests(keys),
        ranges=[pb.FrameRange(index=i, start=a, stop=b) for i, a, b in ranges],
    )
    with pytest.raises(InvalidRequestError, match="ranges"):
        list(session.connection.stream("Get", request, 1000))
