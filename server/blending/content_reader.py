"""The ContentReader: learns the content of chunks that were not put here since the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvstore.proto.errors import InvalidFrameError, KVStoreError
from kvstore.proto.frame import FIXED_BYTES, header_bytes, parse_header, stated_header_bytes
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.blending.content_index import Contents, Named
from kvstore.server.index.catalog import Catalog
from kvstore.server.tiering.tier_slot import TierSlot

STEP_S = 0.05
"""How long a step reads at most, so that its caller can do other things, too."""


class ContentReader:
    """Reads headers of chunks whose content is not known: those that the last of *slots* kept
    over a restart, the latest first, and those that other nodes put and that came into memory.

    Only frames have the content; each is read from the first of *slots* that has it. For one
    thread. *clock* returns seconds; at most *limit* chunks are read of a restart's.
    """

    def __init__(
        self,
        catalog: Catalog,
        contents: Contents,
        slots: Sequence[TierSlot],
        limit: int,
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._contents = contents
        self._slots = slots
        self._clock = clock
        self._left = contents.unnamed(slots[-1].name, limit) if limit else []

    def step(self) -> bool:
        """Read some headers; False once there are none left."""
        until = self._clock() + STEP_S
        while self._clock() < until:
            key = self._contents.next_unread() or (self._left.pop() if self._left else None)
            if key is None:
                return False
            self._read(key)
        return True

    def _read(self, key: ChunkKey) -> None:
        copies = self._catalog.hold(key)
        try:
            slot = next((one for one in self._slots if one.name in copies), None)
            named = self._named(slot, copies[slot.name]) if slot is not None else None
        except KVStoreError:  # it is found by key all the same, and its reader learns what is wrong
            return
        finally:
            self._catalog.let_go(key)
        if named is not None:
            self._contents.name(named)

    def _named(self, slot: TierSlot, info: ChunkInfo) -> Named | None:
        """Return what the frame's header says. Raises KVStoreErrors."""
        head = np.empty(min(header_bytes(info.layout), info.size_bytes), np.uint8)
        if not slot.guarded(lambda: slot.tier.read(info.key, head)):
            return None
        longer = stated_header_bytes(head) if len(head) >= FIXED_BYTES else 0
        if len(head) < longer <= info.size_bytes:
            head = np.empty(longer, np.uint8)
            if not slot.guarded(lambda: slot.tier.read(info.key, head)):
                return None
        header = parse_header(head)
        if header.key != info.key:
            raise InvalidFrameError("key", header.key.hex(), "the frame is another chunk's")
        return Named(
            header.key, header.parent, header.content, header.layout.tokens, header.position
        )

    def __len__(self) -> int:
        return len(self._left)
