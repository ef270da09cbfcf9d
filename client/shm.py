"""The shm transport: frames through memory that server and client share on one host."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TypeAlias

import numpy as np
from typing_extensions import override

from kvstore.client.frames import FileFrame, FrameAssembler
from kvstore.client.layer_sink import PutTerms
from kvstore.client.leased_views import LeasedViews
from kvstore.client.liveness import hangs, peer_pid
from kvstore.client.local_link import LocalLink, enter
from kvstore.client.peer_reads import LentRun, PeerReads
from kvstore.client.put_pipeline import PutPipeline
from kvstore.client.session import Session
from kvstore.client.slabs import Slabs
from kvstore.client.staging import PARTS, StagingMemory
from kvstore.client.transport import (
    Arrived,
    Direct,
    FramePiece,
    Outgoing,
    Put,
    Transport,
    piece_of,
)
from kvstore.client.view import View, geometry_of
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import unix_socket
from kvstore.proto.errors import (
    InvalidRequestError,
    LeaseExpiredError,
    TierUnavailableError,
)
from kvstore.proto.frame import raw_frame_bytes
from kvstore.proto.keys import chunk_key
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import DIGEST_BYTES, Accuracy, ChainDigest, ChunkKey, KVLayout, Shard
from kvstore.proto.unix_socket import Place, Reach, unpack_places

_SOCKET_TIMEOUT_S = 2.0

ReadLent: TypeAlias = Callable[[int, int, int], Iterator[Arrived]]
"""Returns the frames that server *number* sends of so many chunks from the *first*."""


class _LeftError(Exception):
    """Another server did not send chunk *index* of a get, or any behind it."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def can_share_memory(session: Session) -> bool:
    """Whether the server runs on this host and listens on a socket that we may use."""
    terms = session.terms
    return bool(
        terms.socket_path
        and terms.host_id == unix_socket.host_id()
        and os.access(terms.socket_path, os.R_OK | os.W_OK)
    )


