"""Every command's help, its completion in shells, and what it says of a misspelt one."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from helpers.kvstore_command import Kvstore

import kvstore.cli.__main__  # noqa: F401 - registers the commands
from kvstore.cli.app import CODES, LOG_EVERY_S, SECTIONS, app, followed, progress

KVSTORE = Path(sys.executable).with_name("kvstore")
PRINTS_DATA = {
    "status", "ping", "sessions", "events", "ls", "stat", "pin", "unpin", "clear", "explain",
    "doctor", "scrub", "bench", "codecs", "simulate", "token list", "keys list",
    "quota show",
}  # fmt: skip
CONNECTION = ("--address", "--token-file", "--tls", "--ca", "--cert", "--key")
LOCAL = {
    "demo", "codecs", "simulate", "config show", "config validate", "config schema", "token make",
    "token list", "token revoke", "keys new", "keys list", "keys retire", "audit verify",
}  # fmt: skip
"""Commands that call no server."""


def commands(group: Any, start: str = "") -> dict[str, Any]:
    """Return every command by what is typed."""
    found: dict[str, Any] = {}
    for name, one in group.commands.items():
        found |= (
            commands(one, f"{start}{name} ") if hasattr(one, "commands") else {start + name: one}
        )
    return found


ROOT: Any = typer.main.get_command(app)
COMMANDS = commands(ROOT)


def example_of(name: str) -> str:
    return str(COMMANDS[name].epilog.rpartition("Example:\n")[2].strip())


def test_every_command_is_listed_in_its_section() -> None:
    assert {one.rich_help_panel for one in ROOT.commands.values()} == set(SECTIONS[:-1])
    assert all(one.commands for one in ROOT.commands.values() if hasattr(one, "commands"))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_has_a_synopsis_what_it_does_its_codes_and_an_example(
    name: str, kvstore: Kvstore
) -> None:
    status, out, _ = kvstore(*name.split(), "--help")
    assert status == 0
    assert out.startswith(f"Usage: kvstore {name} ")
    for word in ("Options:", "Exit codes:", f"  0  {CODES[0]}", "Example:", example_of(name)):
        assert word in out
    assert ("--json" in out) >= (name in PRINTS_DATA)
    assert all((f"{flag} " in out) == (name not in LOCAL) for flag in CONNECTION)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_example_of_a_command_is_one_that_it_takes(name: str) -> None:
    words = shlex.split(example_of(name))
    assert words[: 1 + len(name.split())] == ["kvstore", *name.split()]
    context = COMMANDS[name].make_context(name, words[1 + len(name.split()) :])
    context.close()


def test_a_misspelt_command_is_told_what_was_meant(kvstore: Kvstore) -> None:
    for words, meant in ((["statsu"], "status"), (["trace", "recrod"], "record")):
        status, _, err = kvstore(*words)
        assert (status, f"Did you mean '{meant}'" in err) == (2, True)


@pytest.mark.parametrize(
    ("shell", "typed", "expected"),
    [
        ("bash", "kvstore sta", {"stat", "status"}),
        ("bash", "kvstore trace re", {"record", "replay"}),
        ("bash", "kvstore clear --dr", {"--dry-run"}),
        ("zsh", "kvstore unp", {"unpin"}),
        ("fish", "kvstore quo", {"quota"}),
        ("bash", "kvstore bench --transport t", {"tcp"}),
        ("bash", "kvstore clear --tier d", {"disk"}),
        ("bash", "kvstore calibrate k", {"kvt", "kvqs"}),
        ("bash", "kvstore scrub --tiers cpu,d", {"cpu,disk"}),
        ("bash", "kvstore simulate --policy lru,hit_d", {"lru,hit_density"}),
        ("zsh", "kvstore token make f --roles read,w", {"read,write"}),
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


def test_progress_is_a_bar_on_terminals_and_a_line_now_and_then_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = iter([0.0, 5.0, LOG_EVERY_S, LOG_EVERY_S, LOG_EVERY_S + 1])
    with progress("working", lambda: next(now_s)) as report:
        for done in (1, 2, 3):
            report(done, 4)
    assert capsys.readouterr().err == "kvstore: working: 2 of 4\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(followed([1, 2, 3], "working")) == [1, 2, 3]
    assert "working" in capsys.readouterr().err
