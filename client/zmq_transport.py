"""The zmq transport: frames in parts of 1 MB between hosts, under credit both ways."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from typing_extensions import override

from kvstore.client.connection import SLACK_S
from kvstore.client.direct_frame import DirectFrame
from kvstore.client.frame_memory import FrameMemory, keep_freed_memory
from kvstore.client.frame_stream import MAX_DIGESTS_BYTES, Entrance, FrameStream
from kvstore.client.frame_streams import FrameStreams
from kvstore.client.layer_feed import LayerFeed
from kvstore.client.part_feed import PartFeed
from kvstore.client.session import Session
from kvstore.client.stream import StreamTransport
from kvstore.client.stream_upload import StreamUpload
from kvstore.client.transport import Arrived, Direct, FramePiece, Outgoing, Put, Transport
from kvstore.client.zmq_link import ZmqLink, endpoint
from kvstore.client.zmq_links import ZmqLinks
from kvstore.client.zmq_upload import BulkUpload
from kvstore.proto import bulk
from kvstore.proto.buffers import Bytes
from kvstore.proto.bulk_reading import BulkPieces, BulkReading
from kvstore.proto.errors import (
    DeadlineError,
    KVStoreError,
    TierUnavailableError,
)
from kvstore.proto.hints import NO_HINTS, Hints
from kvstore.proto.portion import Portion
from kvstore.proto.skipped_rows import SkippedRows
from kvstore.proto.types import ChainDigest, Fidelity
from kvstore.proto.wire import fidelity_number, join_digests

if TYPE_CHECKING:
    from kvstore.proto import kvstore_pb2 as pb

Link: TypeAlias = ZmqLink | FrameStream
IDLE_FRAME_BYTES = 128 << 20
"""Memory kept for the frames of the next get: to fault fresh pages in costs as much as a copy."""


class ZmqTransport(Transport):
    """Gets and puts over DEALER sockets, one request at a time each; those of whole frames over a
    FrameStream where the server has streams and one is there.

    Raises TierUnavailableError at birth when the server does not take part.
    """

    name = "zmq"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        terms = session.terms
        if not terms.zmq_address:
            raise TierUnavailableError("zmq", "the server was started without --zmq")
        self._fallback = StreamTransport(session)
        self._memory = FrameMemory(IDLE_FRAME_BYTES)
        keep_freed_memory()
        self._links = ZmqLinks(session)
        where = endpoint(terms.stream_address, session.connection.address)
        self._streams = FrameStreams(Entrance.of(where, terms))

    # --- get

    @override
    @contextmanager
    def get(
        self,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        least: Fidelity = Fidelity.exact,
    ) -> Iterator[Iterator[Arrived]]:
        with self.get_layers_of(None, digests, lease_id, deadline_ms, least) as arriving:
            yield arriving

    @override
    @contextmanager
    def get_layers_of(
        self,
        portion: Portion | None,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        least: Fidelity = Fidelity.exact,
        direct: Direct | None = None,
    ) -> Iterator[Iterator[Arrived]]:
        deadline = time.monotonic() + deadline_ms / 1000 + SLACK_S
        packed = join_digests(digests)
        frames: list[Bytes] = []
        limit_bytes = self.session.terms.max_frame_bytes

        def room(chunk: int, size_bytes: int, start: Bytes) -> Bytes | DirectFrame:
            taker = None if direct is None else direct(chunk, size_bytes, start)
            return self._memory.take(size_bytes, frames) if taker is None else taker

        def ask(link: Link) -> BulkReading:
            reading = BulkReading(link.next_request(), limit_bytes, room)
            word = self._word(reading, lease_id, deadline_ms, _least_flags(least))
            with self._dropped_if_it_fails(link):
                link.send(word, deadline, packed)
            return reading

        asked = self._ask_stream(ask, packed, deadline) or self._ask_link(ask, deadline)
        if asked is None:
            with self._fallback.get(digests, lease_id, deadline_ms, least) as arriving:
                yield arriving
            return
        try:
            yield self._arriving(*asked, deadline)
        finally:
            self._leave(*asked, deadline)
            self._memory.give(frames)

    @override
    @contextmanager
    def get_layers(
        self,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        least: Fidelity = Fidelity.exact,
        skipped: SkippedRows | None = None,
    ) -> Iterator[LayerFeed]:
        deadline = time.monotonic() + deadline_ms / 1000 + SLACK_S
        link = self._links.take(deadline)
        if link is None:
            with self._fallback.get_layers(digests, lease_id, deadline_ms, least, skipped) as feed:
                yield feed
            return
        limit_bytes = self.session.terms.max_frame_bytes
        reading = BulkPieces(link.next_request())
        flags, payload = bulk.LAYER_MAJOR | _least_flags(least), join_digests(digests)
        if skipped is not None:
            flags, payload = flags | bulk.SKIP_ROWS, bulk.pack_skipped(skipped.pack(), payload)
        word = self._word(reading, lease_id, deadline_ms, flags)
        try:
            link.send(word, deadline, payload)
            # A piece has what the feed looks at in a reply.
            pieces = cast("Iterator[pb.GetResponse]", self._pieces(link, reading, deadline))
            yield PartFeed(pieces, limit_bytes, is_cut=skipped is not None)
        finally:
            self._leave(link, reading, deadline)

    @override
    @contextmanager
    def get_ranges(
        self,
        digests: Sequence[ChainDigest],
        ranges: Sequence[bulk.Range],
        lease_id: int,
        deadline_ms: int,
        least: Fidelity = Fidelity.exact,
    ) -> Iterator[Iterator[FramePiece]]:
        deadline = time.monotonic() + deadline_ms / 1000 + SLACK_S
        link = self._links.take(deadline)
        if link is None:
            with self._fallback.get_ranges(digests, ranges, lease_id, deadline_ms, least) as pieces:
                yield pieces
            return
        reading = BulkPieces(link.next_request())
        word = self._word(reading, lease_id, deadline_ms, bulk.RANGES | _least_flags(least))
        try:
            link.send(word, deadline, bulk.pack_ranges(join_digests(digests), ranges))
            yield (
                FramePiece(one.index, one.tier, *one.part)
                for one in self._pieces(link, reading, deadline)
            )
        finally:
            self._leave(link, reading, deadline)

    def _pieces(self, link: ZmqLink, reading: BulkPieces, deadline: float) -> Iterator[_PieceReply]:
        while not reading.is_over:
            with self._noted():
                word, payload = link.receive(deadline)
            part = reading.take(word, payload)
            if part is None or payload is None:
                continue
            credit_bytes = reading.credit(len(payload))
            if credit_bytes:
                link.grant(reading.request, credit_bytes, deadline)
            yield _PieceReply(
                part.chunk, part.tier_name, _PieceData(part.frame_bytes, part.offset, payload)
            )

    def _word(
        self, reading: BulkReading | BulkPieces, lease_id: int, deadline_ms: int, flags: int
    ) -> bulk.Get:
        session_id = self.session.terms.session_id
        return bulk.Get(reading.request, session_id, lease_id, reading.open(), deadline_ms, flags)

    def _arriving(self, link: Link, reading: BulkReading, deadline: float) -> Iterator[Arrived]:
        while not reading.is_over:
            with self._noted():
                word, payload = link.receive(deadline)
                landed = reading.take(word, payload)
            if isinstance(word, bulk.Part) and payload is not None:
                credit_bytes = reading.credit(len(payload))
                if credit_bytes:
                    link.grant(reading.request, credit_bytes, deadline)
            del payload
            if landed is not None:
                frame = cast("Bytes | DirectFrame", landed.frame)  # of our own room
                yield Arrived(landed.chunk, landed.tier, frame, _stays)

    def _leave(self, link: Link, reading: BulkReading | BulkPieces, deadline: float) -> None:
        """Have the server let go of what was asked for; a link on which it does not is dropped."""
        try:
            if not reading.is_over:
                link.cancel(reading.request, deadline)
            while not reading.is_over:
                word, _ = link.receive(deadline)
                if word.request == reading.request and isinstance(word, bulk.Done | bulk.Failed):
                    break
        except KVStoreError:
            self._give_back(link, is_clean=False)
        else:
            self._give_back(link, is_clean=True)

    # --- put

    @override
    def put(
        self,
        chunks: Sequence[Outgoing],
        *,
        durable: bool,
        deadline_ms: int,
        hints: Hints = NO_HINTS,
    ) -> list[Put]:
        deadline = time.monotonic() + deadline_ms / 1000 + SLACK_S
        word = bulk.Put(
            0, self.session.terms.session_id, deadline_ms, bulk.DURABLE if durable else 0
        )
        upload = self._begin_upload(word, deadline)
        if upload is not None:
            with self._leaving(upload.stream):
                return upload.run(chunks, hints)
        # Over ZeroMQ there is no place for hints.
        link = self._links.take(deadline) if hints == NO_HINTS else None
        if link is None:
            return self._fallback.put(chunks, durable=durable, deadline_ms=deadline_ms, hints=hints)
        with self._leaving(link):
            word = word._replace(request=link.next_request())
            return BulkUpload(link, deadline).run(word, chunks)

    def _begin_upload(self, word: bulk.Put, deadline: float) -> StreamUpload | None:
        """Return a put that a stream takes; None where none does."""
        self.session.connection.gate.check()
        stream = self._streams.take()
        if stream is None:
            return None
        upload = StreamUpload(stream, deadline)
        try:
            with self._noted_lateness(), self._dropped_if_it_fails(stream):
                upload.begin(word)
        except TierUnavailableError:  # it has too many at once, or has just started anew
            return None
        return upload

    @contextmanager
    def _leaving(self, link: Link) -> Iterator[None]:
        """Give *link* back; after an error there may be parts on the way that nobody asked for."""
        is_over = False
        try:
            with self._noted():
                yield
            is_over = True
        finally:
            self._give_back(link, is_clean=is_over)

    # --- links

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except (DeadlineError, TierUnavailableError) as error:
            self.session.connection.gate.note(error)
            raise

    @contextmanager
    def _noted_lateness(self) -> Iterator[None]:
        try:
            yield
        except DeadlineError as error:
            self.session.connection.gate.note(error)
            raise

    @contextmanager
    def _dropped_if_it_fails(self, link: Link) -> Iterator[None]:
        try:
            yield
        except KVStoreError:
            self._give_back(link, is_clean=False)
            raise

    def _ask_stream(
        self, ask: Callable[[Link], BulkReading], packed: bytes, deadline: float
    ) -> tuple[Link, BulkReading] | None:
        """Return the stream that answers a get of the digests *packed*; None where none does."""
        self.session.connection.gate.check()
        stream = self._streams.take() if len(packed) <= MAX_DIGESTS_BYTES else None
        if stream is None:
            return None
        try:
            with self._noted_lateness():
                reading = ask(stream)
                with self._dropped_if_it_fails(stream):
                    stream.hear(deadline)
        except TierUnavailableError:  # it has too many at once, or has just started anew
            return None
        return stream, reading

    def _ask_link(
        self, ask: Callable[[Link], BulkReading], deadline: float
    ) -> tuple[Link, BulkReading] | None:
        link = self._links.take(deadline)
        return None if link is None else (link, ask(link))

    @override
    def hang_up(self) -> None:
        super().hang_up()
        self._streams.hang_up()
        self._links.hang_up()

    def _give_back(self, link: Link, *, is_clean: bool) -> None:
        if isinstance(link, FrameStream):
            self._streams.give_back(link, is_clean=is_clean)
        else:
            self._links.give_back(link, is_clean=is_clean)

    @override
    def leave(self) -> None:
        super().leave()
        self._memory = FrameMemory(IDLE_FRAME_BYTES)  # another thread may have had its lock
        self._streams.leave()
        self._links.leave()

    @override
    def close(self) -> None:
        self._streams.close()
        self._links.close()


def _least_flags(least: Fidelity) -> int:
    return fidelity_number(least) << bulk.FIDELITY_SHIFT


class _PieceData(NamedTuple):
    frame_bytes: int
    offset: int
    data: Bytes


class _PieceReply(NamedTuple):
    index: int  # type: ignore[assignment]
    tier: str
    part: _PieceData


def _stays() -> None:
    """The frame is ours until the get is left."""
