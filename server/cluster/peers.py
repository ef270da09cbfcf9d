"""Peers: the other servers of a fleet, whose CPU memory this one may read from.

Whom a chunk is asked of says the node directory, or all of a fixed list are asked. Sessions are
opened and kept in a thread of their own, so that no lookup ever waits for a peer to be reached:
one that is not up is not asked.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Protocol

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
from kvstore.server.cluster.peer import Peer
from kvstore.server.cluster.peer_connections import StreamLink
from kvstore.server.cluster.peer_dial import Dial
from kvstore.server.settings.values import MAX_ASKED_PEERS
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.tiering.breaker import Breaker


@dataclass(slots=True)
class _Run:
    peer: Peer
    link: StreamLink
    lent: ExitStack
    """Gives the link back."""


class PeerRuns:
    """The links over which more is coming, one a thread. Thread-safe.

    Who reads something else than what comes next hangs up on it.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def sender(self, key: ChunkKey) -> Peer | None:
        """Return who is sending *key* to this thread next; else nobody is sending to it."""
        run: _Run | None = getattr(self._of_thread, "run", None)
        if run is not None and run.link.coming == key:
            return run.peer
        self._end(run)
        return None

    @contextmanager
    def link(self, peer: Peer, within_s: float) -> Iterator[StreamLink]:
        """Lend a link to *peer* for a frame, the one that it comes over if it is being sent.

        Raises as ``Peer.lend`` does.
        """
        run: _Run | None = getattr(self._of_thread, "run", None)
        self._of_thread.run = None
        if run is not None and run.peer is not peer:
            self._end(run)
            run = None
        with ExitStack() if run is None else run.lent as lent:
            link = lent.enter_context(peer.lend(within_s)) if run is None else run.link
            yield link
            if link.coming is not None:
                self._of_thread.run = _Run(peer, link, lent.pop_all())

    def end(self) -> None:
        """Hang up on who is still sending to this thread."""
        self._end(getattr(self._of_thread, "run", None))

    def _end(self, run: _Run | None) -> None:
        self._of_thread.run = None
        if run is not None:
            run.lent.close()


MAX_PEERS = 256
"""Nodes of the directory that are known at once; the one that was heard of longest ago goes."""
UPKEEP_S = 0.25
_DIAL_S = 1.0
_JOIN_S = 3.0
_PATIENT = 0.25
"""Of a timeout: who waited less, for want of time of his own, holds nothing against a peer."""

logger = structlog.get_logger(__name__)


class Holders(Protocol):
    """What is needed of the node directory."""

    def holders(
        self, keys: Sequence[ChunkKey], deadline_s: float
    ) -> Mapping[ChunkKey, tuple[NodeAddress, ...]]:
        """Return who holds each of *keys*; never raises, takes *deadline_s* seconds at most."""


@dataclass(frozen=True, slots=True)
class PeersTerms:
    """``addresses`` are always asked; ``timeout_ms`` is the longest wait for one answer."""

    addresses: tuple[str, ...] = ()
    timeout_ms: int = 200
    failures: int = 3
    retry_ms: int = 1000


@dataclass(frozen=True, slots=True)
class Offer:
    """A chunk in the memory of ``peers``."""

    info: ChunkInfo
    peers: tuple[Peer, ...]


