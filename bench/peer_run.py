"""One run of bench.peers: its scratch folders, its report, and ratios of the best of both sides."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
class Best:
    """The shortest seconds of one side by now, and what was measured."""

    words: str
    store_s: float = float("inf")
    load_s: float = float("inf")

    def take(self, store_s: float, load_s: float) -> None:
        """Keep what is shorter."""
        self.store_s = min(self.store_s, store_s)
        self.load_s = min(self.load_s, load_s)


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

    def add_speeds(self, keys: Sequence[str], size_bytes: int, ours: Best, theirs: Best) -> None:
        """Report the load of *size_bytes* under the first key, the store under the second."""
        for key, part in zip(keys, ("load_s", "store_s"), strict=False):
            gbps = [size_bytes / getattr(side, part) / 1e9 for side in (ours, theirs)]
            words = [
                f"{speed:.2f} GB/s, {side.words}"
                for speed, side in zip(gbps, (ours, theirs), strict=True)
            ]
            self.add(key, gbps[0] / gbps[1], *words)

    def attempt(self, keys: Sequence[str], work: Callable[[], None]) -> None:
        """Do *work*; leave *keys* out, saying why, when its peer cannot be had."""
        try:
            work()
        except PeerSkippedError as error:
            self.report.skip(keys, str(error))
