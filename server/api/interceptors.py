"""What surrounds every RPC: request id and span, who calls and may they, errors as statuses."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
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
Scope = Callable[[Any, Any], AbstractContextManager[tuple[Any, Any]]]
"""From a message, or what yields them, and the context to what is done around the call: it yields
what the call gets in their place."""

logger = structlog.get_logger(__name__)


class CallInterceptor(ServerInterceptor):
    """Send KVStoreErrors with their status and class name, anything else as INTERNAL.

    Each call has its request id meanwhile, and a span where there is *tracing*; *access* lets it
    through.
    """

    def __init__(self, tracing: Tracing | None = None, access: AccessCheck | None = None) -> None:
        self._tracing = tracing
        self._access = access

    @override
    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler, method = continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return None
        behavior, streams = behavior_of(handler), handler.response_streaming
        if self._access is not None:
            behavior = self._access.around(behavior, method, handler)
        scope = self._tracing.scope_of(method) if self._tracing is not None else None
        return answered_by(handler, guarded(behavior, method, scope, streams=streams))


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
    """Return who calls; calls without gRPC are authenticated before."""
    return context.principal if isinstance(context, AuthenticatedContext) else ANYBODY


class AccessCheck:
    """Lets calls through that the authenticator knows and the authorizer admits; health, always."""

    def __init__(self, authenticator: Authenticator, authorizer: Authorizer) -> None:
        self._authenticator = authenticator
        self._authorizer = authorizer

    def around(self, behavior: Behavior, method: str, handler: Handler) -> Behavior:
        """Return *behavior*, of the calls of *handler*, for those that may call *method*."""
        if SERVICES.get(method.strip("/").rpartition("/")[0]) == OPEN:
            return behavior
        admitted = partial(self._admitted, method, streams=handler.request_streaming)
        return inside(admitted, behavior, streams=handler.response_streaming)

    @contextmanager
    def _admitted(
        self, method: str, request: Any, context: grpc.ServicerContext, *, streams: bool
    ) -> Iterator[tuple[Any, Any]]:
        """Yield the request and context of a call that is admitted; record what became of it."""
        authorizer, call, outcome = self._authorizer, None, "cancelled"
        started = authorizer.clock()
        try:
            principal = ANYBODY
            if not self._authenticator.is_open:
                metadata: Any = context.invocation_metadata() or ()
                proofs: Any = context.auth_context()  # bytes by its stubs, where it has lists
                principal = self._authenticator.principal_of(metadata, proofs)
            call = AuthenticatedContext(context, principal, request)
            if streams:
                call.request, call.frames = self._each_admitted(call, method, request), 0
            else:
                call.session = authorizer.admit(principal, method, request)
            yield call.request, call
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
            # The first message of a frame has its length.
            call.frames += bool(getattr(request, "frame_bytes", 0))
            session_id = getattr(request, "session_id", 0)
            if session_id != last:
                call.session = self._authorizer.admit(call.principal, method, request)
                last = session_id
            yield request


def behavior_of(handler: Handler) -> Behavior:
    """Return what answers the calls of *handler*."""
    one: Behavior | None = handler.unary_unary or handler.unary_stream
    many: Any = handler.stream_unary or handler.stream_stream
    return one or many


def answered_by(handler: Handler, behavior: Behavior, *, is_fed: bool = False) -> Handler:
    """Return *handler* with *behavior* in the place of its own.

    If it *is_fed* it takes its message, if it is only one, from an iterator.
    """
    takes = "stream" if is_fed or handler.request_streaming else "unary"
    gives = "stream" if handler.response_streaming else "unary"
    make = getattr(grpc, f"{takes}_{gives}_rpc_method_handler")
    made: Handler = make(behavior, handler.request_deserializer, handler.response_serializer)
    return made


def inside(scope: Scope, behavior: Behavior, *, streams: bool) -> Behavior:
    """Return *behavior* run inside *scope*; *streams*: it yields messages."""

    def answered(request: Any, context: grpc.ServicerContext) -> Any:
        with scope(request, context) as call:
            return behavior(*call)

    def streamed(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with scope(request, context) as call:
            yield from behavior(*call)

    return streamed if streams else answered


def guarded(
    behavior: Behavior,
    method: str,
    traced: Callable[..., AbstractContextManager[object]] | None = None,
    *,
    streams: bool,
) -> Behavior:
    """Return *behavior* with its errors sent as statuses; *streams*: it yields messages.

    Each call has its request id, which *traced* sets if there is one.
    """

    @contextmanager
    def scope(request: Any, context: grpc.ServicerContext) -> Iterator[tuple[Any, Any]]:
        with traced(request, context) if traced else RequestId(context.invocation_metadata):
            try:
                yield request, context
            except Exception as error:  # noqa: BLE001
                _abort(context, error, method)

    return inside(scope, behavior, streams=streams)


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
    """Log an error that is none of ours, and raise what callers get in its place."""
    try:
        yield
    except KVStoreError:
        raise
    except Exception as error:
        raise KVStoreError(_describe(error, method)[2]) from error


def _describe(error: Exception, method: str) -> tuple[str, str, str]:
    """Return class name, status and text for the caller, and log what happened."""
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
