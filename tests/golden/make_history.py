"""Write the golden history file: ``PYTHONPATH=src:tests python tests/golden/make_history.py``."""

from __future__ import annotations

import sys

from golden.history_samples import PATH, PATH_V2, saved, with_spaces

FILES = ((PATH, saved()), (PATH_V2, with_spaces()))


def main() -> int:
    """Write those that do not exist; return 1 if all do: they stand for what is out there."""
    made = [(path, one) for path, one in FILES if not path.exists()]
    for path, one in made:
        path.write_bytes(one.pack())
    if not made:
        sys.stderr.write("they exist; they are golden, add a new one instead\n")
    return 0 if made else 1


if __name__ == "__main__":
    sys.exit(main())
