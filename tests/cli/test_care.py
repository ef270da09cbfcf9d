"""The commands scrub and doctor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_damage import flip_a_bit
from local_server import LocalServer
from prompts import SMALL, store
from redis_process import RedisProcess

from kvstore.cli.doctor_checks import file_system_of
from kvstore.cli.main import main
from kvstore.client import Client
from kvstore.server.settings.process_limits import memory_limit_bytes


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Return the exit status and what was printed."""
    status = 0
    try:
        main(argv)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    return status, capsys.readouterr().out


def test_scrub_says_what_it_checked_and_fails_on_damage(
    server: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(server.address, SMALL, server.connect().options) as client:
        keys = store(client, 1, 4)
    server.settled()
    status, out = run(capsys, "scrub", server.address, "--json")
    assert (status, json.loads(out)["damaged_chunks"]) == (0, 0)
    flip_a_bit(server.config.disk[0].path, keys[1])
    status, out = run(capsys, "scrub", server.address, "--tiers", "disk", "--json")
    assert status == 1
    assert (json.loads(out)["checked_chunks"], json.loads(out)["damaged_chunks"]) == (4, 1)
    status, out = run(capsys, "scrub", server.address)
    assert (status, "3 of 3 chunks" in out) == (0, True)
    assert run(capsys, "scrub", server.address, "--rate", "much")[0] == 2


Doctor = Callable[..., tuple[int, dict[str, dict[str, str]]]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Doctor:
    def look(*flags: str) -> tuple[int, dict[str, dict[str, str]]]:
        sizes = ("--cpu", "16MiB", "--disk", f"8MiB:{tmp_path / 'd'}")
        status, out = run(capsys, "doctor", "--json", *sizes, *flags)
        return status, {row["check"]: row for row in json.loads(out)["checks"]}

    return look


def test_doctor_finds_a_machine_that_can_serve_in_order(
    doctor: Doctor, server: LocalServer, tmp_path: Path
) -> None:
    status, found = doctor("--address", server.address)
    assert status == 0
    assert {found[name]["state"] for name in ("memory", "server", "tier cpu", "tier disk")} == {
        "ok"
    }
    assert "MB/s" in found[f"disk {tmp_path / 'd'}"]["saw"]
    assert list(tmp_path.glob(".kvstore-doctor*")) == []


def test_doctor_names_what_would_fail_and_what_to_do(doctor: Doctor) -> None:
    status, found = doctor(
        *("--tiers", "cpu,disk,redis", "--redis", "redis://127.0.0.1:1/0", "--cpu", "900TiB"),
        *("--address", "127.0.0.1:1"),
    )
    assert status == 1
    assert found["memory"]["state"] == found["redis"]["state"] == "fail"
    assert found["server"]["state"] == "warn"
    assert all(row["fix"] for row in found.values() if row["state"] != "ok")


def test_doctor_tries_what_the_user_of_redis_may_do(
    doctor: Doctor, own_redis: RedisProcess
) -> None:
    own_redis.start()
    flags = ("--tiers", "cpu,redis", "--address", "127.0.0.1:1", "--redis")
    status, found = doctor(*flags, own_redis.url)
    assert (status, found["redis rights"]["state"]) == (0, "ok")
    own_redis.command("ACL", "SETUSER", "poor", "on", ">pw", "~kvs:1:*", "+getrange", "+set")
    poor = own_redis.url.replace("//", "//poor:pw@")
    status, found = doctor(*flags, poor)
    assert status == 1
    assert "eval" in found["redis rights"]["saw"]
    assert "pw" not in found["redis rights"]["saw"].split("password")[0]


def test_doctor_tells_engines_apart_that_share_nothing(doctor: Doctor, server: LocalServer) -> None:
    from prompts import other_revision

    for kind in (SMALL, other_revision(SMALL)):
        store(server.connect("grpc", kind), 1, 1)
    _, found = doctor("--address", server.address)
    (row,) = (row for name, row in found.items() if name.startswith("engines of"))
    assert row["state"] == "warn"
    assert "model_revision" in row["saw"]


def test_doctor_knows_file_systems_and_limits() -> None:
    assert file_system_of(Path("/proc/self")) == "proc"
    assert memory_limit_bytes() > 1 << 20
