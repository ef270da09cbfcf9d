"""A GetStream: one get's messages, from places that a reader on the host reaches to bytes."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import messages
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import ChunkKey, Fidelity
from kvstore.proto.unix_socket import Reach, pack_places
from kvstore.server.api.validation import fidelity
from kvstore.server.security.sessions import Session
from kvstore.server.store.layered_reads import LayerwiseRead
from kvstore.server.store.reads import IN_MEMORY, LayerPart, RangeRead, ReadResult
from kvstore.server.store.store import Store

REACH: dict[int, frozenset[Reach] | None] = {
    pb.VIA_STREAM: None,
    pb.VIA_SHARED_MEMORY: IN_MEMORY | {Reach.file},
    pb.VIA_DEVICE: IN_MEMORY | {Reach.device, Reach.file},
}
"""Where a reader of each kind can read in place; one that is sent bytes, nowhere."""


@dataclass(frozen=True, slots=True)
class GetStream:
    """Answers one get under a lease. ``deadline`` is a point on the store's clock.

    Copies of a chunk below ``least`` count as missing.
    """

    store: Store
    session: Session
    stamp: pb.Server
    lease_id: int
    deadline: float
    least: Fidelity

    def ranges(
        self,
        keys: Sequence[ChunkKey],
        ranges: Sequence[pb.FrameRange],
        reach: Collection[Reach],
    ) -> Iterator[pb.GetResponse]:
        """Yield the places of frames within *reach*, and *ranges* of others, as they lie."""
        reading = RangeRead(self.store.reads, self.session, self.least, self.deadline)
        for index, group in groupby(ranges, key=attrgetter("index")):
            found = reading.place(keys[index], reach) if index < len(keys) else None
            if found is not None:
                yield self._places(index, pack_places([found[1]]), [found[0]])
            else:
                yield from self.pieces(_range_parts(reading, keys, group))

    def frames(
        self,
        keys: Sequence[ChunkKey],
        reach: Collection[Reach],
        peers: Collection[int],
    ) -> Iterator[pb.GetResponse]:
        """Yield the chunks in order: where they are on *peers* or within *reach*, else bytes."""
        reads = self.store.reads
        rows = reads.in_place(keys, reach, self.least, peers)
        if len(rows):
            yield self._places(0, rows.tobytes(), reads.place_names(reach, peers))
            reads.note_in_place(self.session, keys, rows)
        if len(rows) < len(keys):
            yield from self._loaded(keys, len(rows), reach, peers)

    def _loaded(
        self,
        keys: Sequence[ChunkKey],
        first: int,
        reach: Collection[Reach],
        peers: Collection[int],
    ) -> Iterator[pb.GetResponse]:
        """Yield the chunks from *first* on; places that need no load come together."""
        reads, least = self.store.reads, self.least
        there: list[ReadResult] = []
        remote = self.store.tiers.remote
        lenders = remote.tier.lenders(keys[first:]) if remote is not None else set()
        for one in reads.get(self.session, keys[first:], self.deadline, reach, least, peers):
            result = replace(one, index=one.index + first)
            if result.place is None:
                yield from self.pieces(
                    (LayerPart(result.index, result.tier, len(result.frame), 0, result.frame),)
                )
                continue
            there.append(result)
            following = keys[result.index + 1 :][:1]
            if not (following and reads.in_reach(following[0], reach, least, peers)):
                yield self._places_of(there, lenders)
                there = []
        if there:
            yield self._places_of(there, lenders)

    def _places_of(self, results: Sequence[ReadResult], lenders: Iterable[int]) -> pb.GetResponse:
        names = list(dict.fromkeys(result.tier for result in results))
        rows = pack_places(
            result.place._replace(tier=names.index(result.tier))
            for result in results
            if result.place is not None
        )
        return self._places(results[0].index, rows, names, lenders)

    def _places(
        self, index: int, rows: bytes, names: Sequence[str], lenders: Iterable[int] = ()
    ) -> pb.GetResponse:
        return pb.GetResponse(
            server=self.stamp,
            lease_id=self.lease_id,
            index=index,
            places=pb.Places(rows=rows, tier_names=names, peers=lenders),
        )

    def pieces(self, parts: Iterable[LayerPart]) -> Iterator[pb.GetResponse]:
        """Cut parts of frames into messages."""
        for part in parts:
            for start in range(0, len(part.data), messages.MESSAGE_BYTES):
                offset = part.offset + start
                yield pb.GetResponse(
                    server=None if offset else self.stamp,
                    lease_id=self.lease_id,
                    index=part.chunk,
                    tier=part.tier,
                    part=pb.FramePart(
                        frame_bytes=part.frame_bytes,
                        offset=offset,
                        data=part.data[start : start + messages.MESSAGE_BYTES].tobytes(),
                    ),
                )


def parts_of(
    store: Store,
    session: Session,
    request: pb.GetRequest,
    keys: Sequence[ChunkKey],
    skipped: SkippedRows | None,
    deadline: float,
) -> Generator[LayerPart, None, None]:
    """Yield what *request* is for of leased *keys*: ranges of frames in order, layers of all chunks
    one after another without *skipped*, or whole frames.

    Each part's memory is lent until the next.
    """
    least = fidelity(request.min_fidelity)
    if request.ranges:
        reading = RangeRead(store.reads, session, least, deadline)
        yield from _range_parts(reading, keys, request.ranges)
    elif request.layer_major:
        layered = LayerwiseRead(store.moves, session, keys, deadline, least)
        layered.skipped = skipped
        yield from layered.parts()
    else:
        for one in store.reads.get(session, keys, deadline, least=least):
            yield LayerPart(one.index, one.tier, len(one.frame), 0, one.frame)


def _range_parts(
    reading: RangeRead, keys: Sequence[ChunkKey], ranges: Iterable[pb.FrameRange]
) -> Generator[LayerPart, None, None]:
    """Yield *ranges* of the frames of *keys*; one read for neighbours."""
    for index, group in groupby(ranges, key=attrgetter("index")):
        if index < len(keys):
            yield from reading.parts(index, keys[index], [(one.start, one.stop) for one in group])
