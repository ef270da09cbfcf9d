"""Write the golden history file: ``PYTHONPATH=src:tests python tests/golden/make_history.py``."""

from __future__ import annotations

import sys

from golden.history_samples import PATH, saved


def main() -> int:
    """Write the file unless it exists; return 1 if it does: it stands for what is out there."""
    if PATH.exists():
        sys.stderr.write(f"{PATH.name} exists; it is golden, add a new one instead\n")
        return 1
    PATH.write_bytes(saved().pack())
    return 0


if __name__ == "__main__":
    sys.exit(main())
