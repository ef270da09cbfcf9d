"""The interceptor of every RPC that asks who calls, and whether they may."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import grpc
from typing_extensions import override

from kvstore.proto.errors import KVStoreError
from kvstore.server.api.interceptors import HandlerInterceptor, answered_by, behavior_of
from kvstore.server.security.authenticator import Authenticator
from kvstore.server.security.authorization import OPEN, SERVICES, Doorkeeper, check_role
from kvstore.server.security.principal import ANYBODY, Principal
from kvstore.server.security.sessions import Session

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]


class AuthenticatedContext:
    """gRPC's context of a call, and who calls; all else it passes on."""

    __slots__ = ("_context", "frames", "principal", "request", "session")

    def __init__(self, context: grpc.ServicerContext, principal: Principal, request: Any) -> None:
        self._context = context
        self.principal = principal
        self.session: Session | None = None
        self.request: Any = request
        """The message of the call, or what yields those that are admitted."""
        self.frames: int | None = None
        """How many frames a stream began; None where the call has one message."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def principal_of(context: object) -> Principal:
    """Return who calls; who calls without gRPC has been asked before."""
    return context.principal if isinstance(context, AuthenticatedContext) else ANYBODY


class AuthInterceptor(HandlerInterceptor):
    """Lets calls through that the authenticator knows and the doorkeeper admits.

    Health is asked of nobody. Belongs behind the ErrorInterceptor, which sends what is raised here.
    What it returns for a method is good for all of its calls.
    """

    def __init__(self, authenticator: Authenticator, doorkeeper: Doorkeeper) -> None:
        self._authenticator = authenticator
        self._doorkeeper = doorkeeper

    @override
    def around(self, handler: Handler, method: str) -> Handler:
        service = method.strip("/").rpartition("/")[0]
        if SERVICES.get(service) == OPEN:
            return handler
        behavior, streams = behavior_of(handler), handler.request_streaming

        def answered(request: Any, context: grpc.ServicerContext) -> Any:
            with self._calling(method, request, context, streams=streams) as call:
                return behavior(call.request, call)

        def streamed(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._calling(method, request, context, streams=streams) as call:
                yield from behavior(call.request, call)

        return answered_by(handler, streamed if handler.response_streaming else answered)

    @contextmanager
    def _calling(
        self, method: str, request: Any, context: grpc.ServicerContext, *, streams: bool
    ) -> Iterator[Any]:
        """Yield the context of a call that is admitted, and record what became of it."""
        authorizer, call, outcome = self._doorkeeper, None, "cancelled"
        started = authorizer.clock()
        try:
            principal = ANYBODY
            if not self._authenticator.is_open:
                metadata: Any = context.invocation_metadata() or ()
                proofs: Any = context.auth_context()  # its stubs say bytes, where it has lists
                principal = self._authenticator.principal_of(metadata, proofs)
            call = AuthenticatedContext(context, principal, request)
            if streams:
                call.request, call.frames = self._each_admitted(call, method, request), 0
            else:
                call.session = authorizer.admit(principal, method, request)
            yield call
            outcome = "OK"
        except KVStoreError as error:
            outcome = type(error).__name__
            raise
        finally:
            authorizer.times.note(method, authorizer.clock() - started)
            if call is None:
                authorizer.note(None, method, outcome, peer=context.peer)
            else:
                about = call.request if call.frames is None else call.frames
                authorizer.note(call.principal, method, outcome, call.session, about, context.peer)

    def _each_admitted(
        self, call: AuthenticatedContext, method: str, requests: Iterator[Any]
    ) -> Iterator[Any]:
        """Yield the messages of a stream; one that names another session is checked anew.

        The stream is one request, of the tenant that its first message is about.
        """
        check_role(call.principal, method, None)
        first = next(requests, None)
        call.session = self._doorkeeper.admit(call.principal, method, first)
        last, call.frames = getattr(first, "session_id", 0), 0
        for request in () if first is None else chain((first,), requests):
            # The first message of a frame says how long it is.
            call.frames += bool(getattr(request, "frame_bytes", 0))
            session_id = getattr(request, "session_id", 0)
            if session_id != last:
                call.session = self._doorkeeper.session_of(call.principal, method, request)
                last = session_id
            yield request
