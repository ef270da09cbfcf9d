"""A LevelledGet: chunks at the levels that a deadline leaves time for.

Bytes of stored frames come as ``client/levels.py`` plans them: first what each chunk needs at
least, then refinements, with a new plan after every batch. What came by the deadline is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import wait
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import groupby

from kvstore.client.batches import batches
from kvstore.client.connection import SLACK_S
from kvstore.client.levels import (
    LOADS_ONLY,
    RECOMPUTE,
    Fetch,
    Plan,
    PlanTerms,
    Progress,
    plan,
)
from kvstore.client.link_meter import LinkMeter
from kvstore.client.reader import Reader, Room
from kvstore.client.retry import countdown
from kvstore.client.stored_frame import MAX_LEVELS, StoredFrame
from kvstore.client.transport import FramePiece, Transport
from kvstore.codecs.base import ChunkTensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.bulk import Range
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    KVStoreError,
    LeaseExpiredError,
    RepresentationError,
    UnknownCodecError,
)
from kvstore.proto.frame import header_bytes
from kvstore.proto.types import DIGEST_BYTES, ChainDigest, ChunkKey, Fidelity, KVLayout
from kvstore.proto.wire import fidelity_number, join_digests

BATCH_S = 0.05
"""What is asked for at once, by the link's mean: no plan is older than that by much."""
SLOW_BATCH_S = 4 * BATCH_S
"""One that takes so long says something of the link, however small it is."""
BATCH_PIECES = 16
LEAST_PIECE_BYTES = 16 << 10
"""A batch comes in so many pieces, or in pieces of so many bytes: each is of use alone."""
MAX_DECODE_SHARE = 0.5
"""Of the deadline: at most so much is kept for decoding what came."""
LEAST_MEASURED_BYTES = 64 << 10
"""Of less, what a transfer takes says nothing about the link's bandwidth."""
RELEASE_MS = 1000
_DAMAGED = (ChunkCorruptError, InvalidFrameError, RepresentationError)


@dataclass(frozen=True, slots=True)
class Meters:
    """What a client has seen of its link and of its decoders. *clock* returns seconds."""

    link: LinkMeter
    decoder: LinkMeter
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Levelled:
    """What became of each chunk: ``levels[i]`` is the level in which it was read, 0 for the base,
    or RECOMPUTE. ``fidelity[i]`` says how true it is to what was stored; what is not exact is
    never to be put, nor what is computed from it.
    """

    levels: tuple[int, ...]
    fidelity: tuple[Fidelity, ...]

    @property
    def to_compute(self) -> tuple[int, ...]:
        """The chunks that the engine computes."""
        return tuple(i for i, level in enumerate(self.levels) if level == RECOMPUTE)


@dataclass(frozen=True, slots=True)
class Within:
    """A prefix that came in time: ``tensors`` by chunk, and ``levels`` and ``fidelity`` of each.

    What is not exact is never to be put, nor what is computed from it.
    """

    tensors: list[ChunkTensors]
    levels: tuple[int, ...]
    fidelity: tuple[Fidelity, ...]


