"""The RPCs by which another server comes in, and a client learns how to read from one."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.proto.guest_token import GUEST_S
from kvstore.proto.text import check_text
from kvstore.server.api.access_check import principal_of

if TYPE_CHECKING:
    import grpc

    from kvstore.server.api.service import Identity
    from kvstore.server.api.validation import Checks
    from kvstore.server.cluster.peer_tier import PeerTier
    from kvstore.server.security.sessions import SessionTable
    from kvstore.server.store.store import Store

MAX_NODE_ID_CHARS = 128
MAX_TOLD_PEERS = 16
"""Of those that are there; clients learn of further ones as they read what these have."""


class PeerCalls:
    """A part of the service. What it reads is set by the service's constructor."""

    _store: Store
    _sessions: SessionTable
    _checks: Checks
    _identity: Identity
    _stamp: pb.Server

    def OpenPeer(
        self, request: pb.OpenPeerRequest, context: grpc.ServicerContext
    ) -> pb.OpenPeerResponse:
        """Let another server in, which may only read, on the bulk channel."""
        node_id = check_text("node_id", request.node_id, MAX_NODE_ID_CHARS, least=1)
        if not self._identity.bulk_address:
            raise InvalidRequestError("bulk", "off", "peers read through it: start with --bulk")
        session = self._sessions.open_peer(node_id, principal_of(context))
        return pb.OpenPeerResponse(
            server=self._stamp,
            session_id=session.session_id,
            attach_token=session.attach_token,
            heartbeat_ms=self._sessions.ttl_ms,
            max_frame_bytes=self._checks.limits.max_frame_bytes,
            max_batch_chunks=self._checks.limits.max_batch_chunks,
            bulk_address=self._identity.bulk_address,
            bulk_certificate=self._identity.bulk_certificate,
        )

    def _lent(self) -> list[int]:
        """Return the other servers that a client had better know before it reads from them."""
        slot = self._store.moves.tiers.remote
        return cast("PeerTier", slot.tier).lent()[:MAX_TOLD_PEERS] if slot else []

    def LendPeer(
        self, request: pb.LendPeerRequest, context: grpc.ServicerContext
    ) -> pb.LendPeerResponse:
        """Let a client read chunks of its namespace from another server's memory itself."""
        session = self._sessions.get(request.session_id)
        slot = self._store.moves.tiers.remote
        peer = cast("PeerTier", slot.tier).peers.numbered(request.number) if slot else None
        if peer is None:
            raise InvalidRequestError("number", request.number, "of no server that is known")
        lent = peer.let_guest(session.namespace)
        if lent is None:
            raise TierUnavailableError("peer", f"{peer.address}: is not up")
        return pb.LendPeerResponse(
            server=self._stamp,
            bulk_address=lent.address,
            bulk_certificate=lent.certificate,
            session_id=lent.guest.session_id,
            until_s=lent.guest.until_s,
            token=lent.guest.token,
            valid_ms=1000 * GUEST_S,
        )
