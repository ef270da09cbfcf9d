"""A LevelledGet: chunks at the levels that a deadline leaves time for.

Bytes of stored frames come as ``client/levels.py`` plans them: first what each chunk needs at
least, then refinements, with a new plan after every batch. What came by the deadline is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

import numpy as np

from kvstore.client.levels import (
    MISSING,
    RECOMPUTE,
    Fetch,
    LevelledChunk,
    Plan,
    PlanTerms,
    Progress,
    plan,
)
from kvstore.client.link_meter import LinkMeter
from kvstore.client.session import Session
from kvstore.codecs.base import AnyTensors, codec_by_id
from kvstore.codecs.lossy import LossyCodec
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.buffers import Bytes, as_bytes, copy_bytes
from kvstore.proto.errors import (
    ChunkCorruptError,
    InvalidFrameError,
    KVStoreError,
    LeaseExpiredError,
    RepresentationError,
    UnknownCodecError,
)
from kvstore.proto.frame import FrameHeader, check_frame, header_bytes, parse_header
from kvstore.proto.frame_check import check_prefix
from kvstore.proto.types import DIGEST_BYTES, ChunkKey, Fidelity, KVLayout
from kvstore.proto.wire import fidelity_number, join_digests

MAX_LEVELS = 4
"""Of frames whose headers are asked for in one go; frames of more levels are computed."""
BATCH_S = 0.05
"""What is asked for at once, by the link's mean: no plan is older than that by much."""
LEAST_MEASURED_BYTES = 64 << 10
"""Of less, what a transfer takes says nothing about the link's bandwidth."""
RELEASE_MS = 1000
_PER_LEVEL = 9.0
"""A refinement cuts a step into three, and so the squared error into nine."""
_DAMAGED = (ChunkCorruptError, InvalidFrameError, RepresentationError)


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


class StoredFrame:
    """The first bytes of a chunk's frame, as they come. ``chunk`` is what they promise."""

    def __init__(self, key: ChunkKey, layout: KVLayout) -> None:
        self.key = key
        self.layout = layout
        self.header: FrameHeader | None = None
        self.chunk = LevelledChunk(layout.tokens, layout.raw_bytes)
        self.data: Bytes = np.empty(0, np.uint8)
        self.arrived_bytes = 0
        self._levels: tuple[int, ...] = ()

    def open(self, head: Bytes, representation: bytes) -> None:
        """Read the header at the start of *head*. Raises InvalidFrameError, ChunkCorruptError."""
        header = parse_header(head)
        if header.key != self.key or header.representation != representation:
            raise ChunkCorruptError(self.key, f"its frame is of {header.key.hex()}")
        if header.levels > MAX_LEVELS:
            return
        top = header.levels
        is_exact = header.fidelity is Fidelity.exact
        levels = [top] if is_exact else list(range(top + 1))
        ends = [header.level_end(level) for level in levels]
        self.header, self._levels = header, tuple(levels)
        self.chunk = LevelledChunk(
            header.layout.tokens,
            header.layout.raw_bytes,
            tuple(ends),
            (header.fidelity,) * len(levels),
            tuple(0.0 if is_exact else _PER_LEVEL ** (top - level) for level in levels),
        )
        self.data = np.empty(ends[-1], np.uint8)
        self.add(0, head)

    def add(self, offset: int, data: Bytes) -> None:
        """Take bytes that begin at *offset*; only what follows those that are here is of use."""
        if offset == self.arrived_bytes:
            data = data[: len(self.data) - offset]
            copy_bytes(self.data[offset : offset + len(data)], data)
            self.arrived_bytes += len(data)

    def reached(self) -> int:
        """Return the highest level that is here whole, as the plan counts them; else MISSING."""
        count = sum(end <= self.arrived_bytes for end in self.chunk.end_bytes)
        return count - 1 if count else MISSING

    def decode(self, reached: int, out: AnyTensors) -> int:
        """Verify and decode what is here into *out*; return the frame's own number of the level.

        Raises ChunkCorruptError, InvalidFrameError, UnknownCodecError, RepresentationError.
        """
        assert self.header is not None
        prefix = self.data[: self.chunk.end_bytes[reached]]
        level = self._levels[reached]
        codec = codec_by_id(self.header.codec_id)
        if isinstance(codec, LossyCodec):
            header = check_prefix(prefix, level, self.key)
            codec.decode_prefix(header, prefix, level, out)
        else:
            codec.decode_into(check_frame(prefix, self.key), prefix, out)
        return level


