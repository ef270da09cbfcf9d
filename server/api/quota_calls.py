"""The RPCs of quotas: Quota and SetQuota."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import PermissionDeniedError
from kvstore.server.api.access_check import principal_of

if TYPE_CHECKING:
    import grpc

    from kvstore.server.api.quota_service import QuotaDesk

EVERYBODY = "*"


class QuotaCalls:
    """A part of the service. What it reads is set by the service's constructor."""

    _quotas: QuotaDesk
    _stamp: pb.Server

    def Quota(self, request: pb.QuotaRequest, context: grpc.ServicerContext) -> pb.QuotaResponse:
        """Say what a tenant takes and may take; of others than one's own to admins alone."""
        caller = principal_of(context)
        tenant = request.tenant or caller.tenant
        if tenant != caller.tenant and not caller.is_admin():
            raise PermissionDeniedError(f"tenant={tenant[:160]!r}: not {caller.name}'s")
        tenants = self._quotas.tenants() if tenant == EVERYBODY else [tenant]
        return pb.QuotaResponse(server=self._stamp, tenants=map(self._quotas.of, tenants))

    def SetQuota(
        self, request: pb.SetQuotaRequest, context: grpc.ServicerContext
    ) -> pb.QuotaResponse:
        """Change what a tenant may take, until the restart; all that is asked, or nothing."""
        self._quotas.change(request)
        return pb.QuotaResponse(server=self._stamp, tenants=[self._quotas.of(request.tenant)])
