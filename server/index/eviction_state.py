"""Choice of eviction victims by the tiers' policies, and the use of each tier by tenants."""

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
"""Victims visited to find one chunk's rank."""
EXPIRED_AT_ONCE = 256


class Wanted(NamedTuple):
    """Partition to evict for: from all partitions above their guarantee, or from its own only."""

    partition: int = 0
    is_own: bool = False


EVERYBODY = Wanted()


class TierUse(NamedTuple):
    """A tenant's use and quota of a tier."""

    used_bytes: int
    chunks: int
    quota: Quota


class EvictionState:
    """Chooses victims and tracks running evictions. Shares the lock of *state*. Thread-safe.

    A policy tracks exactly the rows of the copies on its tier. A key with a lease, a pin or a
    running move is never chosen as a victim.
    """

    def __init__(self, state: CatalogState) -> None:
        self._state = state
        self._index, self.partitions = state.index, state.metadata.partitions
        self.leaving: dict[ChunkKey, str] = {}
        """Chunks being evicted, and the tier that evicts them."""
        self.drains_to = ""
        """Tier that evicts no chunk that a faster one has: a drain saves memory on it."""
        self._unclaimed = threading.Condition(state.lock)

    def partition(self, key: ChunkKey, tenant: str, category: str) -> int:
        """Return the partition that an existing or new chunk counts against."""
        with self._state.lock:
            if row := self._index.row(key):
                return self._state.metadata.hints.partitions[row]
            return self.partitions.number(tenant, category)

    def owed_bytes(self, tier: str, partition: int, need_bytes: int, need_chunks: int = 1) -> int:
        """Return what a partition must free on *tier* to add *need_bytes* and *need_chunks*."""
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
        """Choose victims and reserve them for the caller. Pair with ``unclaim``.

        A frame of n bytes frees *allocated* (n) bytes.
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
        """Claim those of *keys* that may be evicted, regardless of the policy."""
        with self._state.lock:
            victims = [key for key in keys if not self.stays(key, tier)]
            self.leaving.update(dict.fromkeys(victims, tier))
            return victims

    def _candidates(self, tier: str, wanted: Wanted) -> Iterator[int]:
        index = self._index

        def stays(row: int) -> bool:
            return self.stays(index.key(row), tier)

        if not wanted.is_own:
            late = self._state.metadata.hints.expired(self._state.clock(), EXPIRED_AT_ONCE)
            yield from (row for row in late if tier in index.holders(row) and not stays(row))
        if tier == index.tiers[-1] != index.tiers[0]:
            yield from self._sparing(tier, wanted, stays)
        yield from self._ordered(tier, wanted, stays)

    def _sparing(self, tier: str, wanted: Wanted, stays: Callable[[int], bool]) -> Iterator[int]:
        """Yield candidates whose eviction leaves no chunk of a faster tier without its parent."""
        index = self._index
        named: Counter[int] = Counter()

        def spares(row: int) -> bool:
            is_way = index.continued(row) > named[row] and index.holders(row) == [tier]
            return is_way or stays(row)

        for row in self._ordered(tier, wanted, spares):
            named[index.parents[row]] += 1
            yield row

    def _ordered(self, tier: str, wanted: Wanted, stays: Callable[[int], bool]) -> Iterator[int]:
        """Return candidates in the order of the tier's policy and the engines' priorities."""
        policy, now = self._state.policies[tier], self._state.clock()
        if not isinstance(policy, PartitionedEviction):
            rows = policy.victims(stays, now)
        else:
            rows = policy.victims_for(wanted.partition, stays, now, is_own=wanted.is_own)
        parent = self._index.parents.__getitem__
        return self._state.metadata.hints.in_order(rows, parent, len(policy))

    def rank(self, tier: str, key: ChunkKey) -> tuple[int, bool]:
        """Return how many chunks *tier* would evict before *key*, and whether it may be more."""
        with self._state.lock:
            self._state.access_log.apply_all()
            victims = list(islice(self._candidates(tier, EVERYBODY), LOOKED_AT))
            row = self._index.row(key)
            return (victims.index(row), False) if row in victims else (len(victims), True)

    def unclaim(self, keys: Iterable[ChunkKey]) -> None:
        """End the claims of ``claim_victims`` or ``claim``."""
        with self._state.lock:
            for key in keys:
                del self.leaving[key]
            self._unclaimed.notify_all()

    def await_unclaimed(self, tier: str, deadline: float) -> bool:
        """Wait until an eviction from *tier* ends; False if none runs or at the deadline."""
        with self._unclaimed:
            left_s = deadline - self._state.clock()
            if tier not in self.leaving.values() or left_s <= 0:
                return False
            return self._unclaimed.wait(left_s)

    def stays(self, key: ChunkKey, tier: str) -> bool:
        """Whether a chunk must not be evicted from *tier* now. Under the lock."""
        if key in self.leaving or self._state.holds.is_held(key):
            return True
        return tier == self.drains_to and self._index.holders(self._index.row(key))[:1] != [tier]

    # --- use of tiers

    def count_on(self, tier: str) -> int:
        """Return the number of copies on *tier*."""
        with self._state.lock:
            self._state.access_log.apply_all()
            return len(self._state.policies[tier])

    def policy_report(self, tier: str) -> PolicyReport:
        """Return the eviction policy of *tier* and the use of its partitions."""
        known, policy = self._state.metadata, self._state.policies[tier]
        name = known.policy_names.get(tier, type(policy).__name__)
        with self._state.lock:
            self._state.access_log.apply_all()
            return PolicyReport.of(name, policy, known.what_ifs.get(tier), known.partitions.names)

    def quotas_of(self, tenant: str) -> dict[str, TierUse]:
        """Return the use of each tier by *tenant*; empty when it has no partition of its own."""
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
        """Set the quotas of *tenant*, by tier: all, or none if one raises InvalidRequestError."""
        number = self.partitions.number(tenant)
        with self._state.lock:
            checked = []
            for tier, quota in quotas.items():
                policy = self._state.policies[tier]
                assert isinstance(policy, PartitionedEviction)
                checked.append((policy, policy.with_quota(number, quota)))
            for policy, fresh in checked:
                policy.quotas = fresh
