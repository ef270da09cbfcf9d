"""Every error the store raises on purpose, with the gRPC status it travels as.

A miss, a refused admission and a partial batch are answers, not errors. A class here names
what the caller can do next; a new one is worth adding only when that differs.
"""

from __future__ import annotations

from numbers import Integral
from typing import ClassVar


class KVStoreError(Exception):
    """Root of the tree. Catch this at an engine boundary and count a miss."""

    status: ClassVar[str] = "INTERNAL"


class _FieldError(KVStoreError, ValueError):
    """Names the field, its value and the fix."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        text = repr(value)
        text = text if len(text) <= 120 else text[:117] + "..."
        super().__init__(f"{field}={text}: {fix}")
        self.field = field


class InvalidRequestError(_FieldError):
    """The request contradicts itself or a limit."""

    status = "INVALID_ARGUMENT"


class InvalidFrameError(_FieldError):
    """The bytes are not a frame this version can read."""

    status = "INVALID_ARGUMENT"


class ModelError(_FieldError):
    """The identity of the KV is incomplete or not the session's."""

    status = "FAILED_PRECONDITION"


class LayoutMismatchError(_FieldError):
    """The tensors do not have the shape or dtype that the Model states."""

    status = "FAILED_PRECONDITION"


class UnknownCodecError(KVStoreError):
    """The frame was encoded by a codec that this process does not have."""

    status = "UNIMPLEMENTED"

    def __init__(self, codec: object, known: str = "") -> None:
        super().__init__(f"codec={codec!r}: unknown here; known: {known or 'none'}")


class LeaseExpiredError(KVStoreError):
    """The lease, or the session that owned it, is gone. Start again from lookup."""

    status = "ABORTED"


class TierFullError(KVStoreError):
    """All bytes that could be freed are leased, reserved or kept for loads."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, tier: str, need_bytes: int, free_bytes: int) -> None:
        super().__init__(f"tier {tier!r} needs {need_bytes} bytes, can free {free_bytes}")
        self.tier = tier
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes


class QuotaExceededError(KVStoreError):
    """A named limit is reached; the message states which and whose."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, limit: str, value: int, owner: str) -> None:
        super().__init__(f"{owner} reached {limit}={value}: release some, or raise the limit")
        self.limit = limit


class ChunkCorruptError(KVStoreError):
    """The stored bytes fail a check. The chunk was quarantined and can be put again."""

    status = "DATA_LOSS"

    def __init__(self, key: bytes, reason: str) -> None:
        super().__init__(f"chunk {key.hex()}: {reason}; it was dropped, put it again")
        self.key = key


class TierUnavailableError(KVStoreError):
    """The medium is unavailable; ``is_partial``: only where this chunk lies."""

    status = "UNAVAILABLE"
    is_partial: bool = False

    def __init__(self, tier: str, reason: str, *, is_partial: bool = False) -> None:
        super().__init__(f"tier {tier!r}: {reason}")
        self.tier = tier
        self.is_partial = is_partial


class DeadlineError(KVStoreError, TimeoutError):
    """The deadline passed before the work was done. A get counts it as a miss."""

    status = "DEADLINE_EXCEEDED"


class ShuttingDownError(KVStoreError):
    """The server is draining; continue without it."""

    status = "UNAVAILABLE"


class UnauthenticatedError(KVStoreError):
    """The caller did not prove its identity."""

    status = "UNAUTHENTICATED"


class PermissionDeniedError(KVStoreError):
    """The caller may not do this."""

    status = "PERMISSION_DENIED"


def _tree(root: type[KVStoreError]) -> dict[str, type[KVStoreError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def revive(name: str, message: str) -> KVStoreError:
    """Rebuild a received error by its class *name*, without running its constructor.

    An unknown name (of a newer server) becomes a plain KVStoreError.
    """
    kind = _tree(KVStoreError).get(name, KVStoreError)
    error = kind.__new__(kind, message)
    Exception.__init__(error, message)
    return error


def is_whole(value: object) -> bool:
    """Return whether *value* is an integer and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_text(
    field: str,
    text: str,
    most: int,
    error: type[InvalidRequestError | ModelError] = InvalidRequestError,
    *,
    least: int = 0,
) -> str:
    """Return *text* if it has *least* to *most* characters, all printable. Raises *error*."""
    if not isinstance(text, str) or not least <= len(text) <= most or not text.isprintable():
        count = f"{least} to {most}" if least else f"at most {most}"
        shown = text[:160] if isinstance(text, str) else text  # the message shows less than this
        raise error(field, shown, f"give {count} printable characters")
    return text


def printable(text: str) -> str:
    """Return *text* with blanks for control characters, line ends and bidi marks.

    For text from other programs before a terminal shows it.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " for char in text)
