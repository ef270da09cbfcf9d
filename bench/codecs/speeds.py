"""Speeds of every codec on one core: bytes of decoded bfloat16 a processor second."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.codecs.baselines import (
    Bins,
    LMCacheCodecs,
    LosslessCoder,
    Speed,
    TensorFile,
    aibrix_time,
)
from bench.codecs.kv import Bits
from bench.codecs.ours import Chunks, Coder
from bench.lib.report import Report, cpu_s

ROUNDS = 5
SPEEDS = ("raw", "kivi:8", "kivi:4", "kivi:2", "cachegen")
"""Of ours, those that are beside no opponent."""
AIBRIX_KEYS = ("lossless_encode_vs_aibrix", "lossless_decode_vs_aibrix")
ZIPNN_KEYS = ("lossless_encode_vs_zipnn", "lossless_decode_vs_zipnn")
CACHEGEN_KEYS = ("kvq_encode_vs_lmcache_cachegen", "kvq_decode_vs_lmcache_cachegen")
Side = Callable[[], Speed]


@dataclass(frozen=True, slots=True)
class Measured:
    """The best of some rounds of one codec, and the bytes it was given."""

    name: str
    raw_bytes: int
    best: Speed

    @property
    def ratio(self) -> float:
        """Decoded bytes over stored bytes."""
        return self.raw_bytes / self.best.stored_bytes

    @property
    def encode_gbps(self) -> float:
        """GB of decoded bytes encoded a second."""
        return self.raw_bytes / self.best.encode_s / 1e9

    @property
    def decode_gbps(self) -> float:
        """GB of decoded bytes decoded a second."""
        return self.raw_bytes / self.best.decode_s / 1e9

    def __str__(self) -> str:
        return f"{self.name} {self.encode_gbps:.3f} in, {self.decode_gbps:.3f} GB/s out"


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and those it starts, on one core until the block ends."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def best_of(name: str, raw_bytes: int, speeds: Iterable[Speed]) -> Measured:
    """Return the best encode and the best decode of *speeds*."""
    runs = [(one.encode_s, one.decode_s, one.stored_bytes) for one in speeds]
    encodes, decodes, sizes = zip(*runs, strict=True)
    return Measured(name, raw_bytes, Speed(min(encodes), min(decodes), sizes[-1]))


def in_rounds(raw_bytes: int, sides: dict[str, Side], rounds: int = ROUNDS) -> dict[str, Measured]:
    """Run all *sides* in turns, once to warm up and then *rounds* times."""
    runs = [[work() for work in sides.values()] for _ in range(rounds + 1)][1:]
    pairs = zip(sides, zip(*runs, strict=True), strict=True)
    return {name: best_of(name, raw_bytes, found) for name, found in pairs}


def memcpy_time(bits: Bits) -> Side:
    """Return a side that copies *bits* and nothing else."""
    source, room = np.ascontiguousarray(bits), np.zeros(bits.shape, bits.dtype)

    def copy() -> Speed:
        seconds = cpu_s(lambda: np.copyto(room, source))
        return Speed(seconds, seconds, source.nbytes)

    return copy


@dataclass(frozen=True, slots=True)
class SpeedBench:
    """One chunk, heads first in memory as our frames have it, and the opponents it goes to."""

    chunks: Chunks
    folder: Path
    lmcache: LMCacheCodecs | str
    zipnn: LosslessCoder | str
    rounds: int = ROUNDS

    @property
    def window(self) -> Bits:
        """(layers, 2, tokens, kv_heads, head_dim), a view."""
        heads_first = np.ascontiguousarray(self.chunks.bits[0].transpose(0, 1, 3, 2, 4))
        return heads_first.transpose(0, 1, 3, 2, 4)

    def ours(self, setting: str) -> Side:
        """Return a side that runs our codec."""
        return partial(Coder.of(setting, self.chunks).time, self.window)

    def run(self, sides: dict[str, Side]) -> dict[str, Measured]:
        """Run *sides* in turns."""
        return in_rounds(self.window.nbytes, sides, self.rounds)


def measure_speeds(report: Report, bench: SpeedBench) -> None:
    """Measure everything on one core."""
    with one_core():
        found = _lossless(report, bench)
        found |= _lossy(report, bench)
        found |= bench.run({name: bench.ours(name) for name in SPEEDS})
    for name, one in found.items():
        share = one.decode_gbps / found["memcpy"].decode_gbps
        words = f"of the size; {one}; {share:.2f} of memcpy"
        report.note(f"  speed: {name}", f"{one.ratio:.2f}", words)


def _lossless(report: Report, bench: SpeedBench) -> dict[str, Measured]:
    heads_first = np.ascontiguousarray(bench.window.transpose(0, 1, 3, 2, 4))
    tensors = TensorFile.write(bench.folder / "lossless.npy", heads_first)
    sides: dict[str, Side] = {
        "memcpy": memcpy_time(tensors.bits),
        "aibrix zstd": lambda: aibrix_time(tensors.bits),
        "lossless": bench.ours("lossless"),
    }
    if not isinstance(bench.zipnn, str):
        sides["zipnn"] = partial(bench.zipnn.time, tensors)
    found = bench.run(sides)
    _compare(report, AIBRIX_KEYS, (found["lossless"], found["aibrix zstd"]), (2.0, 2.0))
    if "zipnn" in found:
        _compare(report, ZIPNN_KEYS, (found["lossless"], found["zipnn"]), (1.0, 0.95))
    else:
        report.skip(ZIPNN_KEYS, str(bench.zipnn))
    return found


def _lossy(report: Report, bench: SpeedBench) -> dict[str, Measured]:
    sides = {"kvq": bench.ours("kvq")}
    if isinstance(bench.lmcache, str):
        report.skip(CACHEGEN_KEYS, bench.lmcache)
        return bench.run(sides)
    tensors = TensorFile.write(bench.folder / "lossy.npy", bench.chunks.bits[:1])
    bins = Bins.spread("all 32", bench.chunks.bits.shape[1], [(0, 32)], [(0, 32)])
    sides["lmcache cachegen"] = partial(bench.lmcache.time_cachegen, tensors, bins)
    found = bench.run(sides)
    _compare(report, CACHEGEN_KEYS, (found["kvq"], found["lmcache cachegen"]), (8.0, 15.0))
    return found


def _compare(
    report: Report, keys: Sequence[str], sides: tuple[Measured, Measured], bars: tuple[float, float]
) -> None:
    """Add the ratio of the encodes under the first key, of the decodes under the second."""
    ours, theirs = sides
    ratios = (ours.encode_gbps / theirs.encode_gbps, ours.decode_gbps / theirs.decode_gbps)
    for key, ratio, bar in zip(keys, ratios, bars, strict=True):
        report.add(key, ratio, str(ours), f"{theirs}, bar {bar:g}")
