"""Leased chunks seen where they lie in the server's memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.local_server import LocalServer
from helpers.prompts import SMALL, chunks_of, keys_of, store

from kvstore.client import Client
from kvstore.client.view import ChunkView, LeasedViews, SlabMap, geometry_of
from kvstore.codecs.base import empty_tensors
from kvstore.codecs.raw import RawCodec
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.frame import FrameTemplate, check_frame, raw_frame_bytes
from kvstore.proto.types import ROOT, ChunkKey, KVLayout
from kvstore.proto.unix_socket import NOWHERE, Place, Reach, pack_places


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


def test_a_chunk_that_is_not_in_memory_has_no_view_and_can_be_got(
    server: LocalServer, client: Client
) -> None:
    keys = store(client, 1, 2)
    server.settled()
    server.leave_memory(keys[:1])
    with client.lease(keys=keys) as lease:
        assert lease.match.tiers == ("disk", "cpu")
        assert lease.view(0) is None
        assert lease.view(1) is not None
        assert len(lease.get()) == 2


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


def test_the_layout_alone_says_where_a_raw_frame_has_its_tensors() -> None:
    for tokens in (16, 17, 256):
        layout = KVLayout.of(SMALL, tokens)
        frame = np.zeros(raw_frame_bytes(layout), np.uint8)
        template = FrameTemplate(ChunkKey(bytes(32)), ROOT, bytes(32), bytes(16), layout)
        RawCodec().encode(template, empty_tensors(layout), frame)
        header = check_frame(frame)
        (layers,) = geometry_of(layout).components
        assert list(layers.starts) == header.segments["offset"].tolist()
        assert geometry_of(layout).frame_bytes == len(frame)


WHOLE, SHORT = KVLayout.of(SMALL, 32), KVLayout.of(SMALL, 17)
KEYS = [ChunkKey(bytes([n]) * 32) for n in range(1, 6)]
SLAB, GONE = 3, 4
STEP = 2 * geometry_of(WHOLE).frame_bytes // 64 * 64


class Slabs:
    """One slab with a frame every STEP bytes, the last of them SHORT; another that is not given."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, STEP * (len(KEYS) + 1))
        data = np.frombuffer(memory, np.uint8)
        self.places = []
        for at, key in enumerate(KEYS):
            layout = SHORT if key == KEYS[-1] else WHOLE
            size, start = geometry_of(layout).frame_bytes, 64 + at * STEP
            template = FrameTemplate(key, ROOT, bytes(32), bytes(16), layout)
            tensors = empty_tensors(layout)
            for part in (part for parts in tensors[0] for part in parts):
                part[...] = at
            RawCodec().encode(template, tensors, data[start : start + size])
            data[start - 8 : start].view(np.uint64)[0] = 100 + at
            self.places.append(Place(SLAB, Reach.memory, 0, start, size, 100 + at))
        self.data = data
        self._map = SlabMap(memory)

    def slab(self, number: int) -> SlabMap:
        """Return the slab."""
        if number != SLAB:
            raise TierUnavailableError("shm", f"slab {number}: unknown")
        return self._map


def views_of(slabs: Slabs, places: list[Place]) -> LeasedViews:
    stand_in: object = slabs
    return LeasedViews(stand_in, geometry_of(WHOLE), pack_places(places), KEYS)  # type: ignore[arg-type]


def test_all_chunks_are_seen_the_shorter_last_one_too() -> None:
    slabs = Slabs()
    see = views_of(slabs, slabs.places)
    for at, key in enumerate(KEYS):
        view = see(at)
        assert view is not None
        assert (view.key, int(view.layer(1)[1, 0, 0, 0])) == (key, at)
        assert view.verify().key == key
    last = see(-1)
    assert last is not None
    assert last.layout.tokens == 17


WRONG: list[tuple[Callable[[Place], Place], type[KVStoreError]]] = [
    (lambda p: p._replace(generation=1), LeaseExpiredError),
    (
        lambda p: p._replace(offset=p.offset + STEP, generation=p.generation + 1),
        ChunkCorruptError,
    ),
    (lambda p: p._replace(offset=p.offset + 4), InvalidRequestError),
    (lambda p: p._replace(offset=0), InvalidRequestError),
    (lambda p: p._replace(offset=1 << 40), InvalidRequestError),
    (lambda p: p._replace(offset=2**64 - 8), InvalidRequestError),
    (lambda p: p._replace(size_bytes=p.size_bytes - 64), ChunkCorruptError),
    (lambda p: p._replace(number=GONE), TierUnavailableError),
]
"""An older generation, another chunk's place, off the words, the slab's start, behind it, 2^64,
another size, a slab that is gone."""


def test_what_is_wrong_with_one_place_is_told_of_that_chunk_alone() -> None:
    for change, error in WRONG:
        slabs = Slabs()
        places = list(slabs.places)
        places[1] = change(places[1])
        see = views_of(slabs, places)
        for at in (0, 2, 3, 4):
            view = see(at)
            assert view is not None
            assert int(view.layer(0)[0, 0, 0, 0]) == at
        with pytest.raises(error):
            see(1)


def test_chunks_elsewhere_or_without_a_place_have_no_view() -> None:
    slabs = Slabs()
    places = [NOWHERE, slabs.places[1], slabs.places[2]._replace(reach=Reach.file)]
    see = views_of(slabs, places)
    assert [see(at) is None for at in range(len(KEYS))] == [True, False, True, True, True]


def test_memory_that_is_reused_between_two_looks_is_noticed() -> None:
    slabs = Slabs()
    see = views_of(slabs, slabs.places)
    assert see(0) is not None
    start = slabs.places[2].offset
    slabs.data[start - 8 : start].view(np.uint64)[0] += 1
    with pytest.raises(LeaseExpiredError):
        see(2)
    assert see(3) is not None


def test_rows_that_are_cut_are_refused() -> None:
    slabs = Slabs()
    stand_in: object = slabs
    rows = pack_places(slabs.places)[:-1]
    with pytest.raises(InvalidRequestError, match="send rows of 32 bytes"):
        LeasedViews(stand_in, geometry_of(WHOLE), rows, KEYS)  # type: ignore[arg-type]
