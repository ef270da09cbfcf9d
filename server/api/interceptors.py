"""Cross-cutting behaviour of every RPC: the one place where exceptions become statuses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc
import structlog
from typing_extensions import override

from kvstore.proto.errors import KVStoreError
from kvstore.proto.messages import ERROR_NAME
from kvstore.server.telemetry.request_ids import RequestId

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    ServerInterceptor = grpc.ServerInterceptor[Any, Any]
else:  # grpc's classes are generic in its stubs only
    ServerInterceptor = grpc.ServerInterceptor

MAX_MESSAGE_CHARS = 600
"""Trailers hold 8 KB, and each byte of a character may take three there."""

T = TypeVar("T")
Behavior = Callable[[Any, grpc.ServicerContext], Any]

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
    """Send KVStoreErrors with their status and class name, anything else as INTERNAL."""

    @override
    def around(self, handler: Handler, method: str) -> Handler:
        streams = handler.response_streaming
        return answered_by(handler, guarded(behavior_of(handler), method, streams=streams))


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


def guarded(behavior: Behavior, method: str, *, streams: bool) -> Behavior:
    """Return *behavior* with its errors sent as statuses; *streams*: it yields messages."""
    return _guard_stream(behavior, method) if streams else _guard_unary(behavior, method)


def _guard_unary(behavior: Behavior, method: str) -> Behavior:
    def guarded(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return behavior(request, context)
        except Exception as error:  # noqa: BLE001
            _abort(context, error, method)

    return guarded


def _guard_stream(behavior: Behavior, method: str) -> Behavior:
    def guarded(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from behavior(request, context)
        except Exception as error:  # noqa: BLE001
            _abort(context, error, method)

    return guarded


def told(
    answers: Generator[T, None, None], failure: Callable[[str, str], T], method: str
) -> Generator[T, None, None]:
    """Yield *answers*; an error that ends them becomes a last one by its class name and text."""
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
