"""The gRPC service: checks messages, asks the store, answers. No decision is made here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import grpc
from typing_extensions import override

from kvstore.codecs.base import CODECS
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import kvstore_pb2_grpc, wire
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.places import Reach
from kvstore.proto.shm import pid_namespace
from kvstore.proto.text import check_text
from kvstore.proto.types import KEY_BYTES, ChunkKey, PutOutcome
from kvstore.server.api.access_check import principal_of
from kvstore.server.api.admin_calls import KeepCalls
from kvstore.server.api.blend_calls import BlendCalls
from kvstore.server.api.codec_calls import CodecCalls
from kvstore.server.api.device_calls import DeviceCalls
from kvstore.server.api.event_calls import EventCalls
from kvstore.server.api.explain_messages import ExplainDesk
from kvstore.server.api.get_stream import REACH, GetStream
from kvstore.server.api.hand_over_calls import HandOverCalls
from kvstore.server.api.layered_put import LayeredPutStream
from kvstore.server.api.look_calls import LookCalls
from kvstore.server.api.peer_calls import PeerCalls
from kvstore.server.api.put_stream import PutStream
from kvstore.server.api.quota_calls import QuotaCalls
from kvstore.server.api.quota_service import QuotaDesk
from kvstore.server.api.scrub_calls import ScrubCalls
from kvstore.server.api.status_calls import StatusCalls
from kvstore.server.api.unix_server import DataPlane
from kvstore.server.api.validation import Checks, fidelity, outcomes
from kvstore.server.index.results import Leasing
from kvstore.server.security.pools import Standings
from kvstore.server.security.sessions import SessionTable
from kvstore.server.security.setup import Trust
from kvstore.server.store.store import Store
from kvstore.server.store.writes import PutResult
from kvstore.server.telemetry.request_trace import RequestLog, check_local

MAX_CLIENT_CHARS = 128
MAX_READ_PEERS = 64
"""Other servers that one get is let read from; more of those that it names are passed over."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this server is, in each reply. ``boot_id`` changes with every start."""

    boot_id: int
    version: str
    host_id: str
    started_at: float
    bulk_address: str = ""
    bulk_certificate: bytes = b""


_NO_KEY = ChunkKey(bytes(KEY_BYTES))


