"""`kvstore clear`: forgets what a namespace, a tenant, a tier or the whole server has."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.cli.access import dial
from kvstore.cli.spaces import Where, representation
from kvstore.cli.status import readable_size
from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, KVStoreError, TierUnavailableError

STEP_MS = 10_000
"""Of one call; a long clearing takes several, so that it can be followed and ended."""
EVERY_TENANT = "*"


@dataclass(frozen=True, slots=True)
class Scope:
    """What goes: of one namespace, one tenant or every one; ``tier`` narrows it to copies there."""

    where: Where
    tenant: str = ""
    tier: str = ""
    everything: bool = False

    def __post_init__(self) -> None:
        named = bool(self.where.space or self.where.representation)
        if self.everything + bool(self.tenant) + named > 1:
            fix = "give one of --namespace, --tenant and --all"
            raise InvalidRequestError("scope", self.tenant or self.where.space, fix)
        if not (self.everything or self.tenant or named or self.tier):
            fix = "say what: --namespace, --tenant, --tier or --all"
            raise InvalidRequestError("scope", "", fix)

    def said(self) -> str:
        """Say what goes, to be asked for."""
        what = "every chunk of every tenant" if self.everything else "your tenant's chunks"
        if self.tenant:
            what = f"the chunks of tenant {self.tenant}"
        elif self.where.space or self.where.representation:
            what = f"the chunks of namespace {self.where.space or self.where.representation}"
        return f"{what} on {self.tier}" if self.tier else what


@dataclass(slots=True)
class Cleared:
    """What went, or would go, and what is being read or pinned and stays."""

    deleted: int = 0
    leased: int = 0
    deleted_bytes: int = 0

    def as_json(self, *, dry_run: bool) -> str:
        """Return it as JSON."""
        return json.dumps(
            {
                "dry_run": dry_run,
                "deleted": self.deleted,
                "deleted_bytes": self.deleted_bytes,
                "in_use": self.leased,
            }
        )

    def as_text(self, *, dry_run: bool) -> str:
        """Return it as a line."""
        size = readable_size(self.deleted_bytes)
        stay = f"; {self.leased} are read or pinned, and stay" if self.leased else ""
        return f"{'would forget' if dry_run else 'forgot'} {self.deleted} chunks, {size}{stay}"


def clear(
    scope: Scope, *, dry_run: bool, told: Callable[[int, int], None] = lambda done, total: None
) -> Cleared:
    """Clear *scope*; *told* hears how many chunks of how many are done.

    Raises InvalidRequestError, KVStoreErrors.
    """
    connection = dial(scope.where.address, STEP_MS)
    session_id = 0
    try:
        session_id = _session(connection, scope)
        done = Cleared()
        while True:
            request = pb.ClearRequest(
                session_id=session_id,
                tenant=EVERY_TENANT if scope.everything else scope.tenant,
                tier=scope.tier,
                dry_run=dry_run,
                deadline_ms=STEP_MS,
            )
            reply = connection.call("Clear", request, 2 * STEP_MS, pb.ClearResponse)
            done.deleted += reply.deleted
            done.deleted_bytes += reply.deleted_bytes
            done.leased = reply.leased
            told(done.deleted, done.deleted + reply.left)
            if not reply.left or not reply.deleted or dry_run:
                return done
    except TierUnavailableError as error:
        reason = str(error).rpartition(": ")[2]  # the end of gRPC's report of all it tried
        told_address = scope.where.address
        raise KVStoreError(f"no kvstore-server answers at {told_address}: {reason}") from None
    finally:
        if session_id:
            closing = pb.CloseSessionRequest(session_id=session_id)
            connection.call("CloseSession", closing, STEP_MS, pb.CloseSessionResponse)
        connection.close()


def _session(connection: Connection, scope: Scope) -> int:
    """Return a session of the namespace that is cleared; 0 where it is no namespace."""
    where = scope.where
    if not (where.space or where.representation):
        return 0
    opening = pb.OpenSessionRequest(
        representation=representation(where), client="kvstore clear", tenant=where.tenant
    )
    return connection.call("OpenSession", opening, STEP_MS, pb.OpenSessionResponse).session_id
