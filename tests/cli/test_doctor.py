"""What `kvstore doctor` finds: settings, the machine, a server, Redis, clocks, files of trust."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
from helpers.credentials import Authority
from helpers.kvstore_command import Kvstore
from helpers.local_server import LocalServer, eventually
from helpers.redis_deployments import RedisCluster
from helpers.redis_process import RedisProcess, TlsFiles

from kvstore.cli.doctor import (
    CHECKS,
    SECRET,
    TRUSTED,
    Finding,
    check_files,
    check_redis,
    check_settings,
    file_system_of,
)
from kvstore.client.server_state import status_from_message
from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.settings.process_limits import memory_limit_bytes
from kvstore.server.settings.settings import ReadableFile, Settings, load_config
from kvstore.tiers.redis_client import DIRECTORY_RIGHTS, TIER_RIGHTS

Row = dict[str, str]
Look = Callable[..., tuple[int, dict[str, Row]]]


@pytest.fixture
def doctor(kvstore: Kvstore) -> Look:
    """Return the exit status and the findings by check."""

    def look(*flags: str) -> tuple[int, dict[str, Row]]:
        sizes = ("--tiers", "cpu", "--cpu", "16MiB", "--address", "127.0.0.1:1")
        run = kvstore("doctor", "--json", *sizes, *flags)
        return run.status, {row["check"]: row for row in json.loads(run.out)["checks"]}

    return look


# --- settings


@pytest.mark.parametrize("command", [("config", "validate"), ("config", "show"), ("doctor",)])
def test_settings_are_refused_with_their_name_and_what_to_give(
    kvstore: Kvstore, tmp_path: Path, command: tuple[str, ...]
) -> None:
    misspelt = tmp_path / "kvstore.yaml"
    misspelt.write_text("write_budgte: 0\n")
    for argv, words in (
        (("--wirte", "evict"), ["--wirte", "--write"]),
        (("--cpu", "8Gigs"), ["cpu_size", "8Gigs"]),
        (("--tiers", "cpu,redis"), ["redis"]),
        (("--config", misspelt), ["write_budgte", "did you mean write_budget?"]),
    ):
        status, out, err = kvstore(*command, *argv)
        assert (status, out, err.startswith("kvstore: ")) == (2, "", True), argv
        assert [word for word in words if word not in err] == []


# --- the machine and a server


def test_doctor_finds_a_machine_that_can_serve_in_order(
    doctor: Look, server: LocalServer, tmp_path: Path
) -> None:
    folder = tmp_path / "d"
    status, found = doctor(
        *("--tiers", "cpu,disk", "--disk", f"8MiB:{folder}", "--address", server.address)
    )
    assert status == 0
    names = ("memory", "server", "tier cpu", "tier disk")
    assert {found[name]["state"] for name in names} == {"ok"}
    assert "MB/s" in found[f"disk {folder}"]["saw"]
    assert list(tmp_path.glob(".kvstore-doctor*")) == []
    status, found = doctor("--tiers", "cpu,disk", "--disk", f"900TiB:{folder}")
    row = found[f"disk {folder}"]
    assert (status, row["state"], "give at most" in row["fix"]) == (1, "fail", True)
    assert not folder.exists()
    row = doctor("--tiers", "cpu", "--redis", "redis://127.0.0.1:1")[1]["tiers"]
    assert (row["saw"], row["fix"]) == ("redis_url has no effect", "add redis to --tiers")


def test_doctor_names_what_would_fail_and_what_to_do(doctor: Look) -> None:
    status, found = doctor(
        *("--tiers", "cpu,redis", "--redis", "redis://127.0.0.1:1/0", "--cpu", "900TiB")
    )
    assert status == 1
    assert file_system_of(Path("/proc/self")) == "proc"
    assert memory_limit_bytes() > 1 << 20
    assert found["memory"]["state"] == found["redis"]["state"] == "fail"
    assert found["server"]["state"] == "warn"
    assert all(row["fix"] for row in found.values() if row["state"] != "ok")


# --- Redis


def grant(redis: RedisProcess, *words: str) -> None:
    rights = [f"+{word}" for word in words]
    redis.command("ACL", "SETUSER", "kvstore", "reset", "on", ">pw", "~team:*", *rights)


def test_rights_are_tried_on_names_with_the_prefix_and_missing_ones_named(
    doctor: Look, own_redis: RedisProcess, tmp_path: Path
) -> None:
    own_redis.start()
    password = tmp_path / "password"
    password.write_text("pw")
    flags = (
        *("--tiers", "cpu,redis", "--redis", own_redis.url, "--redis-prefix", "team:"),
        *("--redis-username", "kvstore", "--redis-password-file", str(password)),
    )
    grant(own_redis, "getrange", "set")
    status, found = doctor(*flags)
    assert status == 1
    assert "eval (" in found["redis rights"]["saw"]
    assert "pw" not in found["redis rights"]["saw"].replace("password", "")
    grant(own_redis, *TIER_RIGHTS)
    assert doctor(*flags)[1]["redis rights"]["state"] == "ok"
    row = doctor(*flags, "--directory")[1]["redis rights"]
    assert row["state"] == "fail"
    assert all(f"{word} (" in row["saw"] for word in DIRECTORY_RIGHTS)
    assert "~team:* +getrange" in row["fix"]
    assert " +hgetall" in row["fix"]
    grant(own_redis, *TIER_RIGHTS, *DIRECTORY_RIGHTS)
    assert doctor(*flags, "--directory")[1]["redis rights"]["state"] == "ok"
    assert own_redis.names() == []
    row = doctor(*flags[:4], *flags[6:])[1]["redis"]
    assert (row["state"], "--redis-prefix" in row["saw"]) == ("fail", True)


def test_wrong_authority_and_plain_text_are_told_apart_from_a_redis_that_is_down(
    doctor: Look, tmp_path: Path
) -> None:
    tls = TlsFiles.make(tmp_path)
    (tmp_path / "other").mkdir()
    stranger = TlsFiles.make(tmp_path / "other")
    redis = RedisProcess(tmp_path, tls=tls)
    redis.start()
    try:
        plain = redis.url.partition("?")[0]
        flags = ("--tiers", "cpu,redis", "--redis", plain, "--redis-tls-ca")
        assert doctor(*flags, str(tls.ca))[1]["redis"]["state"] == "ok"
        row = doctor(*flags, str(stranger.ca))[1]["redis"]
        assert row["state"] == "fail"
        assert "--redis-tls-ca" in row["saw"]
    finally:
        redis.stop()
        redis.client.close()
    assert "refused" in doctor(*flags, str(tls.ca))[1]["redis"]["saw"]


def test_full_redis_that_evicts_nothing_fails(doctor: Look, own_redis: RedisProcess) -> None:
    own_redis.start()
    flags = ("--tiers", "cpu,redis", "--redis", own_redis.url)
    assert doctor(*flags)[1]["redis servers"]["state"] == "ok"
    own_redis.client.config_set("maxmemory", 1)
    row = doctor(*flags)[1]["redis servers"]
    assert (row["state"], "noeviction" in row["saw"]) == ("fail", True)
    assert "allkeys-lru" in row["fix"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path)
    yield cluster
    cluster.stop()


def test_cluster_without_a_master_a_slot_or_tolerance_of_either_is_found_out(
    doctor: Look, cluster: RedisCluster
) -> None:
    flags = ("--tiers", "cpu,redis", "--redis", cluster.url, "--redis-timeout-ms", "2000")
    assert doctor(*flags)[1]["redis servers"]["state"] == "ok"
    for node in cluster.nodes:
        node.client.config_set("cluster-require-full-coverage", "yes")
    row = doctor(*flags)[1]["redis servers"]
    assert (row["state"], "full-coverage to no" in row["fix"]) == ("warn", True)
    for node in cluster.nodes:
        node.client.config_set("cluster-require-full-coverage", "no")
    asked = cluster.holder_of(b"{doctor}")
    gone = next(node for node in cluster.nodes if node is not asked)
    gone.stop()
    row = doctor(*flags)[1]["redis servers"]
    assert (row["state"], f":{gone.port} does not answer" in row["saw"]) == ("fail", True)
    gone.start()
    assert eventually(cluster.is_formed)
    for node in cluster.nodes:
        node.command("CLUSTER", "DELSLOTS", "0")
    assert "1 of 16384 slots" in doctor(*flags)[1]["redis servers"]["saw"]


def test_server_whose_id_another_has_is_told_how_to_mend_it(
    doctor: Look, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing = pb.Directory(node_id="a", standing="taken")
    status = status_from_message(pb.StatusResponse(directory=standing))
    monkeypatch.setattr("kvstore.cli.doctor.fetch_status", lambda address: status)
    row = doctor("--address", server.address)[1]["directory"]
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
    found = check_redis(config, lambda: time.time() + skew_s)
    return [one for one in found if one.check == "clock"]


def test_a_clock_that_is_far_off_is_named_with_what_to_do(own_redis: RedisProcess) -> None:
    own_redis.start()
    for skew_s, where in ((3600.0, "ahead of"), (-90.0, "behind")):
        (found,) = clock_findings(own_redis.url, skew_s)
        assert (found.state, where in found.saw, "NTP" in found.fix) == ("warn", True, True)
        assert found.saw.startswith(f"{abs(skew_s):.0f}")
    (found,) = clock_findings(own_redis.url)
    assert (found.state, found.fix) == ("ok", "")
    own_redis.client.acl_setuser("default", enabled=True, nopass=True, commands=["-time"])
    assert clock_findings(own_redis.url) == [], "it may not ask"
    assert clock_findings("redis://127.0.0.1:1/0") == [], "nor is there an answer"
    assert {check_redis, check_files} <= set(CHECKS)


# --- files of trust


def file_findings(setting: str, path: Path, mode: int, **others: object) -> list[Finding]:
    path.write_bytes(b"x")
    path.chmod(mode)
    # What a file holds is looked at elsewhere: only its mode counts here.
    return list(check_files(Settings().model_copy(update={setting: path, **others})))


def test_a_secret_that_anybody_may_read_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    for setting in SECRET:
        (found,) = file_findings(setting, path, 0o644)
        assert (found.check, found.state) == (setting.replace("_", " "), "warn")
        assert (found.saw, found.fix) == (f"every user may read {path}", f"chmod o-rwx {path}")
        assert file_findings(setting, path, 0o640) == []
    (found,) = file_findings("jwt_key", path, 0o646, jwt_algorithm="HS256")
    assert "read and change" in found.saw, "what tokens are signed with is no public key"


def test_every_setting_that_names_a_file_of_trust_is_looked_at(tmp_path: Path) -> None:
    is_readable = get_args(ReadableFile)[1]
    public = {"tls_cert", "tls_crl", "redis_tls_cert"}  # shown to whoever connects, or signed
    kinds = {name: get_args(field.annotation) for name, field in Settings.model_fields.items()}
    named = {
        name
        for name, parts in kinds.items()
        if any(is_readable in getattr(part, "__metadata__", ()) for part in parts)
    }
    assert {*SECRET, *TRUSTED} == named - public
    path = tmp_path / "believed"
    for setting in TRUSTED:  # may be read by anybody and changed by nobody
        assert file_findings(setting, path, 0o644) == []
        (found,) = file_findings(setting, path, 0o646)
        assert found.saw == f"every user may change {path}"


def test_the_end_of_certificates_and_of_authorities_is_told_before_and_after(
    doctor: Look, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    for days, state, words in (
        (-1.5, "fail", "expired 1 days ago"), (3.5, "warn", "3 days left"),
        (90, "ok", "89 days left"),
    ):  # fmt: skip
        cert, key = authority.issue("server", days=days)
        status, rows = doctor("--tls-cert", str(cert), "--tls-key", str(key))
        row = rows["certificate"]
        assert (status, row["state"], row["saw"]) == (int(state == "fail"), state, words)
        assert bool(row["fix"]) == (state != "ok")
    late, _ = authority.issue("late", days=-1)
    empty, both = tmp_path / "empty.pem", tmp_path / "both.pem"
    empty.write_text("nothing\n")
    both.write_bytes(late.read_bytes() + cert.read_bytes())
    status, rows = doctor(
        *("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(both)),
        *("--peers", "127.0.0.1:1", "--peer-ca", str(late)),
        *("--redis", "rediss://127.0.0.1:1/0", "--redis-tls-ca", str(empty)),
    )
    assert status == 1
    assert rows["authority of clients"]["state"] == "ok", "one that is valid will do"
    assert rows["authority of peers"]["saw"] == "expired 1 days ago"
    assert "reloads it" in rows["authority of peers"]["fix"]
    assert rows["authority of Redis"]["state"] == "fail"
    assert "--redis-tls-ca" in rows["authority of Redis"]["fix"]
