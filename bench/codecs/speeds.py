"""Speeds of every codec on one core: bytes of decoded bfloat16 a processor second."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
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
from kvstore.proto.errors import UnknownCodecError

ROUNDS = 5
SPEEDS = ("raw", "lossless", "kivi:8", "kivi:4", "kivi:2", "kvq", "cachegen")


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
    runs = list(speeds)
    best = Speed(
        min(s.encode_s for s in runs), min(s.decode_s for s in runs), runs[-1].stored_bytes
    )
    return Measured(name, raw_bytes, best)


def in_rounds(
    raw_bytes: int, sides: dict[str, Callable[[], Speed]], rounds: int = ROUNDS
) -> dict[str, Measured]:
    """Run all *sides* in turns, once to warm up and then *rounds* times."""
    for work in sides.values():
        work()
    runs: dict[str, list[Speed]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, work in sides.items():
            runs[name].append(work())
    return {name: best_of(name, raw_bytes, found) for name, found in runs.items()}


def memcpy_time(bits: Bits) -> Callable[[], Speed]:
    """Return a side that copies *bits* and nothing else."""
    source = np.ascontiguousarray(bits)
    room = np.zeros_like(source)

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

    def ours(self, setting: str) -> Callable[[], Speed] | str:
        """Return a side that runs our codec, or why there is none."""
        window = self.window
        try:
            coder = Coder.of(setting, self.chunks)
            coder.time(window)
        except UnknownCodecError as error:
            return f"not built: {error}"
        return lambda: coder.time(window)


def measure_speeds(report: Report, bench: SpeedBench) -> None:
    """Measure everything on one core."""
    with one_core():
        found = _lossless(report, bench)
        found.update(_lossy(report, bench))
        rest = {name: bench.ours(name) for name in SPEEDS if name not in found}
        sides = {name: side for name, side in rest.items() if not isinstance(side, str)}
        found.update(in_rounds(bench.window.nbytes, sides, bench.rounds))
    for name, measured in found.items():
        report.note(
            f"  speed: {name}", f"{measured.ratio:.2f}",
            f"of the size; {measured}; {measured.decode_gbps / found['memcpy'].decode_gbps:.2f} "
            "of memcpy",
        )  # fmt: skip


def _lossless(report: Report, bench: SpeedBench) -> dict[str, Measured]:
    window = bench.window
    path = bench.folder / "lossless.npy"
    tensors = TensorFile.write(path, np.ascontiguousarray(window.transpose(0, 1, 3, 2, 4)))
    sides: dict[str, Callable[[], Speed]] = {
        "memcpy": memcpy_time(tensors.bits),
        "aibrix zstd": lambda: aibrix_time(tensors.bits),
    }
    if not isinstance(bench.zipnn, str):
        sides["zipnn"] = partial(bench.zipnn.time, tensors)
    ours = bench.ours("lossless")
    if not isinstance(ours, str):
        sides["lossless"] = ours
    found = in_rounds(window.nbytes, sides, bench.rounds)
    keys = ("lossless_encode_vs_zipnn", "lossless_decode_vs_zipnn")
    aibrix = ("lossless_encode_vs_aibrix", "lossless_decode_vs_aibrix")
    if isinstance(ours, str):
        report.skip([*keys, *aibrix], ours)
        return found
    _compare(report, aibrix, found["lossless"], found["aibrix zstd"], (2.0, 2.0))
    if "zipnn" in found:
        _compare(report, keys, found["lossless"], found["zipnn"], (1.0, 0.95))
    else:
        report.skip(keys, str(bench.zipnn))
    return found


def _lossy(report: Report, bench: SpeedBench) -> dict[str, Measured]:
    keys = ("kvq_encode_vs_lmcache_cachegen", "kvq_decode_vs_lmcache_cachegen")
    lmcache, ours = bench.lmcache, bench.ours("kvq")
    sides: dict[str, Callable[[], Speed]] = {}
    if not isinstance(ours, str):
        sides["kvq"] = ours
    if not isinstance(lmcache, str):
        tensors = TensorFile.write(bench.folder / "lossy.npy", bench.chunks.bits[:1])
        bins = Bins.spread("all 32", bench.chunks.bits.shape[1], [(0, 32)], [(0, 32)])
        sides["lmcache cachegen"] = partial(lmcache.time_cachegen, tensors, bins)
    found = in_rounds(bench.window.nbytes, sides, bench.rounds)
    if isinstance(ours, str) or isinstance(lmcache, str):
        report.skip(keys, ours if isinstance(ours, str) else str(lmcache))
    else:
        _compare(report, keys, found["kvq"], found["lmcache cachegen"], (8.0, 15.0))
    return found


def _compare(
    report: Report,
    keys: tuple[str, str],
    ours: Measured,
    theirs: Measured,
    bars: tuple[float, float],
) -> None:
    """Add the ratio of the encodes under the first key, of the decodes under the second."""
    ratios = (ours.encode_gbps / theirs.encode_gbps, ours.decode_gbps / theirs.decode_gbps)
    for key, ratio, bar in zip(keys, ratios, bars, strict=True):
        report.add(key, ratio, str(ours), f"{theirs}, bar {bar:g}")
