"""``python sanitized_tests.py LIBRARY PATH TEST...``: tests on another build of the loops."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvstore.proto import native

if __name__ == "__main__":
    library, path, *tests = sys.argv[1:]
    native.LIBRARY = Path(library)
    native.PATHS = {path: native.PATHS[path]}
    sys.exit(pytest.main(["-qs", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]))
