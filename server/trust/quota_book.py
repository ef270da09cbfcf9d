"""The QuotaBook: what of the tiers and leases is each tenant's. A part of the Catalog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.index.arrivals import Arrivals
from kvstore.server.leases import TenantOf
from kvstore.server.policy.partitions import PartitionedEviction, Quota


@dataclass(frozen=True, slots=True)
class TierUse:
    """What a tenant takes of a tier, and may take."""

    used_bytes: int
    chunks: int
    quota: Quota


class QuotaBook(Arrivals):
    """Says and changes what tenants take. Thread-safe."""

    def limit_leases(self, tenant_of: TenantOf) -> None:
        """Have *tenant_of* say whose sessions are and how many leases each tenant may have."""
        with self._lock:
            self._leases.tenant_of = tenant_of

    def leases_of(self, tenant: str) -> int:
        """Return how many leases *tenant* has."""
        with self._lock:
            return self._leases.by_tenant[tenant]

    def quota_tenants(self) -> tuple[str, ...]:
        """Return the tenants whose chunks are counted."""
        return self.knowledge.partitions.tenants

    def quotas_of(self, tenant: str) -> dict[str, TierUse]:
        """Return by tier what *tenant* takes; none when its chunks are not counted."""
        number = self.knowledge.partitions.number(tenant)
        if tenant not in self.quota_tenants():
            return {}
        with self._lock:
            self._journal.settle()
            return {
                tier: TierUse(
                    policy.used_bytes(number), policy.chunks(number), policy.quotas[number]
                )
                for tier, policy in self._policies.items()
                if isinstance(policy, PartitionedEviction)
            }

    def set_quotas(self, tenant: str, quotas: Mapping[str, Quota]) -> None:
        """Hold *tenant* to other quotas, by tier. Raises InvalidRequestError, changing nothing."""
        number = self.knowledge.partitions.number(tenant)
        with self._lock:
            done: list[tuple[PartitionedEviction, Quota]] = []
            try:
                for tier, quota in quotas.items():
                    policy = self._policies[tier]
                    assert isinstance(policy, PartitionedEviction)
                    before = policy.quotas[number]
                    policy.set_quota(number, quota)
                    done.append((policy, before))
            except InvalidRequestError:
                for policy, before in done:
                    policy.set_quota(number, before)
                raise
