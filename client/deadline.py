"""Chunks of a prompt at the levels that a deadline leaves time for.

Bytes of stored frames are fetched as ``client/planning.py`` plans: first the minimum of each chunk,
then refinements, with a new plan after every batch. All that arrives by the deadline is used.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, takewhile
from typing import TypeAlias

import numpy as np

from kvstore.client import planning
from kvstore.client.chunk_reads import check_by_layers
from kvstore.client.connection import SLACK_S, Until
from kvstore.client.decode import WRONG, Target
from kvstore.client.frames import Arrival
from kvstore.client.lookups import look_up
from kvstore.client.options import MAX_DEADLINE_MS
from kvstore.client.server_link import ServerLink, batches, packed
from kvstore.client.transports.base import ReadPlan, Transport
from kvstore.codecs.base import AnyTensors, LossyCodec, codec_by_id
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes, copy_bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    DeadlineError,
    InvalidFrameError,
    InvalidRequestError,
    KVStoreError,
    LayoutMismatchError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader, check_frame, header_bytes, parse_header
from kvstore.proto.messages import accuracy_number
from kvstore.proto.types import DIGEST_BYTES, Accuracy, ChunkKey, KVLayout, Stated

SLOW_BATCH_S = 4 * planning.BATCH_S
"""A batch that takes this long is a sample of the link's bandwidth, however small it is."""
BATCH_PIECES = 16
LEAST_PIECE_BYTES = 16 << 10
"""A batch is cut into at most this many pieces, of at least this many bytes, each usable alone."""
LEAST_MEASURED_BYTES = 64 << 10
"""A smaller transfer, unless slow, is no sample of the link's bandwidth."""
RELEASE_MS = 1000
LEAST_WAIT_S = 0.001
MAX_LEVELS = 4
"""Headers are requested with room for this many levels; chunks with more are recomputed."""
_TARGET_ERRORS = (InvalidRequestError, LayoutMismatchError)
_NOTHING = (planning.RECOMPUTE, Stated(Accuracy.approximate))
_Decoding: TypeAlias = "Future[tuple[int, Stated]]"


@dataclass(frozen=True, slots=True)
class Levelled:
    """The outcome of each chunk: ``levels[i]`` is the level at which it was read, 0 for the base,
    or RECOMPUTE. ``stated[i]`` is the accuracy that the copy states. Never put a copy that is not
    exact, nor anything computed from it.
    """

    levels: tuple[int, ...]
    stated: tuple[Stated, ...]

    @property
    def to_compute(self) -> tuple[int, ...]:
        """The chunks that the engine computes."""
        return tuple(i for i, level in enumerate(self.levels) if level == planning.RECOMPUTE)


class StoredFrame:
    """The prefix of a chunk's frame that has arrived. ``chunk`` describes the frame's levels."""

    def __init__(self, key: ChunkKey, layout: KVLayout) -> None:
        self.key = key
        self.header: FrameHeader | None = None
        self.chunk = planning.LevelledChunk(layout.tokens, layout.raw_bytes)
        self.arrived_bytes = 0
        self._data: Bytes = np.empty(0, np.uint8)
        self._first_level = 0

    @property
    def reached(self) -> int:
        """The highest level that has arrived whole, as the plan counts levels; else MISSING."""
        return self.chunk.reached(self.arrived_bytes)

    def open(self, head: Bytes, representation: bytes, least: Accuracy) -> None:
        """Parse the header at the start of *head*. A copy less accurate than *least* has no level
        to load. Raises InvalidFrameError, ChunkCorruptError.
        """
        header = parse_header(head)
        if header.key != self.key or header.representation != representation:
            raise ChunkCorruptError(self.key, f"its place holds chunk {header.key.hex()}")
        if header.levels > MAX_LEVELS or header.accuracy < least:
            return
        self.header = header
        self._first_level = header.levels if header.accuracy is Accuracy.exact else 0
        ends = tuple(map(header.level_end, range(self._first_level, header.levels + 1)))
        self.chunk = planning.LevelledChunk(header.layout.tokens, header.layout.raw_bytes, ends)
        self._data = np.empty(ends[-1], np.uint8)
        self.add(0, head)

    def add(self, offset: int, data: Bytes) -> None:
        """Append *data* if it continues the bytes received so far; ignore it otherwise."""
        if offset == self.arrived_bytes:
            data = data[: len(self._data) - offset]
            copy_bytes(self._data[offset : offset + len(data)], data)
            self.arrived_bytes += len(data)

    def decode(self, reached: int, out: AnyTensors) -> int:
        """Verify and decode level *reached* into *out*; return the frame's own number of it.

        Raises the errors in ``WRONG``, UnknownCodecError.
        """
        assert self.header is not None
        prefix = self._data[: self.chunk.end_bytes[reached]]
        level = self._first_level + reached
        codec = codec_by_id(self.header.codec_id)
        if isinstance(codec, LossyCodec):
            header = check_frame(prefix, self.key, level)
            codec.decode_prefix(header, prefix, level, out)
        else:
            codec.decode_into(check_frame(prefix, self.key), prefix, out)
        return level


