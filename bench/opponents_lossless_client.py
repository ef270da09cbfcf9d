"""ZipNN or Blosc2 on a tensor in a file; runs with the peer's own interpreter, by path.

``opponents_lossless_client.py zipnn``; each line of its input is the path of an ``.npy`` file
of uint16, each answer a line of JSON: bytes stored, and the processor seconds of one encode and
one decode on one core.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np

Coder = tuple[Callable[[bytearray], bytes], Callable[[bytes], bytes]]


def zipnn_coder() -> Coder:
    """Return ZipNN as its README has it for bfloat16, on one thread."""
    from zipnn import ZipNN  # type: ignore[import-not-found]

    coder = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    return coder.compress, coder.decompress


def blosc2_coder() -> Coder:
    """Return Blosc2 with byte shuffle and zstd, its best here, on one thread."""
    import blosc2  # type: ignore[import-not-found]

    settings = {
        "codec": blosc2.Codec.ZSTD, "clevel": 1, "typesize": 2,
        "filters": [blosc2.Filter.SHUFFLE], "nthreads": 1,
    }  # fmt: skip
    blosc2.set_nthreads(1)
    return lambda data: blosc2.compress2(data, **settings), blosc2.decompress2


CODERS = {"zipnn": zipnn_coder, "blosc2": blosc2_coder}


def measure(coder: Coder, path: Path) -> dict[str, float]:
    """Encode and decode the bytes of one file. Raises ValueError when they do not come back."""
    data = np.load(path, allow_pickle=False).tobytes()
    encode, decode = coder
    room = bytearray(data)  # ZipNN works in the buffer it is given
    started = time.process_time()
    stored = encode(room)
    encoded = time.process_time()
    found = decode(stored)
    decoded = time.process_time()
    if bytes(found) != data:
        raise ValueError(f"{path}: came back changed")
    return {
        "digest": int.from_bytes(sha256(data).digest()[:6], "big"),
        "stored_bytes": len(stored),
        "encode_s": encoded - started,
        "decode_s": decoded - encoded,
    }


def main(name: str) -> None:
    """Answer until the input ends, on one core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    coder = CODERS[name]()
    print(json.dumps({"ready": 1}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(coder, Path(line.strip()))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
