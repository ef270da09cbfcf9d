"""A LevelledGet: chunks at the levels that a deadline leaves time for.

Bytes of stored frames come as ``client/levels.py`` plans them: first what each chunk needs at
least, then refinements, with a new plan after every batch. What came by the deadline is used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from queue import Empty, SimpleQueue
from typing import TypeAlias, cast

from kvstore.client.batches import batches
from kvstore.client.connection import SLACK_S, countdown
from kvstore.client.decode import WRONG, Reader, Room
from kvstore.client.levels import (
    BATCH_GROWTH,
    BATCH_S,
    FIRST_BATCH_BYTES,
    LOADS_ONLY,
    MISSING,
    QUIET_S,
    RECOMPUTE,
    Fetch,
    LevelledChunk,
    Plan,
    PlanTerms,
    Progress,
    batch_of,
    plan,
    to_compute,
    wait_until_s,
)
from kvstore.client.link_meter import LinkMeter
from kvstore.client.stored_frame import MAX_LEVELS, StoredFrame
from kvstore.client.transport import Arrival, ReadPlan, Transport
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    KVStoreError,
    LeaseExpiredError,
    UnknownCodecError,
)
from kvstore.proto.frame import header_bytes
from kvstore.proto.messages import accuracy_number
from kvstore.proto.types import DIGEST_BYTES, Accuracy, ChainDigest, ChunkKey, KVLayout, Stated

SLOW_BATCH_S = 4 * BATCH_S
"""One that takes so long says something of the link, however small it is."""
BATCH_PIECES = 16
LEAST_PIECE_BYTES = 16 << 10
"""A batch comes in so many pieces, or in pieces of so many bytes: each is of use alone."""
LEAST_MEASURED_BYTES = 64 << 10
"""Of less, what a transfer takes says nothing about the link's bandwidth."""
RELEASE_MS = 1000
LEAST_WAIT_S = 0.001
_Decoding: TypeAlias = "Future[tuple[int, Stated]]"
_NOTHING = (RECOMPUTE, Stated(Accuracy.approximate))


@dataclass(frozen=True, slots=True)
class Meters:
    """What a client has seen of its link and of its decoders. *clock* returns seconds."""

    link: LinkMeter
    decoder: LinkMeter
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Levelled:
    """What became of each chunk: ``levels[i]`` is the level in which it was read, 0 for the base,
    or RECOMPUTE. ``stated[i]`` is what the copy states; what is not exact is never to be put, nor
    what is computed from it.
    """

    levels: tuple[int, ...]
    stated: tuple[Stated, ...]

    @classmethod
    def none(cls, count: int) -> Levelled:
        """Return that of *count* chunks nothing was read."""
        return cls((RECOMPUTE,) * count, (_NOTHING[1],) * count)

    @property
    def to_compute(self) -> tuple[int, ...]:
        """The chunks that the engine computes."""
        return tuple(i for i, level in enumerate(self.levels) if level == RECOMPUTE)


