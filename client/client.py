"""The blocking client of one server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from kvstore.client.chunk import Chunk
from kvstore.client.connection import Connection
from kvstore.client.lease import ChunkLease
from kvstore.client.options import ClientOptions
from kvstore.client.reader import Reader
from kvstore.client.session import Session
from kvstore.client.shm import ShmTransport, can_share_memory
from kvstore.client.stream import StreamTransport
from kvstore.client.tensors import LayerTensors
from kvstore.client.transport import Outgoing, Put, Transport
from kvstore.codecs.base import ChunkTensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import (
    InvalidRequestError,
    KVStoreError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.frame import FrameTemplate
from kvstore.proto.keys import chain_digests, chunk_key
from kvstore.proto.types import (
    DIGEST_BYTES,
    KEY_BYTES,
    ROOT,
    ChainDigest,
    ChunkKey,
    Fidelity,
    Match,
    Namespace,
    Representation,
)
from kvstore.proto.wire import join_digests

T = TypeVar("T")


class Client:
    """Put, look up and get chunks of one Representation. Thread-safe.

    Connects at the first call, and again after the server restarted. Every method raises
    KVStoreErrors only and returns within ``options.deadline_ms`` plus 50 ms a round trip.
    A miss is an answer: a Match of 0, a shorter list.
    """

    def __init__(
        self,
        address: str,
        representation: Representation,
        options: ClientOptions | None = None,
    ) -> None:
        self.representation = representation
        self.options = options or ClientOptions()
        self._connection = Connection(address, self.options.retry_after_ms)
        self._reader = Reader(self.options.copy_threads)
        self._transport: Transport | None = None
        self._closed = False
        # Guards the two fields above; held while a session opens, which happens once.
        self._lock = threading.Lock()

    # --- session

    def _connected(self) -> Transport:
        with self._lock:
            if self._closed:
                raise KVStoreError("the client is closed")
            if self._transport is None:
                self._transport = self._connect()
            return self._transport

    def _connect(self) -> Transport:
        session = Session(self._connection, self.representation, self.options)
        wanted = self.options.transport
        if wanted == "grpc" or (wanted == "auto" and not can_share_memory(session)):
            return StreamTransport(session)
        try:
            return ShmTransport(session)
        except (TierUnavailableError, InvalidRequestError, OSError):
            if wanted == "shm":
                session.close()
                raise
            return StreamTransport(session)

    def _disconnect(self, transport: Transport, *, tell_server: bool) -> None:
        with self._lock:
            if self._transport is not transport:
                return
            self._transport = None
        transport.close()
        transport.session.close(tell_server=tell_server)

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
        try:
            transport.session.heartbeat()
        except LeaseExpiredError:
            return False
        return True

    @property
    def namespace(self) -> Namespace:
        """The first half of every key of this client; asks the server once."""
        return self._connected().session.terms.namespace

    @property
    def transport_name(self) -> str:
        """How bytes travel: ``shm`` or ``grpc``."""
        return self._connected().name

    @property
    def boot_id(self) -> int:
        """The server's start that the session belongs to."""
        return self._connected().session.terms.boot_id

    def keys(self, tokens: Sequence[int], extra: Sequence[bytes] = ()) -> list[ChunkKey]:
        """Name the chunks of a prompt. *extra*: cache salt, multimodal hashes, in order."""
        space = self.namespace
        digests = chain_digests(tokens, self.options.chunk_tokens, extra)
        return [chunk_key(space, digest) for digest in digests]

    # --- data

    def put(self, chunks: Sequence[Chunk], *, durable: bool = False) -> list[Put]:
        """Store chunks; with *durable* return once they would survive a power cut.

        Raises LayoutMismatchError or RepresentationError before anything is sent when a
        chunk is not of this client's Representation.
        """
        if not chunks:
            return []

        def work(transport: Transport) -> list[Put]:
            outgoing = [self._outgoing(transport.session, chunk) for chunk in chunks]
            results: list[Put] = []
            for batch in _batches(outgoing, transport.session.terms.max_batch_chunks):
                results += transport.put(
                    batch, durable=durable, deadline_ms=self.options.deadline_ms
                )
            return results

        return self._with_session(work)

    def _outgoing(self, session: Session, chunk: Chunk) -> Outgoing:
        self._digest(chunk.key)
        layout, arrays = chunk.arrays(self.representation)
        template = FrameTemplate(
            chunk.key, chunk.parent, session.representation_digest, chunk.content, layout,
            chunk.position, chunk.prefill_flops,
        )  # fmt: skip
        outgoing = Outgoing(template, arrays)
        if outgoing.frame_bytes > session.terms.max_frame_bytes:
            raise InvalidRequestError(
                "frame_bytes", outgoing.frame_bytes,
                f"the server takes {session.terms.max_frame_bytes} at most; use shorter chunks",
            )  # fmt: skip
        return outgoing

    def lookup(
        self,
        keys: Sequence[ChunkKey],
        *,
        lease: bool = False,
        min_fidelity: Fidelity = Fidelity.exact,
    ) -> Match:
        """Find the longest prefix of *keys* that can be read now; one round trip."""

        def work(transport: Transport) -> Match:
            request = pb.LookupRequest(
                session_id=transport.session.terms.session_id,
                digests=self._digests(keys),
                lease=lease,
                deadline_ms=self.options.deadline_ms,
                min_fidelity=min_fidelity,
            )
            reply = transport.calls.call(
                "Lookup", request, self.options.deadline_ms, pb.LookupResponse
            )
            return Match(
                ready=reply.ready,
                pending=reply.pending,
                missing=len(keys) - reply.ready - reply.pending,
                tiers=tuple(reply.tier_names[index] for index in reply.tiers),
                load_us=tuple(reply.load_us),
                lease_id=reply.lease_id,
                lease_ttl_ms=reply.lease_ttl_ms,
            )

        return self._with_session(work)

    def get(
        self, keys: Sequence[ChunkKey], out: Sequence[LayerTensors] | None = None
    ) -> list[ChunkTensors]:
        """Read the longest prefix of *keys* that is there in time, verified.

        Tensors come as arrays of unsigned integers of the dtype's size, to be viewed as it, or
        are written into *out*, one entry a key, numpy or torch. What lies in *out* past the
        returned length is not to be used.
        """

        def work(_: Transport) -> list[ChunkTensors]:
            return self._get(keys, out, 0)

        try:
            return self._with_session(work)
        except LeaseExpiredError:
            # One was found damaged, and dropped, between its place and our look: ask what is left.
            return self._with_session(work)

    def lease(self, keys: Sequence[ChunkKey]) -> ChunkLease:
        """Look up *keys* and keep what is ready from eviction: ``with client.lease(keys) as l``."""
        match = self.lookup(keys, lease=True)
        return ChunkLease(keys, match, self._get, self._release)

    def _get(
        self, keys: Sequence[ChunkKey], out: Sequence[LayerTensors] | None, lease_id: int
    ) -> list[ChunkTensors]:
        if out is not None and len(out) < len(keys):
            raise InvalidRequestError("out", len(out), f"give {len(keys)} entries")
        transport = self._connected()
        digests = [self._digest(key) for key in keys]
        with transport.get(digests, lease_id, self.options.deadline_ms) as arriving:
            found, broken = self._reader.read(transport.session, keys, arriving, out)
        if broken is not None:
            self._quarantine(transport, broken)
        return found

    def _quarantine(self, transport: Transport, key: ChunkKey) -> None:
        request = pb.DeleteRequest(
            session_id=transport.session.terms.session_id, digests=self._digest(key)
        )
        self._connection.settle()  # what we still lease is not deleted
        try:
            self._call("Delete", request, pb.DeleteResponse)
        except KVStoreError:
            return

    def _release(self, lease_id: int) -> None:
        try:
            transport = self._connected()
            request = pb.ReleaseRequest(
                session_id=transport.session.terms.session_id, lease_ids=[lease_id]
            )
            transport.calls.call("Release", request, self.options.deadline_ms, pb.ReleaseResponse)
        except KVStoreError:
            return  # it ends with its session or its time

    # --- keeping and forgetting

    def pin(self, keys: Sequence[ChunkKey], ttl_ms: int) -> int:
        """Keep chunks from eviction for *ttl_ms*; return how many are known."""
        _check_uint32("ttl_ms", ttl_ms)
        return self._ask("Pin", pb.PinRequest(ttl_ms=ttl_ms), keys, pb.PinResponse).pinned

    def unpin(self, keys: Sequence[ChunkKey]) -> int:
        """End pins; return how many there were."""
        return self._ask("Unpin", pb.UnpinRequest(), keys, pb.UnpinResponse).unpinned

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks on every tier; return how many. Chunks that are being read stay."""
        self._connection.settle()  # our own gets are over, and their releases on the way
        return self._ask("Delete", pb.DeleteRequest(), keys, pb.DeleteResponse).deleted

    def clear(self) -> int:
        """Forget every chunk of this client's namespace that nobody reads; return how many."""
        self._connection.settle()
        return self._ask("Clear", pb.ClearRequest(), None, pb.ClearResponse).deleted

    # --- looking

    def stat(self, keys: Sequence[ChunkKey]) -> list[pb.ChunkStat]:
        """Return what the server knows of those chunks that exist."""
        return list(self._ask("Stat", pb.StatRequest(), keys, pb.StatResponse).chunks)

    def list(self, limit: int = 0) -> Sequence[pb.ChunkStat]:
        """Return the chunks of this client's namespace, at most *limit* unless 0."""
        _check_uint32("limit", limit)

        def work(transport: Transport) -> Sequence[pb.ChunkStat]:
            request = pb.ListRequest(session_id=transport.session.terms.session_id, limit=limit)
            pages = self._connection.stream("List", request, self.options.deadline_ms)
            return [chunk for page in pages for chunk in page.chunks]

        return self._with_session(work)

    def status(self) -> pb.StatusResponse:
        """Return the server's state."""
        return self._call("Status", pb.StatusRequest(), pb.StatusResponse)

    def drain(self) -> bool:
        """Have the server refuse new work and save what it holds; True if all was saved."""
        request = pb.DrainRequest(deadline_ms=self.options.deadline_ms)
        return self._call("Drain", request, pb.DrainResponse).clean

    def close(self) -> None:
        """End the session and close the connection. Idempotent."""
        with self._lock:
            self._closed = True
            transport = self._transport
        if transport is not None:
            self._disconnect(transport, tell_server=True)
        self._connection.close()
        self._reader.close()

    def __enter__(self) -> Client:
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
        return self._connection.call(method, request, self.options.deadline_ms, reply)

    def _ask(self, method: str, request: Any, keys: Sequence[ChunkKey] | None, reply: type[T]) -> T:
        def work(transport: Transport) -> T:
            request.session_id = transport.session.terms.session_id
            if keys is not None:
                request.digests = self._digests(keys)
            return self._call(method, request, reply)

        return self._with_session(work)

    def _digest(self, key: ChunkKey) -> ChainDigest:
        if len(key) != KEY_BYTES or key[:DIGEST_BYTES] != self.namespace:
            raise InvalidRequestError(
                "key", key.hex(),
                f"not in this client's namespace {self.namespace.hex()}; name chunks with keys()",
            )  # fmt: skip
        return ChainDigest(key[DIGEST_BYTES:])

    def _digests(self, keys: Sequence[ChunkKey]) -> bytes:
        return join_digests(self._digest(key) for key in keys)


def parents(keys: Sequence[ChunkKey]) -> Sequence[ChainDigest]:
    """Return the parent digest of each key of a chain."""
    return [ROOT, *(ChainDigest(key[DIGEST_BYTES:]) for key in keys[:-1])][: len(keys)]


def _check_uint32(field: str, value: int) -> None:
    if not 0 <= value < 1 << 32:
        raise InvalidRequestError(field, value, "give 0 to 2^32-1")


def _batches(chunks: Sequence[Outgoing], limit: int) -> Iterator[Sequence[Outgoing]]:
    for start in range(0, len(chunks), limit):
        yield chunks[start : start + limit]
