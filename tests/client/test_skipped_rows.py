"""Rows that a reader leaves out, over every transport: what comes is right, the rest stays away."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from contracts.layers import damage
from helpers.documents import DOCUMENT, HEAD, OTHER, OTHER_HEAD, TRIAL, prompt_of, put_prompt
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.prompts import MEDIUM, tensors_of
from typing_extensions import override

from kvstore.client import Client, ClientOptions
from kvstore.client.decode import Layer
from kvstore.client.options import TransportName
from kvstore.client.segments import FoundChunk, SegmentMatch
from kvstore.client.transports.base import Outgoing, PutTerms, ReadPlan, read_layers
from kvstore.codecs.base import ChunkTensors, codec_by_name, empty_tensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.frame import FrameTemplate
from kvstore.proto.keys import representation_digest
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import ChunkKey, KVLayout, Model, PutOutcome

ServerMaker = Callable[..., LocalServer]
EVERY = pytest.mark.parametrize("client", ["shm", "grpc", "tcp"], indirect=True)
"""Over every transport."""
RUBBISH = 0xBEEF
SKIPPED = SkippedRows.of({0: [1, 2, 3], 1: range(16), 3: [0, 15]})
"""Of four chunks: some rows, all, none and two."""


@pytest.fixture
def server(make_server: ServerMaker) -> LocalServer:
    return make_server("--bulk", "127.0.0.1:0")


@pytest.fixture
def client(server: LocalServer, request: pytest.FixtureRequest) -> Client:
    name: TransportName = getattr(request, "param", "tcp")
    options = ClientOptions(name, chunk_tokens=16, deadline_ms=DEADLINE_MS)
    client = server.connect(name, MEDIUM, options)
    assert client.transport_name == name
    return client


def _resolved(client: Client) -> SegmentMatch:
    put_prompt(client, *prompt_of(HEAD, DOCUMENT, OTHER))
    return client.find_segments(*prompt_of(OTHER_HEAD, DOCUMENT, OTHER), TRIAL)


def _rooms(chunks: Sequence[FoundChunk], model: Model) -> list[ChunkTensors]:
    rooms: list[ChunkTensors] = [
        empty_tensors(KVLayout.of(model, one.asked.tokens)) for one in chunks
    ]
    for room in rooms:
        for parts in room[0]:
            for part in parts:
                part[...] = RUBBISH
    return rooms


def _read(
    resolved: SegmentMatch, client: Client, skipped: SkippedRows | None
) -> tuple[list[FoundChunk], list[ChunkTensors], list[Layer]]:
    chunks = list(resolved.chunks())
    rooms = _rooms(chunks, client.model)
    return chunks, rooms, list(resolved.layers(chunks, rooms, skipped))


def _assert_right(
    client: Client, chunk: FoundChunk, room: ChunkTensors, kept: Sequence[int]
) -> None:
    """Fail unless *kept* rows are those that were put and the others as they were."""
    key = ChunkKey(client.namespace + chunk.best.digest)
    wanted = tensors_of(key, client.model, chunk.asked.tokens)
    others = [row for row in range(chunk.asked.tokens) if row not in kept]
    for layer, right in zip(room[0], wanted[0], strict=True):
        for part, values in zip(layer, right, strict=True):
            assert np.array_equal(part[:, kept], values[:, kept])
            assert (part[:, others] == RUBBISH).all()


@EVERY
def test_rows_that_are_left_out_stay_as_they_were_and_the_others_are_right(
    client: Client, server: LocalServer
) -> None:
    with _resolved(client) as resolved:
        chunks, rooms, layers = _read(resolved, client, SKIPPED)
        assert [one.asked.tokens for one in chunks] == [16, 24, 16, 16]
        assert [layer.id for layer in layers] == [0, 1, 2, 3]
        assert {len(layer.tensors) for layer in layers} == {4}
        for place, (chunk, room) in enumerate(zip(chunks, rooms, strict=True)):
            kept = SKIPPED.kept(place, chunk.asked.tokens)
            rows = range(chunk.asked.tokens) if kept is None else kept.tolist()
            _assert_right(client, chunk, room, list(rows))
    assert server.settled().leases == 0


@EVERY
def test_what_is_left_out_is_not_sent(client: Client, server: LocalServer) -> None:
    with _resolved(client) as resolved:
        before = server.counter("get_bytes")
        _read(resolved, client, None)
        whole = server.counter("get_bytes") - before
        _read(resolved, client, SKIPPED)
        cut = server.counter("get_bytes") - before - whole
    row_bytes = 4 * 2 * 4 * 64 * 2  # layers, parts, heads, their width, an item
    sums = 3 * 4 * 8
    saved = 0 if client.transport_name == "shm" else (3 + 16 + 2) * row_bytes - sums
    assert whole - cut == saved


class _Coded(Outgoing):
    """A chunk whose writer encodes it."""

    @property
    @override
    def frame_bytes(self) -> int:
        return len(self._frame())

    @override
    def encode(self, out: Bytes, flags: int = 0) -> None:
        out[:] = self._frame()

    def _frame(self) -> Bytes:
        codec = codec_by_name("lossless")
        room = np.empty(codec.max_frame_bytes(self.template.layout), np.uint8)
        return room[: codec.encode(self.template, self.tensors, room).frame_bytes]


@EVERY
def test_frames_that_cannot_be_cut_come_whole(client: Client, server: LocalServer) -> None:
    writer = server.connect("grpc", MEDIUM)
    prompt, ranges = prompt_of(HEAD, DOCUMENT)
    coded = [
        _Coded(
            FrameTemplate(
                key := ChunkKey(client.namespace + one.digest), one.parent,
                representation_digest(MEDIUM), one.content, KVLayout.of(MEDIUM, one.tokens),
                one.start,
            ),
            tensors_of(key, MEDIUM, one.tokens),
        )
        for segment in writer.name_segments(prompt, ranges)
        for one in segment.chunks
    ]  # fmt: skip
    puts = writer._link.connected().put(coded, PutTerms(False, DEADLINE_MS))
    assert {put.outcome for put in puts} == {PutOutcome.stored}
    with client.find_segments(*prompt_of(OTHER_HEAD, DOCUMENT), TRIAL) as resolved:
        skipped = SkippedRows.of({0: [1], 1: range(16)})
        chunks, rooms, layers = _read(resolved, client, skipped)
        assert [len(layer.tensors) for layer in layers] == [2] * 4
        for chunk, room in zip(chunks, rooms, strict=True):
            _assert_right(client, chunk, room, list(range(chunk.asked.tokens)))


@EVERY
def test_a_damaged_chunk_ends_the_prefix_and_is_dropped(
    client: Client, server: LocalServer
) -> None:
    """The damage is in a row that nobody wants: the layer proves wrong all the same."""
    with _resolved(client) as resolved:
        key = ChunkKey(client.namespace + list(resolved.chunks())[3].best.digest)
    damage(server, key)
    with _resolved(client) as resolved:
        chunks, rooms, layers = _read(resolved, client, SkippedRows.of({3: [15]}))
        counts = [len(layer.tensors) for layer in layers]
        assert set(counts) <= {3, 4}  # the layers behind it are on their way meanwhile
        assert counts[-1] == 3
        _assert_right(client, chunks[2], rooms[2], list(range(16)))
    if client.transport_name == "shm":  # found by the reader, who holds it: the next one drops it
        assert client.get_chunks([key]) == []
    assert client.lookup(keys=[key]).ready == 0


def test_rows_that_cannot_be_are_refused_by_name(server: LocalServer, client: Client) -> None:
    with _resolved(client) as resolved:
        digests = b"".join(chunk.best.digest for chunk in resolved.chunks())
    transport = client._link.connected()
    with server.unchanged():
        for data in (b"x", SkippedRows.of({4: [1]}).pack(), bytes(12)):
            request = transport.request(ReadPlan(digests, 0, DEADLINE_MS), pb.VIA_STREAM)
            request.layer_major, request.skip_rows = True, data
            with pytest.raises(InvalidRequestError, match="skip_rows="):
                list(transport.session.connection.stream("Get", request, DEADLINE_MS))
        request = transport.request(ReadPlan(digests, 0, DEADLINE_MS), pb.VIA_STREAM)
        request.skip_rows = SKIPPED.pack()
        with pytest.raises(InvalidRequestError, match="with layer_major only"):
            list(transport.session.connection.stream("Get", request, DEADLINE_MS))
        beyond = ReadPlan(digests, 0, DEADLINE_MS, skipped=SkippedRows.of({4: [1]}))
        with (
            pytest.raises(InvalidRequestError, match="skip_rows="),
            read_layers(transport, beyond) as arriving,
        ):
            list(arriving)