class LevelledGet:
    """One get of a prompt's chunks, all of full length, into *target*. Used once.

    One thread loads; the link's reader decodes. Meanwhile ``run`` passes *compute*, if given,
    chunks to compute. A store that is late or wrong leaves chunks to compute; it never raises.
    """

    def __init__(
        self,
        link: ServerLink,
        keys: Sequence[ChunkKey],
        terms: planning.PlanTerms,
        target: Target,
        compute: Callable[[range], None] | None,
    ) -> None:
        layout = KVLayout.of(link.model, link.options.chunk_tokens)
        self._link = link
        self._keys = keys
        self._target = target
        self._compute = compute
        self._plain_terms = replace(terms, loads_first=compute is None)
        self._frames = [StoredFrame(key, layout) for key in keys]
        self._header_bytes = header_bytes(layout, MAX_LEVELS)
        self.left_ms = Until(terms.deadline_ms).left_ms
        """Return the milliseconds left for a call. Raises DeadlineError when none are."""
        self._clock = link.meters.clock
        self._started_s = self._clock()
        self._leases: Sequence[int] = ()
        """One for each batch with a ready chunk."""
        self._digests = b""
        """The digests of the leased chunks."""
        self._batch_bytes = planning.FIRST_BATCH_BYTES
        """The limit of the next batch."""
        self._found: planning.Plan | None = None
        self._planned_s = 0.0
        self._claimed = 0
        """How many chunks, from the first on, the engine has started."""
        self._engine_s = 0.0
        """When the engine finishes them, in seconds since the start; 0 before it starts."""
        self._begin_s = math.inf
        """When the engine starts at the latest."""
        self._is_over = self._is_finished = False
        """Whether loading has ended, and whether the final decode has begun."""
        self._changed = threading.Condition()
        """Guards the seven fields above."""
        self._decoding: dict[int, tuple[int, _Decoding]] = {}
        """By chunk, the level of its last decode, and that decode."""
        self._damaged: list[ChunkKey] = []
        self._result: Future[Levelled] = Future()

    def run(self) -> Levelled:
        """Read the chunks worth loading until the deadline. Raises any error of ``compute`` or
        the target, and LayoutMismatchError for tensors that do not fit the chunk.
        """
        check_by_layers(self._link)
        if not self._keys:
            return Levelled((), ())
        session = self._link.connected(self.left_ms).session
        packed(self._keys, session.namespace)  # raises for keys of another one
        load = partial(copy_context().run, self._load)  # with the caller's trace context
        threading.Thread(target=load, name="kvstore-levels", daemon=True).start()
        try:
            return self._run_beside(self._compute) if self._compute else self._result.result()
        except BaseException:
            self._abandon()
            raise

    def _run_beside(self, compute: Callable[[range], None]) -> Levelled:
        computed = 0
        while some := self._claim():
            compute(some)
            computed = some.stop
        if computed == len(self._frames):
            self._end()  # the loader's result is not needed
            return self._levelled({})
        wait([self._result], max(0.0, self._left_s()))
        if not self._result.done():  # the loader still waits for chunks computed by now
            self._finish()
        return self._result.result()

    def _abandon(self) -> None:
        with self._changed:
            self._is_finished = True
        self._end()
        wait([work for _, work in self._decoding.values()])

    def _load(self) -> None:
        """Plan and fetch batches until the deadline, or until nothing is worth loading."""
        transport: Transport | None = None
        try:
            transport, ready = self._leased()
            if ready:
                heads = [planning.Fetch(at, 0, 0, self._header_bytes) for at in range(ready)]
                self._fetch(transport, heads, self._left_s())
            while (left_s := self._left_s()) > 0:
                batch = self._next_batch()
                if not batch or not self._fetch(transport, batch, left_s):
                    break
                self._decode_planned()
        except KVStoreError:
            pass  # what arrived before is used
        finally:
            try:
                self._finish()
            finally:
                self._end()
                if transport is not None and self._leases:
                    transport.release(self._leases, RELEASE_MS)
                    left_ms = Until(RELEASE_MS).left_ms
                    for key in self._damaged:
                        self._link.quarantine(transport, key, left_ms)

    def _finish(self) -> None:
        """Decode what has arrived and set the result, unless another thread has begun to."""
        with self._changed:
            if self._is_finished:
                return
            self._is_finished = self._is_over = True  # later claims are none of these
            computed, stop = self._claimed, len(self._frames)
            if self._plain_terms.loads_first:  # only a prefix is usable
                stop = next((at for at in range(stop) if not self._is_here(at)), stop)
            for at in range(computed, stop):
                self._decode(at)
            works = {at: work for at, (_, work) in self._decoding.items() if computed <= at < stop}
        wait([work for _, work in self._decoding.values()])
        errors = [error for work in works.values() if (error := work.exception()) is not None]
        for error in errors:
            if not isinstance(error, KVStoreError) or isinstance(error, _TARGET_ERRORS):
                self._result.set_exception(error)  # from the caller's tensors
                return
        found = {at: work.result() for at, work in works.items()} if not errors else {}  # cancelled
        self._result.set_result(self._levelled(found))

    def _levelled(self, found: dict[int, tuple[int, Stated]]) -> Levelled:
        of = [found.get(at, _NOTHING) for at in range(len(self._frames))]
        return Levelled(tuple(level for level, _ in of), tuple(stated for _, stated in of))

    def _end(self) -> None:
        """Stop loading and wake the waiting threads. Any thread may call."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    # --- chunks that the engine computes

    def _claim(self) -> range:
        """Wait for chunks to compute and return them; none once the others are loaded."""
        with self._changed:
            while True:
                first, now_s = self._claimed, self._elapsed_s()
                count, until_s = self._claimable(now_s)
                if count:
                    self._claimed += count
                    tokens = [frame.chunk.tokens for frame in self._frames]
                    context, some = sum(tokens[:first]), sum(tokens[first : self._claimed])
                    self._engine_s = now_s + self._plain_terms.span_s(some, context)
                    return range(first, self._claimed)
                if self._is_over or first == len(self._frames) or self._is_here(first):
                    return range(first, first)
                self._changed.wait(max(until_s - now_s, LEAST_WAIT_S))

    def _claimable(self, now_s: float) -> tuple[int, float]:
        """Return how many chunks the engine is to start now, and when to check again."""
        rest = range(self._claimed, len(self._frames))
        missing = sum(1 for _ in takewhile(lambda at: not self._is_here(at), rest))
        if self._is_over or not missing:
            return missing, now_s
        progress = self._progress()
        # Arrivals do not postpone it: if they stop, the engine would start too late.
        self._begin_s = min(self._begin_s, progress.wait_until_s())
        found = self._found
        is_wanted = found is not None and planning.RECOMPUTE in found.actions[self._claimed :]
        if not (self._engine_s or is_wanted or now_s >= self._begin_s):
            return 0, self._begin_s
        if found is None:
            return max(1, missing // 2), now_s
        is_quiet = now_s - self._planned_s > planning.QUIET_S
        wanted = progress.to_compute(found, is_quiet=is_quiet)
        return min(max(1, wanted), missing), now_s

    def _is_here(self, at: int) -> bool:
        return self._frames[at].reached >= 0

    # --- loading

    def _leased(self) -> tuple[Transport, int]:
        least = self._plain_terms.least
        wanted = pb.LookupRequest(lease=True, ranges=True, min_accuracy=accuracy_number(least))
        found = look_up(self._link, self._keys, wanted, self.left_ms())
        self._leases, ready = found.match.leases, found.match.ready
        self._digests = b"".join(key[DIGEST_BYTES:] for key in self._keys[:ready])
        return found.transport, ready

    def _elapsed_s(self) -> float:
        return self._clock() - self._started_s

    def _left_s(self) -> float:
        """Return how long to wait for the next piece at most."""
        if self._is_over:
            return 0.0
        progress = self._progress()
        until_s, now_s = progress.wait_until_s(), progress.elapsed_s
        if self._plain_terms.prefill is None:
            return until_s - now_s - SLACK_S
        if progress.is_concurrent and planning.MISSING in progress.levels:
            # The engine starts by then; all that arrives before it finishes is of use.
            until_s = max(now_s, self._engine_s or until_s) + progress.left_s()
        return until_s - now_s

    def _progress(self) -> planning.Progress:
        """Return the progress of the get, with the decode speed that this client measured."""
        levels = [
            planning.RECOMPUTE if at < self._claimed else frame.reached
            for at, frame in enumerate(self._frames)
        ]
        undecoded_bytes = sum(
            self._frames[at].chunk.raw_bytes
            for at, has in enumerate(levels)
            if has >= 0 and not self._is_decoded(at, has)
        )
        terms = self._plain_terms
        if not terms.decode_bytes_per_s:
            speed = self._link.meters.decoder.estimate().p20_bytes_per_s
            terms = replace(terms, decode_bytes_per_s=speed)
        chunks = [frame.chunk for frame in self._frames]
        now_s, engine_s = self._elapsed_s(), self._engine_s
        return planning.Progress(chunks, terms, tuple(levels), now_s, engine_s, undecoded_bytes)

    def _is_decoded(self, at: int, level: int) -> bool:
        begun = self._decoding.get(at)
        return begun is not None and begun[0] == level and begun[1].done()

    def _next_batch(self) -> list[planning.Fetch]:
        """Plan; return what to request next: as much as the link carries in BATCH_S."""
        link, progress = self._link.meters.link.estimate(), self._progress()
        found = progress.plan(link)
        with self._changed:
            self._found, self._planned_s = found, self._elapsed_s()
            self._changed.notify_all()
        budget_bytes = min(planning.BATCH_S * link.mean_bytes_per_s, self._batch_bytes)
        self._batch_bytes *= planning.BATCH_GROWTH
        arrived_bytes = [frame.arrived_bytes for frame in self._frames]
        return self._progress().next_batch(found, arrived_bytes, budget_bytes)

    def _fetch(self, transport: Transport, batch: Sequence[planning.Fetch], left_s: float) -> bool:
        """Request *batch*; return whether bytes arrived and nothing failed."""
        started_s = self._clock()
        end_s = started_s + left_s
        size_bytes = head_bytes = 0
        head_s = started_s
        is_over = True
        try:
            with closing(self._pieces(transport, batch, left_s)) as pieces:
                for piece in pieces:
                    size_bytes += self._add(transport, piece)
                    if not head_bytes:
                        head_bytes, head_s = size_bytes, self._clock()
                    if self._clock() >= end_s or self._is_over:
                        break  # what has arrived is used
            is_over = False
        except DeadlineError as error:
            # The server answered the lookup, so only its link is slow: the breaker stays closed.
            transport.session.connection.breaker.retract(error)
        except KVStoreError:
            pass  # what arrived before is used
        if size_bytes >= LEAST_MEASURED_BYTES:
            self._link.meters.link.observe(size_bytes, self._clock() - started_s)
        elif self._clock() - started_s >= SLOW_BATCH_S:  # measured behind the first piece
            self._link.meters.link.observe(size_bytes - head_bytes, self._clock() - head_s)
        return size_bytes > 0 and not is_over

    def _pieces(
        self, transport: Transport, batch: Sequence[planning.Fetch], left_s: float
    ) -> Generator[Arrival, None, None]:
        """Yield the pieces of *batch* in order; each request is under one lease."""
        left_ms = Until(max(1, min(int(1000 * left_s), MAX_DEADLINE_MS))).left_ms
        least = self._plain_terms.least
        limit = transport.session.terms.max_batch_chunks
        for lease, run in groupby(_ranges(batch), lambda one: one.index // limit):
            first = lease * limit
            digests = self._digests[DIGEST_BYTES * first : DIGEST_BYTES * (first + limit)]
            wanted = list(run)
            for one in wanted:
                one.index -= first
            for _, some in batches(wanted, limit):
                read = ReadPlan(digests, self._leases[lease], left_ms(), least, ranges=some)
                with transport.read(read) as pieces:
                    for piece in pieces.frames:
                        yield replace(piece, index=first + piece.index)

    def _add(self, transport: Transport, piece: Arrival) -> int:
        if piece.index >= len(self._frames):
            return 0
        frame, data = self._frames[piece.index], piece.data
        if frame.header is not None:
            frame.add(piece.offset, data)
            return len(data)
        try:
            session = transport.session
            frame.open(data, session.representation_digest, self._plain_terms.least)
        except InvalidFrameError:
            pass  # a header longer than requested, or a damaged one: recomputed either way
        except ChunkCorruptError:
            self._damaged.append(frame.key)
        return len(data)

    # --- decoding

    def _decode_planned(self) -> None:
        """Decode chunks that have reached their planned level, during the next batch."""
        assert self._found is not None
        with self._changed:
            if self._is_finished:
                return
            for at, action in enumerate(self._found.actions):
                if at >= self._claimed and 0 <= action <= self._frames[at].reached:
                    self._decode(at)

    def _decode(self, at: int) -> None:
        """Start to decode a chunk at the level it has reached, unless that was done before."""
        reached = self._frames[at].reached
        before = self._decoding.get(at)
        if reached < 0 or (before is not None and before[0] == reached):
            return
        after = None if before is None else before[1]
        with suppress(KVStoreError):
            work = self._link.reader.submit(self._decoded, at, reached, after)
            self._decoding[at] = reached, work

    def _decoded(self, at: int, reached: int, after: _Decoding | None) -> tuple[int, Stated]:
        before = _NOTHING if after is None else after.result()  # it writes to the same tensors
        frame, started_s, terms = self._frames[at], self._clock(), self._plain_terms
        header = frame.header
        assert header is not None
        if self._elapsed_s() >= terms.deadline_s + SLACK_S and terms.prefill is None:
            return before
        if terms.prefill is not None and self._decoding.get(at, (reached,))[0] > reached:
            return before  # a finer level has arrived and is decoded next
        try:
            level = frame.decode(reached, self._target(at, header.layout))
        except WRONG:
            self._damaged.append(frame.key)
        except UnknownCodecError:
            pass  # may be right, for a newer client
        else:
            # The speed of all threads: each decodes a frame of its own.
            size_bytes = frame.chunk.raw_bytes * self._link.reader.threads
            self._link.meters.decoder.observe(size_bytes, self._clock() - started_s)
            return level, header.stated
        return _NOTHING


def _ranges(batch: Sequence[planning.Fetch]) -> list[pb.FrameRange]:
    """Return the ranges of *batch*, cut so that a slow link delivers a first piece soon."""
    size_bytes = sum(fetch.stop - fetch.start for fetch in batch)
    step = max(LEAST_PIECE_BYTES, -(-size_bytes // BATCH_PIECES))
    return [
        pb.FrameRange(index=fetch.chunk, start=start, stop=min(start + step, fetch.stop))
        for fetch in batch
        for start in range(fetch.start, fetch.stop, step)
    ]
