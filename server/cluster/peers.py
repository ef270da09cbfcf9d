"""Peers: the other servers of a fleet, whose CPU memory this one may read from.

The node directory names the holders of a chunk, or all of a fixed list are queried. Sessions are
opened and kept in a thread of their own, so that no lookup ever waits for a connection:
a peer that is not up is not queried.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import count, takewhile
from typing import NamedTuple

import structlog

from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    TierUnavailableError,
)
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.cluster.membership import NodeAddress
from kvstore.server.cluster.peer import PeerNode
from kvstore.server.cluster.peer_connections import Dial, StreamLink
from kvstore.server.settings.values import MAX_QUERIED_PEERS, Limits
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.breaker import Breaker

MAX_PEERS = 256
"""Nodes of the directory that are known at once; the one that was named longest ago goes."""
UPKEEP_S = 0.25
_DIAL_S = 1.0
_JOIN_S = 3.0
_PATIENT = 0.25
"""Of a timeout: a request that had less time than this counts nothing against a peer."""

logger = structlog.get_logger(__name__)


class _Run(NamedTuple):
    peer: PeerNode
    link: StreamLink
    checkout: ExitStack
    """Gives the link back."""


class PipelinedReads(threading.local):
    """What the calling thread reads from peers, and the link over which more of it is coming.

    A thread that reads something else than what comes next hangs up on it.
    """

    def __init__(self) -> None:
        self._keys: tuple[ChunkKey, ...] = ()
        self._run: _Run | None = None

    def expect(self, keys: Sequence[ChunkKey]) -> None:
        """The thread reads *keys*, from now on and in this order. Nothing: it hangs up."""
        self._keys = tuple(keys)
        if not keys:
            self._end()

    def after(self, key: ChunkKey) -> Sequence[ChunkKey]:
        """Return what the thread reads after *key*; nothing when it was to read another."""
        return self._keys[1:] if self._keys[:1] == (key,) else ()

    def sender(self, key: ChunkKey) -> PeerNode | None:
        """Return which peer sends *key* to the thread next; hang up on one that sends another."""
        if self._run is not None and self._run.link.coming == key:
            return self._run.peer
        self._end()
        return None

    @contextmanager
    def link(self, peer: PeerNode, within_s: float) -> Iterator[StreamLink]:
        """Lend a link to *peer* for a frame, the one that it comes over if it is being sent.

        Raises as ``PeerNode.checkout`` does.
        """
        if self._run is not None and self._run.peer is not peer:
            self._end()
        run, self._run = self._run, None
        with ExitStack() if run is None else run.checkout as stack:
            link = stack.enter_context(peer.checkout(within_s)) if run is None else run.link
            yield link
            if link.coming is not None:
                self._run = _Run(peer, link, stack.pop_all())

    def _end(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.checkout.close()


Holders = Callable[[Sequence[ChunkKey], float], Mapping[ChunkKey, tuple[NodeAddress, ...]]]
"""From keys, and seconds that it may take, to who holds each; ``Directory.holders``."""


class PeerChunk(NamedTuple):
    """A chunk in the memory of ``peers``."""

    info: ChunkInfo
    peers: tuple[PeerNode, ...]


class Peers:
    """Knows live peers, chooses, queries and fetches. Thread-safe.

    Those at *addresses* are always queried. *dial* opens a session at a peer. *clock* returns
    monotonic seconds. ``start`` begins the upkeep; ``step`` is one turn of it.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        limits: Limits,
        dial: Dial,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.holders: Holders | None = None
        """What the node directory knows; None: it is not used."""
        self.after_step: Callable[[], object] = bool
        """Called at the end of each turn of the upkeep, in its thread."""
        self.pipeline = PipelinedReads()
        self._limits = limits
        self._timeout_s = limits.peer_timeout_ms / 1000
        self._dial = dial
        self._counters = counters
        self._clock = clock
        self._node_id = ""
        self._boot_id = 0
        self._numbers = count(1)
        self._static = [self._new(address) for address in addresses[:MAX_QUERIED_PEERS]]
        self._listed: OrderedDict[str, PeerNode] = OrderedDict()
        # Guards the table of nodes that the directory named.
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def _new(self, address: str) -> PeerNode:
        failures, retry_ms = self._limits.breaker_failures, self._limits.breaker_retry_ms
        breaker = Breaker(f"peer {address}", failures, retry_ms, self._clock)
        return PeerNode(address, breaker, self._clock, next(self._numbers))

    def start(self, node_id: str, boot_id: int) -> None:
        """Begin to open sessions, as *node_id*, of whose present start *boot_id* is."""
        self._node_id, self._boot_id = node_id, boot_id
        self._thread = threading.Thread(target=self._upkeep, name="peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on all, which wakes who waits for one. Idempotent."""
        self._stopping.set()
        for peer in self.known():
            peer.forget()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def known(self) -> list[PeerNode]:
        """Return every peer that is known, up or not."""
        with self._lock:
            return [*self._static, *self._listed.values()]

    # --- upkeep

    def _upkeep(self) -> None:
        while not self._stopping.wait(UPKEEP_S):
            self.step()

    def step(self) -> None:
        """Open sessions where there is none, and keep the others from ending."""
        for peer in self.known():
            if self._stopping.is_set() or peer.is_self or peer.is_barred:
                continue
            session = peer.session
            silent_s = session.heartbeat_ms / 4000 if session is not None else 0.0
            is_due = self._clock() - peer.answered_at > silent_s
            if (peer.breaker.reason or is_due) and peer.breaker.allows():
                self._keep(peer)
        self.after_step()

    def _keep(self, peer: PeerNode) -> None:
        try:
            if peer.breaker.reason or peer.session is None:  # it may have been started again
                peer.forget()
                session = self._dial(peer.address, self._node_id, _DIAL_S)
                peer.is_self = session.boot_id == self._boot_id
                if peer.is_self:
                    return
                peer.open_session(session)
                if self._stopping.is_set():  # nobody else hangs up on it any more
                    peer.forget()
            self.query({peer: [_NO_KEY]})
        except InvalidRequestError as error:
            peer.breaker.fail(str(error))
            logger.warning("peer cannot be asked", peer=peer.address, reason=str(error))
        except TierUnavailableError as error:
            peer.breaker.fail(str(error))
            logger.debug("peer is not there", peer=peer.address, reason=str(error))

    # --- finding

    def find(self, keys: Sequence[ChunkKey], until: float = math.inf) -> dict[ChunkKey, PeerChunk]:
        """Return which of *keys*, of one namespace, are in the memory of peers that are up.

        Takes two timeouts at most, the directory's and the peers', and ends by *until*. Never
        raises.
        """
        wanted = self._choose(keys, until)
        if not wanted:
            return {}
        self._counters.add("peer_finds")
        found: dict[ChunkKey, PeerChunk] = {}
        for peer, infos in self.query(wanted, until).items():
            for info in infos:
                first, peers = found.get(info.key, (info, ()))
                if first.layout == info.layout and first.fidelity is info.fidelity:
                    found[info.key] = PeerChunk(first, (*peers, peer))
        self._counters.add("peer_found_chunks", len(found))
        return found

    def _choose(self, keys: Sequence[ChunkKey], until: float) -> dict[PeerNode, list[ChunkKey]]:
        """Return the keys by peer: all for the fixed list, for others what the directory names."""
        wanted = {peer: list(keys) for peer in self._static if peer.is_up and not peer.is_self}
        if self.holders is None:
            return wanted
        within_s = min(self._timeout_s, until - self._clock())
        of_nodes: dict[int, list[ChunkKey]] = {}
        for key, nodes in self.holders(keys, within_s).items():
            for node in nodes:
                if node.incarnation not in of_nodes:
                    peer = self._peer_of(node)
                    has_room = peer in wanted or len(wanted) < MAX_QUERIED_PEERS
                    is_used = peer.is_up and has_room
                    of_nodes[node.incarnation] = wanted.setdefault(peer, []) if is_used else []
                of_node = of_nodes[node.incarnation]
                if of_node[-1:] != [key]:
                    of_node.append(key)
        return wanted

    def _peer_of(self, node: NodeAddress) -> PeerNode:
        """Return the peer that the directory calls *node*; a new one is dialled by the upkeep."""
        named = next((one for one in self._static if one.address == node.grpc_address), None)
        if named is not None:
            return named
        gone: list[PeerNode] = []
        with self._lock:
            peer = self._listed.get(node.grpc_address)
            if peer is None:
                peer = self._listed[node.grpc_address] = self._new(node.grpc_address)
            self._listed.move_to_end(node.grpc_address)
            if len(self._listed) > MAX_PEERS:
                gone.append(self._listed.popitem(last=False)[1])
            if peer.incarnation not in (0, node.incarnation):  # it was started again
                gone.append(peer)
            peer.incarnation = node.incarnation
        for one in gone:
            one.forget()
        return peer

    def query(
        self, wanted: Mapping[PeerNode, Sequence[ChunkKey]], until: float = math.inf
    ) -> dict[PeerNode, list[ChunkInfo]]:
        """Query all at once, and wait for each until one timeout has passed, or until *until*.

        Return which of its keys, of one namespace, each peer has that answers. One for which no
        time is left when its turn comes is left out, which counts nothing against it.
        """
        started = self._clock()
        deadline = min(started + self._timeout_s, until)
        found: dict[PeerNode, list[ChunkInfo]] = {}

        def failed(peer: PeerNode, error: KVStoreError, left_s: float) -> None:
            """*left_s* seconds were left when its turn came."""
            if not isinstance(error, DeadlineError) or left_s >= _PATIENT * self._timeout_s:
                self._counters.add(peer.note_failure(error))

        with ExitStack() as stack:
            begun: list[tuple[PeerNode, StreamLink, Sequence[ChunkKey], float]] = []
            # Those that have to be connected first keep nobody waiting, and share what is left.
            peers = sorted(wanted, key=lambda one: not one.is_connected)
            for at, peer in enumerate(peers):
                left_s = deadline - self._clock()
                share = 1 if peer.is_connected else len(peers) - at
                try:
                    link = stack.enter_context(peer.checkout(left_s / share))
                    keys = wanted[peer][: link.session.max_batch_chunks]
                    link.begin_find(keys, deadline)
                    begun.append((peer, link, keys, left_s))
                except KVStoreError as error:
                    failed(peer, error, left_s)
            for peer, link, keys, left_s in begun:
                try:
                    answer = link.end_find(keys, deadline)
                    found[peer] = _checked([one for one in answer if one is not None], link)
                    peer.speed.add_first_byte(self._clock() - started)
                    peer.note_answer()
                except KVStoreError as error:
                    failed(peer, error, left_s)
        return found

    # --- reading

    def read(
        self, chunk: PeerChunk, out: Bytes, offset: int, following: Sequence[PeerChunk] = ()
    ) -> Generator[tuple[PeerNode, int], None, None]:
        """Fill *out* with a frame from byte *offset*; yield the sender and how much has come.

        The fastest of the chunk's peers that is up and has it sends it; without one nothing is
        yielded. Raises TierUnavailableError when one fails half way. Nothing is verified. The
        thread reads *following* next: the same request is for those that the sender has.
        """
        sender = self.pipeline.sender(chunk.info.key)
        for peer in sorted(
            (peer for peer in chunk.peers if peer.is_up),
            key=lambda one: -1.0 if one is sender else one.speed.load_s(len(out)),
        ):
            arrived = 0
            more = [one.info for one in takewhile(lambda one: peer in one.peers, following)]  # noqa: B023
            started = first = self._clock()
            try:
                with (
                    self.pipeline.link(peer, self._timeout_s) as link,
                    closing(link.read(chunk.info, out, offset, self._timeout_s, more)) as steps,
                ):
                    for arrived in steps:
                        first = self._clock() if first == started else first
                        yield peer, arrived
            except KVStoreError as error:
                self._counters.add(peer.note_failure(error, is_read=True))
                if arrived:
                    reason = f"{peer.address}: {error}"
                    raise TierUnavailableError("peer", reason, is_partial=True) from None
                continue
            peer.note_answer(is_read=True)
            peer.speed.add_first_byte(first - started)
            if arrived:
                peer.speed.add_transfer(arrived, self._clock() - started)
                self._counters.add("peer_read_bytes", arrived)
                return


def _checked(infos: list[ChunkInfo], link: StreamLink) -> list[ChunkInfo]:
    """Return *infos* if frames in memory can be so. Raises InvalidRequestError."""
    layout, size = None, 0
    for info in infos:
        if info.layout is not layout:
            layout, size = info.layout, raw_frame_bytes(info.layout)
        if info.codec_id or info.size_bytes != size or size > link.session.max_frame_bytes:
            raise InvalidRequestError("frame_bytes", info.size_bytes, f"a raw frame has {size}")
    return infos


_NO_KEY = ChunkKey(bytes(32))
"""A query for it tells whether a peer answers: nobody has it."""
