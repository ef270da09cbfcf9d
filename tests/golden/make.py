"""Write the golden files: ``PYTHONPATH=src:tests python tests/golden/make.py``.

A golden file is written once, when its codec's revision or its version is born, and never again:
it stands for the bytes that are out there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from golden import history_samples, kvq_samples, lossy_samples, samples
from golden.samples import FOLDER

from kvstore.codecs.base import Codec, EncodeTerms, Part, codec_by_name
from kvstore.codecs.slices import encode_shard, shard_frame_bytes
from kvstore.proto.frame import FrameTemplate


def frame_of(
    codec: Codec, made: tuple[FrameTemplate, list[list[list[Part]]]], terms: EncodeTerms | None
) -> bytes:
    """Return the frame of a template and tensors."""
    out = np.empty(codec.max_frame_bytes(made[0].layout), np.uint8)
    return out[: codec.encode(*made, out, terms).frame_bytes].tobytes()


def shard_frame() -> bytes:
    """Return the frame of a rectangle of the chunk."""
    out = np.zeros(shard_frame_bytes(samples.shard()), np.uint8)
    encode_shard(samples.template(), samples.shard(), samples.shard_tensors(), out)
    return out.tobytes()


def files() -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield the name of each file and what makes it."""
    for codec in map(codec_by_name, ("raw", "lossless")):
        made = (samples.template(), samples.tensors())
        yield f"{codec.name}-r{codec.revision}.frame", partial(frame_of, codec, made, None)
    yield "shard-r1.frame", shard_frame
    yield history_samples.PATH.name, history_samples.packed
    yield from lossy_samples.ASSET_FILES.items()
    for name, lossy in lossy_samples.codecs():
        made = (lossy_samples.template(), lossy_samples.tensors())
        yield name, partial(frame_of, lossy, made, None)
    for name, (kvq, terms) in kvq_samples.codecs().items():
        made = (kvq_samples.template(name), kvq_samples.tensors())
        yield f"{name}.frame", partial(frame_of, kvq, made, terms)


def main() -> int:
    """Write each file that does not exist yet; return how many exist already."""
    kept = 0
    for name, make in files():
        if (FOLDER / name).exists():
            sys.stderr.write(f"{name} exists; it is golden, add a new one instead\n")
            kept += 1
        else:
            (FOLDER / name).write_bytes(make())
    return kept


if __name__ == "__main__":
    sys.exit(main())
