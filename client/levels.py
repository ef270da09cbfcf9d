"""Which level of each chunk to load, and which chunks to compute, under a deadline.

The streaming controller of CacheGen (arXiv 2310.07240, section 5.3) over layered frames: what
has arrived of a chunk is used at any level, so a plan that proves too bold is cut short and
nothing that came is wasted. Departures: the link is measured, never known; a chunk is computed
by the engine's own cost model, while later ones load; the deadline belongs to the whole
request, not in equal parts to its chunks.

Pure: no clock, no I/O. Ask ``plan`` again whenever a chunk came.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kvstore.client.link_meter import LinkEstimate
from kvstore.client.prefill import PrefillModel
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Fidelity

RECOMPUTE = -1
"""A chunk that the engine computes: exact, and free of the link."""
MISSING = -2
"""A chunk of which nothing has come."""
LOADS_ONLY = PrefillModel(0.0, 1e6)
"""Of a reader without an engine: nothing is computed while it can be loaded."""
PREFIXES_TRIED = 12
FLIPS_TRIED = 8
MAX_FLIPPED = 32
"""Of more chunks none is decided by itself: a plan is to take milliseconds."""


@dataclass(frozen=True, slots=True)
class LevelledChunk:
    """A chunk and what each of its levels takes and gives, the base first.

    ``end_bytes[k]`` bytes from its start make it readable at level k; ``distortion[k]`` is the
    loss then, on any scale, 0 for none. A chunk that is not stored has no levels. Raises
    InvalidRequestError unless sizes grow and distortion does not.
    """

    tokens: int
    raw_bytes: int
    end_bytes: tuple[int, ...] = ()
    fidelity: tuple[Fidelity, ...] = ()
    distortion: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.raw_bytes < 1:
            raise InvalidRequestError("tokens", (self.tokens, self.raw_bytes), "positive numbers")
        if not len(self.end_bytes) == len(self.fidelity) == len(self.distortion):
            raise InvalidRequestError("levels", len(self.end_bytes), "as many of each")
        sizes = (0, *self.end_bytes)
        if any(later <= one for one, later in pairwise(sizes)):
            raise InvalidRequestError("end_bytes", self.end_bytes, "must grow with each level")
        losses = (*self.distortion, 0.0)
        if any(not one >= later for one, later in pairwise(losses)):
            raise InvalidRequestError(
                "distortion", self.distortion, "must not grow, nor sink below 0"
            )

    def floor(self, least: Fidelity) -> int | None:
        """Return the lowest level of at least *least*; None when there is none."""
        return next((k for k, found in enumerate(self.fidelity) if found >= least), None)


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """What a request asks for, and what its engine and decoder do.

    ``deadline_s`` is from the request's start to all KV being there (the time to first token
    less what follows). ``decode_bytes_per_s`` 0 stands for what the client has measured; ``plan``
    itself needs a number. Decoding of a chunk runs beside the load of the next. With
    ``spares_engine`` nothing is computed that can be loaded in time, at whatever level; without
    it, as much as lowers the loss.
    """

    deadline_s: float
    prefill: PrefillModel = LOADS_ONLY
    decode_bytes_per_s: float = 0.0
    least: Fidelity = Fidelity.exact
    spares_engine: bool = True

    def __post_init__(self) -> None:
        if not (self.deadline_s > 0 and self.decode_bytes_per_s >= 0):
            wrong = (self.deadline_s, self.decode_bytes_per_s)
            raise InvalidRequestError("deadline_s or decode_bytes_per_s", wrong, "positive numbers")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is: what it has of each chunk, and until when the engine is busy.

    ``levels[i]`` is a level, RECOMPUTE (done or begun) or MISSING. ``engine_until_s`` is on the
    same clock as ``elapsed_s``.
    """

    levels: tuple[int, ...]
    elapsed_s: float = 0.0
    engine_until_s: float = 0.0

    @classmethod
    def start(cls, count: int) -> Progress:
        """Return the progress of a request of *count* chunks that has just come."""
        return cls((MISSING,) * count)


