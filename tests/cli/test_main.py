"""The kvstore command: help, completion, addresses, what it exits with and how it prints."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import yaml
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from helpers.kvstore_command import COMMANDS, Kvstore, Ran
from helpers.kvstore_command import PROGRAM as KVSTORE
from helpers.local_server import LocalServer
from helpers.redis_process import free_port
from helpers.trust_world import World
from rich.cells import cell_len

from kvstore import __version__
from kvstore.cli.app import (
    CODES,
    DEFAULT_ADDRESS,
    LOG_EVERY_S,
    SECTIONS,
    Grid,
    command,
    followed,
    progress,
    root,
)
from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.settings.settings import Settings

PROGRAM = Path(sys.executable).with_name("kvstore")
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


def example_of(name: str) -> str:
    return str(COMMANDS[name].epilog.rpartition("Example:\n")[2].strip())


def is_one_sentence(text: str) -> bool:
    return text.startswith("kvstore: ") and text.count("\n") == 1 and "Traceback" not in text


def refused(ran: Ran, *words: str) -> bool:
    """Whether it is wrong usage, told in one sentence with *words* in it."""
    return ran.status == 2 and is_one_sentence(ran.err) and all(word in ran.err for word in words)


# --- help and completion


def test_every_command_is_listed_in_its_section() -> None:
    assert {one.rich_help_panel for one in KVSTORE.commands.values()} == set(SECTIONS[:-1])
    assert all(one.commands for one in KVSTORE.commands.values() if hasattr(one, "commands"))


def test_help_has_a_synopsis_what_it_does_its_codes_and_an_example(kvstore: Kvstore) -> None:
    for name in COMMANDS:
        status, out, _ = kvstore(*name.split(), "--help")
        assert status == 0
        assert out.startswith(f"Usage: kvstore {name} ")
        for word in ("Options:", "Exit codes:", f"  0  {CODES[0]}", "Example:", example_of(name)):
            assert word in out, name
        assert ("--json" in out) >= (name in PRINTS_DATA), name
        assert all((f"{flag} " in out) == (name not in LOCAL) for flag in CONNECTION), name


def test_the_example_of_a_command_is_one_that_it_takes() -> None:
    for name, one in COMMANDS.items():
        words = shlex.split(example_of(name))
        assert words[: 1 + len(name.split())] == ["kvstore", *name.split()]
        one.make_context(name, words[1 + len(name.split()) :]).close()


def test_the_version_and_the_help_of_all_are_short_and_need_none_of_the_product(
    kvstore: Kvstore,
) -> None:
    assert kvstore("--version")[:2] == (0, f"kvstore {__version__}\n")
    probe = (
        "import sys\nfrom kvstore.cli.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'grpc', 'numpy', 'pydantic', 'rich', 'torch', 'transformers', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    for word in ("status", "config", "demo", "Exit codes"):
        assert word in done.stdout


def test_the_command_runs_as_a_module_and_as_it_is_installed() -> None:
    for start in ([sys.executable, "-m", "kvstore.cli"], [PROGRAM]):
        done = subprocess.run([*start, "config", "validate"], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
    assert subprocess.run([*start, "nonsense"], capture_output=True).returncode == 2


def test_who_reads_and_has_enough_ends_a_command_as_any_other(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    (tmp_path / "none").touch()
    for argv in (["config", "schema"], ["token", "list", str(tmp_path / "none")]):
        done = subprocess.run([PROGRAM, *argv], stdout=write, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
    os.close(write)


@pytest.mark.parametrize(
    ("shell", "typed", "expected"),
    [
        ("bash", "kvstore sta", {"stat", "status"}),
        ("bash", "kvstore trace re", {"record", "replay"}),
        ("bash", "kvstore calibrate k", {"kvtc", "kvq"}),
        ("bash", "kvstore scrub --tiers cpu,d", {"cpu,disk"}),
        ("bash", "kvstore codecs raw kv", {"kvq", "kvtc"}),
        ("bash", "kvstore simulate --policy lru,hit_d", {"lru,hit_density"}),
        ("fish", "kvstore quo", {"quota"}),
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
        [PROGRAM],
        env={**os.environ, "_KVSTORE_COMPLETE": f"complete_{shell}", **words},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for word in expected:
        assert word in done.stdout


# --- wrong usage


def test_wrong_usage_exits_with_2_and_tells_what_was_meant(kvstore: Kvstore) -> None:
    for words, said in (
        (["nonsense"], "nonsense"),
        (["statsu"], "Did you mean 'status'"),
        (["trace", "recrod"], "Did you mean 'record'"),
        (["status", "--nonsense"], "--nonsense"),
        (["demo", "--tokens", "x"], "--tokens"),
        (["ls", "--limit", "0"], "--limit"),
        (["calibrate", "zstd", "x.npy"], "zstd"),
    ):
        status, _, err = kvstore(*words)
        assert (status, said in err, "Traceback" in err) == (2, True, False), words


def test_what_was_removed_names_its_successor(kvstore: Kvstore) -> None:
    for argv, fix in (
        ("top --once", "use kvstore status --watch"),
        ("explain --json --spaces", "use kvstore ls --spaces"),
        ("put chunk.safetensors", "use Client.put_chunks in Python"),
        ("blend status --json", "use kvstore status --all"),
        ("simulate trace.jsonl --plot=hits.svg", "use kvstore simulate --json"),
        ("trace replay a trace.jsonl --speed 2", "without it"),
        ("blend calibrate model --selector hkvd", "the selector is hybrid"),
    ):
        assert refused(kvstore(*argv.split()), fix), argv
    assert "removed" not in kvstore("trace", "get", "--help").err, "of a group"


# --- addresses


def test_the_address_comes_first_or_as_an_option_or_from_the_environment(
    kvstore: Kvstore, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("--address", server.address)
    for argv in (("status", server.address), ("status", *at), (*at, "status")):
        assert json.loads(kvstore(*argv, "--json").out)["address"] == server.address
    assert refused(kvstore("status", "127.0.0.1:1", *at))
    monkeypatch.setenv("KVSTORE_ADDRESS", server.address)
    assert json.loads(kvstore("status", "--json").out)["address"] == server.address
    for argv in (("--address", "127.0.0.1:1", "status"), ("status", "127.0.0.1:1")):
        assert kvstore(*argv).status == 3, "what is typed is over the environment"


def test_tokens_and_authorities_are_given_before_or_after_the_command_or_by_the_environment(
    kvstore: Kvstore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    world = World(tmp_path)
    token = tmp_path / "token"
    token.write_text(world.admin)
    trust = ("--token-file", token, "--ca", world.ca.path)
    at = ("--address", world.address)
    try:
        assert kvstore(*trust, "status", *at).status == 0
        assert kvstore("status", *at, *trust).status == 0
        run = kvstore("status", *at)
        assert (run.status, "give --ca or --tls" in run.err) == (3, True)
        assert kvstore("status", *at, *trust[2:]).status == 3, "without a token"
        monkeypatch.setenv("KVSTORE_TOKEN_FILE", str(token))
        monkeypatch.setenv("KVSTORE_CA", str(world.ca.path))
        assert kvstore("status", *at).status == 0
        assert refused(kvstore("--token-file", tmp_path / "none", "status", *at))
    finally:
        world.close()


def test_the_port_of_an_address_is_the_servers_default() -> None:
    assert Settings().listen == DEFAULT_ADDRESS
    seen = []
    command("probe", exits="0", example="")(lambda address: seen.append(address))
    known = {
        "localhost": "localhost:7420",
        "[::1]": "[::1]:7420",
        "[::1]:1": "[::1]:1",
        "unix:/run/kvstore.sock": "unix:/run/kvstore.sock",
    }
    try:
        for given in known:
            with pytest.raises(SystemExit):
                root(["probe", "--address", given])
    finally:
        root.registered_commands.pop()
    assert seen == list(known.values())


def test_what_is_no_address_exits_with_2(kvstore: Kvstore) -> None:
    for address in ("127.0.0.1:abc", "h:0", "h:70000", ":1", "::1", "no such:1", "http://h:1"):
        assert refused(kvstore("status", address), f"address={address!r}"), address


def test_status_of_a_server_that_is_not_there_exits_with_3(kvstore: Kvstore) -> None:
    address = f"127.0.0.1:{free_port()}"
    for name in ("status", "bench"):
        run = kvstore(name, "--address", address)
        assert (run.status, run.out) == (3, "")
        assert is_one_sentence(run.err)
        assert f"no kvstore-server responds at {address}" in run.err
    assert "refused" in run.err


# --- config


def test_config_show_prints_yaml_with_origins(kvstore: Kvstore) -> None:
    run = kvstore("config", "show", "--cpu", "8MiB", "--listen", "127.0.0.1:7")
    assert run.status == 0
    settings = yaml.safe_load(run.out)
    assert (settings["cpu_size"], settings["listen"]) == ("8MiB", "127.0.0.1:7")
    assert "cpu_size: 8MiB  # --cpu" in run.out
    assert "codec: raw,redis=lossless  # default" in run.out


ID = "96732432a2736b7df7b1c4a0e5d9f218"
REASON = "evicted from disk 40 s before: no tier below was to have a copy"


def grid() -> Grid:
    rows = [(ID, "evicted", REASON), (ID[::-1], "[red]unknown[/]", "never\nstored")]
    return Grid(("digest", "state", "why"), rows)


def shown(width: int, *, is_terminal: bool, rows: Grid | None = None) -> list[str]:
    return list((rows or grid()).lines(width if is_terminal else None))


def test_each_row_is_one_line_of_plain_columns_where_there_is_room_or_no_terminal() -> None:
    head, first, second = shown(20, is_terminal=False)
    assert head.split() == ["digest", "state", "why"]
    assert first == f"{ID}  evicted          {REASON}"
    assert second == f"{ID[::-1]}  [red]unknown[/]  never stored"
    assert shown(200, is_terminal=True) == [head, first, second]


def test_a_terminal_that_is_too_narrow_wraps_the_last_column_alone() -> None:
    lines = shown(80, is_terminal=True)
    assert max(map(len, lines)) <= 80
    assert sum(ID in line for line in lines) == 1
    told = "".join(line[len(ID) + 2 + len("[red]unknown[/]") + 2 :].strip() + " " for line in lines)
    assert REASON in " ".join(told.split())


def test_a_terminal_too_narrow_for_that_shows_each_cell_in_a_line_of_its_own() -> None:
    lines = shown(50, is_terminal=True)
    assert f"digest: {ID}" in lines
    assert "state:  evicted" in lines
    assert REASON in " ".join(" ".join(lines).split())


def test_wide_characters_take_two_columns_of_a_terminal() -> None:
    made = Grid(("digest", "why"), [(ID, "日本語 の 模型 " * 8)])
    lines = shown(60, is_terminal=True, rows=made)
    assert max(map(cell_len, lines)) <= 60
    assert " ".join(lines).split().count("日本語") == 8


def test_a_terminal_never_breaks_a_word() -> None:
    for width in range(20, 120, 5):
        made = Grid(("at", "digest", "why"), [("0", ID, f"revision: {'f' * 40} asked")], wraps=2)
        words = " ".join(shown(width, is_terminal=True, rows=made)).split()
        assert ID in words, width
        assert "f" * 40 in words, width


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


# --- a server that answers with escape sequences, markup and line ends

HOSTILE = "m\x1b[31mRED\x1b[2J\nFAKE [bold red]rich[/] :skull: \u202eedoc\x9b"
WAIT_S = 20
_SERVICE = pb.DESCRIPTOR.services_by_name["KVStore"]
_VALUES: dict[int, Any] = {
    FieldDescriptor.CPPTYPE_STRING: HOSTILE,
    FieldDescriptor.CPPTYPE_BOOL: False,
    FieldDescriptor.CPPTYPE_ENUM: 0,
    FieldDescriptor.CPPTYPE_FLOAT: 1.0,
    FieldDescriptor.CPPTYPE_DOUBLE: 1.0,
}


def spoil(message: Message, depth: int = 0) -> Message:
    """Fill every field of *message*, each text with HOSTILE."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            if kind.fields_by_name["value"].message_type is None:
                value[HOSTILE] = _VALUES.get(kind.fields_by_name["value"].cpp_type, 0)
        elif kind is not None:
            if depth < 4:
                spoil(value.add() if field.is_repeated else value, depth + 1)
        else:
            one = _value(field)
            if field.is_repeated:
                value.append(one)
            else:
                setattr(message, field.name, one)
    return message


