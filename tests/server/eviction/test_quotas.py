"""Partitions: shares, quotas and guarantees, over policies that know nothing of them."""

from __future__ import annotations

import random
from itertools import count

import numpy as np
import pytest
from contracts.policy import ALL, PolicyContract, _growth, keep_none
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from kvstore.cli.simulate import BlockReplay
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction import quotas
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.policy import EvictionPolicy
from kvstore.server.eviction.quotas import (
    LEAST_SAMPLED,
    MAX_PARTITIONS,
    SCALES,
    Ids,
    MissRatioCurve,
    PartitionedEviction,
    PartitionTable,
    Quota,
)


class PartitionsContract(PolicyContract):
    partitions: int

    @override
    def make_policy(self) -> EvictionPolicy:
        quotas = [Quota()] * self.partitions
        return PartitionedEviction(LruEviction, lambda row: row % self.partitions, quotas, 1_000)

    @override
    def test_a_chunk_takes_no_more_than_its_bytes(self) -> None:
        count = 20_000
        kept: list[object] = []

        def fill() -> None:
            policy = self.make_policy()
            kept.append(policy)
            for start in range(1, count, 10):
                policy.insert_chain(np.arange(start, start + 10), NO_ROW, 100, 0.0)

        assert _growth(fill) < (32 + 36 * self.partitions) * count


class TestThreePartitions(PartitionsContract):
    partitions = 3


