"""The Report of what was asked for, which policies that learn from it are told."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.server.policy.radix import Rows


class Report(NamedTuple):
    """What was asked for between two refreshes.

    ``rows`` of what was known of it and ``ages_s`` how long each had waited; ``chunks`` counts
    all, known or not, of ``requests`` prompts.
    """

    rows: Rows
    ages_s: NDArray[np.float64]
    chunks: int
    requests: int
    time_s: float
