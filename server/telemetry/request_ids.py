"""Request ids: what all log lines of one call have in common, in whatever thread they are written.

A caller may send one as ``x-request-id``; else it is made up once something is logged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from itertools import count
from typing import Any, NamedTuple

from typing_extensions import override

HEADER = "x-request-id"
MAX_ID_CHARS = 128
"""Longer ones, and what is not printable ASCII, are not taken."""

NUMBERS = count(int.from_bytes(os.urandom(8), "big") >> 1)
"""Of ids that are made up: from a start that no other server has."""


class RequestId(NamedTuple):
    """The id of a call; its *metadata* are read only when something is logged."""

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
"""Of the call at work, and of the moves that it begins."""


def add_request_id(
    logger: object, name: str, fields: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Add the id of the call at work to a log line's *fields*; for structlog."""
    current = CURRENT.get()
    if current is not None:
        fields["request_id"] = str(current)
    return fields