class Peers:
    """Knows live peers, chooses, asks and fetches. Thread-safe.

    *dial* opens a session at a peer. *clock* returns monotonic seconds. ``start`` begins the
    upkeep; ``step`` is one turn of it, for tests.
    """

    def __init__(
        self, terms: PeersTerms, dial: Dial, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self.directory: Holders | None = None
        self.after_step: Callable[[], object] = bool
        """Called at the end of each turn of the upkeep, in its thread."""
        self._terms = terms
        self._dial = dial
        self._counters = counters
        self._clock = clock
        self._node_id = ""
        self._boot_id = 0
        self.runs = PeerRuns()
        self._numbers = count(1)
        self._static = [self._new(address) for address in terms.addresses[:MAX_ASKED_PEERS]]
        self._listed: OrderedDict[str, Peer] = OrderedDict()
        # Guards the table of nodes that the directory told of.
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def _new(self, address: str) -> Peer:
        breaker = Breaker(
            f"peer {address}", self._terms.failures, self._terms.retry_ms, self._clock
        )
        return Peer(address, breaker, self._clock, next(self._numbers))

    def start(self, node_id: str, boot_id: int) -> None:
        """Begin to open sessions; peers hear of us as *node_id*, and know us by *boot_id*."""
        self._node_id, self._boot_id = node_id, boot_id
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on all, which wakes who waits for one. Idempotent."""
        self._stopping.set()
        for peer in self.known():
            peer.forget()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def known(self) -> list[Peer]:
        """Return every peer that is known, up or not."""
        with self._lock:
            return [*self._static, *self._listed.values()]

    def numbered(self, number: int) -> Peer | None:
        """Return the peer that our clients know by *number*; None when it is known no more."""
        return next((peer for peer in self.known() if peer.number == number), None)

    # --- upkeep

    def _run(self) -> None:
        while not self._stopping.wait(UPKEEP_S):
            self.step()

    def step(self) -> None:
        """Open sessions where there is none, and keep the others from ending."""
        for peer in self.known():
            if self._stopping.is_set() or peer.is_self or peer.is_barred:
                continue
            is_due = self._clock() - peer.heard_at > peer.heartbeat_s / 4
            if (peer.breaker.reason or is_due) and peer.breaker.allows():
                self._keep(peer)
        self.after_step()

    def _keep(self, peer: Peer) -> None:
        try:
            if peer.breaker.reason or not peer.has_session:  # it may have been started again
                peer.forget()
                self._open(peer)
            if not peer.is_self:
                self._ask({peer: [_NO_KEY]})
        except InvalidRequestError as error:
            peer.breaker.fail(str(error))
            logger.warning("peer cannot be asked", peer=peer.address, reason=str(error))
        except TierUnavailableError as error:
            peer.breaker.fail(str(error))
            logger.debug("peer is not there", peer=peer.address, reason=str(error))

    def _open(self, peer: Peer) -> None:
        answer = self._dial(peer.address, self._node_id, _DIAL_S)
        if answer.boot_id == self._boot_id:
            peer.is_self = True
            return
        peer.let_in(answer.terms)
        if self._stopping.is_set():  # nobody else hangs up on it any more
            peer.forget()

    # --- asking

    def find(self, keys: Sequence[ChunkKey], until: float = math.inf) -> dict[ChunkKey, Offer]:
        """Return which of *keys*, of one namespace, are in the memory of peers that are up.

        Takes two timeouts at most, the directory's and the peers', and ends by *until*. Never
        raises.
        """
        wanted = self._who(keys, until)
        if not wanted:
            return {}
        self._counters.add("peer_finds")
        offers: dict[ChunkKey, Offer] = {}
        for peer, infos in self._ask(wanted, until).items():
            for info in infos:
                known = offers.get(info.key)
                if known is None:
                    offers[info.key] = Offer(info, (peer,))
                elif known.info.layout == info.layout and known.info.fidelity is info.fidelity:
                    offers[info.key] = Offer(known.info, (*known.peers, peer))
        self._counters.add("peer_found_chunks", len(offers))
        return offers

    def _who(self, keys: Sequence[ChunkKey], until: float) -> dict[Peer, list[ChunkKey]]:
        """Return whom to ask for what: the fixed list for all, others for what they are said to
        hold.
        """
        wanted = {peer: list(keys) for peer in self._static if peer.is_up and not peer.is_self}
        if self.directory is None:
            return wanted
        within_s = min(self._terms.timeout_ms / 1000, until - self._clock())
        asked: dict[int, list[ChunkKey] | None] = {}
        for key, nodes in self.directory.holders(keys, within_s).items():
            for node in nodes:
                if node.incarnation not in asked:
                    peer = self._listed_as(node)
                    has_room = peer in wanted or len(wanted) < MAX_ASKED_PEERS
                    is_asked = peer.is_up and has_room
                    asked[node.incarnation] = wanted.setdefault(peer, []) if is_asked else None
                of_node = asked[node.incarnation]
                if of_node is not None and (not of_node or of_node[-1] != key):
                    of_node.append(key)
        return wanted

    def _listed_as(self, node: NodeAddress) -> Peer:
        """Return the peer that the directory calls *node*; a new one is reached by the upkeep."""
        named = next((one for one in self._static if one.address == node.grpc_address), None)
        if named is not None:
            return named
        with self._lock:
            peer = self._listed.get(node.grpc_address)
            if peer is None:
                peer = self._new(node.grpc_address)
            self._listed[node.grpc_address] = peer
            self._listed.move_to_end(node.grpc_address)
            gone = self._listed.popitem(last=False)[1] if len(self._listed) > MAX_PEERS else None
            is_another = peer.incarnation not in (0, node.incarnation)
            peer.incarnation = node.incarnation
        if gone is not None:
            gone.forget()
        if is_another:
            peer.forget()
        return peer

    def still_there(self, wanted: Mapping[Peer, Sequence[ChunkKey]]) -> dict[Peer, set[ChunkKey]]:
        """Return which of the keys of *wanted*, of one namespace, each peer has that answers."""
        found = self._ask(wanted)
        return {peer: {info.key for info in infos} for peer, infos in found.items()}

    def _ask(
        self, wanted: Mapping[Peer, Sequence[ChunkKey]], until: float = math.inf
    ) -> dict[Peer, list[ChunkInfo]]:
        """Ask all at once, and wait for each until one timeout has passed, or until *until*.

        One for which no time is left when its turn comes is not asked, nor blamed for that.
        """
        started = self._clock()
        timeout_s = self._terms.timeout_ms / 1000
        deadline = min(started + timeout_s, until)
        found: dict[Peer, list[ChunkInfo]] = {}

        def failed(peer: Peer, error: KVStoreError, left_s: float) -> None:
            """*left_s* seconds were left when its turn came."""
            if not isinstance(error, DeadlineError) or left_s >= _PATIENT * timeout_s:
                self._counters.add(peer.failed(error))

        with ExitStack() as stack:
            asked: list[tuple[Peer, StreamLink, Sequence[ChunkKey], float]] = []
            # Those that have to be connected first keep nobody waiting, and share what is left.
            peers = sorted(wanted, key=lambda one: not one.is_connected)
            for at, peer in enumerate(peers):
                left_s = deadline - self._clock()
                share = 1 if peer.is_connected else len(peers) - at
                try:
                    link = stack.enter_context(peer.lend(left_s / share))
                    keys = wanted[peer][: link.terms.max_batch_chunks]
                    link.begin_find(keys, deadline)
                    asked.append((peer, link, keys, left_s))
                except KVStoreError as error:
                    failed(peer, error, left_s)
            for peer, link, keys, left_s in asked:
                try:
                    answer = link.end_find(keys, deadline)
                    found[peer] = _checked([one for one in answer if one is not None], link)
                    peer.speed.heard(self._clock() - started)
                    peer.answered()
                except KVStoreError as error:
                    failed(peer, error, left_s)
        return found

    # --- reading

    def read(
        self,
        info: ChunkInfo,
        peers: Sequence[Peer],
        out: Bytes,
        offset: int,
        following: Sequence[Offer] = (),
    ) -> Generator[tuple[Peer, int], None, None]:
        """Fill *out* with a frame from byte *offset*; yield who sends it and how much has come.

        The fastest of *peers* that is up and has it sends it. Nothing is yielded when none
        does. Raises TierUnavailableError when one fails half way. Nothing is verified. What this
        thread reads next is *following*: of that, who sends is asked for what it has.
        """
        timeout_s = self._terms.timeout_ms / 1000
        sender = self.runs.sender(info.key)
        for peer in sorted(
            (peer for peer in peers if peer.is_up),
            key=lambda one: -1.0 if one is sender else one.speed.load_s(len(out)),
        ):
            arrived = 0
            more = [one.info for one in takewhile(lambda one: peer in one.peers, following)]  # noqa: B023
            started = first = self._clock()
            try:
                with (
                    self.runs.link(peer, timeout_s) as link,
                    closing(link.read(info, out, offset, timeout_s, more)) as steps,
                ):
                    for arrived in steps:
                        first = self._clock() if first == started else first
                        yield peer, arrived
            except KVStoreError as error:
                self._counters.add(peer.failed(error, is_read=True))
                if arrived:
                    reason = f"{peer.address}: {error}"
                    raise TierUnavailableError("peer", reason, is_partial=True) from None
                continue
            peer.answered(is_read=True)
            peer.speed.heard(first - started)
            if arrived:
                peer.speed.came(arrived, self._clock() - started)
                self._counters.add("peer_read_bytes", arrived)
                return


def _checked(infos: list[ChunkInfo], link: StreamLink) -> list[ChunkInfo]:
    """Return *infos* if frames in memory can be so. Raises InvalidRequestError."""
    layout, size = None, 0
    for info in infos:
        if info.layout is not layout:
            layout, size = info.layout, raw_frame_bytes(info.layout)
        if info.codec_id or info.size_bytes != size or size > link.terms.max_frame_bytes:
            raise InvalidRequestError("frame_bytes", info.size_bytes, f"a raw frame has {size}")
    return infos


_NO_KEY = ChunkKey(bytes(32))
"""Asked for to hear whether a peer is there: nobody has it."""
