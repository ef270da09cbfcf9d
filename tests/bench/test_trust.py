from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
from bench.trust import PARTS
from bench.trust_timing import auc


@pytest.mark.parametrize("name", sorted(PARTS))
def test_every_part_of_trust_can_be_measured(name: str) -> None:
    assert callable(import_module(PARTS[name]).measure)


def test_the_area_says_how_well_times_tell_two_groups_apart() -> None:
    low, high = np.arange(10.0), np.arange(10.0) + 100
    assert auc(high, low) == 1.0
    assert auc(low, high) == 0.0
    assert auc(low, low) == 0.5
    assert auc(np.array([1.0, 3.0]), np.array([2.0])) == 0.5
