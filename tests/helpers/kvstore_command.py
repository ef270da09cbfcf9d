"""The kvstore command, run in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from kvstore.cli.__main__ import main


class Ran(NamedTuple):
    """What one command did."""

    status: int
    out: str
    err: str


Kvstore = Callable[..., Ran]


def kvstore_command(capsys: pytest.CaptureFixture[str]) -> Kvstore:
    """Return what runs a command of some words."""

    def run(*argv: object) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in argv])
        out, err = capsys.readouterr()
        code = ended.value.code
        return Ran(code if isinstance(code, int) else 0, out, err)

    return run
