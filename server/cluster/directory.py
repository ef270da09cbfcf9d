"""The Directory: which other nodes hold a chunk in memory, through the shared Redis.

Its answers are hints. A wrong entry costs a miss, as all frames are verified. An entry is the set
of incarnations that hold a chunk, under the chunk's key, which includes the tenant's salt; an
incarnation that is not in the Membership is ignored.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import structlog
from redis.exceptions import OutOfMemoryError

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError
from kvstore.proto.messages import as_message
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.cluster.membership import Membership, MembershipState, NodeAddress, is_full
from kvstore.server.settings.settings import Settings
from kvstore.server.settings.values import Limits, parse_endpoint
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.breaker import Breaker
from kvstore.tiers.redis_client import Call, RedisClient

MAX_READ_KEYS = 512
"""Keys per round trip."""
MAX_HOLDERS = 8
"""Holders read per chunk, chosen at random when there are more."""
BUCKETS = 16
"""Hash slots that entries are spread over; one script reads each."""
MAX_ANSWER_BYTES = 1 << 17
"""Reply limit of one bucket: MAX_HOLDERS members of 20 characters for each of MAX_READ_KEYS."""
BATCH_UPDATES = 1024
"""Entries written in one round trip."""
MAX_PENDING = 1 << 16
"""Limit of queued updates; further ones are dropped and counted."""
ENTRY_TTL_S = 3600
"""TTL of an entry in Redis. It is renewed after half of it."""
MAX_STALE_ENTRIES = 4096
MAX_MEMBER_BYTES = 64
"""Ours have 20; foreign members are cut."""
BEATS_PER_TTL = 4
FLUSH_S = 0.05
"""Time in which updates are batched."""

_MEMBERS = b"""
local rows = {}
for at = 1, #KEYS do
  local members = redis.pcall('SRANDMEMBER', KEYS[at], ARGV[1])
  local row = members.err and '' or table.concat(members, ' ')
  rows[at] = string.find(row, '[^%d -]') and '' or row
