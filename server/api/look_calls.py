"""The RPCs of looking at chunks: Stat, List and Spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import DIGEST_BYTES
from kvstore.proto.wire import MESSAGE_BYTES, representation_to_message
from kvstore.server.api.access_check import principal_of
from kvstore.server.api.validation import chunk_stat, fitting
from kvstore.server.security.pools import PREFIX
from kvstore.server.store.scrub import EVERY_TENANT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc

    from kvstore.proto.types import ChunkKey
    from kvstore.server.api.validation import Checks
    from kvstore.server.security.pools import Standings
    from kvstore.server.security.sessions import SessionTable
    from kvstore.server.store.store import Store

LIST_PAGE_CHUNKS = 256
MAX_RANKED = 16
"""Chunks whose turn one Stat is asked for: it goes through the tiers' victims."""


class LookCalls:
    """A part of the service. What it reads is set by the service's constructor."""

    _store: Store
    _sessions: SessionTable
    _standings: Standings
    _checks: Checks
    _stamp: pb.Server

    def Stat(self, request: pb.StatRequest, context: grpc.ServicerContext) -> pb.StatResponse:
        """Say what is known of chunks."""
        session = self._sessions.get(request.session_id)
        keys = self._checks.keys(session, request.digests)
        if request.ranks and len(keys) > MAX_RANKED:
            raise InvalidRequestError("digests", len(keys), f"at most {MAX_RANKED} with ranks")
        chunks = []
        for held in self._store.stat(keys):
            chunk = chunk_stat(held)
            if request.ranks:
                self._rank(held.key, chunk)
            chunks.append(chunk)
        return pb.StatResponse(server=self._stamp, chunks=chunks)

    def _rank(self, key: ChunkKey, chunk: pb.ChunkStat) -> None:
        catalog = self._store.catalog
        for copy in chunk.copies:
            turn = catalog.eviction.rank(copy.tier, key)
            copy.before, copy.at_least = turn.before, turn.is_at_least
            copy.policy = catalog.eviction.policy_report(copy.tier).name

    def List(
        self, request: pb.ListRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ListResponse]:
        """Yield the chunks of a session's namespace, in the order of their digests."""
        session = self._sessions.get(request.session_id)
        for name, digest in (("after", request.after), ("prefix", request.prefix)):
            if len(digest) > DIGEST_BYTES:
                raise InvalidRequestError(name, digest.hex(), f"at most {DIGEST_BYTES} bytes")
        held = self._store.catalog.queries.page(
            session.namespace, request.after, request.prefix, request.limit
        )
        for start in range(0, len(held), LIST_PAGE_CHUNKS):
            page = held[start : start + LIST_PAGE_CHUNKS]
            yield pb.ListResponse(server=self._stamp, chunks=map(chunk_stat, page))

    def Spaces(self, request: pb.SpacesRequest, context: grpc.ServicerContext) -> pb.SpacesResponse:
        """Say which namespaces sessions of a tenant had; of others' to admins alone."""
        caller = principal_of(context)
        tenant = request.tenant or caller.tenant
        if tenant.startswith(PREFIX):
            tenant = self._standings.of(caller, tenant).tenant
        counts = self._store.catalog.queries.spaces()
        spaces = [
            pb.KnownSpace(
                key_namespace=space.namespace,
                representation=representation_to_message(space.representation),
                client=space.client,
                chunks=counts[space.namespace],
                tenant=space.tenant,
            )
            for space in self._store.spaces.all()
            if tenant in (EVERY_TENANT, space.tenant)
        ][request.skip :]
        fit = list(fitting(spaces, MESSAGE_BYTES))
        return pb.SpacesResponse(server=self._stamp, spaces=fit, left=len(spaces) - len(fit))
