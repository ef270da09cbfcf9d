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

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.bulk import GUEST_S, guest_token
from kvstore.proto.errors import (
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    PermissionDeniedError,
    QuotaExceededError,
    ShuttingDownError,
    TierUnavailableError,
    UnauthenticatedError,
)
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.types import ChunkInfo, ChunkKey, Namespace
from kvstore.server.cluster.membership import NodeAddress
from kvstore.server.cluster.peer_connections import Dial, StreamLink
from kvstore.server.settings.values import MAX_QUERIED_PEERS, Limits
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.breaker import Breaker

MAX_PEERS = 256
"""Nodes of the directory that are known at once; the one that was named longest ago goes."""
LINKS_PER_PEER = 8
"""Requests to one peer at once; a further one is a miss there."""
MAX_FAULTS = 3
"""Wrong answers or wrong bytes, or reads in a row that fail, before a peer is not used."""
BARRED_S = 60.0
CONNECT_S = 0.5
"""For a stream to be opened, or less where a request has less."""
UPKEEP_S = 0.25
_DIAL_S = 1.0
_JOIN_S = 3.0
_PATIENT = 0.25
"""Of a timeout: a request that had less time than this counts nothing against a peer."""
_EWMA_WEIGHT = 0.2
_SESSION_ENDED = (LeaseExpiredError, UnauthenticatedError, PermissionDeniedError, ShuttingDownError)
_NO_KEY = ChunkKey(bytes(32))
"""A query for it tells whether a peer answers: nobody has it."""

logger = structlog.get_logger(__name__)


class PeerNode:
    """One other server, whose gRPC service is at ``address``. Thread-safe."""

    def __init__(
        self, address: str, limits: Limits, clock: Callable[[], float], number: int = 0
    ) -> None:
        self.address = address
        self.number = number
        """What our clients know it by."""
        failures, retry_ms = limits.breaker_failures, limits.breaker_retry_ms
        self.breaker = Breaker(f"peer {address}", failures, retry_ms, clock)
        self.first_byte_s = 1e-3
        self.bytes_per_s = 1e9
        """Exponentially weighted means of its answers."""
        self.incarnation = 0
        """Of the start that the directory named last; 0: it named none."""
        self.is_self = False
        self.answered_at = 0.0
        self.session: pb.OpenPeerResponse | None = None
        """What it opened for this server, as far as is known."""
        self._clock = clock
        self._opened_at = 0.0
        self._idle: list[StreamLink] = []
        self._in_use: set[StreamLink] = set()
        self._faults = 0
        self._failed_reads = 0  # in a row, though it answered finds in between
        self._has_answered = False
        self._barred_until = 0.0
        self._lock = threading.Lock()  # guards the eight above

    def load_s(self, size_bytes: int) -> float:
        """Return how long a frame of *size_bytes* would take."""
        return self.first_byte_s + size_bytes / self.bytes_per_s

    @property
    def is_barred(self) -> bool:
        """Whether it sent what is wrong, or failed at reads, of late."""
        return self._clock() < self._barred_until

    @property
    def is_up(self) -> bool:
        """Whether it may be used: it opened a session, answers, and is not barred."""
        return self.session is not None and not self.breaker.reason and not self.is_barred

    def open_session(self, session: pb.OpenPeerResponse) -> None:
        """Use *session* from now on. The streams of an earlier one are closed."""
        self.forget()
        with self._lock:
            self.session = session
            self._opened_at = self.answered_at = self._clock()

    def forget(self) -> None:
        """Its session is over, or it is another server by now. Idempotent."""
        with self._lock:
            self.session = None
            idle, self._idle = self._idle, []
            in_use = list(self._in_use)
        for stream in idle:
            stream.close()
        for stream in in_use:
            stream.hang_up()

    @property
    def is_connected(self) -> bool:
        """Whether a request would find a stream that nobody uses."""
        return bool(self._idle)

    def grant_direct_reads(self, space: Namespace) -> pb.LendPeerResponse | None:
        """Let a client of this server read chunks of *space* there; None unless it is up.

        Time counts from the start of this session, so that clocks of hosts need not agree.
        """
        with self._lock:
            session, opened_at = self.session, self._opened_at
        if session is None or not self.is_up:
            return None
        until_s = int(self._clock() - opened_at) + GUEST_S
        return pb.LendPeerResponse(
            bulk_address=session.bulk_address,
            bulk_certificate=session.bulk_certificate,
            session_id=session.session_id,
            until_s=until_s,
            token=guest_token(session.attach_token, session.session_id, space, until_s),
            valid_ms=1000 * GUEST_S,
        )

    def take(self, within_s: float) -> StreamLink:
        """Take a stream for one request, connected in *within_s* seconds where none is idle.

        Raises QuotaExceededError, LeaseExpiredError, and as ``StreamLink.connect``.
        """
        with self._lock:
            if self.session is None:
                raise LeaseExpiredError(f"{self.address}: no session")
            if len(self._in_use) >= LINKS_PER_PEER:
                raise QuotaExceededError("links_per_peer", LINKS_PER_PEER, self.address)
            stream = self._idle.pop() if self._idle else StreamLink(self.session, self._clock)
            self._in_use.add(stream)
        if not stream.is_open:
            try:
                stream.connect(min(within_s, CONNECT_S))
            except BaseException:
                self.give_back(stream)
                raise
        return stream

    def give_back(self, stream: StreamLink) -> None:
        """Have a stream that was taken used again, or closed in the middle of an answer."""
        with self._lock:
            self._in_use.discard(stream)
            is_kept = stream.is_open and stream.session is self.session
            if is_kept:
                self._idle.append(stream)
        if not is_kept:
            stream.close()

    def note_answer(
        self, first_byte_s: float, size_bytes: int = 0, took_s: float = 0.0, *, is_read: bool
    ) -> None:
        """It did what was requested: *first_byte_s* until it began, *took_s* for all bytes."""
        self.first_byte_s += _EWMA_WEIGHT * (first_byte_s - self.first_byte_s)
        if size_bytes and took_s > 0:
            self.bytes_per_s += _EWMA_WEIGHT * (size_bytes / took_s - self.bytes_per_s)
        self.answered_at = self._clock()
        self.breaker.succeed()
        with self._lock:
            self._has_answered = True
            if is_read:
                self._failed_reads = 0

    def note_failure(self, error: KVStoreError, *, is_read: bool = False) -> str:
        """Take note of a failed request; return the counter that it belongs to."""
        if isinstance(error, QuotaExceededError):
            return "peer_refusals"  # it is busy, or we are: a miss
        if isinstance(error, _SESSION_ENDED):
            self.forget()
            return "peer_lost_sessions"
        if isinstance(error, InvalidFrameError | InvalidRequestError):
            self.note_fault()
            return "peer_invalid_answers"
        self.breaker.fail(str(error))
        with self._lock:
            if is_read and self._has_answered:  # else it is gone, and the breaker's
                self._has_answered = False
                self._failed_reads += 1
                self._bar_if_due()
        return "peer_failures"

    def note_fault(self) -> None:
        """It sent a wrong answer, or wrong bytes."""
        with self._lock:
            self._faults += 1
            self._bar_if_due()

    def _bar_if_due(self) -> None:
        if max(self._faults, self._failed_reads) >= MAX_FAULTS:
            self._faults = self._failed_reads = 0
            self._barred_until = self._clock() + BARRED_S