def _value(field: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes(16)
    return 0 if field.name == "left" else _VALUES.get(field.cpp_type, 1)


@pytest.fixture
def hostile() -> Iterator[tuple[SimpleNamespace, str]]:
    """Serves every method; where it ``refuses``, by an error whose reason is HOSTILE."""
    state = SimpleNamespace(refuses=False)

    def handler(method: Any) -> Any:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if state.refuses:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, HOSTILE.replace("\n", " "))
            return spoil(GetMessageClass(method.output_type)()).SerializeToString()

        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(lambda *call: iter([answer(*call)]))
        return grpc.unary_unary_rpc_method_handler(answer)

    handlers = {one.name: handler(one) for one in _SERVICE.methods}
    server = grpc.server(futures.ThreadPoolExecutor(2))
    generic = grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield state, f"127.0.0.1:{port}"
    server.stop(None).wait(WAIT_S)


HOSTILE_COMMANDS = [
    ("explain", "--recent", "3"),
    ("explain", "--namespace", "00" * 16, "--keys", "00" * 16),
    ("ls", "--spaces"),
    ("status",),
    ("status", "--all"),
    ("sessions",),
    ("doctor",),
    ("quota", "show"),
]


@pytest.mark.parametrize("command", HOSTILE_COMMANDS, ids=" ".join)
def test_what_a_server_tells_is_printed_as_text_and_not_obeyed(
    hostile: tuple[SimpleNamespace, str], command: tuple[str, ...], kvstore: Kvstore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "1500")
    state, address = hostile
    for state.refuses in (False, True):
        run = kvstore(*command, "--address", address)
        text = run.out + run.err
        assert "[bold red]rich[/] :skull:" in text
        lines = text.splitlines()
        assert [line for line in lines if not line.isprintable()] == []
        assert [line for line in lines if line.lstrip(" \u2502").startswith("FAKE")] == []
