"""Authorization of calls, the same for every transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from kvstore.proto.errors import PermissionDeniedError
from kvstore.proto.types import DIGEST_BYTES
from kvstore.server.security.audit_log import AuditLog, Event
from kvstore.server.security.authenticator import Authenticator, JwtVerifier
from kvstore.server.security.certificates import parse_revocations
from kvstore.server.security.key_files import ApiKeys, WatchedFile, parse_keys
from kvstore.server.security.rate_limits import Limits, RateLimit, TenantLimits
from kvstore.server.security.sessions import Principal, Session, SessionTable
from kvstore.server.settings.rules import Pool
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import POOL_PREFIX
from kvstore.server.telemetry.metrics import Counters

ANY = "any"
OPEN = "open"
"""Needs no role: health probes."""
PREFIX_BYTES = 8
MAX_TENANT_CHARS = 128
REFUSALS_PER_S = 20
"""Calls of unknown callers written to the audit log; further ones are only counted."""

_BY_ROLE = {
    ANY: "OpenSession Heartbeat CloseSession Status Quota",
    "peer": "OpenPeer",
    "read": "Lookup Get Release LendPeer Resolve Stat List Explain Events Spaces Slab Extent",
    "write": "Put Reserve Commit Abort PutDevice AnnouncePuts ReportReuse Weigh Pin Unpin Delete"
    " Clear Ring",
    "admin": "SetQuota Drain Scrub Trace",
}
METHODS: Mapping[str, str] = {
    name: role for role, names in _BY_ROLE.items() for name in names.split()
}
"""The role that each method of kvstore.v1 needs, and Slab, Extent and Ring of the Unix socket.

Role admin is needed for Status and Quota beyond the caller's own, for Explain and Events without a
session, and for Clear and Spaces of another tenant."""

SERVICES: Mapping[str, str] = {
    "grpc.health.v1.Health": OPEN,
    "grpc.reflection.v1alpha.ServerReflection": "admin",
}
"""The role that all methods of other services need."""


@lru_cache(256)
def role_for(method: str) -> str:
    """Return the role that *method* needs. Raises PermissionDeniedError for an unknown one."""
    service, _, name = method.strip("/").rpartition("/")
    role = SERVICES.get(service) or METHODS.get(name)
    if role is None:
        raise PermissionDeniedError(f"{name}: no role may call this")
    return role


def _is_of_others(name: str, request: Any, tenant: str) -> bool:
    """Whether *request* covers more than its caller's tenant, or a pool it may access."""
    if name in ("Explain", "Events"):
        return not request.session_id
    if request.tenant in ("", tenant):
        return False
    return name == "Clear" or not request.tenant.startswith(POOL_PREFIX)


def access_to(
    pools: Sequence[Pool], principal: Principal, tenant: str
) -> tuple[str, frozenset[str]]:
    """Return the tenant and roles of the session that *principal* opens for *tenant*.

    *tenant* is empty, the caller's own or a shared pool's. Raises PermissionDeniedError for others.
    """
    if tenant in ("", principal.tenant):
        return principal.tenant, principal.roles
    for pool in pools:
        if tenant == POOL_PREFIX + pool.name:
            roles = pool.roles(principal.tenant) & principal.roles
            if roles:
                return tenant, roles
    raise PermissionDeniedError(f"tenant={tenant[:160]!r}: not {principal.name}'s")


_WIDE = frozenset({"Explain", "Events", "Clear", "Spaces"})
"""Calls that may cover other tenants, depending on their message."""
_QUIET = frozenset({"Heartbeat", "Status", "Quota"})


