"""The PeerTier: the memory of other servers, as a tier that can only be read.

It stands between this server's own tiers and those that all share. What it knows of peers is
remote hints: it ends after a while, and where it was wrong the chunk is lost, which is a miss.
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
from kvstore.server.cluster.peer import Peer
from kvstore.server.cluster.peers import Offer, Peers
from kvstore.server.telemetry.metrics import Counters
from kvstore.tiers.base import DEFAULT_TENANT, PeerPlace, Reservation, Tier, TierStats


class Expected:
    """The row of chunks that each thread reads, one after the other. Thread-safe."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def note(self, keys: Sequence[ChunkKey]) -> None:
        """Take note that the calling thread reads *keys*, from now on and in this order."""
        self._of_thread.row = tuple(keys)

    def after(self, key: ChunkKey) -> Sequence[ChunkKey]:
        """Return what the calling thread reads after *key*; nothing when it was to read another."""
        row: tuple[ChunkKey, ...] = getattr(self._of_thread, "row", ())
        return row[1:] if row[:1] == (key,) else ()


KNOWN_S = 10.0
MAX_KNOWN_CHUNKS = 1 << 16
"""Offers that are remembered; the oldest go first."""
ASKED_AGAIN_S = 1.0
"""What is believed of a chunk is asked again so often: a peer may have evicted or deleted it."""
ASKED_AGAIN = 64
"""Chunks in one such question, which keeps nobody waiting for long."""
QUESTIONS_AGAIN = 4
"""Such questions in one turn of the upkeep; what is beyond them is believed for KNOWN_S."""
STALE_PER_TICK = 1024
"""Of the oldest offers, looked at in one tick."""


