from __future__ import annotations

import numpy as np
from bench.trust import auc


def test_the_area_says_how_well_times_tell_two_groups_apart() -> None:
    low, high = np.arange(10.0), np.arange(10.0) + 100
    assert auc(high, low) == 1.0
    assert auc(low, high) == 0.0
    assert auc(low, low) == 0.5
    assert auc(np.array([1.0, 3.0]), np.array([2.0])) == 0.5
