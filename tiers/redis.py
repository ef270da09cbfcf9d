"""The tier that all nodes share: frames in one Redis or Valkey.

A frame is cut into parts of a few megabytes, and a manifest, written last and only if there is
none, makes them a chunk. Names of parts contain their writer's random id, so that no reader mixes
versions, and every key has a TTL, so that the remains of a killed writer expire.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import structlog
from redis.exceptions import OutOfMemoryError
from typing_extensions import override

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import InvalidRequestError, TierFullError, TierUnavailableError
from kvstore.proto.frame import MAX_FRAME_BYTES
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.tiers.base import DEFAULT_TENANT, Reservation, Tier, TierStats, check_range
from kvstore.tiers.redis_chunks import MAX_PARTS, WRITE_ID_BYTES, KeyNames, Manifest, RedisChunks
from kvstore.tiers.redis_client import DEFAULT_CONNECTIONS, MAX_LISTING_BYTES, SLOTS, RedisClient
from kvstore.tiers.redis_connection import Server
from kvstore.tiers.redis_url import DEFAULT_PREFIX

Rows: TypeAlias = Mapping[ChunkKey, Manifest | None]

logger = structlog.get_logger(__name__)

CHUNK_OVERHEAD_BYTES = 512
"""Bytes accounted for each chunk's manifest and the names of its parts."""
MAX_PEER_MANIFESTS = 4096
"""Manifests of chunks not counted here, kept to save a round trip."""


