"""A GetStream: one get's messages, from places that a reader on the host reaches to bytes."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import messages
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import ChunkKey
from kvstore.proto.unix_socket import Reach, pack_places
from kvstore.server.store.layered_reads import LayerwiseRead
from kvstore.server.store.reads import (
    IN_MEMORY,
    NO_REACH,
    LayerPart,
    RangeRead,
    ReadResult,
    ReadTerms,
)
from kvstore.server.store.store import Store

REACH: dict[int, frozenset[Reach]] = {
    pb.VIA_STREAM: NO_REACH,
    pb.VIA_SHARED_MEMORY: IN_MEMORY | {Reach.file},
    pb.VIA_DEVICE: IN_MEMORY | {Reach.device, Reach.file},
}
"""Where a reader of each kind can read in place; one that is sent bytes, nowhere."""


@dataclass(frozen=True, slots=True)
class GetStream:
    """Answers one get under a lease."""

    store: Store
    stamp: pb.Server
    lease_id: int
    terms: ReadTerms

    def ranges(
        self, keys: Sequence[ChunkKey], ranges: Sequence[pb.FrameRange]
    ) -> Iterator[pb.GetResponse]:
        """Yield the places of frames within reach, and *ranges* of others, as they lie."""
        reading = RangeRead(self.store.reads, self.terms)
        for index, group in groupby(ranges, key=attrgetter("index")):
            found = reading.place(keys[index]) if index < len(keys) else None
            if found is not None:
                yield self._places(index, pack_places([found[1]]), [found[0]])
            else:
                yield from self.pieces(_range_parts(reading, keys, group))

    def frames(self, keys: Sequence[ChunkKey]) -> Iterator[pb.GetResponse]:
        """Yield the chunks in order: where they are on peers or within reach, else bytes."""
        reads, terms = self.store.reads, self.terms
        rows = reads.in_place(keys, terms)
        if len(rows):
            yield self._places(0, rows.tobytes(), reads.place_names(terms))
            reads.note_in_place(keys, rows, terms)
        if len(rows) < len(keys):
            yield from self._loaded(keys, len(rows))

    def _loaded(self, keys: Sequence[ChunkKey], first: int) -> Iterator[pb.GetResponse]:
        """Yield the chunks from *first* on; places that need no load come together."""
        reads, terms = self.store.reads, self.terms
        there: list[ReadResult] = []
        remote = self.store.tiers.remote
        lenders = remote.tier.lenders(keys[first:]) if remote is not None else set()
        for one in reads.get(keys[first:], terms):
            result = replace(one, index=one.index + first)
            if result.place is None:
                yield from self.pieces(
                    (LayerPart(result.index, result.tier, len(result.frame), 0, result.frame),)
                )
                continue
            there.append(result)
            following = keys[result.index + 1 :][:1]
            if not (following and reads.in_reach(following[0], terms)):
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
    request: pb.GetRequest,
    keys: Sequence[ChunkKey],
    skipped: SkippedRows | None,
    terms: ReadTerms,
) -> Generator[LayerPart, None, None]:
    """Yield what *request* is for of leased *keys*: ranges of frames in order, layers of all chunks
    one after another without *skipped*, or whole frames.

    Each part's memory is lent until the next.
    """
    if request.ranges:
        yield from _range_parts(RangeRead(store.reads, terms), keys, request.ranges)
    elif request.layer_major:
        layered = LayerwiseRead(store.moves, keys, terms)
        layered.skipped = skipped
        yield from layered.parts()
    else:
        for one in store.reads.get(keys, terms):
            yield LayerPart(one.index, one.tier, len(one.frame), 0, one.frame)


def _range_parts(
    reading: RangeRead, keys: Sequence[ChunkKey], ranges: Iterable[pb.FrameRange]
) -> Generator[LayerPart, None, None]:
    """Yield *ranges* of the frames of *keys*; one read for neighbours."""
    for index, group in groupby(ranges, key=attrgetter("index")):
        if index < len(keys):
            yield from reading.parts(index, keys[index], [(one.start, one.stop) for one in group])