class LevelledGet:
    """One get of the chunks of a prompt, all of *layout*. Used once, by one thread; the threads
    of *reader* decode.

    A store that is late or wrong makes chunks to be computed, never an
    error; ``damaged`` names what proved wrong.
    """

    def __init__(
        self,
        transport: Transport,
        reader: Reader,
        keys: Sequence[ChunkKey],
        layout: KVLayout,
        meters: Meters,
    ) -> None:
        self._transport = transport
        self._reader = reader
        self._digests = [ChainDigest(key[DIGEST_BYTES:]) for key in keys]
        self._frames = [StoredFrame(key, layout) for key in keys]
        self._meters = meters
        self._clock = meters.clock
        self._started_s = self._clock()
        self._limit = transport.session.terms.max_batch_chunks
        self._leases: list[int] = []
        """One for each batch of chunks of which any is ready."""
        self._ready = 0
        """Chunks under the lease."""
        self._engine_s = 0.0
        self._computed: frozenset[int] | None = None
        """The chunks that the engine computes by now; None before it was told."""
        self.damaged: list[ChunkKey] = []

    def run(
        self,
        terms: PlanTerms,
        room: Room,
        begin: Callable[[Sequence[int]], None] | None = None,
    ) -> Levelled:
        """Read into *room* what is worth it, until *terms*' deadline; return what came.

        *begin* is told once, when it is known what there is, which chunks the engine is to
        compute. Raises LeaseExpiredError when the session is over before anything was read.
        """
        terms = self._resolved(terms)
        try:
            self._find(terms)
            self._open(terms)
            fetching = replace(terms, deadline_s=terms.deadline_s - self._decode_s(terms))
            while (left_s := fetching.deadline_s - self._elapsed_s()) > 0:
                batch = self._batch(self._plan(fetching, begin))
                if not batch or not self._fetch(batch, left_s, terms.least):
                    break
            found = self._decode_all(room, terms)
        finally:
            self._give_back()
        return Levelled(tuple(level for level, _ in found), tuple(of for _, of in found))

    def _give_back(self) -> None:
        """Have the lease released by a thread: on a slow link that waits behind what is on it."""
        if self._leases:
            with suppress(KVStoreError):  # the client was closed: so is its session
                self._reader.submit(self._transport.release, self._leases, RELEASE_MS)

    def _resolved(self, terms: PlanTerms) -> PlanTerms:
        """Return *terms* with the speed of decoding as this client has seen it, if left out."""
        speed = terms.decode_bytes_per_s or self._meters.decoder.estimate().p20_bytes_per_s
        return replace(terms, decode_bytes_per_s=speed)

    def _decode_s(self, terms: PlanTerms) -> float:
        """Return what of the deadline is kept for decoding all that can come."""
        size_bytes = sum(frame.chunk.raw_bytes for frame in self._frames if frame.header)
        decode_s = size_bytes / terms.decode_bytes_per_s + SLACK_S
        return min(decode_s, MAX_DECODE_SHARE * terms.deadline_s)

    def _find(self, terms: PlanTerms) -> None:
        """Lease what is there."""
        left_ms = countdown(max(1, int(1000 * terms.deadline_s)))
        for first, some in batches(self._digests, self._limit):
            try:
                request = pb.LookupRequest(
                    session_id=self._transport.session.terms.session_id,
                    digests=join_digests(some),
                    lease=True,
                    ranges=True,
                    min_fidelity=fidelity_number(terms.least),
                    deadline_ms=left_ms(),
                )
                reply = self._transport.calls.call(
                    "Lookup", request, request.deadline_ms, pb.LookupResponse
                )
            except LeaseExpiredError:
                raise
            except KVStoreError:
                return
            self._leases += [reply.lease_id] if reply.lease_id else []
            self._ready = first + min(reply.ready, len(some))
            if self._ready < first + len(some):
                return

    def _elapsed_s(self) -> float:
        return self._clock() - self._started_s

    def _open(self, terms: PlanTerms) -> None:
        """Ask for the headers of what is there."""
        wanted = [
            Fetch(at, 0, 0, header_bytes(frame.layout, MAX_LEVELS))
            for at, frame in enumerate(self._frames[: self._ready])
        ]
        if wanted:
            self._fetch(wanted, terms.deadline_s, terms.least)

    def _plan(self, terms: PlanTerms, begin: Callable[[Sequence[int]], None] | None) -> Plan:
        chunks = [frame.chunk for frame in self._frames[: self._planned(terms)]]
        now = plan(chunks, self._progress(len(chunks)), terms, self._meters.link.estimate())
        if begin is not None and self._computed is None:
            self._tell(now, terms, begin)
            now = plan(chunks, self._progress(len(chunks)), terms, self._meters.link.estimate())
        return now

    def _planned(self, terms: PlanTerms) -> int:
        """Return how many chunks the plan is over.

        All; but for a reader without an engine, those up to the first that cannot be loaded.
        """
        if terms.prefill != LOADS_ONLY:
            return len(self._frames)
        floors = (frame.chunk.floor(terms.least) for frame in self._frames)
        return next((at for at, floor in enumerate(floors) if floor is None), len(self._frames))

    def _tell(self, now: Plan, terms: PlanTerms, begin: Callable[[Sequence[int]], None]) -> None:
        """Let the engine begin with what is to be computed."""
        computed = [at for at, action in enumerate(now.actions) if action == RECOMPUTE]
        begin(computed)
        self._computed = frozenset(computed)
        self._engine_s, context = self._elapsed_s(), 0
        for at, frame in enumerate(self._frames):
            if at in self._computed:
                self._engine_s += terms.prefill.seconds(frame.chunk.tokens, context)
            context += frame.chunk.tokens

    def _progress(self, count: int) -> Progress:
        levels = [
            RECOMPUTE if at in (self._computed or ()) else frame.reached()
            for at, frame in enumerate(self._frames[:count])
        ]
        return Progress(tuple(levels), self._elapsed_s(), self._engine_s)

    def _batch(self, now: Plan) -> list[Fetch]:
        """Return what to ask for next: as the plan has it, as much as the link takes BATCH_S for.

        Bytes that are here already are not asked for again.
        """
        chunks = [frame.chunk for frame in self._frames[: len(now.actions)]]
        progress = self._progress(len(chunks))
        budget_bytes = BATCH_S * self._meters.link.estimate().mean_bytes_per_s
        batch: list[Fetch] = []
        while budget_bytes > 0 and (fetch := now.next_fetch(chunks, progress)) is not None:
            start = max(fetch.start, self._frames[fetch.chunk].arrived_bytes)
            if start < fetch.stop:
                batch.append(fetch._replace(start=start))
                budget_bytes -= fetch.stop - start
            levels = list(progress.levels)
            levels[fetch.chunk] = fetch.level
            progress = Progress(tuple(levels), progress.elapsed_s, progress.engine_until_s)
        return batch  # in the plan's order: what a slow link brings of it is of use

    def _fetch(self, batch: Sequence[Fetch], left_s: float, least: Fidelity) -> bool:
        """Ask for *batch*; return whether anything came."""
        started_s = self._clock()
        end_s = started_s + left_s
        size_bytes = head_bytes = 0
        head_s = started_s
        try:
            with closing(self._pieces(batch, left_s, least)) as pieces:
                for piece in pieces:
                    size_bytes += self._add(piece)
                    if not head_bytes:
                        head_bytes, head_s = size_bytes, self._clock()
                    if self._clock() >= end_s:
                        break  # what came is of use
        except KVStoreError:
            is_over = True  # what came before it is used
        else:
            is_over = False
        if size_bytes >= LEAST_MEASURED_BYTES:
            self._meters.link.observe(size_bytes, self._clock() - started_s)
        elif self._clock() - started_s >= SLOW_BATCH_S:  # what came behind the first piece tells
            self._meters.link.observe(size_bytes - head_bytes, self._clock() - head_s)
        return size_bytes > 0 and not is_over

    def _pieces(
        self, batch: Sequence[Fetch], left_s: float, least: Fidelity
    ) -> Generator[FramePiece, None, None]:
        """Yield the pieces of *batch* in its order, by requests for chunks under one lease each."""
        left_ms = countdown(max(1, int(1000 * left_s)))
        ranges = _in_pieces(batch)
        for lease, run in groupby(ranges, lambda one: one.index // self._limit):
            first = lease * self._limit
            digests = self._digests[first : min(first + self._limit, self._ready)]
            wanted = [one._replace(index=one.index - first) for one in run]
            for _, some in batches(wanted, self._limit):
                with self._transport.get_ranges(
                    digests, some, self._leases[lease], left_ms(), least
                ) as pieces:
                    for piece in pieces:
                        yield piece._replace(index=first + piece.index)

    def _add(self, piece: FramePiece) -> int:
        if piece.index >= len(self._frames):
            return 0
        frame = self._frames[piece.index]
        if frame.header is not None:
            frame.add(piece.offset, piece.data)
            return len(piece.data)
        try:
            frame.open(piece.data, self._transport.session.representation_digest)
        except InvalidFrameError:
            pass  # a header longer than was asked for, or damage: computed, either way
        except ChunkCorruptError:
            self.damaged.append(frame.key)
        return len(piece.data)

    def _decode_all(self, room: Room, terms: PlanTerms) -> list[tuple[int, Fidelity]]:
        """Decode what came, in order, as far as the deadline allows, by all threads."""
        started_s = self._clock()
        work = [
            self._reader.submit(self._decoded, at, room, terms.deadline_s + SLACK_S)
            for at in range(len(self._frames))
        ]
        wait(work)
        found = [one.result() for one in work]
        pairs = zip(self._frames, found, strict=True)
        size_bytes = sum(frame.chunk.raw_bytes for frame, (level, _) in pairs if level >= 0)
        self._meters.decoder.observe(size_bytes, self._clock() - started_s)
        return found

    def _decoded(self, at: int, room: Room, deadline_s: float) -> tuple[int, Fidelity]:
        frame = self._frames[at]
        reached = RECOMPUTE if at in (self._computed or ()) else frame.reached()
        if reached < 0 or frame.header is None or self._elapsed_s() >= deadline_s:
            return RECOMPUTE, Fidelity.none
        try:
            level = frame.decode(reached, room(at, frame.header.layout))
        except _DAMAGED:
            self.damaged.append(frame.key)
        except UnknownCodecError:
            pass  # right for all we know, to a newer client
        else:
            return level, frame.header.fidelity
        return RECOMPUTE, Fidelity.none


def _in_pieces(batch: Sequence[Fetch]) -> list[Range]:
    """Return the ranges of *batch*, cut so that a slow link brings something soon."""
    size_bytes = sum(fetch.stop - fetch.start for fetch in batch)
    step = max(LEAST_PIECE_BYTES, -(-size_bytes // BATCH_PIECES))
    return [
        Range(fetch.chunk, start, min(start + step, fetch.stop))
        for fetch in batch
        for start in range(fetch.start, fetch.stop, step)
    ]
