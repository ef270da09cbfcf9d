"""Damage to what a server's disk tier keeps."""

from __future__ import annotations

from pathlib import Path

from kvstore.proto.buffers import as_bytes
from kvstore.proto.frame import KEY_OFFSET, MAGIC, parse_header
from kvstore.proto.types import ChunkKey


def flip_a_bit(disk: Path, key: ChunkKey) -> None:
    """Change the last bit of the frame of *key* below the disk tier's folder *disk*."""
    for path in (disk / "extents").iterdir():
        data = path.read_bytes()
        start = data.find(MAGIC)
        while start >= 0 and data[start + KEY_OFFSET :][: len(key)] != key:
            start = data.find(MAGIC, start + 1)
        if start >= 0:
            last = start + parse_header(as_bytes(data[start:])).frame_bytes - 1
            with path.open("r+b") as file:
                file.seek(last)
                file.write(bytes([data[last] ^ 1]))
            return
    raise AssertionError(f"no frame of {key.hex()} below {disk}")
