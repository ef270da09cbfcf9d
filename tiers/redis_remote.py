"""Chunks as they stand in Redis: the commands that publish, read, remove and list them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from redis.exceptions import OutOfMemoryError

from kvstore.proto.buffers import Bytes, as_bytes, copy_bytes
from kvstore.proto.errors import InvalidFrameError, TierUnavailableError
from kvstore.proto.types import ChunkKey
from kvstore.tiers.redis_link import Command, RedisLink
from kvstore.tiers.redis_manifest import MAX_MANIFEST_BYTES, KeyNames, Manifest, parse_manifest

PART_SLACK_S = 600
"""Parts outlive their manifest by this much, less the time a writer takes to send them."""
MAX_LOOK_KEYS = 512
"""Keys of one round trip."""
MAX_LISTED_CHUNKS = 1 << 18
"""A listing stops here: further chunks are found by key, and end by their lifetime."""
MAX_REMAINS = 1024
"""Failed writes remembered for clean-up; older ones end by their lifetime."""
SWEEP_WRITES = 64
"""Failed writes cleaned up at one time."""
READ_WINDOW_BYTES = 64 << 20
"""Bytes asked for in one round trip."""

_TAKE = b"""
local held = redis.pcall('GETRANGE', KEYS[1], 0, ARGV[1])
if type(held) == 'table' then held = '' end
if ARGV[2] ~= '' and ARGV[2] ~= held then return false end
if redis.call('UNLINK', KEYS[1]) == 0 then return false end
return held
"""
"""Remove a manifest, if given only that one, and return what it was."""


class RemoteChunks:
    """The chunks of one Redis. Thread-safe. Every method raises TierUnavailableError."""

    def __init__(self, link: RedisLink, names: KeyNames, ttl_s: int) -> None:
        self._link = link
        self._names = names
        self._ttl_s = ttl_s
        self._remains: deque[Manifest] = deque(maxlen=MAX_REMAINS)

    def look(self, keys: Sequence[ChunkKey]) -> list[Manifest | None]:
        """Read the manifests of *keys*, one round trip for MAX_LOOK_KEYS; remove damaged ones."""
        found: list[Manifest | None] = []
        damaged: list[Command] = []
        for start in range(0, len(keys), MAX_LOOK_KEYS):
            window = keys[start : start + MAX_LOOK_KEYS]
            rows = self._link.run([self._peek(key) for key in window])
            for key, row in zip(window, rows, strict=True):
                try:
                    found.append(_parse(row, key))
                except InvalidFrameError:
                    found.append(None)
                    damaged.append(self._take(key, row or b""))
        if damaged:
            with contextlib.suppress(TierUnavailableError):
                self._link.run(damaged)
        return found

    def pull(self, manifest: Manifest, out: Bytes, offset: int) -> bool:
        """Fill *out* from the parts of *manifest*. False when it or a part is not there whole."""
        names = self._names.parts(manifest)
        cuts = list(manifest.cut(offset, len(out)))
        step = max(1, READ_WINDOW_BYTES // manifest.part_bytes)
        done = 0
        for first in range(0, max(1, len(cuts)), step):
            window = cuts[first : first + step]
            parts: list[Command] = [
                (b"GETRANGE", names[part], start, stop - 1) for part, start, stop in window
            ]
            ends = list(accumulate((stop - start for _, start, stop in window), initial=done))
            take = partial(_take_block, manifest.raw, out, ends)
            if not self._link.each([self._peek(manifest.info.key), *parts], take):
                return False
            done = ends[-1]
        return True

    def publish(self, manifest: Manifest, frame: Bytes) -> bool:
        """Send the parts, then the manifest unless its key has one. Return whether it had none.

        When this raises nothing is left behind, or it goes before the next publishing. Raises
        redis' OutOfMemoryError when the server takes no more.
        """
        published = False
        try:
            self._sweep()
            if not self._is_taken(manifest.info.key):
                published = self._send(manifest, frame)
                if not published:
                    self._discard(manifest)
        except OutOfMemoryError:
            self._discard(manifest)
            raise
        except TierUnavailableError:
            self._remains.append(manifest)
            raise
        return published

    def remove(self, key: ChunkKey, raw: bytes = b"") -> Manifest | None:
        """Remove the chunk of *key*, if given only the version whose manifest is *raw*.

        Return what was removed, None when there was nothing a reader could have read.
        """
        (row,) = self._link.run([self._take(key, raw)])
        if row is None:
            return None
        try:
            removed = parse_manifest(row, key)
        except InvalidFrameError:
            return None
        if removed is not None:
            try:
                self._link.run([(b"UNLINK", *self._names.parts(removed))])
            except TierUnavailableError:  # the chunk is gone; only its parts linger
                self._remains.append(removed)
        return removed

    def listing(self) -> dict[ChunkKey, Manifest]:
        """Read all manifests, at most MAX_LISTED_CHUNKS."""
        found: dict[ChunkKey, Manifest] = {}
        cursor = 0
        while True:
            scan: Command = (b"SCAN", cursor, b"MATCH", self._names.pattern, b"COUNT", 1000)
            ((cursor, names),) = self._link.run([scan])
            keys = [key for key in map(self._names.key_of, names) if key is not None]
            rows = self.look(keys)
            found |= {key: row for key, row in zip(keys, rows, strict=True) if row is not None}
            if int(cursor) == 0 or len(found) >= MAX_LISTED_CHUNKS:
                return found

    def _peek(self, key: ChunkKey) -> Command:
        # not GET: what a stranger stored under this name may have 512 MB
        return (b"GETRANGE", self._names.manifest(key), 0, MAX_MANIFEST_BYTES)

    def _take(self, key: ChunkKey, raw: bytes) -> Command:
        return (b"EVAL", _TAKE, 1, self._names.manifest(key), MAX_MANIFEST_BYTES, raw)

    def _is_taken(self, key: ChunkKey) -> bool:
        """Whether somebody's manifest stands under *key*. Removes a damaged one."""
        (row,) = self._link.run([self._peek(key)])
        try:
            _parse(row, key)
        except InvalidFrameError:
            self._link.run([self._take(key, row or b"")])
            return False
        return bool(row != b"")

    def _send(self, manifest: Manifest, frame: Bytes) -> bool:
        view, size, life_s = frame.data, manifest.part_bytes, self._ttl_s + PART_SLACK_S
        self._link.run(
            [
                (b"SET", name, view[at * size : (at + 1) * size], b"EX", life_s)
                for at, name in enumerate(self._names.parts(manifest))
            ]
        )
        # in a round trip of its own: a pipeline runs on after a part that was refused
        name = self._names.manifest(manifest.info.key)
        (first,) = self._link.run([(b"SET", name, manifest.raw, b"EX", self._ttl_s, b"NX")])
        return first is not None

    def _discard(self, manifest: Manifest) -> None:
        """Remove what a lost or refused write left, now or before the next publishing."""
        try:
            self._link.run(self._remove_all(manifest))
        except TierUnavailableError:
            self._remains.append(manifest)

    def _sweep(self) -> None:
        swept: list[Manifest] = []
        with contextlib.suppress(IndexError):
            while len(swept) < SWEEP_WRITES:
                swept.append(self._remains.popleft())
        try:
            self._link.run([command for old in swept for command in self._remove_all(old)])
        except TierUnavailableError:
            self._remains.extend(swept)
            raise

    def _remove_all(self, manifest: Manifest) -> list[Command]:
        take = self._take(manifest.info.key, manifest.raw)
        return [take, (b"UNLINK", *self._names.parts(manifest))]


def _parse(row: Any, key: ChunkKey) -> Manifest | None:
    """Parse a reply to ``_peek``: empty when absent, None when of the wrong type."""
    return None if row == b"" else parse_manifest(row or b"", key)


def _take_block(row: bytes, out: Bytes, ends: Sequence[int], index: int, reply: object) -> bool:
    """Check the manifest, which comes first, or copy the part after it to its place."""
    if index == 0:
        return reply == row
    start, stop = ends[index - 1], ends[index]
    if not isinstance(reply, bytes) or len(reply) != stop - start:
        return False
    copy_bytes(out[start:stop], as_bytes(reply))
    return True