class Fetch(NamedTuple):
    """Bytes *start* to *stop* of a chunk, which bring it to *level*."""

    chunk: int
    level: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What every chunk is to come to: a level, or RECOMPUTE.

    ``ready_s`` is when, counted from the request's start, by the cautious estimate of the link
    when that meets the deadline, else by the mean. Chunks that are computed are computed in
    order, each when everything before it is there.
    """

    actions: tuple[int, ...]
    ready_s: float
    distortion: float
    is_in_time: bool
    floors: tuple[int, ...]
    """The lowest level that each chunk may be used at; RECOMPUTE where there is none."""

    def next_fetch(self, chunks: Sequence[LevelledChunk], progress: Progress) -> Fetch | None:
        """Return what to ask the link for now, None when everything planned has come.

        First what each chunk needs at least, in order; then refinements, level by level, those
        first that spare the most distortion a byte. So a plan can be cut short at any time.
        """
        held = progress.levels
        for index, (action, has) in enumerate(zip(self.actions, held, strict=True)):
            if action >= 0 and has < self.floors[index]:
                return _fetch(chunks, index, has, self.floors[index])
        wanted = [i for i, action in enumerate(self.actions) if action > held[i] >= 0]
        if not wanted:
            return None
        best = max(wanted, key=lambda i: (_density(chunks[i], held[i], self.actions[i]), -i))
        return _fetch(chunks, best, held[best], held[best] + 1)


def _fetch(chunks: Sequence[LevelledChunk], index: int, has: int, level: int) -> Fetch:
    sizes = chunks[index].end_bytes
    return Fetch(index, level, 0 if has < 0 else sizes[has], sizes[level])


def _density(chunk: LevelledChunk, low: int, high: int) -> float:
    """Distortion spared for each byte, from one level to a higher one."""
    spared = chunk.distortion[low] - chunk.distortion[high]
    return spared / (chunk.end_bytes[high] - chunk.end_bytes[low])


def plan(
    chunks: Sequence[LevelledChunk], progress: Progress, terms: PlanTerms, link: LinkEstimate
) -> Plan:
    """Return the plan of least distortion that is in time; the soonest if none is.

    With ``spares_engine`` the least work for the engine comes before distortion. A chunk is
    never planned below the minimum fidelity: without such a level it is computed. What has come
    stays. Some 20 ms for 128 chunks. Raises InvalidRequestError when *progress* is of others.
    """
    return _Planner(chunks, progress, terms).best(link)


class _Planner:
    """One planning. Distortion counts by token."""

    def __init__(
        self, chunks: Sequence[LevelledChunk], progress: Progress, terms: PlanTerms
    ) -> None:
        limits = [len(chunk.end_bytes) for chunk in chunks]
        if len(limits) != len(progress.levels) or not all(
            MISSING <= has < limit for has, limit in zip(progress.levels, limits, strict=True)
        ):
            raise InvalidRequestError("progress.levels", progress.levels, "a level of each chunk")
        self._chunks = chunks
        self._progress = progress
        self._terms = terms
        if not terms.decode_bytes_per_s:
            raise InvalidRequestError("decode_bytes_per_s", 0, "give what decoding takes")
        found = [chunk.floor(terms.least) for chunk in chunks]
        self._floors = tuple(RECOMPUTE if level is None else level for level in found)
        starts = [0]
        for chunk in chunks:
            starts.append(starts[-1] + chunk.tokens)
        self._prefill_s = [
            terms.prefill.seconds(chunk.tokens, start)
            for chunk, start in zip(chunks, starts, strict=False)
        ]

    def best(self, link: LinkEstimate) -> Plan:
        cautious = self._best_for(link.p20_bytes_per_s)
        return cautious if cautious.is_in_time else self._soonest(link.mean_bytes_per_s)

    def _best_for(self, bytes_per_s: float) -> Plan:
        plans = [
            self._refined(self._with_prefix(count), bytes_per_s)
            for count in self._prefixes(bytes_per_s)
        ]
        return min(plans, key=self._rank)

    def _soonest(self, bytes_per_s: float) -> Plan:
        """Return what ends soonest, refined if it turns out to be in time after all."""
        actions = min(
            map(self._with_prefix, self._counts()),
            key=lambda tried: (self.ready_s(tried, bytes_per_s), tried.count(RECOMPUTE)),
        )
        return self._refined(self._flipped(actions, bytes_per_s), bytes_per_s)

    def _flipped(self, actions: list[int], bytes_per_s: float) -> list[int]:
        """Load single chunks instead of computing them, or the reverse, while that is sooner."""
        now_s = self.ready_s(actions, bytes_per_s)
        for _ in range(FLIPS_TRIED if len(actions) <= MAX_FLIPPED else 0):
            trials = []
            for index, action in enumerate(actions):
                other = self._floors[index] if action == RECOMPUTE else RECOMPUTE
                if self._progress.levels[index] == MISSING:
                    tried = [*actions[:index], other, *actions[index + 1 :]]
                    trials.append((self.ready_s(tried, bytes_per_s), tried))
            if not trials or min(trials)[0] >= now_s:
                break
            now_s, actions = min(trials)
        return actions

    def _prefixes(self, bytes_per_s: float) -> list[int]:
        """Return how many chunks from the first on may be computed: what is tried.

        Computing the first ones costs the engine least, and needs nothing that is loaded.
        """
        tried = self._counts()
        deadline_s = self._terms.deadline_s
        found = [n for n in tried if self.ready_s(self._with_prefix(n), bytes_per_s) <= deadline_s]
        return found or [0]

    def _counts(self) -> list[int]:
        count = len(self._chunks)
        step = max(1, count // PREFIXES_TRIED)
        return sorted({*range(0, count, step), count})

    def _with_prefix(self, count: int) -> list[int]:
        """Return the actions that compute the first *count* chunks, load the rest at its lowest."""
        return [self._least(at, at < count) for at in range(len(self._chunks))]

    def _least(self, index: int, is_computed: bool) -> int:
        has, floor = self._progress.levels[index], self._floors[index]
        if has == RECOMPUTE or floor == RECOMPUTE:
            return RECOMPUTE
        return max(has, floor) if has >= 0 else RECOMPUTE if is_computed else floor

    def ready_s(self, actions: Sequence[int], bytes_per_s: float) -> float:
        """Return when everything is there.

        The link brings chunks in order; each is decoded beside the next load; the engine
        computes a chunk once all before it is there.
        """
        progress, decode_bytes_per_s = self._progress, self._terms.decode_bytes_per_s
        link_s = decoded_s = there_s = progress.elapsed_s
        engine_s = max(progress.elapsed_s, progress.engine_until_s)
        for index, (chunk, action) in enumerate(zip(self._chunks, actions, strict=True)):
            has = progress.levels[index]
            if action == RECOMPUTE:
                if has == MISSING:
                    engine_s = max(engine_s, there_s) + self._prefill_s[index]
                there_s = max(there_s, engine_s)
            elif action > has:
                before = chunk.end_bytes[has] if has >= 0 else 0
                link_s += (chunk.end_bytes[action] - before) / bytes_per_s
                decoded_s = max(decoded_s, link_s) + chunk.raw_bytes / decode_bytes_per_s
                there_s = max(there_s, decoded_s)
        return there_s

    def _refined(self, actions: list[int], bytes_per_s: float) -> Plan:
        """Raise levels, the most distortion a byte first, as far as the deadline allows."""
        jumps = sorted(
            (
                jump
                for at, level in enumerate(actions)
                if level >= 0
                for jump in self._hull(at, level)
            ),
            key=lambda jump: (-jump[0], jump[1]),
        )

        def raised(count: int) -> list[int]:
            found = list(actions)
            for _, at, level in jumps[:count]:
                found[at] = level
            return found

        low, high = 0, len(jumps)
        while low < high:
            middle = (low + high + 1) // 2
            in_time = self.ready_s(raised(middle), bytes_per_s) <= self._terms.deadline_s
            low, high = (middle, high) if in_time else (low, middle - 1)
        final = raised(low)
        for _, at, level in jumps[low + 1 : low + 1 + FLIPS_TRIED]:  # smaller ones may fit still
            tried = [*final[:at], level, *final[at + 1 :]]
            if level > final[at] and self.ready_s(tried, bytes_per_s) <= self._terms.deadline_s:
                final = tried
        return self._plan(final, bytes_per_s)

    def _hull(self, index: int, level: int) -> list[tuple[float, int, int]]:
        """Return the rises of a chunk from *level*, each sparing less a byte than the last."""
        chunk, jumps = self._chunks[index], []
        while level < len(chunk.end_bytes) - 1:
            above = range(level + 1, len(chunk.end_bytes))
            best = max(above, key=lambda high: (_density(chunk, level, high), high))
            density = _density(chunk, level, best)
            if not density:
                break
            jumps.append((density * chunk.tokens, index, best))
            level = best
        return jumps

    def _plan(self, actions: Sequence[int], bytes_per_s: float) -> Plan:
        ready_s = self.ready_s(actions, bytes_per_s)
        distortion = math.fsum(
            chunk.tokens * chunk.distortion[action]
            for chunk, action in zip(self._chunks, actions, strict=True)
            if action >= 0
        )
        is_in_time = ready_s <= self._terms.deadline_s
        return Plan(tuple(actions), ready_s, distortion, is_in_time, self._floors)

    def _rank(self, found: Plan) -> tuple[bool, float, float, float]:
        pairs = zip(found.actions, self._progress.levels, self._prefill_s, strict=True)
        engine_s = math.fsum(
            s for action, has, s in pairs if action == RECOMPUTE and has == MISSING
        )
        order = (found.distortion, engine_s)
        order = order[::-1] if self._terms.spares_engine else order
        return (not found.is_in_time, *order, found.ready_s)
