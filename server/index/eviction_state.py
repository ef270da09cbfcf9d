"""Which copies may go: victims by the tiers' policies, and what each tenant takes of a tier."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from kvstore.proto.types import ChunkKey
from kvstore.server.eviction.quotas import PartitionedEviction, PolicyReport, Quota
from kvstore.server.index.access_log import CatalogState

LOOKED_AT = 4096
"""Victims that are gone through for one chunk's rank."""
EXPIRED_AT_ONCE = 256


class Wanted(NamedTuple):
    """For which partition victims are: others' above their guarantee, or its own alone."""

    partition: int = 0
    is_own: bool = False


EVERYBODY = Wanted()


class TierUse(NamedTuple):
    """What a tenant takes of a tier, and may take."""

    used_bytes: int
    chunks: int
    quota: Quota


class EvictionState:
    """The policies' choices, and which evictions run. Shares the lock of *state*. Thread-safe.

    A policy knows exactly the rows of the copies on its tier. A key with a lease, a pin or a
    running move is never handed out as a victim.
    """

    def __init__(self, state: CatalogState) -> None:
        self._state = state
        self._index, self.partitions = state.index, state.metadata.partitions
        self.leaving: dict[ChunkKey, str] = {}
        """Chunks being evicted, and the tier they leave."""
        self._unclaimed = threading.Condition(state.lock)

    def partition(self, key: ChunkKey, tenant: str, category: str) -> int:
        """Return the partition that a chunk counts against, be it here or only to come."""
        with self._state.lock:
            if row := self._index.row(key):
                return self._state.metadata.hints.partitions[row]
            return self.partitions.number(tenant, category)

    def owed_bytes(self, tier: str, partition: int, need_bytes: int, need_chunks: int = 1) -> int:
        """Return what a partition has to free on *tier* to take so many bytes and chunks more."""
        policy = self._state.policies[tier]
        if not isinstance(policy, PartitionedEviction):
            return 0
        with self._state.lock:
            self._state.access_log.apply_all()
            return policy.owed_bytes(partition, need_bytes, need_chunks)

    def claim_victims(
        self,
        tier: str,
        need_bytes: int,
        limit: int,
        wanted: Wanted = EVERYBODY,
        allocated: Callable[[int], int] = int,
    ) -> list[ChunkKey]:
        """Choose what to evict and keep others from choosing the same. Pair with ``unclaim``.

        A frame of n bytes frees *allocated* (n) of those that are needed.
        """
        index, victims = self._index, list[ChunkKey]()
        with self._state.lock:
            self._state.access_log.apply_all()
            for row in self._candidates(tier, wanted):
                if need_bytes <= 0 or len(victims) == limit:
                    break
                key = index.key(row)
                if key not in self.leaving:
                    victims.append(key)
                    self.leaving[key] = tier
                    need_bytes -= allocated(index.size_bytes(tier, row))
        return victims

    def claim(self, tier: str, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Claim those of *keys* that may go, whatever the policy says."""
        with self._state.lock:
            victims = [key for key in keys if not self.stays(key)]
            self.leaving.update(dict.fromkeys(victims, tier))
            return victims

    def _candidates(self, tier: str, wanted: Wanted) -> Iterator[int]:
        index = self._index

        def stays(row: int) -> bool:
            return self.stays(index.key(row))

        if not wanted.is_own:
            late = self._state.metadata.hints.expired(self._state.clock(), EXPIRED_AT_ONCE)
            yield from (row for row in late if tier in index.holders(row) and not stays(row))
        if tier == index.tiers[-1] != index.tiers[0]:
            yield from self._sparing(tier, wanted, stays)
        yield from self._ordered(tier, wanted, stays)

    def _sparing(self, tier: str, wanted: Wanted, stays: Callable[[int], bool]) -> Iterator[int]:
        """Yield those candidates without which no chunk of a faster tier would be orphaned."""
        index = self._index
        named: Counter[int] = Counter()

        def spares(row: int) -> bool:
            is_way = index.continued(row) > named[row] and index.holders(row) == [tier]
            return is_way or stays(row)

        for row in self._ordered(tier, wanted, spares):
            named[index.parents[row]] += 1
            yield row

    def _ordered(self, tier: str, wanted: Wanted, stays: Callable[[int], bool]) -> Iterator[int]:
        """Yield who may go, as the tier's policy and the engines' priorities have it."""
        policy, now = self._state.policies[tier], self._state.clock()
        if not isinstance(policy, PartitionedEviction):
            rows = policy.victims(stays, now)
        else:
            rows = policy.victims_for(wanted.partition, stays, now, is_own=wanted.is_own)
        parent = self._index.parents.__getitem__
        return self._state.metadata.hints.in_order(rows, parent, len(policy))

    def rank(self, tier: str, key: ChunkKey) -> tuple[int, bool]:
        """Return how many others *tier* would evict before *key*, and whether it may be more."""
        with self._state.lock:
            self._state.access_log.apply_all()
            victims = list(islice(self._candidates(tier, EVERYBODY), LOOKED_AT))
            row = self._index.row(key)
            return (victims.index(row), False) if row in victims else (len(victims), True)

    def unclaim(self, keys: Iterable[ChunkKey]) -> None:
        """The eviction is over, whatever became of it."""
        with self._state.lock:
            for key in keys:
                del self.leaving[key]
            self._unclaimed.notify_all()

    def await_unclaimed(self, tier: str, deadline: float) -> bool:
        """Wait until an eviction from *tier* is over; False if none runs or time is up."""
        with self._unclaimed:
            left_s = deadline - self._state.clock()
            if tier not in self.leaving.values() or left_s <= 0:
                return False
            return self._unclaimed.wait(left_s)

    def stays(self, key: ChunkKey) -> bool:
        """Whether a chunk must not be evicted now. Under the lock."""
        return key in self.leaving or self._state.holds.is_held(key)

    # --- what tiers have

    def count_on(self, tier: str) -> int:
        """Copies known on *tier*."""
        with self._state.lock:
            self._state.access_log.apply_all()
            return len(self._state.policies[tier])

    def policy_report(self, tier: str) -> PolicyReport:
        """Return which policy *tier* evicts by, and what its partitions take."""
        known, policy = self._state.metadata, self._state.policies[tier]
        name = known.policy_names.get(tier, type(policy).__name__)
        with self._state.lock:
            self._state.access_log.apply_all()
            return PolicyReport.of(name, policy, known.what_ifs.get(tier), known.partitions.names)

    def quotas_of(self, tenant: str) -> dict[str, TierUse]:
        """Return by tier what *tenant* takes; none when its chunks are not counted."""
        number = self.partitions.number(tenant)
        if tenant not in self.partitions.tenants:
            return {}
        with self._state.lock:
            self._state.access_log.apply_all()
            return {
                tier: TierUse(policy.used[number], len(policy.parts[number]), policy.quotas[number])
                for tier, policy in self._state.policies.items()
                if isinstance(policy, PartitionedEviction)
            }

    def set_quotas(self, tenant: str, quotas: Mapping[str, Quota]) -> None:
        """Hold *tenant* to other quotas, by tier. Raises InvalidRequestError, changing nothing."""
        number = self.partitions.number(tenant)
        with self._state.lock:
            checked = []
            for tier, quota in quotas.items():
                policy = self._state.policies[tier]
                assert isinstance(policy, PartitionedEviction)
                checked.append((policy, policy.with_quota(number, quota)))
            for policy, fresh in checked:
                policy.quotas = fresh
