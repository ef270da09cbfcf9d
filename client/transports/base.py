"""The Transport interface: how frames travel between a client and its server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeAlias, cast

import numpy as np
from typing_extensions import override

from kvstore.client.connection import Connection, countdown
from kvstore.client.frames import DirectFrame, FileFrame, FrameAssembler, Payload
from kvstore.client.layer_stream import LayeredFrame, LayerStream
from kvstore.client.session import Session, is_silent
from kvstore.client.transports.unix_rpc import UnixRpc
from kvstore.client.view import View
from kvstore.codecs.base import AnyPart, AnyTensors
from kvstore.codecs.raw import RawCodec, raw_header
from kvstore.codecs.shards import encode_shard, shard_frame_bytes
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes, as_bytes, copy_bytes
from kvstore.proto.errors import KVStoreError
from kvstore.proto.frame import (
    FrameTemplate,
    pack_header,
    raw_frame_bytes,
    stated_header_bytes,
)
from kvstore.proto.messages import accuracy_number, hints_to_message
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import (
    Accuracy,
    ChainDigest,
    ChunkKey,
    ChunkShard,
    KVLayout,
    PutOutcome,
)


@dataclass(frozen=True, slots=True)
class Put:
    """What became of one chunk, and why when it was not stored."""

    outcome: PutOutcome
    reason: str = ""


RAW = RawCodec()
ABANDON_S = 2.0
"""How long we wait for a server to say that it kept nothing; the call's deadline ends it."""


def stays() -> None:
    """The bytes are ours: nobody reuses their memory."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Bytes of the frame of chunk ``index`` of a read, from ``offset`` on: all of it, or a part.

    In reach until the read is left; not verified yet. Call ``confirm`` after reading them: it
    raises LeaseExpiredError if the memory was reused meanwhile.
    """

    index: int
    tier: str
    frame_bytes: int
    data: Bytes | FileFrame | DirectFrame | LayeredFrame
    confirm: Callable[[], None] = stays
    offset: int = 0


Direct: TypeAlias = Callable[[int, int, Bytes], DirectFrame | None]
"""A frame's number, size and first bytes to what takes its parts; None: it has to be whole."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What to read of the chunks with *digests*, and by when: whole frames in their order, up to
    the first missing or late one; or one of two other forms.

    A chunk of which there are only copies of lower accuracy than ``minimum`` is missing. With a
    ``lease_id`` of 0 a lease is taken until the read is left.
    """

    digests: Sequence[ChainDigest]
    lease_id: int
    deadline_ms: int
    minimum: Accuracy = Accuracy.exact
    layer_major: bool = False
    """Layer by layer, without the rows that are ``skipped``, where frames come in parts."""
    skipped: SkippedRows | None = None
    ranges: Sequence[pb.FrameRange] = ()
    """Only these bytes of frames as they lie on a tier, those of a chunk together. What is not
    there, or not in time, does not come.
    """
    direct: Direct | None = None
    """What takes the parts of frames that come in parts."""


class Arrivals:
    """What a read brings. Iterated once. ``is_layered``: parts of frames, layer by layer, without
    skipped rows. ``end`` has whoever waits for the next get an error; any thread may call it.
    """

    __slots__ = ("_arriving", "end", "is_layered")

    def __init__(
        self,
        arriving: Iterator[Arrival],
        *,
        is_layered: bool = False,
        end: Callable[[], None] = stays,
    ) -> None:
        self._arriving = arriving
        self.is_layered = is_layered
        self.end = end

    def __iter__(self) -> Iterator[Arrival]:
        return self._arriving

    def __next__(self) -> Arrival:
        return next(self._arriving)


@dataclass(frozen=True, slots=True)
class PutTerms:
    """How a put is to be done. All of it has to be over within ``within_ms``."""

    durable: bool
    within_ms: int
    hints: Hints = NO_HINTS


@dataclass(frozen=True)
class Outgoing:
    """What is known of the frame, and the tensors to encode."""

    template: FrameTemplate
    tensors: AnyTensors

    @cached_property
    def frame_bytes(self) -> int:
        """Size of its raw frame."""
        return raw_frame_bytes(self.template.layout)

    @property
    def extent(self) -> KVLayout | ChunkShard:
        """The layout of the chunk, or what there is of it."""
        return self.template.layout

    def encode(self, out: Bytes, flags: int = 0) -> None:
        """Write the raw frame into *out*, with *flags* in its header."""
        template = replace(self.template, flags=flags) if flags else self.template
        RAW.encode(template, self.tensors, out)

    def pieces(self, room: Callable[[int], Bytes]) -> list[Bytes]:
        """Return the raw frame in pieces, the first of which is its header.

        They are what the tensors have; where that is strided or in blocks, it is encoded into
        *room* of so many bytes.
        """
        return RAW.pieces(self.template, self.tensors) or self._encoded(room)

    def _encoded(self, room: Callable[[int], Bytes]) -> list[Bytes]:
        frame = room(self.frame_bytes)
        self.encode(frame)
        return cut_header(frame)


