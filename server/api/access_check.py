"""The interceptor of every RPC that asks who calls, and whether they may."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import grpc
from typing_extensions import override

from kvstore.proto.errors import KVStoreError
from kvstore.server.api.interceptors import Behavior, HandlerInterceptor, answered_by, behavior_of
from kvstore.server.security.authenticator import Authenticator
from kvstore.server.security.authorization import OPEN, SERVICES, Authorizer, check_role
from kvstore.server.security.sessions import ANYBODY, Principal, Session

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


class Call:
    """gRPC's context of a call, and who calls; all else it passes on."""

    __slots__ = ("_context", "principal", "request", "session")

    def __init__(self, context: grpc.ServicerContext, principal: Principal) -> None:
        self._context = context
        self.principal = principal
        self.session: Session | None = None
        self.request: Any = None
        """Of a stream, how many frames it began."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def principal_of(context: object) -> Principal:
    """Return who calls; who calls without gRPC has been asked before."""
    return context.principal if isinstance(context, Call) else ANYBODY


class Gatekeeper(HandlerInterceptor):
    """Lets calls through that the authenticator knows and the authorizer admits.

    Health is asked of nobody. Belongs behind the ErrorInterceptor, which sends what is raised here.
    What it returns for a method is good for all of its calls.
    """

    def __init__(self, authenticator: Authenticator, authorizer: Authorizer) -> None:
        self._authenticator = authenticator
        self._authorizer = authorizer

    @override
    def around(self, handler: Handler, method: str) -> Handler:
        service = method.strip("/").rpartition("/")[0]
        if SERVICES.get(service) == OPEN:
            return handler
        guard = self._guard_stream if handler.response_streaming else self._guard_unary
        asks_once = not handler.request_streaming
        return answered_by(handler, guard(behavior_of(handler), method, asks_once=asks_once))

    def _guard_unary(self, behavior: Behavior, method: str, *, asks_once: bool) -> Behavior:
        def guarded(request: Any, context: grpc.ServicerContext) -> Any:
            with self._calling(method, context) as call:
                return behavior(self._admitted(call, method, request, asks_once=asks_once), call)

        return guarded

    def _guard_stream(self, behavior: Behavior, method: str, *, asks_once: bool) -> Behavior:
        def guarded(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._calling(method, context) as call:
                yield from behavior(
                    self._admitted(call, method, request, asks_once=asks_once), call
                )

        return guarded

    @contextmanager
    def _calling(self, method: str, context: grpc.ServicerContext) -> Iterator[Any]:
        call: Call | None = None
        outcome = "cancelled"
        started = self._authorizer.clock()
        try:
            call = Call(context, self._who(context))
            yield call
            outcome = "OK"
        except KVStoreError as error:
            outcome = type(error).__name__
            raise
        finally:
            self._authorizer.times.note(method, self._authorizer.clock() - started)
            if call is None:
                self._authorizer.note(None, method, outcome, peer=context.peer)
            else:
                self._authorizer.note(
                    call.principal, method, outcome, call.session, call.request, context.peer
                )

    def _who(self, context: grpc.ServicerContext) -> Principal:
        if self._authenticator.is_open:
            return ANYBODY
        metadata: Any = context.invocation_metadata() or ()
        proofs: Any = context.auth_context()  # its stubs say bytes, where it has lists of them
        return self._authenticator.principal_of(metadata, proofs)

    def _admitted(self, call: Call, method: str, request: Any, *, asks_once: bool) -> Any:
        if asks_once:
            call.request = request
            call.session = self._authorizer.admit(call.principal, method, request)
            return request
        check_role(call.principal, method, None)
        return self._each_admitted(call, method, request)

    def _each_admitted(self, call: Call, method: str, requests: Iterator[Any]) -> Iterator[Any]:
        """Yield the messages of a stream; one that names another session is checked anew.

        The stream is one request, of the tenant that its first message is about.
        """
        first = next(requests, None)
        call.session = self._authorizer.admit(call.principal, method, first)
        last = getattr(first, "session_id", 0)
        for request in () if first is None else chain((first,), requests):
            # The first message of a frame says how long it is.
            call.request = (call.request or 0) + bool(getattr(request, "frame_bytes", 0))
            session_id = getattr(request, "session_id", 0)
            if session_id != last:
                call.session = self._authorizer.session_of(call.principal, method, request)
                last = session_id
            yield request
