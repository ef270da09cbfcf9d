"""GetStream: one get, answered by bytes, or by places that a reader on this host reads itself."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TypeAlias

from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.messages import MESSAGE_BYTES, accuracy_of
from kvstore.proto.row_mask import SkippedRows
from kvstore.proto.types import ChunkKey
from kvstore.proto.unix_socket import Reach, pack_places
from kvstore.server.api.validation import Checks, require
from kvstore.server.security.sessions import Session
from kvstore.server.store.layered_reads import LayerwiseRead
from kvstore.server.store.reads import IN_MEMORY, NO_REACH, LayerPart, ReadTerms
from kvstore.server.store.store import Store

REACH: dict[int, frozenset[Reach]] = {
    pb.VIA_STREAM: NO_REACH,
    pb.VIA_SHARED_MEMORY: IN_MEMORY | {Reach.file},
    pb.VIA_DEVICE: IN_MEMORY | {Reach.device, Reach.file},
}
"""Where a reader of each kind can read in place; VIA_STREAM receives bytes."""
MAX_READ_PEERS = 64
"""Peers that one get may read from; further ones in the request are ignored."""

Places: TypeAlias = tuple[int, pb.Places]
"""The number of the first chunk in the request, and the places of it and those after it."""


@dataclass(slots=True)
class GetStream:
    """The answer to *request* of *session*, by *deadline*, for a reader with *reach*."""

    store: Store
    checks: Checks
    session: Session
    request: pb.GetRequest
    deadline: float
    reach: frozenset[Reach] = NO_REACH
    lease_id: int = 0
    _is_held: bool = False
    """Its own lease outlives it, because places in the answer need one."""

    def messages(self) -> Iterator[pb.GetResponse]:
        """Yield the answer in messages. Raises as ``parts``."""
        with closing(self.parts()) as parts:
            for part in parts:
                if not isinstance(part, LayerPart):
                    lease_id = self.lease_id if self._is_held else 0
                    yield pb.GetResponse(lease_id=lease_id, index=part[0], places=part[1])
                    continue
                for start in range(0, len(part.data), MESSAGE_BYTES):
                    data = part.data[start : start + MESSAGE_BYTES].tobytes()
                    offset = part.offset + start
                    piece = pb.FramePart(frame_bytes=part.frame_bytes, offset=offset, data=data)
                    yield pb.GetResponse(
                        lease_id=self.lease_id, index=part.chunk, tier=part.tier, part=piece
                    )

    def parts(self) -> Generator[LayerPart | Places, None, None]:
        """Yield ranges of frames in order, layers of all chunks in turn without the rows to skip,
        or whole frames; places for chunks in reach.

        Each part is valid until the next. The get's own lease ends with it. Raises KVStoreErrors.
        """
        request, session, store, checks = self.request, self.session, self.store, self.checks
        keys = checks.keys(session, request.digests)
        least = accuracy_of(request.min_accuracy)
        if request.ranges:
            checks.ranges(request.ranges, len(keys))
        skipped, rows = None, request.skip_rows
        if rows:
            require(request.layer_major, "skip_rows", len(rows), "with layer_major only")
            skipped = SkippedRows.unpack(rows, len(keys))
        peers = frozenset(request.peers[:MAX_READ_PEERS] if self.reach else ())
        terms = ReadTerms(session, self.deadline, least, self.reach, peers)
        self.lease_id, known = store.open_get(session, keys, request.lease_id)
        release, keys = not request.lease_id, keys[:known]
        try:
            if request.ranges:
                yield from self._ranges(keys, terms)
            elif request.layer_major:
                layered = LayerwiseRead(store.moves, keys, terms)
                layered.skipped = skipped
                yield from layered.parts()
            else:
                yield from self._frames(keys, terms)
            # A client that reads shared memory does so after this call and releases the lease
            # itself, unless it cancelled the call or got no place that needs a lease.
            release = release and not self._is_held
        finally:
            if release:
                store.release(session, self.lease_id)

    def _ranges(self, keys: Sequence[ChunkKey], terms: ReadTerms) -> Iterator[LayerPart | Places]:
        reads = self.store.reads
        for index, group in groupby(self.request.ranges, key=attrgetter("index")):
            if index >= len(keys):
                continue
            found = reads.chosen_place(keys[index], terms) if terms.reach else None
            if found is not None:
                yield self._places(index, pack_places([found[1]]), [found[0]])
            else:
                spans = [(one.start, one.stop) for one in group]  # one read for neighbours
                yield from reads.ranges(index, keys[index], spans, terms)

    def _frames(self, keys: Sequence[ChunkKey], terms: ReadTerms) -> Iterator[LayerPart | Places]:
        request, reads, remote = self.request, self.store.reads, self.store.tiers.remote
        first, lenders = 0, set[int]()
        if terms.reach:
            rows = reads.in_place(keys, terms)
            first = len(rows)
            if first:
                needs_lease = not request.no_lease or bool((rows["reach"] != Reach.memory).any())
                names = reads.place_names(terms)
                yield self._places(0, rows.tobytes(), names, needs_lease=needs_lease)
                reads.note_in_place(keys, rows, terms)
            if remote is not None and first < len(keys):
                lenders = remote.tier.lenders(keys[first:])
        there: list[LayerPart] = []
        for one in reads.get(keys[first:], terms) if first < len(keys) else ():
            part = one._replace(chunk=one.chunk + first)
            if part.place is None:
                yield part
                continue
            there.append(part)
            following = keys[part.chunk + 1 :][:1]
            if not (following and reads.in_reach(following[0], terms)):
                yield self._read_places(there, lenders)
                there = []
        if there:
            yield self._read_places(there, lenders)

    def _read_places(self, results: Sequence[LayerPart], lenders: Iterable[int]) -> Places:
        names = list(dict.fromkeys(result.tier for result in results))
        rows = pack_places(
            result.place._replace(tier=names.index(result.tier))
            for result in results
            if result.place is not None
        )
        return self._places(results[0].chunk, rows, names, lenders)

    def _places(
        self,
        index: int,
        rows: bytes,
        names: Sequence[str],
        lenders: Iterable[int] = (),
        *,
        needs_lease: bool = True,
    ) -> Places:
        self._is_held = self._is_held or needs_lease
        return index, pb.Places(rows=rows, tier_names=names, peers=lenders)
