"""One run of bench.peers: its scratch folders, its report, and the ratios of both sides."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.peer_process import PeerSkippedError
from bench.report import Report

BARS = {
    "disk_load_vs_lmcache_fs_native": 1.5,
    "disk_store_vs_lmcache_fs_native": 1.0,
    "redis_load_vs_lmcache_resp": 1.0,
    "retrieve_vs_lmcache_shm": 1.5,
    "store_vs_lmcache_shm": 1.0,
    "retrieve_vs_mooncake_tcp": 1.5,
    "store_vs_mooncake_tcp": 1.5,
    "readable_under_writes": 1.0,
}
"""What each has to reach; burst_lost has to be 0."""


@dataclass(slots=True)
class Side:
    """The seconds of each store and load of one side, and what was measured.

    The median counts: where a new file's pages come from makes one and the same store ten
    times as fast as another, so that the best of few says little.
    """

    words: str
    store_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)

    def take(self, store_s: float, load_s: float) -> None:
        """Add a round."""
        self.store_s.append(store_s)
        self.load_s.append(load_s)

    def extend(self, store_s: Sequence[float], load_s: Sequence[float]) -> None:
        """Add the rounds of a peer's own run."""
        self.store_s += store_s
        self.load_s += load_s


@dataclass(frozen=True, slots=True)
class Run:
    """Where files go, and what is reported."""

    folder: Path
    report: Report

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """Make an empty folder and remove it with all that is in it."""
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def add(self, key: str, value: float, ours: str, theirs: str) -> None:
        """Report a ratio with what it is made of, and its bar where it has one."""
        bar = f", bar {BARS[key]:g}" if key in BARS else ""
        self.report.add(key, value, f"ours {ours}", f"theirs {theirs}{bar}")

    def add_speeds(self, keys: Sequence[str], size_bytes: int, ours: Side, theirs: Side) -> None:
        """Report the load of *size_bytes* under the first key, the store under the second."""
        pairs = [(ours.load_s, theirs.load_s), (ours.store_s, theirs.store_s)]
        for key, (mine, other) in zip(keys, pairs, strict=False):
            words = [
                f"{size_bytes / median(seconds) / 1e9:.2f} GB/s "
                f"(best {size_bytes / min(seconds) / 1e9:.2f}), {side.words}"
                for seconds, side in ((mine, ours), (other, theirs))
            ]
            self.add(key, median(other) / median(mine), *words)

    def attempt(self, keys: Sequence[str], work: Callable[[], None]) -> None:
        """Do *work*; leave *keys* out, saying why, when its peer cannot be had."""
        try:
            work()
        except PeerSkippedError as error:
            self.report.skip(keys, str(error))
