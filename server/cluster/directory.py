"""The Directory: which other nodes hold a chunk in memory, as they say in the shared Redis.

What it says is a hint. A wrong entry costs a miss, as frames are verified wherever they come
from. An entry is a set under the chunk's key, which the tenant's salt is in, of the incarnations
that hold it: one that is not in the Membership is nobody.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog
from redis.exceptions import OutOfMemoryError

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.cluster.announcements import ENTRY_TTL_S, MAX_PENDING, Announcements, Update
from kvstore.server.cluster.membership import Membership, MembershipState, is_full
from kvstore.server.cluster.membership import NodeAddress as NodeAddress
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.breaker import Breaker
from kvstore.tiers.redis_client import Call, NodeDown, RedisClient

MAX_STRANGERS = 1024
MAX_LEFTOVERS = 4096
MAX_MEMBER_BYTES = 64
"""Ours have 20; of what else lies there only so much is kept."""

StaleEntry = tuple[ChunkKey, bytes]


class UnknownMembers:
    """Whom entries name in vain. Thread-safe, bounded; *clock* returns monotonic seconds.

    One that stays unknown for *patience_s* is dead: a node that has just come is not listed here
    at once. What a reader then finds of it is a leftover, to be taken out of the directory.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._since: OrderedDict[bytes, float] = OrderedDict()
        self._leftovers: deque[StaleEntry] = deque(maxlen=MAX_LEFTOVERS)
        # Guards the table.
        self._lock = threading.Lock()

    def met(self, key: ChunkKey, member: bytes) -> None:
        """The entry of *key* names somebody who is not in the roster."""
        with self._lock:
            since = self._since.setdefault(member[:MAX_MEMBER_BYTES], self._clock())
            if len(self._since) > MAX_STRANGERS:
                self._since.popitem(last=False)
            if self._clock() - since >= self._patience_s:
                self._leftovers.append((key, member[:MAX_MEMBER_BYTES]))

    def forget(self, living: Container[bytes]) -> None:
        """Those who came to be known are strangers no more, and left nothing behind."""
        with self._lock:
            for member in [one for one in self._since if one in living]:
                del self._since[member]
            rest = [one for one in self._leftovers if one[1] not in living]
            self._leftovers.clear()
            self._leftovers.extend(rest)

    def take(self, count: int) -> list[StaleEntry]:
        """Take leftovers, at most *count*. Right after ``forget``, or a reader with an older
        roster may have taken one who is back for dead.
        """
        with self._lock:
            return [self._leftovers.popleft() for _ in range(min(count, len(self._leftovers)))]


MAX_ASKED_KEYS = 512
"""Keys of one round trip."""
MAX_HOLDERS = 8
"""Holders of one chunk that are learnt of, by chance when there are more."""
BUCKETS = 16
"""Entries are spread over so many hash slots, of each of which one script reads."""
MAX_ANSWER_BYTES = 1 << 17
"""Of one bucket: MAX_HOLDERS members of 20 characters for each of MAX_ASKED_KEYS."""
BATCH_WORDS = 1024
"""Entries written in one round trip."""
BEATS_PER_TTL = 4
_MEMORY = "cpu"
FLUSH_S = 0.05
"""Words wait so long for others to go with."""

_MEMBERS = b"""
local rows = {}
for at = 1, #KEYS do
  local members = redis.pcall('SRANDMEMBER', KEYS[at], ARGV[1])
  local row = members.err and '' or table.concat(members, ' ')
  rows[at] = string.find(row, '[^%d -]') and '' or row
end
return table.concat(rows, '\\n')
"""
"""A line for each key, in its order: who says that it holds it."""

Clock = Callable[[], float]
Holders = dict[ChunkKey, tuple[NodeAddress, ...]]

logger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DirectoryTerms:
    """``prefix`` is what all names begin with, ``ttl_ms`` after which silence a node is gone."""

    prefix: str = "kvs:1:"
    ttl_ms: int = 10_000
    limit: int = 1 << 18
    """Chunks that this node announces at most."""


