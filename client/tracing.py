"""The caller's trace, passed along with its calls where the program traces with OpenTelemetry."""

from __future__ import annotations

import sys

Metadata = tuple[tuple[str, str], ...] | None

_API = "opentelemetry.trace"


def traced(metadata: Metadata) -> Metadata:
    """Return *metadata* with the current span as W3C's ``traceparent``, if there is one.

    OpenTelemetry is not loaded for it: where the program did not, there is none.
    """
    current = getattr(sys.modules.get(_API), "get_current_span", None)
    if current is None:  # or another thread is just loading it
        return metadata
    span = current().get_span_context()
    if not span.is_valid:
        return metadata
    parent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    return (*(metadata or ()), ("traceparent", parent))
