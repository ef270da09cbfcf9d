"""What the kvstore command exits with."""

from __future__ import annotations

import sys
from typing import NoReturn

from kvstore.proto.errors import printable

EXIT_NOT_HELD = 1
EXIT_USAGE = 2
EXIT_STORE = 3

CODES = {
    0: "done",
    EXIT_NOT_HELD: "what was asked for is not there, or did not hold",
    EXIT_USAGE: "wrong usage or configuration",
    EXIT_STORE: "the store answered with an error or not at all",
}
EXIT_CODES = f"Exit codes: {'; '.join(f'{code} {text}' for code, text in CODES.items())}."


def fail(reason: object, status: int) -> NoReturn:
    """Say why on standard error, and end the process with *status*."""
    lines = map(printable, f"kvstore: {reason}".split("\n"))
    print("\n".join(lines), file=sys.stderr)
    raise SystemExit(status)
