"""The Caller: one session with a server, opened when it is needed and again when it is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar
from weakref import finalize, ref

from kvstore.client.batches import (
    MAX_OPEN_BATCHES,
    batches,
    behind,
    digest_batches,
)
from kvstore.client.bulk_transport import BulkTransport
from kvstore.client.client_state import ClientState
from kvstore.client.connection import Connection, countdown
from kvstore.client.decode import Reader, Room, direct
from kvstore.client.forks import FORKS
from kvstore.client.levelled_get import Meters
from kvstore.client.options import ClientOptions
from kvstore.client.rectangle_room import RectangleRoom
from kvstore.client.session import Session, is_silent
from kvstore.client.shm import ShmTransport, can_share_memory
from kvstore.client.stream import StreamTransport
from kvstore.client.transport import Arrival, ReadPlan, Transport, at_least, read_layers
from kvstore.codecs.asset_shelf import ASSETS
from kvstore.codecs.base import ChunkTensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.keys import cut_keys, split_digests
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import (
    DIGEST_BYTES,
    KEY_BYTES,
    Accuracy,
    ChainDigest,
    ChunkKey,
    Model,
    Namespace,
    Stated,
)

T = TypeVar("T")


class Caller:
    """What every part of a Client stands on. Thread-safe."""

    shared_memory: ClassVar[type[ShmTransport]] = ShmTransport
    """How it reads a server on this host."""

    def __init__(
        self,
        address: str,
        representation: Model,
        options: ClientOptions | None = None,
    ) -> None:
        self.representation = representation
        self.options = options or ClientOptions()
        if self.options.assets is not None:
            ASSETS.load_folder(self.options.assets)
        self.address = address
        dial = partial(Connection, address, self.options.retry_after_ms, access=self.options.access)
        self._state = ClientState(dial, self.options.copy_threads)
        _ = self._state.connection  # which raises for an access that will not do
        self._end = self._ends()
        self.counts: Callable[[], Mapping[str, int]] = dict
        """Returns what the engine counted, for ``kvstore explain``; each heartbeat tells it."""
        FORKS.watch(self._after_fork)

    def _ends(self) -> finalize[[], Self]:
        """Have a client that is dropped end what it has open; a process that ends need not."""
        end = finalize(self, self._state.drop)
        end.atexit = False
        return end

    def _after_fork(self) -> None:
        """In a child: leave all to the parent, and connect anew at the next call."""
        self._end.detach()
        self._state = self._state.left()
        self._end = self._ends()

    def __reduce__(self) -> tuple[type[Self], tuple[str, Model, ClientOptions]]:
        """Have another process make a client of the same server."""
        return type(self), (self.address, self.representation, self.options)

    @property
    def _connection(self) -> Connection:
        return self._state.connection

    @property
    def _reader(self) -> Reader:
        return self._state.reader

    @property
    def _meters(self) -> Meters:
        return self._state.meters

    @property
    def _transport(self) -> Transport | None:
        return self._state.transport

    def _connected(self) -> Transport:
        return self._state.connected(self._connect)

    def _connect(self) -> Transport:
        client = ref(self)  # the session's thread must not keep the client

        def counts() -> Mapping[str, int]:
            found = client()
            return {} if found is None else found.counts()

        session = Session(self._connection, self.representation, self.options, counts)
        wanted = self.options.transport
        if wanted == "shm" or (wanted == "auto" and can_share_memory(session)):
            try:
                return self.shared_memory(session)
            except (TierUnavailableError, InvalidRequestError, OSError):
                if wanted == "shm":
                    session.close()
                    raise
        if wanted == "tcp" or (wanted == "auto" and session.terms.bulk_address):
            try:
                return BulkTransport(session)
            except (TierUnavailableError, DeadlineError):
                if wanted == "tcp":
                    session.close()
                    raise
        return StreamTransport(session)

    def _disconnect(self, transport: Transport, *, tell_server: bool) -> None:
        self._state.disconnect(transport, tell_server=tell_server)

    def _with_session(self, work: Callable[[Transport], T]) -> T:
        """Run *work*, once more with a new session if the server lost ours."""
        transport = self._connected()
        try:
            return work(transport)
        except LeaseExpiredError:
            if self._is_known(transport):
                raise
        self._disconnect(transport, tell_server=False)
        return work(self._connected())

    def _is_known(self, transport: Transport) -> bool:
        if transport.is_spent:
            return False
        try:
            transport.session.heartbeat()
        except LeaseExpiredError:
            return False
        return True

    @property
    def is_shut(self) -> bool:
        """Whether calls fail at once for a while, as the server did not answer the last one."""
        return self._connection.breaker.is_open

    def end_if_hung(self) -> bool:
        """Whether the server hangs; if so, calls that wait for it fail now, as if it were late.

        A server on this host that neither answers nor runs does, one that takes its time does
        not; of others one that does not even refuse a call. Takes some 20 ms; a quarter of a second
        while there is no session, as nothing is known of its answers.
        """
        transport = self._transport
        if transport is not None:
            return transport.end_if_hung()
        if self.is_shut or not is_silent(self._connection):
            return False
        self._connection.hang_up()
        return True

    @property
    def is_connected(self) -> bool:
        """Whether there is a session, as far as is known here; asks nobody."""
        return self._transport is not None

    def send_counts(self) -> None:
        """Tell the server what ``counts`` returns, as heartbeats do; opens a session if need be."""
        self._with_session(lambda transport: transport.session.heartbeat())

    @property
    def namespace(self) -> Namespace:
        """The first half of every key of this client; asks the server once."""
        return self._connected().session.terms.namespace

    @property
    def transport_name(self) -> str:
        """How bytes travel: ``shm``, ``tcp`` or ``grpc``."""
        return self._connected().name

    @property
    def boot_id(self) -> int:
        """The server's start that the session belongs to."""
        return self._connected().session.terms.boot_id

    def close(self) -> None:
        """End the session and close the connection. Idempotent."""
        self._state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- helpers

    def _call(self, method: str, request: Any, reply: type[T]) -> T:
        transport = self._transport
        if transport is not None:
            transport.settle()
        return self._connection.call(method, request, self.options.deadline_ms, reply)

    def _ask(self, method: str, request: Any, keys: Sequence[ChunkKey], reply: type[T]) -> list[T]:
        """Call *method* about *keys*, a batch at a time; return the replies."""

        def work(transport: Transport) -> list[T]:
            terms, left_ms = transport.session.terms, countdown(self.options.deadline_ms)
            request.session_id = terms.session_id
            transport.settle()
            replies = []
            for some in digest_batches(self._digests(keys), terms.max_batch_chunks):
                request.digests = some
                replies.append(self._connection.call(method, request, left_ms(), reply))
            return replies

        return self._with_session(work)

    def _digest(self, key: ChunkKey) -> ChainDigest:
        if not isinstance(key, bytes | bytearray | memoryview):
            raise InvalidRequestError("key", key, "give a list of bytes: name chunks with keys()")
        if len(key) != KEY_BYTES or key[:DIGEST_BYTES] != self.namespace:
            raise InvalidRequestError(
                "key", key.hex(),
                f"not in this client's namespace {self.namespace.hex()}; name chunks with keys()",
            )  # fmt: skip
        return ChainDigest(key[DIGEST_BYTES:])

    def _digests(self, keys: Sequence[ChunkKey]) -> bytes:
        digests = cut_keys(keys, self.namespace)
        # The slow way says which key it is.
        return b"".join(map(self._digest, keys)) if digests is None else digests

    def _cut_digests(self, keys: Sequence[ChunkKey]) -> list[ChainDigest]:
        return split_digests(self._digests(keys), len(keys))

    def _release(self, leases: Sequence[int], hints: Hints = NO_HINTS) -> None:
        if leases:
            with suppress(KVStoreError):  # not connected: they end with their session
                self._connected().release(leases, self.options.deadline_ms, hints)

    # --- reading

    def _read_prefix(
        self,
        keys: Sequence[ChunkKey],
        room: Room,
        least: Accuracy = Accuracy.exact,
        stated: list[Stated] | None = None,
    ) -> list[ChunkTensors]:
        """Read under a lease of the call's own. *stated* gets what each copy states."""

        def work(_: Transport) -> list[ChunkTensors]:
            read: list[Stated] = []
            found = self._read(keys, room, (), least, read)
            if stated is not None:
                stated[:] = read
            return found

        try:
            return self._with_session(work)
        except LeaseExpiredError:
            # One was found damaged, and dropped, between its place and our look: ask what is left.
            return self._with_session(work)

    def _read(
        self,
        keys: Sequence[ChunkKey],
        room: Room,
        leases: Sequence[int],
        least: Accuracy = Accuracy.exact,
        stated: list[Stated] | None = None,
    ) -> list[ChunkTensors]:
        """Read a batch at a time, each under its own of *leases*; without them each takes one.

        What the copy of each chunk that is returned states is appended to *stated*.
        """
        stated = [] if stated is None else stated
        transport, left_ms = self._connected(), countdown(self.options.deadline_ms)
        digests = self._cut_digests(keys)  # all of them are ours, or nothing is read
        found: list[ChunkTensors] = []
        limit = transport.session.terms.max_batch_chunks
        for number, (first, some) in enumerate(batches(keys, limit)):
            lease_id = leases[number] if leases else 0
            try:
                plan = ReadPlan(digests[first : first + limit], lease_id, left_ms(), least)
                some_found, some_stated = self._read_batch(
                    transport, some, behind(room, first), plan
                )
            except (DeadlineError, TierUnavailableError):
                if not found:
                    raise
                break
            found += some_found
            stated += some_stated
            if len(found) < first + len(some):
                break
        return found

    def _read_batch(
        self,
        transport: Transport,
        keys: Sequence[ChunkKey],
        room: Room,
        plan: ReadPlan,
    ) -> tuple[list[ChunkTensors], list[Stated]]:
        shard = None
        stated: dict[int, Stated] = {}
        if isinstance(room, RectangleRoom):
            shard = room.usual_shard(self.options.chunk_tokens)
        landing = partial(direct, transport.session, keys, room)
        with transport.read(replace(plan, shard=shard, direct=landing)) as arriving:
            frames = at_least(arriving, plan.minimum, stated)
            found, broken = self._reader.read(transport.session, keys, frames, room)
        if broken is not None:
            self._quarantine(transport, broken)
        return found, [stated[at] for at in range(len(found))]

    def _layers_arriving(
        self, stack: ExitStack, transport: Transport, plan: ReadPlan
    ) -> Iterator[Arrival]:
        """Yield the frames of *plan* to be read layer by layer: of MAX_OPEN_BATCHES batches, as
        each is a stream, which *stack* ends. Rows to skip come where there are several.
        """
        limit, left_ms = transport.session.terms.max_batch_chunks, countdown(plan.deadline_ms)
        if len(plan.digests) > limit:
            plan = replace(plan, skipped=None)  # they are named by the places of all chunks
        for first, some in islice(batches(plan.digests, limit), MAX_OPEN_BATCHES):
            count, part = 0, replace(plan, digests=some, deadline_ms=left_ms())
            for arrived in stack.enter_context(read_layers(transport, part)):
                count += 1
                yield replace(arrived, index=first + arrived.index) if first else arrived
            if count < limit:
                return

    def _quarantine(self, transport: Transport, key: ChunkKey) -> None:
        request = pb.DeleteRequest(
            session_id=transport.session.terms.session_id,
            digests=self._digest(key),
            if_damaged=True,
        )
        try:
            self._call("Delete", request, pb.DeleteResponse)
        except KVStoreError:
            return
