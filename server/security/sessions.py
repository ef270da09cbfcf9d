"""Sessions: one per connected engine process, whose death releases everything it owns."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvstore.proto.errors import (
    InvalidRequestError,
    LeaseExpiredError,
    QuotaExceededError,
    ShuttingDownError,
    UnauthenticatedError,
)
from kvstore.proto.keys import namespace, representation_digest
from kvstore.proto.types import (
    DIGEST_BYTES,
    DType,
    LayerGroup,
    LayerKind,
    Model,
    Namespace,
    RopeParameters,
)
from kvstore.proto.unix_socket import NONCE_BYTES, Op, proof
from kvstore.server.settings.values import TENANT_FIX, TENANT_NAME
from kvstore.tiers.base import DEFAULT_TENANT

ROLES = frozenset({"read", "write", "admin", "peer"})
"""read: look up and get; write: put, pin and delete chunks of the own tenant; admin: the server;
peer: another server, which reads chunks of any tenant whose keys it has."""


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. ``expires_at`` is in seconds of the wall clock.

    ``name`` is ``key:ID``, ``jwt:SUBJECT`` or ``cert:NAME``. ``proof`` names the JWT's signing key,
    and ``certificate`` the certificate, also beside a token: both may be revoked. Raises
    InvalidRequestError for bad tenants or roles.
    """

    name: str
    tenant: str
    roles: frozenset[str]
    expires_at: float = math.inf
    proof: bytes = b""
    certificate: bytes = b""

    def __post_init__(self) -> None:
        check_tenant(self.tenant)
        if not self.roles or not self.roles <= ROLES:
            fix = "name some of read, write, admin, peer"
            raise InvalidRequestError("roles", sorted(self.roles), fix)


def check_tenant(tenant: str) -> str:
    """Return *tenant*. Raises InvalidRequestError for an invalid name."""
    if not TENANT_NAME.fullmatch(tenant):
        raise InvalidRequestError("tenant", tenant, TENANT_FIX)
    return tenant


ANYBODY = Principal("anybody", DEFAULT_TENANT, ROLES)
"""Every caller of a server without authentication."""


TOKEN_BYTES = 16
MAX_PEER_SESSIONS = 256
"""Sessions of other servers, one per node of the fleet."""
SPARED_SHARE = 8
"""The last 1/SPARED_SHARE of sessions is denied to a process or tenant that has as many already."""

_GROUP = LayerGroup(LayerKind.attention, DType.uint8, (0,), 1, 1)
_ROPE = RopeParameters(theta=1.0, rotary_dim=0)
_NO_MODEL = (
    Model("none", "none", "none", "none", (_GROUP,), _ROPE, "none"),
    Namespace(bytes(DIGEST_BYTES)),
    b"",
)
"""Placeholder for model, namespace and digest in the session of a peer."""


