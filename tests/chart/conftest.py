"""Fixtures of the chart's tests. ``make chart-tools`` brings the tools; without them tests skip.

Where they were brought, as CI does, a missing one fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chart.rendered import HELMS, TOOLS, Helm


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chart-tools", action="store_true", help="fail where a tool is missing")


@pytest.fixture
def tool(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Return where a tool is; a missing one skips the test if all of them were never brought."""
    is_asked_for = bool(request.config.getoption("--chart-tools", False))
    is_needed = is_asked_for or (TOOLS / ".installed").exists()

    def find(name: str) -> Path:
        path = TOOLS / name
        if not path.exists() and not is_needed:
            pytest.skip("needs the chart's tools: make chart-tools brings them")
        assert path.exists(), f"{path} is missing"
        return path

    return find


@pytest.fixture(params=HELMS)
def helm(request: pytest.FixtureRequest, tool: Callable[[str], Path]) -> Helm:
    return Helm(tool(request.param))


@pytest.fixture
def helm4(tool: Callable[[str], Path]) -> Helm:
    return Helm(tool("helm4"))
