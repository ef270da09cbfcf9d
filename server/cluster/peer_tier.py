"""The PeerTier: the memory of other servers, as a tier that can only be read.

It is ordered between this server's own tiers and those that all share. Its remote index holds
hints: they end after a while, and where one was wrong the chunk is lost, which is a miss.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import ClassVar

from typing_extensions import override

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import TierFullError, TierUnavailableError
from kvstore.proto.frame import MAX_FRAME_BYTES
from kvstore.proto.frame_verifier import FrameVerifier
from kvstore.proto.types import DIGEST_BYTES, ChunkInfo, ChunkKey
from kvstore.proto.unix_socket import Place, Reach
from kvstore.server.cluster.peer import PeerNode
from kvstore.server.cluster.peers import PeerChunk, Peers
from kvstore.server.telemetry.metrics import Counters
from kvstore.tiers.base import DEFAULT_TENANT, Reservation, Tier, TierStats

KNOWN_S = 10.0
MAX_KNOWN_CHUNKS = 1 << 16
"""Chunks of peers that are remembered; the oldest go first."""
CHECK_AGAIN_S = 1.0
"""A known chunk is checked again so often: a peer may have evicted or deleted it."""
CHECKED_AGAIN = 64
"""Chunks in one such query, which keeps nobody waiting for long."""
QUERIES_AGAIN = 4
"""Such queries in one turn of the upkeep; what is beyond them is known for KNOWN_S."""
STALE_PER_TICK = 1024
"""Of the oldest entries, checked in one tick."""


class PeerTier(Tier):
    """Read-only. ``find`` queries peers, the rest goes by its last answers. Thread-safe."""

    name = "peer"
    shared: ClassVar[bool] = True
    read_only: ClassVar[bool] = True
    reads_parts: ClassVar[bool] = False
    capacity_bytes = 0

    def __init__(self, peers: Peers, counters: Counters, clock: Callable[[], float]) -> None:
        self.peers = peers
        self._counters = counters
        self._clock = clock
        self._index: OrderedDict[ChunkKey, tuple[PeerChunk, float]] = OrderedDict()
        """Which peers have a chunk, and since when that is known."""
        self._senders: OrderedDict[ChunkKey, PeerNode] = OrderedDict()
        """Who sent what was read last, in case it proves wrong."""
        self._checked: OrderedDict[ChunkKey, float] = OrderedDict()
        """When peers were queried last for each known chunk, the longest ago first."""
        self._dropped: list[ChunkKey] = []
        self._were_up: set[PeerNode] = set()
        # Guards the five above.
        self._lock = threading.Lock()
        peers.after_step = self.check_again

    # --- what is known

    @override
    def find(self, keys: Sequence[ChunkKey], until: float = math.inf) -> list[ChunkInfo | None]:
        """Query peers for *keys*, of one namespace. Ends by *until*. Never raises."""
        found = self.peers.find(keys, until)
        now = self._clock()
        with self._lock:
            for key, chunk in found.items():
                self._index[key], self._checked[key] = (chunk, now), now
                self._index.move_to_end(key)
                self._checked.move_to_end(key)
            while len(self._index) > MAX_KNOWN_CHUNKS:
                key, _ = self._index.popitem(last=False)
                self._checked.pop(key, None)
                self._dropped.append(key)
        return [found[key].info if key in found else None for key in keys]

    def stale(self, *, everything: bool = False) -> list[ChunkKey]:
        """Return what is known for too long, or of peers that are not up any more; or all.

        It stays known until ``delete``.
        """
        now = self._clock()
        up = {peer for peer in self.peers.known() if peer.is_up}
        with self._lock:
            gone, self._dropped = self._dropped, []
            # Only when a peer went down is there anything to look for among what is not old.
            is_usual = self._were_up <= up and not everything
            limit = STALE_PER_TICK if is_usual else MAX_KNOWN_CHUNKS
            self._were_up = up
            known = list(islice(self._index.items(), limit))
        for key, (chunk, since) in known:
            if everything or now - since > KNOWN_S or up.isdisjoint(chunk.peers):
                gone.append(key)
        return list(dict.fromkeys(gone))

    def check_again(self) -> None:
        """Query peers for what is known of them; what they lack by now is known no more.

        For the thread of the upkeep. Nothing is known for longer by that.
        """
        for _ in range(QUERIES_AGAIN):
            wanted: dict[PeerNode, list[ChunkKey]] = {}
            for key, chunk in self._due():
                for peer in chunk.peers:
                    session, count = peer.session, len(wanted.get(peer, ()))
                    if peer.is_up and session is not None and count < session.max_batch_chunks:
                        wanted.setdefault(peer, []).append(key)
            if not wanted:
                return
            found = self.peers.query(wanted)
            for peer, infos in found.items():
                for key in set(wanted[peer]) - {info.key for info in infos}:
                    self._withdraw(key, peer)
            if len(found) < len(wanted):  # one is silent: the upkeep has more to do than wait
                return

    def _due(self) -> list[tuple[ChunkKey, PeerChunk]]:
        """Return what is to be checked again, of one namespace, and count it as checked."""
        now = self._clock()
        due: list[tuple[ChunkKey, PeerChunk]] = []
        with self._lock:
            for key, checked_at in islice(self._checked.items(), CHECKED_AGAIN):
                is_other = due and key[:DIGEST_BYTES] != due[0][0][:DIGEST_BYTES]
                if now - checked_at < CHECK_AGAIN_S or is_other:
                    break
                due.append((key, self._index[key][0]))
            for key, _ in due:
                self._checked[key] = now
                self._checked.move_to_end(key)
        return due

    @override
    def load_s(self, key: ChunkKey, size_bytes: int) -> float | None:
        peers = self._peers_with(key)
        return min((peer.speed.load_s(size_bytes) for peer in peers), default=None)

    def _chunk(self, key: ChunkKey) -> PeerChunk | None:
        with self._lock:
            found = self._index.get(key)
        return None if found is None else found[0]

    def _peers_with(self, key: ChunkKey) -> list[PeerNode]:
        chunk = self._chunk(key)
        return [] if chunk is None else [peer for peer in chunk.peers if peer.is_up]

    # --- direct reads by clients

    def reachable(self) -> list[int]:
        """Return the numbers of all peers that clients may read from."""
        return [peer.number for peer in self.peers.known() if peer.is_up]

    @override
    def lenders(self, keys: Sequence[ChunkKey]) -> set[int]:
        return {peer.number for key in keys for peer in self._peers_with(key)}

    @override
    def peer_place(self, key: ChunkKey, peers: Collection[int]) -> Place | None:
        chunk = self._chunk(key)
        if chunk is None:
            return None
        size_bytes = chunk.info.size_bytes
        usable = [peer for peer in chunk.peers if peer.number in peers and peer.is_up]
        peer = min(usable, key=lambda one: one.speed.load_s(size_bytes), default=None)
        return None if peer is None else Place(peer.number, Reach.peer, 0, 0, size_bytes, 0)

    # --- reading

    @override
    def batch_key(self, key: ChunkKey) -> object:
        chunk = self._chunk(key)  # those of one peer are read by one request
        return chunk.peers if chunk is not None else None

    @override
    def expect(self, keys: Sequence[ChunkKey]) -> None:
        self.peers.pipeline.expect(keys)

    @override
    def read(
        self, key: ChunkKey, out: Bytes, offset: int = 0, verifier: FrameVerifier | None = None
    ) -> bool:
        chunk = self._chunk(key)
        if chunk is None:
            return False
        space, after = key[:DIGEST_BYTES], self.peers.pipeline.after(key)
        with self._lock:
            known = [one for one in after if one[:DIGEST_BYTES] == space and one in self._index]
            following = [self._index[one][0] for one in known]
        sender = None
        try:
            with closing(self.peers.read(chunk, out, offset, following)) as steps:
                for sender, arrived in steps:
                    if arrived == len(out):
                        self._counters.add("peer_read_chunks")
                        with self._lock:
                            self._senders[key] = sender
                            if len(self._senders) > MAX_KNOWN_CHUNKS:
                                self._senders.popitem(last=False)
                    if verifier is not None:
                        verifier.update(arrived)
        except TierUnavailableError:
            self._withdraw(key, sender)
            raise
        if sender is None:
            self.delete(key)
        return sender is not None

    def _withdraw(self, key: ChunkKey, sender: PeerNode | None) -> None:
        """*sender* does not have *key*, or failed at it: the others are left."""
        with self._lock:
            chunk, since = self._index.get(key, (None, 0.0))
            if chunk is not None:
                rest = tuple(peer for peer in chunk.peers if peer is not sender)
                self._index[key] = (PeerChunk(chunk.info, rest), since)
                if not rest:
                    self._dropped.append(key)

    @override
    def note_corrupt(self, key: ChunkKey) -> None:
        with self._lock:
            sender = self._senders.pop(key, None)
        self._counters.add("peer_corrupt_chunks")
        if sender is not None:
            sender.note_fault()

    @override
    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            self._senders.pop(key, None)
            self._checked.pop(key, None)
            return self._index.pop(key, None) is not None

    # --- what a tier has and this one does not

    @override
    def allocated_bytes(self, size_bytes: int) -> int:
        return size_bytes

    @override
    def max_frame_bytes(self) -> int:
        return MAX_FRAME_BYTES

    @override
    def reserve(self, info: ChunkInfo, tenant: str = DEFAULT_TENANT) -> Reservation:
        raise TierFullError(self.name, info.size_bytes, 0)

    @override
    def write(self, reservation: Reservation, offset: int, data: Bytes) -> None:
        raise TierFullError(self.name, len(data), 0)

    @override
    def seal(self, reservation: Reservation, *, durable: bool = False) -> bool:
        raise TierFullError(self.name, reservation.reserved_bytes, 0)

    @override
    def abort(self, reservation: Reservation) -> None:
        """Nothing was reserved."""

    @override
    def scan(self) -> Iterator[ChunkInfo]:
        return iter(())

    @override
    def stats(self) -> TierStats:
        return TierStats(0, 0, len(self._index), 0)

    @override
    def flush(self) -> None:
        """Nothing is written."""

    @override
    def close(self) -> None:
        self.peers.close()
