"""The Redis tier over Sentinel and over a Cluster: the contract, and what fails over."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from contracts.chunks import make_info, payload
from contracts.shelf import assert_counts, assert_holds, get, put
from contracts.tier import TierContract
from helpers.local_server import eventually
from helpers.redis_deployments import RedisCluster, SentinelSetup, raw_reply
from helpers.redis_process import RedisProcess
from structlog.testing import capture_logs

from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.cluster.directory import Directory
from kvstore.server.cluster.membership import NodeAddress
from kvstore.server.settings.values import Limits
from kvstore.server.telemetry.metrics import Counters
from kvstore.tiers.base import Tier
from kvstore.tiers.redis import RedisTier
from kvstore.tiers.redis_chunks import KeyNames
from kvstore.tiers.redis_client import MIN_RENEW_S, RedisClient

RedisTierMaker = Callable[..., RedisTier]

NAMES = KeyNames("kvs:1:")


@pytest.fixture(scope="module")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """Three masters for all tests here that leave them as they were."""
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(running_cluster: RedisCluster) -> RedisCluster:
    """The Cluster, empty."""
    running_cluster.reset()
    return running_cluster


@pytest.fixture(scope="module")
def running_sentinel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelSetup]:
    """A watched master for all tests here that leave it as it was."""
    setup = SentinelSetup(tmp_path_factory.mktemp("sentinel"))
    yield setup
    setup.stop()


class RedisContract(TierContract):
    url: str

    def make_tier(self, capacity_bytes: int, tmp_path: Path) -> Tier:
        return RedisTier(self.url, capacity_bytes, timeout_ms=10_000, part_bytes=4096)


class TestSentinelTier(RedisContract):
    @pytest.fixture(autouse=True)
    def _servers(self, running_sentinel: SentinelSetup) -> None:
        running_sentinel.reset()
        self.url = running_sentinel.url


class TestClusterTier(RedisContract):
    @pytest.fixture(autouse=True)
    def _servers(self, cluster: RedisCluster) -> None:
        self.url = cluster.url


def on_each_node(cluster: RedisCluster, count: int) -> dict[int, list[ChunkInfo]]:
    """Return *count* chunks for each of the first three nodes, by port."""
    found: dict[int, list[ChunkInfo]] = {node.port: [] for node in cluster.nodes[:3]}
    seed = 0
    while any(len(infos) < count for infos in found.values()):
        info = make_info(seed, 10_000 + seed)
        infos = found[cluster.holder_of(NAMES.manifest(info.key)).port]
        if len(infos) < count:
            infos.append(info)
        seed += 1
    return found


def flat(infos: dict[int, list[ChunkInfo]]) -> list[ChunkInfo]:
    return [info for some in infos.values() for info in some]


def fill_all(tier: Tier, infos: list[ChunkInfo]) -> None:
    for info in infos:
        assert put(tier, info, payload(1, info.size_bytes))


def test_parts_of_a_chunk_share_a_node_and_chunks_are_spread(
    cluster: RedisCluster, open_redis_tier: RedisTierMaker
) -> None:
    infos = on_each_node(cluster, 2)
    fill_all(open_redis_tier(cluster.url), flat(infos))
    for node in cluster.nodes:
        assert len(node.names()) == sum(4 for _ in infos[node.port])
    other = open_redis_tier(cluster.url.rpartition(",")[0])
    assert other.find([info.key for info in flat(infos)]) == flat(infos)
    assert {info.key for info in other.scan()} == {info.key for info in flat(infos)}
    assert_holds(other, flat(infos)[0], payload(1, flat(infos)[0].size_bytes))


def test_lookup_of_many_keys_asks_all_nodes_of_a_cluster(
    cluster: RedisCluster, open_redis_tier: RedisTierMaker
) -> None:
    tier, other = open_redis_tier(cluster.url), open_redis_tier(cluster.url)
    infos = [make_info(seed, 10) for seed in range(700)]
    fill_all(tier, infos[::70])
    expected = [info if at % 70 == 0 else None for at, info in enumerate(infos)]
    assert other.find([info.key for info in infos]) == expected


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    """A Cluster whose nodes a test may kill."""
    cluster = RedisCluster(tmp_path)
    yield cluster
    cluster.stop()


def was_put(tier: Tier, info: ChunkInfo) -> bool:
    try:
        return put(tier, info, payload(1, info.size_bytes))
    except TierUnavailableError:
        return False


def refusal_of(tier: Tier, info: ChunkInfo) -> TierUnavailableError:
    with pytest.raises(TierUnavailableError) as caught:
        put(tier, info, payload(2, info.size_bytes))
    return caught.value


def test_lost_master_makes_its_slots_miss_and_no_others(
    cluster: RedisCluster, open_redis_tier: RedisTierMaker
) -> None:
    infos = on_each_node(cluster, 3)
    tier = open_redis_tier(cluster.url, timeout_ms=1000)
    fill_all(tier, flat(infos))
    before = tier.stats()
    gone, *others = cluster.nodes
    lost, kept = infos[gone.port], [info for node in others for info in infos[node.port]]
    gone.stop()
    for _ in range(2):
        for info in kept:
            assert_holds(tier, info, payload(1, info.size_bytes))
        assert [get(tier, info) for info in lost] == [None] * 3
    keys = [info.key for info in [*lost, *kept]]
    assert tier.find(keys) == [None, None, None, *kept]
    with pytest.raises(TierUnavailableError) as caught:
        tier.delete(lost[0].key)
    assert caught.value.is_partial
    assert refusal_of(tier, lost[1]).is_partial
    assert {info.key for info in tier.scan()} == {info.key for info in kept}
    assert tier.stats() == before, "what cannot be seen stays counted"
    gone.start()
    assert eventually(lambda: was_put(tier, lost[0]))
    assert tier.find(keys) == [lost[0], None, None, *kept]
    assert eventually(cluster.is_formed)


def test_master_that_refuses_makes_its_slots_miss_and_no_others(
    cluster: RedisCluster, open_redis_tier: RedisTierMaker
) -> None:
    infos = on_each_node(cluster, 1)
    fill_all(open_redis_tier(cluster.url), flat(infos))
    for node in cluster.nodes:
        node.command("ACL", "SETUSER", "guest", "on", ">pw", "~*", "+@all")
    guest = cluster.url.replace("://", "://guest:pw@")
    tier, refusing = open_redis_tier(guest), cluster.nodes[0]
    expected = [None if info in infos[refusing.port] else info for info in flat(infos)]
    refusing.client.config_set("min-replicas-to-write", 1)  # a read prolongs the chunk's life
    assert [get(tier, info) is not None for info in flat(infos)] == [bool(i) for i in expected]
    fresh_info = [make_info(seed, 10) for seed in range(20_000, 20_012)]
    refused = [info for info in fresh_info if not was_put(tier, info)]
    assert {cluster.holder_of(NAMES.manifest(info.key)) for info in refused} == {refusing}
    assert len(refused) < len(fresh_info)
    refusing.client.config_set("min-replicas-to-write", 0)
    refusing.client.config_set("maxclients", 1)  # it has one, which sets this
    fresh = open_redis_tier(guest)
    assert fresh.find([info.key for info in flat(infos)]) == expected
    refusing.client.config_set("maxclients", 10_000)
    assert eventually(lambda: fresh.find([info.key for info in flat(infos)]) == flat(infos))
    for node in cluster.nodes:
        node.command("ACL", "DELUSER", "guest")


def test_masters_that_all_refuse_make_the_tier_unavailable(
    cluster: RedisCluster, open_redis_tier: RedisTierMaker
) -> None:
    infos, tier = on_each_node(cluster, 1), open_redis_tier(cluster.url)
    for node in cluster.nodes:
        node.client.config_set("min-replicas-to-write", 1)
    assert [refusal_of(tier, info).is_partial for info in flat(infos)] == [True, True, False]
    for node in cluster.nodes:
        node.client.config_set("min-replicas-to-write", 0)
    fill_all(tier, flat(infos))


@pytest.mark.parametrize("setting", ["maxmemory", "min-replicas-to-write"])
def test_master_that_takes_no_writes_costs_its_entries_and_not_the_directory(
    cluster: RedisCluster, setting: str
) -> None:
    keys = [ChunkKey(number.to_bytes(32, "big")) for number in range(64)]
    refusing = cluster.nodes[0].client
    with ExitStack() as stack:
        first, second = (
            Directory(
                RedisClient("redis", cluster.url, 5000, 4),
                NodeAddress(f"n{at}", at, "", f"10.0.0.{at}:1"),
                "kvs:1:", Limits(directory_ttl_ms=2000), Counters(),
            )
            for at in (1, 2)
        )  # fmt: skip
        for one in (first, second):
            one.start()
            stack.callback(one.close)
        assert eventually(lambda: len(first.report().nodes) == len(second.report().nodes) == 1)
        refusing.config_set(setting, 1)
        stack.callback(refusing.config_set, setting, 0)
        first.announce(keys)
        assert eventually(lambda: 0 < len(second.holders(keys, 5.0)) < len(keys))
        time.sleep(3)  # longer than nodes live without a beat
        assert len(first.report().nodes) == len(second.report().nodes) == 1
        refusing.config_set(setting, 0)
        assert eventually(lambda: len(second.holders(keys, 5.0)) == len(keys))


def test_cluster_that_is_down_as_a_whole_is_unavailable(
    own_cluster: RedisCluster, open_redis_tier: RedisTierMaker
) -> None:
    infos = on_each_node(own_cluster, 1)
    tier = open_redis_tier(own_cluster.url, timeout_ms=1000)
    fill_all(tier, flat(infos))
    gone, *others = own_cluster.nodes
    for node in others:
        node.client.config_set("cluster-require-full-coverage", "yes")
    gone.stop()
    asked = [info for node in others for info in infos[node.port]]
    assert eventually(lambda: "The cluster is down" in why_no_answer(tier, asked))
    assert not refusal_of(tier, infos[others[0].port][0]).is_partial
    own_cluster.stop()
    for info in flat(infos):
        assert eventually(lambda info=info: not refusal_of(tier, info).is_partial)  # type: ignore[misc]


def test_master_that_alone_calls_the_cluster_down_costs_its_slots_and_is_not_the_one_to_ask(
    own_cluster: RedisCluster, open_redis_tier: RedisTierMaker
) -> None:
    infos = on_each_node(own_cluster, 2)
    tier = open_redis_tier(own_cluster.url, timeout_ms=1000)
    fill_all(tier, flat(infos))
    alone, forgotten, _ = own_cluster.nodes
    alone.client.config_set("cluster-require-full-coverage", "yes")
    alone.command("CLUSTER", "FORGET", raw_reply(forgotten, "CLUSTER", "MYID").decode())
    assert eventually(lambda: get(tier, infos[alone.port][0]) is None)
    assert refusal_of(tier, infos[alone.port][1]).is_partial
    time.sleep(MIN_RENEW_S)  # the next call renews the topology
    for info in flat(infos):
        is_kept = info not in infos[alone.port]
        assert (get(tier, info) is not None) == is_kept
        assert tier.find([info.key]) == [info if is_kept else None]


def why_no_answer(tier: Tier, infos: list[ChunkInfo]) -> str:
    try:
        tier.find([info.key for info in infos])
    except TierUnavailableError as error:
        return str(error)
    return ""


def test_replica_that_takes_over_serves_what_its_master_held(
    own_cluster: RedisCluster, open_redis_tier: RedisTierMaker
) -> None:
    infos = on_each_node(own_cluster, 2)
    tier = open_redis_tier(own_cluster.url, timeout_ms=1000)
    master = own_cluster.nodes[0]
    replica = own_cluster.add_replica(master)
    fill_all(tier, flat(infos))
    moved = infos[master.port]
    assert eventually(lambda: len(replica.names()) == 8)
    master.stop()
    assert eventually(lambda: all(get(tier, info) is not None for info in moved))
    assert tier.delete(moved[0].key)
    assert put(tier, moved[0], payload(1, moved[0].size_bytes))
    assert tier.find([info.key for info in flat(infos)]) == flat(infos)


def test_slot_that_moved_is_followed(
    cluster: RedisCluster, open_redis_tier: RedisTierMaker
) -> None:
    first, second, _ = cluster.nodes
    (info, other), name_of = on_each_node(cluster, 2)[first.port], NAMES.manifest
    tier = open_redis_tier(cluster.url)
    assert tier.find([info.key, other.key]) == [None, None]
    cluster.move_slot(name_of(info.key), second)
    try:
        assert put(tier, info, payload(1, info.size_bytes))
        assert put(tier, other, payload(2, other.size_bytes))
        assert_holds(tier, info, payload(1, info.size_bytes))
        assert (len(first.names()), len(second.names())) == (4, 4)
        cluster.reset()
    finally:
        cluster.move_slot(name_of(info.key), first)
    assert get(tier, info) is None
    assert put(tier, info, payload(1, info.size_bytes))
    assert len(first.names()) == 4


def test_slot_that_moved_is_followed_though_another_node_has_not_heard_of_it(
    cluster: RedisCluster, open_redis_tier: RedisTierMaker
) -> None:
    first, second, third = cluster.nodes
    tier = open_redis_tier(f"redis+cluster://127.0.0.1:{third.port}")
    for info in on_each_node(cluster, 4)[first.port]:
        assert tier.find([info.key]) == [None]
        time.sleep(MIN_RENEW_S)  # the topology may be renewed
        cluster.move_slot(NAMES.manifest(info.key), second)
        try:
            assert put(tier, info, payload(1, info.size_bytes))
            cluster.reset()
        finally:
            cluster.move_slot(NAMES.manifest(info.key), first)


def test_full_coverage_is_warned_of_once(
    cluster: RedisCluster, open_redis_tier: RedisTierMaker
) -> None:
    for node in cluster.nodes:
        node.client.config_set("cluster-require-full-coverage", "yes")
    with capture_logs() as logs:
        tier = open_redis_tier(cluster.url)
        fill_all(tier, [make_info(seed, 10) for seed in range(9)])
    with capture_logs() as calm:
        for node in cluster.nodes:
            node.client.config_set("cluster-require-full-coverage", "no")
        open_redis_tier(cluster.url).find([make_info(1, 1).key])
    assert [row["log_level"] for row in logs] == ["warning"]
    assert "cluster-require-full-coverage" in logs[0]["fix"]
    assert calm == []


def test_master_that_sentinels_promote_is_used_without_a_restart(
    tmp_path: Path, open_redis_tier: RedisTierMaker
) -> None:
    setup = SentinelSetup(tmp_path)
    try:
        tier = open_redis_tier(setup.url, timeout_ms=1000)
        kept, fresh = make_info(1, 10_000), make_info(2, 10_000)
        put(tier, kept, payload(1, 10_000))
        assert eventually(lambda: len(setup.replica.names()) == 4)
        setup.master.stop()
        with pytest.raises(TierUnavailableError, match="sentinel"):
            tier.find([kept.key])
        assert eventually(lambda: setup.master_port() == setup.replica.port)
        assert eventually(lambda: was_put(tier, fresh))
        assert_holds(tier, kept, payload(1, 10_000))
        assert_counts(tier, [kept, fresh], [])
    finally:
        setup.stop()


def test_sentinels_that_are_down_or_know_nothing_are_named(
    running_sentinel: SentinelSetup, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(running_sentinel.url.replace("/kvstore", "/other"))
    with pytest.raises(TierUnavailableError, match="has no service 'other'"):
        tier.find([make_info(1, 1).key])
    dead = open_redis_tier("redis+sentinel://127.0.0.1:1/kvstore")
    with pytest.raises(TierUnavailableError, match=r"no Sentinel names a master: 127\.0\.0\.1:1"):
        dead.find([make_info(1, 1).key])
    first_dead = running_sentinel.url.replace("://", "://127.0.0.1:1,")
    with closing(RedisTier(first_dead, 1 << 20)) as both:
        assert both.find([make_info(4711, 1).key]) == [None]


def test_single_server_that_is_no_cluster_says_so(
    redis: RedisProcess, open_redis_tier: RedisTierMaker
) -> None:
    tier = open_redis_tier(redis.url.replace("redis://", "redis+cluster://"))
    with pytest.raises(TierUnavailableError, match="cluster support disabled"):
        tier.find([make_info(1, 1).key])


@pytest.fixture
def silent_host() -> Iterator[str]:
    """The address of a server, on all of the loopback, that takes connections and says nothing."""
    with socket.create_server(("0.0.0.0", 0), backlog=100) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_silent_sentinel_leaves_time_to_ask_the_others(
    running_sentinel: SentinelSetup, open_redis_tier: RedisTierMaker, silent_host: str
) -> None:
    url = running_sentinel.url.replace("://", f"://{silent_host},")
    tier = open_redis_tier(url, timeout_ms=1000)
    assert tier.find([make_info(4712, 1).key]) == [None]


def test_many_silent_sentinels_hide_one_that_answers_for_a_call_at_most(
    running_sentinel: SentinelSetup, open_redis_tier: RedisTierMaker, silent_host: str
) -> None:
    silent = [silent_host.replace(".1:", f".{last}:") for last in range(2, 10)]
    scheme, _, rest = running_sentinel.url.partition("://")
    host, _, service = rest.partition("/")
    url = f"{scheme}://{','.join([*silent[:4], host, *silent[4:]])}/{service}"
    tier, info = open_redis_tier(url, timeout_ms=400), make_info(4712, 1)
    started = time.monotonic()
    assert why_no_answer(tier, [info])
    assert time.monotonic() - started < 1
    time.sleep(0.1)  # it asks no more often
    assert tier.find([info.key]) == [None]


def test_silent_node_of_a_cluster_holds_up_one_call_and_is_then_asked_last(
    cluster: RedisCluster, open_redis_tier: RedisTierMaker, silent_host: str
) -> None:
    url = cluster.url.replace("://", f"://{silent_host},")
    tier = open_redis_tier(url, timeout_ms=1000)
    seconds = []
    began = time.monotonic()
    while time.monotonic() - began < 2:
        started = time.monotonic()
        assert tier.find([make_info(4712, 1).key]) == [None]
        seconds.append(time.monotonic() - started)
        time.sleep(0.05)
    assert sum(each > 0.3 for each in seconds) <= 1
