"""Damage to frames on a server's disk tier, and to frame headers."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.proto.buffers import Bytes, as_bytes, checksum
from kvstore.proto.frame import KEY_OFFSET, MAGIC, parse_header
from kvstore.proto.types import KEY_BYTES, ChunkKey


def frames_in(path: Path) -> dict[ChunkKey, tuple[int, int]]:
    """Return the offset and size of each frame of an extent, by key."""
    data, found = path.read_bytes(), {}
    start = data.find(MAGIC)
    while start >= 0:
        key = ChunkKey(data[start + KEY_OFFSET :][:KEY_BYTES])
        found[key] = (start, parse_header(as_bytes(data[start:])).frame_bytes)
        start = data.find(MAGIC, start + 1)
    return found


def flip_a_bit(disk: Path, key: ChunkKey) -> None:
    """Change the last bit of the frame of *key* below the disk tier's folder *disk*."""
    for path in (disk / "extents").iterdir():
        if place := frames_in(path).get(key):
            with path.open("r+b") as file:
                file.seek(sum(place) - 1)
                (last,) = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([last ^ 1]))
            return
    raise AssertionError(f"no frame of {key.hex()} below {disk}")


def resigned(frame: Bytes, edits: dict[int, bytes]) -> Bytes:
    """Return *frame* with bytes of its header replaced and a correct header checksum."""
    out = frame.copy()
    for at, data in edits.items():
        out[at : at + len(data)] = as_bytes(data)
    size = min(int.from_bytes(out[8:12].tobytes(), "little"), len(out))
    out[184:192] = 0
    out[184:192] = as_bytes(checksum(out[:size]).to_bytes(8, "little"))
    return out
