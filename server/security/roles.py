"""Which role each call needs. A method without a row here is refused, and fails a test."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvstore.proto.errors import PermissionDeniedError
from kvstore.server.security.pools import PREFIX
from kvstore.server.security.principal import Principal

ANY = "any"
OPEN = "open"
"""Asked of nobody: what a probe of the machine's own wants to know."""

METHODS: Mapping[str, str] = {
    "OpenSession": ANY,
    "Heartbeat": ANY,
    "CloseSession": ANY,
    "OpenPeer": "peer",
    "Lookup": "read",
    "Plan": "read",
    "Get": "read",
    "Release": "read",
    "LendPeer": "read",
    "Resolve": "read",
    "ReportReuse": "write",
    "Put": "write",
    "Reserve": "write",
    "Commit": "write",
    "Abort": "write",
    "PutDevice": "write",
    "Promise": "write",
    "Weigh": "write",
    "Pin": "write",
    "Unpin": "write",
    "Delete": "write",
    "Clear": "write",
    "Stat": "read",
    "List": "read",
    "Status": ANY,
    "Quota": ANY,
    "SetQuota": "admin",
    "Drain": "admin",
    "Scrub": "admin",
    "Trace": "admin",
    "Explain": "read",
    "Events": "read",
    "Spaces": "read",
    # Of the Unix socket alone.
    "Slab": "read",
    "Extent": "read",
    "Ring": "write",
}
"""The role that each method of kvstore.v1 needs. What of Status and Quota is not the caller's own
is for admins; so are Explain and Events without a session, and Clear and Spaces of a tenant that
is named."""

SERVICES: Mapping[str, str] = {
    "grpc.health.v1.Health": OPEN,
    "grpc.reflection.v1alpha.ServerReflection": "admin",
}
"""The same for all methods of the other services."""


def role_for(method: str, request: Any = None, tenant: str = "") -> str:
    """Return the role that the call *method*, ``/service/name`` or a name of ours, needs.

    *tenant* is the caller's: *request* may name it as its own.

    Raises PermissionDeniedError for one that has no row.
    """
    service, _, name = method.strip("/").rpartition("/")
    role = SERVICES.get(service) or METHODS.get(name)
    if role is None:
        raise PermissionDeniedError(f"{name}: no role may call this")
    if request is not None and _is_of_others(name, request, tenant):
        return "admin"
    return role


def _is_of_others(name: str, request: Any, tenant: str) -> bool:
    """Whether *request* is about more than its caller's own, or a pool it may be let into."""
    if name in ("Explain", "Events"):
        return not request.session_id
    if name == "Clear":
        return request.tenant not in ("", tenant)
    return (
        name == "Spaces"
        and request.tenant not in ("", tenant)
        and not request.tenant.startswith(PREFIX)
    )


def check_session_role(roles: Collection[str], method: str) -> None:
    """Raise PermissionDeniedError unless a session with *roles* may call *method*."""
    role = role_for(method)
    if role != ANY and role not in roles:
        name = method.rpartition("/")[2]
        raise PermissionDeniedError(f"{name}: this session may not {role}")


def check_role(principal: Principal, method: str, request: Any = None) -> None:
    """Raise PermissionDeniedError unless *principal* may call *method*."""
    role = role_for(method, request, principal.tenant)
    if role not in (ANY, OPEN) and role not in principal.roles:
        name = method.rpartition("/")[2]
        raise PermissionDeniedError(f"{name}: {principal.name} has not the role {role!r}")
