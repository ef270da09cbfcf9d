"""Data RPCs: sessions, lookups, gets and puts, blending, peers, events.

Messages are validated here.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, cast

from grpc import ServicerContext as Context

from kvstore.codecs.base import CODECS
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import messages
from kvstore.proto.buffers import as_bytes
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    QuotaExceededError,
    TierUnavailableError,
    UnauthenticatedError,
    check_text,
)
from kvstore.proto.frame import FrameHeader, parse_header, raw_frame_bytes
from kvstore.proto.types import KEY_BYTES, MAX_CHUNK_TOKENS, ROOT, ChunkKey, PutOutcome
from kvstore.proto.unix_socket import Reach, pid_namespace
from kvstore.server.api.get_stream import MAX_READ_PEERS, REACH, GetStream
from kvstore.server.api.interceptors import principal_of
from kvstore.server.api.put_stream import PutStream
from kvstore.server.api.unix_server import UnixServer
from kvstore.server.api.validation import Checks, outcomes, require
from kvstore.server.security.authorization import Authorizer, access_to
from kvstore.server.security.sessions import Principal, Session, SessionTable
from kvstore.server.settings.rules import Pool
from kvstore.server.store.explain import Explainer
from kvstore.server.store.reads import NO_REACH
from kvstore.server.store.reservations import PutResult, PutTicket
from kvstore.server.store.scrub import Scrub
from kvstore.server.store.store import Store
from kvstore.server.store.writes import check_put
from kvstore.server.telemetry.events import (
    EVENT_READERS,
    EVENT_READERS_PER_TENANT,
    POLL_S,
    EventLog,
    EventReader,
)
from kvstore.server.telemetry.request_trace import RequestLog

if TYPE_CHECKING:  # their files load redis or torch
    from kvstore.server.cluster.directory import Directory
    from kvstore.server.cluster.peer_tier import PeerTier
    from kvstore.server.store.device_puts import DevicePuts

MAX_CLIENT_CHARS = 128
MAX_NODE_ID_CHARS = 128
MAX_LISTED_PEERS = 16
"""Limit of peers listed to a client; gets name further ones."""
BEAT_S = 1.0
"""Longest time between two messages to a reader of events."""
_LAST_S = 0.5
"""A call of Events with less time left ends by itself, before its deadline cuts it off."""
_NO_DEVICE = "this server accepts no puts from device memory: start it with gpu"
_NO_KEY = ChunkKey(bytes(KEY_BYTES))


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of this server. ``boot_id`` changes with every start."""

    boot_id: int
    version: str
    host_id: str
    started_at: float
    bulk_address: str = ""
    bulk_certificate: bytes = b""


@dataclass(frozen=True, slots=True)
class Backend:
    """The parts of a server that its RPCs use; None for parts that it lacks."""

    store: Store
    sessions: SessionTable
    checks: Checks
    identity: Identity
    authorizer: Authorizer | None = None
    unix_server: UnixServer | None = None
    device_puts: DevicePuts | None = None
    scrub: Scrub | None = None
    events: EventLog | None = None
    directory: Directory | None = None

    @property
    def pools(self) -> Sequence[Pool]:
        """The shared pools that callers may open sessions for."""
        return self.authorizer.pools if self.authorizer else ()


