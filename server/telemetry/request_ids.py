"""Request ids: what all log lines of one call have in common, in whatever thread they are written.

A caller may send one as ``x-request-id``; else it is made up once something is logged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from itertools import count
from typing import Any, Self

from typing_extensions import override

HEADER = "x-request-id"
MAX_ID_CHARS = 128
"""Longer ones, and what is not printable ASCII, are not taken."""

Metadata = Callable[[], Any]

_NUMBERS = count(int.from_bytes(os.urandom(8), "big") >> 1)
"""Of ids that are made up: from a start that no other server has."""


class RequestId:
    """The id of what is logged inside ``with``, and by moves that begin there.

    *metadata* of the call are read only when something is logged.
    """

    __slots__ = ("_metadata", "_number", "_text")

    def __init__(self, metadata: Metadata = tuple) -> None:
        self._metadata = metadata
        self._number = next(_NUMBERS)  # now: threads that ask at once must get the same text
        self._text = ""

    def __enter__(self) -> Self:
        _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.set(None)  # not reset: a stream may end in another thread than it began in

    @override
    def __str__(self) -> str:
        if not self._text:
            sent = (value for name, value in self._metadata() or () if name == HEADER)
            texts = (one for one in sent if isinstance(one, str) and len(one) <= MAX_ID_CHARS)
            given = next(texts, "")
            is_fit = given.isascii() and given.isprintable()
            self._text = (is_fit and given) or f"{self._number:016x}"
        return self._text


_CURRENT: ContextVar[RequestId | None] = ContextVar("request_id", default=None)


def add_request_id(
    logger: object, name: str, fields: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Add the id of the call at work to a log line's *fields*; for structlog."""
    current = _CURRENT.get()
    if current is not None:
        fields["request_id"] = str(current)
    return fields