@dataclass(slots=True, eq=False)
class Session:
    """The session of one engine process. ``active_at`` is in seconds on the clock.

    Only ``owner``, who opened it, may use it, with ``roles`` for the chunks of ``tenant``.
    """

    session_id: int
    tenant: str
    client: str
    representation: Model
    namespace: Namespace
    representation_digest: bytes
    attach_token: bytes
    active_at: float
    owner: Principal = ANYBODY
    roles: frozenset[str] = ROLES
    is_attached: bool = False
    """Whether its process holds a Unix socket open, which proves that it is alive."""
    is_peer: bool = False
    """Whether it is another server's, which uses whole keys and has no model."""
    reads_from: frozenset[int] = frozenset()
    """Peers that its process reads directly, by its last get."""
    opened_at: float = 0.0
    """On the clock of the table."""
    process: int = 0
    """Id of its process, the same in all of its sessions; 0: none."""
    is_closed: bool = False
    """Set before its resources are released: it must get no new ones from then on."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """The challenge after a hello: its session, and the nonces of client and server."""

    session: Session
    nonces: tuple[bytes, bytes]

    def proof(self, op: Op) -> bytes:
        """Return the proof for *op*."""
        return proof(self.session.attach_token, op, self.session.session_id, self.nonces)


class SessionTable:
    """Live sessions by id.

    *random_bytes* returns secrets and ids, *clock* monotonic seconds. ``on_open`` and ``on_close``
    are called for each opened or ended session, outside the lock.
    """

    def __init__(
        self,
        limit: int,
        ttl_ms: int,
        tenant_salt: Callable[[str], bytes],
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self.ttl_ms = ttl_ms
        self.limit = limit
        self._tenant_salt = tenant_salt
        self._clock = clock
        self._random_bytes = random_bytes
        self.by_id: dict[int, Session] = {}
        """May be read without the lock."""
        self.is_draining = False
        """Whether new sessions are refused."""
        self.on_open: list[Callable[[Session], None]] = []
        self.on_close: list[Callable[[Session], None]] = []
        self._lock = threading.Lock()  # guards the table; held for dictionary operations only

    def open(
        self,
        representation: Model,
        client: str,
        tenant: str = DEFAULT_TENANT,
        owner: Principal = ANYBODY,
        roles: frozenset[str] = ROLES,
        process: int = 0,
    ) -> Session:
        """Open a session. Raises QuotaExceededError or ShuttingDownError."""
        space = namespace(self._tenant_salt(tenant), representation)
        model = representation, space, representation_digest(representation)
        session = self._admit(tenant, client, model, owner=owner, roles=roles, process=process)
        for callback in self.on_open:
            callback(session)
        return session

    def open_peer(self, node_id: str, owner: Principal) -> Session:
        """Open a session for another server; end its earlier one. Raises as ``open``."""
        with self._lock:
            others = [one for one in self.by_id.values() if one.is_peer]
        for one in others:
            if (one.client, one.owner.name) == (node_id, owner.name):
                self.close(one.session_id)
        if len(others) >= MAX_PEER_SESSIONS:
            raise QuotaExceededError("peer_sessions", MAX_PEER_SESSIONS, "this server")
        roles = frozenset({"peer"})
        return self._admit(owner.tenant, node_id, _NO_MODEL, owner=owner, roles=roles, is_peer=True)

    def _admit(
        self, tenant: str, client: str, model: tuple[Model, Namespace, bytes], **terms: Any
    ) -> Session:
        session_id = int.from_bytes(self._random_bytes(8), "little") or 1
        token, now = self._random_bytes(TOKEN_BYTES), self._clock()
        session = Session(session_id, tenant, client, *model, token, now, opened_at=now, **terms)
        with self._lock:
            if self.is_draining:
                raise ShuttingDownError("the server is draining; no new sessions")
            if len(self.by_id) >= self.limit:
                raise QuotaExceededError("max_sessions", self.limit, "this server")
            spared = self.limit // SPARED_SHARE
            if spared and len(self.by_id) >= self.limit - spared:
                self._check_share(session, spared)
            self.by_id[session_id] = session
        return session

    def _check_share(self, session: Session, spared: int) -> None:
        tenant, process, others = session.owner.tenant, session.process, self.by_id.values()
        if session.owner != ANYBODY and sum(x.owner.tenant == tenant for x in others) >= spared:
            raise QuotaExceededError("max_sessions", self.limit, f"tenant {tenant!r}")
        held = sum(one.process == process for one in others) if process else 0
        if held >= spared:
            whose = f"one process with {held} clients (close some, {spared} are for others)"
            raise QuotaExceededError("max_sessions", self.limit, whose)

    def get(self, session_id: int, owner: Principal | None = None) -> Session:
        """Return a live session and renew it; with *owner* check the owner without renewal.

        Raises LeaseExpiredError, also for another owner's session.
        """
        session = self.by_id.get(session_id)
        known = session and (session.owner.name, session.owner.tenant)
        if session is None or (owner is not None and known != (owner.name, owner.tenant)):
            raise LeaseExpiredError(
                f"session_id={session_id}: closed, expired or of an earlier start; open a session"
            )
        if owner is None:
            session.active_at = self._clock()
        return session

    def close_unless(self, holds: Callable[[Principal], bool]) -> int:
        """End the sessions whose owner is no longer valid by *holds*. Return how many."""
        with self._lock:
            owners = {one.owner for one in self.by_id.values()}
        gone = {owner for owner in owners if not holds(owner)}
        with self._lock:
            lost = [one.session_id for one in self.by_id.values() if one.owner in gone]
        return sum(map(self.close, lost))

    def challenge(self, session_id: int, nonce: bytes) -> Challenge:
        """Begin a handshake on a session with the client's *nonce*. Raises UnauthenticatedError."""
        session = self.by_id.get(session_id)
        if session is None:
            raise UnauthenticatedError("session_id: unknown; open a session first")
        return Challenge(session, (nonce, self._random_bytes(NONCE_BYTES)))

    def close(self, session_id: int) -> bool:
        """End a session and release what it owns. Return whether it existed."""
        with self._lock:
            session = self.by_id.pop(session_id, None)
        if session is None:
            return False
        session.is_closed = True
        for callback in self.on_close:
            callback(session)
        return True

    def close_owned(self, session_id: int, owner: Principal) -> None:
        """Close a session of *owner*; ignore others."""
        with suppress(LeaseExpiredError):
            self.close(self.get(session_id, owner).session_id)

    def expire(self) -> int:
        """End the sessions that were idle for longer than their TTL. Return how many."""
        oldest = self._clock() - self.ttl_ms / 1000
        with self._lock:
            silent = [s for s in self.by_id.values() if s.active_at < oldest]
        return sum(self.close(one.session_id) for one in silent if not one.is_attached)

    def drain(self) -> None:
        """Refuse new sessions from now on."""
        with self._lock:
            self.is_draining = True

    def __len__(self) -> int:
        return len(self.by_id)
