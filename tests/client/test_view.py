"""Leased chunks seen where they lie in the server's memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.prompts import SMALL, chunks_of, keys_of, store

from kvstore.client import Chunk, Client, ClientOptions
from kvstore.client.view import ChunkView, geometry_of, view_at
from kvstore.codecs.base import empty_tensors
from kvstore.codecs.raw import RawCodec
from kvstore.proto.errors import ChunkCorruptError, LeaseExpiredError
from kvstore.proto.frame import FrameTemplate, check_frame, raw_frame_bytes
from kvstore.proto.types import ROOT, ChainDigest, ChunkKey, KVLayout, PutOutcome
from kvstore.proto.unix_socket import Place, Reach


@pytest.fixture
def client(server: LocalServer) -> Client:
    return server.connect("shm")


def views(client: Client, keys: list[ChunkKey]) -> list[ChunkView]:
    lease = client.lease(keys=keys)
    found = [lease.view(index) for index in range(len(lease.keys))]
    assert all(view is not None for view in found)
    return [view for view in found if view is not None]


def test_views_show_what_was_put_without_a_copy(client: Client) -> None:
    keys = keys_of(client, 1, 3)
    chunks = chunks_of(client, keys)
    client.put_chunks(chunks)
    for view, chunk in zip(views(client, keys), chunks, strict=True):
        assert view.key == chunk.key
        for component, layers in enumerate(chunk.tensors):
            for index, parts in enumerate(layers):
                wanted = np.stack([np.asarray(part) for part in parts])
                shown = view.layer(index, component)
                assert not shown.flags.owndata
                assert np.array_equal(shown, wanted.view(shown.dtype))
        assert view.verify().key == chunk.key


def test_views_cannot_be_written_to(client: Client) -> None:
    (view, *_) = views(client, store(client, 1, 2))
    with pytest.raises(ValueError, match="read-only"):
        view.layer(0)[...] = 0
    with pytest.raises(ValueError, match="read-only"):
        view.frame[0] = 0


@pytest.mark.filterwarnings("error")
def test_torch_sees_the_same_memory_as_bfloat16(client: Client) -> None:
    (view,) = views(client, store(client, 1, 1))
    tensor = view.torch_layer(1)
    assert tensor.dtype is torch.bfloat16
    layer = view.layer(1)
    assert tensor.data_ptr() == layer.ctypes.data
    assert tensor.shape == layer.shape
    assert np.array_equal(tensor.view(torch.int16).numpy(), layer.view(np.int16))


def test_the_shorter_last_chunk_of_a_prompt_is_seen_too(server: LocalServer) -> None:
    client = server.connect(options=ClientOptions("shm", 32, DEADLINE_MS))
    keys = client.keys(list(range(32 + 17)))
    assert len(keys) == 2
    tensors = []
    for tokens in (32, 17):
        tensors.append(empty_tensors(KVLayout.of(SMALL, tokens)))
        for part in (part for parts in tensors[-1][0] for part in parts):
            part[...] = np.arange(part.size).reshape(part.shape) + tokens
    chunks = [Chunk(keys[0], tensors[0])]
    chunks.append(Chunk(keys[1], tensors[1], parent=ChainDigest(keys[0][16:])))
    assert [put.outcome for put in client.put_chunks(chunks)] == [PutOutcome.stored] * 2
    whole, last = views(client, keys)
    assert (whole.layout.tokens, last.layout.tokens) == (32, 17)
    assert np.array_equal(last.layer(1)[1], tensors[1][0][1][1])


def test_a_chunk_that_is_not_in_memory_has_no_view_and_can_be_got(
    server: LocalServer, client: Client
) -> None:
    keys = store(client, 1, 2)
    server.settled()
    moves = server.node.store.moves
    assert server.node.store.catalog.cast_out("cpu", keys[0])
    moves.eviction.delete_from(moves.tiers.cpu, keys[0])
    with client.lease(keys=keys) as lease:
        assert lease.match.tiers == ("disk", "cpu")
        assert lease.view(0) is None
        assert lease.view(1) is not None
        assert len(lease.get()) == 2


def test_over_grpc_no_chunk_has_a_view(server: LocalServer) -> None:
    client = server.connect("grpc")
    with client.lease(keys=store(client, 1, 1)) as lease:
        assert lease.view(0) is None


def test_a_released_lease_gives_no_views(client: Client) -> None:
    keys = store(client, 1, 1)
    lease = client.lease(keys=keys)
    lease.release()
    with pytest.raises(LeaseExpiredError, match="released; lease again"):
        lease.view(0)


def test_memory_that_was_reused_is_noticed(server: LocalServer, client: Client) -> None:
    keys = store(client, 1, 1)
    (view,) = views(client, keys)
    view.confirm()
    assert server.node.store.tiers.cpu_tier.delete(keys[0])
    with pytest.raises(LeaseExpiredError, match="replaced while it was read"):
        view.confirm()
    with pytest.raises(LeaseExpiredError):
        view.verify()


def test_a_place_that_holds_another_chunk_is_refused(client: Client) -> None:
    keys = store(client, 1, 2)
    first, second = views(client, keys)
    place = Place(1, Reach.memory, 0, second._start, len(second.frame), second._generation)
    with pytest.raises(ChunkCorruptError, match="its place holds another chunk"):
        view_at(keys[0], place, second._slab, geometry_of(first.layout))


@pytest.mark.parametrize("tokens", [16, 17, 256])
def test_the_layout_alone_says_where_a_raw_frame_has_its_tensors(tokens: int) -> None:
    layout = KVLayout.of(SMALL, tokens)
    frame = np.zeros(raw_frame_bytes(layout), np.uint8)
    template = FrameTemplate(ChunkKey(bytes(32)), ROOT, bytes(32), bytes(16), layout)
    RawCodec().encode(template, empty_tensors(layout), frame)
    header = check_frame(frame)
    (layers,) = geometry_of(layout).components
    assert list(layers.starts) == header.segments["offset"].tolist()
    assert geometry_of(layout).frame_bytes == len(frame)
