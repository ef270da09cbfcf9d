"""A PolicyReport: whom a tier evicts by, what tenants take of it, what another size is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.eviction.miss_ratio_curve import WhatIf
from kvstore.server.eviction.policy import EvictionPolicy
from kvstore.server.eviction.quotas import PartitionedEviction, Quota


@dataclass(frozen=True, slots=True)
class PartitionUse:
    """What a tenant or category takes of a tier."""

    name: str
    used_bytes: int
    quota: Quota


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """Whom a tier evicts by, its name, and what another size of the tier would be worth.

    ``curve`` has the hit ratio, of chunks, by how many times the tier's size; it is empty until
    enough was asked for.
    """

    name: str
    fallbacks: int
    """Times that ranking took too long, and leaf-LRU chose instead."""
    curve: Mapping[float, float]
    partitions: Sequence[PartitionUse]

    @classmethod
    def of(
        cls, name: str, policy: EvictionPolicy, what_if: WhatIf | None, names: Sequence[str]
    ) -> PolicyReport:
        """Return the report of *policy*, called *name*, whose partitions are called *names*."""
        partitions: list[PartitionUse] = []
        if isinstance(policy, PartitionedEviction):
            partitions = [
                PartitionUse(names[number] or "others", policy.used_bytes(number), quota)
                for number, quota in enumerate(policy.quotas)
            ]
            policy = policy.parts[0]
        curve = {p.scale: p.hit_ratio for p in what_if.curve()} if what_if is not None else {}
        known = {scale: ratio for scale, ratio in curve.items() if ratio is not None}
        return cls(name, int(getattr(policy, "fallbacks", 0)), known, partitions)

    def fill(self, status: pb.TierStatus) -> None:
        """Write the report into a tier's status."""
        status.policy = self.name
        for scale, ratio in self.curve.items():
            status.what_if.add(scale=scale, hit_ratio=ratio)
        for one in self.partitions:
            status.partitions.add(
                name=one.name,
                used_bytes=one.used_bytes,
                quota_bytes=one.quota.limit_bytes,
                guaranteed_bytes=one.quota.guaranteed_bytes,
            )
