"""Chunks of a prompt at the levels that a deadline leaves time for.

Bytes of stored frames come as ``client/planning.py`` plans them: first what each chunk needs at
least, then refinements, with a new plan after every batch. What came by the deadline is used.
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
from kvstore.client.decode import WRONG, Room
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
_OF_THE_ROOM = (InvalidRequestError, LayoutMismatchError)
_NOTHING = (planning.RECOMPUTE, Stated(Accuracy.approximate))
_Decoding: TypeAlias = "Future[tuple[int, Stated]]"


@dataclass(frozen=True, slots=True)
class Levelled:
    """What became of each chunk: ``levels[i]`` is the level in which it was read, 0 for the base,
    or RECOMPUTE. ``stated[i]`` is what the copy states; what is not exact is never to be put, nor
    what is computed from it.
    """

    levels: tuple[int, ...]
    stated: tuple[Stated, ...]

    @property
    def to_compute(self) -> tuple[int, ...]:
        """The chunks that the engine computes."""
        return tuple(i for i, level in enumerate(self.levels) if level == planning.RECOMPUTE)


class StoredFrame:
    """The first bytes of a chunk's frame, as they come. ``chunk`` is what they promise."""

    def __init__(self, key: ChunkKey, layout: KVLayout) -> None:
        self.key = key
        self.header: FrameHeader | None = None
        self.chunk = planning.LevelledChunk(layout.tokens, layout.raw_bytes)
        self.arrived_bytes = 0
        self._data: Bytes = np.empty(0, np.uint8)
        self._first_level = 0

    @property
    def reached(self) -> int:
        """The highest level that is here whole, as the plan counts them; else MISSING."""
        return self.chunk.reached(self.arrived_bytes)

    def open(self, head: Bytes, representation: bytes, least: Accuracy) -> None:
        """Read the header at the start of *head*. A copy that states less than *least* has no
        level that can be loaded. Raises InvalidFrameError, ChunkCorruptError.
        """
        header = parse_header(head)
        if header.key != self.key or header.representation != representation:
            raise ChunkCorruptError(self.key, f"its frame is of {header.key.hex()}")
        if header.levels > MAX_LEVELS or header.accuracy < least:
            return
        self.header = header
        self._first_level = header.levels if header.accuracy is Accuracy.exact else 0
        ends = tuple(map(header.level_end, range(self._first_level, header.levels + 1)))
        self.chunk = planning.LevelledChunk(header.layout.tokens, header.layout.raw_bytes, ends)
        self._data = np.empty(ends[-1], np.uint8)
        self.add(0, head)

    def add(self, offset: int, data: Bytes) -> None:
        """Take bytes that begin at *offset*; only what follows those that are here is of use."""
        if offset == self.arrived_bytes:
            data = data[: len(self._data) - offset]
            copy_bytes(self._data[offset : offset + len(data)], data)
            self.arrived_bytes += len(data)

    def decode(self, reached: int, out: AnyTensors) -> int:
        """Verify and decode what is here into *out*; return the frame's own number of the level.

        Raises what is in ``WRONG``, UnknownCodecError.
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
    """One get of the chunks of a prompt, all as long as a chunk is, into *room*. Used once.

    One thread loads, the link's reader decodes. *compute*, if there is one, is given chunks to
    compute meanwhile in the thread that calls ``run``. A store that is late or wrong makes chunks
    to be computed, never an error.
    """

    def __init__(
        self,
        link: ServerLink,
        keys: Sequence[ChunkKey],
        terms: planning.PlanTerms,
        room: Room,
        compute: Callable[[range], None] | None,
    ) -> None:
        layout = KVLayout.of(link.model, link.options.chunk_tokens)
        self._link = link
        self._keys = keys
        self._room = room
        self._compute = compute
        self._plain_terms = replace(terms, loads_first=compute is None)
        self._frames = [StoredFrame(key, layout) for key in keys]
        self._header_bytes = header_bytes(layout, MAX_LEVELS)
        self.left_ms = Until(terms.deadline_ms).left_ms
        """Return the rest of the deadline, for calls. Raises DeadlineError when it is over."""
        self._clock = link.meters.clock
        self._started_s = self._clock()
        self._leases: Sequence[int] = ()
        """One for each batch of chunks of which any is ready."""
        self._digests = b""
        """Of the chunks under a lease."""
        self._batch_bytes = planning.FIRST_BATCH_BYTES
        """What a batch may have at most."""
        self._found: planning.Plan | None = None
        self._planned_s = 0.0
        self._claimed = 0
        """How many of the first chunks the engine has begun."""
        self._engine_s = 0.0
        """Until when it is busy with them, from the start on; 0 before it begins."""
        self._begin_s = math.inf
        """When it begins, whatever comes."""
        self._is_over = self._is_finished = False
        """Whether nothing more comes, and whether what came is being decoded."""
        self._changed = threading.Condition()
        """Guards the seven above, of which the loader writes three."""
        self._decoding: dict[int, tuple[int, _Decoding]] = {}
        """The level at which each chunk is being decoded, or was."""
        self._damaged: list[ChunkKey] = []
        self._result: Future[Levelled] = Future()

    def run(self) -> Levelled:
        """Read what is worth it, until the deadline; return what came. Raises what ``compute`` or
        the room raises, LayoutMismatchError for tensors that are not the chunk's.
        """
        check_by_layers(self._link)
        if not self._keys:
            return Levelled((), ())
        terms = self._link.connected(self.left_ms).session.terms
        packed(self._keys, terms.namespace)  # which refuses those of others
        load = partial(copy_context().run, self._load)  # the caller's trace goes along
        threading.Thread(target=load, name="kvstore-levels", daemon=True).start()
        try:
            return self._found_beside(self._compute) if self._compute else self._result.result()
        except BaseException:
            self._give_up()
            raise

    def _found_beside(self, compute: Callable[[range], None]) -> Levelled:
        computed = 0
        while some := self._claim():
            compute(some)
            computed = some.stop
        if computed == len(self._frames):
            self._end()  # nobody waits for the loader
            return self._levelled({})
        wait([self._result], max(0.0, self._left_s()))
        if not self._result.done():  # it waits for what the engine has computed by now
            self._finish()
        return self._result.result()

    def _give_up(self) -> None:
        with self._changed:
            self._is_finished = True
        self._end()
        self._await_decodes()

    def _await_decodes(self) -> None:
        wait([work for _, work in self._decoding.values()])

    def _load(self) -> None:
        """Read by plan after plan, until the deadline or nothing is worth it."""
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
            pass  # what came before it is used
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
        """Decode what came, for ``run`` to return, unless another thread does, or has."""
        with self._changed:
            if self._is_finished:
                return
            self._is_finished = self._is_over = True  # what is claimed now is none of these
            computed, stop = self._claimed, len(self._frames)
            if self._plain_terms.loads_first:  # of use is only a prefix
                stop = next((at for at in range(stop) if not self._is_here(at)), stop)
            for at in range(computed, stop):
                self._decode(at)
            works = {at: work for at, (_, work) in self._decoding.items() if computed <= at < stop}
        self._await_decodes()
        errors = [error for work in works.values() if (error := work.exception()) is not None]
        for error in errors:
            if not isinstance(error, KVStoreError) or isinstance(error, _OF_THE_ROOM):
                self._result.set_exception(error)  # the room's
                return
        found = {at: work.result() for at, work in works.items()} if not errors else {}  # cancelled
        self._result.set_result(self._levelled(found))

    def _levelled(self, found: dict[int, tuple[int, Stated]]) -> Levelled:
        of = [found.get(at, _NOTHING) for at in range(len(self._frames))]
        return Levelled(tuple(level for level, _ in of), tuple(stated for _, stated in of))

    def _end(self) -> None:
        """Load nothing more, and let who waits for it know. Any thread may call."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    # --- what the engine computes meanwhile

    def _claim(self) -> range:
        """Wait until there is something to compute; return which chunks; none once others come."""
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
        """Return how many chunks the engine is to begin now, and when to look again."""
        rest = range(self._claimed, len(self._frames))
        missing = sum(1 for _ in takewhile(lambda at: not self._is_here(at), rest))
        if self._is_over or not missing:
            return missing, now_s
        progress = self._progress()
        # Not put off by what comes: where it stops coming, the time would be missed.
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

    # --- what is loaded

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
        """Return how long to wait for what comes next, at most."""
        if self._is_over:
            return 0.0
        progress = self._progress()
        until_s, now_s = progress.wait_until_s(), progress.elapsed_s
        if self._plain_terms.prefill is None:
            return until_s - now_s - SLACK_S
        if progress.is_beside and planning.MISSING in progress.levels:
            # The engine begins by then, and all that comes before it is done is of use.
            until_s = max(now_s, self._engine_s or until_s) + progress.left_s()
        return until_s - now_s

    def _progress(self) -> planning.Progress:
        """Return how far the get is, with the speed of decoding as this client has seen it."""
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
        """Plan; return what to request next: as much as the link takes BATCH_S for."""
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
        """Request *batch*; return whether anything came."""
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
                        break  # what came is of use
            is_over = False
        except DeadlineError as error:
            # It answered the lookup: its link is slow, and the next call is not to pay for that.
            transport.session.connection.breaker.take_back(error)
        except KVStoreError:
            pass  # what came before it is used
        if size_bytes >= LEAST_MEASURED_BYTES:
            self._link.meters.link.observe(size_bytes, self._clock() - started_s)
        elif self._clock() - started_s >= SLOW_BATCH_S:  # by what came behind the first piece
            self._link.meters.link.observe(size_bytes - head_bytes, self._clock() - head_s)
        return size_bytes > 0 and not is_over

    def _pieces(
        self, transport: Transport, batch: Sequence[planning.Fetch], left_s: float
    ) -> Generator[Arrival, None, None]:
        """Yield the pieces of *batch* in its order, by requests for chunks under one lease each."""
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
            pass  # a header longer than was requested, or damage: computed, either way
        except ChunkCorruptError:
            self._damaged.append(frame.key)
        return len(data)

    # --- what came

    def _decode_planned(self) -> None:
        """Have what is as the plan wants it decoded beside the next batch."""
        assert self._found is not None
        with self._changed:
            if self._is_finished:
                return
            for at, action in enumerate(self._found.actions):
                if at >= self._claimed and 0 <= action <= self._frames[at].reached:
                    self._decode(at)

    def _decode(self, at: int) -> None:
        """Have a chunk decoded at the level that it has reached, unless it is, or the client is
        closed.
        """
        reached = self._frames[at].reached
        before = self._decoding.get(at)
        if reached < 0 or (before is not None and before[0] == reached):
            return
        after = None if before is None else before[1]
        with suppress(KVStoreError):
            work = self._link.reader.submit(self._decoded, at, reached, after)
            self._decoding[at] = reached, work

    def _decoded(self, at: int, reached: int, after: _Decoding | None) -> tuple[int, Stated]:
        before = _NOTHING if after is None else after.result()  # which writes to the same room
        frame, started_s, terms = self._frames[at], self._clock(), self._plain_terms
        header = frame.header
        assert header is not None
        if self._elapsed_s() >= terms.deadline_s + SLACK_S and terms.prefill is None:
            return before
        if terms.prefill is not None and self._decoding.get(at, (reached,))[0] > reached:
            return before  # a finer level has come meanwhile, and is next
        try:
            level = frame.decode(reached, self._room(at, header.layout))
        except WRONG:
            self._damaged.append(frame.key)
        except UnknownCodecError:
            pass  # right for all we know, to a newer client
        else:
            # Of all threads: each of them is at a frame of its own meanwhile.
            size_bytes = frame.chunk.raw_bytes * self._link.reader.threads
            self._link.meters.decoder.observe(size_bytes, self._clock() - started_s)
            return level, header.stated
        return _NOTHING


def _ranges(batch: Sequence[planning.Fetch]) -> list[pb.FrameRange]:
    """Return the ranges of *batch*, cut so that a slow link brings something soon."""
    size_bytes = sum(fetch.stop - fetch.start for fetch in batch)
    step = max(LEAST_PIECE_BYTES, -(-size_bytes // BATCH_PIECES))
    return [
        pb.FrameRange(index=fetch.chunk, start=start, stop=min(start + step, fetch.stop))
        for fetch in batch
        for start in range(fetch.start, fetch.stop, step)
    ]
