from __future__ import annotations

import pytest
from helpers.kvstore_command import Kvstore, kvstore_command


@pytest.fixture
def kvstore(capsys: pytest.CaptureFixture[str]) -> Kvstore:
    """Run the command in this process; return its status and what it printed."""
    return kvstore_command(capsys)