@dataclass(frozen=True)
class OutgoingShard(Outgoing):
    """The same of what one rank has: the template is the chunk's, the tensors are its own."""

    shard: ChunkShard

    @cached_property
    @override
    def frame_bytes(self) -> int:
        return shard_frame_bytes(self.shard)

    @property
    @override
    def extent(self) -> KVLayout | ChunkShard:
        return self.shard

    @override
    def encode(self, out: Bytes, flags: int = 0) -> None:
        """Write the frame, always summed and without *flags*."""
        encode_shard(self.template, self.shard, self.tensors, out)

    @override
    def pieces(self, room: Callable[[int], Bytes]) -> list[Bytes]:
        """Return the frame in pieces, encoded into *room*."""
        return self._encoded(room)


def cut_header(frame: Bytes) -> list[Bytes]:
    """Return the header of a whole frame, and what follows."""
    end = stated_header_bytes(frame)
    return [frame[:end], frame[end:]]


class Transport(ABC):
    """Frames to and from one server, for one session. Thread-safe.

    ``tests/contracts/transport.py`` runs one suite over every transport.
    """

    name: ClassVar[str]

    def __init__(self, session: Session) -> None:
        self.session = session
        self.calls: Connection | UnixRpc = session.connection
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
    def read(self, plan: ReadPlan) -> AbstractContextManager[Arrivals]:
        """Enter to iterate what *plan* brings: read it before this is left."""

    def begin_put(self, templates: Sequence[FrameTemplate], terms: PutTerms) -> LayerSink:
        """Begin a put whose layers come one by one, within the session's limits.

        Into memory of ours, then ``put``, unless a transport does better. What is begun is
        either committed or abandoned, by the thread that began it.
        """
        return BufferedSink(self, templates, terms)

    def request(self, plan: ReadPlan, via: pb.Via) -> pb.GetRequest:
        """Return the request for *plan*."""
        return pb.GetRequest(
            session_id=self.session.terms.session_id,
            digests=b"".join(plan.digests),
            lease_id=plan.lease_id,
            deadline_ms=plan.deadline_ms,
            via=via,
            min_accuracy=accuracy_number(plan.minimum),
            layer_major=plan.layer_major and via == pb.VIA_STREAM,
            skip_rows=None if plan.skipped is None or via != pb.VIA_STREAM else plan.skipped.pack(),
            ranges=plan.ranges,
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
        return is_silent(self.session.connection, self.session.pace_s)

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


def arrival_of(reply: pb.GetResponse) -> Arrival:
    """Return the part of a frame that a reply brought."""
    part = reply.part
    data = as_bytes(part.data)
    return Arrival(reply.index, reply.tier, part.frame_bytes, data, offset=part.offset)


@contextmanager
def read_layers(transport: Transport, plan: ReadPlan) -> Iterator[Iterator[Arrival]]:
    """Enter for the frames of *plan*, to be read layer by layer: whole ones that are in reach, or
    each as a LayeredFrame once its header is here.
    """
    with transport.read(replace(plan, layer_major=True)) as arriving:
        if arriving.is_layered:
            limit_bytes, is_cut = transport.session.terms.max_frame_bytes, plan.skipped is not None
            stream = LayerStream(iter(arriving), limit_bytes, is_cut=is_cut, end=arriving.end)
            yield stream.arriving()
        else:
            yield iter(arriving)


def read_outcomes(outcomes: bytes, reasons: Sequence[str]) -> list[Put]:
    """Return the outcomes of a reply."""
    return [Put(PutOutcome(o), r) for o, r in zip(outcomes, reasons, strict=True)]


def whole_frame(
    assembler: FrameAssembler, part: Arrival | pb.StreamPart, data: Payload | None = None
) -> Arrival | None:
    """Have *assembler*, whose room is ``room_of``, take a part, which has its data or whose *data*
    is to come; return the frame that it made whole.
    """
    if data is None:
        data = cast("Bytes", cast("Arrival", part).data)
    received = assembler.take(part, data)
    if received is None:
        return None
    return Arrival(received.chunk, received.tier, len(received.frame), received.frame)


def whole_frames(parts: Iterable[Arrival], assembler: FrameAssembler) -> Iterator[Arrival]:
    """Yield the frames that *assembler* makes of *parts*."""
    for part in parts:
        frame = whole_frame(assembler, part)
        if frame is not None:
            yield frame


def room_of(
    direct: Direct | None = None, allocate: Callable[[int], Bytes] | None = None
) -> Callable[[int, int, Bytes], Bytes | DirectFrame]:
    """Return where an assembler has frames go: to what *direct* returns, else to new memory."""

    def room(index: int, frame_bytes: int, start: Bytes) -> Bytes | DirectFrame:
        taken = None if direct is None else direct(index, frame_bytes, start)
        if taken is not None:
            return taken
        return np.empty(frame_bytes, np.uint8) if allocate is None else allocate(frame_bytes)

    return room


class LayerSink(ABC):
    """Takes checked layers of the chunks of one put. For one thread."""

    @abstractmethod
    def write(self, segment: int, layers: Sequence[Sequence[AnyPart]]) -> None:
        """Take one segment of every chunk: ``layers[i]`` are the parts of chunk i.

        They are the caller's again on return. Each segment comes once, in any order.
        """

    @abstractmethod
    def commit(self) -> list[Put]:
        """Make the chunks visible, all segments of which came; return what became of each."""

    @abstractmethod
    def abandon(self, within_s: float = ABANDON_S) -> None:
        """Leave nothing behind; wait *within_s* at most until it is so. Idempotent; does nothing
        after ``commit``.
        """


@dataclass(frozen=True)
class EncodedChunk(Outgoing):
    """A chunk whose frame is there already, checksums and all."""

    frame: Bytes

    @override
    def encode(self, out: Bytes, flags: int = 0) -> None:
        copy_bytes(out, self.frame)

    @override
    def pieces(self, room: Callable[[int], Bytes]) -> list[Bytes]:
        """Return the frame as it is; *room* is not needed."""
        return cut_header(self.frame)


class RawFrames:
    """Raw frames of *templates* that become whole segment by segment, in any order."""

    def __init__(self, templates: Sequence[FrameTemplate]) -> None:
        self.templates = templates
        self.headers = [raw_header(template) for template in templates]
        self._sums = [[0] * len(header.segments) for header in self.headers]

    def encode(self, chunk: int, segment: int, parts: Sequence[AnyPart], out: Bytes) -> None:
        """Copy one segment to *out*, and keep its checksum."""
        row = self.headers[chunk].segments[segment]
        component = self.headers[chunk].layout.components[int(row["component"])]
        _, self._sums[chunk][segment] = RAW.encode_checked(parts, component, out)

    def extent(self, chunk: int, segment: int) -> slice:
        """Return which bytes of the frame a segment has."""
        row = self.headers[chunk].segments[segment]
        start = int(row["offset"])
        return slice(start, start + int(row["stored_bytes"]))

    def header(self, chunk: int) -> bytes:
        """Return the header of a frame all of whose segments were encoded."""
        return pack_header(raw_header(self.templates[chunk], self._sums[chunk]))


class BufferedSink(LayerSink):
    """Keeps the frames in memory of its own until they are whole, then puts them.

    What a transport offers that does no better: no more than the frames are held.
    """

    def __init__(
        self, transport: Transport, templates: Sequence[FrameTemplate], terms: PutTerms
    ) -> None:
        self._transport = transport
        self._terms = terms
        self._left_ms = countdown(terms.within_ms)
        self._raw = RawFrames(templates)
        self._frames = [np.zeros(header.frame_bytes, np.uint8) for header in self._raw.headers]

    @override
    def write(self, segment: int, layers: Sequence[Sequence[AnyPart]]) -> None:
        for chunk, parts in enumerate(layers):
            room = self._frames[chunk][self._raw.extent(chunk, segment)]
            self._raw.encode(chunk, segment, parts, room)

    @override
    def commit(self) -> list[Put]:
        frames, self._frames = self._frames, []
        whole = []
        for chunk, (template, frame) in enumerate(zip(self._raw.templates, frames, strict=True)):
            header = as_bytes(self._raw.header(chunk))
            copy_bytes(frame[: len(header)], header)
            whole.append(EncodedChunk(template, (), frame))
        terms = self._terms
        return self._transport.put(
            whole, durable=terms.durable, deadline_ms=self._left_ms(), hints=terms.hints
        )

    @override
    def abandon(self, within_s: float = ABANDON_S) -> None:
        self._frames = []
