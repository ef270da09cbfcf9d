"""The kvstore-server command as a process: what it prints, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from helpers.credentials import KeyRing
from helpers.prompts import SMALL, chunks_of, keys_of
from helpers.redis_process import free_port
from helpers.server_process import ServerProcess

from kvstore.client import Client, ClientOptions
from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import UnauthenticatedError
from kvstore.proto.types import PutOutcome
from kvstore.server.security.rate_limits import LINES_PER_S

ProcessMaker = Callable[..., ServerProcess]
CANNOT_START = 2
_WORDS_OF_GRPC = ("WARNING: All log messages before absl", "E0000 ")
"""Its core logs a port that it cannot bind by itself."""
UNUSABLE: dict[str, tuple[tuple[str, ...], str]] = {
    "a disk tier larger than the disk": (
        ("--disk", "900TiB:{folder}/disk"), "give the tier less capacity, or a larger disk",
    ),
    "an address of another machine": (
        ("--listen", "192.0.2.1:7420", "--insecure"), "cannot listen on 192.0.2.1:7420",
    ),
    "a flag that does not exist": (("--cpus", "4"), "see kvstore-server --help"),
}  # fmt: skip
"""One each of tiers, the network and the command line."""


def fail_to_start(process: ServerProcess) -> str:
    """Spawn the process, which must end with status 2; return the one line it wrote."""
    process.spawn()
    assert process.wait() == CANNOT_START
    assert process.output == ""
    assert "Traceback" not in process.errors
    lines = process.errors.splitlines()
    ours = [line for line in lines if not line.startswith(_WORDS_OF_GRPC)]
    assert len(ours) == 1
    assert ours[0].startswith("kvstore-server: ")
    return ours[0]


@pytest.mark.parametrize("what", UNUSABLE)
def test_unusable_setting_ends_the_start_with_one_sentence(
    server_process: ProcessMaker, tmp_path: Path, what: str
) -> None:
    flags, sentence = UNUSABLE[what]
    (tmp_path / "file").write_text("")
    places = [flag.replace("{folder}", str(tmp_path)) for flag in flags]
    with_disk = "--disk" in flags
    tiers = () if with_disk or "--tiers" in flags else ("--tiers", "cpu")
    assert sentence in fail_to_start(server_process(*tiers, *places))


def test_disk_and_socket_of_a_running_server_end_the_start_of_another(
    server_process: ProcessMaker, tmp_path: Path
) -> None:
    disk = f"32MiB:{tmp_path / 'server0' / 'disk'}"
    first = server_process("--cpu", "16MiB", "--disk", disk)
    first.start()
    second = server_process("--cpu", "16MiB", "--disk", disk)
    assert "tier 'disk'" in fail_to_start(second)
    third = server_process("--tiers", "cpu")
    third.socket_path = first.socket_path
    assert "another server listens there; stop it or choose --socket" in fail_to_start(third)
    with Client(first.address, SMALL, ClientOptions(deadline_ms=20_000)) as client:
        assert client.transport_name == "shm"
    assert first.terminate() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_the_server_with_status_0(
    server_process: ProcessMaker, tmp_path: Path, number: signal.Signals
) -> None:
    disk = f"32MiB:{tmp_path / 'server0' / 'disk'}"
    process = server_process("--cpu", "16MiB", "--disk", disk, "--insecure")
    process.start()
    assert "tiers=cpu,disk recovered_chunks=0" in process.output
    assert process.socket_path.exists()
    process.send_signal(number)
    assert process.wait() == 0
    assert process.output.endswith("kvstore-server stopped clean=true\n")
    assert not process.socket_path.exists()
    assert process.errors == ""


def test_strangers_do_not_fill_the_log(server_process: ProcessMaker, tmp_path: Path) -> None:
    keys = KeyRing(tmp_path / "keys")
    keys.make("acme")
    pages = ("127.0.0.1", free_port())
    flags = ("--log-format", "json", "--log-level", "info", "--auth-keys", str(keys.path))
    process = server_process("--tiers", "cpu", *flags, "--http", f"{pages[0]}:{pages[1]}")
    process.start()
    for _ in range(50):
        with socket.create_connection(pages) as link:
            link.sendall(b"\x16\x03 no request\r\n\r\n")
            assert link.recv(1000).startswith(b"HTTP/1.1 400")
    started = time.monotonic()
    with closing(Connection(process.address, retry_after_ms=1)) as connection:
        for _ in range(500):
            with pytest.raises(UnauthenticatedError):
                connection.call("Status", pb.StatusRequest(), 20_000, pb.StatusResponse)
    seconds = time.monotonic() - started
    time.sleep(0.1)  # one more may be written
    with (
        closing(Connection(process.address, retry_after_ms=1)) as connection,
        pytest.raises(UnauthenticatedError),
    ):
        connection.call("Status", pb.StatusRequest(), 20_000, pb.StatusResponse)
    assert process.terminate() == 0
    records = [json.loads(line) for line in process.errors.splitlines()]
    assert {record["error"] for record in records} == {"UnauthenticatedError"}
    assert len(records) <= LINES_PER_S * (2 + seconds)
    assert len(records) + sum(record.get("left_out", 0) for record in records) == 501


def test_no_file_of_the_server_is_another_user_s_to_read_whatever_the_umask(
    server_process: ProcessMaker, tmp_path: Path
) -> None:
    folder, audit = tmp_path / "disk", str(tmp_path / "audit")
    folder.mkdir()
    folder.chmod(0o755)
    flags = ("--disk", f"32MiB:{folder}", "--audit-log", audit, "--log-level", "warning")
    process = server_process("--cpu", "16MiB", *flags)
    process.launcher = ["sh", "-c", 'umask 000; exec "$@"', "sh"]
    process.start()
    with Client(process.address, SMALL, ClientOptions(deadline_ms=20_000)) as client:
        keys = keys_of(client, 1, 2)
        client.put_chunks(chunks_of(client, keys))
        client.get_chunks(keys)
    assert f"chmod 700 {folder}" in process.errors
    assert process.terminate() == 0
    files = [*folder.rglob("*"), Path(audit)]
    assert {"FORMAT", "history.kvh", "audit", "data.mdb"} <= {path.name for path in files}
    assert [path for path in files if path.stat().st_mode & 0o077] == []


def test_a_folder_of_the_user_s_that_others_can_write_to_costs_the_socket_and_not_the_start(
    server_process: ProcessMaker, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    process = server_process("--tiers", "cpu", "--cpu", "16MiB", "--log-level", "warning")
    process.has_socket = False
    process.environment["XDG_RUNTIME_DIR"] = str(tmp_path)
    process.start()
    assert "no Unix socket: clients of this host use the network" in process.errors
    assert "others could swap the socket in" in process.errors
    with Client(process.address, SMALL, ClientOptions(deadline_ms=20_000)) as client:
        (put,) = client.put_chunks(chunks_of(client, keys_of(client, 1, 1)))
        assert put.outcome is PutOutcome.stored


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_the_soft_limit_of_descriptors_is_raised_to_the_hard_one_and_too_low_a_one_is_told(
    server_process: ProcessMaker, kind: str
) -> None:
    few = "--max-sessions", "32", "--log-level", "warning"
    process = server_process("--tiers", "cpu", "--cpu", "16MiB", *few)
    limit = "ulimit -Sn 256" if kind == "soft" else "ulimit -n 256"
    process.launcher = ["sh", "-c", f'{limit}; exec "$@"', "sh"]
    process.start()
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    soft, hard = re.findall(r"Max open files +(\d+) +(\d+)", limits)[0]
    assert soft == hard
    assert (hard == "256") is (kind == "hard")
    assert process.errors.count("too few file descriptors for --max-sessions") == (kind == "hard")
