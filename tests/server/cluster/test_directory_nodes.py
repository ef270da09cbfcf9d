"""Two nodes that share a Redis and its directory: what each says, and how that is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ServerMaker
from helpers.local_server import LocalServer, eventually
from helpers.prompts import store
from helpers.redis_process import RedisProcess

from kvstore.cli.server import Look, directory_line, fetch_status
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import ChunkKey
from kvstore.server.cluster.directory import Directory, open_directory
from kvstore.server.settings.settings import load_config
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.web.gauges import gauges


def directory_of(server: LocalServer) -> Directory:
    assert server.node.directory is not None
    return server.node.directory


def holders(server: LocalServer, keys: list[ChunkKey]) -> list[list[str]]:
    found = directory_of(server).holders(keys, 5.0)
    return [[node.node_id for node in found.get(key, ())] for key in keys]


@pytest.fixture
def pair(make_server: ServerMaker, own_redis: RedisProcess, tmp_path: Path) -> list[LocalServer]:
    """Two nodes, a and b, that see each other."""
    own_redis.start()
    common = (
        *("--tiers", "cpu,redis", "--redis", own_redis.url, "--redis-prefix", "pair:"),
        *("--directory", "--limits", "directory_ttl_ms=4000", "--redis-timeout-ms", "20000"),
    )
    nodes = [
        make_server(*common, "--node-id", name, "--socket", str(tmp_path / f"{name}.sock"))
        for name in "ab"
    ]
    for node in nodes:
        assert eventually(lambda node=node: len(directory_of(node).report().nodes) == 1)  # type: ignore[misc]
    return nodes


def test_nodes_find_what_lies_in_each_others_memory_until_it_is_deleted(
    pair: list[LocalServer], own_redis: RedisProcess
) -> None:
    first, second = pair
    client = first.connect("grpc")
    keys = store(client, 1, 3)
    assert eventually(lambda: holders(second, keys) == [["a"]] * 3)
    assert holders(first, keys) == [[]] * 3
    # a chunk that is just being copied to Redis is not deleted
    assert eventually(lambda: client.delete(keys=keys[:1]) == 1 or not client.stat(keys=keys[:1]))
    assert eventually(lambda: holders(second, keys) == [[], ["a"], ["a"]])
    assert all(name.startswith(b"pair:") for name in own_redis.names())


def test_status_and_metrics_show_the_nodes_that_are_seen(pair: list[LocalServer]) -> None:
    first, second = pair
    reply = fetch_status(f"127.0.0.1:{first.node.port}")
    assert reply.directory is not None
    (seen,) = reply.directory.nodes
    assert (seen.node_id, seen.grpc_address) == ("b", f"127.0.0.1:{second.node.port}")
    assert seen.incarnation == directory_of(second).me.incarnation
    line = directory_line(reply.directory)
    assert line == f"directory: a, 0 chunks named; sees b at 127.0.0.1:{second.node.port}"
    shown = Look("x", reply).as_dict()["directory"]
    assert (shown["standing"], shown["nodes"][0]["node_id"]) == ("known", "b")
    levels = {row[0]: row[3] for row in gauges(first.node.store, 0, directory_of(first))}
    assert (levels["directory_up"], levels["directory_nodes"]) == (1, 1)


def test_server_without_a_directory_shows_none(server: LocalServer) -> None:
    reply = fetch_status(f"127.0.0.1:{server.node.port}")
    assert reply.directory is None
    assert Look("x", reply).as_dict()["directory"] is None


def test_node_is_advertised_as_others_reach_it() -> None:
    for flags, bulk_address, expected in [
        (["--listen", "127.0.0.1:0"], "", ("127.0.0.1:7", "")),
        (["--listen", "[::1]:0"], "ipc:///x", ("[::1]:7", "")),
        (["--advertise", "n1.pool"], "tcp://*:9", ("n1.pool:7", "tcp://n1.pool:9")),
        (["--advertise", "fd00::1"], "tcp://[fd00::1]:9", ("[fd00::1]:7", "tcp://[fd00::1]:9")),
    ]:
        config = load_config(["--directory", "--redis", "redis://127.0.0.1:1", *flags])
        directory = open_directory(config, 5, 7, bulk_address, Counters(), lambda: 0.0)
        assert (directory.me.grpc_address, directory.me.bulk_address) == expected
        assert directory.me.node_id.endswith(":7")
        directory.close()


def test_directory_whose_tls_files_are_none_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    config = load_config(
        ["--directory", "--redis", "rediss://h", "--redis-tls-ca", str(tmp_path / "ca.pem")]
    )
    with pytest.raises(InvalidRequestError, match="PEM"):
        open_directory(config, 5, 7, "", Counters(), lambda: 0.0)
