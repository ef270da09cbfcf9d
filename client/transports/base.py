"""The Transport interface: how frames travel between a client and its server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import starmap
from typing import Any, ClassVar

from kvstore.client.connection import Connection, Pool
from kvstore.client.frames import Arrival, Direct, LayerStream, stays
from kvstore.client.session import Session, is_silent
from kvstore.client.transports.unix_rpc import UnixRpc
from kvstore.client.view import View
from kvstore.codecs.base import AnyTensors
from kvstore.codecs.raw import RAW
from kvstore.codecs.slices import encode_shard, shard_frame_bytes
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes, as_bytes, copy_bytes
from kvstore.proto.errors import DeadlineError, InvalidRequestError, KVStoreError
from kvstore.proto.frame import FrameTemplate, raw_frame_bytes, stated_header_bytes
from kvstore.proto.messages import accuracy_number, hints_to_message
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import DIGEST_BYTES, Accuracy, ChunkKey, ChunkShard, PutOutcome


@dataclass(frozen=True, slots=True)
class Put:
    """The outcome of one chunk, and the reason if it was not stored."""

    outcome: PutOutcome
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What to read of the chunks with the concatenated *digests*: whole frames in order, up to the
    first missing or late one; or one of two other forms. A chunk with only copies less accurate
    than ``minimum`` is missing. With a ``lease_id`` of 0 a lease is taken until the read is left.
    """

    digests: bytes
    lease_id: int
    deadline_ms: int
    minimum: Accuracy = Accuracy.exact
    layer_major: bool = False
    """Layer by layer, without ``skipped`` rows, if frames arrive in parts."""
    skipped: SkippedRows | None = None
    ranges: Sequence[pb.FrameRange] = ()
    """Only these bytes of frames as stored on a tier, grouped by chunk; some may be left out."""
    direct: Direct | None = None
    """Returns the receiver of a frame that arrives in parts."""
    no_lease: bool = False
    """Frames in memory of this host need no lease. A frame replaced during the read then raises
    LeaseExpiredError: read it again with a lease.
    """


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The data of a read, iterated once: ``frames``, or parts of them; ``is_layered``: layer by
    layer, without skipped rows. ``end``, for any thread, makes a wait for the next one raise.
    """

    frames: Iterator[Arrival]
    is_layered: bool = False
    end: Callable[[], None] = stays


@dataclass(frozen=True, slots=True)
class PutTerms:
    """Options of a put. The whole put has to end within ``within_ms``."""

    durable: bool
    within_ms: int
    hints: Hints = NO_HINTS

    def request(self, session: Session) -> pb.PutRequest:
        """Return the opening message of a put."""
        return pb.PutRequest(
            session_id=session.terms.session_id,
            durable=self.durable,
            deadline_ms=self.within_ms,
            hints=hints_to_message(self.hints),
        )


@dataclass(frozen=True)
class Outgoing:
    """The header fields of a chunk's frame, and its tensors, or those of a rank's *shard*; or the
    whole *frame*, encoded already and with checksums.
    """

    template: FrameTemplate
    tensors: AnyTensors
    shard: ChunkShard | None = None
    frame: Bytes | None = None

    @cached_property
    def frame_bytes(self) -> int:
        """Size of its raw frame."""
        if self.shard is not None:
            return shard_frame_bytes(self.shard)
        return raw_frame_bytes(self.template.layout)

    def encode(self, out: Bytes, flags: int = 0) -> None:
        """Write the raw frame into *out*, with *flags*; a shard's has checksums and no flags."""
        if self.frame is not None:
            copy_bytes(out, self.frame)
        elif self.shard is not None:
            encode_shard(self.template, self.shard, self.tensors, out)
        else:
            template = replace(self.template, flags=flags) if flags else self.template
            RAW.encode(template, self.tensors, out)

    def pieces(self, scratch: Bytes) -> list[Bytes]:
        """Return the raw frame in pieces, its header first: the tensors' own memory; if that is
        strided, in blocks or a shard, *scratch*.
        """
        frame = self.frame
        if frame is None:
            found = RAW.pieces(self.template, self.tensors) if self.shard is None else []
            if found:
                return found
            frame = scratch[: self.frame_bytes]
            self.encode(frame)
        end = stated_header_bytes(frame)
        return [frame[:end], frame[end:]]


