"""Administrative RPCs: pins and deletion, chunk listings, quotas, status, explanations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from google.protobuf.message import Message
from grpc import ServicerContext as Context

from kvstore.codecs.base import codec_name
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import messages
from kvstore.proto.errors import InvalidRequestError, PermissionDeniedError
from kvstore.proto.keys import keys_of_digests
from kvstore.proto.messages import accuracy_of, as_message
from kvstore.proto.types import DIGEST_BYTES, ChunkInfo, ChunkKey, Namespace
from kvstore.server.api.service import Backend
from kvstore.server.api.validation import require
from kvstore.server.index.known_models import ModelNamespace
from kvstore.server.index.queries import ChunkDetails
from kvstore.server.security.authorization import access_to
from kvstore.server.security.rate_limits import TenantLimits
from kvstore.server.security.sessions import Principal, Session, check_tenant
from kvstore.server.settings.values import POOL_PREFIX
from kvstore.server.store.explain import Explainer, LoggedMiss, Reason, Report, SimilarModel
from kvstore.server.store.scrub import EVERY_TENANT, clear, keys_of_tenant
from kvstore.server.telemetry.request_trace import RequestLog, check_local

CLEAR_DEADLINE_MS = 60_000
"""Default deadline."""
MAX_PIN_TTL_MS = 24 * 3600 * 1000
LIST_PAGE_CHUNKS = 256
MAX_RANKED = 16
"""Limit of chunks with eviction ranks per Stat, which scans the tiers' victims."""
MAX_SCRUB_BYTES_PER_S = 1 << 40
LIST_BYTES = 1 << 18
"""Size limit of each list in a reply; further entries are left out."""
_LIMITS = ("chunks", "requests_per_s", "leases")
_QUOTA_FIELDS = {
    "limit_bytes": "quota_bytes",
    "guaranteed_bytes": "guaranteed_bytes",
    "limit_chunks": "chunks",
}

M = TypeVar("M", bound=Message)


