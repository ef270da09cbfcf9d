"""Tracing: request ids, and spans of calls and of their tier operations.

All log lines of a call contain its request id, in any thread. Spans go to OpenTelemetry, the extra
``tracing``, which is loaded only for ``--tracing-endpoint``; they contain names, sizes, outcomes
and the caller's request id, but no key, token, tenant or other text of a caller.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import structlog
from typing_extensions import override

from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.messages import ERROR_NAME
from kvstore.proto.types import DIGEST_BYTES

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

HEADER = "x-request-id"
"""Header with a caller's request id; without it one is generated when something is logged."""
MAX_ID_CHARS = 128
"""Longer ids, and those that are not printable ASCII, are ignored."""

NUMBERS = count(int.from_bytes(os.urandom(8), "big") >> 1)
"""Generated ids, from a random start."""

QUEUE_SPANS = 2048
"""Limit of queued spans; further ones are dropped."""
EXPORT_TIMEOUT_S = 2
"""Timeout of the collector; at shutdown twice that."""

logger = structlog.get_logger(__name__)


class RequestId(NamedTuple):
    """The id of a call; its *metadata* is read only when something is logged."""

    number: int
    metadata: Callable[[], Any] = tuple

    @override
    def __str__(self) -> str:
        sent = (value for name, value in self.metadata() or () if name == HEADER)
        texts = (one for one in sent if isinstance(one, str) and len(one) <= MAX_ID_CHARS)
        given = next(texts, "")
        is_fit = given.isascii() and given.isprintable()
        return (is_fit and given) or f"{self.number:016x}"


CURRENT: ContextVar[RequestId | None] = ContextVar("request_id", default=None)
"""The id of the current call, also in moves that it begins."""


def add_request_id(
    logger: object, name: str, fields: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Add the id of the current call to a log line's *fields*; a structlog processor."""
    current = CURRENT.get()
    if current is not None:
        fields["request_id"] = str(current)
    return fields


class Tracing:
    """Creates spans for *processor*. *share* is the sampling rate of calls without a trace."""

    def __init__(self, processor: SpanProcessor, share: float) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._carrier = TraceContextTextMapPropagator()
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(share),
            resource=Resource({"service.name": "kvstore-server"}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvstore")

    def close(self) -> None:
        """Send queued spans if the collector answers. Idempotent."""
        self._provider.shutdown()

    def _span(
        self, name: str, attributes: dict[str, str], **options: Any
    ) -> AbstractContextManager[Span]:
        return self._tracer.start_as_current_span(
            name,
            attributes=attributes,
            record_exception=False,  # its text may contain what spans must not
            set_status_on_exception=False,
            **options,
        )

    def scope_of(self, method: str) -> Callable[[Any], AbstractContextManager[object]]:
        """Return the context manager for calls of ``/service/method``.

        It takes the call's context, which has the ``request`` at the end.
        """
        service, _, name = method.strip("/").rpartition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}

        @contextmanager
        def scope(call: Any) -> Iterator[None]:
            metadata: Any = call.invocation_metadata() or ()
            texts = {name: value for name, value in metadata if isinstance(value, str)}
            carried = self._carrier.extract(texts)
            kind = self._api.SpanKind.SERVER
            spanning = self._span(f"{service}/{name}", attributes, kind=kind, context=carried)
            request_id = CURRENT.get()
            with spanning as span:
                try:
                    yield
                finally:
                    if span.is_recording():
                        span.set_attribute("kvstore.request_id", str(request_id))
                        self._finish(span, call)

        return scope

    def _finish(self, span: Span, call: Any) -> None:
        digests = getattr(call.request, "digests", None)
        if isinstance(digests, bytes):
            span.set_attribute("kvstore.chunks", len(digests) // DIGEST_BYTES)
        code = call.code() or grpc.StatusCode.OK
        span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code is not grpc.StatusCode.OK:
            trailers = call.trailing_metadata() or ()
            names = [value for name, value in trailers if name == ERROR_NAME]
            span.set_attribute("kvstore.error", names[0] if names else code.name)
            span.set_status(self._api.StatusCode.ERROR)

    @contextmanager
    def call(self, method: str, way: str, chunks: int = 0) -> Iterator[None]:
        """Trace a call of *method* over *way*, which carries no trace: the span is a root."""
        attributes = {"rpc.system": "kvstore", "rpc.service": way, "rpc.method": method}
        kind = self._api.SpanKind.SERVER
        with self._span(f"{way}/{method}", attributes, kind=kind) as span:
            if chunks:
                span.set_attribute("kvstore.chunks", chunks)
            try:
                yield
            except KVStoreError as error:
                span.set_attribute("kvstore.error", type(error).__name__)
                span.set_status(self._api.StatusCode.ERROR)
                raise

    def on_tier(self, tier: str, what: str, work: Callable[[], bool]) -> bool:
        """Run *work* in a span if the call that began it is traced; return its result."""
        parent = self._api.get_current_span().get_span_context()
        if not (parent.is_valid and parent.trace_flags.sampled):  # the call itself may have ended
            return work()
        with self._span(f"{tier} {what}", {"kvstore.tier": tier}) as span:
            span.set_attribute("kvstore.done", False)
            done = work()
            span.set_attribute("kvstore.done", bool(done))
            return done


class _ToLog(logging.Handler):
    @override
    def emit(self, record: logging.LogRecord) -> None:
        logger.log(record.levelno, "tracing", reason=record.getMessage())


def open_tracing(endpoint: str | None, share: float) -> Tracing | None:
    """Return the tracing to *endpoint*. Raises InvalidRequestError without OpenTelemetry."""
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        fix = f"needs OpenTelemetry ({error}): install kvstore-server[tracing]"
        raise InvalidRequestError("tracing_endpoint", endpoint, fix) from None
    library_log = logging.getLogger("opentelemetry")
    library_log.handlers = [_ToLog()]
    library_log.propagate = False
    exporter = OTLPSpanExporter(
        endpoint, insecure=endpoint.startswith("http://"), timeout=EXPORT_TIMEOUT_S
    )
    processor = BatchSpanProcessor(
        exporter,
        max_queue_size=QUEUE_SPANS,
        max_export_batch_size=QUEUE_SPANS,  # at shutdown each queued batch has its own timeout
    )
    return Tracing(processor, share)