end
return table.concat(rows, '\\n')
"""
"""Returns a line per key, in order: its holders."""

Holders = dict[ChunkKey, tuple[NodeAddress, ...]]

logger = structlog.get_logger(__name__)


class Directory:
    """Announces the chunks in this node's memory, and finds those of others. Thread-safe.

    All names in Redis begin with *prefix*. While Redis is down no holder is found, and updates
    wait in a bounded queue. Owns *link*. *clock* returns monotonic seconds.
    """

    def __init__(
        self,
        link: RedisClient,
        me: NodeAddress,
        prefix: str,
        limits: Limits,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.me = me
        self._link = link
        self._ttl_s = limits.directory_ttl_ms / 1000
        self._counters = counters
        failures, retry_ms = limits.breaker_failures, limits.breaker_retry_ms
        self._breaker = Breaker("node directory", failures, retry_ms, clock)
        self._clock = clock
        self._stems = [b"%b{%d}:at:" % (prefix.encode(), at) for at in range(BUCKETS)]
        self._scripts = BUCKETS if link.is_cluster else 1
        self._member = _member(me.incarnation)
        self._membership = Membership(link, prefix, me, limits.directory_ttl_ms)
        self._limit = limits.directory_chunks
        self._held: OrderedDict[ChunkKey, float] = OrderedDict()
        """Time of the last announcement of each key that this node holds, the oldest first."""
        self._pending: OrderedDict[ChunkKey, None] = OrderedDict()
        """Keys whose entries must be written."""
        self._lock = threading.Lock()  # guards the two above
        self._lost_at = -math.inf
        self._unknown: dict[tuple[ChunkKey, bytes], float] = {}
        """Members of entries without a living node, and since when; changed without a lock."""
        self._nodes: Mapping[bytes, NodeAddress] = {}
        self._undelivered: list[ChunkKey] = []
        self._beat_at = -math.inf
        self._failure = ""
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="directory", daemon=True)

    # --- finding

    def holders(self, keys: Sequence[ChunkKey], deadline_s: float) -> Holders:
        """Return which other living nodes hold each of *keys*, in any order.

        Takes at most *deadline_s* seconds. Keys without holders are left out, and all keys once
        Redis does not answer: never raises.
        """
        nodes = self._living()
        found: Holders = {}
        if not keys or not nodes or not self._breaker.allows():
            return found
        until = self._clock() + deadline_s
        try:
            for start in range(0, len(keys), MAX_READ_KEYS):
                if (left_s := until - self._clock()) <= 0:
                    break
                self._read(keys[start : start + MAX_READ_KEYS], left_s, nodes, found)
        except KVStoreError as error:
            self._counters.add("directory_unanswered")
            self._breaker.fail(str(error))
        else:
            self._breaker.succeed()
        return found

    def _living(self) -> Mapping[bytes, NodeAddress]:
        """Return the other nodes by their names in entries; none without a recent beat."""
        is_fresh = self._clock() - self._beat_at < self._ttl_s
        return self._nodes if is_fresh else {}  # all may be gone

    def _read(
        self,
        keys: Sequence[ChunkKey],
        within_s: float,
        nodes: Mapping[bytes, NodeAddress],
        found: Holders,
    ) -> None:
        """Add to *found* which of *nodes* are in the entries of *keys*."""
        self._counters.add("directory_questions")
        by_bucket: dict[int, list[ChunkKey]] = {}
        for key in keys:
            by_bucket.setdefault(key[-1] % self._scripts, []).append(key)
        calls: list[Call] = []
        for some in by_bucket.values():
            names = list(map(self._name, some))
            calls.append((names[0], (b"EVAL", _MEMBERS, len(names), *names, MAX_HOLDERS)))
        replies = self._link.execute(calls, within_s=within_s, reply_bytes=MAX_ANSWER_BYTES)
        known: dict[bytes, tuple[tuple[NodeAddress, ...], list[bytes]]] = {}
        for some, reply in zip(by_bucket.values(), replies, strict=True):
            rows = reply.split(b"\n") if isinstance(reply, bytes) else []
            for key, row in zip(some, rows if len(rows) == len(some) else (), strict=False):
                if row not in known:  # rows of a chain are mostly equal
                    members = row.split()
                    others = [one for one in members if one not in nodes and one != self._member]
                    known[row] = tuple(nodes[one] for one in members if one in nodes), others
                living, others = known[row]
                if living:
                    found[key] = living
                for member in others if len(self._unknown) < MAX_STALE_ENTRIES else ():
                    self._unknown.setdefault((key, member[:MAX_MEMBER_BYTES]), self._clock())

    def _name(self, key: ChunkKey) -> bytes:
        return self._stems[key[-1] % BUCKETS] + key.hex().encode()

    # --- announcing

    def stored(self, tier: str, infos: Sequence[ChunkInfo], put_info: object = None) -> None:
        """Announce copies that became visible in memory."""
        if tier == "cpu":
            self.announce([info.key for info in infos])

    def removed(self, tier: str, key: ChunkKey, *, is_last: bool) -> None:
        """Withdraw a copy that was removed from memory."""
        if tier == "cpu":
            self.withdraw((key,))

    def announce(self, keys: Sequence[ChunkKey]) -> None:
        """Announce that this node holds *keys* in memory. Never blocks."""
        with self._lock:
            dropped = sum(not self._hold(key) for key in keys)
        self._count_dropped(dropped)
        self._wake.set()

    def withdraw(self, keys: Sequence[ChunkKey]) -> None:
        """Announce that this node no longer holds *keys* in memory. Never blocks.

        An entry whose update is dropped expires, as it is not renewed.
        """
        with self._lock:
            known = [key for key in keys if self._held.pop(key, None) is not None]
            dropped = sum(not self._queue(key) for key in known)
        self._count_dropped(dropped)
        self._wake.set()

    def _count_dropped(self, count: int) -> None:
        if count:  # the catalog's lock may be held
            self._counters.add("directory_dropped_words", count)

    def _hold(self, key: ChunkKey) -> bool:
        has_space = key in self._held or len(self._held) < self._limit
        if not has_space or not self._queue(key):
            return False
        self._held[key] = self._clock()
        self._held.move_to_end(key)
        return True

    def _queue(self, key: ChunkKey, limit: int = MAX_PENDING) -> bool:
        has_space = key in self._pending or len(self._pending) < limit
        if has_space:
            self._pending[key] = None
        return has_space

    def _put_back(self, keys: Sequence[ChunkKey]) -> None:
        """Queue *keys* again, whose updates failed, within half of the limit."""
        with self._lock:
            dropped = sum(not self._queue(key, MAX_PENDING // 2) for key in keys)
        self._count_dropped(dropped)

    def _take(self) -> list[tuple[ChunkKey, bool]]:
        """Return a batch of the oldest queued keys, and whether this node holds each now."""
        with self._lock:
            count = min(BATCH_UPDATES, len(self._pending))
            keys = [self._pending.popitem(last=False)[0] for _ in range(count)]
            return [(key, key in self._held) for key in keys]

    def _repeat(self) -> None:
        """Renew some entries that Redis lost or that are half of their TTL old."""
        with self._lock:
            due = max(self._lost_at, self._clock() - ENTRY_TTL_S / 2)
            left = MAX_PENDING - len(self._pending)
            for _ in range(min(BATCH_UPDATES, len(self._held), left)):
                key, announced_at = next(iter(self._held.items()))
                if announced_at >= due:
                    break
                self._hold(key)

    # --- lifecycle

    def start(self) -> None:
        """Start heartbeats and writes in the background."""
        self._thread.start()

    def close(self) -> None:
        """Leave the directory and disconnect. Idempotent."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._link.close()

    def _run(self) -> None:
        beat_s = self._ttl_s / BEATS_PER_TTL
        next_beat = self._clock()
        while not self._stopping.is_set():
            if self._clock() >= next_beat:
                next_beat = self._clock() + beat_s
                self._try(self._beat)
            elif not self._failure:
                self._try(self._flush)
            left_s = max(0.0, next_beat - self._clock())
            if self._failure:  # retry at the next beat, not at every update
                self._stopping.wait(left_s)
            elif self._wake.wait(left_s):
                self._wake.clear()
                self._stopping.wait(FLUSH_S)
        with suppress(KVStoreError):
            self._membership.leave()

    def _try(self, work: Callable[[], None]) -> None:
        """Run *work*; log once when it begins to fail, and once when it recovers."""
        try:
            work()
        except KVStoreError as error:
            if not self._failure:
                logger.warning("node directory unavailable", reason=str(error))
            self._failure = str(error)
            return
        if self._failure:
            logger.info("node directory available again")
        self._failure = ""

    def _beat(self) -> None:
        before = self._membership.state
        was_forgotten = self._membership.beat()
        self._beat_at = self._clock()
        self._nodes = {_member(one.incarnation): one for one in self._membership.living}
        if was_forgotten:
            self._lost_at = self._clock()  # all are announced again, batch by batch
        self._put_back(self._undelivered)
        self._undelivered = []
        if self._membership.state is not before:
            self._log_state(self._membership.state, self._membership.rival)
        # Remove members that have been unknown for a full TTL: none is a new node.
        due, unknown = self._clock() - self._ttl_s, self._unknown.copy()
        back = [one for one in unknown if one[1] in self._nodes]
        dead = [one for one, since in unknown.items() if since <= due and one[1] not in self._nodes]
        for one in (*back, *dead[:BATCH_UPDATES]):
            self._unknown.pop(one, None)
        names = [(self._name(key), member) for key, member in dead[:BATCH_UPDATES]]
        self._link.execute([(name, (b"SREM", name, member)) for name, member in names])
        self._flush()

    def _log_state(self, state: MembershipState, rival: NodeAddress | None) -> None:
        if state is MembershipState.known:
            logger.info("node joined the directory", node_id=self.me.node_id)
            return
        is_taken = state is MembershipState.taken
        what = "each node another --node-id" if is_taken else "some nodes another --redis-prefix"
        logger.error(
            "node not in the directory", reason=state.value, node_id=self.me.node_id,
            other=rival.grpc_address if rival else "", fix=f"give {what}",
        )  # fmt: skip

    def _flush(self) -> None:
        """Send queued updates; failed ones stay queued. Raises TierUnavailableError."""
        while self._membership.state is MembershipState.known and not self._stopping.is_set():
            self._repeat()
            if not (updates := self._take()):
                return
            self._send(updates)

    def _send(self, updates: Sequence[tuple[ChunkKey, bool]]) -> None:
        calls: list[Call] = []
        for key, is_held in updates:
            name = self._name(key)
            calls.append((name, (b"SADD" if is_held else b"SREM", name, self._member)))
            calls.append((name, (b"EXPIRE", name, ENTRY_TTL_S)))
        lost = [key for key, _ in updates]
        try:
            replies = self._link.execute(calls)
            pairs = zip(lost, replies[::2], strict=True)
            lost = [key for key, reply in pairs if isinstance(reply, KVStoreError)]
        except OutOfMemoryError:
            self._counters.add("directory_dropped_words", len(lost))
            lost = []
            raise is_full(self._link) from None
        finally:
            self._undelivered = (self._undelivered + lost)[-MAX_PENDING:]
        self._counters.add("directory_words", len(updates) - len(lost))

    def report(self) -> pb.Directory:
        """Return the state of this node, and the other living nodes."""
        nodes = sorted(self._living().values(), key=lambda node: node.node_id)
        return pb.Directory(
            node_id=self.me.node_id,
            incarnation=self.me.incarnation,
            standing=self._membership.state.name,
            failure=self._failure,
            announced=len(self._held),
            waiting=len(self._pending) + len(self._undelivered),
            nodes=[as_message(pb.DirectoryNode, node) for node in nodes],
        )


def _member(incarnation: int) -> bytes:
    """Return the name of *incarnation* in sets: a signed number, which Redis stores compactly."""
    return b"%d" % (incarnation - (incarnation >> 63 << 64))


def open_directory(
    config: Settings,
    incarnation: int,
    grpc_port: int,
    bulk_address: str,
    counters: Counters,
    clock: Callable[[], float],
) -> Directory:
    """Return the directory, not started. *bulk_address* is empty without a bulk channel."""
    assert config.redis_url is not None
    host = config.advertise or parse_endpoint(config.listen)[0]
    host = f"[{host}]" if ":" in host else host
    bulk = f"tcp://{host}:{urlsplit(bulk_address).port}" if bulk_address.startswith("tcp:") else ""
    me = NodeAddress(config.node_id_for(grpc_port), incarnation, bulk, f"{host}:{grpc_port}")
    url, limits = config.redis_access(config.redis_url), config.limits
    link = RedisClient("redis", url, config.redis_timeout_ms, limits.redis_connections)
    return Directory(link, me, config.redis_prefix, limits, counters, clock)
