"""Quotas of a server's tenants: asked for, changed, shown as tables or JSON."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.json_format import MessageToJson

from kvstore.cli.access import dial
from kvstore.cli.status import DEADLINE_MS, readable_size
from kvstore.cli.tables import Grid, open_console
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.server.settings.values import parse_size


@dataclass(frozen=True, slots=True)
class Change:
    """What of a tenant's limits is to change, as it was written; None: nothing."""

    tenant: str
    tier: str = ""
    size: str | None = None
    guaranteed: str | None = None
    chunks: int | None = None
    rate: int | None = None
    leases: int | None = None

    def message(self) -> pb.SetQuotaRequest:
        """Return the request. Raises InvalidRequestError for sizes that are none."""
        try:
            return pb.SetQuotaRequest(
                tenant=self.tenant,
                tier=self.tier,
                quota_bytes=None if self.size is None else parse_size(self.size),
                guaranteed_bytes=None if self.guaranteed is None else parse_size(self.guaranteed),
                chunks=self.chunks,
                requests_per_s=self.rate,
                leases=self.leases,
            )
        except ValueError as error:
            raise InvalidRequestError("size", (self.size, self.guaranteed), str(error)) from None


def ask_quota(address: str, tenant: str) -> pb.QuotaResponse:
    """Return what *tenant* takes and may take. Raises KVStoreErrors within two seconds."""
    connection = dial(address, DEADLINE_MS)
    try:
        request = pb.QuotaRequest(tenant=tenant)
        return connection.call("Quota", request, DEADLINE_MS, pb.QuotaResponse)
    finally:
        connection.close()


def set_quota(address: str, change: Change) -> pb.QuotaResponse:
    """Change limits; return what then is. Raises KVStoreErrors within two seconds."""
    request = change.message()
    connection = dial(address, DEADLINE_MS)
    try:
        return connection.call("SetQuota", request, DEADLINE_MS, pb.QuotaResponse)
    finally:
        connection.close()


def quotas_as_json(reply: pb.QuotaResponse) -> str:
    """Return *reply* as JSON."""
    shown = pb.QuotaResponse(tenants=reply.tenants)
    return MessageToJson(shown, always_print_fields_with_no_presence=True)


def print_quotas(reply: pb.QuotaResponse) -> None:
    """Print *reply* as tables."""
    limits = Grid("tenant", "leases", "of", "requests/s", "chunks a tier")
    tiers = Grid("tenant", "tier", "used", "of", "sure of", "chunks")
    for one in reply.tenants:
        limits.add_row(
            one.tenant,
            str(one.used_leases),
            *(str(limit or "-") for limit in (one.leases, one.requests_per_s, one.chunks)),
        )
        for tier in one.tiers:
            tiers.add_row(
                one.tenant,
                tier.tier,
                readable_size(tier.used_bytes),
                readable_size(tier.quota_bytes) if tier.quota_bytes else "-",
                readable_size(tier.guaranteed_bytes),
                str(tier.used_chunks),
            )
    console = open_console()
    console.print(limits)
    if any(one.tiers for one in reply.tenants):
        console.print(tiers)
