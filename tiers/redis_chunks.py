"""Chunks in Redis: parts, the manifest that makes them a chunk, and their names.

A manifest is a fixed part, the chunk's index row and an xxh3_64 over both, little-endian.
Every version ends in that checksum, which distinguishes newer versions from damage.
"""

from __future__ import annotations

import contextlib
import re
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from redis.exceptions import OutOfMemoryError

from kvstore.proto.buffers import Bytes, checksum
from kvstore.proto.errors import InvalidFrameError, TierUnavailableError
from kvstore.proto.frame import MAX_FRAME_BYTES
from kvstore.proto.messages import pack_info, unpack_info
from kvstore.proto.types import KEY_BYTES, ChunkInfo, ChunkKey
from kvstore.tiers.redis_client import MAX_LISTING_BYTES, Call, RedisClient
from kvstore.tiers.redis_connection import SLICE_BYTES, Command, Server, Step, encode

VERSION = 1
WRITE_ID_BYTES = 8
MAX_MANIFEST_BYTES = 4096
"""A frame's maximum of 64 components takes 3176."""
MIN_PART_BYTES = 4096
MAX_PART_BYTES = 8 << 20
MAX_PARTS = 1024
"""The largest frames, of 1 GiB, fit parts of 1 MiB."""

_FIXED = struct.Struct("<B3xIIQ8s")
_CHECKSUM = struct.Struct("<Q")

PART_SLACK_S = 600
"""Parts outlive their manifest by this much, minus the time to send them."""
MAX_LOOK_KEYS = 512
"""Keys of one round trip."""
MAX_LISTED_CHUNKS = 1 << 18
"""Limit of a listing: further chunks are found by key, and expire."""
LIST_S = 30.0
"""Time limit of a listing: other keys may be many, and a faulty server may never end it."""
MAX_REMAINS = 1024
"""Failed writes kept for clean-up; older ones expire."""
SWEEP_WRITES = 64
"""Failed writes cleaned up at a time."""
_DELETE = b"""
local held = redis.pcall('GETRANGE', KEYS[1], 0, ARGV[1])
if type(held) == 'table' then held = '' end
if ARGV[2] ~= '' and ARGV[2] ~= held then return false end
if redis.call('UNLINK', KEYS[1]) == 0 then return false end
return held
"""
"""Deletes and returns a manifest; with a third argument only if it equals that."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of one chunk, of the writer with this ``write_id``. ``sealed_us`` is the writer's
    wall clock, and only orders chunks. ``raw`` is the manifest's bytes in Redis.
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
        return cls(info, part_bytes, write_id, sealed_us, body + _CHECKSUM.pack(checksum(body)))

    @property
    def parts(self) -> int:
        """Number of parts of the frame."""
        return -(-self.info.size_bytes // self.part_bytes)

    def cut(self, offset: int, size_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (part, start, stop) for each slice of a part with some of those bytes."""
        end = offset + size_bytes
        while offset < end:
            part, start = divmod(offset, self.part_bytes)
            stop = min(self.part_bytes, start + min(SLICE_BYTES, end - offset))
            yield part, start, stop
            offset += stop - start


def parse_manifest(raw: bytes, key: ChunkKey) -> Manifest | None:
    """Parse the manifest stored for *key*; None for one of another version. All sizes are checked
    against limits. Raises InvalidFrameError.
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
        raise InvalidFrameError("manifest", info.key.hex(), f"is stored as {key.hex()}")
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
        self._prefix = prefix.encode()
        self.pattern = self._prefix + b"{*}:m"
        """SCAN's pattern for manifests."""
        self._name = re.compile(
            rb"%b\{([0-9a-f]{%d})\}:m" % (re.escape(self._prefix), 2 * KEY_BYTES)
        )

    def manifest(self, key: ChunkKey) -> bytes:
        """Return the name of the manifest of *key*."""
        return b"%b{%b}:m" % (self._prefix, key.hex().encode())

    def parts(self, manifest: Manifest) -> list[bytes]:
        """Return the names of the parts of *manifest*, in order."""
        key, write_id = manifest.info.key.hex(), manifest.write_id.hex()
        stem = b"%b{%b}:%b:" % (self._prefix, key.encode(), write_id.encode())
        return [b"%b%d" % (stem, index) for index in range(manifest.parts)]

    def key_of(self, name: object) -> ChunkKey | None:
        """Return the key whose manifest is called *name*; None for other names."""
        match = self._name.fullmatch(name) if isinstance(name, bytes) else None
        return ChunkKey(bytes.fromhex(match[1].decode())) if match else None


