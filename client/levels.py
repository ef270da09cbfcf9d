"""Which level of each chunk to load, and which chunks to compute, under a deadline.

The streaming controller of CacheGen (arXiv 2310.07240, section 5.3) over layered frames: what
has arrived of a chunk is used at any level, so a plan that proves too bold is cut short and
nothing that came is wasted. Departures: the link is measured, never known; a chunk is computed
by the engine's own cost model, while later ones load; the deadline belongs to the whole
request, not in equal parts to its chunks.

No clock, no I/O: ``plan`` again whenever a chunk came.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from typing import NamedTuple

from kvstore.client.prefill import PrefillModel
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Accuracy

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
BATCH_S = 0.05
"""What is requested at once, by the link's mean: no plan is older than that by much."""
FIRST_BATCH_BYTES = 4 << 20
"""The first batch of a get, as nobody knows what the link gives now."""
QUIET_S = 2 * BATCH_S
"""A link that brought no batch for so long is quiet."""
BATCH_GROWTH = 4
"""A batch has so many times the bytes of the one before at most."""
MAX_DECODE_SHARE = 0.5
"""Of the deadline: at most so much is kept for decoding what came."""
CUT_SHORT_S = 0.03
"""A read that is cut short may end so much later: its next piece is on the way."""
MAX_LATER_SHARE = 0.125
"""Of what computing everything takes: loads may end in vain so much later at most."""

EWMA_WEIGHT = 0.3
SAMPLES_KEPT = 32
CAUTIOUS_SHARE = 0.2
WEIGHED_S = 0.05
"""A transfer that took longer than this counts for as many as it could have been."""
DOUBLING_S = 5.0
"""In what time a link of which nothing came is taken to give twice as much."""
_LEAST_S = 1e-9


# --- what the link gives


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """Bytes a second: to expect, and to count on. Raises InvalidRequestError unless positive."""

    mean_bytes_per_s: float
    p20_bytes_per_s: float

    def __post_init__(self) -> None:
        for field in ("mean_bytes_per_s", "p20_bytes_per_s"):
            if not getattr(self, field) > 0:
                raise InvalidRequestError(field, getattr(self, field), "give a positive number")


