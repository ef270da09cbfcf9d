"""``pytest tests/simulation -k replay --seed N`` replays one schedule."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="the schedule that -k replay runs")
