"""A process that seals chunks on a disk tier and reports each, until it is killed.

As a program: disk_process.py FOLDER FIRST_SEED (0: seal nothing, only hold the folder).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from contracts.chunks import make_frame
from contracts.shelf import get

from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError, TierFullError
from kvstore.proto.frame import check_frame
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.tiers.base import Reservation
from kvstore.tiers.disk import DiskTier

EXTENT_BYTES = 1 << 20
INDEX_BYTES = 1 << 20
SEALER_BYTES = 2 << 20
"""Capacity of the tier that the process works on."""
_THREADS = 3


def open_disk(
    path: Path, capacity_bytes: int = 4 << 20, index_bytes: int = INDEX_BYTES
) -> DiskTier:
    """Open a tier with a stopped clock: it commits only on request."""
    folder = (path, capacity_bytes)
    return DiskTier(folder, file_bytes=EXTENT_BYTES, index_bytes=index_bytes, clock=lambda: 0.0)


def record(owed: dict[str, int], line: str) -> int:
    """Record a line of the sealer in *owed*; return how many chunks it reported as durable."""
    verb, key, *seed = line.split()
    if verb == "sealed":
        owed[key] = int(seed[0])
        return 1
    owed.pop(key, None)
    return 0


def is_whole(tier: DiskTier, info: ChunkInfo) -> bool:
    """Whether the stored frame is intact."""
    found = get(tier, info)
    assert found is not None
    try:
        check_frame(found, info.key)
    except (ChunkCorruptError, InvalidFrameError):
        return False
    return True


@contextmanager
def sealer(path: Path, first_seed: int) -> Iterator[subprocess.Popen[str]]:
    """Run this file on *path* until it owns the folder; kill it with SIGKILL at the end."""
    child = subprocess.Popen(
        [sys.executable, __file__, str(path), str(first_seed)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    with child.stdout:
        try:
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()
            child.wait()


def report(line: str) -> None:
    """Write one line in one call: a kill cuts between lines."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


class Sealer:
    """Seals frames for ever, five of seven durably, and deletes the oldest to make space."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self._unreported: set[ChunkKey] = set()
        """Perhaps sealed but not reported: these must not be deleted yet."""

    def run(self, seed: int) -> None:
        """Put every third seed from *seed* on; report durable ones after the seal."""
        while True:
            info, frame = make_frame(seed, tokens=16 + seed % 200)
            reservation: Reservation | None = None
            while reservation is None:
                try:
                    reservation = self._tier.reserve(info)
                except TierFullError:
                    self._make_space()
            self._tier.write(reservation, frame)
            self._unreported.add(info.key)
            durable = seed % 7 > 1
            self._tier.seal(reservation, durable=durable)
            if durable:
                report(f"sealed {info.key.hex()} {seed}")
            self._unreported.discard(info.key)
            seed += _THREADS

    def _make_space(self) -> None:
        reported = (info.key for info in self._tier.scan() if info.key not in self._unreported)
        if oldest := next(reported, None):
            report(f"delete {oldest.hex()}")
            self._tier.delete(oldest)


def main() -> None:
    """Open the folder, print "ready", and run until killed."""
    folder = (Path(sys.argv[1]), SEALER_BYTES)
    tier = DiskTier(folder, file_bytes=EXTENT_BYTES, index_bytes=INDEX_BYTES)
    report("ready")
    if first := int(sys.argv[2]):
        work = Sealer(tier)
        for thread in range(_THREADS):
            Thread(target=work.run, args=(first + thread,), daemon=True).start()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
