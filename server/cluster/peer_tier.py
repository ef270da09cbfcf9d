"""The PeerTier: the memory of other servers as a read-only tier.

It is ordered between this server's own tiers and the shared ones. Its remote index holds hints
that expire; where one is wrong the chunk is a miss.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, NoReturn

from typing_extensions import override

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import TierFullError, TierUnavailableError
from kvstore.proto.frame import MAX_FRAME_BYTES
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import DIGEST_BYTES, ChunkInfo, ChunkKey
from kvstore.proto.unix_socket import Place, Reach
from kvstore.server.cluster.peers import PeerChunk, PeerNode, Peers
from kvstore.server.telemetry.metrics import Counters
from kvstore.tiers.base import Tier, TierStats

KNOWN_S = 10.0
MAX_KNOWN_CHUNKS = 1 << 16
"""Limit of indexed chunks of peers; further ones are not found."""
CHECK_AGAIN_S = 1.0
"""Interval between checks of a known chunk: a peer may have evicted or deleted it."""
CHECKED_AGAIN = 64
"""Chunks per such query, to keep it short."""
STALE_PER_TICK = 1024
"""Oldest entries checked for expiry per tick."""
QUERIES_AGAIN = 4
"""Such queries per upkeep step; entries beyond them expire after KNOWN_S."""


@dataclass(slots=True)
class _Known:
    """Peers that have a chunk, since when it is known, and its last check."""

    chunk: PeerChunk
    since: float
    checked_at: float
    sender: PeerNode | None = None
    """The last sender, to blame if it fails verification."""


class PeerTier(Tier):
    """Read-only. ``find`` queries peers, the rest uses its last answers. Thread-safe."""

    name = "peer"
    shared: ClassVar[bool] = True
    read_only: ClassVar[bool] = True
    reads_parts: ClassVar[bool] = False
    capacity_bytes = 0
    max_frame_bytes = MAX_FRAME_BYTES

    def __init__(self, peers: Peers, counters: Counters, clock: Callable[[], float]) -> None:
        self.peers = peers
        self._counters = counters
        self._clock = clock
        self._index: dict[ChunkKey, _Known] = {}
        """In insertion order."""
        self._gone: list[ChunkKey] = []
        """Chunks that no peer has any more."""
        self._were_up: frozenset[PeerNode] = frozenset()
        self._lock = threading.Lock()  # guards changes of the index, and reads of all of it
        peers.after_step = self.check_again

    @override
    def find(self, keys: Sequence[ChunkKey], until: float = math.inf) -> list[ChunkInfo | None]:
        """Query peers for *keys*, of one namespace. Ends by *until*. Never raises."""
        found = self.peers.find(keys, until)
        now = self._clock()
        with self._lock:
            for key, chunk in found.items():
                known = self._index.pop(key, None)
                if len(self._index) < MAX_KNOWN_CHUNKS:
                    sender = known.sender if known else None
                    self._index[key] = _Known(chunk, now, now, sender)
            return [
                found[key].info if key in found and key in self._index else None for key in keys
            ]

    def stale(self, *, everything: bool = False) -> list[ChunkKey]:
        """Return expired entries and those of peers that are down; or all."""
        oldest = math.inf if everything else self._clock() - KNOWN_S
        up = frozenset(peer for peer in self.peers.known() if peer.is_up)
        with self._lock:
            gone, self._gone = self._gone, []
            # Beyond the oldest entries, only a peer that went down can make more of them stale.
            is_usual = self._were_up <= up and not everything
            self._were_up = up
            index = list(islice(self._index.items(), STALE_PER_TICK if is_usual else None))
        late = (k for k, one in index if one.since < oldest or up.isdisjoint(one.chunk.peers))
        return list(dict.fromkeys([*gone, *late]))

    def check_again(self) -> None:
        """Check some entries with their peers; for the upkeep thread."""
        now = self._clock()
        with self._lock:
            index = list(self._index.items())
        late = (row for row in index if row[1].checked_at <= now - CHECK_AGAIN_S)
        due = list(islice(late, QUERIES_AGAIN * CHECKED_AGAIN))
        for _ in range(QUERIES_AGAIN):
            of_space = [row for row in due if row[0][:DIGEST_BYTES] == due[0][0][:DIGEST_BYTES]]
            wanted: dict[PeerNode, list[ChunkKey]] = {}
            for key, known in of_space[:CHECKED_AGAIN]:
                known.checked_at = now
                for peer in known.chunk.peers:
                    session, count = peer.session, len(wanted.get(peer, ()))
                    if peer.is_up and session is not None and count < session.max_batch_chunks:
                        wanted.setdefault(peer, []).append(key)
            due = [row for row in due if row[1].checked_at < now]
            found = self.peers.query(wanted)
            for peer, infos in found.items():
                for key in set(wanted[peer]) - {info.key for info in infos}:
                    self._withdraw(key, peer)
            if len(found) < len(wanted):  # a peer is silent: do not block the upkeep
                return

    @override
    def load_s(self, key: ChunkKey, size_bytes: int) -> float | None:
        return min((peer.load_s(size_bytes) for peer in self._peers_with(key)), default=None)

    def _peers_with(self, key: ChunkKey) -> list[PeerNode]:
        known = self._index.get(key)
        return [] if known is None else [peer for peer in known.chunk.peers if peer.is_up]

    def reachable(self) -> list[int]:
        """Return the numbers of all peers that clients may read from."""
        return [peer.number for peer in self.peers.known() if peer.is_up]

    @override
    def lenders(self, keys: Sequence[ChunkKey]) -> set[int]:
        return {peer.number for key in keys for peer in self._peers_with(key)}

    @override
    def peer_place(self, key: ChunkKey, peers: Collection[int]) -> Place | None:
        known = self._index.get(key)
        usable = [peer for peer in self._peers_with(key) if peer.number in peers]
        if known is None or not usable:
            return None
        size_bytes = known.chunk.info.size_bytes
        peer = min(usable, key=lambda one: one.load_s(size_bytes))
        return Place(peer.number, Reach.peer, 0, 0, size_bytes, 0)

    @override
    def batch_key(self, key: ChunkKey) -> object:
        known = self._index.get(key)  # chunks of one peer are read by one request
        return known.chunk.peers if known is not None else None

    @override
    def expect(self, keys: Sequence[ChunkKey]) -> None:
        self.peers.expect(keys)

    @override
    def read(
        self, key: ChunkKey, out: Bytes, offset: int = 0, verifier: FrameVerifier | None = None
    ) -> bool:
        known = self._index.get(key)
        if known is None:
            return False
        alike = (one for one in self.peers.after(key) if one[:DIGEST_BYTES] == key[:DIGEST_BYTES])
        following = [next_one.chunk for next_one in map(self._index.get, alike) if next_one]
        sender = None
        try:
            with closing(self.peers.read(known.chunk, out, offset, following)) as steps:
                for sender, arrived in steps:
                    if arrived == len(out):
                        self._counters.add("peer_read_chunks")
                        known.sender = sender
                    if verifier is not None:
                        verifier.update(arrived)
        except TierUnavailableError:
            self._withdraw(key, sender)
            raise
        if sender is None:
            self.delete(key)
        return sender is not None

    def _withdraw(self, key: ChunkKey, sender: PeerNode | None) -> None:
        """Remove *sender*, which lacks *key* or failed to send it, from the holders."""
        with self._lock:
            known = self._index.get(key)
            if known is not None:
                rest = tuple(peer for peer in known.chunk.peers if peer is not sender)
                known.chunk = PeerChunk(known.chunk.info, rest)
                if not rest:
                    self._gone.append(key)

    @override
    def note_corrupt(self, key: ChunkKey) -> None:
        self._counters.add("peer_corrupt_chunks")
        known = self._index.get(key)
        if known is not None and known.sender is not None:
            known.sender.note_fault()
            known.sender = None

    @override
    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            return self._index.pop(key, None) is not None

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TierFullError(self.name, 0, 0)

    reserve = write = seal = abort = _refuse

    @override
    def scan(self) -> Iterator[ChunkInfo]:
        return iter(())

    @override
    def stats(self) -> TierStats:
        return TierStats(0, 0, len(self._index), 0)

    @override
    def close(self) -> None:
        self.peers.close()