class Directory:
    """Who holds which chunks in memory: this node says what it does, and asks of others.

    ``start`` begins to beat and to write in a thread of its own; without it nothing is said.
    Redis may be down at any time: then nobody is found, and what is to be said waits, bounded.
    Closes *link* as it is closed. *clock* returns monotonic seconds. Thread-safe.
    """

    def __init__(
        self,
        link: RedisClient,
        me: NodeAddress,
        terms: DirectoryTerms,
        counters: Counters,
        breaker: Breaker,
        clock: Clock = time.monotonic,
    ) -> None:
        self.me = me
        self._link = link
        self._terms = terms
        self._counters = counters
        self._breaker = breaker
        self._clock = clock
        self._stems = [b"%b{%d}:at:" % (terms.prefix.encode(), at) for at in range(BUCKETS)]
        self._scripts = BUCKETS if link.is_cluster else 1
        self._member = _member(me.incarnation)
        self._membership = Membership(link, terms.prefix, me, terms.ttl_ms)
        self._announcements = Announcements(terms.limit, clock)
        self._unknown = UnknownMembers(terms.ttl_ms / 1000, clock)
        self._nodes: Mapping[bytes, NodeAddress] = {}
        self._undelivered: list[ChunkKey] = []
        self._heard_at = -math.inf
        self._failure = ""
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="directory", daemon=True)

    # --- asking

    def holders(self, keys: Sequence[ChunkKey], deadline_s: float) -> Holders:
        """Return which other living nodes say that they hold each of *keys*, in any order.

        Takes *deadline_s* seconds at most, and one round trip for MAX_ASKED_KEYS. Keys that
        nobody holds are left out, and so are all once Redis does not answer: never raises.
        """
        nodes = self._living()
        found: Holders = {}
        if not keys or not nodes or not self._breaker.allows():
            return found
        until = self._clock() + deadline_s
        try:
            for start in range(0, len(keys), MAX_ASKED_KEYS):
                left_s = until - self._clock()
                if left_s <= 0:
                    break
                self._ask(keys[start : start + MAX_ASKED_KEYS], left_s, nodes, found)
        except KVStoreError as error:
            self._counters.add("directory_unanswered")
            self._breaker.fail(str(error))
        else:
            self._breaker.succeed()
        return found

    def _living(self) -> Mapping[bytes, NodeAddress]:
        """Return the other nodes by what stands for them in entries; none when Redis has been
        silent for so long that all of them may be gone.
        """
        is_fresh = self._clock() - self._heard_at < self._terms.ttl_ms / 1000
        return self._nodes if is_fresh else {}

    def _ask(
        self,
        keys: Sequence[ChunkKey],
        within_s: float,
        nodes: Mapping[bytes, NodeAddress],
        found: Holders,
    ) -> None:
        self._counters.add("directory_questions")
        by_bucket: dict[int, list[ChunkKey]] = {}
        for key in keys:
            by_bucket.setdefault(key[-1] % self._scripts, []).append(key)
        calls: list[Call] = []
        for some in by_bucket.values():
            names = list(map(self._name, some))
            calls.append((names[0], (b"EVAL", _MEMBERS, len(names), *names, MAX_HOLDERS)))
        replies = self._link.ask(calls, within_s=within_s, reply_bytes=MAX_ANSWER_BYTES)
        for some, reply in zip(by_bucket.values(), replies, strict=True):
            rows = reply.split(b"\n") if isinstance(reply, bytes) else []
            if len(rows) == len(some):
                self._take_in(some, rows, nodes, found)

    def _take_in(
        self,
        keys: Sequence[ChunkKey],
        rows: Sequence[bytes],
        nodes: Mapping[bytes, NodeAddress],
        found: Holders,
    ) -> None:
        known: dict[bytes, tuple[tuple[NodeAddress, ...], list[bytes]]] = {}
        for key, row in zip(keys, rows, strict=True):
            if row not in known:  # those of a chain are mostly alike
                members = row.split()
                living = tuple(nodes[member] for member in members if member in nodes)
                others = [one for one in members if one not in nodes and one != self._member]
                known[row] = living, others
            living, others = known[row]
            if living:
                found[key] = living
            for member in others:
                self._unknown.met(key, member)

    def _name(self, key: ChunkKey) -> bytes:
        return self._stems[key[-1] % BUCKETS] + key.hex().encode()

    # --- saying

    def stored(self, tier: str, infos: Sequence[ChunkInfo], put_info: object = None) -> None:
        """Copies became visible on *tier*; those in memory are announced."""
        if tier == _MEMORY:
            self.sealed([info.key for info in infos])

    def removed(self, tier: str, key: ChunkKey, *, is_last: bool) -> None:
        """A copy is gone from *tier*."""
        if tier == _MEMORY:
            self.gone((key,))

    def sealed(self, keys: Sequence[ChunkKey]) -> None:
        """This node holds *keys* in memory from now on. Never blocks."""
        self._count_dropped(self._announcements.announce(keys))
        self._news.set()

    def gone(self, keys: Sequence[ChunkKey]) -> None:
        """This node holds *keys* in memory no longer. Never blocks."""
        self._count_dropped(self._announcements.withdraw(keys))
        self._news.set()

    def _count_dropped(self, count: int) -> None:
        if count:
            self._counters.add("directory_dropped_words", count)

    # --- life

    def start(self) -> None:
        """Begin to beat and to write, in the background."""
        self._thread.start()

    def close(self) -> None:
        """Leave the directory and disconnect. Idempotent."""
        self._stopping.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join()
        self._link.close()

    def _run(self) -> None:
        beat_s = self._terms.ttl_ms / 1000 / BEATS_PER_TTL
        next_beat = self._clock()
        while not self._stopping.is_set():
            if self._clock() >= next_beat:
                next_beat = self._clock() + beat_s
                self._try(self._beat)
            elif not self._failure:
                self._try(self._flush)
            self._news.wait(max(0.0, next_beat - self._clock()))
            self._news.clear()
            if self._failure:  # try again at the next beat, not at every word
                self._stopping.wait(max(0.0, next_beat - self._clock()))
            else:
                self._stopping.wait(FLUSH_S)
        with suppress(KVStoreError):
            self._membership.leave()

    def _try(self, work: Callable[[], None]) -> None:
        """Do *work*, and say once when it begins to fail, and when it works again."""
        try:
            work()
        except KVStoreError as error:
            if not self._failure:
                logger.warning("the node directory cannot be used", reason=str(error))
            self._failure = str(error)
            return
        if self._failure:
            logger.info("the node directory can be used again")
        self._failure = ""

    def _beat(self) -> None:
        before = self._membership.standing
        was_forgotten = self._membership.beat()
        self._heard_at = self._clock()
        self._nodes = {_member(one.incarnation): one for one in self._membership.living}
        self._unknown.forget(self._nodes)
        leftovers = self._unknown.take(BATCH_WORDS)
        if was_forgotten:
            self._announcements.lost()
        self._count_dropped(self._announcements.put_back(self._undelivered))
        self._undelivered.clear()
        if self._membership.standing is not before:
            self._announce_standing()
        self._clear(leftovers)
        self._flush()

    def _announce_standing(self) -> None:
        standing, me = self._membership.standing, self.me
        if standing is MembershipState.known:
            logger.info("this node is in the directory", node_id=me.node_id)
            return
        rival = self._membership.rival
        fix = "give some nodes another --redis-prefix"
        if standing is MembershipState.taken:
            fix = "give each node another --node-id"
        other = rival.grpc_address if rival else ""
        logger.error(
            "this node stays out of the directory",
            reason=standing.value, node_id=me.node_id, other=other, fix=fix,
        )  # fmt: skip

    def _flush(self) -> None:
        """Send what waits. Raises TierUnavailableError.

        What does not arrive, as part of a Cluster is lost or all of it, waits for the next beat.
        """
        if self._membership.standing is not MembershipState.known:
            return
        while not self._stopping.is_set():
            self._announcements.repeat(BATCH_WORDS)
            words = self._announcements.take(BATCH_WORDS)
            if not words:
                return
            self._send(words)

    def _clear(self, leftovers: Sequence[StaleEntry]) -> None:
        """Take the dead out of entries."""
        names = [(self._name(key), member) for key, member in leftovers]
        self._link.ask([(name, (b"SREM", name, member)) for name, member in names])

    def _send(self, words: Sequence[Update]) -> None:
        calls: list[Call] = []
        for key, is_held in words:
            name = self._name(key)
            calls.append((name, (b"SADD" if is_held else b"SREM", name, self._member)))
            calls.append((name, (b"EXPIRE", name, ENTRY_TTL_S)))
        try:
            replies = self._link.ask(calls)
        except OutOfMemoryError:
            self._count_dropped(len(words))
            raise is_full(self._link) from None
        except KVStoreError:
            self._undelivered += [key for key, _ in words]
            raise
        lost = [key for at, (key, _) in enumerate(words) if isinstance(replies[2 * at], NodeDown)]
        self._undelivered += lost
        del self._undelivered[:-MAX_PENDING]
        self._counters.add("directory_words", len(words) - len(lost))

    def report(self) -> DirectoryReport:
        """Return how this node stands, and whom it sees."""
        return DirectoryReport(
            self.me,
            self._membership.standing,
            tuple(sorted(self._living().values(), key=lambda node: node.node_id)),
            len(self._announcements),
            self._announcements.waiting + len(self._undelivered),
            self._failure,
        )


@dataclass(frozen=True, slots=True)
class DirectoryReport:
    """``nodes`` are the others that live, ``failure`` why it cannot be used, empty if it can."""

    me: NodeAddress
    standing: MembershipState
    nodes: tuple[NodeAddress, ...]
    announced: int
    waiting: int
    failure: str

    @property
    def is_up(self) -> bool:
        """Whether this node is in the directory, and Redis answers."""
        return self.standing is MembershipState.known and not self.failure

    def to_message(self) -> pb.Directory:
        """Return it as Status answers with."""
        nodes = [
            pb.DirectoryNode(
                node_id=node.node_id,
                incarnation=node.incarnation,
                grpc_address=node.grpc_address,
                bulk_address=node.bulk_address,
            )
            for node in self.nodes
        ]
        return pb.Directory(
            node_id=self.me.node_id,
            incarnation=self.me.incarnation,
            standing=self.standing.name,
            failure=self.failure,
            announced=self.announced,
            waiting=self.waiting,
            nodes=nodes,
        )


def _member(incarnation: int) -> bytes:
    """Return what stands for *incarnation* in sets: a signed number, which Redis keeps packed."""
    return b"%d" % (incarnation - (incarnation >> 63 << 64))
