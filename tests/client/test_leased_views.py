"""LeasedViews: places are checked all at once, and what does not hold is found one by one."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
import pytest
from helpers.prompts import SMALL

from kvstore.client.view import LeasedViews, SlabMap, geometry_of
from kvstore.codecs.base import empty_tensors
from kvstore.codecs.raw import RawCodec
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.frame import FrameTemplate
from kvstore.proto.types import ROOT, ChunkKey, KVLayout
from kvstore.proto.unix_socket import NOWHERE, Place, Reach, pack_places

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

    def reach(self, place: Place) -> SlabMap:
        """Return the slab that a place is in, checked."""
        slab = self.slab(place.number)
        slab.check(place)
        return slab


def views(slabs: Slabs, places: list[Place]) -> LeasedViews:
    stand_in: object = slabs
    return LeasedViews(stand_in, geometry_of(WHOLE), pack_places(places), KEYS)  # type: ignore[arg-type]


def test_all_chunks_are_seen_the_shorter_last_one_too() -> None:
    slabs = Slabs()
    see = views(slabs, slabs.places)
    for at, key in enumerate(KEYS):
        view = see(at)
        assert view is not None
        assert (view.key, int(view.layer(1)[1, 0, 0, 0])) == (key, at)
        assert view.verify().key == key
    last = see(-1)
    assert last is not None
    assert last.layout.tokens == 17


WRONG: dict[str, tuple[Callable[[Place], Place], type[KVStoreError]]] = {
    "an older generation": (lambda p: p._replace(generation=1), LeaseExpiredError),
    "another chunk's place": (
        lambda p: p._replace(offset=p.offset + STEP, generation=p.generation + 1),
        ChunkCorruptError,
    ),
    "off the words": (lambda p: p._replace(offset=p.offset + 4), InvalidRequestError),
    "the start of the slab": (lambda p: p._replace(offset=0), InvalidRequestError),
    "behind the slab": (lambda p: p._replace(offset=1 << 40), InvalidRequestError),
    "2^64": (lambda p: p._replace(offset=2**64 - 8), InvalidRequestError),
    "another size": (lambda p: p._replace(size_bytes=p.size_bytes - 64), ChunkCorruptError),
    "a slab that is gone": (lambda p: p._replace(number=GONE), TierUnavailableError),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_one_place_is_told_of_that_chunk_alone(wrong: str) -> None:
    slabs = Slabs()
    change, error = WRONG[wrong]
    places = list(slabs.places)
    places[1] = change(places[1])
    see = views(slabs, places)
    for at in (0, 2, 3, 4):
        view = see(at)
        assert view is not None
        assert int(view.layer(0)[0, 0, 0, 0]) == at
    with pytest.raises(error):
        see(1)


def test_chunks_elsewhere_or_without_a_place_have_no_view() -> None:
    slabs = Slabs()
    places = [NOWHERE, slabs.places[1], slabs.places[2]._replace(reach=Reach.file)]
    see = views(slabs, places)
    assert [see(at) is None for at in range(len(KEYS))] == [True, False, True, True, True]


def test_memory_that_is_reused_between_two_looks_is_noticed() -> None:
    slabs = Slabs()
    see = views(slabs, slabs.places)
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