class DataCalls:
    """Answers data RPCs. *explainer* and *requests* record lookups. Thread-safe."""

    def __init__(self, backend: Backend, explainer: Explainer, requests: RequestLog) -> None:
        self._backend = backend
        self._store = backend.store
        self._sessions = backend.sessions
        self._checks = backend.checks
        self._clock = backend.checks.clock
        self._unix_server = backend.unix_server
        self._explainer = explainer
        self._requests = requests
        self._event_readers: Counter[str] = Counter()
        """Readers of events by tenant."""
        self._lock = threading.Lock()  # guards that

    # --- sessions

    def OpenSession(
        self, request: pb.OpenSessionRequest, caller: Principal
    ) -> pb.OpenSessionResponse:
        """Open a session for a client of one model."""
        client = check_text("client", request.client, MAX_CLIENT_CHARS)
        representation = messages.representation_from_message(request.representation)
        tenant, roles = access_to(self._backend.pools, caller, request.tenant)
        session = self._sessions.open(
            representation, client, tenant, caller, roles, request.process
        )
        unix, gpu = self._unix_server, self._store.moves.tiers.gpu_tier
        identity = self._backend.identity
        return pb.OpenSessionResponse(
            session_id=session.session_id,
            key_namespace=session.namespace,
            heartbeat_ms=self._sessions.ttl_ms,
            max_message_bytes=messages.MESSAGE_BYTES,
            max_frame_bytes=self._checks.max_frame_bytes,
            max_batch_chunks=self._checks.max_batch_chunks,
            host_id=identity.host_id if unix else "",
            socket_path=str(unix.path) if unix else "",
            attach_token=session.attach_token if unix or identity.bulk_address else b"",
            bulk_address=identity.bulk_address,
            bulk_certificate=identity.bulk_certificate,
            codecs=list(CODECS),
            arena_device=gpu.device.identity if gpu and unix else "",
            arena_bytes=gpu.capacity_bytes if gpu and unix else 0,
            peers=self._lent(),
            server_pid=os.getpid(),
            pid_namespace=pid_namespace(),
            weighs=self._store.weighs(tenant),
        )

    def Heartbeat(self, request: pb.HeartbeatRequest, session: Session) -> pb.HeartbeatResponse:
        """Keep a session open, and record the counts of its engine."""
        self._explainer.report(session, request.counts)
        return pb.HeartbeatResponse(draining=self._sessions.is_draining, peers=self._lent())

    def CloseSession(
        self, request: pb.CloseSessionRequest, caller: Principal
    ) -> pb.CloseSessionResponse:
        """End a session. Idempotent."""
        self._sessions.close_owned(request.session_id, caller)
        return pb.CloseSessionResponse()

    # --- reading

    def Lookup(self, request: pb.LookupRequest, session: Session) -> pb.LookupResponse:
        """Find and lease the longest cached prefix of a prompt."""
        started = self._clock()
        keys = self._checks.keys(session, request.digests)
        deadline = self._checks.deadline(request.deadline_ms)
        if request.wait_ms:
            self._store.await_puts(keys, min(deadline, started + request.wait_ms / 1000))
        least = messages.accuracy_of(request.min_accuracy)
        match = self._store.lookup(
            session,
            keys,
            deadline,
            lease=request.lease and (not request.ranges or "ranged"),
            min_accuracy=least,
            engine=messages.engine_from_message(request),
        )
        self._requests.note(keys, match.ready, request.prefill.tokens)
        self._explainer.record_lookup(session, keys, match, least)
        wants_places = request.places and match.lease_id and self._unix_server is not None
        reply = pb.LookupResponse(
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
        if match.plan is not None:
            plan = match.plan
            reply.plan_ms, reply.recompute_ms = plan.plan_ms, plan.recompute_ms
            reply.plan.extend(messages.as_message(pb.PlanRange, one) for one in plan.ranges)
        reply.server_us = int(1e6 * (self._clock() - started))
        return reply

    def Get(self, request: pb.GetRequest, session: Session) -> Iterator[pb.GetResponse]:
        """Yield chunks' frames or places; the call's own lease ends with it."""
        if request.via not in REACH:
            raise InvalidRequestError("via", request.via, f"use one of {sorted(REACH)}")
        reach = REACH[request.via] if self._unix_server is not None else NO_REACH
        if "write" not in session.roles:
            reach = reach - {Reach.file}  # a shared descriptor can be reopened for writing
        deadline = self._checks.deadline(request.deadline_ms)
        if not (request.ranges or request.layer_major):
            session.reads_from = frozenset(request.peers[:MAX_READ_PEERS])
        get = GetStream(self._store, self._checks, session, request, deadline, reach)
        yield from get.messages()

    def _leased_places(self, keys: Sequence[ChunkKey], sources: bytes) -> bytes:
        if any(sources):  # only copies of source 0, CPU memory: others may be too inaccurate there
            keys = [key if not at else _NO_KEY for key, at in zip(keys, sources, strict=False)]
        return self._store.moves.tiers.cpu_tier.place_rows(keys[: len(sources)])

    def Release(self, request: pb.ReleaseRequest, session: Session) -> pb.ReleaseResponse:
        """End leases."""
        self._checks.batch("lease_ids", len(request.lease_ids))
        hints = messages.hints_from_message(request.hints)
        released = sum(self._store.release(session, lease, hints) for lease in request.lease_ids)
        return pb.ReleaseResponse(released=released)

    # --- writing

    def Put(self, request_iterator: Iterator[pb.PutRequest], caller: Principal) -> pb.PutResponse:
        """Store the frames of a stream; raise at the first bad message."""
        results: list[PutResult] = []
        first = next(request_iterator, None)
        if first is not None:
            get, requests = self._sessions.get, chain((first,), request_iterator)
            with closing(PutStream(self._store, self._checks, first)) as stream:
                for one in requests:
                    stream.take(get(one.session_id), one.frame_bytes, as_bytes(one.data))
                results = stream.finish()
        return pb.PutResponse(**outcomes(results))

    def Reserve(self, request: pb.ReserveRequest, session: Session) -> pb.ReserveResponse:
        """Reserve CPU memory for chunks that are put through shared memory."""
        if request.durable:
            self._checks.durable(self._store)
        wanted = self._checks.reserved(session, request)
        infos, parts = [info for info, _ in wanted], [part for _, part in wanted]
        deadline = self._checks.deadline(request.deadline_ms)
        hints = messages.hints_from_message(request.hints)
        begun = self._store.writes.begin_all(session, infos, deadline, hints, parts)
        existing = {at: one for at, one in enumerate(begun) if isinstance(one, PutResult)}
        if request.durable:
            keys = [infos[at].key for at in existing]
            hardened = self._store.harden(keys, list(existing.values()), deadline)
            existing = dict(zip(existing, hardened, strict=True))
        stored = PutResult(PutOutcome.stored)
        answers = [existing.get(at, stored) for at in range(len(begun))]
        tickets = [0 if isinstance(one, PutResult) else one.ticket_id for one in begun]
        return pb.ReserveResponse(reservation_ids=tickets, **outcomes(answers))

    def Commit(self, request: pb.CommitRequest, session: Session) -> pb.CommitResponse:
        """Copy reserved chunks from the session's staging memory, and store them."""
        count, offsets = len(request.reservation_ids), request.offsets
        require(len(offsets) == count, "offsets", len(offsets), "give one for each reservation")
        self._checks.batch("reservation_ids", count)
        if request.durable:
            self._checks.durable(self._store)
        unix_server, writes = self._unix_server, self._store.writes
        if unix_server is None:
            raise InvalidRequestError("via", "shm", "this server has no shared memory; use Put")
        staging = unix_server.staging(session.session_id)
        keys, results = [], []
        try:
            for reservation_id, offset in zip(request.reservation_ids, offsets, strict=True):
                ticket = writes.claim(session, reservation_id)
                try:
                    sized = ticket.info if isinstance(ticket, PutTicket) else ticket.part
                    frame = staging.part(offset, sized.size_bytes)
                except KVStoreError:
                    writes.discard(ticket)
                    raise
                results.append(writes.commit(ticket, frame=frame))
                keys.append(ticket.info.key)
        except KVStoreError:
            for reservation_id in request.reservation_ids:
                writes.abort(session, reservation_id)
            raise
        if request.durable:
            results = self._store.harden(keys, results, self._checks.deadline(request.deadline_ms))
        return pb.CommitResponse(**outcomes(results))

    def Abort(self, request: pb.AbortRequest, session: Session) -> pb.AbortResponse:
        """Release reservations."""
        self._checks.batch("reservation_ids", len(request.reservation_ids))
        aborted = sum(self._store.writes.abort(session, i) for i in request.reservation_ids)
        return pb.AbortResponse(aborted=aborted)

    def PutDevice(self, request: pb.PutDeviceRequest, session: Session) -> pb.PutResponse:
        """Put frames from the session's ring."""
        count = len(request.headers)
        self._checks.batch("headers", count)
        offsets = request.offsets
        require(len(offsets) == count, "offsets", len(offsets), "give one for each header")
        hints = messages.hints_from_message(request.hints)
        deadline = self._checks.deadline(request.deadline_ms)
        headers = [self._raw_header(session, data) for data in request.headers]
        device_puts = self._backend.device_puts
        if device_puts is None:
            results = [PutResult(PutOutcome.refused, _NO_DEVICE)] * count
        else:
            frames = list(zip(headers, offsets, strict=True))
            results = device_puts.put(session, frames, request.event, deadline, hints)
        return pb.PutResponse(**outcomes(results))

    def _raw_header(self, session: Session, data: bytes) -> FrameHeader:
        header = parse_header(as_bytes(data))
        size_bytes = header.header_bytes
        require(len(data) == size_bytes, "headers", len(data), f"this one has {size_bytes}")
        info, _ = self._checks.chunk(session, header.info(), None)
        check_put(header, info, session)
        wanted = (0, raw_frame_bytes(header.layout))
        found = (header.codec_id, header.frame_bytes)
        require(found == wanted, "codec_id, frame_bytes", found, f"raw: {wanted}")
        return header

    def AnnouncePuts(
        self, request: pb.AnnouncePutsRequest, session: Session
    ) -> pb.AnnouncePutsResponse:
        """Announce chunks that the session is about to put."""
        keys = self._checks.keys(session, request.digests)
        pending = self._store.announce_puts(session, keys, request.ttl_ms)
        return pb.AnnouncePutsResponse(pending=pending)

    def Weigh(self, request: pb.WeighRequest, session: Session) -> pb.WeighResponse:
        """Store the token weights of chunks for encoding."""
        keys = self._checks.keys(session, request.digests)
        count, fix = len(request.weights), f"a byte for each token, at most {MAX_CHUNK_TOKENS}"
        require(count == len(keys), "weights", count, f"{len(keys)} chunks")
        for weights in request.weights:
            require(0 < len(weights) <= MAX_CHUNK_TOKENS, "weights", len(weights), fix)
        for key, weights in zip(keys, request.weights, strict=True):
            self._store.models.note_importance(key, weights)
        return pb.WeighResponse()

    # --- blending

    def Resolve(self, request: pb.ResolveRequest, session: Session) -> pb.ResolveResponse:
        """Return cached variants for the segments of a prompt, under a lease."""
        started = self._clock()
        question = self._checks.question(session, request)
        blends = self._store.blends
        reply = messages.as_message(
            pb.ResolveResponse,
            blends.resolve(session, question),
            tier_names=blends.tier_names,
            tier=lambda variant: blends.tier_names.index(variant.tier),
        )
        reply.server_us = int(1e6 * (self._clock() - started))
        return reply

    def ReportReuse(
        self, request: pb.ReportReuseRequest, session: Session
    ) -> pb.ReportReuseResponse:
        """Record an engine's measurements: all, or none and an error."""
        blends = self._store.blends
        try:
            report = self._checks.report(session, request, blends.contents.variant_tokens)
        except InvalidRequestError:
            self._store.counters.add("blend_refused_reports")
            raise
        gate = blends.report(session, report)
        return pb.ReportReuseResponse(gate=messages.as_message(pb.Gate, gate))

    # --- peers

    def OpenPeer(self, request: pb.OpenPeerRequest, caller: Principal) -> pb.OpenPeerResponse:
        """Open a session for another server, which may only read, on the bulk channel."""
        node_id = check_text("node_id", request.node_id, MAX_NODE_ID_CHARS, least=1)
        if not self._backend.identity.bulk_address:
            raise InvalidRequestError("bulk", "off", "peers read through it: start with --bulk")
        session = self._sessions.open_peer(node_id, caller)
        return messages.as_message(
            pb.OpenPeerResponse,
            self._backend.identity,
            session_id=session.session_id,
            attach_token=session.attach_token,
            heartbeat_ms=self._sessions.ttl_ms,
            max_frame_bytes=self._checks.max_frame_bytes,
            max_batch_chunks=self._checks.max_batch_chunks,
        )

    def _lent(self) -> list[int]:
        """Return peers that a client may connect to before it reads from them."""
        slot = self._store.moves.tiers.remote
        return cast("PeerTier", slot.tier).reachable()[:MAX_LISTED_PEERS] if slot else []

    def LendPeer(self, request: pb.LendPeerRequest, session: Session) -> pb.LendPeerResponse:
        """Let a client read chunks of its namespace directly from a peer."""
        slot = self._store.moves.tiers.remote
        known = cast("PeerTier", slot.tier).peers.known() if slot else []
        peer = next((one for one in known if one.number == request.number), None)
        if peer is None:
            raise InvalidRequestError("number", request.number, "no such peer")
        grant = peer.grant_direct_reads(session.namespace)
        if grant is None:
            raise TierUnavailableError("peer", f"{peer.address}: is down")
        return grant

    # --- events

    def Events(self, request: pb.EventsRequest, context: Context) -> Iterator[pb.EventsResponse]:
        """Yield events until the call, its session or the server ends."""
        log = self._backend.events
        if log is None:
            raise InvalidRequestError("method", "Events", "this server keeps no events")
        session = self._sessions.get(request.session_id) if request.session_id else None
        with self._reading_events("" if session is None else session.owner.tenant):
            reader = EventReader(log, None if session is None else session.namespace)
            if request.boot_id == self._backend.identity.boot_id:
                reader.go_on(request.cursor)  # may scan the whole log
            yield from self._event_pages(log, reader, session, context)

    @contextmanager
    def _reading_events(self, tenant: str) -> Iterator[None]:
        with self._lock:
            if self._event_readers.total() >= EVENT_READERS:
                raise QuotaExceededError("event_readers", EVENT_READERS, "this server")
            if self._event_readers[tenant] >= EVENT_READERS_PER_TENANT:
                limit = EVENT_READERS_PER_TENANT
                raise QuotaExceededError("event_readers", limit, f"tenant {tenant!r}")
            self._event_readers[tenant] += 1
        try:
            yield
        finally:
            with self._lock:
                self._event_readers -= Counter((tenant,))

    def _event_pages(
        self, log: EventLog, reader: EventReader, session: Session | None, context: Context
    ) -> Iterator[pb.EventsResponse]:
        caller, authorizer, sent_at = principal_of(context), self._backend.authorizer, self._clock()
        while context.is_active() and not log.ended.is_set():
            left_s = context.time_remaining()
            if left_s is not None and left_s < _LAST_S:
                return
            if session is not None and session.is_closed:
                raise LeaseExpiredError(f"session_id={session.session_id}: closed; open a session")
            # A session ends with its credentials; check those of a call without one.
            if session is None and authorizer and not authorizer.authenticator.holds(caller):
                raise UnauthenticatedError("credentials: no longer valid; call with others")
            page, now = reader.poll(), self._clock()
            if page is not None:
                yield messages.as_message(  # a root has an empty parent on the wire
                    pb.EventsResponse, page, parent=lambda one: one.parent.replace(ROOT, b"")
                )
                sent_at = now
            elif now - sent_at >= BEAT_S:
                yield pb.EventsResponse(cursor=reader.cursor)
                sent_at = now
            else:
                log.ended.wait(POLL_S)