class Authorizer:
    """Checks roles, rates and session owners, and records calls. Thread-safe.

    Raises InvalidRequestError for unusable files of *config*.
    """

    def __init__(
        self, config: Settings, sessions: SessionTable, clock: Callable[[], float]
    ) -> None:
        keys = verifier = revocations = None
        if config.auth_keys is not None:
            keys = WatchedFile((config.auth_keys,), parse_keys, lambda: ApiKeys(()))
        if config.jwt_key is not None:
            terms = config.jwt_algorithm, config.jwt_audience or "", config.jwt_issuer or ""
            none, path = JwtVerifier(None, *terms), config.jwt_key
            verifier = WatchedFile((path,), lambda key: JwtVerifier(key, *terms), lambda: none)
        if config.tls_crl is not None and config.tls_client_ca is not None:
            revocations = WatchedFile((config.tls_crl, config.tls_client_ca), parse_revocations)
        takes = config.tls_client_ca is not None
        self.authenticator = Authenticator(keys, verifier, revocations, takes_certificates=takes)
        rules, log, log_bytes = config.tenant_limits, config.audit_log, config.limits.audit_bytes
        limits = {r.tenant: Limits(r.chunks, r.requests_per_s, r.leases) for r in rules}
        self.limits = TenantLimits(limits, clock)
        self.pools = config.shared_pools
        self.audit = AuditLog(log, log_bytes, time.time) if log is not None else None
        self._sessions = sessions
        self._notes_reads = config.audit_reads
        self._refusals = RateLimit(REFUSALS_PER_S, clock)
        self.clock = clock
        self.counters = Counters()
        """Call durations, recorded by the transports."""

    def admit(self, principal: Principal, method: str, request: Any = None) -> Session | None:
        """Return the session of *request*, if any; without *request* check the role only.

        Raises PermissionDeniedError, QuotaExceededError, LeaseExpiredError for another's session.
        """
        role, name = role_for(method), method.rpartition("/")[2]
        if request is not None and name in _WIDE and _is_of_others(name, request, principal.tenant):
            role = "admin"
        if role != ANY and role not in principal.roles:
            raise PermissionDeniedError(f"{name}: {principal.name} lacks the role {role!r}")
        if request is None:
            return None
        session_id = getattr(request, "session_id", 0)
        if not session_id or name == "CloseSession":  # idempotent: it looks up the session itself
            self.limits.take_request(principal.tenant)
            return None
        session = self._sessions.get(session_id, principal)
        self.admit_on(session, method)
        return session

    def admit_on(self, session: Session, method: str, *, is_counted: bool = True) -> None:
        """Check a call on *session*. Raises PermissionDeniedError or QuotaExceededError."""
        role = role_for(method)
        if role != ANY and role not in session.roles:
            raise PermissionDeniedError(
                f"{method.rpartition('/')[2]}: this session lacks role {role}"
            )
        if is_counted and self.limits.by_tenant:
            self.limits.take_request(session.owner.tenant)

    def lease_terms(self, session_id: int) -> tuple[str, int]:
        """Return a session's tenant and the tenant's limit of leases; 0: no limit."""
        session = self._sessions.by_id.get(session_id)
        tenant = session.owner.tenant if session else ""
        return tenant, self.limits.of(tenant).leases if session else 0

    def note(
        self,
        principal: Principal | None,
        method: str,
        outcome: str,
        session: Session | None = None,
        request: Any = None,
        peer: Callable[[], str] = str,
    ) -> None:
        """Record a call; *principal* None: an unknown caller. *request* may be a chunk count."""
        if self.audit is None:
            return
        name = method.rpartition("/")[2]
        if principal is None:
            if self._refusals.take() is not None:
                self.audit.note(Event("", "", name, outcome, peer=peer()))
            return
        is_quiet = name in _QUIET or (not self._notes_reads and METHODS.get(name) == "read")
        if outcome == "OK" and is_quiet:
            return
        named = str(getattr(request, "tenant", ""))[:MAX_TENANT_CHARS]
        tenant = session.tenant if session else named or principal.tenant
        prefix = session.namespace[:PREFIX_BYTES].hex() if session else ""
        digests = getattr(request, "digests", b"")
        listed = len(digests) // DIGEST_BYTES if isinstance(digests, bytes) else 0
        chunks = request if isinstance(request, int) else listed
        self.audit.note(Event(principal.name, tenant, name, outcome, prefix, chunks, peer()))

    def tick(self) -> int:
        """Reload changed files; end sessions of revoked or expired callers. Return how many."""
        if self.authenticator.is_open:
            return 0
        self.authenticator.refresh()
        return self._sessions.close_unless(self.authenticator.holds)

    def close(self) -> None:
        """Write queued audit events. Idempotent."""
        if self.audit is not None:
            self.audit.close()

    def note_on(
        self, session: Session | None, method: str, outcome: str, chunks: int, peer: str
    ) -> None:
        """Record a call of *chunks* over a transport that knows callers only by their sessions."""
        owner = session.owner if session else None
        self.note(owner, method, outcome, session, chunks, lambda: peer)
