"""What the rANS decoder of rans_kernels.cu is given: tables that fit a block's shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.rans import SLOTS, ModelTable
from kvstore.proto.errors import InvalidFrameError

SOURCE = Path(__file__).with_suffix(".cu")
BUCKETS = 128

FAULTS = {
    1: ("counts", "must sum up to the words and escapes"),
    2: ("steps", "finite and positive"),
    4: ("means", "finite"),
    8: ("models", "the table has fewer"),
    16: ("words", "the stream does not end where it must"),
    32: ("escapes", "not as many as coded"),
}
"""What each bit of a status word says: a field and what it should be."""

Tables: TypeAlias = "tuple[NDArray[np.uint32], NDArray[np.uint8]]"


def search_tables(table: ModelTable) -> Tables:
    """Return start | frequency << 16 of each symbol, u32 (models, symbols), and the symbol of
    each 32nd slot, u8 (models, 128).

    A sixteenth of ``decode_slots``: from a bucket's symbol on, half a step on average finds the
    slot's own.
    """
    rows = table.frequencies.astype(np.uint32)
    starts = np.cumsum(rows, axis=1, dtype=np.uint32) - rows
    buckets = table.decode_slots[:, :: SLOTS // BUCKETS].astype(np.uint8)
    return starts | rows << np.uint32(16), np.ascontiguousarray(buckets)


def check_status(status: NDArray[np.int32]) -> None:
    """Raise InvalidFrameError for the first fault of any word of *status*."""
    for index in np.flatnonzero(status)[:1]:
        bits = int(status[index])
        field, fix = FAULTS[bits & -bits]
        raise InvalidFrameError(field, f"layer {index}", fix)
