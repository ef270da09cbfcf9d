"""The server under each policy: what the settings make of it, and input that is bad."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from conftest import ServerMaker
from helpers.local_server import DEADLINE_MS
from helpers.prompts import LARGE, chunks_of, outcomes
from helpers.prompts import keys_of as names_of
from simulation.clock import FakeClock
from simulation.core import Core, keys_of, outcomes_of, prompt
from simulation.tiers import SimDisk, no_faults

from kvstore.client import ClientOptions
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import POLICIES, PutOutcome
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.marconi import MarconiEviction
from kvstore.server.eviction.policy import EvictionPolicy, make_policy
from kvstore.server.eviction.quotas import PartitionedEviction
from kvstore.server.index.hints import ChunkMetadata
from kvstore.server.settings.settings import load_config
from kvstore.server.settings.values import GIB, MIB
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.wiring import build_store, make_policies
from kvstore.tiers.base import Tier

CAPACITIES = {"cpu": 64 * MIB, "disk": GIB}


@pytest.mark.parametrize(("codec", "is_durable"), [("auto", True), ("auto:bounded", False)])
def test_no_put_is_called_durable_while_a_lossy_codec_may_be_chosen(
    codec: str, is_durable: bool, tmp_path: Path
) -> None:
    disk = ["--tiers", "cpu,disk", "--disk", f"{tmp_path}:16MiB", "--codec", f"disk={codec}"]
    config = load_config(["--cpu-size", "16MiB", "--limits", "cpu_slab_bytes=1MiB", *disk])
    with ExitStack() as opened:
        store = build_store(config, FakeClock(), Counters(), opened, lambda: 1)
        assert (store.durable is not None) == is_durable


def test_each_tier_has_the_policy_that_was_named_for_it() -> None:
    config = load_config(["--policy", "marconi,disk=lru"])
    metadata, policies = make_policies(config, CAPACITIES)
    assert isinstance(policies["cpu"], MarconiEviction)
    assert isinstance(policies["disk"], LruEviction)
    assert metadata.policy_names == {"cpu": "marconi", "disk": "lru"}


def test_quotas_put_partitions_over_the_policy_of_each_tier() -> None:
    flags = ["--tenant-quotas", "acme/disk=1MiB", "--category-terms", "batch=10s:2MiB,chat=5s"]
    metadata, policies = make_policies(load_config(flags), CAPACITIES)
    cpu, disk = policies["cpu"], policies["disk"]
    assert isinstance(cpu, PartitionedEviction)
    assert isinstance(disk, PartitionedEviction)
    assert [quota.limit_bytes for quota in cpu.quotas] == [0, 0, 2 * MIB]
    assert [quota.limit_bytes for quota in disk.quotas] == [0, MIB, 2 * MIB]
    assert metadata.category_ttls_s == {"batch": 10.0, "chat": 5.0}


def test_more_than_a_tier_has_cannot_be_guaranteed() -> None:
    flags = ["--tenant-quotas", "a=60MiB:40MiB,b=60MiB:40MiB"]
    with pytest.raises(InvalidRequestError, match=r"tenant_quotas=.*64MiB of tier 'cpu'"):
        make_policies(load_config(flags), CAPACITIES)


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def make_core(policy: str, clock: FakeClock) -> Core:
    def make(tier: Tier, known: ChunkMetadata) -> EvictionPolicy:
        return make_policy(policy, known.history)

    return Core([SimDisk(24_000, no_faults())], clock=clock, policy=make)


def test_clocks_that_jump_change_no_answer(policy: str) -> None:
    clock = FakeClock()
    with closing(make_core(policy, clock)) as core:
        session = core.open_session()
        for seed, jump_s in enumerate((5.0, -900.0, 0.0, 1e8, -1e8, 1e-9)):
            versions = prompt(5, seed=seed)
            core.put(session, versions)
            clock.advance(jump_s)
            keys = keys_of(versions)
            match = core.store.lookup(session, keys, core.later(), lease=False)
            assert match.ready == 5
            core.store.tick()
        assert core.catalog.leases.pins.total() == 0


def test_a_chain_with_a_missing_middle_is_hit_up_to_there(policy: str) -> None:
    with closing(make_core(policy, FakeClock())) as core:
        session, versions = core.open_session(), prompt(6)
        core.put(session, versions[:2] + versions[3:])
        match = core.store.lookup(session, keys_of(versions), core.later(), lease=False)
        assert (match.ready, match.missing) == (2, 4)
        for seed in range(1, 12):
            results = core.put(session, prompt(3, seed=seed))
            assert {result.outcome for result in results} == {PutOutcome.stored}
        core.put(session, versions)
        match = core.store.lookup(session, keys_of(versions), core.later(), lease=False)
        assert match.ready == 6


def test_where_all_is_leased_puts_are_refused_and_nothing_leaks(policy: str) -> None:
    with closing(make_core(policy, FakeClock())) as core:
        session, versions = core.open_session(), prompt(12)
        core.put(session, versions)
        match = core.store.lookup(session, keys_of(versions), core.later(), lease=True)
        assert match.ready == 12
        assert outcomes_of(core.put(core.open_session(), prompt(2, seed=1))) == {PutOutcome.refused}
        assert (len(core.store.writes), core.catalog.in_flight.writers.total()) == (0, 0)
        assert core.cpu.stats().reservations == 0
        core.store.release(session, match.lease_id)
        assert outcomes_of(core.put(core.open_session(), prompt(2, seed=1))) == {PutOutcome.stored}


STORED, REFUSED = PutOutcome.stored, PutOutcome.refused
LARGE_CHUNKS = ClientOptions("auto", chunk_tokens=1024, deadline_ms=DEADLINE_MS)
"""Of 8 MiB."""


def test_a_chunk_larger_than_the_disk_stays_in_memory(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    server = make_server(
        "--cpu", "64MiB", "--limits", "cpu_slab_bytes=16MiB", "--disk", f"4MiB:{tmp_path / 'disk'}"
    )
    client = server.connect("auto", LARGE, LARGE_CHUNKS)
    keys = names_of(client, 1, 2)
    assert outcomes(client, chunks_of(client, keys)) == [STORED] * 2
    server.settled()
    assert client.lookup(keys=keys).tiers == ("cpu", "cpu")
    assert dict(server.usage().tiers)["disk"].chunks == 0
    durable = client.put_chunks(chunks_of(client, names_of(client, 2, 1)), durable=True)
    assert [one.outcome for one in durable] == [REFUSED]
