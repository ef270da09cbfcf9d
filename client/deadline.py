"""Chunks of a prompt at the levels that a deadline leaves time for.

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

import numpy as np

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
    LinkMeter,
    Plan,
    PlanTerms,
    Progress,
    batch_of,
    plan,
    to_compute,
    wait_until_s,
)
from kvstore.client.transports.base import Arrival, ReadPlan, Transport
from kvstore.codecs.base import AnyTensors, codec_by_id
from kvstore.codecs.lossy import LossyCodec
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    KVStoreError,
    LeaseExpiredError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader, check_frame, header_bytes, parse_header
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
MAX_LEVELS = 4
"""Of frames whose headers are requested in one go; frames of more levels are computed."""
_PER_LEVEL = 9.0
"""A refinement cuts a step into three, and so the squared error into nine."""
_NOTHING = (RECOMPUTE, Stated(Accuracy.approximate))
_Decoding: TypeAlias = "Future[tuple[int, Stated]]"


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


class StoredFrame:
    """The first bytes of a chunk's frame, as they come. ``chunk`` is what they promise."""

    def __init__(self, key: ChunkKey, layout: KVLayout) -> None:
        self.key = key
        self.header: FrameHeader | None = None
        self.chunk = LevelledChunk(layout.tokens, layout.raw_bytes)
        self.arrived_bytes = 0
        self._data: Bytes = np.empty(0, np.uint8)
        self._levels: tuple[int, ...] = ()

    def open(self, head: Bytes, representation: bytes) -> None:
        """Read the header at the start of *head*. Raises InvalidFrameError, ChunkCorruptError."""
        header = parse_header(head)
        if header.key != self.key or header.representation != representation:
            raise ChunkCorruptError(self.key, f"its frame is of {header.key.hex()}")
        if header.levels > MAX_LEVELS:
            return
        top = header.levels
        is_exact = header.accuracy is Accuracy.exact
        levels = [top] if is_exact else list(range(top + 1))
        ends = [header.level_end(level) for level in levels]
        self.header, self._levels = header, tuple(levels)
        self.chunk = LevelledChunk(
            header.layout.tokens,
            header.layout.raw_bytes,
            tuple(ends),
            (header.accuracy,) * len(levels),
            tuple(0.0 if is_exact else _PER_LEVEL ** (top - level) for level in levels),
        )
        self._data = np.empty(ends[-1], np.uint8)
        self.add(0, head)

    def add(self, offset: int, data: Bytes) -> None:
        """Take bytes that begin at *offset*; only what follows those that are here is of use."""
        if offset == self.arrived_bytes:
            data = data[: len(self._data) - offset]
            copy_bytes(self._data[offset : offset + len(data)], data)
            self.arrived_bytes += len(data)

    def reached(self) -> int:
        """Return the highest level that is here whole, as the plan counts them; else MISSING."""
        count = sum(end <= self.arrived_bytes for end in self.chunk.end_bytes)
        return count - 1 if count else MISSING

    def decode(self, reached: int, out: AnyTensors) -> int:
        """Verify and decode what is here into *out*; return the frame's own number of the level.

        Raises what is in ``WRONG``, UnknownCodecError.
        """
        assert self.header is not None
        prefix = self._data[: self.chunk.end_bytes[reached]]
        level = self._levels[reached]
        codec = codec_by_id(self.header.codec_id)
        if isinstance(codec, LossyCodec):
            header = check_frame(prefix, self.key, level)
            codec.decode_prefix(header, prefix, level, out)
        else:
            codec.decode_into(check_frame(prefix, self.key), prefix, out)
        return level


