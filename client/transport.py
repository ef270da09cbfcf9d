"""The Transport interface: how frames travel between a client and its server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

from kvstore.client.connection import Connection
from kvstore.client.frames import Arrived as Arrived
from kvstore.client.frames import DirectFrame
from kvstore.client.layer_sink import BufferedSink, LayerSink, PutTerms
from kvstore.client.liveness import is_silent
from kvstore.client.local_link import LocalLink
from kvstore.client.outgoing import Outgoing as Outgoing
from kvstore.client.session import Session
from kvstore.client.view import View
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes, as_bytes
from kvstore.proto.errors import KVStoreError
from kvstore.proto.frame import FrameTemplate, stated_of
from kvstore.proto.messages import accuracy_number, hints_to_message
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import Accuracy, ChainDigest, ChunkKey, PutOutcome, Shard, Stated


@dataclass(frozen=True, slots=True)
class Put:
    """What became of one chunk, and why when it was not stored."""

    outcome: PutOutcome
    reason: str = ""


Direct: TypeAlias = Callable[[int, int, Bytes], DirectFrame | None]
"""A frame's number, size and first bytes to what takes its parts; None: it has to be whole."""


class FramePiece(NamedTuple):
    """Bytes of the frame of chunk ``index`` of a request, from ``offset``. Not verified."""

    index: int  # type: ignore[assignment]
    tier: str
    frame_bytes: int
    offset: int
    data: Bytes


class Transport(ABC):
    """Frames to and from one server, for one session. Thread-safe.

    ``tests/contracts/transport.py`` runs one suite over every transport.
    """

    name: ClassVar[str]

    def __init__(self, session: Session) -> None:
        self.session = session
        self.calls: Connection | LocalLink = session.connection
        """Where control calls go."""
        self.is_spent = False
        """Its session has to be replaced, though the server still knows it."""

    @abstractmethod
    def put(
        self,
        chunks: Sequence[Outgoing],
        *,
        durable: bool,
        deadline_ms: int,
        hints: Hints = NO_HINTS,
    ) -> list[Put]:
        """Put *chunks*, all within the session's batch and frame limits."""

    @abstractmethod
    def get(
        self,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        least: Accuracy = Accuracy.exact,
    ) -> AbstractContextManager[Iterator[Arrived]]:
        """Enter to iterate frames in the order of *digests*, up to the first missing or late one.

        A chunk of which there are only copies of lower accuracy than *least* is missing.
        With a ``lease_id`` of 0 a lease is taken until the context is left: read before that,
        not only before the iteration ends.
        """

    def get_layers(
        self,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        least: Accuracy = Accuracy.exact,
        skipped: SkippedRows | None = None,
    ) -> AbstractContextManager[Iterator[Arrived]]:
        """Enter for the same frames, to be read layer by layer.

        Whole frames, unless a transport does better: where frames are in reach at once, that is
        as good. One that streams asks with ``layer_major``, leaves the rows that are *skipped*
        with the server, and yields each ``LayeredFrame`` once its header is here.
        """
        return self.get(digests, lease_id, deadline_ms, least)

    def get_layers_of(
        self,
        shard: Shard | None,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        least: Accuracy = Accuracy.exact,
        direct: Direct | None = None,
    ) -> AbstractContextManager[Iterator[Arrived]]:
        """Do the same as ``get`` for who reads a *shard* of each chunk; None: everything.

        Whole frames, unless a transport does better: those in reach at once cost nothing more.
        One whose frames come in parts gives them to what *direct* returns for the first.
        """
        return self.get(digests, lease_id, deadline_ms, least)

    @contextmanager
    def get_ranges(
        self,
        digests: Sequence[ChainDigest],
        ranges: Sequence[pb.FrameRange],
        lease_id: int,
        deadline_ms: int,
        least: Accuracy = Accuracy.exact,
    ) -> Iterator[Iterator[FramePiece]]:
        """Enter to iterate *ranges* of frames as they lie on a tier, those of a chunk together.

        What is not there, or not in time, does not come. ``digests`` are under *lease_id*.
        """
        request = self.get_request(digests, lease_id, deadline_ms, pb.VIA_STREAM, least)
        request.ranges.extend(ranges)
        with closing(self.session.connection.stream("Get", request, deadline_ms)) as replies:
            yield map(piece_of, replies)

    def begin_put(self, templates: Sequence[FrameTemplate], terms: PutTerms) -> LayerSink:
        """Begin a put whose layers come one by one, within the session's limits.

        Into memory of ours, then ``put``, unless a transport does better. What is begun is
        either committed or abandoned, by the thread that began it.
        """
        return BufferedSink(self, templates, terms)

    def get_request(
        self,
        digests: Sequence[ChainDigest],
        lease_id: int,
        deadline_ms: int,
        via: pb.Via,
        least: Accuracy = Accuracy.exact,
    ) -> pb.GetRequest:
        """Return the request that both ways of getting begin with."""
        return pb.GetRequest(
            session_id=self.session.terms.session_id,
            digests=b"".join(digests),
            lease_id=lease_id,
            deadline_ms=deadline_ms,
            via=via,
            min_accuracy=accuracy_number(least),
        )

    def release(self, leases: Iterable[int], deadline_ms: int, hints: Hints = NO_HINTS) -> None:
        """End *leases*. One whose release does not arrive ends with its session or its time."""
        request = pb.ReleaseRequest(
            session_id=self.session.terms.session_id,
            lease_ids=leases,
            hints=hints_to_message(hints),
        )
        with suppress(KVStoreError):
            self.calls.call("Release", request, deadline_ms, pb.ReleaseResponse)

    def end_if_hung(self) -> bool:
        """End what waits for a server that hangs, as if it were late; whether it does."""
        is_hung = self._hangs()
        if is_hung:
            self.hang_up()
        return is_hung

    def _hangs(self) -> bool:
        return is_silent(self.session)

    def hang_up(self) -> None:
        """End what waits for the server, and shut the gate."""
        self.session.connection.hang_up()

    def viewer(self, rows: bytes, keys: Sequence[ChunkKey]) -> View:
        """Return what shows the leased *keys*, whose places are *rows*, where they lie.

        None of them, where memory is not shared.
        """
        return lambda index: None

    @abstractmethod
    def close(self) -> None:
        """Release what the transport holds. Idempotent."""

    def leave(self) -> None:
        """In a child: have what is the parent's be of no use here. Sends nothing."""
        self.is_spent = True


def piece_of(reply: pb.GetResponse) -> FramePiece:
    """Return the bytes that a reply brought."""
    part = reply.part
    return FramePiece(reply.index, reply.tier, part.frame_bytes, part.offset, as_bytes(part.data))


def as_true(
    arriving: Iterator[Arrived], least: Accuracy, stated: dict[int, Stated]
) -> Iterator[Arrived]:
    """Yield frames up to the first whose header states less than *least*.

    The server passes such copies over; one that comes all the same is missing. What each states
    goes into *stated*, by its index: true of those that prove right, as headers have a checksum.
    """
    for arrived in arriving:
        found = stated_of(arrived.frame)
        if found.accuracy < least:
            return
        stated[arrived.index] = found
        yield arrived


def read_outcomes(outcomes: bytes, reasons: Sequence[str]) -> list[Put]:
    """Return the outcomes of a reply."""
    return [Put(PutOutcome(o), r) for o, r in zip(outcomes, reasons, strict=True)]