class AdminCalls:
    """Answers administrative RPCs. Thread-safe."""

    def __init__(self, backend: Backend, explainer: Explainer, requests: RequestLog) -> None:
        self._backend = backend
        self._store = backend.store
        self._catalog = backend.store.catalog
        self._sessions = backend.sessions
        self._checks = backend.checks
        self._clock = backend.checks.clock
        authorizer = backend.authorizer
        self._limits = authorizer.limits if authorizer else TenantLimits({}, self._clock)
        self._scrub = backend.scrub
        self._explainer = explainer
        self._requests = requests

    # --- pins and deletion

    def Pin(self, request: pb.PinRequest, session: Session) -> pb.PinResponse:
        """Keep chunks from eviction for a time."""
        ttl_ms, most = request.ttl_ms, MAX_PIN_TTL_MS
        require(1 <= ttl_ms <= most, "ttl_ms", ttl_ms, f"use 1 to {most}")
        keys = self._checks.keys(session, request.digests)
        pinned = self._catalog.pin(keys, ttl_ms / 1000)
        return pb.PinResponse(pinned=pinned)

    def Unpin(self, request: pb.UnpinRequest, session: Session) -> pb.UnpinResponse:
        """End pins."""
        keys = self._checks.keys(session, request.digests)
        return pb.UnpinResponse(unpinned=self._catalog.unpin(keys))

    def Clear(self, request: pb.ClearRequest, caller: Principal) -> pb.ClearResponse:
        """Delete chunks without holds: of a session's namespace, of a tenant, or all."""
        slots = self._store.moves.tiers.slots
        require(request.tier in (*slots, ""), "tier", request.tier, f"use one of {sorted(slots)}")
        deadline = self._checks.deadline(request.deadline_ms or CLEAR_DEADLINE_MS)
        if request.session_id:
            fix = "leave it out with a session_id: that selects the session's chunks"
            require(not request.tenant, "tenant", request.tenant, fix)
            space = self._sessions.get(request.session_id).namespace
            keys = self._catalog.queries.keys_from(space)
        else:
            tenant = request.tenant or caller.tenant
            keys = keys_of_tenant(self._store, tenant)
        done = clear(self._store, keys, deadline, request.tier, dry_run=request.dry_run)
        return pb.ClearResponse(**done._asdict())

    def Delete(self, request: pb.DeleteRequest, session: Session) -> pb.DeleteResponse:
        """Delete chunks; with ``if_damaged`` only damaged copies."""
        keys = self._checks.keys(session, request.digests)
        deleted = leased = 0
        if not request.if_damaged:
            deleted, leased = self._store.delete(keys, self._checks.deadline(0))
        elif self._scrub is not None:
            deleted = self._scrub.drop_damaged(keys, session.representation_digest)
        return pb.DeleteResponse(deleted=deleted, leased=leased)

    # --- chunks and namespaces

    def Stat(self, request: pb.StatRequest, session: Session) -> pb.StatResponse:
        """Return the details of chunks."""
        keys = self._checks.keys(session, request.digests)
        if request.ranks and len(keys) > MAX_RANKED:
            raise InvalidRequestError("digests", len(keys), f"at most {MAX_RANKED} with ranks")
        details = map(self._catalog.queries.details, keys)
        chunks = [_chunk_stat(held) for held in details if held is not None]
        eviction = self._catalog.eviction
        for chunk in chunks if request.ranks else ():
            for copy in chunk.copies:
                key = ChunkKey(session.namespace + chunk.digest)
                copy.before, copy.at_least = eviction.rank(copy.tier, key)
                copy.policy = eviction.policy_report(copy.tier).name
        return pb.StatResponse(chunks=chunks)

    def List(self, request: pb.ListRequest, session: Session) -> Iterator[pb.ListResponse]:
        """Yield the chunks of a session's namespace, in order of digest."""
        for name, digest in (("after", request.after), ("prefix", request.prefix)):
            fix = f"at most {DIGEST_BYTES} bytes"
            require(len(digest) <= DIGEST_BYTES, name, digest.hex(), fix)
        held = self._catalog.queries.page(
            session.namespace, request.after, request.prefix, request.limit
        )
        while page := list(islice(held, LIST_PAGE_CHUNKS)):
            yield pb.ListResponse(chunks=map(_chunk_stat, page))

    def Spaces(self, request: pb.SpacesRequest, caller: Principal) -> pb.SpacesResponse:
        """Return the namespaces of a tenant's sessions; of other tenants to admins only."""
        tenant = request.tenant or caller.tenant
        if tenant.startswith(POOL_PREFIX):
            tenant, _ = access_to(self._backend.pools, caller, tenant)
        counts = self._catalog.queries.spaces()
        spaces = [
            _space_message(space, counts[space.namespace], space.tenant)
            for space in self._store.spaces.all()
            if tenant in (EVERY_TENANT, space.tenant)
        ][request.skip :]
        reply = pb.SpacesResponse()
        reply.left = _fill(reply.spaces, spaces, messages.MESSAGE_BYTES)
        return reply

    # --- quotas

    def Quota(self, request: pb.QuotaRequest, caller: Principal) -> pb.QuotaResponse:
        """Return a tenant's use and quotas; of other tenants to admins only."""
        tenant = request.tenant or caller.tenant
        if tenant != caller.tenant and "admin" not in caller.roles:
            raise PermissionDeniedError(f"tenant={tenant[:160]!r}: not {caller.name}'s")
        tenants = [tenant]
        if tenant == EVERY_TENANT:
            tenants = sorted({*self._catalog.eviction.partitions.tenants, *self._limits.tenants()})
        return pb.QuotaResponse(tenants=map(self._quota_of, tenants))

    def SetQuota(self, request: pb.SetQuotaRequest, caller: Principal) -> pb.QuotaResponse:
        """Change a tenant's quotas until the restart: all of the request, or nothing."""
        tenant = request.tenant
        check_tenant(tenant.removeprefix(POOL_PREFIX))
        given = {name: getattr(request, name) for name in _LIMITS if request.HasField(name)}
        limits = replace(self._limits.of(tenant), **given)
        sizes = {
            ours: getattr(request, of) for ours, of in _QUOTA_FIELDS.items() if request.HasField(of)
        }
        if sizes:
            known = self._catalog.eviction.quotas_of(tenant)
            tiers = [request.tier] if request.tier else list(known)
            fix = "has no quota to change: add it to --tenant-quotas or --tenant-limits"
            is_known = known and set(tiers) <= set(known)
            require(is_known, "tenant", (tenant, request.tier), fix)
            changed = {tier: replace(known[tier].quota, **sizes) for tier in tiers}
            self._catalog.eviction.set_quotas(tenant, changed)
        if given:
            self._limits.set(tenant, limits)
        return pb.QuotaResponse(tenants=[self._quota_of(tenant)])

    def _quota_of(self, tenant: str) -> pb.TenantQuota:
        used = self._catalog.leases.by_tenant[tenant]
        limits = self._limits.of(tenant)
        reply = as_message(pb.TenantQuota, limits, tenant=tenant, used_leases=used)
        for tier, use in self._catalog.eviction.quotas_of(tenant).items():
            reply.tiers.add(
                tier=tier,
                used_bytes=use.used_bytes,
                quota_bytes=use.quota.limit_bytes,
                guaranteed_bytes=use.quota.guaranteed_bytes,
                used_chunks=use.chunks,
            )
        return reply

    # --- the server

    def Status(self, request: pb.StatusRequest, caller: Principal) -> pb.StatusResponse:
        """Return the server's state; usage, sessions and counters to admins only."""
        backend, catalog = self._backend, self._catalog
        reply = pb.StatusResponse(
            version=backend.identity.version,
            state="draining" if self._sessions.is_draining else "serving",
            uptime_s=self._clock() - backend.identity.started_at,
        )
        for slot in self._store.tiers.slots.values():
            state = "degraded" if (why := slot.reason) else "serving"
            tier = reply.tiers.add(name=slot.name, codec=slot.encoder.name, state=state)
            if "admin" in caller.roles:
                tier.MergeFrom(as_message(pb.TierStatus, slot.tier.stats(), reason=why))
                catalog.eviction.policy_report(slot.name).fill(tier)
        if "admin" not in caller.roles:
            return reply
        reply.ghosts = catalog.evicted_count()
        reply.gates.extend(as_message(pb.Gate, gate) for gate in self._store.blends.gates.views())
        reply.sessions = len(self._sessions)
        reply.leases = len(catalog.leases)
        reply.counters.update(self._store.counters.snapshot())
        reply.socket_path = str(backend.unix_server.path) if backend.unix_server else ""
        if backend.directory is not None:
            reply.directory.CopyFrom(backend.directory.report())
        if request.with_sessions:
            known = map(self._session_status, list(self._sessions.by_id.values()))
            _fill(reply.session_list, known, LIST_BYTES)
        return reply

    def _session_status(self, session: Session) -> pb.SessionStatus:
        now = self._clock()
        return as_message(
            pb.SessionStatus,
            session,
            owner=session.owner.name,
            model_id="" if session.is_peer else session.representation.model_id,
            key_namespace=session.namespace,
            open_s=now - session.opened_at,
            idle_s=now - session.active_at,
            leases=self._catalog.leases.count_of(session.session_id),
        )

    def Scrub(self, request: pb.ScrubRequest, caller: Principal) -> pb.ScrubResponse:
        """Begin a pass if requested, and return the progress."""
        if self._scrub is None:
            raise InvalidRequestError("method", "Scrub", "this server does not scrub")
        rate, most = request.bytes_per_s, MAX_SCRUB_BYTES_PER_S
        require(rate <= most, "bytes_per_s", rate, f"at most {most}; 0 is no limit")
        self._checks.batch("tiers", len(request.tiers))
        begun = request.begin and self._scrub.begin(list(request.tiers), rate)
        report = self._scrub.report()
        return as_message(pb.ScrubResponse, report, begun=begun, running=report.is_running)

    def Drain(self, request: pb.DrainRequest, caller: Principal) -> pb.DrainResponse:
        """Refuse new sessions and puts, and save chunks. Return whether all were saved."""
        self._sessions.drain()
        clean = self._store.drain(self._checks.deadline(request.deadline_ms))
        return pb.DrainResponse(clean=clean)

    def Trace(self, request: pb.TraceRequest, context: Context) -> pb.TraceResponse:
        """Return the lookups of a recording after those already read."""
        check_local(context.peer())
        page = self._requests.read(request.recording, request.after)
        records = [
            as_message(pb.TraceRecord, one, at_us=int(1e6 * one.at_s), chunks=one.names)
            for one in page.lookups
        ]
        return as_message(pb.TraceResponse, page, records=records)

    # --- explanations

    def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        """Return why chunks are hits or misses.

        Raises PermissionDeniedError without a session from another host.
        """
        space = self._space(request, context.peer())
        reply = pb.ExplainResponse()
        if request.digests:
            limit = max(self._checks.max_batch_chunks, messages.MAX_EXPLAINED)
            keys = keys_of_digests(request.digests, space, limit)
            found = self._explainer.explain(space, keys, accuracy_of(request.min_accuracy))
            reply.hit_chunks = found.hit_chunks
            reasons, limit_bytes = map(_reason, found.reasons), messages.MESSAGE_BYTES
            reply.left_out += _fill(reply.chunks, reasons, limit_bytes)
            reply.left_out += _fill(reply.near, map(_similar, found.similar), LIST_BYTES)
        if request.recent:
            misses = self._explainer.misses(request.recent)
            reports = self._explainer.reports()
            gates = (as_message(pb.Gate, one) for one in self._store.blends.gates.views())
            reply.left_out += _fill(reply.recent, map(self._miss, misses), LIST_BYTES)
            reply.left_out += _fill(reply.engines, map(self._report, reports), LIST_BYTES)
            reply.left_out += _fill(reply.gates, gates, LIST_BYTES)
        return reply

    def _space(self, request: pb.ExplainRequest, peer: str) -> Namespace:
        if request.session_id:
            fix = "request recent misses without a session, on the server's host"
            require(not request.recent, "session_id", request.session_id, fix)
            return self._sessions.get(request.session_id).namespace
        check_local(peer, "Explain without a session")
        space = Namespace(request.key_namespace)
        is_one = len(space) == DIGEST_BYTES or not request.digests
        require(is_one, "key_namespace", space.hex(), f"give {DIGEST_BYTES} bytes")
        return space

    def _miss(self, miss: LoggedMiss) -> pb.Miss:
        reason = self._explainer.of_miss(miss)
        return as_message(
            pb.Miss,
            miss,
            ago_s=self._clock() - miss.facts.at_s,
            client=miss.session.client,
            model_id=miss.session.representation.model_id,
            chunks=miss.asked,
            state=reason.state,
            reason=reason.text,
        )

    def _report(self, report: Report) -> pb.EngineReport:
        return pb.EngineReport(
            ago_s=self._clock() - report.at_s,
            client=report.session.client,
            model_id=report.session.representation.model_id,
            counts=dict(report.counts),
        )