class LevelledGet:
    """One get of the chunks of a prompt, all of *layout*. Used once; *reader*'s threads decode.

    One thread loads (``run``). With an engine that computes meanwhile another one asks ``claim``
    what to compute. A store that is late or wrong makes chunks to be computed, never an error;
    ``damaged`` names what proved wrong.
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
        self._batch_bytes = FIRST_BATCH_BYTES
        """What a batch may have at most."""
        self._found: Plan | None = None
        self._planned_s = 0.0
        self._claimed = 0
        """How many of the first chunks the engine has begun."""
        self._engine_s = 0.0
        """Until when it is busy with them, from the start on; 0 before it begins."""
        self._is_over = self._is_finished = False
        """Whether nothing more comes, and whether what came is being decoded."""
        self._changed = threading.Condition()
        """Guards the six above, of which the loader writes three."""
        self._decoding: dict[int, tuple[int, _Decoding]] = {}
        """The level at which each chunk is being decoded, or was."""
        self.damaged: list[ChunkKey] = []

    def run(self, terms: PlanTerms, room: Room) -> Levelled:
        """Read into *room* what is worth it, until *terms*' deadline; return what came.

        Raises LeaseExpiredError when the session is over before anything was read.
        """
        terms = self._resolved(terms)
        try:
            self._find(terms)
            self._open(terms)
            while (left_s := self._left_s(terms)) > 0:
                batch = self._batch(self._plan(terms))
                if not batch or not self._fetch(batch, left_s, terms.least):
                    break
                self._decode_planned(room, terms)
            found = self.finish(room, terms)
        finally:
            wait([work for _, work in self._decoding.values()])  # they write to the room
            self.end()
            self._give_back()
        return found or Levelled.none(self.count)

    def finish(self, room: Room, terms: PlanTerms) -> Levelled | None:
        """Decode what came and return it; None where another thread does, or has."""
        with self._changed:
            if self._is_finished:
                return None
            self._is_finished = self._is_over = True  # what is claimed now is none of these
            computed = self._claimed
        found = self._decode_all(computed, room, self._resolved(terms))
        return Levelled(tuple(level for level, _ in found), tuple(of for _, of in found))

    def met_s(self, terms: PlanTerms) -> float:
        """Return how long to wait for refinements, once nothing is left to compute."""
        return max(0.0, self._left_s(self._resolved(terms)))

    @property
    def count(self) -> int:
        """The chunks of the prompt."""
        return len(self._frames)

    def end(self) -> None:
        """Load nothing more, and let who waits for it know. Any thread may call."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def claim(self, terms: PlanTerms) -> range:
        """Wait until there is something to compute; return which chunks, none once the others come.

        For the engine's thread, which calls again when it has computed them.
        """
        terms = self._resolved(terms)
        with self._changed:
            while True:
                first, now_s = self._claimed, self._elapsed_s()
                count, until_s = self._claimable(terms, now_s)
                if count:
                    self._claimed += count
                    tokens = [frame.chunk.tokens for frame in self._frames]
                    took_s = terms.span_s(sum(tokens[first : first + count]), sum(tokens[:first]))
                    self._engine_s = now_s + took_s
                    return range(first, self._claimed)
                if self._is_over or first == len(self._frames) or self._is_here(first):
                    return range(first, first)
                self._changed.wait(max(until_s - now_s, LEAST_WAIT_S))

    def _is_here(self, at: int) -> bool:
        return self._frames[at].reached() >= 0

    def _claimable(self, terms: PlanTerms, now_s: float) -> tuple[int, float]:
        """Return how many chunks the engine is to begin now, and when to look again."""
        count = len(self._frames)
        missing = list(takewhile(lambda at: not self._is_here(at), range(self._claimed, count)))
        if self._is_over or not missing:
            return len(missing), now_s
        chunks, progress = self._chunks(count), self._progress(count)
        begin_s = wait_until_s(chunks, progress, terms)
        is_wanted = self._found is not None and RECOMPUTE in self._found.actions[missing[0] :]
        if not (self._engine_s or is_wanted or now_s >= begin_s):
            return 0, begin_s
        if self._found is None:
            return max(1, len(missing) // 2), now_s
        is_quiet = now_s - self._planned_s > QUIET_S
        wanted = max(1, to_compute(self._found, chunks, progress, terms, is_quiet=is_quiet))
        return min(wanted, len(missing)), now_s

    def _give_back(self) -> None:
        """Have the lease released by a thread: on a slow link that waits behind what is on it."""
        if self._leases:
            with suppress(KVStoreError):  # the client was closed: so is its session
                self._reader.submit(self._transport.release, self._leases, RELEASE_MS)

    def _resolved(self, terms: PlanTerms) -> PlanTerms:
        """Return *terms* with the speed of decoding as this client has seen it, if left out."""
        speed = terms.decode_bytes_per_s or self._meters.decoder.estimate().p20_bytes_per_s
        return replace(terms, decode_bytes_per_s=speed)

    def _find(self, terms: PlanTerms) -> None:
        """Lease what is there."""
        left_ms = countdown(max(1, int(1000 * terms.deadline_s)))
        for first, some in batches(self._digests, self._limit):
            try:
                request = pb.LookupRequest(
                    session_id=self._transport.session.terms.session_id,
                    digests=b"".join(some),
                    lease=True,
                    ranges=True,
                    min_accuracy=accuracy_number(terms.least),
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

    def _left_s(self, terms: PlanTerms) -> float:
        """Return how long to wait for what comes next, at most."""
        chunks, now_s = self._chunks(len(self._frames)), self._elapsed_s()
        progress = self._progress(len(chunks))
        if self._is_over:
            return 0.0
        until_s = wait_until_s(chunks, progress, terms)
        if not terms.never_later:
            return until_s - now_s - SLACK_S
        if not terms.loads_first and MISSING in progress.levels:
            # The engine begins by then, and all that comes before it is done is of use.
            until_s = max(now_s, self._engine_s or until_s) + terms.left_s(chunks, progress)
        return until_s - now_s

    def _open(self, terms: PlanTerms) -> None:
        """Ask for the headers of what is there."""
        wanted = [
            Fetch(at, 0, 0, header_bytes(frame.layout, MAX_LEVELS))
            for at, frame in enumerate(self._frames[: self._ready])
        ]
        if wanted:
            self._fetch(wanted, self._left_s(terms), terms.least)

    def _plan(self, terms: PlanTerms) -> Plan:
        chunks = self._chunks(self._planned(terms))
        progress = self._progress(len(chunks))
        found = plan(chunks, progress, terms, self._meters.link.estimate())
        with self._changed:
            self._found, self._planned_s = found, self._elapsed_s()
            self._changed.notify_all()
        return found

    def _planned(self, terms: PlanTerms) -> int:
        """Return how many chunks the plan is over.

        All; but for a reader without an engine, those up to the first that cannot be loaded.
        """
        if terms.prefill != LOADS_ONLY:
            return len(self._frames)
        floors = (frame.chunk.floor(terms.least) for frame in self._frames)
        return next((at for at, floor in enumerate(floors) if floor is None), len(self._frames))

    def _progress(self, count: int) -> Progress:
        levels = [
            RECOMPUTE if at < self._claimed else frame.reached()
            for at, frame in enumerate(self._frames[:count])
        ]
        undecoded_bytes = sum(
            self._frames[at].chunk.raw_bytes
            for at, has in enumerate(levels)
            if has >= 0 and self._decoding.get(at, (MISSING, None))[0] != has
        )
        return Progress(tuple(levels), self._elapsed_s(), self._engine_s, undecoded_bytes)

    def _chunks(self, count: int) -> list[LevelledChunk]:
        return [frame.chunk for frame in self._frames[:count]]

    def _batch(self, now: Plan) -> list[Fetch]:
        """Return what to ask for next: as much as the link takes BATCH_S for."""
        chunks = self._chunks(len(now.actions))
        arrived = [frame.arrived_bytes for frame in self._frames]
        budget_bytes = min(
            BATCH_S * self._meters.link.estimate().mean_bytes_per_s, self._batch_bytes
        )
        self._batch_bytes *= BATCH_GROWTH
        return batch_of(now, chunks, self._progress(len(chunks)), arrived, budget_bytes)

    def _fetch(self, batch: Sequence[Fetch], left_s: float, least: Accuracy) -> bool:
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
                    if self._clock() >= end_s or self._is_over:
                        break  # what came is of use
        except DeadlineError:
            is_over = True
            # It answered the lookup: its link is slow, and the next call is not to pay for that.
            self._transport.session.connection.breaker.note(None)
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
        self, batch: Sequence[Fetch], left_s: float, least: Accuracy
    ) -> Generator[Arrival, None, None]:
        """Yield the pieces of *batch* in its order, by requests for chunks under one lease each."""
        left_ms = countdown(max(1, int(1000 * left_s)))
        ranges = _in_pieces(batch)
        for lease, run in groupby(ranges, lambda one: one.index // self._limit):
            first = lease * self._limit
            digests = self._digests[first : min(first + self._limit, self._ready)]
            wanted = list(run)
            for one in wanted:
                one.index -= first
            for _, some in batches(wanted, self._limit):
                plan = ReadPlan(digests, self._leases[lease], left_ms(), least, ranges=some)
                with self._transport.read(plan) as pieces:
                    for piece in pieces:
                        yield replace(piece, index=first + piece.index)

    def _add(self, piece: Arrival) -> int:
        if piece.index >= len(self._frames):
            return 0
        frame, data = self._frames[piece.index], cast("Bytes", piece.data)
        if frame.header is not None:
            frame.add(piece.offset, data)
            return len(data)
        try:
            frame.open(data, self._transport.session.representation_digest)
        except InvalidFrameError:
            pass  # a header longer than was asked for, or damage: computed, either way
        except ChunkCorruptError:
            self.damaged.append(frame.key)
        return len(data)

    def _decode_planned(self, room: Room, terms: PlanTerms) -> None:
        """Have what is as the plan wants it decoded beside the next batch."""
        assert self._found is not None
        with self._changed:
            if self._is_finished:
                return
            for at, action in enumerate(self._found.actions):
                if at >= self._claimed and 0 <= action <= self._frames[at].reached():
                    self._decode(at, room, terms)

    def _decode(self, at: int, room: Room, terms: PlanTerms) -> None:
        """Have a chunk decoded at the level that it has reached, unless it is."""
        reached = self._frames[at].reached()
        before = self._decoding.get(at)
        if reached < 0 or (before is not None and before[0] == reached):
            return
        after = None if before is None else before[1]
        work = self._reader.submit(self._decoded, at, reached, room, terms, after)
        self._decoding[at] = (reached, work)

    def _decode_all(self, computed: int, room: Room, terms: PlanTerms) -> list[tuple[int, Stated]]:
        """Decode what came but for the first *computed*, in order, as far as time allows."""
        for at in range(computed, self._usable(terms)):
            self._decode(at, room, terms)
        found = {at: work.result() for at, (_, work) in self._decoding.items() if at >= computed}
        return [found.get(at, _NOTHING) for at in range(len(self._frames))]

    def _usable(self, terms: PlanTerms) -> int:
        """Return how many chunks are worth decoding: with ``loads_first`` those of a prefix."""
        if not terms.loads_first:
            return len(self._frames)
        reached = (frame.reached() for frame in self._frames)
        return next((at for at, level in enumerate(reached) if level < 0), len(self._frames))

    def _decoded(
        self, at: int, reached: int, room: Room, terms: PlanTerms, after: _Decoding | None
    ) -> tuple[int, Stated]:
        before = _NOTHING if after is None else after.result()  # which writes to the same room
        frame, started_s = self._frames[at], self._clock()
        is_late = self._elapsed_s() >= terms.deadline_s + SLACK_S and not terms.never_later
        if frame.header is None or is_late:
            return before
        try:
            level = frame.decode(reached, room(at, frame.header.layout))
        except WRONG:
            self.damaged.append(frame.key)
        except UnknownCodecError:
            pass  # right for all we know, to a newer client
        else:
            # Of all threads: each of them is at a frame of its own meanwhile.
            size_bytes = frame.chunk.raw_bytes * self._reader.threads
            self._meters.decoder.observe(size_bytes, self._clock() - started_s)
            return level, frame.header.stated
        return _NOTHING


def beside(
    get: LevelledGet, terms: PlanTerms, room: Room, compute: Callable[[range], None]
) -> Levelled:
    """Run *get* in a thread and *compute* in this one, until all chunks are there.

    Raises what *compute* raises, and LeaseExpiredError when nothing was computed before it.
    """
    found: SimpleQueue[Levelled | KVStoreError] = SimpleQueue()

    def load() -> None:
        try:
            found.put(get.run(terms, room))
        except KVStoreError as error:
            found.put(error)
        finally:  # of what nobody foresaw whoever waits learns, too
            found.put(KVStoreError("the load ended in an error that is in the log"))

    threading.Thread(target=load, name="kvstore-levels", daemon=True).start()
    computed = 0
    try:
        while some := get.claim(terms):
            compute(some)
            computed = some.stop
    except BaseException:
        get.end()
        raise
    if computed == get.count:
        get.end()  # nobody waits for the loader
        return Levelled.none(computed)
    try:
        result = found.get(timeout=get.met_s(terms))
    except Empty:  # it waits for what the engine has computed by now
        result = get.finish(room, terms) or found.get()
    if not isinstance(result, KVStoreError):
        return result
    if not computed:
        raise result
    return Levelled.none(get.count)


def _in_pieces(batch: Sequence[Fetch]) -> list[pb.FrameRange]:
    """Return the ranges of *batch*, cut so that a slow link brings something soon."""
    size_bytes = sum(fetch.stop - fetch.start for fetch in batch)
    step = max(LEAST_PIECE_BYTES, -(-size_bytes // BATCH_PIECES))
    return [
        pb.FrameRange(index=fetch.chunk, start=start, stop=min(start + step, fetch.stop))
        for fetch in batch
        for start in range(fetch.start, fetch.stop, step)
    ]