class PeerTier(Tier):
    """Read-only. ``find`` asks, the rest goes by what ``find`` heard last. Thread-safe."""

    name = "peer"
    shared: ClassVar[bool] = True
    read_only: ClassVar[bool] = True
    reads_parts: ClassVar[bool] = False
    capacity_bytes = 0

    def __init__(self, peers: Peers, counters: Counters, clock: Callable[[], float]) -> None:
        self.peers = peers
        self._counters = counters
        self._clock = clock
        self._offers: OrderedDict[ChunkKey, tuple[Offer, float]] = OrderedDict()
        self._senders: OrderedDict[ChunkKey, Peer] = OrderedDict()
        """Who sent what was read last, in case it proves wrong."""
        self._heard: OrderedDict[ChunkKey, float] = OrderedDict()
        """When peers were asked last for each chunk that they offered, the longest ago first."""
        self._dropped: list[ChunkKey] = []
        self._were_up: set[Peer] = set()
        # Guards the five above.
        self._lock = threading.Lock()
        self._expected = Expected()
        peers.after_step = self.ask_again

    # --- what is known

    @override
    def find(self, keys: Sequence[ChunkKey], until: float = math.inf) -> list[ChunkInfo | None]:
        """Ask peers which of *keys*, of one namespace, they have in memory. Never raises.

        Ends by *until*, a point on the clock, be they asked by then or not.
        """
        offers = self.peers.find(keys, until)
        now = self._clock()
        with self._lock:
            for key, offer in offers.items():
                self._offers[key], self._heard[key] = (offer, now), now
                self._offers.move_to_end(key)
                self._heard.move_to_end(key)
            while len(self._offers) > MAX_KNOWN_CHUNKS:
                key, _ = self._offers.popitem(last=False)
                self._heard.pop(key, None)
                self._dropped.append(key)
        return [offers[key].info if key in offers else None for key in keys]

    def stale(self, *, everything: bool = False) -> list[ChunkKey]:
        """Return what was heard too long ago, or of peers that are not up any more; or all.

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
            known = list(islice(self._offers.items(), limit))
        for key, (offer, heard_at) in known:
            if everything or now - heard_at > KNOWN_S or up.isdisjoint(offer.peers):
                gone.append(key)
        return list(dict.fromkeys(gone))

    def ask_again(self) -> None:
        """Ask peers for what they offered a while ago; what they lack by now is offered no more.

        For the thread of the upkeep. What was heard by that is believed no longer than before.
        """
        for _ in range(QUESTIONS_AGAIN):
            due = self._due()
            wanted: dict[Peer, list[ChunkKey]] = {}
            for key, offer in due:
                for peer in offer.peers:
                    some = wanted.setdefault(peer, [])
                    if len(some) < peer.max_batch_chunks and peer.is_up:
                        some.append(key)
            wanted = {peer: keys for peer, keys in wanted.items() if keys}
            if not wanted:
                return
            there = self.peers.still_there(wanted)
            for peer, keys in there.items():
                for key in wanted[peer]:
                    if key not in keys:
                        self._withdraw(key, peer)
            if len(there) < len(wanted):  # one is silent: the upkeep has more to do than wait
                return

    def _due(self) -> list[tuple[ChunkKey, Offer]]:
        """Return what is to be asked again, of one namespace, and count it as asked."""
        now = self._clock()
        due: list[tuple[ChunkKey, Offer]] = []
        with self._lock:
            for key, asked_at in islice(self._heard.items(), ASKED_AGAIN):
                space = key[:DIGEST_BYTES]
                if now - asked_at < ASKED_AGAIN_S or (due and space != due[0][0][:DIGEST_BYTES]):
                    break
                due.append((key, self._offers[key][0]))
            for key, _ in due:
                self._heard[key] = now
                self._heard.move_to_end(key)
        return due

    @override
    def load_s(self, key: ChunkKey, size_bytes: int) -> float | None:
        """Return how long the fastest peer that has *key* takes to send it; None without one."""
        offer = self._offer(key)
        up = [peer for peer in offer.peers if peer.is_up] if offer is not None else []
        return min((peer.speed.load_s(size_bytes) for peer in up), default=None)

    def _offer(self, key: ChunkKey) -> Offer | None:
        with self._lock:
            found = self._offers.get(key)
        return None if found is None else found[0]

    # --- reading by others

    def lent(self) -> list[int]:
        """Return the numbers of all whom readers may ask."""
        return [peer.number for peer in self.peers.known() if peer.is_up]

    @override
    def lenders(self, keys: Sequence[ChunkKey]) -> set[int]:
        """Return the numbers of those who have some of *keys*, and whom readers may ask."""
        offers = filter(None, map(self._offer, keys))
        peers = {peer for offer in offers for peer in offer.peers}
        return {peer.number for peer in peers if peer.is_up}

    @override
    def peer_place(self, key: ChunkKey, peers: Collection[int]) -> PeerPlace | None:
        """Return from whom of *peers* a reader gets *key* fastest; None from none of them."""
        offer = self._offer(key)
        if offer is None:
            return None
        lent = [peer for peer in offer.peers if peer.number in peers and peer.is_up]
        size_bytes = offer.info.size_bytes
        peer = min(lent, key=lambda one: one.speed.load_s(size_bytes), default=None)
        return None if peer is None else PeerPlace(peer.number, size_bytes)

    # --- reading

    @override
    def batch_key(self, key: ChunkKey) -> object:
        """Return who has *key*, as chunks of one peer are asked for in one request."""
        offer = self._offer(key)
        return offer.peers if offer is not None else None

    @override
    def expect(self, keys: Sequence[ChunkKey]) -> None:
        self._expected.note(keys)
        if not keys:
            self.peers.runs.end()

    def _next_offers(self, key: ChunkKey) -> list[Offer]:
        """Return what was offered of the chunks that this thread reads after *key*."""
        keys = self._expected.after(key)
        space = key[:DIGEST_BYTES]
        with self._lock:
            known = [self._offers.get(one) for one in keys if one[:DIGEST_BYTES] == space]
        return [found[0] for found in known if found is not None]

    @override
    def read(
        self, key: ChunkKey, out: Bytes, offset: int = 0, verifier: FrameVerifier | None = None
    ) -> bool:
        """Fill *out* with the frame's bytes from *offset*. False when no peer has it any more."""
        offer = self._offer(key)
        if offer is None:
            return False
        sender = None
        try:
            more = self._next_offers(key)
            with closing(self.peers.read(offer.info, offer.peers, out, offset, more)) as steps:
                for sender, arrived in steps:
                    if arrived == len(out):
                        self._sent(key, sender)
                    if verifier is not None:
                        verifier.update(arrived)
        except TierUnavailableError:
            self._withdraw(key, sender)
            raise
        if sender is None:
            self.delete(key)
        return sender is not None

    def _withdraw(self, key: ChunkKey, sender: Peer | None) -> None:
        """The *sender* of *key* has failed at it: the others are left."""
        with self._lock:
            offer, heard_at = self._offers.get(key, (None, 0.0))
            if offer is not None:
                rest = tuple(peer for peer in offer.peers if peer is not sender)
                self._offers[key] = (Offer(offer.info, rest), heard_at)
                if not rest:
                    self._dropped.append(key)

    def _sent(self, key: ChunkKey, sender: Peer) -> None:
        self._counters.add("peer_read_chunks")
        with self._lock:
            self._senders[key] = sender
            if len(self._senders) > MAX_KNOWN_CHUNKS:
                self._senders.popitem(last=False)

    @override
    def note_corrupt(self, key: ChunkKey) -> None:
        """Count wrong bytes against who sent them."""
        with self._lock:
            sender = self._senders.pop(key, None)
        self._counters.add("peer_corrupt_chunks")
        if sender is not None:
            sender.lied()

    @override
    def delete(self, key: ChunkKey) -> bool:
        """Forget that peers have *key*; they keep it."""
        with self._lock:
            self._senders.pop(key, None)
            self._heard.pop(key, None)
            return self._offers.pop(key, None) is not None

    # --- what a tier has and this one does not

    @override
    def allocated_bytes(self, size_bytes: int) -> int:
        """Return *size_bytes*: none of it is this server's."""
        return size_bytes

    @override
    def max_frame_bytes(self) -> int:
        """Return the largest frame that there is."""
        return MAX_FRAME_BYTES

    @override
    def reserve(self, info: ChunkInfo, tenant: str = DEFAULT_TENANT) -> Reservation:
        """Raise TierFullError: peers put what they want themselves."""
        raise TierFullError(self.name, info.size_bytes, 0)

    @override
    def write(self, reservation: Reservation, offset: int, data: Bytes) -> None:
        """Raise TierFullError."""
        raise TierFullError(self.name, len(data), 0)

    @override
    def seal(self, reservation: Reservation, *, durable: bool = False) -> bool:
        """Raise TierFullError."""
        raise TierFullError(self.name, reservation.reserved_bytes, 0)

    @override
    def abort(self, reservation: Reservation) -> None:
        """Nothing was reserved."""

    @override
    def scan(self) -> Iterator[ChunkInfo]:
        """Yield nothing: peers are asked for what is wanted."""
        return iter(())

    @override
    def stats(self) -> TierStats:
        """Return what is known of them; no byte of it is this server's."""
        return TierStats(0, 0, len(self._offers), 0)

    @override
    def flush(self) -> None:
        """Nothing is written."""

    @override
    def close(self) -> None:
        """Hang up on all peers. Idempotent."""
        self.peers.close()