def _reason(one: Reason) -> pb.ChunkReason:
    digest, copies = one.key[DIGEST_BYTES:], _copies(one.copies)
    return pb.ChunkReason(digest=digest, state=one.state, reason=one.text, copies=copies)


def _similar(similar: SimilarModel) -> pb.KnownSpace:
    message = _space_message(similar.space, similar.chunks)
    message.same_tokens = similar.has_tokens
    message.differences.extend(as_message(pb.Difference, one) for one in similar.differing)
    return message


def _space_message(space: ModelNamespace, chunks: int, tenant: str = "") -> pb.KnownSpace:
    return pb.KnownSpace(
        key_namespace=space.namespace,
        representation=messages.as_message(pb.Representation, space.representation),
        client=space.client,
        chunks=chunks,
        tenant=tenant,
    )


def _copies(copies: Iterable[tuple[str, ChunkInfo]]) -> list[pb.Copy]:
    return [
        as_message(pb.Copy, info, tier=tier, codec=codec_name(info.codec_id))
        for tier, info in copies
    ]


def _chunk_stat(held: ChunkDetails) -> pb.ChunkStat:
    info = next(iter(held.copies.values()))
    return as_message(
        pb.ChunkStat,
        held,
        digest=held.key[DIGEST_BYTES:],
        parent=info.parent,
        tokens=info.layout.tokens,
        raw_bytes=info.layout.raw_bytes,
        copies=_copies(held.copies.items()),
        pinned=held.is_pinned,
        components=messages.layout_to_message(info.layout).components,
    )


def _fill(field: MutableSequence[M], found: Iterable[M], limit_bytes: int) -> int:
    """Add *found* to *field* within *limit_bytes*. Return how many are left out."""
    left = 0
    for message in found:
        limit_bytes -= message.ByteSize()
        if limit_bytes >= 0:
            field.append(message)
        else:
            left += 1
    return left
