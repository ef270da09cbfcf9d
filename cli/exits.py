"""What the kvstore command exits with."""

from __future__ import annotations

import sys
from typing import NoReturn

EXIT_NOT_HELD = 1
EXIT_USAGE = 2
EXIT_STORE = 3

EXIT_CODES = (
    "Exit codes: 0 done; 1 the demo did not hold; 2 wrong usage or configuration;"
    " 3 the store answered with an error or not at all."
)


def fail(reason: object, status: int) -> NoReturn:
    """Say why on standard error, and end the process with *status*."""
    print(f"kvstore: {reason}", file=sys.stderr)
    raise SystemExit(status)
