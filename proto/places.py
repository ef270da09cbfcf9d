"""Places: where frames lie that a reader on the server's host can reach without a stream.

They travel as rows of 32 bytes, little-endian, so that a prompt of a hundred chunks is one field
and not a hundred messages; docs/format.md has the vectors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import numpy as np

from kvstore.proto.errors import InvalidRequestError

_ROW = struct.Struct("<IBB2xQQQ")
ROW_BYTES = _ROW.size
assert ROW_BYTES == 32

PLACE_ROW = np.dtype(
    {
        "names": ["number", "reach", "tier", "offset", "size_bytes", "generation"],
        "formats": ["<u4", "u1", "u1", "<u8", "<u8", "<u8"],
        "offsets": [0, 4, 5, 8, 16, 24],
    }
)
"""The same rows for whoever has hundreds of them to write."""


class Reach(IntEnum):
    """What a place's number counts: nothing, slabs of sealed memory, files, arenas of a device
    (the one there is has the number 0), or other servers that the reader asks itself.
    """

    none = 0
    memory = 1
    file = 2
    device = 3
    peer = 4


class Place(NamedTuple):
    """One frame: ``size_bytes`` from ``offset`` of the slab or file ``number``.

    ``tier`` is an index into the tier names that come along. The eight bytes before ``offset``
    hold ``generation`` for as long as a place in memory is valid; elsewhere it is 0.
    """

    number: int
    reach: int
    tier: int
    offset: int
    size_bytes: int
    generation: int


NOWHERE = Place(0, Reach.none, 0, 0, 0, 0)
"""A chunk that has to be loaded first."""


_PLACE_OF = partial(tuple.__new__, Place)
"""Makes a place of a row that was unpacked, whose length needs no look: a third of ``_make``."""


def pack_places(places: Iterable[Place]) -> bytes:
    """Return the rows of *places*."""
    pack = _ROW.pack
    return b"".join([pack(*place) for place in places])


def unpack_places(rows: bytes) -> list[Place]:
    """Return the places of *rows*. Raises InvalidRequestError when they are cut."""
    check_rows(rows)
    return list(map(_PLACE_OF, _ROW.iter_unpack(rows)))


def check_rows(rows: bytes) -> None:
    """Raise InvalidRequestError when *rows* are cut."""
    if len(rows) % ROW_BYTES:
        raise InvalidRequestError("places", len(rows), f"send rows of {ROW_BYTES} bytes")
