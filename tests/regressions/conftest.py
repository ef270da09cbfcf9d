"""``pytest tests/regressions --peers`` also shows where a peer fails: ``make regressions-long``.

Makes the benchmarks importable, which know how to run the peer: last on the path, as the root's
other folders shadow modules.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--peers", action="store_true", help="run what shows where peers fail")
