"""The Authorizer: may this caller do this, on this session, now? The same for every way in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.proto.errors import PermissionDeniedError
from kvstore.server.security.audit_log import AuditLog, Event
from kvstore.server.security.pools import PREFIX
from kvstore.server.security.rate_limits import RateLimit, TenantLimits
from kvstore.server.security.sessions import Principal, Session, SessionTable
from kvstore.server.telemetry.metrics import CallTimes

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
    "AnnouncePuts": "write",
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


PREFIX_BYTES = 8
MAX_TENANT_CHARS = 128
REFUSALS_PER_S = 20
"""Written to the audit log of callers that nobody knows; more are only counted."""

_QUIET = frozenset({"Heartbeat", "Status", "Quota"})
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class SessionAuth:
    """``admit`` raises for a session that may not call a method. ``note`` is told of a call: whose
    session it was on, None for a stranger's, its method, how it ended, of how many chunks it was
    and where it came from.
    """

    admit: Callable[[Session, str], None]
    note: Callable[[Session | None, str, str, int, str], None]


class Authorizer:
    """Checks roles, rates and whose session it is, and has calls written down. Thread-safe."""

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
        """How long calls took, told by those who let them in."""

    @property
    def session_auth(self) -> SessionAuth:
        """What a way in needs that knows callers by their sessions alone."""
        return SessionAuth(self.admit_on, self.note_on)

    # --- may it

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
        self.admit_on(session, method)
        return session

    def admit_on(self, session: Session, method: str) -> None:
        """Check a call on *session*. Raises PermissionDeniedError or QuotaExceededError."""
        check_session_role(session.roles, method)
        self._limits.take_request(session.owner.tenant)

    def lease_terms(self, session_id: int) -> tuple[str, int]:
        """Return a session's tenant and how many leases that may have; 0: no limit."""
        owner = self._sessions.owner_of(session_id)
        return (owner.tenant, self._limits.of(owner.tenant).leases) if owner else ("", 0)

    # --- what became of it

    def note(
        self,
        principal: Principal | None,
        method: str,
        outcome: str,
        session: Session | None = None,
        request: Any = None,
        peer: Callable[[], str] = str,
    ) -> None:
        """Have a call written down; without a *principal* nobody knew who called.

        *request* may be the number of its chunks, too.
        """
        if self._audit is None:
            return
        name = method.rpartition("/")[2]
        if principal is None:
            if self._refusals.take() is not None:
                self._audit.note(Event("", "", name, outcome, peer=peer()))
            return
        if outcome == "OK" and self._is_quiet(name):
            return
        self._audit.note(
            Event(
                principal.name,
                session.tenant if session else _tenant_in(request) or principal.tenant,
                name,
                outcome,
                session.namespace[:PREFIX_BYTES].hex() if session else "",
                _chunks_in(request),
                peer(),
            )
        )

    def note_on(
        self, session: Session | None, method: str, outcome: str, chunks: int, peer: str
    ) -> None:
        """``note`` for a way in that knows callers by their sessions alone."""
        owner = session.owner if session else None
        self.note(owner, method, outcome, session, chunks, lambda: peer)

    def _is_quiet(self, name: str) -> bool:
        return name in _QUIET or (not self._notes_reads and METHODS.get(name) == "read")


def _tenant_in(request: Any) -> str:
    """Return the tenant that a request without a session is about, if it names one."""
    return str(getattr(request, "tenant", ""))[:MAX_TENANT_CHARS]


def _chunks_in(request: Any) -> int:
    """Return how many chunks a request names, or the number that stands for it."""
    if isinstance(request, int):
        return request
    digests = getattr(request, "digests", b"")
    return len(digests) // _DIGEST_BYTES if isinstance(digests, bytes) else 0
