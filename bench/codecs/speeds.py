"""Speeds of every codec on one core: bytes of decoded bfloat16 a processor second."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.codecs.baselines import LMCacheCodecs, Speed, TensorFile, aibrix_time, bins_of
from bench.codecs.kv import Bits
from bench.codecs.ours import Chunks, Coder
from bench.lib.report import Report, gbps

ROUNDS = 5
AIBRIX_KEYS = ("lossless_encode_vs_aibrix", "lossless_decode_vs_aibrix")
ZIPNN_KEYS = ("lossless_encode_vs_zipnn", "lossless_decode_vs_zipnn")
CACHEGEN_KEYS = ("kvq_encode_vs_lmcache_cachegen", "kvq_decode_vs_lmcache_cachegen")
Side = Callable[[], Speed]


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and those it starts, on one core until the block ends."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def in_rounds(sides: dict[str, Side], rounds: int = ROUNDS) -> dict[str, Speed]:
    """Return the best of *rounds* of each side, run in turns and once to warm up."""
    runs = [[work() for work in sides.values()] for _ in range(rounds + 1)][1:]
    best = (Speed(*map(min, zip(*some, strict=True))) for some in zip(*runs, strict=True))
    return dict(zip(sides, best, strict=True))


@dataclass(frozen=True, slots=True)
class SpeedBench:
    """One chunk, heads first in memory as our frames have it, and the opponents it goes to."""

    chunks: Chunks
    folder: Path
    lmcache: LMCacheCodecs | str
    zipnn: Callable[[TensorFile], Speed] | str
    rounds: int = ROUNDS

    @property
    def window(self) -> Bits:
        """(layers, 2, tokens, kv_heads, head_dim), a view."""
        heads_first = np.ascontiguousarray(self.chunks.bits[0].transpose(0, 1, 3, 2, 4))
        return heads_first.transpose(0, 1, 3, 2, 4)

    def ours(self, setting: str) -> Side:
        return partial(Coder.of(setting, self.chunks).time, self.window)


def measure_speeds(report: Report, bench: SpeedBench) -> None:
    """Measure everything on one core."""
    with one_core():
        _lossless(report, bench)
        _lossy(report, bench)


def _lossless(report: Report, bench: SpeedBench) -> None:
    size = bench.window.nbytes
    heads_first = np.ascontiguousarray(bench.window.transpose(0, 1, 3, 2, 4))
    tensors = TensorFile.write(bench.folder / "lossless.npy", heads_first)
    sides = {"lossless": bench.ours("lossless"), "zstd": lambda: aibrix_time(tensors.bits)}
    if not isinstance(bench.zipnn, str):
        sides["zipnn"] = partial(bench.zipnn, tensors)
    found = in_rounds(sides, bench.rounds)
    _compare(report, AIBRIX_KEYS, size, found["lossless"], found["zstd"], (2.0, 2.0))
    if isinstance(bench.zipnn, str):
        report.skip(ZIPNN_KEYS, bench.zipnn)
    else:
        _compare(report, ZIPNN_KEYS, size, found["lossless"], found["zipnn"], (1.0, 0.95))


def _lossy(report: Report, bench: SpeedBench) -> None:
    if isinstance(bench.lmcache, str):
        report.skip(CACHEGEN_KEYS, bench.lmcache)
        return
    tensors = TensorFile.write(bench.folder / "lossy.npy", bench.chunks.bits[:1])
    bins = bins_of(bench.chunks.bits.shape[1], [(0, 32)], [(0, 32)])
    theirs = partial(bench.lmcache.time_cachegen, tensors, bins)
    found = in_rounds({"kvq": bench.ours("kvq"), "cachegen": theirs}, bench.rounds)
    _compare(
        report, CACHEGEN_KEYS, bench.window.nbytes, found["kvq"], found["cachegen"], (8.0, 15.0)
    )


def _compare(
    report: Report, keys: Sequence[str], size: int, ours: Speed, theirs: Speed,
    bars: tuple[float, float],
) -> None:  # fmt: skip
    """Add the ratio of the encodes under the first key, of the decodes under the second."""
    pairs = ((ours.encode_s, theirs.encode_s), (ours.decode_s, theirs.decode_s))
    for key, (our_s, their_s), bar in zip(keys, pairs, bars, strict=True):
        words = (gbps(size, one) for one in (our_s, their_s))
        report.add(key, their_s / our_s, next(words), f"{next(words)}, bar {bar:g}")
