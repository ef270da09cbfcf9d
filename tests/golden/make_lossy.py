"""Write the golden frames and assets: ``PYTHONPATH=src:tests python tests/golden/make_lossy.py``.

Written once, when the revision is born, and never again.
"""

from __future__ import annotations

import sys

import numpy as np
from golden.lossy_samples import ASSET_FILES, codecs, template, tensors
from golden.samples import FOLDER


def main() -> int:
    """Write each file that does not exist yet; return how many exist already."""
    files = {name: make() for name, make in ASSET_FILES.items()}
    for name, codec in codecs():
        out = np.empty(codec.max_frame_bytes(template().layout), np.uint8)
        header = codec.encode(template(), tensors(), out)
        files[name] = out[: header.frame_bytes].tobytes()
    kept = 0
    for name, data in files.items():
        path = FOLDER / name
        if path.exists():
            sys.stderr.write(f"{name} exists; it is golden, add a new one instead\n")
            kept += 1
        else:
            path.write_bytes(data)
    return kept


if __name__ == "__main__":
    sys.exit(main())