class LevelledGet:
    """One get of the chunks of a prompt, all as long as a chunk is, into *room*. Used once.

    One thread loads (``run``), *reader*'s decode. With an engine that computes meanwhile another
    one calls ``claim`` for what to compute. A store that is late or wrong makes chunks to be
    computed, never an error; ``damaged`` names what proved wrong.
    """

    def __init__(
        self,
        transport: Transport,
        reader: Reader,
        meters: Meters,
        keys: Sequence[ChunkKey],
        terms: PlanTerms,
        room: Room,
    ) -> None:
        session = transport.session
        layout = KVLayout.of(session.representation, session.options.chunk_tokens)
        self._transport = transport
        self._reader = reader
        self._meters = meters
        self._room = room
        self._plain_terms = terms
        self._digests = [ChainDigest(key[DIGEST_BYTES:]) for key in keys]
        self._frames = [StoredFrame(key, layout) for key in keys]
        self._header_bytes = header_bytes(layout, MAX_LEVELS)
        self._clock = meters.clock
        self._started_s = self._clock()
        self._limit = session.terms.max_batch_chunks
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

    @property
    def count(self) -> int:
        """The chunks of the prompt."""
        return len(self._frames)

    @property
    def _terms(self) -> PlanTerms:
        """The terms, with the speed of decoding as this client has seen it, if left out."""
        terms = self._plain_terms
        speed = terms.decode_bytes_per_s or self._meters.decoder.estimate().p20_bytes_per_s
        return replace(terms, decode_bytes_per_s=speed)

    def run(self) -> Levelled:
        """Read what is worth it, until the deadline; return what came.

        Raises LeaseExpiredError when the session is over before anything was read.
        """
        try:
            self._find()
            heads = [Fetch(at, 0, 0, self._header_bytes) for at in range(self._ready)]
            if heads:
                self._fetch(heads, self.left_s())
            while (left_s := self.left_s()) > 0:
                batch = self._batch(self._plan())
                if not batch or not self._fetch(batch, left_s):
                    break
                self._decode_planned()
            found = self.finish()
        finally:
            wait([work for _, work in self._decoding.values()])  # they write to the room
            self.end()
            if self._leases:  # by a thread: on a slow link that waits behind what is on it
                with suppress(KVStoreError):  # the client was closed: so is its session
                    self._reader.submit(self._transport.release, self._leases, RELEASE_MS)
        return found or Levelled.none(self.count)

    def finish(self) -> Levelled | None:
        """Decode what came and return it; None where another thread does, or has."""
        with self._changed:
            if self._is_finished:
                return None
            self._is_finished = self._is_over = True  # what is claimed now is none of these
            computed = self._claimed
        stop = self.count
        if self._plain_terms.loads_first:  # of use is only a prefix
            stop = next((at for at in range(stop) if not self._is_here(at)), stop)
        for at in range(computed, stop):
            self._decode(at)
        works = {at: work for at, (_, work) in self._decoding.items() if at >= computed}
        found = [works[at].result() if at in works else _NOTHING for at in range(self.count)]
        return Levelled(tuple(level for level, _ in found), tuple(of for _, of in found))

    def end(self) -> None:
        """Load nothing more, and let who waits for it know. Any thread may call."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    # --- what the engine computes meanwhile

    def claim(self) -> range:
        """Wait until there is something to compute; return which chunks, none once the others come.

        For the engine's thread, which calls again when it has computed them.
        """
        with self._changed:
            while True:
                first, now_s = self._claimed, self._elapsed_s()
                count, until_s = self._claimable(now_s)
                if count:
                    self._claimed += count
                    tokens = [frame.chunk.tokens for frame in self._frames]
                    context = sum(tokens[:first])
                    took_s = self._terms.span_s(sum(tokens[first : self._claimed]), context)
                    self._engine_s = now_s + took_s
                    return range(first, self._claimed)
                if self._is_over or first == self.count or self._is_here(first):
                    return range(first, first)
                self._changed.wait(max(until_s - now_s, LEAST_WAIT_S))

    def _claimable(self, now_s: float) -> tuple[int, float]:
        """Return how many chunks the engine is to begin now, and when to look again."""
        rest = range(self._claimed, self.count)
        missing = sum(1 for _ in takewhile(lambda at: not self._is_here(at), rest))
        if self._is_over or not missing:
            return missing, now_s
        chunks, progress, terms = self._chunks(), self._progress(), self._terms
        begin_s = wait_until_s(chunks, progress, terms)
        found = self._found
        is_wanted = found is not None and RECOMPUTE in found.actions[self._claimed :]
        if not (self._engine_s or is_wanted or now_s >= begin_s):
            return 0, begin_s
        if found is None:
            return max(1, missing // 2), now_s
        is_quiet = now_s - self._planned_s > QUIET_S
        wanted = to_compute(found, chunks, progress, terms, is_quiet=is_quiet)
        return min(max(1, wanted), missing), now_s

    def _is_here(self, at: int) -> bool:
        return self._frames[at].reached() >= 0

    # --- what is loaded

    def _find(self) -> None:
        """Lease what is there."""
        terms, session_id = self._plain_terms, self._transport.session.terms.session_id
        left_ms = countdown(max(1, int(1000 * terms.deadline_s)))
        for first, some in batches(self._digests, self._limit):
            try:
                request = pb.LookupRequest(
                    session_id=session_id,
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

    def left_s(self) -> float:
        """Return how long to wait for what comes next, at most."""
        if self._is_over:
            return 0.0
        chunks, progress, terms = self._chunks(), self._progress(), self._terms
        until_s, now_s = wait_until_s(chunks, progress, terms), self._elapsed_s()
        if not terms.never_later:
            return until_s - now_s - SLACK_S
        if not terms.loads_first and MISSING in progress.levels:
            # The engine begins by then, and all that comes before it is done is of use.
            until_s = max(now_s, self._engine_s or until_s) + terms.left_s(chunks, progress)
        return until_s - now_s

    def _chunks(self) -> list[LevelledChunk]:
        return [frame.chunk for frame in self._frames]

    def _progress(self, count: int | None = None) -> Progress:
        """Return how far the get is, or its first *count* chunks are."""
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

    def _plan(self) -> Plan:
        """Plan all chunks; without an engine, those up to the first that cannot be loaded."""
        terms, chunks = self._terms, self._chunks()
        if terms.prefill == LOADS_ONLY:
            chunks = list(takewhile(lambda one: one.floor(terms.least) is not None, chunks))
        found = plan(chunks, self._progress(len(chunks)), terms, self._meters.link.estimate())
        with self._changed:
            self._found, self._planned_s = found, self._elapsed_s()
            self._changed.notify_all()
        return found

    def _batch(self, now: Plan) -> list[Fetch]:
        """Return what to request next: as much as the link takes BATCH_S for."""
        count = len(now.actions)
        arrived = [frame.arrived_bytes for frame in self._frames]
        speed = self._meters.link.estimate().mean_bytes_per_s
        budget_bytes = min(BATCH_S * speed, self._batch_bytes)
        self._batch_bytes *= BATCH_GROWTH
        return batch_of(now, self._chunks()[:count], self._progress(count), arrived, budget_bytes)

    def _fetch(self, batch: Sequence[Fetch], left_s: float) -> bool:
        """Request *batch*; return whether anything came."""
        started_s = self._clock()
        end_s = started_s + left_s
        size_bytes = head_bytes = 0
        head_s = started_s
        is_over = True
        try:
            with closing(self._pieces(batch, left_s)) as pieces:
                for piece in pieces:
                    size_bytes += self._add(piece)
                    if not head_bytes:
                        head_bytes, head_s = size_bytes, self._clock()
                    if self._clock() >= end_s or self._is_over:
                        break  # what came is of use
            is_over = False
        except DeadlineError:
            # It answered the lookup: its link is slow, and the next call is not to pay for that.
            self._transport.session.connection.breaker.note(None)
        except KVStoreError:
            pass  # what came before it is used
        if size_bytes >= LEAST_MEASURED_BYTES:
            self._meters.link.observe(size_bytes, self._clock() - started_s)
        elif self._clock() - started_s >= SLOW_BATCH_S:  # by what came behind the first piece
            self._meters.link.observe(size_bytes - head_bytes, self._clock() - head_s)
        return size_bytes > 0 and not is_over

    def _pieces(self, batch: Sequence[Fetch], left_s: float) -> Generator[Arrival, None, None]:
        """Yield the pieces of *batch* in its order, by requests for chunks under one lease each."""
        left_ms, least = countdown(max(1, int(1000 * left_s))), self._plain_terms.least
        for lease, run in groupby(_ranges(batch), lambda one: one.index // self._limit):
            first = lease * self._limit
            digests = self._digests[first : min(first + self._limit, self._ready)]
            wanted = list(run)
            for one in wanted:
                one.index -= first
            for _, some in batches(wanted, self._limit):
                read = ReadPlan(digests, self._leases[lease], left_ms(), least, ranges=some)
                with self._transport.read(read) as pieces:
                    for piece in pieces:
                        yield replace(piece, index=first + piece.index)

    def _add(self, piece: Arrival) -> int:
        if piece.index >= self.count:
            return 0
        frame, data = self._frames[piece.index], cast("Bytes", piece.data)
        if frame.header is not None:
            frame.add(piece.offset, data)
            return len(data)
        try:
            frame.open(data, self._transport.session.representation_digest)
        except InvalidFrameError:
            pass  # a header longer than was requested, or damage: computed, either way
        except ChunkCorruptError:
            self.damaged.append(frame.key)
        return len(data)

    # --- what came

    def _decode_planned(self) -> None:
        """Have what is as the plan wants it decoded beside the next batch."""
        assert self._found is not None
        with self._changed:
            if self._is_finished:
                return
            for at, action in enumerate(self._found.actions):
                if at >= self._claimed and 0 <= action <= self._frames[at].reached():
                    self._decode(at)

    def _decode(self, at: int) -> None:
        """Have a chunk decoded at the level that it has reached, unless it is."""
        reached = self._frames[at].reached()
        before = self._decoding.get(at)
        if reached < 0 or (before is not None and before[0] == reached):
            return
        after = None if before is None else before[1]
        self._decoding[at] = reached, self._reader.submit(self._decoded, at, reached, after)

    def _decoded(self, at: int, reached: int, after: _Decoding | None) -> tuple[int, Stated]:
        before = _NOTHING if after is None else after.result()  # which writes to the same room
        frame, started_s, terms = self._frames[at], self._clock(), self._plain_terms
        is_late = self._elapsed_s() >= terms.deadline_s + SLACK_S and not terms.never_later
        if frame.header is None or is_late:
            return before
        try:
            level = frame.decode(reached, self._room(at, frame.header.layout))
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


def beside(get: LevelledGet, compute: Callable[[range], None]) -> Levelled:
    """Run *get* in a thread and *compute* in this one, until all chunks are there.

    Raises what *compute* raises, and LeaseExpiredError when nothing was computed before it.
    """
    found: SimpleQueue[Levelled | KVStoreError] = SimpleQueue()

    def load() -> None:
        try:
            found.put(get.run())
        except KVStoreError as error:
            found.put(error)
        finally:  # of what nobody foresaw whoever waits learns, too
            found.put(KVStoreError("the load ended in an error that is in the log"))

    threading.Thread(target=load, name="kvstore-levels", daemon=True).start()
    computed = 0
    try:
        while some := get.claim():
            compute(some)
            computed = some.stop
    except BaseException:
        get.end()
        raise
    if computed == get.count:
        get.end()  # nobody waits for the loader
        return Levelled.none(computed)
    try:
        result = found.get(timeout=max(0.0, get.left_s()))
    except Empty:  # it waits for what the engine has computed by now
        result = get.finish() or found.get()
    if not isinstance(result, KVStoreError):
        return result
    if not computed:
        raise result
    return Levelled.none(get.count)


def _ranges(batch: Sequence[Fetch]) -> list[pb.FrameRange]:
    """Return the ranges of *batch*, cut so that a slow link brings something soon."""
    size_bytes = sum(fetch.stop - fetch.start for fetch in batch)
    step = max(LEAST_PIECE_BYTES, -(-size_bytes // BATCH_PIECES))
    return [
        pb.FrameRange(index=fetch.chunk, start=start, stop=min(start + step, fetch.stop))
        for fetch in batch
        for start in range(fetch.start, fetch.stop, step)
    ]
