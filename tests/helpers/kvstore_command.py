"""The kvstore command, run in this process, and its subcommands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import typer

from kvstore.cli.__main__ import main
from kvstore.cli.app import root


def commands(group: Any, start: str = "") -> dict[str, Any]:
    """Return every command by its full name."""
    found: dict[str, Any] = {}
    for name, one in group.commands.items():
        is_group = hasattr(one, "commands")
        found |= commands(one, f"{start}{name} ") if is_group else {start + name: one}
    return found


PROGRAM: Any = typer.main.get_command(root)
COMMANDS = commands(PROGRAM)


class Ran(NamedTuple):
    """Result of one command."""

    status: int
    out: str
    err: str


Kvstore = Callable[..., Ran]


def kvstore_command(capsys: pytest.CaptureFixture[str]) -> Kvstore:
    """Return a function that runs one command."""

    def run(*argv: object) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in argv])
        out, err = capsys.readouterr()
        code = ended.value.code
        return Ran(code if isinstance(code, int) else 0, out, err)

    return run
