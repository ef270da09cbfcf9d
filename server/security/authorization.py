"""The Authorizer: may this caller do this, on this session, now? The same for every transport."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.proto.errors import PermissionDeniedError
from kvstore.proto.types import DIGEST_BYTES
from kvstore.server.security.audit_log import AuditLog, Event
from kvstore.server.security.rate_limits import RateLimit, TenantLimits
from kvstore.server.security.sessions import Principal, Session, SessionTable
from kvstore.server.settings.rules import Pool
from kvstore.server.telemetry.metrics import CallTimes

ANY = "any"
OPEN = "open"
"""Needs no role: what a probe of the machine's own wants to know."""
POOL_PREFIX = "pool:"
"""Of the name that a shared pool has as a tenant; no tenant's own name has a colon."""

_BY_ROLE = {
    ANY: "OpenSession Heartbeat CloseSession Status Quota",
    "peer": "OpenPeer",
    "read": "Lookup Plan Get Release LendPeer Resolve Stat List Explain Events Spaces Slab Extent",
    "write": "Put Reserve Commit Abort PutDevice AnnouncePuts ReportReuse Weigh Pin Unpin Delete"
    " Clear Ring",
    "admin": "SetQuota Drain Scrub Trace",
}
METHODS: Mapping[str, str] = {
    name: role for role, names in _BY_ROLE.items() for name in names.split()
}
"""The role that each method of kvstore.v1 needs, and Slab, Extent and Ring of the Unix socket.

What of Status and Quota is not the caller's own is for admins; so are Explain and Events without a
session, and Clear and Spaces of a tenant that is named."""

SERVICES: Mapping[str, str] = {
    "grpc.health.v1.Health": OPEN,
    "grpc.reflection.v1alpha.ServerReflection": "admin",
}
"""The same for all methods of the other services."""


def role_for(method: str, request: Any = None, tenant: str = "") -> str:
    """Return the role that the call *method*, ``/service/name`` or a name of ours, needs.

    *tenant* is the caller's, which *request* may name as its own. Raises PermissionDeniedError for
    a method that has no row.
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
    if name not in ("Clear", "Spaces") or request.tenant in ("", tenant):
        return False
    return name == "Clear" or not request.tenant.startswith(POOL_PREFIX)


def check_session_role(roles: Collection[str], method: str) -> None:
    """Raise PermissionDeniedError unless a session with *roles* may call *method*."""
    role = role_for(method)
    if role != ANY and role not in roles:
        raise PermissionDeniedError(f"{_name(method)}: this session may not {role}")


def check_role(principal: Principal, method: str, request: Any = None) -> None:
    """Raise PermissionDeniedError unless *principal* may call *method*."""
    role = role_for(method, request, principal.tenant)
    if role not in (ANY, OPEN) and role not in principal.roles:
        raise PermissionDeniedError(f"{_name(method)}: {principal.name} has not the role {role!r}")


def _name(method: str) -> str:
    return method.rpartition("/")[2]


def access_to(
    pools: Sequence[Pool], principal: Principal, tenant: str
) -> tuple[str, frozenset[str]]:
    """Return the tenant of the session that *principal* opens for *tenant*, and its roles there.

    *tenant* is empty or the caller's own, or one of the shared *pools*: chunks that several tenants
    may read, kept as those of a tenant of their own. Raises PermissionDeniedError for others.
    """
    if tenant in ("", principal.tenant):
        return principal.tenant, principal.roles
    for pool in pools:
        if tenant == POOL_PREFIX + pool.name:
            roles = pool.roles(principal.tenant) & principal.roles
            if roles:
                return tenant, roles
    raise PermissionDeniedError(f"tenant={tenant[:160]!r}: not {principal.name}'s")


PREFIX_BYTES = 8
MAX_TENANT_CHARS = 128
REFUSALS_PER_S = 20
"""Written to the audit log of callers that nobody knows; more are only counted."""

_QUIET = frozenset({"Heartbeat", "Status", "Quota"})


@dataclass(frozen=True, slots=True)
class SessionAuth:
    """``admit`` raises for a session that may not call a method. ``note`` records a call: whose
    session it was on, None for a stranger's, its method, how it ended, of how many chunks it was
    and where it came from.
    """

    admit: Callable[[Session, str], None]
    note: Callable[[Session | None, str, str, int, str], None]


class Authorizer:
    """Checks roles, rates and whose session it is, and records calls. Thread-safe."""

    def __init__(
        self,
        sessions: SessionTable,
        limits: TenantLimits,
        audit: AuditLog | None,
        *,
        notes_reads: bool = False,
        clock: Callable[[], float],
    ) -> None:
        self._sessions = sessions
        self._limits = limits
        self._audit = audit
        self._notes_reads = notes_reads
        self._refusals = RateLimit(REFUSALS_PER_S, clock)
        self.clock = clock
        self.times = CallTimes()
        """How long calls took, as the transports note."""

    @property
    def session_auth(self) -> SessionAuth:
        """For a transport that knows callers by their sessions alone."""
        return SessionAuth(self.admit_on, self.note_on)

    def admit(self, principal: Principal, method: str, request: Any) -> Session | None:
        """Return the session that *request* is about, if any.

        Raises PermissionDeniedError, LeaseExpiredError for a session of somebody else's, and
        QuotaExceededError.
        """
        check_role(principal, method, request)
        session_id = getattr(request, "session_id", 0)
        if not session_id or method.endswith("CloseSession"):  # which looks itself: gone is fine
            self._limits.take_request(principal.tenant)
            return None
        session = self._sessions.owned(session_id, principal)
        check_session_role(session.roles, method)
        self._limits.take_request(principal.tenant)
        return session

    def admit_on(self, session: Session, method: str) -> None:
        """Check a call on *session*. Raises PermissionDeniedError or QuotaExceededError."""
        check_session_role(session.roles, method)
        self._limits.take_request(session.owner.tenant)

    def lease_terms(self, session_id: int) -> tuple[str, int]:
        """Return a session's tenant and how many leases that may have; 0: no limit."""
        owner = self._sessions.owner_of(session_id)
        return (owner.tenant, self._limits.of(owner.tenant).leases) if owner else ("", 0)

    def note(
        self,
        principal: Principal | None,
        method: str,
        outcome: str,
        session: Session | None = None,
        request: Any = None,
        peer: Callable[[], str] = str,
    ) -> None:
        """Record a call; without a *principal* nobody knew who called.

        *request* may be the number of its chunks, too.
        """
        if self._audit is None:
            return
        name = _name(method)
        if principal is None:
            if self._refusals.take() is not None:
                self._audit.note(Event("", "", name, outcome, peer=peer()))
            return
        is_quiet = name in _QUIET or (not self._notes_reads and METHODS.get(name) == "read")
        if outcome == "OK" and is_quiet:
            return
        named = str(getattr(request, "tenant", ""))[:MAX_TENANT_CHARS]
        tenant = session.tenant if session else named or principal.tenant
        prefix = session.namespace[:PREFIX_BYTES].hex() if session else ""
        chunks = request if isinstance(request, int) else _chunks_in(request)
        self._audit.note(Event(principal.name, tenant, name, outcome, prefix, chunks, peer()))

    def note_on(
        self, session: Session | None, method: str, outcome: str, chunks: int, peer: str
    ) -> None:
        """``note`` for a transport that knows callers by their sessions alone."""
        owner = session.owner if session else None
        self.note(owner, method, outcome, session, chunks, lambda: peer)


def _chunks_in(request: Any) -> int:
    digests = getattr(request, "digests", b"")
    return len(digests) // DIGEST_BYTES if isinstance(digests, bytes) else 0
