"""``--adapt-tenants``: the adaptive policy for each of them, in settings, status and metrics."""

from __future__ import annotations

import json
import urllib.request

import pytest
from conftest import ServerMaker
from prompts import store

from kvstore.cli.main import main
from kvstore.proto.errors import InvalidRequestError
from kvstore.server.config import load_config
from kvstore.server.policies import Policies
from kvstore.server.policy.adaptive import AdaptiveEviction
from kvstore.server.policy.lru import LruEviction
from kvstore.server.policy.partitions import PartitionedEviction
from kvstore.server.settings.units import GIB, MIB

CAPACITIES = {"cpu": 64 * MIB, "disk": GIB}


def test_each_tenant_has_shadows_of_its_own_where_the_policy_adapts() -> None:
    flags = ["--policy", "adaptive,disk=lru", "--adapt-tenants", "acme,zeta"]
    policies = Policies(load_config(flags), CAPACITIES)
    cpu = policies.by_tier["cpu"]
    assert isinstance(cpu, PartitionedEviction)
    adaptive = [part for part in cpu.parts if isinstance(part, AdaptiveEviction)]
    assert len({id(part._shadows) for part in adaptive}) == 3
    assert isinstance(policies.by_tier["disk"], LruEviction)
    numbers = [policies.knowledge.partitions.number(t) for t in ("acme", "zeta", "other")]
    assert numbers == [1, 2, 0]


@pytest.mark.parametrize("names", ["a,b,c,d,e,f,g,h", "acme,acme", "ac me"])
def test_names_that_are_too_many_or_none_are_refused(names: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"adapt.tenants"):
        load_config(["--adapt-tenants", names])


def test_a_server_shows_what_each_tenant_follows(
    make_server: ServerMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_server(
        "--policy", "adaptive,disk=lru", "--adapt-tenants", "default,acme", "--http", "127.0.0.1:0"
    )
    client = server.connect("grpc")
    client.lookup(store(client, 1, 6))

    def shown(*words: str) -> str:
        with pytest.raises(SystemExit):
            main([*words, server.address])
        return capsys.readouterr().out

    cpu, disk = json.loads(shown("top", "--json"))["tiers"]
    by_name = {one["name"]: one for one in cpu["partitions"]}
    assert set(by_name) == {"others", "tenant default", "tenant acme"}
    assert by_name["tenant default"]["follows"] == "hit_density"
    assert by_name["tenant default"]["used_bytes"] > by_name["tenant acme"]["used_bytes"] == 0
    assert "sample of 1 in" in by_name["tenant acme"]["why"]
    assert disk["partitions"] == []
    assert "cpu, tenant acme: hits of a sample" in " ".join(shown("top", "--once").split())
    status = json.loads(shown("status", "--json"))
    assert status["tiers"][0]["follows"]["tenant acme"] == "hit_density"
    assert status["tiers"][1]["follows"] == {}
    assert "tenant acme hit_density" in " ".join(shown("status").split())
    page = urllib.request.urlopen(f"http://127.0.0.1:{server.node.http_port}/metrics").read()
    rows = [line for line in page.decode().splitlines() if line.startswith("kvstore_partition_")]
    assert (
        'kvstore_partition_policy{partition="tenant acme",policy="hit_density",tier="cpu"} 1.0'
        in rows
    )
    assert any(row.startswith("kvstore_partition_hit_ratio") for row in rows)
