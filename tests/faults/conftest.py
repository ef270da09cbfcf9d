"""How much of each fault there is: a quick form in every run, a long one with ``--long``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults.oracle import OracleFile
from faults.proxy import FaultProxy

Amount = Callable[[int, int], int]


@pytest.fixture
def amount(pytestconfig: pytest.Config) -> Amount:
    """Return the first of two numbers, or a share of the second in the long form."""
    share = float(pytestconfig.getoption("--long-share"))
    is_long = bool(pytestconfig.getoption("--long"))
    return lambda quick, long: max(min(quick, long), int(long * share)) if is_long else quick


@pytest.fixture
def only_long(pytestconfig: pytest.Config) -> None:
    """Skip the test in the quick form."""
    if not pytestconfig.getoption("--long"):
        pytest.skip("a part of `make faults`")


@pytest.fixture
def oracle(tmp_path: Path) -> OracleFile:
    """An empty file of what is acknowledged."""
    return OracleFile(tmp_path / "oracle.jsonl")


@pytest.fixture
def proxy() -> Iterator[Callable[[int], FaultProxy]]:
    """Put proxies before ports of the loopback."""
    made: list[FaultProxy] = []

    def make(port: int) -> FaultProxy:
        made.append(FaultProxy(port))
        return made[-1]

    yield make
    for one in made:
        one.close()
