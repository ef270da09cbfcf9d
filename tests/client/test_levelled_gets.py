"""Gets at the levels that a deadline leaves time for, from a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import ServerMaker
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import MEDIUM, chunks_of, equal, keys_of, outcomes, parts_of, steady_tensors

from kvstore.client import Chunk, Client, ClientOptions
from kvstore.client.chunk import parents
from kvstore.client.deadline import LevelledGet
from kvstore.client.frames import Arrival
from kvstore.client.options import TransportName
from kvstore.client.planning import RECOMPUTE, PlanTerms, PrefillModel
from kvstore.client.transports.base import Arrivals, ReadPlan
from kvstore.codecs.base import ChunkTensors, empty_tensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    LayoutMismatchError,
    TierUnavailableError,
)
from kvstore.proto.types import (
    DIGEST_BYTES,
    EXACT,
    Accuracy,
    ChunkKey,
    KVLayout,
    PutOutcome,
    Stated,
)

CHUNKS = 4
TOKENS = 64
TOP = 2
"""The finest level of kvq:layered."""
TERMS = PlanTerms(deadline_s=20.0, decode_bytes_per_s=1e9, least=Accuracy.bounded)


def numbers_of(key: ChunkKey) -> ChunkTensors:
    return steady_tensors(key, MEDIUM, TOKENS)


def floats(tensors: ChunkTensors) -> list[np.ndarray]:
    return [(p.astype(np.uint32) << 16).view(np.float32) for p in parts_of(tensors)]


def largest_error(one: ChunkTensors, other: ChunkTensors) -> float:
    pairs = zip(floats(one), floats(other), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


@pytest.fixture
def server(make_server: ServerMaker) -> LocalServer:
    return make_server("--codec", "disk=kvq:layered", "--bulk", "127.0.0.1:0")


EVERY = pytest.mark.parametrize("client", ["shm", "tcp", "grpc"], indirect=True)
"""Over every transport."""


@pytest.fixture
def client(server: LocalServer, request: pytest.FixtureRequest) -> Client:
    transport: TransportName = getattr(request, "param", "tcp")
    options = ClientOptions(transport, chunk_tokens=TOKENS, deadline_ms=DEADLINE_MS)
    return server.connect(representation=MEDIUM, options=options)


@pytest.fixture
def keys(server: LocalServer, client: Client) -> list[ChunkKey]:
    """A prompt of which only the layered copies on disk are left."""
    keys = keys_of(client, 1, CHUNKS)
    chunks = [replace(chunk, tensors=numbers_of(chunk.key)) for chunk in chunks_of(client, keys)]
    assert set(outcomes(client, chunks)) == {PutOutcome.stored}
    assert eventually(lambda: server.node.store.catalog.eviction.count_on("disk") == CHUNKS)
    server.settled()
    server.leave_memory(keys)
    return keys


def rooms(count: int) -> list[ChunkTensors]:
    return [empty_tensors(KVLayout.of(MEDIUM, TOKENS)) for _ in range(count)]


def set_link(client: Client, bytes_per_s: float) -> None:
    """Make the client think that its link gives so much."""
    for _ in range(40):
        client._link.meters.link.observe(int(bytes_per_s), 1.0)


def change_pieces(
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Iterator[Arrival]], Iterator[Arrival]],
) -> None:
    """Have *change* between the transport and what reads pieces of frames from it."""
    transport = client._link.connected()
    plain = transport.read

    @contextmanager
    def changed(plan: ReadPlan) -> Iterator[Arrivals]:
        with plain(plan) as pieces:
            yield Arrivals(change(pieces.frames))

    monkeypatch.setattr(transport, "read", changed)


@EVERY
def test_with_time_enough_every_chunk_comes_at_its_finest_level(
    client: Client, keys: list[ChunkKey]
) -> None:
    out = rooms(CHUNKS)
    found = client.get_levelled(keys, TERMS, out)
    assert found.levels == (TOP,) * CHUNKS
    assert found.stated == (Stated(Accuracy.bounded),) * CHUNKS
    assert found.to_compute == ()
    whole = client.get_chunks(keys, accuracy=Accuracy.bounded)
    assert all(map(equal, out, whole))
    # Before an engine that takes an hour, loads wait no longer than a server grants.
    slow = replace(TERMS, prefill=PrefillModel(0.0, 10.0), deadline_s=1e4)
    assert client.get_levelled(keys, slow, rooms(CHUNKS)).levels == (TOP,) * CHUNKS


def test_a_slow_link_brings_bases_and_those_are_coarser(
    client: Client, keys: list[ChunkKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0  # only the link takes time, whatever the machine does

    def throttled(pieces: Iterator[Arrival]) -> Iterator[Arrival]:
        nonlocal now_s
        for piece in pieces:
            now_s += len(piece.data) / 250e3
            yield piece

    change_pieces(client, monkeypatch, throttled)
    monkeypatch.setattr(client._link, "meters", replace(client._link.meters, clock=lambda: now_s))
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


@EVERY
def test_exact_chunks_in_memory_come_whole(client: Client, server: LocalServer) -> None:
    keys = keys_of(client, 2, 2)
    chunks = [Chunk(k, numbers_of(k), parent=p) for k, p in zip(keys, parents(keys), strict=True)]
    client.put_chunks(chunks)
    out = rooms(2)
    found = client.get_levelled(keys, replace(TERMS, least=Accuracy.exact), out)
    assert found.levels == (0, 0)
    assert found.stated == (EXACT,) * 2
    assert all(equal(one, numbers_of(key)) for one, key in zip(out, keys, strict=True))


def test_what_is_not_stored_or_not_exact_is_to_be_computed_and_so_is_all_without_a_server(
    server: LocalServer, client: Client, keys: list[ChunkKey]
) -> None:
    longer = keys_of(client, 1, CHUNKS + 2)
    assert longer[:CHUNKS] == keys
    found = client.get_levelled(longer, TERMS, rooms(CHUNKS + 2))
    assert found.levels == (TOP,) * CHUNKS + (RECOMPUTE,) * 2
    assert client.get_levelled([], TERMS).levels == ()
    with pytest.raises(InvalidRequestError, match="not in this client's namespace"):
        client.get_levelled([ChunkKey(bytes(32))], TERMS)
    exact = replace(TERMS, least=Accuracy.exact)
    assert client.get_levelled(keys, exact).to_compute == (0, 1, 2, 3)
    server.stop()
    assert client.get_levelled(keys, TERMS).to_compute == (0, 1, 2, 3)


def test_a_store_that_fails_halfway_leaves_the_rest_to_the_engine(
    client: Client, keys: list[ChunkKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def failing(pieces: Iterator[Arrival]) -> Iterator[Arrival]:
        calls.append(1)
        if len(calls) > 2:
            raise TierUnavailableError("server", "gone")
        yield from pieces

    change_pieces(client, monkeypatch, failing)
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
    def changing(pieces: Iterator[Arrival]) -> Iterator[Arrival]:
        for piece in pieces:
            if piece.index == 1 and piece.offset:
                data = np.array(piece.data)
                data[-1] ^= 1
                piece = replace(piece, data=data)
            yield piece

    change_pieces(client, monkeypatch, changing)
    found = client.get_levelled(keys, TERMS, rooms(CHUNKS))
    assert found.levels == (TOP, RECOMPUTE, TOP, TOP)
    monkeypatch.undo()
    ready = client.lookup(keys=keys, accuracy=Accuracy.bounded).ready
    assert ready == CHUNKS, "the server finds its own copies right"


@EVERY
def test_only_the_bytes_that_are_asked_for_are_read_and_sent(
    server: LocalServer, client: Client, keys: list[ChunkKey]
) -> None:
    """Whatever the transport: in place where the reader has the file, else over its channel."""
    transport = client._link.connected()
    digests = b"".join(key[DIGEST_BYTES:] for key in keys)
    spans = [(0, 0, 192), (1, 64, 640), (1, 640, 1000), (3, 1 << 30, 1 << 31)]
    asked = [pb.FrameRange(index=i, start=a, stop=b) for i, a, b in spans]
    before = server.counter("get_bytes")
    plan = ReadPlan(digests, 0, DEADLINE_MS, Accuracy.bounded, ranges=asked)
    with transport.read(plan) as pieces:
        found = [
            (p.index, p.tier, p.offset, np.array(p.data), p.frame_bytes) for p in pieces.frames
        ]
    disk = server.node.store.tiers.slots["disk"].tier
    came = [(index, offset, offset + len(data)) for index, _, offset, data, _ in found]
    assert came == spans[:3]
    for index, tier, offset, data, frame_bytes in found:
        info = server.node.store.catalog.copies(keys[index])["disk"]
        whole = np.empty(info.size_bytes, np.uint8)
        assert disk.read(keys[index], whole)
        assert (tier, frame_bytes) == ("disk", len(whole))
        assert (data == whole[offset : offset + len(data)]).all()
    sent = server.counter("get_bytes") - before
    assert sent == (0 if client.transport_name == "shm" else 192 + 936)
    server.settled()


def test_what_the_room_raises_ends_the_get_and_its_leases(
    server: LocalServer, client: Client, keys: list[ChunkKey]
) -> None:
    def full(index: int, _: KVLayout) -> ChunkTensors:
        raise MemoryError(index)

    with pytest.raises(MemoryError):
        client.get_levelled(keys, TERMS, full)
    with pytest.raises(LayoutMismatchError):
        client.get_levelled(keys, TERMS, [[[]]] * CHUNKS)
    out = rooms(CHUNKS)
    out[2][0][0][0].flags.writeable = False
    with pytest.raises(InvalidRequestError, match="out='read-only'"):
        client.get_levelled(keys, TERMS, out)
    assert server.settled().leases == 0
    assert client.lookup(keys=keys, accuracy=Accuracy.bounded).ready == CHUNKS


def test_a_level_that_a_finer_one_has_overtaken_is_not_decoded_and_what_waits_counts_as_undecoded(
    client: Client, keys: list[ChunkKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, held = client._link.reader, threading.Event()
    placed, undecoded = list[int](), list[int]()
    busy = [reader.submit(held.wait, 20.0) for _ in range(reader.threads)]
    finish = LevelledGet._finish

    def released(get: LevelledGet) -> None:
        undecoded.append(get._progress().undecoded_bytes)
        held.set()
        finish(get)

    def room(index: int, layout: KVLayout) -> ChunkTensors:
        placed.append(index)
        return empty_tensors(layout)

    monkeypatch.setattr(LevelledGet, "_finish", released)
    set_link(client, 1e5)  # the plan begins with the coarsest level
    terms = replace(TERMS, deadline_s=1.0, prefill=PrefillModel(0.0, 0.01))
    assert client.get_levelled(keys, terms, room).levels == (TOP,) * CHUNKS
    assert sorted(placed) == list(range(CHUNKS))
    assert undecoded == [CHUNKS * KVLayout.of(MEDIUM, TOKENS).raw_bytes], "as nothing was, yet"
    assert all(one.result() for one in busy)


@pytest.mark.parametrize("beside", [False, True])
def test_nothing_writes_to_the_room_of_a_get_that_is_over(
    client: Client, keys: list[ChunkKey], monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    writing: list[str] = []
    submitted: list[Any] = []
    has_begun = threading.Event()
    reader = client._link.reader
    submit = reader.submit

    def closed_halfway(*work: Any) -> Any:
        if submitted and not beside:
            assert has_begun.wait(60.0)
            raise KVStoreError("the client is closed")
        submitted.append(work)
        return submit(*work)

    def slow(_: int, layout: KVLayout) -> ChunkTensors:
        writing.append("begun")
        has_begun.set()
        time.sleep(0.2)
        writing.append("done")
        return empty_tensors(layout)

    def compute(_: range) -> None:
        assert has_begun.wait(60.0)
        raise ZeroDivisionError

    monkeypatch.setattr(reader, "submit", closed_halfway)
    if beside:
        set_link(client, 100e3)
        terms = replace(TERMS, prefill=PrefillModel(0.0, 0.004))
        with pytest.raises(ZeroDivisionError):
            client.get_levelled(keys, terms, slow, compute)
    else:
        client.get_levelled(keys, TERMS, slow)
    assert writing.count("done") == writing.count("begun") > 0


def test_what_a_get_leaves_to_be_done_holds_nobody_up(
    server: LocalServer, client: Client, keys: list[ChunkKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases end, and what proved wrong is reported, after it returned and by no copy thread."""
    transport, link, is_free = client._link.connected(), client._link, threading.Event()
    caller = threading.current_thread()
    ended: list[str] = []
    release = transport.release

    def slow(*leases: Any) -> None:
        if threading.current_thread() is not caller:
            is_free.wait(60.0)
            ended.append("release")
        release(*leases)

    def report(*_: Any) -> None:
        ended.append("report")

    def changing(pieces: Iterator[Arrival]) -> Iterator[Arrival]:
        for piece in pieces:
            yield replace(piece, data=np.array(piece.data) ^ np.uint8(piece.offset > 0))

    monkeypatch.setattr(transport, "release", slow)
    monkeypatch.setattr(link, "quarantine", report)
    with monkeypatch.context() as patched:
        change_pieces(client, patched, changing)
        for _ in range(link.reader.threads):
            assert client.get_levelled(keys, TERMS, rooms(CHUNKS)).to_compute == (0, 1, 2, 3)
    layers = list(client.get_chunk_layers(keys, accuracy=Accuracy.bounded))
    assert len(layers[-1].tensors) == CHUNKS
    assert ended == []
    is_free.set()
    assert eventually(lambda: ended.count("report") == CHUNKS * link.reader.threads)
    server.settled()
