"""The QuotaDesk: what tenants take and may take, asked for and changed while the server runs."""

from __future__ import annotations

from dataclasses import replace

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.quotas import Quota
from kvstore.server.index.catalog import Catalog
from kvstore.server.security.rate_limits import TenantLimits
from kvstore.server.security.sessions import check_tenant


class QuotaDesk:
    """Reads and changes the quotas of *catalog*'s tiers and *limits*. Thread-safe."""

    def __init__(self, catalog: Catalog, limits: TenantLimits | None) -> None:
        self._catalog = catalog
        self._limits = limits or TenantLimits({}, lambda: 0.0)

    def tenants(self) -> list[str]:
        """Return the tenants that have a quota or a limit of their own."""
        return sorted({*self._catalog.eviction.quota_tenants(), *self._limits.tenants()})

    def of(self, tenant: str) -> pb.TenantQuota:
        """Return what *tenant* takes and may take."""
        limits = self._limits.of(tenant)
        reply = pb.TenantQuota(
            tenant=tenant,
            chunks=limits.chunks,
            requests_per_s=limits.requests_per_s,
            leases=limits.leases,
            used_leases=self._catalog.leases_of(tenant),
        )
        for tier, use in self._catalog.eviction.quotas_of(tenant).items():
            reply.tiers.add(
                tier=tier,
                used_bytes=use.used_bytes,
                quota_bytes=use.quota.limit_bytes,
                guaranteed_bytes=use.quota.guaranteed_bytes,
                used_chunks=use.chunks,
            )
        return reply

    def change(self, request: pb.SetQuotaRequest) -> None:
        """Do what *request* asks, or nothing of it. Raises InvalidRequestError."""
        tenant = check_tenant(request.tenant)
        now = self._limits.of(tenant)
        given = {
            name: getattr(request, name)
            for name in ("chunks", "requests_per_s", "leases")
            if request.HasField(name)
        }
        limits = replace(now, **given)
        self._change_tiers(tenant, request)
        if given:
            self._limits.set(tenant, limits)

    def _change_tiers(self, tenant: str, request: pb.SetQuotaRequest) -> None:
        fields = {
            "limit_bytes": "quota_bytes",
            "guaranteed_bytes": "guaranteed_bytes",
            "limit_chunks": "chunks",
        }
        given = {ours: getattr(request, of) for ours, of in fields.items() if request.HasField(of)}
        if not given:
            return
        known = self._catalog.eviction.quotas_of(tenant)
        tiers = [request.tier] if request.tier else list(known)
        if not known or not set(tiers) <= set(known):
            fix = "has no quota that could change: name it in --tenant-quotas or --tenant-limits"
            raise InvalidRequestError("tenant", (tenant, request.tier), fix)
        changed: dict[str, Quota] = {tier: replace(known[tier].quota, **given) for tier in tiers}
        self._catalog.eviction.set_quotas(tenant, changed)