class LinkMeter:
    """Learns from transfers; *prior_bytes_per_s* stands until the first. Any thread may call.

    With a *clock* what was seen ages: a link from which nothing comes, as it was slow, would stay
    slow for ever. Its estimate doubles every DOUBLING_S, up to the prior, until the next transfer.
    """

    def __init__(self, prior_bytes_per_s: float, clock: Callable[[], float] | None = None) -> None:
        self._prior = LinkEstimate(prior_bytes_per_s, prior_bytes_per_s).mean_bytes_per_s
        self._mean = self._prior
        self._clock = clock or (lambda: 0.0)
        self._seen_s = 0.0
        self._samples: deque[float] = deque(maxlen=SAMPLES_KEPT)
        self._lock = threading.Lock()

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Take note of one transfer; an empty one says nothing."""
        if size_bytes <= 0:
            return
        found = size_bytes / max(seconds, _LEAST_S)
        weight = 1.0 - (1.0 - EWMA_WEIGHT) ** max(1.0, seconds / WEIGHED_S)
        with self._lock:
            self._mean += (weight if self._samples else 1.0) * (found - self._mean)
            self._samples.append(found)
            self._seen_s = self._clock()

    def estimate(self) -> LinkEstimate:
        """Return the exponentially weighted mean, and the 20th percentile of the last samples.

        The latter is never more than the mean: one slow transfer is caution enough.
        """
        with self._lock:
            mean, samples = self._mean, list(self._samples)
            age_s = self._clock() - self._seen_s
        ordered = sorted(samples) or [mean]
        cautious = min(mean, ordered[int(CAUTIOUS_SHARE * (len(ordered) - 1))])
        most = max(1.0, self._prior / mean)
        grown = min(most, 2.0 ** min(age_s / DOUBLING_S, 64.0)) if samples else 1.0
        return LinkEstimate(grown * mean, grown * cautious)


# --- what a request needs, and has


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
    accuracy: tuple[Accuracy, ...] = ()
    distortion: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.raw_bytes < 1:
            raise InvalidRequestError("tokens", (self.tokens, self.raw_bytes), "positive numbers")
        if not len(self.end_bytes) == len(self.accuracy) == len(self.distortion):
            raise InvalidRequestError("levels", len(self.end_bytes), "as many of each")
        if any(later <= one for one, later in pairwise((0, *self.end_bytes))):
            raise InvalidRequestError("end_bytes", self.end_bytes, "must grow with each level")
        if any(not one >= later for one, later in pairwise((*self.distortion, 0.0))):
            raise InvalidRequestError(
                "distortion", self.distortion, "must not grow, nor sink below 0"
            )

    def floor(self, least: Accuracy) -> int | None:
        """Return the lowest level of at least *least*; None when there is none."""
        return next((k for k, found in enumerate(self.accuracy) if found >= least), None)

    def start_byte(self, level: int) -> int:
        """Return the first byte past *level*; 0 where nothing has come."""
        return self.end_bytes[level] if level >= 0 else 0

    def density(self, low: int, high: int) -> float:
        """Return the distortion spared for each byte, from one level to a higher one."""
        spared = self.distortion[low] - self.distortion[high]
        return spared / (self.end_bytes[high] - self.end_bytes[low])


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """What a request needs, and what its engine and decoder do.

    ``deadline_s`` is from the request's start to all KV being there (the time to first token
    less what follows). ``decode_bytes_per_s`` 0 stands for what the client has measured; ``plan``
    itself needs a number. Decoding of a chunk runs beside the load of the next. With
    ``spares_engine`` nothing is computed that can be loaded in time, at whatever level; without
    it, as much as lowers the loss. ``tail_tokens`` behind the chunks are computed in any case.

    With ``never_later`` a plan is in time only if it ends no later than computing everything; the
    engine computes from the first chunk on, and chunks come from the last one back, so that
    wherever both meet there is a prompt. With ``loads_first``, too, the engine computes nothing
    until the loads are over: chunks come from the first on, and it computes those behind them;
    ``wait_until_s`` then bounds what a link that proves slow may cost it.
    """

    deadline_s: float
    prefill: PrefillModel = LOADS_ONLY
    decode_bytes_per_s: float = 0.0
    least: Accuracy = Accuracy.exact
    spares_engine: bool = True
    never_later: bool = False
    loads_first: bool = False
    tail_tokens: int = 0

    def __post_init__(self) -> None:
        if not (self.deadline_s > 0 and self.decode_bytes_per_s >= 0):
            wrong = (self.deadline_s, self.decode_bytes_per_s)
            raise InvalidRequestError("deadline_s or decode_bytes_per_s", wrong, "positive numbers")
        if self.tail_tokens < 0:
            raise InvalidRequestError("tail_tokens", self.tail_tokens, "a count, or 0")

    def compute_s(self, chunks: Sequence[LevelledChunk], loaded: int = 0) -> float:
        """Return what the engine takes for *chunks* and the tail, but for the first *loaded*."""
        sizes = [chunk.tokens for chunk in chunks]
        rest = sum(sizes[loaded:]) + self.tail_tokens
        return self.span_s(rest, sum(sizes[:loaded]))

    def span_s(self, tokens: int, context: int) -> float:
        """Return what *tokens* take in one go: each has those before it as its context, too."""
        return self.prefill.seconds(tokens, context + tokens // 2)

    def left_s(self, chunks: Sequence[LevelledChunk], progress: Progress) -> float:
        """Return what the engine takes for what has not come, and the tail."""
        sizes, levels = [chunk.tokens for chunk in chunks], progress.levels
        if self.loads_first:
            return self.compute_s(chunks, sum(1 for _ in takewhile(lambda has: has >= 0, levels)))
        missing = [size for size, has in zip(sizes, levels, strict=True) if has == MISSING]
        tail_s = self.span_s(self.tail_tokens, sum(sizes))
        # In goes of half of what is left: see ``to_compute``.
        starts_s = self.prefill.start_s * max(0, len(missing).bit_length() - 1)
        return self.span_s(sum(missing), 0) + starts_s + tail_s

    def later_s(self, chunks: Sequence[LevelledChunk]) -> float:
        """Return how much later than without loads a prompt may be whose loads came to nothing.

        What a chunk takes to compute, or a batch to load, but no more than MAX_LATER_SHARE of all,
        and than the deadline: what is known of the engine may be wrong.
        """
        first_s = self.prefill.seconds(chunks[0].tokens, 0) if chunks else 0.0
        later_s = min(MAX_LATER_SHARE * self.compute_s(chunks), max(BATCH_S, first_s))
        return min(later_s, max(BATCH_S, self.deadline_s))


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is: what it has of each chunk, and until when the engine is busy.

    ``levels[i]`` is a level, RECOMPUTE (done or begun) or MISSING. ``engine_until_s`` is on the
    same clock as ``elapsed_s``.
    """

    levels: tuple[int, ...]
    elapsed_s: float = 0.0
    engine_until_s: float = 0.0
    undecoded_bytes: int = 0
    """Of chunks that came and are not decoded, as more of them is to come."""


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
    is_backwards: bool
    """Whether the last chunk comes first."""
    floors: tuple[int, ...]
    """The lowest level that each chunk may be used at; RECOMPUTE where there is none."""

    def next_fetch(self, chunks: Sequence[LevelledChunk], held: Sequence[int]) -> Fetch | None:
        """Return what to request now, of chunks that are *held* at these levels; None when
        everything planned has come.

        First what each chunk needs at least; then refinements, level by level, those
        first that spare the most distortion a byte. So a plan can be cut short at any time.
        """
        order = range(len(held))
        for index in reversed(order) if self.is_backwards else order:
            action, has, floor = self.actions[index], held[index], self.floors[index]
            if action >= 0 and has < floor:
                chunk = chunks[index]
                return Fetch(index, floor, chunk.start_byte(has), chunk.end_bytes[floor])
        wanted = [i for i, action in enumerate(self.actions) if action > held[i] >= 0]
        if not wanted:
            return None
        best = max(wanted, key=lambda i: (chunks[i].density(held[i], self.actions[i]), -i))
        level, sizes = held[best] + 1, chunks[best].end_bytes
        return Fetch(best, level, sizes[level - 1], sizes[level])


