"""The manifest of one chunk in Redis: what makes its parts a chunk, and how keys are named.

A manifest is a fixed part, the chunk's index row and an xxh3_64 over both, little-endian.
Every version ends in that checksum, so that a row from the future can be told from damage.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.proto.buffers import checksum
from kvstore.proto.errors import InvalidFrameError, InvalidRequestError
from kvstore.proto.frame import MAX_FRAME_BYTES
from kvstore.proto.types import KEY_BYTES, ChunkInfo, ChunkKey
from kvstore.proto.wire import pack_info, unpack_info

VERSION = 1
WRITE_ID_BYTES = 8
MAX_MANIFEST_BYTES = 4096
"""A chunk of 64 components, the most a frame has, takes 3176."""
MIN_PART_BYTES = 4096
MAX_PART_BYTES = 8 << 20
MAX_PARTS = 1024
"""Frames of 1 GiB, the largest there are, fit parts of 1 MiB."""

_FIXED = struct.Struct("<B3xIIQ8s")
_CHECKSUM = struct.Struct("<Q")
DEFAULT_PREFIX = "kvs:1:"
"""What all names begin with, unless the operator says otherwise."""
_PREFIX = re.compile(r"[A-Za-z0-9:_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of one chunk. ``raw`` is the manifest as it stands in Redis.

    ``write_id`` belongs to one writer, so that parts of different writers never mix;
    ``sealed_us`` is that writer's wall clock, since the epoch, and only orders chunks.
    """

    info: ChunkInfo
    part_bytes: int
    write_id: bytes
    sealed_us: int
    raw: bytes

    @classmethod
    def of(cls, info: ChunkInfo, part_bytes: int, write_id: bytes, sealed_us: int) -> Manifest:
        """Pack a new manifest."""
        parts = -(-info.size_bytes // part_bytes)
        body = _FIXED.pack(VERSION, part_bytes, parts, sealed_us, write_id) + pack_info(info)
        return cls(
            info, part_bytes, write_id, sealed_us, body + _CHECKSUM.pack(checksum(body))
        )  # fmt: skip

    @property
    def parts(self) -> int:
        """How many parts the frame is cut into."""
        return -(-self.info.size_bytes // self.part_bytes)

    def covers(self, offset: int, size_bytes: int) -> bool:
        """Whether the frame has *size_bytes* bytes from *offset*."""
        return 0 <= offset <= self.info.size_bytes - size_bytes

    def cut(self, offset: int, size_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (part, start, stop) for each part that holds some of the bytes asked for."""
        end = offset + size_bytes
        while offset < end:
            part, start = divmod(offset, self.part_bytes)
            stop = min(self.part_bytes, start + end - offset)
            yield part, start, stop
            offset += stop - start


def parse_manifest(raw: bytes, key: ChunkKey) -> Manifest | None:
    """Parse the manifest found under *key*; None when another version wrote it.

    Whatever it says of sizes is checked against limits first. Raises InvalidFrameError.
    """
    least_bytes = _FIXED.size + _CHECKSUM.size
    if not least_bytes <= len(raw) <= MAX_MANIFEST_BYTES:
        raise InvalidFrameError("manifest", len(raw), f"{least_bytes} to {MAX_MANIFEST_BYTES}")
    body = raw[: -_CHECKSUM.size]
    if _CHECKSUM.unpack(raw[-_CHECKSUM.size :]) != (checksum(body),):
        raise InvalidFrameError("manifest", raw[:16], "fails its checksum")
    version, part_bytes, parts, sealed_us, write_id = _FIXED.unpack_from(body)
    if version != VERSION:
        return None
    manifest = Manifest(unpack_info(body[_FIXED.size :]), part_bytes, write_id, sealed_us, raw)
    info = manifest.info
    if info.key != key:
        raise InvalidFrameError("manifest", info.key.hex(), f"stands under {key.hex()}")
    if not 1 <= info.size_bytes <= MAX_FRAME_BYTES:
        raise InvalidFrameError("manifest", info.size_bytes, f"at most {MAX_FRAME_BYTES} bytes")
    if not MIN_PART_BYTES <= part_bytes <= MAX_PART_BYTES:
        raise InvalidFrameError("part_bytes", part_bytes, f"{MIN_PART_BYTES} to {MAX_PART_BYTES}")
    if parts != manifest.parts or parts > MAX_PARTS:
        raise InvalidFrameError("parts", parts, f"contradicts the frame, or exceeds {MAX_PARTS}")
    return manifest


class KeyNames:
    """Redis names of a chunk's manifest and parts, all in the hash slot of its key."""

    def __init__(self, prefix: str) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise InvalidRequestError("prefix", prefix, "use 1 to 64 of A-Z a-z 0-9 : _ . -")
        self._prefix = prefix.encode()
        self.pattern = self._prefix + b"{*}:m"
        """What SCAN matches manifests with."""

    def manifest(self, key: ChunkKey) -> bytes:
        """Return the name of the manifest of *key*."""
        return b"%b{%b}:m" % (self._prefix, key.hex().encode())

    def parts(self, manifest: Manifest) -> list[bytes]:
        """Return the names of the parts of *manifest*, in order."""
        key, write_id = manifest.info.key.hex(), manifest.write_id.hex()
        stem = b"%b{%b}:%b:" % (self._prefix, key.encode(), write_id.encode())
        return [b"%b%d" % (stem, index) for index in range(manifest.parts)]

    def key_of(self, name: bytes) -> ChunkKey | None:
        """Return the key whose manifest is called *name*, None when it is no such name."""
        try:
            key = ChunkKey(bytes.fromhex(name[len(self._prefix) + 1 : -3].decode()))
        except ValueError:
            return None
        return key if len(key) == KEY_BYTES and name == self.manifest(key) else None
