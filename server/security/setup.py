"""Puts together who may call a server, from its settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvstore.server.security.api_keys import ApiKeys, parse_keys
from kvstore.server.security.audit_log import AuditLog
from kvstore.server.security.authenticator import Authenticator
from kvstore.server.security.authorization import Authorizer
from kvstore.server.security.certificates import Revocations, parse_revocations
from kvstore.server.security.jwt_tokens import JwtTerms, JwtVerifier
from kvstore.server.security.rate_limits import Limits, TenantLimits
from kvstore.server.security.sessions import SessionTable
from kvstore.server.security.watched_file import WatchedFile
from kvstore.server.settings.settings import Settings


class Trust:
    """What decides about callers. ``tick`` is called now and then, ``close`` in the end.

    Raises InvalidRequestError for files that cannot be used.
    """

    def __init__(
        self, config: Settings, sessions: SessionTable, clock: Callable[[], float]
    ) -> None:
        keys = verifier = revocations = None
        if config.auth_keys is not None:
            keys = WatchedFile((config.auth_keys,), parse_keys, lambda: ApiKeys(()))
        if config.jwt_key is not None:
            audience, issuer = config.jwt_audience or "", config.jwt_issuer or ""
            verify = partial(JwtVerifier, terms=JwtTerms(config.jwt_algorithm, audience, issuer))
            verifier = WatchedFile((config.jwt_key,), verify, partial(verify, None))
        if config.tls_crl is not None and config.tls_client_ca is not None:
            parse: Callable[..., Revocations] = partial(parse_revocations, wall_clock=time.time)
            revocations = WatchedFile((config.tls_crl, config.tls_client_ca), parse)
        self.authenticator = Authenticator(
            keys,
            verifier,
            takes_certificates=config.tls_client_ca is not None,
            wall_clock=time.time,
            revocations=revocations,
        )
        limits = {
            rule.tenant: Limits(rule.chunks, rule.requests_per_s, rule.leases)
            for rule in config.tenant_limits
        }
        self.limits = TenantLimits(limits, clock)
        self.pools = config.shared_pools
        self.audit = None
        if config.audit_log is not None:
            self.audit = AuditLog(config.audit_log, config.limits.audit_bytes, time.time)
        self.authorizer = Authorizer(
            sessions, self.limits, self.audit, notes_reads=config.audit_reads, clock=clock
        )
        self._sessions = sessions

    def tick(self) -> int:
        """Read replaced files; end the sessions of callers that are none now. Return how many."""
        if self.authenticator.is_open:
            return 0
        self.authenticator.refresh()
        return self._sessions.close_unless(self.authenticator.holds)

    def close(self) -> None:
        """Write what waits. Idempotent."""
        if self.audit is not None:
            self.audit.close()
