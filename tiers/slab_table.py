"""Which frame is sealed in which slab, and of which generation it is."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from kvstore.proto.places import PLACE_ROW, Reach
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.tiers.slab import BLOCK_HEADER_BYTES
from kvstore.tiers.spot_table import SpotTable

_MEMORY = int(Reach.memory)


class SlabTable(SpotTable):
    """A SpotTable whose areas are slabs. About 123 bytes a frame.

    Generations stand in the slabs too, where readers compare them. From there a prompt's would be
    fetched from as many pages as it has chunks; here they lie side by side.
    """

    def __init__(self) -> None:
        self._generations = array("Q")
        super().__init__()

    @override
    def _extend(self, count: int) -> None:
        super()._extend(count)
        self._generations.frombytes(bytes(count * self._generations.itemsize))

    def seal_in(self, slab_id: int, start: int, generation: int, info: ChunkInfo) -> None:
        """Take note of a frame whose key is not here, and whose block begins at *start*."""
        self.seal(info, slab_id, start)
        self._generations[self.find(info.key)] = generation

    def place_rows(self, keys: Sequence[ChunkKey]) -> bytes:
        """Return where readers find the frames, as rows of proto/places; zeros for absent ones."""
        rows = np.zeros(len(keys), PLACE_ROW)
        at = self.find_all(keys)
        here: slice | np.ndarray[tuple[int], np.dtype[np.bool_]] = slice(None)
        if not at.all():
            here = at > 0
            at = at[here]
        rows["number"][here] = np.frombuffer(self._areas, np.uint32)[at]
        rows["reach"][here] = _MEMORY
        rows["offset"][here] = np.frombuffer(self._starts, np.int64)[at] + BLOCK_HEADER_BYTES
        rows["size_bytes"][here] = np.frombuffer(self._sizes, np.uint64)[at]
        rows["generation"][here] = np.frombuffer(self._generations, np.uint64)[at]
        return rows.tobytes()
