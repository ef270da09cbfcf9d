"""A Node: one server with everything it owns, put together from its configuration."""

from __future__ import annotations

import hmac
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from random import SystemRandom
from typing import TYPE_CHECKING

import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import kvstore
from kvstore.codecs.asset_shelf import ASSETS
from kvstore.proto import kvstore_pb2_grpc
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.unix_socket import ARENA_SLAB, Op, host_id
from kvstore.server.api.grpc_server import SERVICE, Health, bind, bind_health, servicer_of
from kvstore.server.api.interceptors import CallWrapper, known_errors
from kvstore.server.api.load_shedding import LoadShedder
from kvstore.server.api.service import Backend, Identity
from kvstore.server.api.unix_calls import UnixCalls
from kvstore.server.api.unix_server import CONNECTIONS_PER_SESSION, UnixLimits, UnixServer
from kvstore.server.api.validation import Checks, ServiceLimits
from kvstore.server.blending.content_reader import ContentReader
from kvstore.server.cluster.setup import open_directory, ready_peers
from kvstore.server.index.known_models import KnownModels
from kvstore.server.security.sessions import SessionTable
from kvstore.server.security.setup import Trust
from kvstore.server.settings.process_limits import (
    BULK_SHARE,
    SOCKET_SHARE,
    check_enough,
    share_of,
    taken,
)
from kvstore.server.settings.settings import Settings
from kvstore.server.store.saved_state import StateKeeper
from kvstore.server.store.scrub import Scrub
from kvstore.server.telemetry.events import EventLog
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.telemetry.tracing import Tracing, open_tracing
from kvstore.server.tiering.codec_choice import begin_choices
from kvstore.server.wiring import build_store

if TYPE_CHECKING:  # their files load an HTTP server, ZeroMQ and torch
    from kvstore.server.bulk.tcp_server import BulkServer
    from kvstore.server.store.device_puts import DevicePuts
    from kvstore.server.web.event_publisher import EventPublisher
    from kvstore.server.web.http_pages import HttpPort

SERVICE_NAME: str = SERVICE.full_name
TICK_S = 0.25
MAX_STAGING_BYTES = 1 << 30
_new_id = partial(SystemRandom().randrange, 1, 1 << 64)

logger = structlog.get_logger(__name__)

Clock = Callable[[], float]


