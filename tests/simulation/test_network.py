"""Schedules of clients and a network, and one of them by its seed."""

from __future__ import annotations

from collections import Counter

import pytest
from simulation.network import STEPS, NetworkSchedule

SEEDS = 80
BLOCKS = 4


def run(seed: int) -> Counter[str]:
    try:
        return NetworkSchedule(seed).run()
    except BaseException as error:
        error.add_note(
            f"replay it: pytest tests/simulation/test_network.py -k one_seed --seed {seed}"
        )
        raise


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.timeout(7200)
def test_no_network_breaks_a_promise(block: int, pytestconfig: pytest.Config) -> None:
    seeds = max(SEEDS, pytestconfig.getoption("--sim-steps") // STEPS) // BLOCKS
    for seed in range(block * seeds, (block + 1) * seeds):
        run(seed)


def test_replay_of_one_seed(request: pytest.FixtureRequest) -> None:
    run(request.config.getoption("--seed", default=None) or 0)


def test_a_seed_always_gives_the_same_schedule() -> None:
    for seed in range(5):
        assert run(seed) == run(seed)


def test_the_schedules_go_everywhere() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += run(seed)
    wanted = {"lost", "late", "cut puts", "cut gets", "damaged puts", "stored", "scrub", "crash"}
    assert wanted <= set(seen)
    assert seen["verified"] > 120
