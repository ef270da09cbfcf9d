"""Redis under TLS and an ACL, as one server, behind Sentinels and as a Cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest
from contracts.chunks import make_info, payload
from contracts.shelf import assert_holds, get, put
from helpers.credentials import Authority
from helpers.local_server import eventually
from helpers.redis_deployments import RedisCluster, SentinelSetup
from helpers.redis_process import RedisProcess, TlsFiles
from structlog.testing import capture_logs

from kvstore.proto.errors import TierUnavailableError
from kvstore.server.cluster.directory import Directory
from kvstore.server.cluster.membership import NodeAddress
from kvstore.server.settings.values import Limits
from kvstore.server.telemetry.metrics import Counters
from kvstore.tiers.redis import RedisTier, check_health
from kvstore.tiers.redis_client import DIRECTORY_RIGHTS, TIER_RIGHTS, RedisClient

RedisTierMaker = Callable[..., RedisTier]

PREFIX = "team:kv:"
PASSWORD = "p@ss/w:rd"
RIGHTS = [f"+{word}" for word in (*TIER_RIGHTS, *DIRECTORY_RIGHTS, "cluster|slots")]


class Deployment(Protocol):
    url: str

    def reset(self) -> None: ...

    def stop(self) -> None: ...


class _Single:
    def __init__(self, folder: Path, tls: TlsFiles) -> None:
        self.nodes = [RedisProcess(folder, tls=tls)]
        self.nodes[0].start()
        self.url = self.nodes[0].url
        self.reset = self.nodes[0].reset

    def stop(self) -> None:
        self.nodes[0].client.close()
        self.nodes[0].stop()


SHOWN = (("good", 1), ("old", -1))
KINDS = {"single": _Single, "sentinel": SentinelSetup, "cluster": RedisCluster}


@pytest.fixture(scope="module", params=sorted(KINDS))
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """A deployment of each kind that speaks TLS alone and has a user with few rights."""
    folder = tmp_path_factory.mktemp(request.param)
    made = KINDS[request.param](folder, TlsFiles.make(folder))
    for node in servers(made):
        grant(node, RIGHTS)
    yield made
    made.stop()


def servers(deployment: Deployment) -> list[RedisProcess]:
    if isinstance(deployment, SentinelSetup):
        return [deployment.master, deployment.replica]
    return deployment.nodes  # type: ignore[attr-defined,no-any-return]


def grant(node: RedisProcess, rights: list[str]) -> None:
    words = ["ACL", "SETUSER", "kvstore", "reset", "on", f">{PASSWORD}", f"~{PREFIX}*", *rights]
    node.command(*words)


def as_user(url: str, password: str = "p%40ss%2Fw%3Ard") -> str:
    return url.replace("://", f"://kvstore:{password}@", 1)


def failure_of(tier: RedisTier) -> str:
    with pytest.raises(TierUnavailableError) as caught:
        tier.find([make_info(1, 1).key])
    return str(caught.value)


def test_user_with_few_rights_and_a_prefix_of_its_own_keeps_chunks_over_tls(
    deployment: Deployment, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(as_user(deployment.url), prefix=PREFIX)
    infos = [make_info(seed, 10_000) for seed in range(8)]
    for info in infos:
        assert put(tier, info, payload(1, info.size_bytes))
    other = open_redis_tier(as_user(deployment.url), prefix=PREFIX)
    assert other.find([info.key for info in infos]) == infos
    assert_holds(other, infos[3], payload(1, 10_000))
    assert {info.key for info in other.scan()} == {info.key for info in infos}
    assert other.delete(infos[0].key)
    assert get(tier, infos[0]) is None
    elsewhere = open_redis_tier(as_user(deployment.url), prefix="other:")
    assert "NoPermissionError" in failure_of(elsewhere)
    assert "--redis-prefix" in failure_of(elsewhere)


def test_a_strange_certificate_a_wrong_password_and_plain_text_are_refused(
    deployment: Deployment, open_redis_tier: RedisTierMaker, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path)
    url = deployment.url.rpartition("ssl_ca_certs=")[0] + f"ssl_ca_certs={stranger.path}"
    tier = open_redis_tier(as_user(url), prefix=PREFIX)
    failure = failure_of(tier)
    assert "CERTIFICATE_VERIFY_FAILED" in failure
    assert "--redis-tls-ca" in failure
    assert "p%40ss" not in failure
    failure = failure_of(open_redis_tier(as_user(deployment.url, "guessed"), prefix=PREFIX))
    assert "check the user and its password" in failure
    assert "guessed" not in failure
    url = deployment.url.replace("rediss", "redis").partition("?ssl")[0].partition("&ssl")[0]
    assert failure_of(open_redis_tier(as_user(url), prefix=PREFIX))


def test_certificate_that_expired_is_refused_as_such(
    tmp_path: Path, open_redis_tier: RedisTierMaker
) -> None:
    authority = Authority(tmp_path)
    good, old = (authority.issue(name, hosts=["127.0.0.1"], days=days) for name, days in SHOWN)
    redis = RedisProcess(tmp_path, tls=TlsFiles(authority.path, *good))
    redis.start()
    try:
        redis.command("CONFIG", "SET", "tls-cert-file", str(old[0]), "tls-key-file", str(old[1]))
        failure = failure_of(open_redis_tier(redis.url))
    finally:
        redis.stop()
        redis.client.close()
    assert "certificate has expired" in failure
    assert "that its certificates are valid" in failure


def put_and_delete(tier: RedisTier) -> None:
    info = make_info(50, 10_000)
    put(tier, info, payload(1, 10_000))
    tier.delete(info.key)


def test_forbidden_command_is_named_with_what_mends_it(
    deployment: Deployment, open_redis_tier: RedisTierMaker
) -> None:
    try:
        for word in ("set", "eval", "scan"):
            for node in servers(deployment):
                grant(node, [right for right in RIGHTS if right != f"+{word}"])
            tier = open_redis_tier(as_user(deployment.url), prefix=PREFIX)
            with pytest.raises(TierUnavailableError, match=rf"'{word}'.*\+{word}[, ]"):
                put_and_delete(tier)
    finally:
        for node in servers(deployment):
            grant(node, RIGHTS)


@contextmanager
def directories(url: str, count: int) -> Iterator[list[Directory]]:
    """Open directories of nodes that see each other."""
    made = []
    for number in range(1, count + 1):
        me = NodeAddress(f"n{number}", number, "", f"10.0.0.{number}:1")
        link = RedisClient("redis", as_user(url), 5000, 2)
        limits = Limits(directory_ttl_ms=800, breaker_failures=9)
        made.append(Directory(link, me, PREFIX, limits, Counters()))
        made[-1].start()
    try:
        for one in made:
            assert eventually(lambda one=one: len(one.report().nodes) == count - 1)  # type: ignore[misc]
        yield made
    finally:
        for one in made:
            one.close()


def test_node_directory_works_for_such_a_user(deployment: Deployment) -> None:
    keys = [make_info(seed, 1).key for seed in range(40)]
    with directories(deployment.url, 2) as (first, second):
        first.announce(keys)
        assert eventually(lambda: len(second.holders(keys, 5.0)) == 40)
        assert second.holders(keys, 5.0)[keys[7]] == (first.me,)
        first.withdraw(keys[:20])
        assert eventually(lambda: set(second.holders(keys, 5.0)) == set(keys[20:]))


@pytest.mark.parametrize("deployment", ["cluster"], indirect=True)
def test_master_of_a_tls_cluster_that_is_down_costs_its_slots_alone_and_is_named(
    deployment: RedisCluster, open_redis_tier: RedisTierMaker
) -> None:
    deployment.reset()
    tier = open_redis_tier(as_user(deployment.url), prefix=PREFIX, timeout_ms=2000)
    infos = [make_info(seed, 5000) for seed in range(12)]
    keys = [info.key for info in infos]
    for info in infos:
        assert put(tier, info, payload(1, 5000))
    gone = deployment.nodes[1]
    held = {name for name in gone.names() if name.endswith(b":m")}
    lost = {info.key for info in infos if manifest(info.key.hex()) in held}
    assert lost
    with directories(deployment.url, 2) as (first, second):
        first.announce(keys)
        assert eventually(lambda: len(second.holders(keys, 5.0)) == 12)
        gone.stop()
        found = tier.find(keys)
        assert {info.key for info in found if info} == set(keys) - lost
        assert eventually(lambda: 0 < len(second.holders(keys, 5.0)) < 12)
        assert eventually(
            lambda: [one.node_id for one in second.report().nodes] == [first.me.node_id]
        )
        link = RedisClient("redis", as_user(deployment.url), 2000, 1)
        seen = list(check_health(link))
        link.close()
        assert [f":{gone.port} does not answer; its slots miss" in one.saw for one in seen] == [
            True
        ]
        gone.start()
        grant(gone, RIGHTS)
        assert eventually(deployment.is_formed)
        assert eventually(lambda: len(second.holders(keys, 5.0)) == 12), "the rest is said again"


def manifest(key: str) -> bytes:
    return f"{PREFIX}{{{key}}}:m".encode()


def test_full_redis_that_evicts_nothing_is_warned_of_at_the_start(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    redis.client.config_set("maxmemory", redis.client.info("memory")["used_memory"])
    with capture_logs() as logs:
        open_redis_tier(redis.url)
    (warning,) = logs
    assert "is full" in warning["event"]
    assert "allkeys-lru" in warning["fix"]
    redis.client.config_set("maxmemory-policy", "allkeys-lru")
    with capture_logs() as calm:
        open_redis_tier(redis.url)
    assert calm == []