class RedisChunks:
    """The chunks of one Redis. Thread-safe. Every method raises TierUnavailableError."""

    def __init__(self, client: RedisClient, names: KeyNames, ttl_s: int) -> None:
        self._client = client
        self._names = names
        self._ttl_s = ttl_s
        self._remains: deque[Manifest] = deque(maxlen=MAX_REMAINS)

    def stat(self, keys: Sequence[ChunkKey]) -> list[Manifest | TierUnavailableError | None]:
        """Read the manifests of *keys*, one round trip for MAX_LOOK_KEYS; remove damaged ones."""
        found: list[Manifest | TierUnavailableError | None] = []
        damaged: list[Call] = []
        for start in range(0, len(keys), MAX_LOOK_KEYS):
            window = keys[start : start + MAX_LOOK_KEYS]
            # not GET: another program's value of this name may have 512 MB
            names = [self._names.manifest(key) for key in window]
            calls = [(name, (b"GETRANGE", name, 0, MAX_MANIFEST_BYTES)) for name in names]
            rows = self._client.execute(calls)
            for key, row in zip(window, rows, strict=True):
                if isinstance(row, TierUnavailableError) or row == b"":
                    found.append(row or None)
                    continue
                raw = row if isinstance(row, bytes) else b""  # another type of value is damage
                try:
                    found.append(parse_manifest(raw, key))
                except InvalidFrameError:
                    found.append(None)
                    damaged.append(self._delete_manifest(key, raw))
        if damaged:
            with contextlib.suppress(TierUnavailableError):
                self._client.execute(damaged)
        return found

    def read(
        self, manifest: Manifest, out: Bytes, offset: int, arrived: Callable[[int], object] = bool
    ) -> bool:
        """Compare *manifest*, then fill *out* from its parts. False when any is missing or short. A
        read from the chunk's start renews its TTL. *arrived*: see RedisClient.transfer.
        """
        name = self._names.manifest(manifest.info.key)
        peek = (b"GETRANGE", name, 0, MAX_MANIFEST_BYTES)
        expected = b"$%d\r\n%b\r\n" % (len(manifest.raw), manifest.raw)
        steps: list[Step] = [(encode(*peek), expected, 0)]
        parts = self._names.parts(manifest)
        for part, start, stop in manifest.cut(offset, len(out)):
            request = encode(b"GETRANGE", parts[part], start, stop - 1)
            steps.append((request, b"$%d\r\n" % (stop - start), stop - start))
        if offset == 0:
            # the manifest last: it must not outlive its parts
            lives = [*((part, self._ttl_s + PART_SLACK_S) for part in parts), (name, self._ttl_s)]
            expire = b"".join(encode(b"EXPIRE", *life) for life in lives)
            steps.append((expire, b":1\r\n" * len(lives), 0))
        return self._client.transfer(name, steps, out.data, arrived)

    def write(self, manifest: Manifest, frame: Bytes) -> bool:
        """Send the parts, then the manifest unless its key has one; return whether it had none. If
        this raises, the remains are removed before the next write. Raises redis' OutOfMemoryError
        when the server is out of memory.
        """
        name, view, size = self._names.manifest(manifest.info.key), frame.data, manifest.part_bytes
        life_s = self._ttl_s + PART_SLACK_S
        try:
            self._sweep()
            (found,) = self.stat([manifest.info.key])
            if isinstance(found, TierUnavailableError):
                raise found
            if found is not None:
                return False
            parts: list[Command] = [
                (b"SET", part, view[at * size : (at + 1) * size], b"EX", life_s)
                for at, part in enumerate(self._names.parts(manifest))
            ]
            self._client.run(name, parts)
            # in a separate round trip: a pipeline continues after a refused part
            seal = (b"SET", name, manifest.raw, b"EX", self._ttl_s, b"NX")
            if self._client.run(name, [seal]) != [None]:
                return True
            self._discard(manifest)
        except OutOfMemoryError:
            self._discard(manifest)
            raise
        except TierUnavailableError:
            self._remains.append(manifest)
            raise
        return False

    def delete(self, key: ChunkKey, raw: bytes = b"") -> Manifest | None:
        """Remove the chunk of *key*, or only its version with the manifest *raw*. Return the
        manifest; None when there was no readable one.
        """
        name, command = self._delete_manifest(key, raw)
        (row,) = self._client.run(name, [command])
        removed = None
        with contextlib.suppress(InvalidFrameError):
            removed = parse_manifest(row, key) if isinstance(row, bytes) else None
        if removed is not None:
            try:
                self._client.run(name, [(b"UNLINK", *self._names.parts(removed))])
            except TierUnavailableError:  # the chunk is gone; only its parts remain
                self._remains.append(removed)
        return removed

    def scan(self) -> tuple[dict[ChunkKey, Manifest], bool]:
        """Return all manifests, at most MAX_LISTED_CHUNKS, and whether the listing is complete."""
        found: dict[ChunkKey, Manifest] = {}
        whole, until = True, time.monotonic() + LIST_S
        for master in self._client.masters():
            try:
                whole &= self._list_on(master, found, until)
            except TierUnavailableError as error:
                if not error.is_partial:
                    raise
                whole = False
        return found, whole

    def _list_on(self, master: Server, found: dict[ChunkKey, Manifest], until: float) -> bool:
        cursor, whole = b"0", True
        while len(found) < MAX_LISTED_CHUNKS and time.monotonic() < until:
            scan: Command = (b"SCAN", cursor, b"MATCH", self._names.pattern, b"COUNT", 1000)
            match self._client.run(master, [scan], MAX_LISTING_BYTES):
                case [[bytes(cursor), list(names)]]:
                    keys = [key for key in map(self._names.key_of, names) if key is not None]
                case _:
                    return False
            for key, row in zip(keys, self.stat(keys), strict=True):
                if isinstance(row, Manifest):
                    found[key] = row
                whole &= not isinstance(row, TierUnavailableError)
            if cursor == b"0":
                return whole
        return False

    def _delete_manifest(self, key: ChunkKey, raw: bytes) -> Call:
        name = self._names.manifest(key)
        return name, (b"EVAL", _DELETE, 1, name, MAX_MANIFEST_BYTES, raw)

    def _discard(self, manifest: Manifest) -> None:
        """Remove the remains of a lost or refused write, now or before the next one."""
        self._remains.append(manifest)
        with contextlib.suppress(TierUnavailableError):
            self._sweep()

    def _sweep(self) -> None:
        swept: list[Manifest] = []
        with contextlib.suppress(IndexError):
            while len(swept) < SWEEP_WRITES:
                swept.append(self._remains.popleft())
        calls: list[Call] = []
        for old in swept:
            name, command = self._delete_manifest(old.info.key, old.raw)
            calls += [(name, command), (name, (b"UNLINK", *self._names.parts(old)))]
        try:
            replies = self._client.execute(calls)
        except TierUnavailableError:
            self._remains.extend(swept)
            raise
        failed = {at // 2 for at, r in enumerate(replies) if isinstance(r, TierUnavailableError)}
        self._remains.extend(swept[at] for at in failed)