class Transport(ABC):
    """Frames to and from one server, for one session. Thread-safe."""

    name: ClassVar[str]

    def __init__(self, session: Session) -> None:
        self.session = session
        self.calls: Connection | UnixRpc = session.connection
        """The channel of control calls."""
        self.pool: Pool[Any] | None = None
        """The transport's own connections."""
        self.is_spent = False
        """Its session has to be replaced, though the server still has it."""

    @abstractmethod
    def put(self, chunks: Sequence[Outgoing], terms: PutTerms) -> list[Put]:
        """Put *chunks*, all within the session's batch and frame limits."""

    @abstractmethod
    def read(self, plan: ReadPlan) -> AbstractContextManager[Arrivals]:
        """Enter for the data of *plan*, which is valid until this is left."""

    def request(self, plan: ReadPlan, via: pb.Via) -> pb.GetRequest:
        """Return the request for *plan*."""
        # 0, the field's default, means exact.
        least = 0 if plan.minimum is Accuracy.exact else accuracy_number(plan.minimum)
        return pb.GetRequest(
            session_id=self.session.terms.session_id,
            digests=plan.digests,
            lease_id=plan.lease_id,
            deadline_ms=plan.deadline_ms,
            via=via,
            min_accuracy=least,
            layer_major=plan.layer_major and via == pb.VIA_STREAM,
            skip_rows=None if plan.skipped is None or via != pb.VIA_STREAM else plan.skipped.pack(),
            ranges=plan.ranges,
        )

    def release(self, leases: Iterable[int], deadline_ms: int, hints: Hints = NO_HINTS) -> None:
        """End *leases*. On failure they end with their session or expire."""
        request = pb.ReleaseRequest(
            session_id=self.session.terms.session_id,
            lease_ids=leases,
            hints=hints_to_message(hints),
        )
        with suppress(KVStoreError):
            self.calls.call("Release", request, deadline_ms, pb.ReleaseResponse)

    def hangs(self) -> bool:
        """Whether the server hangs."""
        return is_silent(self.session.connection, self.session.pace_s)

    def hang_up(self) -> None:
        """End the waits for the server, and open the breaker."""
        self.session.connection.hang_up()
        if self.pool is not None:
            self.pool.hang_up(DeadlineError("the server hangs"))

    def viewer(self, rows: bytes, keys: Sequence[ChunkKey]) -> View:
        """Return the views, by index, of the leased *keys*, whose places are *rows*."""
        return lambda index: None

    def close(self) -> None:
        """Release the transport's resources. Idempotent."""
        if self.pool is not None:
            self.pool.close()

    def leave(self) -> None:
        """In a child: disable what is the parent's. Sends nothing."""
        self.is_spent = True
        if self.pool is not None:
            self.pool.leave()


def arrival_of(reply: pb.GetResponse) -> Arrival:
    """Return the part of a frame in a reply."""
    part = reply.part
    data = as_bytes(part.data)
    return Arrival(reply.index, reply.tier, part.frame_bytes, data, offset=part.offset)


@contextmanager
def read_layers(transport: Transport, plan: ReadPlan) -> Iterator[Iterator[Arrival]]:
    """Enter for the frames of *plan*: whole ones in memory or files, or LayeredFrames, each once
    its header has arrived.
    """
    with transport.read(replace(plan, layer_major=True)) as arriving:
        if arriving.is_layered:
            limit_bytes, is_cut = transport.session.terms.max_frame_bytes, plan.skipped is not None
            frames, most = arriving.frames, len(plan.digests) // DIGEST_BYTES
            stream = LayerStream(frames, limit_bytes, most, is_cut=is_cut, end=arriving.end)
            yield stream.arriving()
        else:
            yield arriving.frames


def read_outcomes(outcomes: bytes, reasons: Sequence[str]) -> list[Put]:
    """Return the outcomes of a reply. Raises InvalidRequestError for what is none."""
    try:
        return list(starmap(Put, zip(map(PutOutcome, outcomes), reasons, strict=True)))
    except ValueError as error:
        raise InvalidRequestError("outcomes", len(outcomes), f"the server's: {error}") from None
