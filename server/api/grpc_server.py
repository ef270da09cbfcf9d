"""The gRPC server: its servicer, addresses and limits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import closing
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typing_extensions import override

from kvstore.proto import kvstore_pb2, kvstore_pb2_grpc
from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.messages import FEATURE_DURABLE_PUT, FEATURE_SHARED_MEMORY, MESSAGE_BYTES
from kvstore.server.api.admin_calls import AdminCalls
from kvstore.server.api.interceptors import principal_of
from kvstore.server.api.load_shedding import LoadShedder
from kvstore.server.api.service import Backend, DataCalls
from kvstore.server.security.certificates import server_credentials
from kvstore.server.security.sessions import SessionTable
from kvstore.server.settings.process_limits import GRPC_SHARE, share_of
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import join_endpoint, parse_endpoint, unresolved
from kvstore.server.store.explain import Explainer
from kvstore.server.telemetry.request_trace import RequestLog

SERVICE = kvstore_pb2.DESCRIPTOR.services_by_name["KVStore"]
MESSAGE_SLACK_BYTES = 1 << 20
PENDING_CALLS = 64
"""Calls that gRPC queues for Python: beyond it some are refused, beyond twice as many all, without
the interpreter. The default, 1,000, is more than Python takes within a deadline."""
CONNECTIONS_PER_SESSION = 2
OTHER_CONNECTIONS = 64
"""Connections of commands and probes. More are closed at once: connecting needs no credentials."""
HANDSHAKE_MS = 20_000
"""A connection without a handshake by then is closed; gRPC's default is 120 s."""
PLAIN = ("grpc.compression_enabled_algorithms_bitset", 1)
"""Messages that are compressed are refused: gRPC would unpack 1000 times their size."""

HEALTH_THREADS = 2
HEALTH_CALLS = 16
"""Concurrent calls of the health service on a separate port."""
HEALTH_CONNECTIONS = 64


class Health(health.HealthServicer):
    """gRPC's health service without Watch, as its protocol allows.

    A watcher holds a thread without limit; in gRPC's non-blocking mode a watcher that does not read
    holds the lock that Check and a state change need (grpcio-health-checking 1.76).
    """

    def __init__(self) -> None:
        super().__init__(experimental_non_blocking=False)

    @override
    def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.ServicerContext,
        send_response_callback: Callable[..., Any] | None = None,
    ) -> Iterator[health_pb2.HealthCheckResponse]:
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        context.set_details("use Check")
        return iter(())


def servicer_of(backend: Backend) -> kvstore_pb2_grpc.KVStoreServicer:
    """Return the servicer of kvstore.v1 over *backend*. Each reply names the server."""
    store, clock = backend.store, backend.checks.clock
    explainer = Explainer(store, clock)
    backend.sessions.on_open.append(explainer.spaces.note)
    requests = RequestLog(clock)
    data, admin = DataCalls(backend, explainer, requests), AdminCalls(backend, explainer, requests)
    servicer = kvstore_pb2_grpc.KVStoreServicer()
    stamp = kvstore_pb2.Server(boot_id=backend.identity.boot_id)

    def state_features() -> None:
        features = FEATURE_SHARED_MEMORY if backend.unix_server is not None else 0
        stamp.features = features | (FEATURE_DURABLE_PUT if store.durable else 0)

    state_features()
    store.on_tick.append(state_features)  # a codec chosen later may be lossless
    for part in (data, admin):
        for method in SERVICE.methods:
            if hasattr(part, method.name):
                answer = _answer(backend.sessions, stamp, getattr(part, method.name))
                setattr(servicer, method.name, answer)
    return servicer


def _answer(
    sessions: SessionTable, stamp: kvstore_pb2.Server, method: Callable[..., Any]
) -> Callable[[Any, Any], Any]:
    """Return *method* as gRPC calls it; the name of its second parameter selects the argument."""
    takes: Callable[[Any, Any], Any] = {
        "session": lambda request, _: sessions.get(request.session_id),
        "caller": lambda _, context: principal_of(context),
        "context": lambda _, context: context,
    }[list(inspect.signature(method).parameters)[1]]

    def once(request: Any, context: Any) -> Any:
        reply = method(request, takes(request, context))
        reply.server.CopyFrom(stamp)
        return reply

    def streamed(request: Any, context: Any) -> Iterator[Any]:
        with closing(method(request, takes(request, context))) as replies:
            for reply in replies:
                reply.server.CopyFrom(stamp)
                yield reply

    return streamed if inspect.isgeneratorfunction(method) else once


def bind(config: Settings, shedder: LoadShedder, taken: int) -> tuple[grpc.Server, int]:
    """Return a server, not started, and its port. *taken* descriptors are reserved for other uses.

    Raises TierUnavailableError, and InvalidRequestError for unusable certificates.
    """
    largest = MESSAGE_BYTES + MESSAGE_SLACK_BYTES
    tls = None
    if config.tls_cert is not None and config.tls_key is not None:
        tls = server_credentials(config.tls_cert, config.tls_key, config.tls_client_ca)
    server = grpc.server(
        shedder.reads,
        interceptors=[shedder],
        maximum_concurrent_rpcs=shedder.most_calls,
        options=[
            ("grpc.max_receive_message_length", largest),
            ("grpc.max_send_message_length", largest),
            PLAIN,
            ("grpc.so_reuseport", 0),
            ("grpc.server.max_pending_requests", PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", 2 * PENDING_CALLS),
            ("grpc.max_allowed_incoming_connections", most_connections(config.max_sessions, taken)),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ],
    )
    return server, _open(server, parse_endpoint(config.listen), "listen", tls)


def most_connections(max_sessions: int, taken: int) -> int:
    """Return the limit of connections, as sessions need and descriptors allow."""
    most = CONNECTIONS_PER_SESSION * max_sessions + OTHER_CONNECTIONS
    return share_of(GRPC_SHARE, taken, most)


def _open(
    server: grpc.Server,
    address: tuple[str, int],
    name: str,
    tls: grpc.ServerCredentials | None = None,
) -> int:
    host, port = address
    where = join_endpoint(host, port)
    try:
        if tls is None:
            return server.add_insecure_port(where)
        return server.add_secure_port(where, tls)
    except RuntimeError:
        why = unresolved(host) or f"is it in use? choose another --{name}"
        raise TierUnavailableError("grpc", f"cannot listen on {where}; {why}") from None


def bind_health(
    address: tuple[str, int], servicer: health.HealthServicer
) -> tuple[grpc.Server, int]:
    """Return a started plaintext server of *servicer* only, and its port.

    It has its own threads: a caller that sends nothing holds one. Raises TierUnavailableError.
    """
    server = grpc.server(
        futures.ThreadPoolExecutor(HEALTH_THREADS, thread_name_prefix="health"),
        maximum_concurrent_rpcs=HEALTH_CALLS,
        options=[
            PLAIN,
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", HEALTH_CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ],
    )
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = _open(server, address, "health")
    server.start()
    return server, port