def batch_of(
    found: Plan,
    chunks: Sequence[LevelledChunk],
    progress: Progress,
    arrived_bytes: Sequence[int],
    budget_bytes: float,
) -> list[Fetch]:
    """Return what to request next, as *found* has it, until *budget_bytes* are spent.

    The first ``arrived_bytes[i]`` bytes of a chunk are not requested again.
    """
    batch: list[Fetch] = []
    held = list(progress.levels)
    while budget_bytes > 0 and (fetch := found.next_fetch(chunks, held)) is not None:
        start = max(fetch.start, arrived_bytes[fetch.chunk])
        if start < fetch.stop:
            batch.append(fetch._replace(start=start))
            budget_bytes -= fetch.stop - start
        held[fetch.chunk] = fetch.level
    return batch  # in the plan's order: what a slow link brings of it is of use


def wait_until_s(chunks: Sequence[LevelledChunk], progress: Progress, terms: PlanTerms) -> float:
    """Return until when to wait for more; what is not there by then is computed.

    On the clock of ``progress.elapsed_s``. What came and is not decoded yet is so afterwards, and
    so is the last chunk. With ``never_later`` the engine, which begins then, is done when it would
    have been without loads or ``later_s`` after that, and by the deadline if it would have been.
    Needs no estimate of the link: so much is what a wrong one costs.
    """
    largest_bytes = max((chunk.raw_bytes for chunk in chunks), default=0)
    size_bytes = progress.undecoded_bytes + largest_bytes
    decode_s = min(size_bytes / terms.decode_bytes_per_s, MAX_DECODE_SHARE * terms.deadline_s)
    if not terms.never_later:
        return terms.deadline_s - decode_s
    whole_s = terms.compute_s(chunks)
    end_s = whole_s + terms.later_s(chunks)
    if MISSING not in progress.levels:  # refinements are worth no risk
        margin_s = min(BATCH_S, MAX_LATER_SHARE * terms.deadline_s)
        end_s = min(whole_s, terms.deadline_s - margin_s)
    elif whole_s <= terms.deadline_s:
        end_s = min(end_s, max(whole_s, terms.deadline_s - CUT_SHORT_S))
    return end_s - terms.left_s(chunks, progress) - (decode_s if max(progress.levels) >= 0 else 0.0)