class LevelledGet:
    """One get of the chunks of a prompt, all of *layout*. Used once, by one thread.

    *clock* returns seconds. A store that is late or wrong makes chunks to be computed, never an
    error; ``damaged`` names what proved wrong.
    """

    def __init__(
        self,
        session: Session,
        keys: Sequence[ChunkKey],
        layout: KVLayout,
        meter: LinkMeter,
        clock: Callable[[], float],
    ) -> None:
        self._session = session
        self._digests = join_digests(key[DIGEST_BYTES:] for key in keys)
        self._frames = [StoredFrame(key, layout) for key in keys]
        self._meter = meter
        self._clock = clock
        self._started_s = clock()
        self._lease_id = 0
        self._ready = 0
        """Chunks under the lease."""
        self._engine_s = 0.0
        self._computed: frozenset[int] | None = None
        """The chunks that the engine computes by now; None before it was told."""
        self.damaged: list[ChunkKey] = []

    def run(
        self,
        terms: PlanTerms,
        room: Callable[[int, KVLayout], AnyTensors],
        begin: Callable[[Sequence[int]], None] | None = None,
    ) -> Levelled:
        """Read into *room* what is worth it, until *terms*' deadline; return what came.

        *begin* is told once, when it is known what there is, which chunks the engine is to
        compute. Raises LeaseExpiredError when the session is over before anything was read.
        """
        try:
            self._find(terms)
            self._open(terms)
            while (left_s := terms.deadline_s - self._elapsed_s()) > 0:
                batch = self._batch(self._plan(terms, begin))
                if not batch or not self._fetch(batch, left_s, terms.least):
                    break
        finally:
            self._release(terms)
        found = [self._decoded(at, room) for at in range(len(self._frames))]
        return Levelled(tuple(level for level, _ in found), tuple(of for _, of in found))

    def _find(self, terms: PlanTerms) -> None:
        """Lease what is there."""
        request = pb.LookupRequest(
            session_id=self._session.terms.session_id,
            digests=self._digests,
            lease=True,
            min_fidelity=fidelity_number(terms.least),
            deadline_ms=max(1, int(1000 * terms.deadline_s)),
        )
        try:
            reply = self._session.connection.call(
                "Lookup", request, request.deadline_ms, pb.LookupResponse
            )
        except LeaseExpiredError:
            raise
        except KVStoreError:
            return
        self._lease_id = reply.lease_id
        self._ready = min(reply.ready, len(self._frames))

    def _release(self, terms: PlanTerms) -> None:
        if not self._lease_id:
            return
        request = pb.ReleaseRequest(
            session_id=self._session.terms.session_id, lease_ids=[self._lease_id]
        )
        with suppress(KVStoreError):  # it ends with its session or its time
            self._session.connection.call("Release", request, RELEASE_MS, pb.ReleaseResponse)

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
        chunks = [frame.chunk for frame in self._frames]
        now = plan(chunks, self._progress(), terms, self._meter.estimate())
        if begin is not None and self._computed is None:
            self._tell(now, terms, begin)
            now = plan(chunks, self._progress(), terms, self._meter.estimate())
        return now

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

    def _progress(self) -> Progress:
        levels = [
            RECOMPUTE if at in (self._computed or ()) else frame.reached()
            for at, frame in enumerate(self._frames)
        ]
        return Progress(tuple(levels), self._elapsed_s(), self._engine_s)

    def _batch(self, now: Plan) -> list[Fetch]:
        """Return what to ask for next: as the plan has it, as much as the link takes BATCH_S for.

        Bytes that are here already are not asked for again.
        """
        chunks, progress = [frame.chunk for frame in self._frames], self._progress()
        budget_bytes = BATCH_S * self._meter.estimate().mean_bytes_per_s
        batch: list[Fetch] = []
        while budget_bytes > 0 and (fetch := now.next_fetch(chunks, progress)) is not None:
            start = max(fetch.start, self._frames[fetch.chunk].arrived_bytes)
            if start < fetch.stop:
                batch.append(fetch._replace(start=start))
                budget_bytes -= fetch.stop - start
            levels = list(progress.levels)
            levels[fetch.chunk] = fetch.level
            progress = Progress(tuple(levels), progress.elapsed_s, progress.engine_until_s)
        return sorted(batch)

    def _fetch(self, batch: Sequence[Fetch], left_s: float, least: Fidelity) -> bool:
        """Ask for *batch*; return whether anything came."""
        request = pb.GetRequest(
            session_id=self._session.terms.session_id,
            digests=self._digests[: DIGEST_BYTES * self._ready],
            lease_id=self._lease_id,
            deadline_ms=max(1, int(1000 * left_s)),
            min_fidelity=fidelity_number(least),
            ranges=[pb.FrameRange(index=f.chunk, start=f.start, stop=f.stop) for f in batch],
        )
        started_s, size_bytes = self._clock(), 0
        try:
            stream = self._session.connection.stream("Get", request, request.deadline_ms)
            with closing(stream) as replies:
                for reply in replies:
                    size_bytes += self._add(reply)
        except KVStoreError:
            return False  # what came before it is used
        if size_bytes >= LEAST_MEASURED_BYTES:
            self._meter.observe(size_bytes, self._clock() - started_s)
        return size_bytes > 0

    def _add(self, reply: pb.GetResponse) -> int:
        if reply.index >= len(self._frames):
            return 0
        frame, data = self._frames[reply.index], as_bytes(reply.part.data)
        if frame.header is not None:
            frame.add(reply.part.offset, data)
            return len(data)
        try:
            frame.open(data, self._session.representation_digest)
        except InvalidFrameError:
            pass  # a header longer than was asked for, or damage: computed, either way
        except ChunkCorruptError:
            self.damaged.append(frame.key)
        return len(data)

    def _decoded(
        self, at: int, room: Callable[[int, KVLayout], AnyTensors]
    ) -> tuple[int, Fidelity]:
        frame = self._frames[at]
        reached = RECOMPUTE if at in (self._computed or ()) else frame.reached()
        if reached < 0 or frame.header is None:
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
