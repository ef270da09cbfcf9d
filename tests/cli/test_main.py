"""The kvstore command: what it prints and what it exits with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from local_server import LocalServer
from prompts import chunks_of, keys_of
from redis_process import free_port
from server_process import ServerProcess

from kvstore import __version__
from kvstore.cli.main import main
from kvstore.server.settings.loading import show
from kvstore.server.settings.settings import load_config


class Run:
    """What one command did."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *argv: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main(argv)
        self.status = ended.value.code or 0
        self.out, self.err = capsys.readouterr()


Kvstore = Callable[..., Run]


@pytest.fixture
def kvstore(capsys: pytest.CaptureFixture[str]) -> Kvstore:
    """Run the command in this process."""
    return lambda *argv: Run(capsys, *argv)


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
    "argv", [("nonsense",), ("status", "--nonsense"), ("demo", "--tokens", "x")]
)
def test_wrong_usage_exits_with_2(kvstore: Kvstore, argv: tuple[str, ...]) -> None:
    run = kvstore(*argv)
    assert run.status == 2
    assert "Traceback" not in run.err


@pytest.mark.parametrize("module", ["kvstore.cli", "kvstore.cli.main"])
def test_the_command_line_runs_as_a_module(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"kvstore {__version__}\n")
    assert subprocess.run([*command[:3], "nonsense"], capture_output=True).returncode == 2


def test_help_loads_none_of_the_rooms() -> None:
    probe = (
        "import sys\nfrom kvstore.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'grpc', 'numpy', 'pydantic', 'rich', 'torch', 'transformers', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")


# --- status


def test_status_shows_tiers_and_counters_as_json(kvstore: Kvstore, server: LocalServer) -> None:
    client = server.connect()
    client.put_chunks(chunks_of(client, keys_of(client, 1, 3)))
    run = kvstore("status", server.address, "--json")
    assert run.status == 0
    status = json.loads(run.out)
    assert (status["state"], status["version"], status["sessions"]) == ("serving", __version__, 1)
    cpu, disk = status["tiers"]
    assert (cpu["name"], cpu["chunks"], cpu["codec"]) == ("cpu", 3, "raw")
    assert 0 < cpu["used_bytes"] < cpu["capacity_bytes"] <= 16 << 20
    assert (disk["name"], disk["state"], disk["reason"]) == ("disk", "serving", "")
    assert status["counters"]["put_stored_chunks"] == 3
    assert status["counters"]["evicted_chunks"] == 0


def test_status_shows_them_as_tables(kvstore: Kvstore, server: LocalServer) -> None:
    run = kvstore("status", server.address)
    assert run.status == 0
    for word in (server.address, "serving", "cpu", "disk", "32.0 MiB", "lookups"):
        assert word in run.out


def test_the_address_comes_first_or_as_an_option(kvstore: Kvstore, server: LocalServer) -> None:
    for argv in ((server.address,), ("--address", server.address)):
        run = kvstore("status", *argv, "--json")
        assert json.loads(run.out)["address"] == server.address
    run = kvstore("status", "127.0.0.1:1", "--address", server.address)
    assert run.status == 2
    assert is_one_sentence(run.err)


def test_status_of_a_server_that_is_not_there_exits_with_3(kvstore: Kvstore) -> None:
    address = f"127.0.0.1:{free_port()}"
    run = kvstore("status", address)
    assert (run.status, run.out) == (3, "")
    assert is_one_sentence(run.err)
    assert address in run.err
    assert "refused" in run.err


def test_status_of_what_is_no_address_exits_with_3(kvstore: Kvstore) -> None:
    run = kvstore("status", "no such host:x")
    assert run.status == 3
    assert is_one_sentence(run.err)


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
