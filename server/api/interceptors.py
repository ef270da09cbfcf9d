"""Interceptors of every RPC: request id and span, authentication, errors as statuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import structlog

from kvstore.proto.errors import KVStoreError
from kvstore.proto.messages import ERROR_NAME
from kvstore.server.security.authorization import OPEN, SERVICES, Authorizer
from kvstore.server.security.sessions import ANYBODY, Principal, Session
from kvstore.server.telemetry.tracing import CURRENT, NUMBERS, RequestId

if TYPE_CHECKING:
    from kvstore.server.security.authenticator import Authenticator
    from kvstore.server.telemetry.tracing import Tracing

    Handler = grpc.RpcMethodHandler[Any, Any]

MAX_MESSAGE_CHARS = 600
"""Trailers hold 8 KB, and each byte of a character may take three."""

Behavior = Callable[[Any, Any], Any]

logger = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class AuthenticatedContext:
    """gRPC's context of a call with the caller's principal; delegates everything else."""

    _context: grpc.ServicerContext
    principal: Principal | None = None
    """None until authenticated."""
    request: Any = None
    """The message once received; of a stream, their iterator."""
    session: Session | None = None
    frames: int | None = None
    """Frames that a stream began; None if the call has one message."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def principal_of(context: object) -> Principal:
    """Return the caller's principal; calls without gRPC are authenticated elsewhere."""
    known = context.principal if isinstance(context, AuthenticatedContext) else None
    return known or ANYBODY


@dataclass(frozen=True, slots=True)
class CallWrapper:
    """Wraps the handlers of gRPC calls.

    KVStoreErrors are sent with their status and class name, anything else as INTERNAL. Each call
    has a request id, and a span with ``tracing``. ``authorizer`` authenticates and admits calls,
    except health, and records their outcomes.
    """

    authorizer: Authorizer | None = None
    tracing: Tracing | None = None

    def around(
        self, handler: Handler, method: str, receive: Behavior, taken: Behavior
    ) -> Callable[..., Iterator[Any]]:
        """Return a generator function for the answers of *method*: one, unless it streams.

        *receive* waits for the message, or returns what does: never for unknown callers. *taken*
        waits for the reader of streamed answers.
        """
        one: Behavior | None = handler.unary_unary or handler.unary_stream
        many: Any = handler.stream_unary or handler.stream_stream
        behavior: Behavior = one or many
        is_open = SERVICES.get(method.strip("/").rpartition("/")[0]) == OPEN
        authorizer = None if is_open else self.authorizer
        span_of = self.tracing.scope_of(method) if self.tracing is not None else None

        def answers(requests: Any, context: Any) -> Iterator[Any]:
            # Not reset: gRPC runs each call in its own context.
            CURRENT.set(RequestId(next(NUMBERS), context.invocation_metadata))
            call, outcome, started = AuthenticatedContext(context), "cancelled", 0.0
            with nullcontext() if span_of is None else span_of(call):
                try:
                    known = authorizer and _caller(authorizer.authenticator, context)
                    call.principal = caller = known or ANYBODY
                    call.request = request = receive(requests, call)
                    if authorizer is not None:
                        started = authorizer.clock()
                        if handler.request_streaming:
                            authorizer.admit(caller, method)
                            call.frames = 0
                            request = _each_admitted(authorizer, call, method, request)
                        else:
                            call.session = authorizer.admit(caller, method, request)
                    if handler.response_streaming:
                        yield from taken(behavior(request, call), call)
                    else:
                        yield behavior(request, call)
                    outcome = "OK"
                except Exception as error:  # noqa: BLE001
                    if isinstance(error, KVStoreError):
                        outcome = type(error).__name__
                    _abort(context, error, method)
                finally:
                    if authorizer is not None and call.request is not None:
                        authorizer.counters.note_call(method, authorizer.clock() - started)
                    if authorizer is not None and authorizer.audit is not None:
                        note, peer = authorizer.note, context.peer
                        about = call.request if call.frames is None else call.frames
                        note(call.principal, method, outcome, call.session, about, peer)
                    if handler.request_streaming:  # an iterator with the call and a message
                        call.request = None

        return answers


def _caller(authenticator: Authenticator, context: Any) -> Principal:
    """Authenticate a caller. Raises UnauthenticatedError."""
    if authenticator.is_open:
        return ANYBODY
    return authenticator.principal_of(context.invocation_metadata() or (), context.auth_context())


def _each_admitted(
    authorizer: Authorizer, call: AuthenticatedContext, method: str, requests: Iterator[Any]
) -> Iterator[Any]:
    principal, last, frames = call.principal, None, 0
    assert principal is not None
    # The stream counts as one request, of the first message's tenant; a new session is checked.
    for request in requests:
        session_id = getattr(request, "session_id", 0)
        if session_id != last:
            call.session = authorizer.admit(principal, method, request)
            last = session_id
        # The first message of a frame contains its length.
        frames += bool(getattr(request, "frame_bytes", 0))
        call.frames = frames
        yield request
    if last is None:  # an empty stream is a request too
        authorizer.admit(principal, method, ())


def guarded(behavior: Behavior, method: str) -> Behavior:
    """Return *behavior* with a request id and its errors sent as statuses."""

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        CURRENT.set(RequestId(next(NUMBERS), context.invocation_metadata))
        try:
            return behavior(request, context)
        except Exception as error:  # noqa: BLE001
            _abort(context, error, method)

    return answer


@contextmanager
def known_errors(method: str) -> Iterator[None]:
    """Log an error other than KVStoreError, and raise the one that callers get instead."""
    try:
        yield
    except KVStoreError:
        raise
    except Exception as error:
        raise KVStoreError(describe(error, method)[2]) from error


def describe(error: Exception, method: str) -> tuple[str, str, str]:
    """Return class name, status and text for the caller, and log the error."""
    if isinstance(error, KVStoreError):
        name, status, message = type(error).__name__, error.status, str(error)
        logger.info("refused", method=method, error=name, reason=message)
    else:
        # Details go to the log, not to the caller.
        name, status, message = "KVStoreError", "INTERNAL", "internal error; see the server's log"
        logger.error("internal error", method=method, exc_info=error)
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 3] + "..."
    return name, status, message


def _abort(context: grpc.ServicerContext, error: Exception, method: str) -> NoReturn:
    if isinstance(error, KVStoreError) or context.is_active():
        name, status, message = describe(error, method)
    else:
        name, status, message = "KVStoreError", "CANCELLED", "the client went away"
    context.set_trailing_metadata(((ERROR_NAME, name),))
    context.abort(grpc.StatusCode[status], message)
