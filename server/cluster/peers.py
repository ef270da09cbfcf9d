"""Peers: the other servers of a fleet, whose CPU memory this one may read.

The node directory names the holders of a chunk, or all of a fixed list are queried. A separate
thread opens and renews sessions, so that no lookup waits for a connection: a peer that is not up
is not queried.
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
"""Limit of known directory nodes; beyond it the least recently named one is dropped."""
LINKS_PER_PEER = 8
"""Concurrent requests to one peer; a further one is a miss there."""
MAX_FAULTS = 3
"""Wrong answers or bytes, or failed reads in a row, before a peer is barred."""
BARRED_S = 60.0
FORGET_S = 60.0
"""A directory node that is down, and was not named for this long, is dropped."""
CONNECT_S = 0.5
"""Time limit to open a stream; less if the request has less."""
UPKEEP_S = 0.25
_DIAL_S = 1.0
_JOIN_S = 3.0
_PATIENT = 0.25
"""Share of the timeout; a request with less time does not count as a failure of the peer."""
_EWMA_WEIGHT = 0.2
_SESSION_ENDED = (LeaseExpiredError, UnauthenticatedError, PermissionDeniedError, ShuttingDownError)
_NO_KEY = ChunkKey(bytes(32))
"""A key that no server has, to query whether a peer answers."""

logger = structlog.get_logger(__name__)


class PeerNode:
    """One other server, whose gRPC service is at ``address``. Thread-safe."""

    def __init__(
        self, address: str, limits: Limits, clock: Callable[[], float], number: int = 0
    ) -> None:
        self.address = address
        self.number = number
        """Its number for our clients."""
        failures, retry_ms = limits.breaker_failures, limits.breaker_retry_ms
        self.breaker = Breaker(f"peer {address}", failures, retry_ms, clock)
        self.first_byte_s = 1e-3
        self.bytes_per_s = 1e9
        """Exponentially weighted moving averages of its answers."""
        self.incarnation = 0
        """The last incarnation in the directory; 0: none."""
        self.is_self = False
        self.answered_at = 0.0
        self.kept_at = 0.0
        """Its last turn in the upkeep."""
        self.named_at = math.inf
        """When the directory last named it; infinite for the fixed list."""
        self.session: pb.OpenPeerResponse | None = None
        """The open session there, as far as is known."""
        self._clock = clock
        self._opened_at = 0.0
        self._idle: list[StreamLink] = []
        self._in_use: set[StreamLink] = set()
        self._faults = 0
        self._failed_reads = 0  # in a row; answered finds do not reset it
        self._has_answered = False
        self._barred_until = 0.0
        self._lock = threading.Lock()  # guards the eight above

    def load_s(self, size_bytes: int) -> float:
        """Return the estimated seconds to read a frame of *size_bytes*."""
        return self.first_byte_s + size_bytes / self.bytes_per_s

    @property
    def is_barred(self) -> bool:
        """Whether it is barred for recent faults or failed reads."""
        return self._clock() < self._barred_until

    @property
    def is_up(self) -> bool:
        """Whether it can be used: it has a session, answers, and is not barred."""
        return self.session is not None and not self.breaker.reason and not self.is_barred

    @property
    def needs_dial(self) -> bool:
        """Whether it has no session that works."""
        return self.session is None or bool(self.breaker.reason)

    def open_session(self, session: pb.OpenPeerResponse) -> None:
        """Use *session* from now on; close the streams of an earlier one."""
        self.forget()
        with self._lock:
            self.session = session
            self._opened_at = self.answered_at = self._clock()

    def forget(self) -> None:
        """Drop the session, which ended or belongs to another server now. Idempotent."""
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
        """Whether it has an idle stream."""
        return bool(self._idle)

    def grant_direct_reads(self, space: Namespace) -> pb.LendPeerResponse | None:
        """Return a grant for a client to read chunks of *space* there; None unless it is up.

        Its expiry counts from the start of this session, so that clocks of hosts need not agree.
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
        """Take a stream for one request: an idle one, or a new one within *within_s* seconds.

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
        """Return a stream for reuse; close it if its answer is incomplete."""
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
        """Record a success: *first_byte_s* until the first byte, *took_s* for all bytes."""
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
        """Record a failed request; return the counter that it belongs to."""
        if isinstance(error, QuotaExceededError):
            return "peer_refusals"  # one side is busy: a miss
        if isinstance(error, _SESSION_ENDED):
            self.forget()
            return "peer_lost_sessions"
        if isinstance(error, InvalidFrameError | InvalidRequestError):
            self.note_fault()
            return "peer_invalid_answers"
        self.breaker.fail(str(error))
        with self._lock:
            if is_read and self._has_answered:  # else it is down, which the breaker handles
                self._has_answered = False
                self._failed_reads += 1
                self._bar_if_due()
        return "peer_failures"

    def note_fault(self) -> None:
        """Record a wrong answer, or wrong bytes."""
        with self._lock:
            self._faults += 1
            self._bar_if_due()

    def _bar_if_due(self) -> None:
        if max(self._faults, self._failed_reads) >= MAX_FAULTS:
            self._faults = self._failed_reads = 0
            self._barred_until = self._clock() + BARRED_S


Holders = Callable[[Sequence[ChunkKey], float], Mapping[ChunkKey, tuple[NodeAddress, ...]]]
"""(keys, timeout in seconds) -> the holders of each; ``Directory.holders``."""


class PeerChunk(NamedTuple):
    """A chunk in the memory of ``peers``."""

    info: ChunkInfo
    peers: tuple[PeerNode, ...]


class _Reads(threading.local):
    """The keys that the calling thread reads next, and the link that is sending them."""

    keys: Sequence[ChunkKey] = ()
    run: tuple[PeerNode, StreamLink] | None = None


class Peers:
    """Tracks live peers, queries them and reads from them. Thread-safe. ``step`` does the upkeep.

    Peers at *addresses* are always queried. *dial* opens a session at a peer.
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
        """Looks up holders in the node directory; None: not used."""
        self.after_step: Callable[[], object] = bool
        """Called at the end of each upkeep step, in its thread."""
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
        """Start to open sessions as *node_id*; *boot_id* identifies this server's own address."""
        self._node_id, self._boot_id = node_id, boot_id
        self._thread.start()

    def close(self) -> None:
        """Close all connections, which wakes waiting readers. Idempotent."""
        self._stopping.set()
        for peer in self.known():
            peer.forget()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def known(self) -> list[PeerNode]:
        """Return all known peers, up or not."""
        with self._lock:
            return [*self._static, *self._listed.values()]

    # --- upkeep

    def _upkeep(self) -> None:
        while not self._stopping.wait(UPKEEP_S):
            self.step()

    def step(self) -> None:
        """Renew sessions, then open missing ones, for _DIAL_S: a host that vanished takes long.

        Peers that were tried since the directory named them come last.
        """
        now = self._clock()
        self._drop_unnamed(now - FORGET_S)
        turns = {
            one: (one.needs_dial, one.kept_at - min(one.named_at, now)) for one in self.known()
        }
        for peer in sorted(turns, key=turns.__getitem__):
            if self._stopping.is_set() or self._clock() >= now + _DIAL_S:
                break
            if peer.is_self or peer.is_barred:
                continue
            session = peer.session
            silent_s = session.heartbeat_ms / 4000 if session is not None else 0.0
            is_due = self._clock() - peer.answered_at > silent_s
            if (peer.needs_dial or is_due) and peer.breaker.allows():
                self._keep(peer)
        self.after_step()

    def _drop_unnamed(self, since: float) -> None:
        gone = [one for one in self.known() if one.named_at < since and not one.is_up]
        with self._lock:
            for peer in gone:
                self._listed.pop(peer.address, None)
        for peer in gone:
            peer.forget()

    def _keep(self, peer: PeerNode) -> None:
        peer.kept_at = self._clock()
        try:
            if peer.needs_dial:  # it may have restarted
                peer.forget()
                session = self._dial(peer.address, self._node_id, _DIAL_S)
                peer.is_self = session.server.boot_id == self._boot_id
                if peer.is_self:
                    return
                peer.open_session(session)
                if self._stopping.is_set():  # ``close`` has passed already
                    peer.forget()
            self.query({peer: [_NO_KEY]})
        except (InvalidRequestError, TierUnavailableError) as error:
            peer.breaker.fail(str(error))
            log = logger.warning if isinstance(error, InvalidRequestError) else logger.debug
            log("peer unavailable", peer=peer.address, reason=str(error))

    # --- finding

    def find(self, keys: Sequence[ChunkKey], until: float = math.inf) -> dict[ChunkKey, PeerChunk]:
        """Return which of *keys*, of one namespace, are in the memory of peers that are up.

        Takes at most a timeout for the directory and one for peers; ends by *until*. Never raises.
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
        """Return keys by peer: all for the fixed list, for others those in the directory."""
        wanted = {peer: list(keys) for peer in self._static if peer.is_up and not peer.is_self}
        if self.holders is None:
            return wanted
        within_s = min(self._timeout_s, until - self._clock())
        of_nodes: dict[int, list[ChunkKey]] = {}
        for key, nodes in self.holders(keys, within_s).items():
            for node in nodes:
                if node.incarnation not in of_nodes:
                    peer = self._peer_of(node)
                    has_space = peer in wanted or len(wanted) < MAX_QUERIED_PEERS
                    is_used = peer.is_up and has_space and peer not in self._static
                    of_nodes[node.incarnation] = wanted.setdefault(peer, []) if is_used else []
                of_node = of_nodes[node.incarnation]
                if of_node[-1:] != [key]:
                    of_node.append(key)
        return wanted

    def _peer_of(self, node: NodeAddress) -> PeerNode:
        """Return the peer of a directory *node*; the upkeep dials a new one."""
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
            if peer.incarnation not in (0, node.incarnation):  # it has restarted
                gone.append(peer)
            peer.incarnation, peer.named_at = node.incarnation, self._clock()
        for one in gone:
            one.forget()
        return peer

    def query(
        self, wanted: Mapping[PeerNode, Sequence[ChunkKey]], until: float = math.inf
    ) -> dict[PeerNode, list[ChunkInfo]]:
        """Query all in parallel, within a timeout and *until*; return the chunks of each answer.

        A peer with no time left is skipped, which does not count as its failure.
        """
        started = self._clock()
        deadline = min(started + self._timeout_s, until)
        found: dict[PeerNode, list[ChunkInfo]] = {}

        def failed(peer: PeerNode, error: KVStoreError, left_s: float) -> None:
            if not isinstance(error, DeadlineError) or left_s >= _PATIENT * self._timeout_s:
                self._counters.add(peer.note_failure(error))

        with ExitStack() as stack:
            begun: list[tuple[PeerNode, StreamLink, Sequence[ChunkKey], float]] = []
            # Peers without a connection come last, and share the remaining time.
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
        """Announce that the calling thread reads *keys* next, in order; empty ends its request."""
        self._reads.keys = keys
        if not keys:
            self._hang_up()

    def after(self, key: ChunkKey) -> Sequence[ChunkKey]:
        """Return the announced keys of the calling thread after *key*, if that is the first."""
        keys = self._reads.keys
        return keys[1:] if keys and keys[0] == key else ()

    def _hang_up(self) -> None:
        run, self._reads.run = self._reads.run, None
        if run is not None:
            run[0].give_back(run[1])

    @contextmanager
    def _link(self, peer: PeerNode) -> Iterator[StreamLink]:
        """Yield a link to *peer* for a frame: the one that is sending it, if any."""
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
        """Fill *out* with a frame from byte *offset*; yield the sender and the bytes so far.

        The fastest of the chunk's peers that is up and has it sends it, unverified; without one
        nothing is yielded. Raises TierUnavailableError when one fails half way. The thread reads
        *following* next: the request includes those that the sender has.
        """
        if self._reads.run is not None and self._reads.run[1].coming != chunk.info.key:
            self._hang_up()  # the thread's link sends another frame
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
    """Return *infos* if they are valid raw frames. Raises InvalidRequestError."""
    layout, size = None, 0
    for info in infos:
        if info.layout is not layout:
            layout, size = info.layout, raw_frame_bytes(info.layout)
        if info.codec_id or info.size_bytes != size or size > link.session.max_frame_bytes:
            raise InvalidRequestError("frame_bytes", info.size_bytes, f"a raw frame has {size}")
    return infos
