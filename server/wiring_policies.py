"""What policies a server runs, put together from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.blending.content_index import ContentIndex
from kvstore.server.eviction.policy import EvictionPolicy
from kvstore.server.eviction.quotas import (
    NO_QUOTA,
    MissRatioCurve,
    PartitionedEviction,
    PartitionTable,
    Quota,
)
from kvstore.server.eviction.registry import make_policy
from kvstore.server.eviction.reuse_estimate import ReuseForecast
from kvstore.server.index.chunk_metadata import ChunkMetadata
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import format_size
from kvstore.server.tiering.admission import make_admission


class Policies:
    """The eviction policy of each tier, and the metadata that all of them rank by."""

    def __init__(
        self,
        config: Settings,
        capacities: Mapping[str, int],
        clock: Callable[[], float] | None = None,
    ) -> None:
        """*capacities* has the bytes of each tier that is used; *clock* ends long decisions.

        Raises InvalidRequestError when more of a tier is guaranteed than it has.
        """
        self._names = config.policy
        self._capacities = capacities
        self._clock = clock
        self._quotas = config.tenant_quotas
        terms = config.category_terms
        self._categories = {rule.category: Quota(rule.quota) for rule in terms if rule.quota}
        self._chunks = {rule.tenant: rule.chunks for rule in config.tenant_limits if rule.chunks}
        tenants = dict.fromkeys([*(rule.tenant for rule in self._quotas), *self._chunks])
        self._has_quotas = bool(tenants or self._categories)
        partitions = PartitionTable(tuple(tenants), tuple(self._categories))
        self.metadata = ChunkMetadata(
            partitions=partitions,
            category_ttls_s={rule.category: float(rule.ttl_s) for rule in terms if rule.ttl_s},
            evicted_limit=config.ghost_limit,
            what_ifs={tier: MissRatioCurve(size) for tier, size in capacities.items() if size},
            contents=ContentIndex(config.blend_contents),
            policy_names={tier: self.name(tier) for tier in capacities},
        )
        rules = config.write_rules
        looks_ahead = any(make_admission(rule).looks_ahead for rule in rules.values())
        if looks_ahead or config.write_budgets:
            self.metadata.forecast = ReuseForecast(self.metadata.history)
        self.by_tier = {tier: self._policy(tier) for tier in capacities}

    def name(self, tier: str) -> str:
        """Return the name of a tier's policy; nothing is evicted from one without a size."""
        return self._names[tier] if self._capacities[tier] else "lru"

    def _policy(self, tier: str) -> EvictionPolicy:
        partitions = self.metadata.partitions
        if not self._has_quotas or not self._capacities[tier]:
            return self._plain(tier)
        # What is said of this tier comes last, and wins.
        rules = sorted(self._quotas, key=lambda rule: rule.tier != "")
        by_tenant = {
            rule.tenant: Quota(rule.quota, rule.guaranteed)
            for rule in rules
            if rule.tier in ("", tier)
        }
        for tenant, chunks in self._chunks.items():
            by_tenant[tenant] = replace(by_tenant.get(tenant, NO_QUOTA), limit_chunks=chunks)
        quotas = partitions.quotas(by_tenant, self._categories)
        self._check(tier, quotas)
        return PartitionedEviction(
            lambda: self._plain(tier),
            self.metadata.hints.partition,
            quotas,
            self._capacities[tier],
        )

    def _check(self, tier: str, quotas: tuple[Quota, ...]) -> None:
        sure = sum(quota.guaranteed_bytes for quota in quotas)
        if sure > self._capacities[tier]:
            fix = f"guarantee at most the {format_size(self._capacities[tier])} of tier {tier!r}"
            raise InvalidRequestError("tenant_quotas", ",".join(map(str, self._quotas)), fix)

    def _plain(self, tier: str) -> EvictionPolicy:
        return make_policy(self.name(tier), self.metadata.history, self._clock)
