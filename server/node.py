"""The Node: one server and all its parts, built from its configuration."""

from __future__ import annotations

import hmac
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from random import SystemRandom
from typing import TYPE_CHECKING, Any, TypeVar, cast

import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.codecs.assets import ASSETS
from kvstore.proto import __version__, kvstore_pb2_grpc
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.unix_socket import ARENA_SLAB, Op, host_id
from kvstore.server.api.grpc_server import SERVICE, Health, bind, bind_health, servicer_of
from kvstore.server.api.interceptors import CallWrapper, known_errors
from kvstore.server.api.load_shedding import LoadShedder
from kvstore.server.api.service import Backend, Identity
from kvstore.server.api.unix_calls import UnixCalls
from kvstore.server.api.unix_server import CONNECTIONS_PER_SESSION, UnixServer
from kvstore.server.api.validation import Checks
from kvstore.server.blending.content_index import ContentReader
from kvstore.server.security.authorization import Authorizer
from kvstore.server.security.sessions import SessionTable
from kvstore.server.settings.process_limits import (
    BULK_SHARE,
    SOCKET_SHARE,
    check_enough,
    share_of,
    taken,
)
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import DIRECTORY, parse_endpoint
from kvstore.server.store.saved_state import SavedState
from kvstore.server.store.scrub import Scrub
from kvstore.server.telemetry.events import EventLog
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.telemetry.tracing import open_tracing
from kvstore.server.tiering.codec_choice import begin_choices
from kvstore.server.wiring import build_store

if TYPE_CHECKING:  # their files load redis, an HTTP server, ZeroMQ and torch
    from kvstore.server.bulk.tcp_server import BulkServer
    from kvstore.server.cluster.directory import Directory
    from kvstore.server.cluster.peer_tier import PeerTier
    from kvstore.server.store.device_puts import DevicePuts
    from kvstore.server.web.event_publisher import EventPublisher

SERVICE_NAME: str = SERVICE.full_name
TICK_S = 0.25
_new_id = partial(SystemRandom().randrange, 1, 1 << 64)

logger = structlog.get_logger(__name__)

Clock = Callable[[], float]
PartT = TypeVar("PartT")


def run_jobs(jobs: Iterable[Callable[[], object]]) -> None:
    """Run each job once. An error is logged and does not stop the others."""
    for job in jobs:
        name = getattr(job, "__qualname__", "job")
        try:
            with known_errors(name):
                job()
        except KVStoreError as error:
            logger.error("maintenance failed", job=name, reason=str(error))


