"""An Arrival: a chunk of a get in reach of its reader, where it lies or as bytes."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.proto.buffers import Bytes
from kvstore.tiers.base import FilePlace, PeerPlace
from kvstore.tiers.slab import SlabPlace


@dataclass(frozen=True, slots=True)
class Arrival:
    """A chunk in reach of its reader. ``tier`` is where it was when asked for.

    ``place`` is None when CPU memory had no room, and ``frame`` then a copy of its own. A place
    in a file, in the arena of a device or on another server comes without the frame's bytes.
    """

    index: int
    tier: str
    frame: Bytes
    place: SlabPlace | FilePlace | PeerPlace | None

    @property
    def size_bytes(self) -> int:
        """Size of the frame, wherever it is."""
        return len(self.frame) if self.place is None else self.place.size_bytes
