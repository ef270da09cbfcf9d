"""ZipNN on a tensor in a file; runs by path in ZipNN's environment.

Each input line is the path of an ``.npy`` file of uint16; each reply is a line of JSON with the
processor seconds of one encode and one decode on one core.
"""

from __future__ import annotations

import json
import os
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np


def measure(coder: Any, path: Path) -> dict[str, float]:
    """Encode and decode the bytes of one file. Raises ValueError if they differ."""
    data = np.load(path, allow_pickle=False).tobytes()
    buffer = bytearray(data)  # ZipNN overwrites its input
    started = time.process_time()
    stored = coder.compress(buffer)
    encoded = time.process_time()
    found = coder.decompress(stored)
    decoded = time.process_time()
    if bytes(found) != data:
        raise ValueError(f"{path}: wrong bytes")
    return {
        "digest": int.from_bytes(sha256(data).digest()[:6], "big"),
        "encode_s": encoded - started,
        "decode_s": decoded - encoded,
    }


def main() -> None:
    from zipnn import ZipNN  # type: ignore[import-not-found]

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    coder = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)  # as in its README
    print(json.dumps({"ready": 1}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(coder, Path(line.strip()))), flush=True)


if __name__ == "__main__":
    main()