Holders = Callable[[Sequence[ChunkKey], float], Mapping[ChunkKey, tuple[NodeAddress, ...]]]
"""From keys, and seconds that it may take, to who holds each; ``Directory.holders``."""


class PeerChunk(NamedTuple):
    """A chunk in the memory of ``peers``."""

    info: ChunkInfo
    peers: tuple[PeerNode, ...]


class _Reads(threading.local):
    """Of the calling thread: what it reads next, and the link over which more of it is coming."""

    keys: Sequence[ChunkKey] = ()
    run: tuple[PeerNode, StreamLink] | None = None


class Peers:
    """Knows live peers, chooses, queries and fetches. Thread-safe. ``step`` is a turn of upkeep.

    Those at *addresses* are always queried. *dial* opens a session at a peer.
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
        self._reads = _Reads()
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
        self._lock = threading.Lock()  # guards the table of nodes that the directory named
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._upkeep, name="peers", daemon=True)

    def _new(self, address: str) -> PeerNode:
        return PeerNode(address, self._limits, self._clock, next(self._numbers))

    def start(self, node_id: str, boot_id: int) -> None:
        """Begin to open sessions, as *node_id*, of whose present start *boot_id* is."""
        self._node_id, self._boot_id = node_id, boot_id
        self._thread.start()

    def close(self) -> None:
        """Hang up on all, which wakes who waits for one. Idempotent."""
        self._stopping.set()
        for peer in self.known():
            peer.forget()
        if self._thread.is_alive():
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
                peer.is_self = session.server.boot_id == self._boot_id
                if peer.is_self:
                    return
                peer.open_session(session)
                if self._stopping.is_set():  # nobody else hangs up on it any more
                    peer.forget()
            self.query({peer: [_NO_KEY]})
        except (InvalidRequestError, TierUnavailableError) as error:
            peer.breaker.fail(str(error))
            log = logger.warning if isinstance(error, InvalidRequestError) else logger.debug
            log("peer cannot be used", peer=peer.address, reason=str(error))

    # --- finding

    def find(self, keys: Sequence[ChunkKey], until: float = math.inf) -> dict[ChunkKey, PeerChunk]:
        """Return which of *keys*, of one namespace, are in the memory of peers that are up.

        Takes a timeout for the directory and one for peers, and ends by *until*. Never raises.
        """
        wanted = self._choose(keys, until)
        if not wanted:
            return {}
        self._counters.add("peer_finds")
        found: dict[ChunkKey, PeerChunk] = {}
        for peer, infos in self.query(wanted, until).items():
            for info in infos:
                first, peers = found.get(info.key, (info, ()))
                if first.layout == info.layout and first.accuracy is info.accuracy:
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
                    is_used = peer.is_up and has_room and peer not in self._static
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
        """Query all at once, for one timeout or until *until*; return what each that answers has.

        One for which no time is left when its turn comes is left out, but not held to have failed.
        """
        started = self._clock()
        deadline = min(started + self._timeout_s, until)
        found: dict[PeerNode, list[ChunkInfo]] = {}

        def failed(peer: PeerNode, error: KVStoreError, left_s: float) -> None:
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
                    link = peer.take(left_s / share)
                    stack.callback(peer.give_back, link)
                    keys = wanted[peer][: link.session.max_batch_chunks]
                    link.begin_find(keys, deadline)
                    begun.append((peer, link, keys, left_s))
                except KVStoreError as error:
                    failed(peer, error, left_s)
            for peer, link, keys, left_s in begun:
                try:
                    answer = link.end_find(keys, deadline)
                    found[peer] = _checked([one for one in answer if one is not None], link)
                    peer.note_answer(self._clock() - started, is_read=False)
                except KVStoreError as error:
                    failed(peer, error, left_s)
        return found

    # --- reading

    def expect(self, keys: Sequence[ChunkKey]) -> None:
        """The calling thread reads *keys*, from now on and in this order. Nothing: it hangs up."""
        self._reads.keys = keys
        if not keys:
            self._hang_up()

    def after(self, key: ChunkKey) -> Sequence[ChunkKey]:
        """Return what the calling thread reads after *key*, if it was to read that."""
        keys = self._reads.keys
        return keys[1:] if keys and keys[0] == key else ()

    def _hang_up(self) -> None:
        run, self._reads.run = self._reads.run, None
        if run is not None:
            run[0].give_back(run[1])

    @contextmanager
    def _link(self, peer: PeerNode) -> Iterator[StreamLink]:
        """Lend a link to *peer* for a frame, the one that it comes over if it is being sent."""
        if self._reads.run is not None and self._reads.run[0] is not peer:
            self._hang_up()
        run, self._reads.run = self._reads.run, None
        link = run[1] if run is not None else peer.take(self._timeout_s)
        try:
            yield link
        finally:
            if link.coming is not None:
                self._reads.run = peer, link
            else:
                peer.give_back(link)

    def read(
        self, chunk: PeerChunk, out: Bytes, offset: int, following: Sequence[PeerChunk] = ()
    ) -> Generator[tuple[PeerNode, int], None, None]:
        """Fill *out* with a frame from byte *offset*; yield the sender and how much has come.

        The fastest of the chunk's peers that is up and has it sends it, unverified; without one
        nothing is yielded. Raises TierUnavailableError when one fails half way. The thread reads
        *following* next: the same request is for those that the sender has.
        """
        if self._reads.run is not None and self._reads.run[1].coming != chunk.info.key:
            self._hang_up()  # on a thread's own link, which sends something else
        sender = self._reads.run and self._reads.run[0]
        for peer in sorted(
            (peer for peer in chunk.peers if peer.is_up),
            key=lambda one: -1.0 if one is sender else one.load_s(len(out)),
        ):
            arrived = 0
            more = [one.info for one in takewhile(lambda one: peer in one.peers, following)]  # noqa: B023
            started = first = self._clock()
            try:
                with (
                    self._link(peer) as link,
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
            peer.note_answer(first - started, arrived, self._clock() - started, is_read=True)
            if arrived:
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