class RedisTier(Tier):
    """Frames in a Redis that other nodes put into as well.

    ``capacity_bytes`` bounds the chunks that this process reserved and sealed, and those in its
    listings, at construction and by ``scan``; chunks that others put later are found but not
    counted. If Redis is down at construction, the first ``reserve`` that reaches it lists the
    chunks. Durable means acknowledged by the server. A seal whose reply is lost raises; its remains
    are removed before the next seal or expire, and until then the chunk may be visible, whole.

    *ttl_s* is a chunk's TTL from its sealing. *timeout_ms* bounds each connect, send and receive.
    *part_bytes* is slightly below a power of two: Redis' allocator rounds larger values up by a
    quarter.
    """

    name = "redis"
    survives_restart: ClassVar[bool] = True
    shared: ClassVar[bool] = True
    overhead_bytes = CHUNK_OVERHEAD_BYTES
    write_error = ""

    def __init__(  # noqa: PLR0913 - the operator's settings
        self,
        url: str,
        capacity_bytes: int,
        *,
        timeout_ms: int = 500,
        connections: int = DEFAULT_CONNECTIONS,
        part_bytes: int = (2 << 20) - 64,
        ttl_s: int = 86_400,
        prefix: str = DEFAULT_PREFIX,
    ) -> None:
        if capacity_bytes <= CHUNK_OVERHEAD_BYTES:
            raise InvalidRequestError("capacity_bytes", capacity_bytes, "give at least one chunk")
        self.capacity_bytes = capacity_bytes
        room_bytes = capacity_bytes - CHUNK_OVERHEAD_BYTES
        self.max_frame_bytes = min(room_bytes, MAX_FRAME_BYTES, part_bytes * MAX_PARTS)
        self._part_bytes = part_bytes
        self._client = RedisClient(self.name, url, timeout_ms, connections)
        self._stored = RedisChunks(self._client, KeyNames(prefix), ttl_s)
        # Guards the fields below; held for dictionary operations only.
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._chunks: dict[ChunkKey, Manifest] = {}
        """The counted chunks: from their sealing, or a listing, until found absent."""
        self._peers: OrderedDict[ChunkKey, Manifest] = OrderedDict()
        self._reserved: dict[object, Bytes | None] = {}
        """The caller's frames by place; None until written."""
        self._listed = False
        try:
            self._list()
        except TierUnavailableError as error:
            self.write_error = f"has not answered since the start: {error}"

    @override
    def reserve(self, info: ChunkInfo, tenant: str = DEFAULT_TENANT) -> Reservation:
        if not self._listed:
            self._list()
        need_bytes = self.allocated_bytes(info.size_bytes)
        place = object()
        with self._lock:
            free_bytes = self.capacity_bytes - self._used_bytes
            if need_bytes > free_bytes or info.size_bytes > self.max_frame_bytes:
                raise TierFullError(self.name, need_bytes, max(0, free_bytes))
            self._used_bytes += need_bytes
            self._reserved[place] = None
        return Reservation(info, tenant, need_bytes, place)

    @override
    def write(self, reservation: Reservation, frame: Bytes) -> None:
        reservation.check(frame)
        if reservation.place not in self._reserved:
            raise reservation.spent()
        self._reserved[reservation.place] = frame

    @override
    def seal(self, reservation: Reservation, *, durable: bool = False) -> bool:
        """Send the frame, then make it visible unless another version of its key is. Raises
        TierFullError, freeing the space, when the server is out of memory.
        """
        if reservation.place not in self._reserved:
            raise reservation.spent()
        frame = self._reserved[reservation.place]
        if frame is None:
            raise InvalidRequestError("reservation", reservation.info.key.hex(), "write it first")
        with self._lock:
            del self._reserved[reservation.place]
        write_id, now_us = os.urandom(WRITE_ID_BYTES), time.time_ns() // 1000
        manifest = Manifest.of(reservation.info, self._part_bytes, write_id, now_us)
        sealed = False
        try:
            sealed = self._stored.write(manifest, frame)
        except OutOfMemoryError:
            raise TierFullError(self.name, reservation.reserved_bytes, 0) from None
        finally:
            with self._lock:
                self._used_bytes -= reservation.reserved_bytes
                if sealed:
                    self._count(manifest.info.key, manifest)
        return sealed

    @override
    def abort(self, reservation: Reservation) -> None:
        with self._lock:
            if reservation.place in self._reserved:
                del self._reserved[reservation.place]
                self._used_bytes -= reservation.reserved_bytes

    @override
    def read(
        self, key: ChunkKey, out: Bytes, offset: int = 0, verifier: FrameVerifier | None = None
    ) -> bool:
        """Fill *out* in one round trip when the manifest is cached; False when it is absent.

        A chunk with a missing or short part is removed and counts as absent; one on an unavailable
        part of a Cluster is absent meanwhile. *out* is then undefined. Never takes more memory
        than *out*, whatever Redis contains.
        """
        arrived = bool if verifier is None else verifier.update
        try:
            with self._lock:
                known = self._chunks.get(key) or self._peers.get(key)
            in_it = known is not None and 0 <= offset <= known.info.size_bytes - len(out)
            if known and in_it and self._stored.read(known, out, offset, arrived):
                return True
            (current,) = self._stat([key])
            if current is None:
                return False
            check_range(current.info.size_bytes, offset, len(out))
            has_checked = verifier is not None and verifier.has_begun
            if self._stored.read(current, out, offset, bool if has_checked else arrived):
                # The verifier has bytes of the first read: report a miss this time.
                return not has_checked
            with contextlib.suppress(TierUnavailableError):
                self._stored.delete(key, current.raw)
            self._note({key: current}, {key: None})
        except TierUnavailableError as error:
            if not error.is_partial:
                raise
        return False

    @override
    def find(self, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        return [row.info if row else None for row in self._stat(keys)]

    @override
    def delete(self, key: ChunkKey) -> bool:
        counted = self._chunks.get(key)
        removed = self._stored.delete(key)
        for gone in (counted, removed):
            self._note({key: gone}, {key: None})
        return removed is not None

    @override
    def scan(self) -> Iterator[ChunkInfo]:
        """List the chunks of all nodes, least recently sealed first, and count them from now on."""
        rows = sorted(self._list().values(), key=lambda row: (row.sealed_us, row.info.key))
        return iter([row.info for row in rows])

    @override
    def stats(self) -> TierStats:
        with self._lock:
            used_bytes, chunks = self._used_bytes, len(self._chunks)
            return TierStats(self.capacity_bytes, used_bytes, chunks, len(self._reserved))

    @override
    def close(self) -> None:
        self._client.close()

    def _stat(self, keys: Sequence[ChunkKey]) -> list[Manifest | None]:
        with self._lock:
            before = {key: self._chunks.get(key) for key in keys}
        rows = zip(keys, self._stored.stat(keys), strict=True)
        # Keys without an answer stay counted.
        found = {key: row for key, row in rows if not isinstance(row, TierUnavailableError)}
        if found:
            self.write_error = ""
        self._note(before, found)
        return [found.get(key) for key in keys]

    def _list(self) -> Mapping[ChunkKey, Manifest]:
        with self._lock:
            before = dict(self._chunks)
        found, whole = self._stored.scan()
        self.write_error = ""
        gone = [key for key in before if key not in found] if whole else []
        self._note(before, {**found, **dict.fromkeys(gone)}, is_listing=True)
        if not self._listed:
            self._listed = True
            with contextlib.suppress(TierUnavailableError):
                for finding in check_health(self._client):
                    logger.warning(finding.saw, fix=finding.fix)
        return found

    def _note(self, before: Rows, found: Rows, *, is_listing: bool = False) -> None:
        """Update the counts by a read: the manifests counted *before* it, and those it *found*.
        Chunks that this process sealed meanwhile stay counted; a listing's are counted from now on.
        """
        with self._lock:
            for key, new in found.items():
                old = before.get(key)
                if old is not None and old != new and self._chunks.get(key) == old:
                    self._count(key, None)
                self._peers.pop(key, None)
                if new is not None and key not in self._chunks:
                    if is_listing:
                        self._count(key, new)
                    else:
                        self._peers[key] = new
                if len(self._peers) > MAX_PEER_MANIFESTS:
                    self._peers.popitem(last=False)

    def _count(self, key: ChunkKey, new: Manifest | None) -> None:
        old = self._chunks.pop(key, None)
        if old is not None:
            self._used_bytes -= self.allocated_bytes(old.info.size_bytes)
        if new is not None:
            self._peers.pop(key, None)
            self._chunks[key] = new
            self._used_bytes += self.allocated_bytes(new.info.size_bytes)


FULL_SHARE = 0.95
"""Share of maxmemory that is reported: under noeviction writes fail when it is full."""
_MEMORY = re.compile(rb"^(used_memory|maxmemory):([0-9]{1,18})\r?$", re.MULTILINE)


class HealthFinding(NamedTuple):
    """One problem. ``is_loss``: chunks already miss, or puts fail."""

    saw: str
    fix: str
    is_loss: bool


def check_health(client: RedisClient) -> Iterator[HealthFinding]:
    """Yield problems of the servers behind *client*, except those its user may not query. Raises
    TierUnavailableError when no server answers.
    """
    masters = client.masters()
    replies = client.execute([(master, (b"SCAN", 0, b"COUNT", 1)) for master in masters])
    refusing = False
    for master, reply in zip(masters, replies, strict=True):
        if isinstance(reply, TierUnavailableError):
            fix = "restart it, or let its replica take over"
            yield HealthFinding(f"{master} does not answer; its slots miss", fix, is_loss=True)
            continue
        text = _query(client, master, b"INFO", b"memory")
        sizes = dict(_MEMORY.findall(text if isinstance(text, bytes) else b""))
        used, most = (int(sizes.get(name, 0)) for name in (b"used_memory", b"maxmemory"))
        if most and used >= FULL_SHARE * most and b"maxmemory_policy:noeviction" in text:
            saw = f"{master} is full, {used} of {most} bytes, and evicts nothing (noeviction)"
            fix = "raise its maxmemory, lower --redis-size, or set maxmemory-policy allkeys-lru"
            yield HealthFinding(saw, fix, is_loss=True)
        command = (b"CONFIG", b"GET", b"cluster-require-full-coverage")
        refusing |= client.is_cluster and _query(client, master, *command) == [command[2], b"yes"]
    if lost := client.unserved_slots():
        saw = f"{lost} of {SLOTS} slots have no master"
        yield HealthFinding(saw, "give them one: redis-cli --cluster fix HOST:PORT", is_loss=True)
    if refusing:
        saw = "the Redis Cluster refuses every key while one master is down"
        fix = "set cluster-require-full-coverage to no on all its nodes"
        yield HealthFinding(saw, fix, is_loss=False)


def _query(client: RedisClient, master: Server, *command: bytes) -> Any:
    """Return the reply; None when the command is not permitted."""
    with contextlib.suppress(TierUnavailableError):
        return client.run(master, [command], MAX_LISTING_BYTES)[0]
    return None
