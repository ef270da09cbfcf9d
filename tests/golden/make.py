"""Write the golden frames: ``PYTHONPATH=src:tests python tests/golden/make.py``.

A golden file is written once, when its codec revision is born, and never again: it stands
for the bytes that are out there.
"""

from __future__ import annotations

import sys

import numpy as np
from golden.samples import FOLDER, shard, shard_tensors, template, tensors

from kvstore.codecs.base import codec_by_name
from kvstore.codecs.slices import encode_shard, shard_frame_bytes


def main() -> int:
    """Write each frame that does not exist yet; return how many exist already."""
    kept = 0
    for name in ("raw", "lossless"):
        codec = codec_by_name(name)
        path = FOLDER / f"{name}-r{codec.revision}.frame"
        if path.exists():
            sys.stderr.write(f"{path.name} exists; it is golden, add a new one instead\n")
            kept += 1
            continue
        out = np.empty(codec.max_frame_bytes(template().layout), np.uint8)
        header = codec.encode(template(), tensors(), out)
        path.write_bytes(out[: header.frame_bytes].tobytes())
    return kept + make_shard()


def make_shard() -> int:
    """Write the frame of a rectangle of the chunk, unless it exists."""
    path = FOLDER / "shard-r1.frame"
    if path.exists():
        sys.stderr.write(f"{path.name} exists; it is golden, add a new one instead\n")
        return 1
    out = np.zeros(shard_frame_bytes(shard()), np.uint8)
    encode_shard(template(), shard(), shard_tensors(), out)
    path.write_bytes(out.tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
