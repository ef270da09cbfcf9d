"""What surrounds every RPC: request id and span, who calls and may they, errors as statuses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc
import structlog
from typing_extensions import override

from kvstore.proto.errors import KVStoreError
from kvstore.proto.messages import ERROR_NAME
from kvstore.server.security.authenticator import Authenticator
from kvstore.server.security.authorization import OPEN, SERVICES, Authorizer, check_role
from kvstore.server.security.sessions import ANYBODY, Principal, Session
from kvstore.server.telemetry.request_ids import RequestId

if TYPE_CHECKING:
    from kvstore.server.telemetry.tracing import Tracing

    Handler = grpc.RpcMethodHandler[Any, Any]
    ServerInterceptor = grpc.ServerInterceptor[Any, Any]
else:  # grpc's classes are generic in its stubs only
    ServerInterceptor = grpc.ServerInterceptor

MAX_MESSAGE_CHARS = 600
"""Trailers hold 8 KB, and each byte of a character may take three there."""

T = TypeVar("T")
Behavior = Callable[[Any, grpc.ServicerContext], Any]
Scope = Callable[[Any, grpc.ServicerContext], AbstractContextManager[object]]
"""From a message, or what yields them, and the context to what is done around the call."""

logger = structlog.get_logger(__name__)


class HandlerInterceptor(ServerInterceptor):
    """One that puts something around what answers the calls of a method."""

    @override
    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = continuation(handler_call_details)
        return None if handler is None else self.around(handler, handler_call_details.method)

    @abstractmethod
    def around(self, handler: Handler, method: str) -> Handler:
        """Return what answers the calls of *method* in the place of *handler*."""


class ErrorInterceptor(HandlerInterceptor):
    """Send KVStoreErrors with their status and class name, anything else as INTERNAL.

    Each call has its request id meanwhile, and a span where there is *tracing*.
    """

    def __init__(self, tracing: Tracing | None = None) -> None:
        self._tracing = tracing

    @override
    def around(self, handler: Handler, method: str) -> Handler:
        scope = None if self._tracing is None else self._tracing.scope_of(method)
        streams = handler.response_streaming
        behavior = guarded(behavior_of(handler), method, streams=streams, scope=scope)
        return answered_by(handler, behavior)


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
        authorizer, call, outcome = self._authorizer, None, "cancelled"
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
        call.session = self._authorizer.admit(call.principal, method, first)
        last, call.frames = getattr(first, "session_id", 0), 0
        for request in () if first is None else chain((first,), requests):
            # The first message of a frame says how long it is.
            call.frames += bool(getattr(request, "frame_bytes", 0))
            session_id = getattr(request, "session_id", 0)
            if session_id != last:
                call.session = self._authorizer.admit(call.principal, method, request)
                last = session_id
            yield request


def behavior_of(handler: Handler) -> Behavior:
    """Return what answers the calls of *handler*."""
    behavior: Behavior = getattr(handler, _shape(handler))
    return behavior


def answered_by(handler: Handler, behavior: Behavior) -> Handler:
    """Return *handler* with *behavior* in the place of its own."""
    return _handler(_shape(handler), handler, behavior)


def fed_by_stream(handler: Handler, behavior: Behavior) -> Handler:
    """As ``answered_by``; *behavior* takes its message, if it is only one, from an iterator."""
    return _handler(f"stream_{_shape(handler).partition('_')[2]}", handler, behavior)


def _handler(shape: str, like: Handler, behavior: Behavior) -> Handler:
    make = getattr(grpc, f"{shape}_rpc_method_handler")
    made: Handler = make(behavior, like.request_deserializer, like.response_serializer)
    return made


def _shape(handler: Handler) -> str:
    kinds = handler.request_streaming, handler.response_streaming
    return "_".join("stream" if streams else "unary" for streams in kinds)


def guarded(
    behavior: Behavior, method: str, *, streams: bool, scope: Scope | None = None
) -> Behavior:
    """Return *behavior* with its errors sent as statuses; *streams*: it yields messages.

    Without a *scope* of its own each call has its request id.
    """

    def answered(request: Any, context: grpc.ServicerContext) -> Any:
        with scope(request, context) if scope else RequestId(context.invocation_metadata):
            try:
                return behavior(request, context)
            except Exception as error:  # noqa: BLE001
                _abort(context, error, method)

    def streamed(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with scope(request, context) if scope else RequestId(context.invocation_metadata):
            try:
                yield from behavior(request, context)
            except Exception as error:  # noqa: BLE001
                _abort(context, error, method)

    return streamed if streams else answered


def packed_errors(
    answers: Generator[T, None, None], failure: Callable[[str, str], T], method: str
) -> Generator[T, None, None]:
    """Yield *answers*; an error that ends them is packed as the last one by *failure*."""
    with RequestId():
        try:
            yield from answers
        except Exception as error:  # noqa: BLE001
            name, _, message = _describe(error, method)
            yield failure(name, message)


@contextmanager
def known_errors(method: str) -> Iterator[None]:
    """Log an error that is none of ours, and raise what callers are told in its place."""
    try:
        yield
    except KVStoreError:
        raise
    except Exception as error:
        raise KVStoreError(_describe(error, method)[2]) from error


def _describe(error: Exception, method: str) -> tuple[str, str, str]:
    """Return class name, status and text that the caller is told, and log what happened."""
    if isinstance(error, KVStoreError):
        name, status, message = type(error).__name__, error.status, str(error)
        logger.info("refused", method=method, error=name, reason=message)
    else:
        # What broke is ours to read in the log, not the caller's.
        name, status, message = "KVStoreError", "INTERNAL", "internal error; see the server's log"
        logger.error("internal error", method=method, exc_info=error)
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 3] + "..."
    return name, status, message


def _abort(context: grpc.ServicerContext, error: Exception, method: str) -> NoReturn:
    if isinstance(error, KVStoreError) or context.is_active():
        name, status, message = _describe(error, method)
    else:
        name, status, message = "KVStoreError", "CANCELLED", "the client went away"
    context.set_trailing_metadata(((ERROR_NAME, name),))
    context.abort(grpc.StatusCode[status], message)
