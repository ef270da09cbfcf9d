"""The kvstore command: what it prints and what it exits with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from helpers.kvstore_command import Kvstore
from helpers.local_server import LocalServer
from helpers.redis_process import free_port
from helpers.server_process import ServerProcess
from helpers.trust_world import World

from kvstore import __version__
from kvstore.cli.app import DEFAULT_ADDRESS, app, command
from kvstore.server.settings.loading import show
from kvstore.server.settings.settings import Settings, load_config


def is_one_sentence(text: str) -> bool:
    return text.startswith("kvstore: ") and text.count("\n") == 1 and "Traceback" not in text


# --- the command


def test_version(kvstore: Kvstore) -> None:
    run = kvstore("--version")
    assert (run.status, run.out) == (0, f"kvstore {__version__}\n")


def test_help_names_the_commands_and_the_exit_codes(kvstore: Kvstore) -> None:
    run = kvstore("--help")
    assert run.status == 0
    for word in ("status", "config", "demo", "Exit codes"):
        assert word in run.out


@pytest.mark.parametrize(
    "argv",
    [
        ("nonsense",),
        ("status", "--nonsense"),
        ("demo", "--tokens", "x"),
        ("ls", "--limit", "0"),
        ("calibrate", "zstd", "x.npy"),
    ],
)
def test_wrong_usage_exits_with_2(kvstore: Kvstore, argv: tuple[str, ...]) -> None:
    run = kvstore(*argv)
    assert run.status == 2
    assert "Traceback" not in run.err


def test_the_command_line_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "kvstore.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"kvstore {__version__}\n")
    assert subprocess.run([*command[:3], "nonsense"], capture_output=True).returncode == 2


def test_help_loads_none_of_the_rooms() -> None:
    probe = (
        "import sys\nfrom kvstore.cli.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'grpc', 'numpy', 'pydantic', 'rich', 'torch', 'transformers', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")


# --- status


def test_the_address_comes_first_or_as_an_option_or_from_the_environment(
    kvstore: Kvstore, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ("--address", server.address)
    for argv in (("status", server.address), ("status", *at), (*at, "status")):
        assert json.loads(kvstore(*argv, "--json").out)["address"] == server.address
    run = kvstore("status", "127.0.0.1:1", *at)
    assert run.status == 2
    assert is_one_sentence(run.err)
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
        run = kvstore("--token-file", tmp_path / "none", "status", *at)
        assert (run.status, is_one_sentence(run.err)) == (2, True)
    finally:
        world.close()


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("localhost", "localhost:7420"),
        ("[::1]", "[::1]:7420"),
        ("[::1]:1", "[::1]:1"),
        ("unix:/run/kvstore.sock", "unix:/run/kvstore.sock"),
    ],
)
def test_the_port_of_an_address_is_the_servers_default(given: str, address: str) -> None:
    assert Settings().listen == DEFAULT_ADDRESS
    seen = []
    command("probe", exits="0", example="")(lambda address: seen.append(address))
    try:
        with pytest.raises(SystemExit):
            app(["probe", "--address", given])
    finally:
        app.registered_commands.pop()
    assert seen == [address]


@pytest.mark.parametrize("address", ["127.0.0.1:abc", "h:0", "h:70000", ":1", "::1", "no such:1"])
def test_what_is_no_address_exits_with_2(kvstore: Kvstore, address: str) -> None:
    run = kvstore("status", address)
    assert (run.status, is_one_sentence(run.err)) == (2, True)
    assert f"address={address!r}" in run.err


def test_status_of_a_server_that_is_not_there_exits_with_3(kvstore: Kvstore) -> None:
    address = f"127.0.0.1:{free_port()}"
    run = kvstore("status", address)
    assert (run.status, run.out) == (3, "")
    assert is_one_sentence(run.err)
    assert address in run.err
    assert "refused" in run.err


def test_status_of_a_server_that_was_killed_exits_with_3(
    kvstore: Kvstore, server_process: Callable[..., ServerProcess]
) -> None:
    process = server_process("--tiers", "cpu", "--cpu", "8MiB")
    process.start()
    assert kvstore("status", process.address).status == 0
    process.kill()
    run = kvstore("status", process.address)
    assert run.status == 3
    assert is_one_sentence(run.err)


# --- config


def test_config_show_prints_yaml_with_origins(kvstore: Kvstore) -> None:
    run = kvstore("config", "show", "--cpu", "8MiB", "--listen", "127.0.0.1:7")
    assert run.status == 0
    settings = yaml.safe_load(run.out)
    assert (settings["cpu_size"], settings["listen"]) == ("8MiB", "127.0.0.1:7")
    assert "cpu_size: 8MiB  # --cpu" in run.out
    assert "codec: raw,redis=zplane  # default" in run.out


@pytest.mark.parametrize(
    ("argv", "fix"),
    [
        (("top", "--once"), "use kvstore status --watch"),
        (("explain", "--json", "--spaces"), "use kvstore ls --spaces"),
        (("put", "chunk.safetensors"), "use Client.put_chunks in Python"),
        (("blend", "status", "--json"), "use kvstore status --all"),
        (("simulate", "trace.jsonl", "--model", "hybrid-7b"), "without it"),
        (("simulate", "trace.jsonl", "--plot=hits.svg"), "use kvstore simulate --json"),
        (("trace", "replay", "a", "trace.jsonl", "--speed", "2"), "without it"),
        (("blend", "calibrate", "model", "--selector", "hkvd"), "the selector is hybrid"),
    ],
)
def test_what_was_removed_names_its_successor(
    kvstore: Kvstore, argv: tuple[str, ...], fix: str
) -> None:
    run = kvstore(*argv)
    assert (run.status, is_one_sentence(run.err)) == (2, True)
    assert fix in run.err


def test_a_group_has_nothing_that_was_removed_from_beside_it(kvstore: Kvstore) -> None:
    run = kvstore("trace", "get", "--help")
    assert run.status == 2
    assert "removed" not in run.err


def test_what_config_show_prints_is_read_back_as_the_same_settings(
    kvstore: Kvstore, tmp_path: Path
) -> None:
    flags = ["--cpu", "8MiB", "--disk", f"16MiB:{tmp_path / 'disk'}", "--codec", "redis=raw"]
    path = tmp_path / "kvstore.yaml"
    path.write_text(kvstore("config", "show", *flags).out)
    assert show(load_config(["--config", str(path)])) == show(load_config(flags))


def test_config_validate_says_ok(kvstore: Kvstore) -> None:
    run = kvstore("config", "validate", "--cpu", "8MiB")
    assert (run.status, run.out, run.err) == (0, "ok\n", "")


@pytest.mark.parametrize("command", ["show", "validate"])
@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--cpu", "much"], "cpu_size"),
        (["--tiers", "tape"], "tiers"),
        (["--no-such-flag", "1"], "no-such-flag"),
        (["--listen", "0.0.0.0:7420"], "--insecure"),
        (["--config", "/no/such/file"], "/no/such/file"),
    ],
)
def test_settings_that_cannot_be_used_exit_with_2_and_say_why(
    kvstore: Kvstore, command: str, flags: list[str], word: str
) -> None:
    run = kvstore("config", command, *flags)
    assert (run.status, run.out) == (2, "")
    assert run.err.startswith("kvstore: ")
    assert word in run.err


# --- the installed command


def test_the_installed_command_runs() -> None:
    program = Path(sys.executable).with_name("kvstore")
    done = subprocess.run([program, "config", "validate"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