def to_compute(
    found: Plan,
    chunks: Sequence[LevelledChunk],
    progress: Progress,
    terms: PlanTerms,
    *,
    is_quiet: bool,
) -> int:
    """Return how many of the first chunks the engine is to compute in one go from now on.

    Half of those that *found* has it compute: the link may prove faster, and each go costs a
    start. Half of all that is left when it *is_quiet*: the link gave nothing since that plan.
    Where the engine by itself is late, no go takes more than half of the time that is left: a
    longer one would be late although the link comes back.
    """
    first = next((at for at, has in enumerate(progress.levels) if has != RECOMPUTE), 0)
    left = takewhile(lambda has: has == MISSING, progress.levels[first:])
    wanted = takewhile(lambda action: action == RECOMPUTE, found.actions[first:])
    count = -(-sum(1 for _ in (left if is_quiet else wanted)) // 2)
    left_s = terms.deadline_s - progress.elapsed_s
    if 0 < left_s < terms.left_s(chunks, progress):
        sizes = [chunk.tokens for chunk in chunks]
        most_s = (left_s - terms.span_s(terms.tail_tokens, sum(sizes))) / 2
        ends = accumulate(sizes[first : first + count])
        fit = takewhile(lambda tokens: terms.span_s(tokens, sum(sizes[:first])) <= most_s, ends)
        count = sum(1 for _ in fit) or count  # a chunk is the least: it is late anyway
    return count


# --- the plan


def plan(
    chunks: Sequence[LevelledChunk], progress: Progress, terms: PlanTerms, link: LinkEstimate
) -> Plan:
    """Return the plan of least distortion that is in time; the soonest if none is.

    With ``spares_engine`` the least work for the engine comes before distortion. A chunk is
    never planned below the minimum accuracy: without such a level it is computed. What has come
    stays. Some 20 ms for 128 chunks. Raises InvalidRequestError when *progress* is of others.
    """
    planner = _Planner(chunks, progress, terms)
    cautious = planner.in_time(link.p20_bytes_per_s)
    if cautious.is_in_time:
        return cautious
    soonest = planner.soonest(link.mean_bytes_per_s)
    is_over = terms.deadline_s <= terms.later_s(chunks)
    # ``is_in_time`` allows no delay beside what computing everything takes.
    is_met = progress.elapsed_s + terms.compute_s(chunks) <= terms.deadline_s
    if soonest.is_in_time or is_met or is_over or not terms.loads_first:
        return soonest
    # It is late unless the link has become faster: to see costs ``later_s`` at most.
    return planner.refined(planner.computing(0), link.mean_bytes_per_s)


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
        if not terms.decode_bytes_per_s:
            raise InvalidRequestError("decode_bytes_per_s", 0, "give what decoding takes")
        self._chunks = chunks
        self._progress = progress
        self._terms = terms
        found = [chunk.floor(terms.least) for chunk in chunks]
        self._floors = tuple(RECOMPUTE if level is None else level for level in found)
        starts = [0, *accumulate(chunk.tokens for chunk in chunks)]
        self._prefill_s = [
            terms.prefill.seconds(chunk.tokens, start)
            for chunk, start in zip(chunks, starts, strict=False)
        ]
        self._tail_s = terms.prefill.seconds(terms.tail_tokens, starts[-1])
        self._deadline_s = terms.deadline_s
        if terms.never_later:
            self._deadline_s = min(terms.deadline_s, terms.compute_s(chunks))
        count = len(chunks)
        step = max(1, count // PREFIXES_TRIED)
        self._counts = sorted({*range(0, count, step), count})
        """How many chunks may be computed: what is tried."""

    def in_time(self, bytes_per_s: float) -> Plan:
        """Return the best plan of those in time."""
        tried = [self.computing(count) for count in self._counts]
        found = [one for one in tried if self._ready_s(one, bytes_per_s) <= self._deadline_s]
        plans = [self.refined(one, bytes_per_s) for one in found or tried[:1]]
        return min(plans, key=self._rank)

    def soonest(self, bytes_per_s: float) -> Plan:
        """Return what ends soonest, refined if it turns out to be in time after all."""
        actions = min(
            map(self.computing, self._counts),
            key=lambda tried: (self._ready_s(tried, bytes_per_s), tried.count(RECOMPUTE)),
        )
        if not self._terms.never_later:
            actions = self._flipped(actions, bytes_per_s)
        return self.refined(actions, bytes_per_s)

    def _flipped(self, actions: list[int], bytes_per_s: float) -> list[int]:
        """Load single chunks instead of computing them, or the reverse, while that is sooner."""
        now_s = self._ready_s(actions, bytes_per_s)
        for _ in range(FLIPS_TRIED if len(actions) <= MAX_FLIPPED else 0):
            trials = []
            for index, action in enumerate(actions):
                other = self._floors[index] if action == RECOMPUTE else RECOMPUTE
                if self._progress.levels[index] == MISSING:
                    tried = [*actions[:index], other, *actions[index + 1 :]]
                    trials.append((self._ready_s(tried, bytes_per_s), tried))
            if not trials or min(trials)[0] >= now_s:
                break
            now_s, actions = min(trials)
        return actions

    def computing(self, count: int) -> list[int]:
        """Return the actions that compute *count* chunks and load the others at their lowest.

        The first ones: they cost the engine least, and need nothing that is loaded. With
        ``loads_first`` the last ones, and all behind one that cannot be loaded.
        """
        size = len(self._chunks)
        computed = range(count)
        if self._terms.loads_first:
            loadable = self._floors.index(RECOMPUTE) if RECOMPUTE in self._floors else size
            computed = range(min(size - count, loadable), size)
        actions = []
        for index, (has, floor) in enumerate(zip(self._progress.levels, self._floors, strict=True)):
            is_computed = RECOMPUTE in (has, floor) or (has == MISSING and index in computed)
            actions.append(RECOMPUTE if is_computed else max(has, floor))
        return actions

    def _ready_s(self, actions: Sequence[int], bytes_per_s: float) -> float:
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
                link_s += (chunk.end_bytes[action] - chunk.start_byte(has)) / bytes_per_s
                decoded_s = max(decoded_s, link_s) + chunk.raw_bytes / decode_bytes_per_s
                there_s = max(there_s, decoded_s)
        return max(engine_s, there_s) + self._tail_s if self._tail_s else there_s

    def refined(self, actions: list[int], bytes_per_s: float) -> Plan:
        """Raise levels, the most distortion a byte first, as far as the deadline allows."""
        jumps = [j for at, level in enumerate(actions) if level >= 0 for j in self._hull(at, level)]
        jumps.sort(key=lambda jump: (-jump[0], jump[1]))

        def raised(count: int) -> list[int]:
            found = list(actions)
            for _, at, level in jumps[:count]:
                found[at] = level
            return found

        low, high = 0, len(jumps)
        while low < high:
            middle = (low + high + 1) // 2
            in_time = self._ready_s(raised(middle), bytes_per_s) <= self._deadline_s
            low, high = (middle, high) if in_time else (low, middle - 1)
        final = raised(low)
        for _, at, level in jumps[low + 1 : low + 1 + FLIPS_TRIED]:  # smaller ones may fit still
            tried = [*final[:at], level, *final[at + 1 :]]
            if level > final[at] and self._ready_s(tried, bytes_per_s) <= self._deadline_s:
                final = tried
        return self._plan(final, bytes_per_s)

    def _hull(self, index: int, level: int) -> list[tuple[float, int, int]]:
        """Return the rises of a chunk from *level*, each sparing less a byte than the last."""
        chunk, jumps = self._chunks[index], []
        while level < len(chunk.end_bytes) - 1:
            above = range(level + 1, len(chunk.end_bytes))
            density, level = max((chunk.density(level, high), high) for high in above)
            if not density:
                break
            jumps.append((density * chunk.tokens, index, level))
        return jumps

    def _plan(self, actions: Sequence[int], bytes_per_s: float) -> Plan:
        ready_s = self._ready_s(actions, bytes_per_s)
        distortion = math.fsum(
            chunk.tokens * chunk.distortion[action]
            for chunk, action in zip(self._chunks, actions, strict=True)
            if action >= 0
        )
        is_in_time = ready_s <= self._deadline_s
        is_backwards = self._terms.never_later and not self._terms.loads_first
        return Plan(tuple(actions), ready_s, distortion, is_in_time, is_backwards, self._floors)

    def _rank(self, found: Plan) -> tuple[bool, float, float, float]:
        pairs = zip(found.actions, self._progress.levels, self._prefill_s, strict=True)
        engine_s = math.fsum(
            s for action, has, s in pairs if action == RECOMPUTE and has == MISSING
        )
        order = (found.distortion, engine_s)
        order = order[::-1] if self._terms.spares_engine else order
        return (not found.is_in_time, *order, found.ready_s)
