"""The RPC of what codecs are told: Weigh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import MAX_CHUNK_TOKENS

if TYPE_CHECKING:
    import grpc

    from kvstore.server.api.validation import Checks
    from kvstore.server.security.sessions import SessionTable
    from kvstore.server.store.store import Store


class CodecCalls:
    """A part of the service. What it reads is set by the service's constructor."""

    _store: Store
    _sessions: SessionTable
    _checks: Checks
    _stamp: pb.Server

    def Weigh(self, request: pb.WeighRequest, context: grpc.ServicerContext) -> pb.WeighResponse:
        """Remember which tokens of chunks matter, until they are encoded."""
        session = self._sessions.get(request.session_id)
        keys = self._checks.keys(session, request.digests)
        if len(request.weights) != len(keys):
            raise InvalidRequestError("weights", len(request.weights), f"{len(keys)} chunks")
        for weights in request.weights:
            if not 0 < len(weights) <= MAX_CHUNK_TOKENS:
                fix = f"a byte for each token, at most {MAX_CHUNK_TOKENS}"
                raise InvalidRequestError("weights", len(weights), fix)
        for key, weights in zip(keys, request.weights, strict=True):
            self._store.importance.note(key, weights)
        return pb.WeighResponse(server=self._stamp)
