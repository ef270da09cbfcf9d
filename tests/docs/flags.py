"""Whether a command that the documentation shows could be typed: its program, verb and flags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from docs.blocks import ROOT
from helpers.kvstore_command import COMMANDS, PROGRAM
from typer.core import TyperGroup

from kvstore.server.settings.loading import flag_of
from kvstore.server.settings.settings import Settings

Words = Sequence[str]
SERVER_VERBS = (("config", "show"), ("config", "validate"), ("doctor",))
"""Commands that take the server's flags."""
ENGINES = ("vllm.entrypoints.openai.api_server", "sglang.launch_server")


def _flags(words: Words) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]


@cache
def server_flags() -> frozenset[str]:
    """Return every flag of kvstore-server."""
    return frozenset({flag_of(name) for name in Settings.model_fields} | {"--config", "--version"})


@cache
def command_flags() -> frozenset[str]:
    """Return every flag of kvstore's commands."""
    return frozenset(flag for command in COMMANDS.values() for flag in flags_of(command))


@cache
def script_flags() -> frozenset[str]:
    """Return every flag of the programs of the checkout that are no commands."""
    folders = [path for name in ("bench", "examples") for path in (ROOT / name).rglob("*.py")]
    return frozenset().union(*map(_named_in, [*folders, ROOT / "codecs" / "conformance.py"]))


def _named_in(script: Path) -> set[str]:
    return set(re.findall(r'"(--[a-z-]+)"', script.read_text()))


def flags_of(command: Any) -> set[str]:
    return {one for option in command.params for one in (*option.opts, *option.secondary_opts)}


def _check_server(words: Words) -> None:
    assert set(_flags(words)) <= server_flags(), words


def verb_of(words: Words) -> tuple[Any, tuple[str, ...], set[str]]:
    """Return the command that words after ``kvstore`` name, its path, and the flags it takes."""
    command: Any = PROGRAM
    path: list[str] = []
    known: set[str] = {"--help"}
    rest = list(words)
    while isinstance(command, TyperGroup):
        known |= flags_of(command)
        takes = {one for option in command.params if not _is_switch(option) for one in option.opts}
        while rest and rest[0].startswith("-"):
            rest = rest[2 if rest[0] in takes else 1 :]
        if not rest:
            break
        context = command.make_context("kvstore", [], resilient_parsing=True)
        assert rest[0] in command.list_commands(context), f"kvstore has no {rest[0]}: {words}"
        found = command.get_command(context, rest[0])
        path.append(rest.pop(0))
        command = found
    return command, tuple(path), known | flags_of(command)


def _is_switch(option: object) -> bool:
    return bool(getattr(option, "is_flag", False))


def _check_kvstore(words: Words) -> None:
    _, path, known = verb_of(words)
    if path in SERVER_VERBS:
        known |= server_flags()
    assert set(_flags(words)) <= known, (words, set(_flags(words)) - known)


def _check_module(words: Words) -> None:
    """``python -m bench.X`` and scripts of the checkout: their files name their flags."""
    if not words:
        return
    if words[0].endswith(".py"):
        _check_script(words[0], words[1:])
    if words[0] != "-m":
        return
    if words[1] in ENGINES:
        _check_engine(words)
    if words[1].partition(".")[0] != "bench":
        return
    name = words[1].replace(".", "/")
    _check_script(f"{name}/__main__.py" if (ROOT / name).is_dir() else f"{name}.py", words[2:])


def _check_script(name: str, words: Words) -> None:
    known = _named_in(ROOT / name) | {"--json", "--only"}
    assert set(_flags(words)) <= known, (name, words)


def _check_make(words: Words) -> None:
    targets = set(re.findall(r"^([a-z-]+|\.venv):", (ROOT / "Makefile").read_text(), re.M))
    named = [word for word in words if "=" not in word]
    assert set(named) <= targets, words


def _check_helm(words: Words) -> None:
    """Each name that ``--set`` gives is one of the chart's values."""
    values = yaml.safe_load((ROOT / "helm" / "kvstore" / "values.yaml").read_text())
    for at, word in enumerate(words):
        if word == "--set":
            for pair in words[at + 1].split(","):
                held: Any = values
                for name in pair.partition("=")[0].split("."):
                    assert name in held, f"the chart has no value {pair}"
                    held = held[name]


def _check_engine(words: Words) -> None:
    """What an engine is told as JSON is JSON; its own flags are listed in tests/test_docs.py."""
    for word in words:
        if word.startswith("{"):
            json.loads(word)


def _anything(words: Words) -> None:
    """Programs that are not ours: that the line can be split is all that is known."""


ELSEWHERE: dict[str, Callable[[Words], None]] = {
    "apt-get": _anything,
    "docker": _anything,
    "git": _anything,
    "helm": _check_helm,
    "kubectl": _anything,
    "make": _check_make,
    "pip": _anything,
    "pre-commit": _anything,
    "python3.11": _anything,
    "vllm": _check_engine,
}
"""Programs that are never run here: they install, take minutes, or need a cluster or a GPU."""

RUN: dict[str, Callable[[Words], None]] = {
    "kvstore": _check_kvstore,
    "kvstore-server": _check_server,
    "python": _check_module,
    **dict.fromkeys(("cat", "curl", "head", "kill", "mkdir", "sleep", "wait"), _anything),
}
"""Programs of blocks that are run."""


def program_of(words: Words) -> str:
    """Return the program's name, the folder of the environment left out."""
    return words[0].removeprefix(".venv/bin/")


def is_run(words: Words) -> bool:
    """Return whether a command is run here: benchmarks and engines are not."""
    program = program_of(words)
    return program in RUN and not (program == "python" and words[1:2] == ["-m"])


def check(words: Words) -> None:
    """Fail unless the command is one that could be typed."""
    program = program_of(words)
    known = RUN | ELSEWHERE
    assert program in known, f"tests/docs/flags.py does not know {program}: {words}"
    known[program](words[1:])
