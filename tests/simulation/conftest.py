"""``pytest tests/simulation -k replay --seed N`` replays one schedule."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="the schedule that -k replay runs")


@pytest.fixture(autouse=True)
def failed_moves_are_not_logged() -> Iterator[None]:
    """Thousands of them are meant to fail."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    yield
    structlog.reset_defaults()
