"""A core over a disk in memory; a module that wants another disk, or core, names its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from simulation.clock import FakeClock
from simulation.core import Core
from simulation.tiers import GatedDisk, SimDisk, SimRedis, no_faults

from kvstore.tiers.base import Tier

TIER_BYTES = 1 << 20


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def disk() -> Tier:
    return SimDisk(TIER_BYTES, no_faults())


@pytest.fixture
def redis() -> Tier:
    return SimRedis(TIER_BYTES, no_faults())


@pytest.fixture
def gated() -> Iterator[GatedDisk]:
    """A disk whose reads wait for its gate."""
    disk = GatedDisk(TIER_BYTES)
    yield disk
    disk.gate.set()


@pytest.fixture
def core(disk: Tier, clock: FakeClock) -> Iterator[Core]:
    """CPU memory for twelve frames of a prompt, and a disk for many more."""
    with closing(Core([disk], clock=clock)) as core:
        yield core
