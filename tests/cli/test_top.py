"""kvstore top: one look at a server, and rates between two."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from conftest import ServerMaker
from local_server import LocalServer
from prompts import store
from rich.console import Console

from kvstore.cli.main import main
from kvstore.cli.top import Rates, show_live, top_as_json, top_as_tables
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.plans import Hints

Run = Callable[..., str]


@pytest.fixture
def kvstore(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process; return what it prints."""

    def run(*argv: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert not ended.value.code
        return capsys.readouterr().out

    return run


def used(server: LocalServer) -> None:
    client = server.connect("grpc")
    keys = store(client, 1, 6)
    client.lookup(keys=keys)
    client.lookup(keys=keys)


def test_one_look_is_json_with_tiers_policies_and_ratios(
    kvstore: Run, make_server: ServerMaker
) -> None:
    server = make_server("--policy", "hit_density,disk=lru", "--tenant-quotas", "default=8MiB:1MiB")
    used(server)
    look = json.loads(kvstore("top", server.address, "--json"))
    assert look["hit_ratio"] == 1.0
    assert (look["state"], look["ghosts"]) == ("serving", 0)
    cpu, disk = look["tiers"]
    assert (cpu["policy"], disk["policy"]) == ("hit_density", "lru")
    partition = {one["name"]: one for one in cpu["partitions"]}["tenant default"]
    assert (partition["quota_bytes"], partition["guaranteed_bytes"]) == (8 << 20, 1 << 20)
    assert partition["used_bytes"] > 0


def test_one_look_as_tables_names_each_tier(kvstore: Run, server: LocalServer) -> None:
    used(server)
    out = kvstore("top", server.address, "--once")
    for word in ("cpu", "disk", "hit_density", "100.0%", "serving"):
        assert word in out


def look(boot_id: int, uptime_s: float, **counters: int) -> pb.StatusResponse:
    return pb.StatusResponse(
        server=pb.Server(boot_id=boot_id), uptime_s=uptime_s, counters=counters
    )


def test_rates_are_those_between_two_looks() -> None:
    first = look(1, 100.0, lookups=10, lookup_chunks=100, lookup_ready_chunks=50)
    then = look(1, 104.0, lookups=18, lookup_chunks=140, lookup_ready_chunks=80)
    rates = Rates.between(first, then)
    assert (rates.per_s("lookups"), rates.hit_ratio) == (2.0, 0.75)
    assert Rates.between(None, first).per_s("lookups") == 0.1
    assert Rates.between(then, look(2, 1.0, lookups=3)).per_s("lookups") == 3.0, "it restarted"
    idle = Rates.between(then, then)
    assert (idle.per_s("lookups"), idle.hit_ratio) == (0.0, None)


def test_a_tier_shows_its_policy_other_sizes_and_who_has_a_quota() -> None:
    tier = pb.TierStatus(name="cpu", state="degraded", reason="slow", policy="marconi")
    tier.what_if.add(scale=2.0, hit_ratio=0.625)
    tier.partitions.add(name="tenant acme", used_bytes=1 << 20)
    reply = pb.StatusResponse(tiers=[tier], state="serving")
    console = Console(width=160)
    with console.capture() as captured:
        console.print(top_as_tables("here:1", reply, Rates(0.0)))
    out = captured.get()
    for word in ("marconi", "62.5%", "hits at 2x", "acme", "degraded: slow"):
        assert word in out
    told = json.loads(top_as_json("here:1", reply, Rates(0.0)))["tiers"][0]
    assert told["policy"] == "marconi"
    assert told["what_if"] == {"2": 0.625}


def test_the_live_view_ends_with_the_key_that_interrupts(server: LocalServer) -> None:
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    show_live(server.address, 0.5, sleep)
    assert naps == [0.5] * 3


def test_hints_reach_the_server_by_every_way_to_connect(make_server: ServerMaker) -> None:
    server = make_server("--bulk", "127.0.0.1:0")
    for seed, transport in enumerate(("shm", "grpc", "tcp")):
        client = server.connect(transport)  # type: ignore[arg-type]
        before = server.node.store.catalog.state.metadata.hints.expiring
        keys = store(client, seed, 3, hints=Hints(ttl_ms=60_000))
        known = server.node.store.catalog.state.metadata.hints
        assert known.expiring == before + 3, transport
        with client.lease(keys=keys) as lease:
            lease.release(Hints(priority=7))
        row = server.node.store.catalog.state.index.row(keys[0])
        assert known.priority(row) == 7, transport
