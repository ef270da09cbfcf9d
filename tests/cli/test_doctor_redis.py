"""What `kvstore doctor` says of Redis: its user's rights, its servers, and the directory in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_server import LocalServer, eventually
from redis_deployments import RedisCluster
from redis_process import RedisProcess, TlsFiles

from kvstore.cli.main import main
from kvstore.proto import kvstore_pb2 as pb
from kvstore.tiers.redis_client import DIRECTORY_RIGHTS, TIER_RIGHTS

Row = dict[str, str]
Doctor = Callable[..., list[Row]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Return what doctor finds that has to do with Redis."""

    def look(*flags: str, address: str = "127.0.0.1:1") -> list[Row]:
        with pytest.raises(SystemExit):
            main(["doctor", "--json", "--cpu", "16MiB", "--address", address, *flags])
        rows = json.loads(capsys.readouterr().out)["checks"]
        return [row for row in rows if row["check"].startswith(("redis", "directory"))]

    return look


def of(rows: list[Row], check: str) -> Row:
    (row,) = (row for row in rows if row["check"] == check)
    return row


def grant(redis: RedisProcess, *words: str) -> None:
    rights = [f"+{word}" for word in words]
    redis.command("ACL", "SETUSER", "kvstore", "reset", "on", ">pw", "~team:*", *rights)


def test_rights_are_tried_on_names_with_the_prefix_and_missing_ones_named(
    doctor: Doctor, own_redis: RedisProcess, tmp_path: Path
) -> None:
    own_redis.start()
    password = tmp_path / "password"
    password.write_text("pw")
    flags = (
        *("--tiers", "cpu,redis", "--redis", own_redis.url, "--redis-prefix", "team:"),
        *("--redis-username", "kvstore", "--redis-password-file", str(password)),
    )
    grant(own_redis, *TIER_RIGHTS)
    assert of(doctor(*flags), "redis rights")["state"] == "ok"
    row = of(doctor(*flags, "--directory"), "redis rights")
    assert row["state"] == "fail"
    assert all(f"{word} (" in row["saw"] for word in DIRECTORY_RIGHTS)
    assert "~team:* +getrange" in row["fix"]
    assert " +hgetall" in row["fix"]
    grant(own_redis, *TIER_RIGHTS, *DIRECTORY_RIGHTS)
    assert of(doctor(*flags, "--directory"), "redis rights")["state"] == "ok"
    assert own_redis.names() == []
    row = of(doctor(*flags[:4], *flags[6:]), "redis")
    assert row["state"] == "fail"
    assert "--redis-prefix" in row["saw"]


def test_wrong_authority_and_plain_text_are_told_apart_from_a_redis_that_is_down(
    doctor: Doctor, tmp_path: Path
) -> None:
    tls = TlsFiles.make(tmp_path)
    (tmp_path / "other").mkdir()
    stranger = TlsFiles.make(tmp_path / "other")
    redis = RedisProcess(tmp_path, tls=tls)
    redis.start()
    try:
        plain = redis.url.partition("?")[0]
        flags = ("--tiers", "cpu,redis", "--redis", plain, "--redis-tls-ca")
        assert of(doctor(*flags, str(tls.ca)), "redis")["state"] == "ok"
        row = of(doctor(*flags, str(stranger.ca)), "redis")
        assert row["state"] == "fail"
        assert "--redis-tls-ca" in row["saw"]
    finally:
        redis.stop()
        redis.client.close()
    assert "refused" in of(doctor(*flags, str(tls.ca)), "redis")["saw"]


def test_full_redis_that_evicts_nothing_fails(doctor: Doctor, own_redis: RedisProcess) -> None:
    own_redis.start()
    flags = ("--tiers", "cpu,redis", "--redis", own_redis.url)
    assert of(doctor(*flags), "redis servers")["state"] == "ok"
    own_redis.client.config_set("maxmemory", 1)
    row = of(doctor(*flags), "redis servers")
    assert (row["state"], "noeviction" in row["saw"]) == ("fail", True)
    assert "allkeys-lru" in row["fix"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path)
    yield cluster
    cluster.stop()


def test_cluster_without_a_master_a_slot_or_tolerance_of_either_is_found_out(
    doctor: Doctor, cluster: RedisCluster
) -> None:
    flags = ("--tiers", "cpu,redis", "--redis", cluster.url, "--redis-timeout-ms", "2000")
    assert of(doctor(*flags), "redis servers")["state"] == "ok"
    for node in cluster.nodes:
        node.client.config_set("cluster-require-full-coverage", "yes")
    row = of(doctor(*flags), "redis servers")
    assert (row["state"], "full-coverage to no" in row["fix"]) == ("warn", True)
    for node in cluster.nodes:
        node.client.config_set("cluster-require-full-coverage", "no")
    asked = cluster.holder_of(b"{doctor}")
    gone = next(node for node in cluster.nodes if node is not asked)
    gone.stop()
    row = of(doctor(*flags), "redis servers")
    assert (row["state"], f":{gone.port} does not answer" in row["saw"]) == ("fail", True)
    gone.start()
    assert eventually(cluster.is_formed)
    for node in cluster.nodes:
        node.command("CLUSTER", "DELSLOTS", "0")
    assert "1 of 16384 slots" in of(doctor(*flags), "redis servers")["saw"]


def test_server_whose_id_another_has_is_told_how_to_mend_it(
    doctor: Doctor, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing = pb.Directory(node_id="a", standing="taken")
    status = pb.StatusResponse(directory=standing)
    monkeypatch.setattr("kvstore.cli.doctor.ask_status", lambda address: status)
    row = of(doctor(address=server.address), "directory")
    assert (row["state"], "--node-id" in row["fix"]) == ("warn", True)
    assert "another node has its id" in row["saw"]
