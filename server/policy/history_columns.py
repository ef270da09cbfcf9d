"""The columns of a History, by row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Columns(NamedTuple):
    """The columns of a History as numpy sees them, each of shape (rows,)."""

    last_s: NDArray[np.float64]
    hits: NDArray[np.uint8]
    classes: NDArray[np.uint16]
    flops: NDArray[np.float64]
    turns: NDArray[np.uint8]
    chunks: NDArray[np.uint16]
    own: NDArray[np.uint8]