class Node:
    """One server: tiers, store, Unix socket and gRPC. ``port`` is the bound one.

    Raises KVStoreError, and leaves nothing open, when a part cannot be opened.
    """

    def __init__(self, config: Settings, clock: Clock = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self.counters = Counters()
        self._is_started = False
        self._stopping = threading.Event()
        self._learner = threading.Thread(target=self._learn, name="learner", daemon=True)
        self._jobs: list[Callable[[], object]] = []
        self._maintenance = threading.Thread(target=self._maintain, name="maintenance", daemon=True)
        with ExitStack() as self._opened:
            self._open_store()
            calls = CallWrapper(self.authorizer, self._tracing)
            self._shedder = self._open(LoadShedder(config.workers, self.counters, calls, clock))
            self._taken = taken(config)
            check_enough(config.max_sessions, self._taken)
            self._grpc, self.port = bind(config, self._shedder, self._taken)
            self._opened.callback(self._end_grpc)
            self._open_calls()
            self._opened = self._opened.pop_all()

    def _open(self, part: PartT) -> PartT:
        """Return *part*; parts are closed in reverse order of opening."""
        self._opened.callback(cast("Any", part).close)
        return part

    def _open_store(self) -> None:
        """Open the tiers, the store with its saved state, sessions and authorization."""
        config, clock = self._config, self._clock
        if config.assets is not None:
            ASSETS.load_folder(config.assets)
        store = build_store(config, clock, self.counters, self._opened, _new_id)
        self.store, slots = store, store.tiers.slots
        self._saved_state = None
        if "disk" in slots:
            self._saved_state = SavedState(store, config.disk[0].path, time.time)
            self._saved_state.load()
        self.recovered_chunks = store.recover()
        kept = [slots[name] for name in ("cpu", "disk") if name in slots]
        limit = config.blend_contents if "disk" in slots else 0
        contents = store.blends.contents
        self._content_reader = ContentReader(store.catalog, contents, kept, limit, clock)
        salts, ttl_ms = tenant_salts(config), config.limits.session_ttl_ms
        self.sessions = SessionTable(config.max_sessions, ttl_ms, salts, clock, os.urandom)
        self.sessions.on_open.append(store.begin_session)
        self.sessions.on_close.append(store.end_session)
        self.authorizer = self._open(Authorizer(config, self.sessions, clock))
        self.authorizer.counters = self.counters
        store.catalog.leases.tenant_of = self.authorizer.lease_terms
        self._tracing = open_tracing(config.tracing_endpoint, config.tracing_share)
        if self._tracing is not None:
            self._open(self._tracing)
            for slot in slots.values():
                slot.tracing = self._tracing

    def _open_calls(self) -> None:
        """Open all transports and the parts behind them; ``start`` starts them."""
        config, clock, store, authorizer = self._config, self._clock, self.store, self.authorizer
        self.unix_server = self._open_unix_server()
        most_chunks, most_bytes = config.limits.max_batch_chunks, config.max_frame_bytes
        checks = Checks(most_chunks, most_bytes, config.default_deadline_ms, clock)
        self.device_puts = self._open_device_puts()
        bulk = self._open_bulk(checks)
        self._boot_id = boot_id = _new_id()
        identity = Identity(boot_id, __version__, host_id(), clock(), *bulk)
        self.directory: Directory | None = None
        if config.directory:
            from kvstore.server.cluster.directory import open_directory

            bulk_address, counters = identity.bulk_address, self.counters
            found = open_directory(config, boot_id, self.port, bulk_address, counters, clock)
            self.directory = self._open(found)
            store.catalog.listeners.append(self.directory)
        self._scrub = self._open(Scrub(store.moves, config.scrub_tiers, config.scrub_bytes_per_s))
        self.events, self.publisher = self._open_events(boot_id)
        backend = Backend(
            store, self.sessions, checks, identity, authorizer, self.unix_server,
            self.device_puts, self._scrub, self.events, self.directory,
        )  # fmt: skip
        service = servicer_of(backend)
        kvstore_pb2_grpc.add_KVStoreServicer_to_server(service, self._grpc)
        if self.unix_server is not None:
            learn = store.catalog.drain_some
            calls = UnixCalls(service, authorizer, learn, self._tracing)
            self.unix_server.answer = calls.answer
        self._health = Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        self.health_port = self.http_port = None
        if config.health != "off":
            plain, self.health_port = bind_health(parse_endpoint(config.health), self._health)
            self._opened.callback(lambda: plain.stop(None).wait())
        parts = (store, self.publisher, self._shedder, self.unix_server)
        self._jobs += [part.tick for part in parts if part is not None]
        self._jobs += [self._end_sessions, self._check_health]
        if config.http != "off":
            from kvstore.server.web.http_pages import open_http

            http = self._open(open_http(config, backend, authorizer))
            self.http_port = http.port
            self._jobs.append(http.tick)

    def _open_events(self, boot_id: int) -> tuple[EventLog | None, EventPublisher | None]:
        """Return the event log of the RPC, and its publisher. Events are logged from here on."""
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

        return log, self._open(open_publisher(config, log, boot_id, self.counters))

    def _open_unix_server(self) -> UnixServer | None:
        config, max_sessions = self._config, self._config.max_sessions
        path = config.socket_path_for(self.port)
        if path is None:
            return None
        most = share_of(SOCKET_SHARE, self._taken, (CONNECTIONS_PER_SESSION + 2) * max_sessions)
        files = {Op.slab: self._slab_file, Op.extent: self._extent_file}
        sessions, authorizer = self.sessions, self.authorizer
        try:
            return self._open(UnixServer(path, sessions, files, authorizer, config.workers, most))
        except InvalidRequestError as error:
            if "socket_path" in config.model_fields_set:
                raise
            what = "no Unix socket: clients of this host use the network"
            logger.warning(what, reason=str(error))
            return None

    def _open_device_puts(self) -> DevicePuts | None:
        if self.store.tiers.gpu_tier is None or self.unix_server is None:
            return None
        from kvstore.server.store.device_puts import open_device_puts

        puts = open_device_puts(self.store)
        if puts is not None:
            self._open(puts)
            self.sessions.on_close.append(puts.end_session)
            self.unix_server.take_ring = puts.take_ring
        return puts

    def _slab_file(self, slab_id: int, tenant: str) -> tuple[int, int]:
        tiers = self.store.tiers
        if slab_id == ARENA_SLAB and tiers.gpu_tier is not None:
            arena = tiers.gpu_tier.arena_file()
            return arena, os.fstat(arena).st_size
        return tiers.cpu_tier.slab_file(slab_id, tenant), tiers.cpu_tier.slab_bytes

    def _open_bulk(self, checks: Checks) -> tuple[str, bytes]:
        """Return the address of the bulk channel and its certificate."""
        config = self._config
        self.bulk: BulkServer | None = None
        if config.bulk == "off":
            return "", b""
        from kvstore.server.bulk.service import BulkService
        from kvstore.server.bulk.tcp_server import MAX_STREAMS, BulkServer

        authorizer = self.authorizer
        service = BulkService(self.store, self.sessions, checks, authorizer, config.limits)
        service.tracing = self._tracing
        most = share_of(BULK_SHARE, self._taken, MAX_STREAMS)
        self.bulk = BulkServer(config, service, most)
        self._open(self.bulk)
        return self.bulk.address, self.bulk.certificate

    def _extent_file(self, extent: int, tenant: str) -> tuple[int, int]:
        slot = self.store.tiers.file_backed
        if slot is None:
            raise InvalidRequestError("extent", extent, "this server has no disk tier")
        descriptor = slot.tier.extent_file(extent, tenant)
        return descriptor, os.fstat(descriptor).st_size

    def start(self) -> None:
        """Start to serve."""
        self._is_started = True
        self._grpc.start()
        self._maintenance.start()
        self._learner.start()  # checks that the maintenance thread is alive
        self._scrub.start()
        if self.directory is not None:
            self.directory.start()
        slot = self.store.tiers.remote
        if slot is not None:
            peers = cast("PeerTier", slot.tier).peers
            if self.directory is not None and DIRECTORY in (self._config.peers or ()):
                peers.holders = self.directory.holders
            peers.start(self._config.node_id_for(self.port), self._boot_id)
        begin_choices(self.store.moves, self._config.codecs, os.urandom)
        self._set_health(serving=True)

    def _set_health(self, *, serving: bool) -> None:
        ready = dict.fromkeys(("", SERVICE_NAME, "readiness"), serving)
        states = health_pb2.HealthCheckResponse
        for name, is_well in {**ready, "startup": True, "liveness": self.is_alive()}.items():
            self._health.set(name, states.SERVING if is_well else states.NOT_SERVING)

    def is_alive(self) -> bool:
        """Whether all threads that the node depends on are alive."""
        parts = (self.store.moves.work_queue, self._maintenance, self._learner, self.unix_server,
                 self.bulk, self.publisher)  # fmt: skip
        return all(part is None or part.is_alive() for part in parts)

    def _end_sessions(self) -> None:
        self.counters.add("expired_sessions", self.sessions.expire())
        self.counters.add("revoked_sessions", self.authorizer.tick())

    def _check_health(self) -> None:
        if not (alive := self.is_alive()):
            if self._stopping.is_set():
                return  # its threads are ending
            logger.error("a worker died; health fails until the restart")
        if self.sessions.is_draining or not alive:  # drained over the RPC
            self._set_health(serving=False)

    def _maintain(self) -> None:
        while not self._stopping.wait(TICK_S):
            run_jobs(self._jobs)

    def _learn(self) -> None:
        """Update the policies in the background, so that no request waits for it."""
        while not self._stopping.is_set():
            self.store.catalog.drain(TICK_S)
            if self._saved_state is not None:
                self._saved_state.save_if_due()
            self._content_reader.step()
            if not self._maintenance.is_alive() and not self._stopping.is_set():
                self._check_health()  # in place of the maintenance thread

    def stop(self, grace_s: float) -> bool:
        """Drain, finish running calls, release everything. Return whether the drain was clean."""
        self._set_health(serving=False)
        self.sessions.drain()
        deadline = self._clock() + grace_s
        self.store.drain(deadline)
        self._stopping.set()
        self.store.catalog.state.news.set()  # wakes the learner
        for thread in (self._maintenance, self._learner):
            if thread.is_alive():
                thread.join()
        if self.events is not None:
            self.events.ended.set()
        self._grpc.stop(min(grace_s, 2.0)).wait()
        if self.unix_server is not None:
            self.unix_server.close()
        # Puts begun earlier may have been stored after the first drain.
        clean = self.store.drain(deadline)
        self.store.writes.close()
        if self._saved_state is not None:
            self._saved_state.save()
        self._opened.close()
        return clean

    def _end_grpc(self) -> None:
        if not self._is_started:  # gRPC releases a port only after a start
            self._grpc.start()
        self._grpc.stop(None).wait()


def tenant_salts(config: Settings) -> Callable[[str], bytes]:
    """Return a function from tenant to salt: HMAC-SHA256 under the server's secret."""
    secret = config.secret_file.read_bytes() if config.secret_file is not None else b""
    return lambda tenant: hmac.digest(secret, tenant.encode(), "sha256")
