"""The ContentReader: learns what chunks say that a tier kept over a restart, from their frames."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.proto.errors import InvalidFrameError, KVStoreError
from kvstore.proto.frame import FIXED_BYTES, header_bytes, parse_header, stated_header_bytes
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.catalog import Catalog
from kvstore.server.policy.content_index import Named
from kvstore.server.shelf import Shelf

STEP_S = 0.05
"""How long a step reads at most, so that whoever calls it can do other things, too."""


class ContentReader:
    """Reads the headers of the chunks on *shelf* whose content is not known, the latest first.

    The index of the disk says nothing of contents, frames do. For one thread. *clock* returns
    seconds; at most *limit* chunks are read.
    """

    def __init__(
        self, catalog: Catalog, shelf: Shelf, limit: int, clock: Callable[[], float]
    ) -> None:
        self._catalog = catalog
        self._shelf = shelf
        self._clock = clock
        self._left = catalog.unnamed(shelf.name, limit)

    def step(self) -> bool:
        """Read some headers; False once there are none left."""
        until = self._clock() + STEP_S
        while self._left and self._clock() < until:
            self._read(self._left.pop())
        return bool(self._left)

    def _read(self, key: ChunkKey) -> None:
        copies = self._catalog.hold(key)
        try:
            info = copies.get(self._shelf.name)
            named = self._named(info) if info is not None else None
        except KVStoreError:  # it is found by key all the same, and its reader learns what is wrong
            return
        finally:
            self._catalog.let_go(key)
        if named is not None:
            self._catalog.name(named)

    def _named(self, info: ChunkInfo) -> Named | None:
        """Return what the frame's header says. Raises KVStoreErrors."""
        head = np.empty(min(header_bytes(info.layout), info.size_bytes), np.uint8)
        if not self._shelf.guarded(lambda: self._shelf.tier.read_into(info.key, head)):
            return None
        longer = stated_header_bytes(head) if len(head) >= FIXED_BYTES else 0
        if len(head) < longer <= info.size_bytes:
            head = np.empty(longer, np.uint8)
            if not self._shelf.guarded(lambda: self._shelf.tier.read_into(info.key, head)):
                return None
        header = parse_header(head)
        if header.key != info.key:
            raise InvalidFrameError("key", header.key.hex(), "the frame is another chunk's")
        return Named(
            header.key, header.parent, header.content, header.layout.tokens, header.position
        )

    def __len__(self) -> int:
        return len(self._left)
