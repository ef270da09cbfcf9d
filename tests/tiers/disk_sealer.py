"""A process that seals chunks on a disk tier and says so on stdout, until it is killed.

Usage: disk_sealer.py FOLDER FIRST_SEED (0: seal nothing, only hold the folder)
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from threading import Thread

from contracts.chunks import make_frame

from kvstore.proto.errors import TierFullError
from kvstore.tiers.base import Reservation, Tier
from kvstore.tiers.disk import DiskTier

CAPACITY_BYTES = 2 << 20
EXTENT_BYTES = 1 << 19
INDEX_BYTES = 1 << 20
_THREADS = 3


def tell(line: str) -> None:
    """Write one line in one call: a kill cuts between lines."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def make_room(tier: Tier) -> None:
    """Delete the oldest chunk, saying so before it happens."""
    oldest = next(tier.scan(), None)
    if oldest is not None:
        tell(f"delete {oldest.key.hex()}")
        tier.delete(oldest.key)


def seal_for_ever(tier: Tier, seed: int) -> None:
    """Seal real frames; two of three durably, each told once the seal has returned."""
    while True:
        info, frame = make_frame(seed, tokens=16 + seed % 200)
        reservation: Reservation | None = None
        while reservation is None:
            try:
                reservation = tier.reserve(info)
            except TierFullError:
                make_room(tier)
        tier.write(reservation, 0, frame)
        durable = seed % 3 > 0
        tier.seal(reservation, durable=durable)
        if durable:
            tell(f"sealed {info.key.hex()} {seed}")
        seed += _THREADS


def main() -> None:
    """Own the folder, say so, and work until killed."""
    tier = DiskTier(
        Path(sys.argv[1]), CAPACITY_BYTES, extent_bytes=EXTENT_BYTES, index_bytes=INDEX_BYTES
    )
    tell("ready")
    if first := int(sys.argv[2]):
        for thread in range(_THREADS):
            Thread(target=seal_for_ever, args=(tier, first + thread), daemon=True).start()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
