"""Write the golden history file: ``PYTHONPATH=src:tests python tests/golden/make_history.py``."""

from __future__ import annotations

import sys

from golden.history_samples import PATH, packed


def main() -> int:
    """Write it unless it exists; return 1 then: it stands for what is out there."""
    if PATH.exists():
        sys.stderr.write("it exists; it is golden, add a new one instead\n")
        return 1
    PATH.write_bytes(packed())
    return 0


if __name__ == "__main__":
    sys.exit(main())
