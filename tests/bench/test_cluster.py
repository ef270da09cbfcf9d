"""The simulated cluster: nodes evict as the server does, counts add up, limits are arithmetic."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from bench.cluster.__main__ import (
    BLOCK_BYTES,
    FAILURES,
    RATE,
    Measured,
    Setback,
    demand,
    full_at,
    setbacks,
)
from bench.cluster.costs import Costs
from bench.cluster.simulation import ROUTINGS, Cluster, ClusterCounts, ClusterTerms

from kvstore.cli.simulate import BlockReplay
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.lru import LruEviction

ROOT = Path(__file__).resolve().parents[2]
COSTS = Costs(1e-3, 1e-5, 1e-6, 2e-6, 100, 2e-4, 1e-9, 2e-9, 1e9, 1e9)


def conversations(count: int, seed: int = 5) -> Iterator[list[int]]:
    """Yield prompts of users whose chains grow, all after block 1."""
    random, users, fresh = Random(seed), [[1] for _ in range(24)], iter(range(2, 1 << 30))
    for _ in range(count):
        user = random.randrange(len(users))
        if len(users[user]) > 30:
            users[user] = [1]
        users[user] = users[user] + [next(fresh) for _ in range(random.randint(1, 5))]
        yield users[user]


def run(terms: ClusterTerms, count: int = 1500) -> Cluster:
    cluster = Cluster(terms)
    cluster.replay(conversations(count))
    return cluster


def test_one_node_hits_what_the_server_s_policy_hits() -> None:
    for blocks in (40, 150, 400):
        replay = BlockReplay(LruEviction(), AccessHistory(512), blocks)
        cluster = Cluster(ClusterTerms(1, blocks))
        for now_s, chain in enumerate(conversations(1500)):
            replay.request(chain, float(now_s))
            cluster.request(chain)
        assert cluster.counts.local == replay.hit_blocks > 0


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_block_is_found_in_one_place_or_computed(routing: str) -> None:
    cluster = run(ClusterTerms(6, 60, 500, routing))
    counts = cluster.counts
    assert counts.local + counts.peer + counts.redis + counts.computed == counts.blocks
    assert min(counts.local, counts.peer, counts.redis, counts.computed) > 0
    assert cluster.entries() == counts.added - counts.dropped <= 6 * 60


def test_demand_is_counts_times_costs() -> None:
    counts = ClusterCounts(
        prompts=10, blocks=100, local=20, peer=10, redis=10, computed=60,
        queries=10, queried_keys=80, added=70, dropped=60, redis_written=60,
    )  # fmt: skip
    load = demand(Measured(5, counts, (1.0, 1)), COSTS)
    per_s = 5 * RATE / 10
    assert load.redis_ops == pytest.approx(per_s * (80 + 70 + 60))
    assert load.redis_bytes == pytest.approx(per_s * 70 * BLOCK_BYTES)
    assert load.peer_bytes == pytest.approx(RATE * BLOCK_BYTES)
    assert load.shares["directory"] == pytest.approx(per_s * (10e-5 + 70e-6 + 130 * 2e-6))
    assert load.shares["chunks"] == pytest.approx(per_s * BLOCK_BYTES * (10e-9 + 120e-9))
    assert load.shares["peers"] == pytest.approx(RATE * BLOCK_BYTES / 1e9)


def test_a_part_is_full_where_its_share_is_one() -> None:
    for points, nodes in [
        ([(1, 2.0), (10, 20.0)], 0.5),
        ([(1, 0.1), (10, 1.0), (100, 10.0)], 10),
        ([(1, 0.01), (10, 0.1), (100, 1.0)], 100),
        ([(1, 0.01), (10, 0.1)], 100),
        ([(1, 0.3), (10, 0.3)], math.inf),
        ([(1, 0.0), (10, 0.5), (100, 2.0)], 10 * 10 ** (math.log(2) / math.log(4))),
    ]:
        assert full_at(points) == pytest.approx(nodes)


def test_a_failed_node_gets_no_prompts_and_comes_back_empty() -> None:
    cluster = run(ClusterTerms(4, 150, 600))
    before, entries, held = cluster.routed[0], cluster.entries(), len(cluster._nodes[0])
    cluster.fail_node(0)
    assert held > 0
    assert cluster.entries() == entries - held == sum(map(len, cluster._holders.values()))
    cluster.replay(conversations(300, seed=6))
    assert cluster.routed[0] == before
    cluster.recover()
    cluster.replay(conversations(300, seed=7))
    assert cluster.routed[0] > before
    assert cluster.entries() == sum(map(len, cluster._holders.values()))


def test_a_lost_master_cuts_a_chain_in_redis_at_its_first_block() -> None:
    chain, cluster = list(range(30)), Cluster(ClusterTerms(2, 40, 600))
    cluster.request(chain)
    cluster.fail_node(cluster.routed.index(1))
    cluster.lost_master = (0, 3)
    reached = [cluster._is_reached(block) for block in chain]
    assert 5 < reached.count(False) < 15
    cluster.request(chain)
    assert cluster.counts.redis == reached.index(False) < 10


def test_a_failure_is_compared_with_a_cluster_without_it() -> None:
    found = setbacks(list(conversations(3000)), ClusterTerms(4, 150, 600))
    assert set(found) == set(FAILURES)
    for setback in found.values():
        assert len(setback.steady) == len(setback.failed) == 6
        assert setback.lost > 0
        assert setback.minutes < 6
    same = Setback((0.5, 0.4, 0.3), (0.2, 0.4, 0.295))
    assert same.lost == pytest.approx(0.3)
    assert same.minutes == 1


def test_the_page_names_every_key_that_is_printed() -> None:
    code = (ROOT / "bench" / "cluster" / "__main__.py").read_text()
    keys = re.findall(r'\.add\(\s*f?"([^"]+)"', code)
    names = ("routing", "nodes", "failure")
    printed = {re.sub(f"{{({'|'.join(names)})}}", lambda m: m[1].upper(), key) for key in keys}
    _, _, section = (ROOT / "docs" / "scaling.md").read_text().partition("\n## Keys\n")
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.M)
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == printed
