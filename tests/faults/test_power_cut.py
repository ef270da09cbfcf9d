"""Row 2: the power goes while chunks are written. What was told durable is there, and right."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contracts.chunks import make_frame
from contracts.shelf import assert_holds, put
from faults.media import PowerSwitch
from helpers.disk_process import SEALER_BYTES, is_whole, note, open_disk, sealer

from kvstore.tiers.disk import DiskTier

SEEDS_A_CUT = 500
FRESH_SEED = 31_000
"""Below 32,000, as names of frames repeat from there on: the model has no more tokens."""


@pytest.fixture
def power(tmp_path: Path) -> Iterator[PowerSwitch]:
    switch = PowerSwitch(tmp_path, 48 << 20)
    yield switch
    switch.close()


def give_up_one(tier: DiskTier) -> str:
    """Delete the oldest chunk; return its key."""
    oldest = next(tier.scan())
    assert tier.delete(oldest.key)
    return oldest.key.hex()


def test_what_was_durable_survives_a_power_cut_and_the_rest_is_right_or_a_miss(
    power: PowerSwitch, amount: Callable[[int, int], int]
) -> None:
    draw = random.Random(2)
    owed: dict[str, int] = {}
    folder = power.path / "disk"
    for cut in range(amount(3, 60)):
        with sealer(folder, 1 + SEEDS_A_CUT * cut) as child:
            assert child.stdout is not None
            left = draw.randrange(5, 60)
            while left:
                left -= note(owed, child.stdout.readline())
            power.cut()
            child.kill()
            for line in child.stdout:
                note(owed, line)
        power.turn_off()
        power.turn_on()
        tier = open_disk(folder, SEALER_BYTES)
        for key, seed in owed.items():
            info, frame = make_frame(seed, tokens=16 + seed % 200)
            assert info.key.hex() == key
            assert_holds(tier, info, frame)
        damaged = [info for info in tier.scan() if not is_whole(tier, info)]
        for info in damaged:
            assert tier.delete(info.key)
        owed.pop(give_up_one(tier), None)  # it may have been full
        fresh, frame = make_frame(FRESH_SEED + cut, tokens=16)
        assert put(tier, fresh, frame, durable=True)
        tier.delete(fresh.key)
        tier.close()
    assert owed