class KVStoreService(
    BlendCalls,
    DeviceCalls,
    HandOverCalls,
    StatusCalls,
    QuotaCalls,
    ScrubCalls,
    CodecCalls,
    EventCalls,
    KeepCalls,
    LookCalls,
    PeerCalls,
    kvstore_pb2_grpc.KVStoreServicer,
):
    """Every RPC of kvstore.v1."""

    def __init__(
        self,
        store: Store,
        sessions: SessionTable,
        data_plane: DataPlane | None,
        checks: Checks,
        identity: Identity,
        trust: Trust | None = None,
    ) -> None:
        self._standings = trust.standings if trust else Standings()
        self._quotas = QuotaDesk(store.catalog, trust.limits if trust else None)
        self._store = store
        self._sessions = sessions
        self._data_plane = data_plane
        self._checks = checks
        self._identity = identity
        self._clock = checks.clock
        self._log = RequestLog(checks.clock)
        self._explain = ExplainDesk(store, sessions, checks)
        features = wire.FEATURE_SHARED_MEMORY if data_plane is not None else 0
        features |= wire.FEATURE_DURABLE_PUT if store.can_be_durable else 0
        self._stamp = pb.Server(boot_id=identity.boot_id, features=features)

    # --- sessions

    @override
    def OpenSession(
        self, request: pb.OpenSessionRequest, context: grpc.ServicerContext
    ) -> pb.OpenSessionResponse:
        client = check_text("client", request.client, MAX_CLIENT_CHARS)
        representation = wire.representation_from_message(request.representation)
        caller = principal_of(context)
        standing = self._standings.of(caller, request.tenant)
        session = self._sessions.open(
            representation, client, standing.tenant, caller, standing.roles, request.process
        )
        plane, gpu = self._data_plane, self._store.moves.tiers.gpu_tier
        return pb.OpenSessionResponse(
            server=self._stamp,
            session_id=session.session_id,
            key_namespace=session.namespace,
            heartbeat_ms=self._sessions.ttl_ms,
            max_message_bytes=wire.MESSAGE_BYTES,
            max_frame_bytes=self._checks.limits.max_frame_bytes,
            max_batch_chunks=self._checks.limits.max_batch_chunks,
            host_id=self._identity.host_id if plane else "",
            socket_path=str(plane.path) if plane else "",
            attach_token=session.attach_token if plane or self._identity.bulk_address else b"",
            bulk_address=self._identity.bulk_address,
            bulk_certificate=self._identity.bulk_certificate,
            codecs=list(CODECS),
            arena_device=gpu.device.identity if gpu and plane else "",
            arena_bytes=gpu.capacity_bytes if gpu and plane else 0,
            peers=self._lent(),
            server_pid=os.getpid(),
            pid_namespace=pid_namespace(),
            weighs=self._store.weighs(standing.tenant),
        )

    @override
    def Heartbeat(
        self, request: pb.HeartbeatRequest, context: grpc.ServicerContext
    ) -> pb.HeartbeatResponse:
        self._explain.heard(request, self._sessions.get(request.session_id))
        draining = self._sessions.is_draining
        return pb.HeartbeatResponse(server=self._stamp, draining=draining, peers=self._lent())

    @override
    def CloseSession(
        self, request: pb.CloseSessionRequest, context: grpc.ServicerContext
    ) -> pb.CloseSessionResponse:
        self._sessions.close_owned(request.session_id, principal_of(context))
        return pb.CloseSessionResponse(server=self._stamp)

    # --- reading

    @override
    def Lookup(self, request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupResponse:
        started = self._clock()
        session = self._sessions.get(request.session_id)
        keys = self._checks.keys(session, request.digests)
        deadline = self._checks.deadline(request.deadline_ms)
        if request.wait_ms:
            self._store.announcements.wait(keys, min(deadline, started + request.wait_ms / 1000))
        least = fidelity(request.min_fidelity)
        match = self._store.lookup(
            session,
            keys,
            deadline,
            lease=Leasing.of(request),
            min_fidelity=least,
            engine=wire.engine_from_message(request),
        )
        self._log.note(keys, match.ready, request.prefill.tokens)
        self._explain.looked_up(session, keys, match, least)
        wants_places = request.places and match.lease_id and self._data_plane is not None
        reply = pb.LookupResponse(
            server=self._stamp,
            ready=match.ready,
            pending=match.pending,
            tiers=match.sources,
            load_us=match.loads,
            tier_names=match.tier_names,
            lease_id=match.lease_id,
            lease_ttl_ms=match.lease_ttl_ms,
            places=self._leased_places(keys, match.sources) if wants_places else b"",
            shared=match.shared,
        )
        wire.add_plan(reply, match.plan)
        reply.server_us = int(1e6 * (self._clock() - started))
        return reply

    @override
    def Plan(self, request: pb.PlanRequest, context: grpc.ServicerContext) -> pb.PlanResponse:
        session = self._sessions.get(request.session_id)
        ttl_ms = self._checks.plan_ttl_ms(request.ttl_ms)
        self._checks.batch("lengths", len(request.lengths))
        keys = self._checks.keys(session, request.chains)
        chains = wire.chains_of(keys, request.lengths)
        plan, kept = self._store.plan(session, chains, ttl_ms / 1000)
        return pb.PlanResponse(
            server=self._stamp,
            order=plan.order,
            uses=wire.pack_uses([plan.uses[key] for key in keys]),
            kept=kept,
            peak_chunks=plan.peak_chunks,
        )

    @override
    def Get(
        self, request: pb.GetRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GetResponse]:
        session = self._sessions.get(request.session_id)
        keys = self._checks.keys(session, request.digests)
        deadline = self._checks.deadline(request.deadline_ms)
        least = fidelity(request.min_fidelity)
        if request.via not in REACH:
            raise InvalidRequestError("via", request.via, f"use one of {sorted(REACH)}")
        reach = REACH[request.via] if self._data_plane is not None else None
        if reach is not None and "write" not in session.roles:
            reach = reach - {Reach.file}  # an open file can be opened again for writing
        self._checks.ranges(request.ranges, len(keys))
        skipped = self._checks.skipped(request, len(keys))
        lease_id, known = self._store.open_get(session, keys, request.lease_id)
        stream = GetStream(self._store, session, self._stamp, lease_id, deadline, least)
        if request.ranges:
            messages = stream.ranges(keys[:known], request.ranges, reach)
        elif request.layer_major:
            messages = stream.layers(keys[:known], skipped)
        else:
            session.reads_from = frozenset(request.peers[:MAX_READ_PEERS])
            messages = stream.frames(keys[:known], reach, session.reads_from)
        release = not request.lease_id
        told = False
        try:
            for message in messages:
                told = told or message.HasField("places")
                yield message
            # Through shared memory the client reads after this call and releases by itself; one
            # that cancelled it, or was told nothing, does not.
            release = release and not told
        finally:
            if release:
                self._store.release(session, lease_id)

    def _leased_places(self, keys: Sequence[ChunkKey], sources: bytes) -> bytes:
        """Return the places of those chunks whose copy in CPU memory, source 0, was matched."""
        if any(sources):  # what is there of the others may be of too low fidelity
            keys = [key if not at else _NO_KEY for key, at in zip(keys, sources, strict=False)]
        return self._store.moves.tiers.cpu_tier.place_rows(keys[: len(sources)])

    @override
    def Release(
        self, request: pb.ReleaseRequest, context: grpc.ServicerContext
    ) -> pb.ReleaseResponse:
        session = self._sessions.get(request.session_id)
        self._checks.batch("lease_ids", len(request.lease_ids))
        hints = wire.hints_from_message(request.hints)
        released = sum(self._store.release(session, lease, hints) for lease in request.lease_ids)
        return pb.ReleaseResponse(server=self._stamp, released=released)

    # --- writing

    @override
    def Put(
        self, request_iterator: Iterator[pb.PutRequest], context: grpc.ServicerContext
    ) -> pb.PutResponse:
        first = next(request_iterator, None)
        kind = LayeredPutStream if first is not None and first.layer_major else PutStream
        messages = request_iterator if first is None else chain((first,), request_iterator)
        results = kind(self._store, self._sessions, self._checks).run(messages)
        return pb.PutResponse(server=self._stamp, **outcomes(results))

    @override
    def Reserve(
        self, request: pb.ReserveRequest, context: grpc.ServicerContext
    ) -> pb.ReserveResponse:
        session = self._sessions.get(request.session_id)
        self._checks.durable(request.durable, is_possible=self._store.can_be_durable)
        asked = self._checks.reserved(session, request)
        infos, parts = [info for info, _ in asked], [part for _, part in asked]
        deadline = self._checks.deadline(request.deadline_ms)
        hints = wire.hints_from_message(request.hints)
        begun = self._store.writes.begin_all(session, infos, deadline, hints, parts)
        tickets = [0 if isinstance(r, PutResult) else r.ticket_id for r in begun]
        answers = [r if isinstance(r, PutResult) else PutResult(PutOutcome.stored) for r in begun]
        if request.durable:
            existing = [r for r in begun if isinstance(r, PutResult)]
            keys = [i.key for i, r in zip(infos, begun, strict=True) if isinstance(r, PutResult)]
            hardened = iter(self._store.harden(keys, existing, deadline))
            answers = [
                next(hardened) if isinstance(r, PutResult) else answer
                for r, answer in zip(begun, answers, strict=True)
            ]
        return pb.ReserveResponse(server=self._stamp, reservation_ids=tickets, **outcomes(answers))

    @override
    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.CommitResponse:
        session = self._sessions.get(request.session_id)
        if len(request.reservation_ids) != len(request.offsets):
            raise InvalidRequestError(
                "offsets", len(request.offsets), "give one for each reservation"
            )
        self._checks.batch("reservation_ids", len(request.reservation_ids))
        self._checks.durable(request.durable, is_possible=self._store.can_be_durable)
        if self._data_plane is None:
            raise InvalidRequestError("via", "shm", "this server has no shared memory; use Put")
        staging = self._data_plane.staging(session.session_id)
        writes, keys, results = self._store.writes, [], []
        try:
            for reservation_id, offset in zip(
                request.reservation_ids, request.offsets, strict=True
            ):
                ticket = writes.claim(session, reservation_id)
                self._data_plane.check_written(session.session_id, offset, ticket.frame_bytes)
                frame = staging[offset : offset + ticket.frame_bytes]
                results += writes.ingest([ticket], [frame])
                keys.append(ticket.key)
        except KVStoreError:
            for reservation_id in request.reservation_ids:
                writes.abort(session, reservation_id)
            raise
        if request.durable:
            results = self._store.harden(keys, results, self._checks.deadline(request.deadline_ms))
        return pb.CommitResponse(server=self._stamp, **outcomes(results))

    @override
    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        session = self._sessions.get(request.session_id)
        self._checks.batch("reservation_ids", len(request.reservation_ids))
        aborted = sum(self._store.writes.abort(session, i) for i in request.reservation_ids)
        return pb.AbortResponse(server=self._stamp, aborted=aborted)

    # --- keeping and forgetting

    @override
    def Delete(self, request: pb.DeleteRequest, context: grpc.ServicerContext) -> pb.DeleteResponse:
        if request.if_damaged:
            return self._drop_damaged(request)
        session = self._sessions.get(request.session_id)
        keys = self._checks.keys(session, request.digests)
        deleted, leased = self._store.delete(keys, self._checks.deadline(0))
        return pb.DeleteResponse(server=self._stamp, deleted=deleted, leased=leased)

    # --- the server

    @override
    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainResponse:
        self._sessions.drain()
        clean = self._store.drain(self._checks.deadline(request.deadline_ms))
        return pb.DrainResponse(server=self._stamp, clean=clean)

    @override
    def Explain(
        self, request: pb.ExplainRequest, context: grpc.ServicerContext
    ) -> pb.ExplainResponse:
        return self._explain.answer(request, context.peer(), self._stamp)

    @override
    def Trace(self, request: pb.TraceRequest, context: grpc.ServicerContext) -> pb.TraceResponse:
        check_local(context.peer())
        page = self._log.read(request.recording, request.after)
        records = [
            pb.TraceRecord(
                at_us=int(1e6 * one.at_s), chunks=one.names, ready=one.ready, tokens=one.tokens
            )
            for one in page.lookups
        ]
        return pb.TraceResponse(
            server=self._stamp,
            recording=page.recording,
            records=records,
            last=page.last,
            lost=page.lost,
        )
