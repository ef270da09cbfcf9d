"""LeasedViews: the chunks of one lease where they lie, checked all at once at the first look."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from kvstore.client.slabs import SlabMap, Slabs
from kvstore.client.view import ChunkView, RawGeometry, view_at
from kvstore.proto.errors import KVStoreError
from kvstore.proto.frame import KEY_OFFSET
from kvstore.proto.types import KEY_BYTES, ChunkKey
from kvstore.proto.unix_socket import NOWHERE, PLACE_ROW, Reach, check_rows, unpack_places

_WORD_BYTES = 8
_KEY_WORDS = np.arange(KEY_OFFSET // _WORD_BYTES, (KEY_OFFSET + KEY_BYTES) // _WORD_BYTES)
"""Where a frame has its key, in words from its start."""


class LeasedViews:
    """Gives the view of each leased chunk by its index.

    *rows* are the places of *keys*, those of the lease, as the server packed them; *whole* is what
    most of the frames look like. Raises InvalidRequestError when the rows are cut.
    """

    __slots__ = ("_found", "_keys", "_rows", "_slabs", "_whole")

    def __init__(
        self, slabs: Slabs, whole: RawGeometry, rows: bytes, keys: Sequence[ChunkKey]
    ) -> None:
        check_rows(rows)
        self._slabs = slabs
        self._whole = whole
        self._rows = rows
        self._keys = keys
        self._found: list[tuple[SlabMap, int, int] | None] = []
        """Slab, offset and generation of each chunk that was seen to lie where its place says."""

    def __call__(self, index: int) -> ChunkView | None:
        """Return the view of chunk *index*; None when it does not lie in memory that is shared.

        Raises LeaseExpiredError when the memory was reused, ChunkCorruptError when it holds another
        chunk, InvalidRequestError for a place outside its slab, InvalidFrameError, and
        TierUnavailableError when the server does not give the slab.
        """
        if not self._found:
            self._found = self._look()
        found = self._found[index]
        if found is None:
            return self._look_closer(index)
        slab, start, generation = found
        if slab.words[start // _WORD_BYTES - 1] != generation:
            slab.confirm(start, generation)  # which says it
        return ChunkView(self._keys[index], slab, start, generation, self._whole)

    def _look_closer(self, index: int) -> ChunkView | None:
        places = unpack_places(self._rows)
        place = places[index] if index < len(places) else NOWHERE
        if place.reach != Reach.memory:
            return None
        return view_at(self._keys[index], place, self._slabs.reach(place), self._whole)

    def _look(self) -> list[tuple[SlabMap, int, int] | None]:
        """Check the places of all whole chunks, a slab at a time: one by one takes twice as long.

        Where one of them is not what it should be, none of its slab is found here: each is looked
        at by itself then, and what is wrong is told of that one alone.
        """
        found: list[tuple[SlabMap, int, int] | None] = [None] * len(self._keys)
        rows = np.frombuffer(self._rows, PLACE_ROW)[: len(self._keys)]
        is_usual = rows["size_bytes"] == self._whole.frame_bytes
        is_usual &= rows["reach"] == int(Reach.memory)
        for number in set(rows["number"][is_usual].tolist()):
            with suppress(KVStoreError):
                slab = self._slabs.slab(number)
                here = np.flatnonzero(is_usual & (rows["number"] == number))
                indices, starts = here.tolist(), rows["offset"][here].tolist()
                keys = b"".join([self._keys[index] for index in indices])
                if not _hold(slab, starts, self._whole.frame_bytes, keys):
                    continue
                generations = rows["generation"][here].tolist()
                for at, start, word in zip(indices, starts, generations, strict=True):
                    found[at] = (slab, start, word)
        return found


def _hold(slab: SlabMap, starts: Sequence[int], size_bytes: int, keys: bytes) -> bool:
    """Whether a frame of so many bytes may begin at each of *starts*, and all have their *keys*."""
    last = len(slab.words) * _WORD_BYTES - size_bytes
    if min(starts) < _WORD_BYTES or max(starts) > last:
        return False
    at = np.array(starts, np.intp)
    if int(np.bitwise_or.reduce(at)) % _WORD_BYTES:
        return False
    words = np.frombuffer(slab.words, np.uint64)
    found: bytes = words[(at >> 3)[:, None] + _KEY_WORDS].tobytes()
    return found == keys
