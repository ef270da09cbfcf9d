"""Speeds of codecs on one core, in bytes of decoded bfloat16 a processor second."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from bench.codecs.baselines import Baselines, Speed, TensorFile, aibrix_time
from bench.codecs.ours import Chunks, Coder
from bench.lib.report import Report, gbps

ROUNDS = 5
AIBRIX_KEYS = ("lossless_encode_vs_aibrix", "lossless_decode_vs_aibrix")
ZIPNN_KEYS = ("lossless_encode_vs_zipnn", "lossless_decode_vs_zipnn")
CACHEGEN_KEYS = ("kvq_encode_vs_lmcache_cachegen", "kvq_decode_vs_lmcache_cachegen")
BARS = {AIBRIX_KEYS: (2.0, 2.0), ZIPNN_KEYS: (1.0, 0.95), CACHEGEN_KEYS: (8.0, 15.0)}
Side = Callable[[], Speed]


@contextmanager
def one_core() -> Iterator[None]:
    """Pin this thread, and threads it starts, to one core until the block ends."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def in_rounds(sides: dict[str, Side], rounds: int = ROUNDS) -> dict[str, Speed]:
    """Return the best of *rounds* of each side, in turns after one warm-up round."""
    runs = [[work() for work in sides.values()] for _ in range(rounds + 1)][1:]
    best = (Speed(*map(min, zip(*some, strict=True))) for some in zip(*runs, strict=True))
    return dict(zip(sides, best, strict=True))


def measure_speeds(report: Report, chunks: Chunks, baselines: Baselines, rounds: int) -> None:
    """Measure one chunk, in our frames' memory order (heads first), on one core."""
    heads_first = np.ascontiguousarray(chunks.bits[0].transpose(0, 1, 3, 2, 4))
    window = heads_first.transpose(0, 1, 3, 2, 4)
    tensors = TensorFile.write(baselines.folder, heads_first)

    def ours(setting: str) -> Side:
        return partial(Coder(setting, chunks).time, window)

    def compare(keys: tuple[str, str], mine: Speed, theirs: Speed) -> None:
        """Add the ratio of the encodes under the first key, of the decodes under the second."""
        for key, bar, our_s, their_s in zip(keys, BARS[keys], mine, theirs, strict=True):
            against = f"{gbps(window.nbytes, their_s)}, bar {bar:g}"
            report.add(key, their_s / our_s, gbps(window.nbytes, our_s), against)

    with one_core():
        zstd: Side = partial(aibrix_time, tensors.bits)
        sides = {"lossless": ours("lossless"), "zstd": zstd}
        if not isinstance(baselines.zipnn, str):
            sides["zipnn"] = partial(baselines.zipnn, tensors)
        found = in_rounds(sides, rounds)
        compare(AIBRIX_KEYS, found["lossless"], found["zstd"])
        if isinstance(baselines.zipnn, str):
            report.skip(ZIPNN_KEYS, baselines.zipnn)
        else:
            compare(ZIPNN_KEYS, found["lossless"], found["zipnn"])
        if isinstance(baselines.lmcache, str):
            report.skip(CACHEGEN_KEYS, baselines.lmcache)
        else:
            tensors = TensorFile.write(baselines.folder, chunks.bits[:1])
            theirs = partial(baselines.lmcache.time_cachegen, tensors)
            found = in_rounds({"kvq": ours("kvq"), "cachegen": theirs}, rounds)
            compare(CACHEGEN_KEYS, found["kvq"], found["cachegen"])