class Maintenance:
    """One thread that runs each job when it is due. *clock* returns monotonic seconds.

    An error of a job is logged and stops neither it nor the others.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: list[tuple[float, Callable[[], object]]] = []
        self._due: list[float] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="maintenance", daemon=True)

    def every(self, seconds: float, *jobs: Callable[[], object]) -> None:
        """Run each of *jobs* every *seconds*, from now on. Called before ``start``."""
        for job in jobs:
            self._jobs.append((seconds, job))
            self._due.append(self._clock() + seconds)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether its thread lives."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End, behind the job that runs. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def run_due(self) -> None:
        """Run what is due."""
        for at, (seconds, job) in enumerate(self._jobs):
            if self._due[at] > self._clock():
                continue
            name = getattr(job, "__qualname__", "job")
            try:
                with known_errors(name):
                    job()
            except KVStoreError as error:
                logger.error("maintenance failed", job=name, reason=str(error))
            self._due[at] = self._clock() + seconds

    def _run(self) -> None:
        while not self._stopping.wait(max(0.0, min(self._due) - self._clock())):
            self.run_due()


class Node:
    """One server: tiers, store, Unix socket and gRPC. ``port`` is the one it got.

    Raises KVStoreError with one sentence when something it was told to use cannot be used;
    nothing is left open then.
    """

    def __init__(self, config: Settings, clock: Clock = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._closers: list[Callable[[], object]] = []
        try:
            self._build()
        except BaseException:
            self._close()
            raise

    def _build(self) -> None:
        config, clock = self._config, self._clock
        self.counters = Counters()
        if config.assets is not None:
            ASSETS.load_folder(config.assets)
        models = KnownModels()
        self.store = build_store(config, clock, self.counters, self._closers, models, _new_id)
        self._keeper = self._open_keeper()
        self.recovered_chunks = self.store.recover()
        self._content_reader = self._open_content_reader()
        self.sessions = SessionTable(
            config.max_sessions,
            config.limits.session_ttl_ms,
            tenant_salts(config),
            clock,
            os.urandom,
        )
        self.sessions.on_open += [models.note, self.store.begin_session]
        self.sessions.on_close.append(self.store.end_session)
        self.trust = Trust(config, self.sessions, clock)
        self.trust.authorizer.times = self.counters.times
        self._closers.append(self.trust.close)
        self.store.catalog.limit_leases(self.trust.authorizer.lease_terms)
        self._tracing = self._open_tracing()
        calls = CallWrapper(self.trust, self._tracing)
        self._shedder = LoadShedder(config.workers, self.counters, calls, clock)
        self._closers.append(self._shedder.close)
        self._taken = taken(config)
        check_enough(config.max_sessions, self._taken)
        self._grpc, self.port = bind(config, self._shedder, self._taken)
        self._is_started = False
        self._closers.append(self._end_grpc)
        self.unix_server = self._open_unix_server()
        limits = ServiceLimits(
            config.limits.max_batch_chunks, config.max_frame_bytes, config.default_deadline_ms
        )
        checks = Checks(limits, clock)
        self.device_puts = self._open_device_puts()
        self.bulk: BulkServer | None = None
        bulk = self._open_bulk(checks)
        identity = Identity(_new_id(), kvstore.__version__, host_id(), clock(), *bulk)
        self.directory = open_directory(
            config, identity.boot_id, self.port, identity.bulk_address, self.counters, clock
        )
        if self.directory is not None:
            self._closers.append(self.directory.close)
            self.store.catalog.listeners.append(self.directory)
        self._begin_peers = ready_peers(
            config, self.store, self.directory, self.port, identity.boot_id
        )
        self._serve(checks, identity)
        self.health_port = self._open_health()
        self._http = self._open_http()
        self.http_port = self._http.port if self._http is not None else None
        self._stopping = threading.Event()
        self._learner = threading.Thread(target=self._learn, name="learner", daemon=True)
        self._maintenance = self._open_maintenance()

    def _serve(self, checks: Checks, identity: Identity) -> None:
        """Have gRPC and the Unix socket answer calls, once they are started."""
        self._scrub = self._open_scrub()
        self.events, self.publisher = self._open_events(identity.boot_id)
        backend = Backend(
            self.store, self.sessions, checks, identity, self.trust, self.unix_server,
            self.device_puts, self._scrub, self.events, self.directory,
        )  # fmt: skip
        service = servicer_of(backend)
        kvstore_pb2_grpc.add_KVStoreServicer_to_server(service, self._grpc)
        if self.unix_server is not None:
            learn = self.store.catalog.drain_some
            calls = UnixCalls(service, self.trust.authorizer, learn, self._tracing)
            self.unix_server.answer = calls.answer
        self._health = Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection(
            (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc
        )

    def _open_tracing(self) -> Tracing | None:
        tracing = open_tracing(self._config.tracing_endpoint, self._config.tracing_share)
        if tracing is not None:
            self._closers.append(tracing.close)
            for slot in self.store.tiers.slots.values():
                slot.tracing = tracing
        return tracing

    def _open_keeper(self) -> StateKeeper | None:
        if "disk" not in self._config.tiers:
            return None
        keeper = StateKeeper(self.store, self._config.disk.path, time.time)
        keeper.load()
        return keeper

    def _open_content_reader(self) -> ContentReader:
        slots, limit = self.store.tiers.slots, 0
        kept = [slots["cpu"]]
        if "disk" in slots:
            kept.append(slots["disk"])
            limit = self._config.blend_contents
        contents = self.store.blends.contents
        return ContentReader(self.store.catalog, contents, kept, limit, self._clock)

    def _open_scrub(self) -> Scrub:
        config = self._config
        scrub = Scrub(self.store.moves, config.scrub_tiers, config.scrub_bytes_per_s)
        self._closers.append(scrub.close)
        return scrub

    def _open_events(self, boot_id: int) -> tuple[EventLog | None, EventPublisher | None]:
        """Return the log that the RPC reads, and what publishes it. Events count from here on."""
        config, catalog = self._config, self.store.catalog
        if not config.limits.events_kept:
            return None, None
        tiers = [one.name for one in self.store.tiers.slots.values() if not one.tier.shared]
        restarted = partial(self.counters.add, "event_restarts")
        log = EventLog(tiers, config.limits.events_kept, catalog.queries.held_from, restarted)
        catalog.listeners.append(log)
        if config.events == config.events_replay == "off":
            return log, None
        from kvstore.server.web.event_publisher import open_publisher

        publisher = open_publisher(config, log, boot_id, self.counters)
        self._closers.append(publisher.close)
        return log, publisher

    def _open_unix_server(self) -> UnixServer | None:
        path = self._config.socket_path_for(self.port)
        if path is None:
            return None
        config = self._config
        most = (CONNECTIONS_PER_SESSION + 2) * config.max_sessions
        limits = UnixLimits(
            config.max_sessions,
            MAX_STAGING_BYTES,
            config.workers,
            share_of(SOCKET_SHARE, self._taken, most),
        )
        files = {Op.slab: self._slab_file, Op.extent: self._extent_file}
        authorizer = self.trust.authorizer
        try:
            server = UnixServer(path, self.sessions, files, self._clock, limits, authorizer)
        except InvalidRequestError as error:
            if "socket_path" in config.model_fields_set:
                raise
            logger.warning(
                "no Unix socket: clients of this host use the network", reason=str(error)
            )
            return None
        self._closers.append(server.close)
        return server

    def _open_device_puts(self) -> DevicePuts | None:
        if self.store.tiers.gpu_tier is None or self.unix_server is None:
            return None
        from kvstore.server.store.device_puts import open_device_puts

        puts = open_device_puts(self.store)
        if puts is not None:
            self._closers.append(puts.close)
            self.sessions.on_close.append(puts.end_session)
            self.unix_server.take_ring = puts.take_ring
        return puts

    def _slab_file(self, slab_id: int, tenant: str) -> tuple[int, int]:
        moves = self.store.moves
        if slab_id == ARENA_SLAB and moves.tiers.gpu_tier is not None:
            arena = moves.tiers.gpu_tier.arena_file()
            return arena, os.fstat(arena).st_size
        return moves.tiers.cpu_tier.slab_file(slab_id, tenant), moves.tiers.cpu_tier.slab_bytes

    def _open_bulk(self, checks: Checks) -> tuple[str, bytes]:
        """Return the address of the bulk channel and its certificate."""
        config = self._config
        if config.bulk == "off":
            return "", b""
        from kvstore.server.bulk.service import BulkService
        from kvstore.server.bulk.tcp_server import MAX_STREAMS, open_bulk

        authorizer = self.trust.authorizer
        service = BulkService(self.store, self.sessions, checks, authorizer, config.limits)
        service.tracing = self._tracing
        most = share_of(BULK_SHARE, self._taken, MAX_STREAMS)
        self.bulk, certificate = open_bulk(config, service, most)
        self._closers.append(self.bulk.close)
        return self.bulk.address, certificate

    def _extent_file(self, extent: int, tenant: str) -> tuple[int, int]:
        slot = self.store.tiers.file_backed
        if slot is None:
            raise InvalidRequestError("extent", extent, "this server has no disk tier")
        descriptor = slot.tier.extent_file(extent, tenant)
        return descriptor, os.fstat(descriptor).st_size

    def _open_health(self) -> int | None:
        address = self._config.health_address
        if address is None:
            return None
        server, port = bind_health(address, self._health)
        self._closers.append(lambda: server.stop(None).wait())
        return port

    def _open_http(self) -> HttpPort | None:
        if self._config.http_address is None:
            return None
        from kvstore.server.web.dashboard import Subject
        from kvstore.server.web.http_pages import HttpPort

        subject = Subject(
            self.store, self.sessions, self.counters, kvstore.__version__, self._clock,
            self.directory,
        )  # fmt: skip
        port = HttpPort(self._config, subject, self.trust)
        self._closers.append(port.close)
        return port

    def start(self) -> None:
        """Begin to serve."""
        self._is_started = True
        self._grpc.start()
        self._learner.start()
        self._maintenance.start()
        self._scrub.start()
        if self.directory is not None:
            self.directory.start()
        self._begin_peers()
        begin_choices(self.store.moves, self._config.codecs, os.urandom)
        self._set_health(serving=True)

    def _set_health(self, *, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if serving else states.NOT_SERVING
        for name in ("", SERVICE_NAME, "readiness"):
            self._health.set(name, state)
        alive = self.is_alive()
        self._health.set("startup", states.SERVING)
        self._health.set("liveness", states.SERVING if alive else states.NOT_SERVING)

    def is_alive(self) -> bool:
        """Whether every thread the node depends on lives."""
        parts = (self.store.moves.work_queue, self._maintenance, self._learner, self.unix_server,
                 self.bulk, self.publisher)  # fmt: skip
        return all(part is None or part.is_alive() for part in parts)

    def _open_maintenance(self) -> Maintenance:
        maintenance = Maintenance(self._clock)
        parts = (self.store, self.publisher, self._shedder, self.unix_server, self._http)
        ticks = [part.tick for part in parts if part is not None]
        jobs = (self._expire_sessions, self._end_revoked, self._check_health)
        maintenance.every(TICK_S, *ticks, *jobs)
        return maintenance

    def _expire_sessions(self) -> None:
        self.counters.add("expired_sessions", self.sessions.expire())

    def _end_revoked(self) -> None:
        self.counters.add("revoked_sessions", self.trust.tick())

    def _check_health(self) -> None:
        if self.sessions.is_draining:  # over the RPC
            self._set_health(serving=False)
        if not self.is_alive():
            logger.error("a worker died; health fails until the restart")
            self._set_health(serving=False)

    def _learn(self) -> None:
        """Tell the policies what happened, so that no request has to wait for that."""
        while not self._stopping.is_set():
            self.store.catalog.drain(TICK_S)
            if self._keeper is not None:
                self._keeper.save_if_due()
            self._content_reader.step()
            if not self._maintenance.is_alive() and not self._stopping.is_set():
                self._check_health()  # as its thread would

    def stop(self, grace_s: float) -> bool:
        """Drain, let running calls end, release everything. Return whether the drain was clean."""
        self._set_health(serving=False)
        self.sessions.drain()
        deadline = self._clock() + grace_s
        self.store.drain(deadline)
        self._stopping.set()
        self._maintenance.stop()
        if self._learner.is_alive():
            self._learner.join()
        if self.events is not None:
            self.events.ended.set()
        self._grpc.stop(min(grace_s, 2.0)).wait()
        if self.unix_server is not None:
            self.unix_server.close()
        # Puts that had begun may have landed behind the first pass.
        clean = self.store.drain(deadline)
        self.store.writes.close()
        if self._keeper is not None:
            self._keeper.save()
        self._close()
        return clean

    def _end_grpc(self) -> None:
        if not self._is_started:  # gRPC lets go of a port only after it was started
            self._grpc.start()
        self._grpc.stop(None).wait()

    def _close(self) -> None:
        while self._closers:
            self._closers.pop()()


def tenant_salts(config: Settings) -> Callable[[str], bytes]:
    """Return the function from a tenant to its salt: HMAC-SHA256 under the server's secret."""
    secret = config.read_secret()
    return lambda tenant: hmac.digest(secret, tenant.encode(), "sha256")