class ShmTransport(Transport):
    """Gets read sealed slabs of the server; puts go through staging memory of ours.

    Raises TierUnavailableError at birth when the server does not take part.
    """

    name = "shm"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        whole_chunk = KVLayout.of(session.representation, session.options.chunk_tokens)
        self._whole = geometry_of(whole_chunk)
        size_bytes = max(session.options.staging_bytes // PARTS, raw_frame_bytes(whole_chunk))
        self._staging = StagingMemory(size_bytes)
        try:
            self._socket = self._attach(self._staging)
        finally:
            self._staging.close_descriptor()
        self._server_pid = peer_pid(self._socket)
        self.calls = LocalLink(session.terms, session.connection)
        self.slabs = Slabs(self._socket)
        self._peers = PeerReads(session)
        if session.options.read_peers:
            self._peers.note(session.peers)
        # One put at a time owns the staging memory, over its copies by design.
        self._put_lock = threading.Lock()

    def _attach(self, staging: StagingMemory) -> socket.socket:
        terms = self.session.terms
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.settimeout(_SOCKET_TIMEOUT_S)
        try:
            memory = [staging.descriptor]
            reply = enter(link, terms, unix_socket.Op.attach, staging.size_bytes, memory)
        except (OSError, InvalidRequestError) as error:
            link.close()
            raise TierUnavailableError("shm", f"{terms.socket_path}: {error}") from None
        if reply is not unix_socket.Reply.ok:
            link.close()
            raise TierUnavailableError("shm", f"{terms.socket_path}: {reply.name}")
        return link

    @override
    def _hangs(self) -> bool:
        if not self._server_pid:
            return super()._hangs()
        return hangs(self.session.terms, self._server_pid)

    @override
    def hang_up(self) -> None:
        super().hang_up()
        if isinstance(self.calls, LocalLink):
            self.calls.hang_up()

    @override
    def put(
        self,
        chunks: Sequence[Outgoing],
        *,
        durable: bool,
        deadline_ms: int,
        hints: Hints = NO_HINTS,
    ) -> list[Put]:
        with self._put_lock:
            if self.is_spent:
                raise LeaseExpiredError("the session's staging memory is in doubt: open another")
            pipeline = PutPipeline(
                self._staging, self.session, self.calls, PutTerms(durable, deadline_ms, hints)
            )
            try:
                return pipeline.run(list(self._staging.groups(chunks)))
            finally:
                # Written to again, it would change what the server is copying, and sums as it
                # copies: wrong bytes with right checksums.
                self.is_spent = pipeline.may_be_read

    @override
    @contextmanager
    def get(
        self,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        least: Accuracy = Accuracy.exact,
    ) -> Iterator[Iterator[Arrived]]:
        with self.get_layers_of(None, digests, lease_id, deadline_ms, least) as arriving:
            yield arriving

    @override
    @contextmanager
    def get_layers_of(
        self,
        shard: Shard | None,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        least: Accuracy = Accuracy.exact,
        direct: Direct | None = None,
    ) -> Iterator[Iterator[Arrived]]:
        request = self.get_request(digests, lease_id, deadline_ms, pb.VIA_SHARED_MEMORY, least)
        read: ReadLent | None = None
        if direct is not None and shard is None and self.session.options.read_peers:
            until = time.monotonic() + deadline_ms / 1000
            space = self.session.terms.namespace
            request.peers.extend(self._peers.numbers())

            def read(number: int, first: int, count: int) -> Iterator[Arrived]:
                keys = [chunk_key(space, digest) for digest in digests[first : first + count]]
                return self._peers.read(LentRun(number, first, keys), direct, until)

        with ExitStack() as stack:
            yield self._with_lent(stack, request, read)

    def _with_lent(
        self, stack: ExitStack, request: pb.GetRequest, read: ReadLent | None
    ) -> Iterator[Arrived]:
        """Yield what *request* brings. What another server did not send comes by way of ours.

        *stack* ends the calls.
        """
        until = time.monotonic() + request.deadline_ms / 1000
        first = 0
        while True:
            replies, leases = stack.enter_context(self._leased_replies(request))
            try:
                for arrived in self._arriving(replies, leases, read):
                    yield replace(arrived, index=first + arrived.index) if first else arrived
                return
            except _LeftError as left:
                first = left.index
                request.digests = request.digests[first * DIGEST_BYTES :]
                request.deadline_ms = max(1, int(1000 * (until - time.monotonic())))
                del request.peers[:]

    @contextmanager
    def _leased_replies(
        self, request: pb.GetRequest
    ) -> Iterator[tuple[Iterator[pb.GetResponse], set[int]]]:
        """Enter for the replies of a get, and for a set of the leases they come under: those but
        its own are released in the end.
        """
        lease_id, deadline_ms = request.lease_id, request.deadline_ms
        leases: set[int] = set()
        try:
            with closing(self.calls.stream("Get", request, deadline_ms)) as replies:
                yield replies, leases
        finally:
            if own_leases := leases - {0, lease_id}:
                self.release(own_leases, deadline_ms)

    def _arriving(
        self,
        replies: Iterator[pb.GetResponse],
        leases: set[int],
        read: ReadLent | None = None,
    ) -> Iterator[Arrived]:
        """Yield what *replies* put in reach; *leases* learns under which leases.

        Raises _LeftError where what *read* should have brought did not come.
        """
        assembler = FrameAssembler(self.session.terms.max_frame_bytes, has_gaps=True)
        for reply in replies:
            leases.add(reply.lease_id)
            names = reply.places.tier_names
            if read is not None:
                self._peers.note(reply.places.peers)
            places = list(enumerate(unpack_places(reply.places.rows), reply.index))
            for number, run in groupby(places, key=_lender):
                if number is None:
                    for index, place in run:
                        yield self._arrived(index, names[place.tier], place)
                elif read is not None:
                    yield from _whole_run(read, number, [index for index, _ in run])
            whole = assembler.take_message(reply) if reply.HasField("part") else None
            if whole is not None:
                yield Arrived(reply.index, reply.tier, whole)

    def _arrived(self, index: int, tier: str, place: Place) -> Arrived:
        if place.reach == Reach.file:
            file = self.slabs.file(place.number)
            # What a file holds is proven by its key and checksums: it is copied as it is read.
            return Arrived(index, tier, FileFrame(file, place.offset, place.size_bytes))
        slab = self.slabs.reach(place)
        frame = slab.data[place.offset : place.offset + place.size_bytes]
        return Arrived(index, tier, frame, partial(slab.confirm, place.offset, place.generation))

    @override
    @contextmanager
    def get_ranges(
        self,
        digests: Sequence[ChainDigest],
        ranges: Sequence[pb.FrameRange],
        lease_id: int,
        deadline_ms: int,
        least: Accuracy = Accuracy.exact,
    ) -> Iterator[Iterator[FramePiece]]:
        request = self.get_request(digests, lease_id, deadline_ms, pb.VIA_SHARED_MEMORY, least)
        request.ranges.extend(ranges)
        with self._leased_replies(request) as (replies, leases):
            yield self._pieces(replies, ranges, leases)

    def _pieces(
        self, replies: Iterator[pb.GetResponse], ranges: Sequence[pb.FrameRange], leases: set[int]
    ) -> Iterator[FramePiece]:
        """Yield *ranges*: out of memory and files that the server names, or as it sends them."""
        told: set[int] = set()
        for reply in replies:
            leases.add(reply.lease_id)
            if reply.HasField("part"):
                yield piece_of(reply)
            for place in unpack_places(reply.places.rows):
                if reply.index in told:
                    continue
                told.add(reply.index)
                tier = reply.places.tier_names[place.tier]
                frame = self._arrived(reply.index, tier, place)
                for one in ranges:
                    if one.index == reply.index and one.start < place.size_bytes:
                        data = np.array(frame.frame[one.start : one.stop])
                        frame.confirm()  # before anybody takes it for the chunk's
                        yield FramePiece(one.index, tier, place.size_bytes, one.start, data)

    @override
    def viewer(self, rows: bytes, keys: Sequence[ChunkKey]) -> View:
        return LeasedViews(self.slabs, self._whole, rows, keys).__call__  # bound once

    @override
    def leave(self) -> None:
        super().leave()
        if isinstance(self.calls, LocalLink):
            self.calls.leave()
        self._socket.close()  # closes the child's descriptor: the parent's connection stays
        self._staging.close()
        self.slabs.leave()
        self._peers.leave()

    @override
    def close(self) -> None:
        self.calls.close()
        self._socket.close()
        self._staging.close()
        self.slabs.close()
        self._peers.close()


def _lender(place: tuple[int, Place]) -> int | None:
    return place[1].number if place[1].reach == Reach.peer else None


def _whole_run(read: ReadLent, number: int, indexes: Sequence[int]) -> Iterator[Arrived]:
    following = indexes[0]
    for arrived in read(number, following, len(indexes)):
        yield arrived
        following = arrived.index + 1
    if following <= indexes[-1]:
        raise _LeftError(following)
