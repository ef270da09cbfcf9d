"""Every command's help, its completion in shells, and what it says of a misspelt one."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from kvstore.cli.exits import CODES
from kvstore.cli.main import app, main
from kvstore.cli.manual import PAGES

KVSTORE = Path(sys.executable).with_name("kvstore")
PRINTS_DATA = {
    "status", "top", "ls", "stat", "put", "pin", "unpin", "clear", "explain", "doctor", "scrub",
    "bench", "codecs", "simulate", "blend status", "token list", "keys list", "quota show",
}  # fmt: skip
ASKS_A_SERVER = {
    "status", "top", "ls", "stat", "get", "put", "pin", "unpin", "clear", "explain", "doctor",
    "scrub", "drain", "bench", "trace record", "trace replay", "blend status", "quota show",
    "quota set",
}  # fmt: skip


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command by its words, groups left out."""
    top: Any = typer.main.get_command(app)
    context = top.make_context("kvstore", ["status"])
    for name in top.list_commands(context):
        command = top.get_command(context, name)
        if isinstance(command, TyperGroup):
            inner = command.make_context(name, ["x"], parent=context)
            for word in command.list_commands(inner):
                yield f"{name} {word}", command.get_command(inner, word)
        else:
            yield name, command


COMMANDS = dict(commands())


def test_every_command_has_a_page_and_every_page_a_command() -> None:
    assert set(PAGES) == set(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_has_a_synopsis_what_it_does_its_codes_and_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--help"])
    out = capsys.readouterr().out
    assert not ended.value.code
    assert out.startswith(f"Usage: kvstore {name} ")
    for word in ("Options:", "Exit codes:", f"  0  {CODES[0]}", "Example:", PAGES[name][1]):
        assert word in out
    assert ("--json" in out) >= (name in PRINTS_DATA)
    assert ("--address" in out) >= (name in ASKS_A_SERVER)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_example_of_a_command_is_one_that_it_takes(name: str) -> None:
    words = shlex.split(PAGES[name][1])
    assert words[: 1 + len(name.split())] == ["kvstore", *name.split()]
    command = COMMANDS[name]
    context = command.make_context(name, words[1 + len(name.split()) :], resilient_parsing=False)
    context.close()


def test_a_misspelt_command_is_told_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    for words, meant in ((["statsu"], "status"), (["trace", "recrod"], "record")):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert f"Did you mean '{meant}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shell", "typed", "expected"),
    [
        ("bash", "kvstore sta", {"stat", "status"}),
        ("bash", "kvstore trace re", {"record", "replay"}),
        ("bash", "kvstore clear --dr", {"--dry-run"}),
        ("zsh", "kvstore unp", {"unpin"}),
        ("fish", "kvstore quo", {"quota"}),
    ],
)
def test_shells_complete_commands_and_options(shell: str, typed: str, expected: set[str]) -> None:
    words = {
        "bash": {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": typed},
        "fish": {"_TYPER_COMPLETE_ARGS": typed, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    done = subprocess.run(
        [KVSTORE],
        env={**os.environ, "_KVSTORE_COMPLETE": f"complete_{shell}", **words},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for word in expected:
        assert word in done.stdout


def test_progress_is_shown_to_terminals_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.cli.progress import followed, progress

    with progress("working") as told:
        told(1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(followed([1, 2, 3], "working")) == [1, 2, 3]
    assert "working" in capsys.readouterr().err
