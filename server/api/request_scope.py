"""The interceptor that gives each call its request id, and its span where calls are traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import grpc
from typing_extensions import override

from kvstore.server.api.interceptors import Behavior, HandlerInterceptor, answered_by, behavior_of
from kvstore.server.telemetry.request_ids import RequestId

if TYPE_CHECKING:
    from kvstore.server.telemetry.tracing import Tracing

    Handler = grpc.RpcMethodHandler[Any, Any]

Scope = Callable[[Any, grpc.ServicerContext], AbstractContextManager[object]]
"""From a message, or what yields them, and the context to what is done around the call."""


def _named(request: Any, context: grpc.ServicerContext) -> RequestId:
    return RequestId(context.invocation_metadata)


class RequestScope(HandlerInterceptor):
    """Belongs before whatever logs. Without *tracing* a call costs what its request id does."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self._tracing = tracing

    @override
    def around(self, handler: Handler, method: str) -> Handler:
        scope = _named if self._tracing is None else self._tracing.scope_of(method)
        around = _around_stream if handler.response_streaming else _around_unary
        return answered_by(handler, around(behavior_of(handler), scope))


def _around_unary(behavior: Behavior, scope: Scope) -> Behavior:
    def scoped(request: Any, context: grpc.ServicerContext) -> Any:
        with scope(request, context):
            return behavior(request, context)

    return scoped


def _around_stream(behavior: Behavior, scope: Scope) -> Behavior:
    def scoped(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with scope(request, context):
            yield from behavior(request, context)

    return scoped
