"""What hit density believes of states before it has seen any: counts of other runs.

Learnt by `python -m bench.policy_hybrid --learn` on the token traces in data/traces named dev_*
(all our own, synthetic but for one cut from Mooncake's conversation trace, Apache-2.0): the counts
that a rank without a prior had at the end of each trace, the mean over three capacities, summed
over six traces and times 0.3, so that what is seen outweighs them after some thousand requests.
Only differences between classes and ages matter, and they hold for traces of kinds that were
left out (docs/benchmarks.md).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CRC32 = 252386292
"""Of both tables, as little-endian uint16: a change has to be meant."""

# Two lines for each of the 21 classes of checkpoint_density, 40 bins of age.
_ASKED = """
5 1 1 1 2 7 6 7 12 13 14 9 14 12 10 13 9 10 12 12
13 7 8 5 5 4 1 2 1 1 1 0 1 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
1 0 0 2 3 2 4 6 6 18 7 6 5 6 4 5 4 2 4 5
3 3 3 3 1 0 2 1 1 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
1 0 2 1 1 2 4 6 8 10 12 7 9 3 4 2 5 3 3 2
3 3 2 2 0 2 2 1 1 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
3 0 3 3 5 7 16 18 22 40 28 21 15 11 10 14 11 10 12 9
9 6 5 3 4 4 1 2 1 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
7 0 5 10 7 20 35 46 61 108 79 64 50 28 32 31 29 29 21 20
19 22 12 13 8 8 5 2 4 0 1 0 2 1 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 4 10 3 0
0 0 0 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
3 1 0 7 1 14 27 40 45 98 64 34 16 1 1 2 2 2 2 1
2 2 1 1 1 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0
2 1 0 0 0 1 1 1 0 2 1 0 1 1 0 1 2 2 1 1
1 2 0 1 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
108 13 15 12 14 65 22 18 48 24 40 24 20 16 13 7 6 5 5 4
3 1 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
"""
_FORGOTTEN = """
0 0 0 0 0 0 0 0 0 0 1 0 0 1 1 2 3 2 3 4
7 12 26 47 99 145 106 35 63 5 7 6 12 13 16 29 5 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 0 0 1 1
0 1 4 7 9 21 40 17 16 2 2 2 6 3 4 9 1 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 1 0 0 0 0 1 1 1 0 1 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 1 0 0 0 1 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 0
1 3 0 4 2 10 15 4 2 5 13 7 2 3 6 11 6 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
1 0 0 0 0 0 0 0 0 0 0 0 0 0 1 2 1 3 6 9
13 24 28 68 64 129 193 64 36 40 103 221 30 27 48 133 239 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
1 1 2 7 9 9 8 5 4 0 0 1 2 3 2 5 1 0 0 0
0 0 0 0 0 0 0 0 0 0 1 0 0 1 1 2 2 2 3 4
7 11 25 36 74 115 66 2 1 0 0 0 0 0 0 1 0 0 0 0
0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
0 0 0 6 6 10 13 1 0 0 0 0 0 1 0 0 0 0 0 0
"""


def asked_before() -> NDArray[np.float64]:
    """Return states asked for again, by class and age then. Shape: (21, 40)."""
    return _table(_ASKED)


def forgotten_before() -> NDArray[np.float64]:
    """Return states that were not, by class and the age they came to. Shape: (21, 40)."""
    return _table(_FORGOTTEN)


def _table(text: str) -> NDArray[np.float64]:
    return np.array(text.split(), np.float64).reshape(-1, 40)