def make_policy(*quotas: Quota, capacity_bytes: int = 1_000) -> PartitionedEviction:
    """Return a policy whose rows 1xx are in partition 1, 2xx in partition 2, and so on."""
    return PartitionedEviction(LruEviction, lambda row: row // 100, quotas, capacity_bytes)


def fill(policy: PartitionedEviction, **counts: int) -> None:
    for name, many in counts.items():
        for row in range(1, many + 1):
            policy.insert(100 * int(name[1:]) + row, NO_ROW, 10, 0.0)


def test_the_partition_most_over_its_share_gives_up_first() -> None:
    policy = make_policy(Quota(), Quota(500), Quota(200), capacity_bytes=900)
    fill(policy, p0=20, p1=10, p2=40)
    victims = list(policy.victims(keep_none, 0.0))
    owners = [row // 100 for row in victims]
    assert owners[:19] == [2] * 19, "200 bytes over its share, the others are below theirs"
    assert len(victims) == 70


def test_a_partition_over_its_quota_owes_what_is_over_it() -> None:
    policy = make_policy(Quota(), Quota(100))
    fill(policy, p1=8)
    assert (policy.owed_bytes(1, 20), policy.owed_bytes(1, 25)) == (0, 5)
    assert policy.owed_bytes(0, ALL) == 0
    assert list(policy.victims_for(1, keep_none, 0.0, is_own=True)) == [101 + at for at in range(8)]


def test_nobody_is_pushed_below_its_guarantee_but_by_itself() -> None:
    policy = make_policy(Quota(), Quota(500, 50), Quota(500, 30))
    fill(policy, p0=2, p1=9, p2=3)
    for_others = list(policy.victims_for(2, keep_none, 0.0))
    assert sorted(row // 100 for row in for_others) == [0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert len(list(policy.victims_for(1, keep_none, 0.0))) == 2 + 9


def test_a_chunk_is_in_its_tenants_partition_or_else_in_its_categorys() -> None:
    table = PartitionTable(["red", "blue"], ["agent"])
    assert table.number("red") == table.number("red", "agent") == 1
    assert (table.number("green", "agent"), table.number("green", "chat")) == (3, 0)
    assert table.names == ("", "tenant red", "tenant blue", "category agent")
    quotas = table.quotas({"blue": Quota(5)}, {"agent": Quota(6)})
    assert quotas == (Quota(), Quota(), Quota(5), Quota(6))


def test_quotas_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="guaranteed_bytes=6"):
        Quota(5, 6)
    with pytest.raises(InvalidRequestError, match="quota="):
        Quota(-1)
    with pytest.raises(InvalidRequestError, match="quotas=16"):
        PartitionTable([str(number) for number in range(MAX_PARTITIONS + 1)])


_PUTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=80)


@given(_PUTS)
def test_whatever_is_put_quotas_hold_to_a_chunk_and_guarantees_hold_against_others(
    puts: list[tuple[int, int]],
) -> None:
    quotas = (Quota(), Quota(120, 60), Quota(80, 40))
    capacity = 200
    policy = make_policy(*quotas, capacity_bytes=capacity)
    numbers = {n: count(100 * n + 1) for n in range(3)}
    sizes: dict[int, int] = {}

    def evict(victim: int) -> None:
        policy.remove(victim)
        del sizes[victim]

    def used(partition: int) -> int:
        return sum(size for row, size in sizes.items() if row // 100 == partition)

    for partition, size in puts:
        before = [used(number) for number in range(3)]
        while policy.owed_bytes(partition, size):
            evict(next(policy.victims_for(partition, keep_none, 0.0, is_own=True)))
        while sum(sizes.values()) + size > capacity:
            victim = next(policy.victims_for(partition, keep_none, 0.0), NO_ROW)
            if not victim:
                break
            evict(victim)
        if sum(sizes.values()) + size <= capacity:
            row = next(numbers[partition])
            policy.insert(row, NO_ROW, size, 0.0)
            sizes[row] = size
        for number, quota in enumerate(quotas):
            assert policy.used[number] == used(number)
            assert not quota.limit_bytes or used(number) <= quota.limit_bytes
            if number != partition:
                assert used(number) >= min(before[number], quota.guaranteed_bytes)


def mix(ids: Ids) -> Ids:
    """Return hashes of identities: the finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    mixed = ids + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def chain(start: int, length: int) -> Ids:
    return mix(np.arange(start * 100, start * 100 + length, dtype=np.uint64))


def ratios(curve: MissRatioCurve) -> list[float | None]:
    points = curve.points()
    assert not points or tuple(points) == SCALES
    return [points.get(scale) for scale in SCALES]


def test_nothing_is_known_before_enough_was_asked_for() -> None:
    curve = MissRatioCurve(200)
    assert ratios(curve) == [None] * 4
    for start in range(LEAST_SAMPLED // 2 - 1):
        curve.requested(chain(start, 2), 1)
    assert ratios(curve) == [None] * 4
    curve.requested(chain(0, 2), 1)
    assert ratios(curve) == pytest.approx([0.0, 0.0, 2 / 256, 2 / 256])


def exact_curve(requests: list[Ids], capacity: int) -> list[float]:
    ratios, row_of = [], dict[int, int]()
    chains = [[row_of.setdefault(one, len(row_of) + 1) for one in ids.tolist()] for ids in requests]
    for scale in SCALES:
        cache = BlockReplay(LruEviction(), AccessHistory(), int(scale * capacity))
        for now_s, rows in enumerate(chains):
            cache.request(rows, now_s)
        ratios.append(cache.hit_blocks / cache.blocks)
    return ratios


def test_a_small_sample_tells_the_curve_within_three_points() -> None:
    rng = random.Random(3)
    starts = [int(rng.paretovariate(0.8) * 30) % 5000 for _ in range(6000)]
    requests = [chain(start, 12) for start in starts]
    curve = MissRatioCurve(6000, limit_nodes=4096)
    for ids in requests:
        curve.requested(ids, 1)
    assert curve.rate == 1 / 8
    exact = exact_curve(requests, 6000)
    assert exact[3] - exact[0] > 0.1
    assert ratios(curve) == pytest.approx(exact, abs=0.03)


def test_old_requests_count_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "WINDOW_CHUNKS", 100)
    curve = MissRatioCurve(200)
    for start in range(100):
        curve.requested(chain(start, 10), 1)
    assert ratios(curve)[1] == 0.0
    for _ in range(100):
        curve.requested(chain(0, 10), 1)
    ratio = ratios(curve)[1]
    assert ratio is not None
    assert ratio > 0.95


def test_empty_lookups_and_chunks_of_no_size_do_no_harm() -> None:
    curve = MissRatioCurve(10)
    curve.requested(np.zeros(0, np.uint64), 0)
    curve.requested(chain(1, 3), 0)
    assert ratios(curve) == [None] * 4
    with pytest.raises(InvalidRequestError, match="capacity_bytes=0"):
        MissRatioCurve(0)


def test_it_remembers_no_more_than_twice_its_limit() -> None:
    for limit_nodes in [4, 64, 1024]:
        curve = MissRatioCurve(500, limit_nodes)
        for now_s in range(400):
            curve.requested(chain(now_s * 7, 30), 1)
            assert len(curve._used) <= limit_nodes
        for ratio in ratios(curve):
            assert ratio is None or ratio < 0.1, "nothing came twice"
