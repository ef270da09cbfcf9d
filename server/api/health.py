"""The health service, which is asked of nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from typing_extensions import override


class Health(health.HealthServicer):
    """gRPC's own, without Watch, as its protocol allows: ask with Check.

    A watcher holds a thread for as long as it likes; without a thread (what gRPC calls
    non-blocking) one that does not read holds up whoever sets a state, under the lock that Check
    takes (grpcio-health-checking 1.76).
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
        context.set_details("ask with Check")
        return iter(())
