"""What `kvstore doctor` finds: the machine, Redis, the clock, files of trust, a server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
from helpers.kvstore_command import Kvstore
from helpers.local_server import LocalServer, eventually
from helpers.prompts import SMALL, other_revision, store
from helpers.redis_deployments import RedisCluster
from helpers.redis_process import RedisProcess, TlsFiles

from kvstore.cli.doctor import (
    CHECKS,
    SECRET,
    TRUSTED,
    Finding,
    check_clock,
    check_files,
    check_settings,
    file_system_of,
)
from kvstore.client.server_state import status_from_message
from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.settings.process_limits import memory_limit_bytes
from kvstore.server.settings.settings import ReadableFile, Settings, load_config
from kvstore.tiers.redis_client import DIRECTORY_RIGHTS, TIER_RIGHTS

Row = dict[str, str]
Doctor = Callable[..., list[Row]]
Look = Callable[..., tuple[int, dict[str, Row]]]


@pytest.fixture
def doctor(kvstore: Kvstore, tmp_path: Path) -> Look:
    """Return the exit status and the findings by check."""

    def look(*flags: str) -> tuple[int, dict[str, Row]]:
        sizes = ("--cpu", "16MiB", "--disk", f"8MiB:{tmp_path / 'd'}")
        run = kvstore("doctor", "--json", *sizes, *flags)
        return run.status, {row["check"]: row for row in json.loads(run.out)["checks"]}

    return look


# --- the machine and a server


def test_doctor_finds_a_machine_that_can_serve_in_order(
    doctor: Look, server: LocalServer, tmp_path: Path
) -> None:
    status, found = doctor("--address", server.address)
    assert status == 0
    assert {found[name]["state"] for name in ("memory", "server", "tier cpu", "tier disk")} == {
        "ok"
    }
    assert "MB/s" in found[f"disk {tmp_path / 'd'}"]["saw"]
    assert list(tmp_path.glob(".kvstore-doctor*")) == []


def test_doctor_names_what_would_fail_and_what_to_do(doctor: Look) -> None:
    status, found = doctor(
        *("--tiers", "cpu,disk,redis", "--redis", "redis://127.0.0.1:1/0", "--cpu", "900TiB"),
        *("--address", "127.0.0.1:1"),
    )
    assert status == 1
    assert found["memory"]["state"] == found["redis"]["state"] == "fail"
    assert found["server"]["state"] == "warn"
    assert all(row["fix"] for row in found.values() if row["state"] != "ok")


def test_doctor_tries_what_the_user_of_redis_may_do(doctor: Look, own_redis: RedisProcess) -> None:
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


def test_doctor_tells_engines_apart_that_share_nothing(doctor: Look, server: LocalServer) -> None:
    for kind in (SMALL, other_revision(SMALL)):
        store(server.connect("grpc", kind), 1, 1)
    _, found = doctor("--address", server.address)
    (row,) = (row for name, row in found.items() if name.startswith("engines of"))
    assert row["state"] == "warn"
    assert "model_revision" in row["saw"]


def test_doctor_knows_file_systems_and_limits() -> None:
    assert file_system_of(Path("/proc/self")) == "proc"
    assert memory_limit_bytes() > 1 << 20


# --- Redis


@pytest.fixture
def redis_rows(kvstore: Kvstore) -> Doctor:
    """Return what doctor finds that has to do with Redis."""

    def look(*flags: str, address: str = "127.0.0.1:1") -> list[Row]:
        run = kvstore("doctor", "--json", "--cpu", "16MiB", "--address", address, *flags)
        rows = json.loads(run.out)["checks"]
        return [row for row in rows if row["check"].startswith(("redis", "directory"))]

    return look


def of(rows: list[Row], check: str) -> Row:
    (row,) = (row for row in rows if row["check"] == check)
    return row


def grant(redis: RedisProcess, *words: str) -> None:
    rights = [f"+{word}" for word in words]
    redis.command("ACL", "SETUSER", "kvstore", "reset", "on", ">pw", "~team:*", *rights)


def test_rights_are_tried_on_names_with_the_prefix_and_missing_ones_named(
    redis_rows: Doctor, own_redis: RedisProcess, tmp_path: Path
) -> None:
    own_redis.start()
    password = tmp_path / "password"
    password.write_text("pw")
    flags = (
        *("--tiers", "cpu,redis", "--redis", own_redis.url, "--redis-prefix", "team:"),
        *("--redis-username", "kvstore", "--redis-password-file", str(password)),
    )
    grant(own_redis, *TIER_RIGHTS)
    assert of(redis_rows(*flags), "redis rights")["state"] == "ok"
    row = of(redis_rows(*flags, "--directory"), "redis rights")
    assert row["state"] == "fail"
    assert all(f"{word} (" in row["saw"] for word in DIRECTORY_RIGHTS)
    assert "~team:* +getrange" in row["fix"]
    assert " +hgetall" in row["fix"]
    grant(own_redis, *TIER_RIGHTS, *DIRECTORY_RIGHTS)
    assert of(redis_rows(*flags, "--directory"), "redis rights")["state"] == "ok"
    assert own_redis.names() == []
    row = of(redis_rows(*flags[:4], *flags[6:]), "redis")
    assert row["state"] == "fail"
    assert "--redis-prefix" in row["saw"]


def test_wrong_authority_and_plain_text_are_told_apart_from_a_redis_that_is_down(
    redis_rows: Doctor, tmp_path: Path
) -> None:
    tls = TlsFiles.make(tmp_path)
    (tmp_path / "other").mkdir()
    stranger = TlsFiles.make(tmp_path / "other")
    redis = RedisProcess(tmp_path, tls=tls)
    redis.start()
    try:
        plain = redis.url.partition("?")[0]
        flags = ("--tiers", "cpu,redis", "--redis", plain, "--redis-tls-ca")
        assert of(redis_rows(*flags, str(tls.ca)), "redis")["state"] == "ok"
        row = of(redis_rows(*flags, str(stranger.ca)), "redis")
        assert row["state"] == "fail"
        assert "--redis-tls-ca" in row["saw"]
    finally:
        redis.stop()
        redis.client.close()
    assert "refused" in of(redis_rows(*flags, str(tls.ca)), "redis")["saw"]


def test_full_redis_that_evicts_nothing_fails(redis_rows: Doctor, own_redis: RedisProcess) -> None:
    own_redis.start()
    flags = ("--tiers", "cpu,redis", "--redis", own_redis.url)
    assert of(redis_rows(*flags), "redis servers")["state"] == "ok"
    own_redis.client.config_set("maxmemory", 1)
    row = of(redis_rows(*flags), "redis servers")
    assert (row["state"], "noeviction" in row["saw"]) == ("fail", True)
    assert "allkeys-lru" in row["fix"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path)
    yield cluster
    cluster.stop()


def test_cluster_without_a_master_a_slot_or_tolerance_of_either_is_found_out(
    redis_rows: Doctor, cluster: RedisCluster
) -> None:
    flags = ("--tiers", "cpu,redis", "--redis", cluster.url, "--redis-timeout-ms", "2000")
    assert of(redis_rows(*flags), "redis servers")["state"] == "ok"
    for node in cluster.nodes:
        node.client.config_set("cluster-require-full-coverage", "yes")
    row = of(redis_rows(*flags), "redis servers")
    assert (row["state"], "full-coverage to no" in row["fix"]) == ("warn", True)
    for node in cluster.nodes:
        node.client.config_set("cluster-require-full-coverage", "no")
    asked = cluster.holder_of(b"{doctor}")
    gone = next(node for node in cluster.nodes if node is not asked)
    gone.stop()
    row = of(redis_rows(*flags), "redis servers")
    assert (row["state"], f":{gone.port} does not answer" in row["saw"]) == ("fail", True)
    gone.start()
    assert eventually(cluster.is_formed)
    for node in cluster.nodes:
        node.command("CLUSTER", "DELSLOTS", "0")
    assert "1 of 16384 slots" in of(redis_rows(*flags), "redis servers")["saw"]


def test_server_whose_id_another_has_is_told_how_to_mend_it(
    redis_rows: Doctor, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing = pb.Directory(node_id="a", standing="taken")
    status = status_from_message(pb.StatusResponse(directory=standing))
    monkeypatch.setattr("kvstore.cli.doctor.fetch_status", lambda address: status)
    row = of(redis_rows(address=server.address), "directory")
    assert (row["state"], "--node-id" in row["fix"]) == ("warn", True)
    assert "another node has its id" in row["saw"]


def test_flags_of_another_server_are_named() -> None:
    config = load_config(["--tiers", "cpu", "--cpu", "64MiB"])

    def found(*tiers: pb.TierStatus) -> list[Finding]:
        return list(check_settings(status_from_message(pb.StatusResponse(tiers=tiers)), config))

    disk = pb.TierStatus(name="disk", capacity_bytes=2 << 30)
    assert found(pb.TierStatus(name="cpu", capacity_bytes=64 << 20)) == []
    assert found(pb.TierStatus(name="cpu")) == [], "its sizes are hidden"
    (other,) = found(pb.TierStatus(name="cpu", capacity_bytes=8 << 30), disk)
    assert (other.state, other.saw.endswith(": disk, cpu")) == ("warn", True)


# --- the clock


def clock_findings(url: str, skew_s: float = 0.0) -> list[Finding]:
    config = load_config(["--tiers", "cpu,redis", "--cpu", "64MiB", "--redis", url])
    return list(check_clock(config, lambda: time.time() + skew_s))


@pytest.mark.parametrize(("skew_s", "where"), [(3600.0, "ahead of"), (-90.0, "behind")])
def test_a_clock_that_is_far_off_is_named_with_what_to_do(
    own_redis: RedisProcess, skew_s: float, where: str
) -> None:
    own_redis.start()
    (found,) = clock_findings(own_redis.url, skew_s)
    assert found.state == "warn"
    assert found.saw.startswith(f"{abs(skew_s):.0f}")
    assert where in found.saw
    assert "NTP" in found.fix


def test_a_clock_that_agrees_is_ok(own_redis: RedisProcess) -> None:
    own_redis.start()
    (found,) = clock_findings(own_redis.url)
    assert (found.state, found.fix) == ("ok", "")


def test_who_may_not_ask_or_gets_no_answer_is_told_nothing(own_redis: RedisProcess) -> None:
    own_redis.start()
    own_redis.client.acl_setuser("default", enabled=True, nopass=True, commands=["-time"])
    assert clock_findings(own_redis.url) == []
    assert clock_findings("redis://127.0.0.1:1/0") == []


def test_the_doctor_looks_at_the_clock() -> None:
    assert check_clock in CHECKS


# --- files of trust


def file_findings(setting: str, path: Path, mode: int, **others: object) -> list[Finding]:
    path.write_bytes(b"x")
    path.chmod(mode)
    # What a file holds is looked at elsewhere: only its mode counts here.
    return list(check_files(Settings().model_copy(update={setting: path, **others})))


@pytest.mark.parametrize("setting", SECRET)
def test_a_secret_that_anybody_may_read_is_named_with_what_to_do(
    tmp_path: Path, setting: str
) -> None:
    path = tmp_path / "secret"
    (found,) = file_findings(setting, path, 0o644)
    assert (found.check, found.state) == (setting.replace("_", " "), "warn")
    assert found.saw == f"every user may read {path}"
    assert found.fix == f"chmod o-rwx {path}"
    assert file_findings(setting, path, 0o640) == []


@pytest.mark.parametrize("setting", TRUSTED)
def test_whom_the_server_believes_may_be_read_by_anybody_and_changed_by_nobody(
    tmp_path: Path, setting: str
) -> None:
    path = tmp_path / "believed"
    assert file_findings(setting, path, 0o644) == []
    (found,) = file_findings(setting, path, 0o646)
    assert found.saw == f"every user may change {path}"


def test_the_secret_that_tokens_are_signed_with_is_no_public_key(tmp_path: Path) -> None:
    (found,) = file_findings("jwt_key", tmp_path / "key", 0o646, jwt_algorithm="HS256")
    assert "read and change" in found.saw


def test_every_setting_that_names_a_file_of_trust_is_looked_at() -> None:
    is_readable = get_args(ReadableFile)[1]
    public = {"tls_cert", "tls_crl", "redis_tls_cert"}  # shown to whoever connects, or signed
    kinds = {name: get_args(field.annotation) for name, field in Settings.model_fields.items()}
    named = {
        name
        for name, parts in kinds.items()
        if any(is_readable in getattr(part, "__metadata__", ()) for part in parts)
    }
    assert {*SECRET, *TRUSTED} == named - public


def test_the_doctor_looks_at_the_files() -> None:
    assert check_files in CHECKS
