"""Chunks as they stand in Redis: the commands that publish, read, remove and list them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import OutOfMemoryError

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidFrameError, TierUnavailableError
from kvstore.proto.types import ChunkKey
from kvstore.tiers.redis_fill import FILL_WINDOW, SLICE_BYTES, Fill, Step, slice_steps
from kvstore.tiers.redis_lines import Lines
from kvstore.tiers.redis_link import Call, Lost, RedisLink
from kvstore.tiers.redis_manifest import MAX_MANIFEST_BYTES, KeyNames, Manifest, parse_manifest
from kvstore.tiers.redis_wire import Command, pack, pack_words

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

    def look(self, keys: Sequence[ChunkKey]) -> list[Manifest | Lost | None]:
        """Read the manifests of *keys*, one round trip for MAX_LOOK_KEYS; remove damaged ones."""
        found: list[Manifest | Lost | None] = []
        damaged: list[Call] = []
        for start in range(0, len(keys), MAX_LOOK_KEYS):
            window = keys[start : start + MAX_LOOK_KEYS]
            rows = self._link.ask([(self._names.manifest(key), self._peek(key)) for key in window])
            for key, row in zip(window, rows, strict=True):
                try:
                    found.append(row if isinstance(row, Lost) else _parse(row, key))
                except InvalidFrameError:
                    found.append(None)
                    damaged.append((self._names.manifest(key), self._take(key, row or b"")))
        if damaged:
            with contextlib.suppress(TierUnavailableError):
                self._link.ask(damaged)
        return found

    def pull(
        self,
        manifest: Manifest,
        out: Bytes,
        offset: int,
        following: Manifest | None = None,
        arrived: Callable[[int], object] | None = None,
    ) -> bool:
        """Fill *out* from the parts of *manifest*. False when it or a part is not there whole.

        A read from the chunk's start gives it its whole life again. The calling thread reads
        *following* next, whole, or calls ``end_row``; *arrived* is told as by ``RedisLink.fill``.
        """
        steps = self._steps(manifest, offset, len(out))
        rooms, view, at = [], out.data, 0
        for step in steps:
            if step.payload_bytes:
                rooms.append(view[at : at + step.payload_bytes])
                at += step.payload_bytes
        ahead: list[Step] = []
        if following is not None:
            begins = min(FILL_WINDOW * SLICE_BYTES, following.info.size_bytes)
            ahead = self._slices(following, 0, begins)[: 1 + FILL_WINDOW]
        name = self._names.manifest(manifest.info.key)
        return self._link.fill(name, Fill(steps, rooms, ahead, arrived))

    def _steps(self, manifest: Manifest, offset: int, size_bytes: int) -> list[Step]:
        """Return what brings *size_bytes* of a frame."""
        steps = self._slices(manifest, offset, size_bytes)
        if offset == 0:
            # the manifest last: as ever, it promises that its parts are there
            life_s = b"%d" % (self._ttl_s + PART_SLACK_S)
            asks = [pack_words(b"EXPIRE", part, life_s) for part in self._names.parts(manifest)]
            name = self._names.manifest(manifest.info.key)
            asks.append(pack_words(b"EXPIRE", name, b"%d" % self._ttl_s))
            steps.append(Step(b"".join(asks), b":1\r\n" * len(asks)))
        return steps

    def _slices(self, manifest: Manifest, offset: int, size_bytes: int) -> list[Step]:
        """Return the manifest's step, whether it still stands, and those of its parts."""
        peek, raw = self._peek(manifest.info.key), manifest.raw
        steps = [Step(b"".join(pack(peek)), b"$%d\r\n%b\r\n" % (len(raw), raw))]
        parts = self._names.parts(manifest)
        for part, start, stop in manifest.cut(offset, size_bytes):
            steps += slice_steps(parts[part], start, stop)
        return steps

    def end_row(self) -> None:
        """The calling thread reads nothing of what was to follow."""
        self._link.end_row()

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
        name = self._names.manifest(key)
        (row,) = self._link.run(name, [self._take(key, raw)])
        if row is None:
            return None
        try:
            removed = parse_manifest(row, key)
        except InvalidFrameError:
            return None
        if removed is not None:
            try:
                self._link.run(name, [(b"UNLINK", *self._names.parts(removed))])
            except TierUnavailableError:  # the chunk is gone; only its parts linger
                self._remains.append(removed)
        return removed

    def listing(self) -> tuple[dict[ChunkKey, Manifest], bool]:
        """Read all manifests, at most MAX_LISTED_CHUNKS; say whether these are all there are.

        What a lost part of a Cluster holds is left out.
        """
        found: dict[ChunkKey, Manifest] = {}
        whole = True
        for master in self._link.masters():
            try:
                whole &= self._list_on(master, found)
            except TierUnavailableError as error:
                if not error.is_partial:
                    raise
                whole = False
        return found, whole

    def _list_on(self, master: Lines, found: dict[ChunkKey, Manifest]) -> bool:
        cursor, whole = 0, True
        while len(found) < MAX_LISTED_CHUNKS:
            scan: Command = (b"SCAN", cursor, b"MATCH", self._names.pattern, b"COUNT", 1000)
            cursor, names = _page(self._link.list_on(master, scan))
            keys = [key for key in map(self._names.key_of, names) if key is not None]
            for key, row in zip(keys, self.look(keys), strict=True):
                if isinstance(row, Manifest):
                    found[key] = row
                whole &= not isinstance(row, Lost)
            if cursor == 0:
                return whole
        return False

    def _peek(self, key: ChunkKey) -> Command:
        # not GET: what a stranger stored under this name may have 512 MB
        return (b"GETRANGE", self._names.manifest(key), 0, MAX_MANIFEST_BYTES)

    def _take(self, key: ChunkKey, raw: bytes) -> Command:
        return (b"EVAL", _TAKE, 1, self._names.manifest(key), MAX_MANIFEST_BYTES, raw)

    def _is_taken(self, key: ChunkKey) -> bool:
        """Whether somebody's manifest stands under *key*. Removes a damaged one."""
        name = self._names.manifest(key)
        (row,) = self._link.run(name, [self._peek(key)])
        try:
            _parse(row, key)
        except InvalidFrameError:
            self._link.run(name, [self._take(key, row or b"")])
            return False
        return bool(row != b"")

    def _send(self, manifest: Manifest, frame: Bytes) -> bool:
        view, size, life_s = frame.data, manifest.part_bytes, self._ttl_s + PART_SLACK_S
        name = self._names.manifest(manifest.info.key)
        self._link.run(
            name,
            [
                (b"SET", part, view[at * size : (at + 1) * size], b"EX", life_s)
                for at, part in enumerate(self._names.parts(manifest))
            ],
        )
        # in a round trip of its own: a pipeline runs on after a part that was refused
        (first,) = self._link.run(name, [(b"SET", name, manifest.raw, b"EX", self._ttl_s, b"NX")])
        return first is not None

    def _discard(self, manifest: Manifest) -> None:
        """Remove what a lost or refused write left, now or before the next publishing."""
        try:
            self._link.run(self._names.manifest(manifest.info.key), self._remove_all(manifest))
        except TierUnavailableError:
            self._remains.append(manifest)

    def _sweep(self) -> None:
        swept: list[Manifest] = []
        with contextlib.suppress(IndexError):
            while len(swept) < SWEEP_WRITES:
                swept.append(self._remains.popleft())
        calls = [
            (self._names.manifest(old.info.key), command)
            for old in swept
            for command in self._remove_all(old)
        ]
        try:
            replies = self._link.ask(calls)
        except TierUnavailableError:
            self._remains.extend(swept)
            raise
        lost = [isinstance(reply, Lost) for reply in replies]
        self._remains.extend(old for at, old in enumerate(swept) if any(lost[2 * at : 2 * at + 2]))

    def _remove_all(self, manifest: Manifest) -> list[Command]:
        take = self._take(manifest.info.key, manifest.raw)
        return [take, (b"UNLINK", *self._names.parts(manifest))]


def _parse(row: Any, key: ChunkKey) -> Manifest | None:
    """Parse a reply to ``_peek``: empty when absent, None when of the wrong type."""
    return None if row == b"" else parse_manifest(row or b"", key)


def _page(reply: Any) -> tuple[int, list[bytes]]:
    """Return the next cursor and the names of one answer to SCAN."""
    match reply:
        case [bytes(cursor), list(names)] if cursor.isdigit():
            return int(cursor), [name for name in names if isinstance(name, bytes)]
        case _:
            return 0, []
