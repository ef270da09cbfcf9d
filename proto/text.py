"""Text of callers: what is taken of it, and how it is shown."""

from __future__ import annotations

from kvstore.proto.errors import InvalidRequestError, RepresentationError


def check_text(
    field: str,
    text: str,
    most: int,
    error: type[InvalidRequestError | RepresentationError] = InvalidRequestError,
    *,
    least: int = 0,
) -> str:
    """Return *text* if it has *least* to *most* characters, all printable. Raises *error*."""
    if not isinstance(text, str) or not least <= len(text) <= most or not text.isprintable():
        count = f"{least} to {most}" if least else f"at most {most}"
        raise error(field, _beginning(text), f"give {count} printable characters")
    return text


def _beginning(text: object) -> object:
    return text[:160] if isinstance(text, str) else text  # the error writes no more of it


def printable(text: str) -> str:
    """Return *text* with blanks for what a terminal would obey or hide: controls, line ends, bidi.

    What another program sent is shown by way of this alone.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " for char in text)
