"""Load planning: meters of link and engine, and the plan of a request with a deadline.

The streaming controller of CacheGen (arXiv 2310.07240, section 5.3) over layered frames: the
bytes of a chunk that have arrived are used at any level, so an optimistic plan is cut short without
waste. Departures: the bandwidth is measured, never given; the engine computes chunks by its own
cost model while others load; the deadline is that of the whole request.

No I/O: call ``Progress.plan`` again after each batch.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from typing import NamedTuple

from kvstore.client.options import MAX_DEADLINE_MS
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import PrefillModel as PrefillModel
from kvstore.proto.types import Accuracy

LEAST_TOKENS = 32
"""Fewer tokens take the time of a step, which does not show the engine's speed."""
SAMPLES_KEPT = 32
DOUBT = 2.0
"""Factor by which estimates assume the engine slower than measured: to load a chunk that is faster
to compute costs little, to compute one that is faster to load costs engine time."""
LEAST_LEFT_S = 0.001
"""The time left of a deadline that has passed: no load is worth it then."""
LEAST_LOOKUP_MS = 50
"""Least time for a lookup, however near the deadline: a late one delays others, too."""
RECOMPUTE = -1
"""A chunk that the engine computes."""
MISSING = -2
"""A chunk of which no level has arrived."""
SPLITS_TRIED = 12
"""Points tried as start or end of the loads: a plan takes milliseconds for any prompt."""
BATCH_S = 0.05
"""Link time of a batch, by the mean: no plan gets much older."""
FIRST_BATCH_BYTES = 4 << 20
"""The first batch of a get, while the bandwidth is unknown."""
QUIET_S = 2 * BATCH_S
"""A link without a batch for this long is quiet."""
BATCH_GROWTH = 4
"""A batch has at most this many times the bytes of the one before."""
MAX_DECODE_SHARE = 0.5
"""Largest share of the deadline that is reserved for decoding."""
CUT_SHORT_S = 0.03
"""How much later a read that is cut short may end: its next piece is in flight."""
MAX_LATER_SHARE = 0.125
"""How much later failed loads may end, as a share of the time to compute everything."""
EWMA_WEIGHT = 0.3
CAUTIOUS_SHARE = 0.2
WEIGHED_S = 0.05
"""A longer transfer weighs as much as the transfers of this length that it could have been."""
DOUBLING_S = 5.0
"""The estimate of an idle link doubles in this time."""
_LEAST_S = 1e-9


@dataclass(slots=True)
class Deadline:
    """A request with a deadline, ``deadline_s`` seconds from ``began_s`` on.

    ``compute`` is passed chunks of the prompt, from the first one on, while the last ones load;
    None for an engine that computes nothing until the loads are over. Afterwards ``computed`` is
    their number.
    """

    deadline_s: float
    compute: Callable[[range], None] | None = None
    computed: int = 0
    began_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds left; negative once it is late."""
        return self.deadline_s - (time.monotonic() - self.began_s)


class PrefillMeter:
    """Measures the engine's time a token. Thread-safe.

    The median of the last SAMPLES_KEPT samples, weighted by tokens: a pause between steps, or a
    slow first step that compiles the model, has no lasting effect.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES_KEPT)
        self._lock = threading.Lock()

    def observe(self, tokens: int, seconds: float) -> None:
        """Record that *tokens* took *seconds*; fewer than LEAST_TOKENS are ignored."""
        if tokens >= LEAST_TOKENS and seconds > 0:
            with self._lock:
                self._samples.append((seconds / tokens, tokens))

    def model(self, doubt: float = 1.0) -> PrefillModel | None:
        """Return the cost of a token, times *doubt*; None before the first sample."""
        with self._lock:
            samples = sorted(self._samples)
        left = sum(tokens for _, tokens in samples) / 2
        for token_s, tokens in samples:
            left -= tokens
            if left <= 0:
                return PrefillModel(0.0, doubt * token_s)
        return None


def chunks_worth_loading(
    load_us: Sequence[int], spans: Sequence[tuple[int, int]], total: int, prefill: PrefillModel
) -> int:
    """Return how many chunks to load, from the first on, with the rest of the prompt computed.

    ``load_us[i]`` is a lookup's estimate of the load of the chunk at ``spans[i]``, its first token
    and the one after its last; *total* the prompt's tokens. The fewest that end soonest.
    """
    best, best_s, loaded_s = 0, prefill.seconds(total, 0), 0.0
    for count, (load, (_, stop)) in enumerate(zip(load_us, spans, strict=True), start=1):
        loaded_s += load / 1e6
        # The last token is computed in any case: an engine needs its output.
        rest = max(1, total - stop)
        found_s = loaded_s + prefill.seconds(rest, total - rest)
        if found_s < best_s:
            best, best_s = count, found_s
    return best


# --- the link


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """Bytes a second: mean, and cautious. Raises InvalidRequestError unless positive."""

    mean_bytes_per_s: float
    p20_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.mean_bytes_per_s > 0 and self.p20_bytes_per_s > 0):
            found = (self.mean_bytes_per_s, self.p20_bytes_per_s)
            raise InvalidRequestError("bytes_per_s", found, "give positive numbers")


class LinkMeter:
    """Measures transfers; the estimate is *prior_bytes_per_s* until the first. Thread-safe.

    With a *clock* the estimate of an idle link doubles every DOUBLING_S, up to the prior: a slow
    link that is not used would stay slow for ever.
    """

    def __init__(self, prior_bytes_per_s: float, clock: Callable[[], float] | None = None) -> None:
        self._prior = LinkEstimate(prior_bytes_per_s, prior_bytes_per_s).mean_bytes_per_s
        self._mean = self._prior
        self._clock = clock or (lambda: 0.0)
        self._seen_s = 0.0
        self._samples: deque[float] = deque(maxlen=SAMPLES_KEPT)
        self._lock = threading.Lock()

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Record one transfer; an empty one is ignored."""
        if size_bytes <= 0:
            return
        found = size_bytes / max(seconds, _LEAST_S)
        weight = 1.0 - (1.0 - EWMA_WEIGHT) ** max(1.0, seconds / WEIGHED_S)
        with self._lock:
            self._mean += (weight if self._samples else 1.0) * (found - self._mean)
            self._samples.append(found)
            self._seen_s = self._clock()

    def estimate(self) -> LinkEstimate:
        """Return the exponentially weighted mean, and the 20th percentile of the last samples, or
        the mean if that is less.
        """
        with self._lock:
            mean, samples = self._mean, list(self._samples)
            age_s = self._clock() - self._seen_s
        ordered = sorted(samples) or [mean]
        cautious = min(mean, ordered[int(CAUTIOUS_SHARE * (len(ordered) - 1))])
        most = max(1.0, self._prior / mean)
        grown = min(most, 2.0 ** min(age_s / DOUBLING_S, 64.0)) if samples else 1.0
        return LinkEstimate(grown * mean, grown * cautious)


@dataclass(frozen=True, slots=True)
class Meters:
    """A client's measurements of its link and its decoders. *clock* returns seconds."""

    link: LinkMeter
    decoder: LinkMeter
    clock: Callable[[], float] = time.monotonic


# --- a request and its progress


@dataclass(frozen=True, slots=True)
class LevelledChunk:
    """A chunk and its levels: with its first ``end_bytes[k]`` bytes it is readable at level k. A
    chunk that cannot be loaded has no levels. Raises InvalidRequestError unless they grow.
    """

    tokens: int
    raw_bytes: int
    end_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.raw_bytes < 1:
            raise InvalidRequestError("tokens", (self.tokens, self.raw_bytes), "give counts over 0")
        if any(later <= one for one, later in pairwise((0, *self.end_bytes))):
            raise InvalidRequestError("end_bytes", self.end_bytes, "must grow with each level")

    def reached(self, arrived_bytes: int) -> int:
        """Return the highest level that its first *arrived_bytes* complete; else MISSING."""
        count = sum(end <= arrived_bytes for end in self.end_bytes)
        return count - 1 if count else MISSING


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """The demands of a request, and the costs of its engine and decoder.

    ``deadline_s`` is from the request's start until all KV is there (the time to first token
    less what follows). ``decode_bytes_per_s`` 0 stands for the client's measurement; a plan needs a
    number. A chunk is decoded while the next one loads.

    Without ``prefill`` the engine's cost is unknown: loads end with the deadline. With it a request
    is no later than by computing everything. Chunks load from the first on, and the engine then
    computes those behind them; or, without ``loads_first``, it computes from the first one on while
    they load from the last one back, so the prompt is complete where both meet. ``tail_tokens``
    behind the chunks are computed in any case.
    """

    deadline_s: float
    prefill: PrefillModel | None = None
    decode_bytes_per_s: float = 0.0
    least: Accuracy = Accuracy.exact
    tail_tokens: int = 0
    loads_first: bool = True

    def __post_init__(self) -> None:
        if not (self.deadline_s > 0 and self.decode_bytes_per_s >= 0):
            wrong = (self.deadline_s, self.decode_bytes_per_s)
            raise InvalidRequestError("deadline_s, decode_bytes_per_s", wrong, "give them over 0")
        if self.tail_tokens < 0:
            raise InvalidRequestError("tail_tokens", self.tail_tokens, "give a count, or 0")

    @property
    def deadline_ms(self) -> int:
        """The deadline of calls that load, within a server's limit."""
        return max(1, min(int(1000 * self.deadline_s), MAX_DEADLINE_MS))

    def span_s(self, tokens: int, context: int) -> float:
        """Return the time to compute *tokens* at once; earlier ones are context of later ones."""
        return 0.0 if self.prefill is None else self.prefill.seconds(tokens, context + tokens // 2)

    def compute_s(self, chunks: Sequence[LevelledChunk], loaded: int = 0) -> float:
        """Return the engine's time for *chunks* after the first *loaded*, and the tail."""
        sizes = [chunk.tokens for chunk in chunks]
        return self.span_s(sum(sizes[loaded:]) + self.tail_tokens, sum(sizes[:loaded]))

    def later_s(self, chunks: Sequence[LevelledChunk]) -> float:
        """Return how much later than without loads a prompt may be whose loads fail.

        The time to compute a chunk or to load a batch, but at most MAX_LATER_SHARE of all, and at
        most the deadline: the engine's estimate may be wrong.
        """
        first_s = self.span_s(chunks[0].tokens, 0) if chunks else 0.0
        later_s = min(MAX_LATER_SHARE * self.compute_s(chunks), max(BATCH_S, first_s))
        return min(later_s, max(BATCH_S, self.deadline_s))


class Fetch(NamedTuple):
    """Bytes *start* to *stop* of a chunk, which bring it to *level*."""

    chunk: int
    level: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The action for each chunk: a level to load, or RECOMPUTE.

    ``ready_s`` is the end, from the request's start, by the cautious estimate of the link if that
    meets the deadline, else by the mean.
    """

    actions: tuple[int, ...]
    ready_s: float
    is_in_time: bool


@dataclass(frozen=True)
class Progress:
    """The progress of a request of *terms* for *chunks*: the level of each, and when the engine is
    free. ``levels[i]`` is a level, RECOMPUTE (computed or begun: the first ones) or MISSING.

    Raises InvalidRequestError for levels that the chunks do not have.
    """

    chunks: Sequence[LevelledChunk]
    terms: PlanTerms
    levels: tuple[int, ...]
    elapsed_s: float = 0.0
    engine_until_s: float = 0.0
    """On the same clock."""
    undecoded_bytes: int = 0
    """Raw size of chunks that have arrived and are not decoded yet."""

    def __post_init__(self) -> None:
        if len(self.chunks) != len(self.levels) or not all(
            MISSING <= has < len(chunk.end_bytes)
            for has, chunk in zip(self.levels, self.chunks, strict=True)
        ):
            raise InvalidRequestError("levels", self.levels, "give a level of each chunk")
        if not self.terms.decode_bytes_per_s:
            raise InvalidRequestError("decode_bytes_per_s", 0, "give the decode speed")

    @property
    def is_concurrent(self) -> bool:
        """Whether the engine computes while chunks load."""
        return self.terms.prefill is not None and not self.terms.loads_first

    @property
    def begun(self) -> int:
        """How many chunks, from the first on, the engine has begun."""
        return sum(1 for _ in takewhile(lambda has: has == RECOMPUTE, self.levels))

    @cached_property
    def _sizes(self) -> list[int]:
        return [chunk.tokens for chunk in self.chunks]

    def left_s(self) -> float:
        """Return the engine's time for the missing chunks and the tail."""
        terms, levels, sizes = self.terms, self.levels, self._sizes
        if not self.is_concurrent:
            loaded = sum(1 for _ in takewhile(lambda has: has >= 0, levels))
            return terms.compute_s(self.chunks, loaded)
        missing = [size for size, has in zip(sizes, levels, strict=True) if has == MISSING]
        # In steps of half of the rest: see ``to_compute``.
        start_s = 0.0 if terms.prefill is None else terms.prefill.start_s
        starts_s = start_s * max(0, len(missing).bit_length() - 1)
        return (
            terms.span_s(sum(missing), 0) + starts_s + terms.span_s(terms.tail_tokens, sum(sizes))
        )

    def wait_until_s(self) -> float:
        """Return until when to wait for more; chunks missing by then are computed.

        On the clock of ``elapsed_s``. It leaves time to decode the undecoded chunks and one more.
        An engine that begins then finishes at most ``later_s`` later than without loads, and by
        the deadline if it could have without loads. It uses no estimate of the link, which bounds
        the cost of a wrong one.
        """
        terms = self.terms
        largest_bytes = max((chunk.raw_bytes for chunk in self.chunks), default=0)
        decode_s = (self.undecoded_bytes + largest_bytes) / terms.decode_bytes_per_s
        decode_s = min(decode_s, MAX_DECODE_SHARE * terms.deadline_s)
        if terms.prefill is None:
            return terms.deadline_s - decode_s
        whole_s = terms.compute_s(self.chunks)
        end_s = whole_s + terms.later_s(self.chunks)
        if MISSING not in self.levels:  # refinements justify no delay
            margin_s = min(BATCH_S, MAX_LATER_SHARE * terms.deadline_s)
            end_s = min(whole_s, terms.deadline_s - margin_s)
        elif whole_s <= terms.deadline_s:
            end_s = min(end_s, max(whole_s, terms.deadline_s - CUT_SHORT_S))
        return end_s - self.left_s() - (decode_s if max(self.levels) >= 0 else 0.0)

    def to_compute(self, found: Plan, *, is_quiet: bool) -> int:
        """Return how many of the next chunks the engine is to compute in one step.

        Half of those to compute by *found*: the link may become faster, and each step costs a
        start. Half of all missing ones when it *is_quiet*: no batch arrived since that plan. If the
        engine alone would be late, a step takes at most half of the time left: a longer one would
        be late even if the link recovers.
        """
        terms, sizes, first = self.terms, self._sizes, self.begun
        left = takewhile(lambda has: has == MISSING, self.levels[first:])
        wanted = takewhile(lambda action: action == RECOMPUTE, found.actions[first:])
        count = -(-sum(1 for _ in (left if is_quiet else wanted)) // 2)
        left_s = terms.deadline_s - self.elapsed_s
        if 0 < left_s < self.left_s():
            most_s = (left_s - terms.span_s(terms.tail_tokens, sum(sizes))) / 2
            ends = accumulate(sizes[first : first + count])
            fit = takewhile(lambda tokens: terms.span_s(tokens, sum(sizes[:first])) <= most_s, ends)
            count = sum(1 for _ in fit) or count  # none fits: it is late anyway
        return count

    # --- the plan

    def plan(self, link: LinkEstimate) -> Plan:
        """Return the plan that computes least among those in time, with chunks at the highest
        levels that fit; the soonest plan if none is in time.

        Chunks are loaded up to the first that cannot be: those behind it are computed like the
        tail. Chunks that have arrived stay.
        """
        splits, terms = self._splits(), self.terms
        for split in splits:
            if self._ready_s(self._loading(split), link.p20_bytes_per_s) <= self._due_s:
                return self._refined(split, link.p20_bytes_per_s)
        mean = link.mean_bytes_per_s
        ready_s = [self._ready_s(self._loading(split), mean) for split in splits]
        soonest = splits[ready_s.index(min(ready_s))]
        # If computing everything meets the deadline, loads may not delay it.
        is_met = self.elapsed_s + terms.compute_s(self.chunks) <= terms.deadline_s
        is_over = terms.deadline_s <= terms.later_s(self.chunks)
        if not self.is_concurrent and min(ready_s) > self._due_s and not is_met and not is_over:
            # Late unless the link has become faster: trying costs ``later_s`` at most.
            soonest = splits[0]
        return self._refined(soonest, mean)

    def next_batch(
        self, found: Plan, arrived_bytes: Sequence[int], budget_bytes: float
    ) -> list[Fetch]:
        """Return what to request next for *found*, up to *budget_bytes*, in the order of use on a
        slow link. First the base of every chunk to load, the last one first if the engine computes
        meanwhile; then level by level.

        ``arrived_bytes[i]`` of a chunk have arrived, whole levels or not.
        """
        batch: list[Fetch] = []
        for level in range(max(found.actions, default=RECOMPUTE) + 1):
            order = range(len(found.actions))
            for at in reversed(order) if self.is_concurrent and not level else order:
                if budget_bytes > 0 and self.levels[at] < level <= found.actions[at]:
                    ends = (0, *self.chunks[at].end_bytes)
                    start = max(ends[level], arrived_bytes[at])
                    batch.append(Fetch(at, level, start, ends[level + 1]))
                    budget_bytes -= ends[level + 1] - start
        return batch

    @cached_property
    def _due_s(self) -> float:
        """When everything has to be there: no later than without loads."""
        if self.terms.prefill is None:
            return self.terms.deadline_s
        return min(self.terms.deadline_s, self.terms.compute_s(self.chunks))

    @cached_property
    def _prefill_s(self) -> list[float]:
        """The engine's time for each chunk by itself, and for the tail."""
        if self.terms.prefill is None:
            return [0.0] * (len(self.chunks) + 1)
        starts = accumulate(self._sizes, initial=0)
        return list(map(self.terms.prefill.seconds, [*self._sizes, self.terms.tail_tokens], starts))

    @cached_property
    def _loadable(self) -> int:
        """The chunk at which loads end."""
        rest = range(self.begun, len(self.chunks))
        return next((at for at in rest if not self.chunks[at].end_bytes), len(self.chunks))

    def _splits(self) -> list[int]:
        """Return where the loads may begin, or, with ``loads_first``, end; first the one that
        computes least.
        """
        if self.is_concurrent:
            here = (at for at, has in enumerate(self.levels) if has >= 0)
            low, high = self.begun, min(here, default=self._loadable)
        else:
            rest = takewhile(lambda has: has >= 0, self.levels[self.begun :])
            low, high = self.begun + sum(1 for _ in rest), self._loadable
            if self.terms.prefill is None:
                return [high]
        step = max(1, (high - low) // SPLITS_TRIED)
        if self.is_concurrent:
            return [*range(low, high, step), high]
        return [*range(high, low, -step), low]

    def _loading(self, split: int) -> list[int]:
        """Return the actions of *split*, with the base level of chunks to load."""
        first, stop = (split, self._loadable) if self.is_concurrent else (self.begun, split)
        return [
            max(has, 0) if first <= at < stop else RECOMPUTE for at, has in enumerate(self.levels)
        ]

    def _ready_s(self, actions: Sequence[int], bytes_per_s: float) -> float:
        """Return when everything is there.

        Chunks load in order; each is decoded while the next one loads, behind what waits to be
        decoded. Meanwhile the engine computes those before them, and then those behind them.
        """
        link_s = there_s = self.elapsed_s
        decoded_s = link_s + self.undecoded_bytes / self.terms.decode_bytes_per_s
        engine_s = max(self.elapsed_s, self.engine_until_s)
        for chunk, action, has, prefill_s in zip(
            self.chunks, actions, self.levels, self._prefill_s, strict=False
        ):
            if action == RECOMPUTE:
                if has != RECOMPUTE:
                    engine_s = max(engine_s, there_s) + prefill_s
                there_s = max(there_s, engine_s)
                continue
            if action > has:
                start = chunk.end_bytes[has] if has >= 0 else 0
                link_s += (chunk.end_bytes[action] - start) / bytes_per_s
                decoded_s = max(decoded_s, link_s) + chunk.raw_bytes / self.terms.decode_bytes_per_s
            there_s = max(there_s, decoded_s)
        tail_s = self._prefill_s[-1]
        return max(engine_s, there_s) + tail_s if tail_s else there_s

    def _refined(self, split: int, bytes_per_s: float) -> Plan:
        """Raise levels, the lowest first, as far as the deadline allows."""
        base = self._loading(split)
        rises = sorted(
            (level, at)
            for at, has in enumerate(base)
            if has >= 0
            for level in range(has + 1, len(self.chunks[at].end_bytes))
        )

        def raised(count: int) -> list[int]:
            found = list(base)
            for level, at in rises[:count]:
                found[at] = level
            return found

        def is_late(count: int) -> bool:
            return self._ready_s(raised(count), bytes_per_s) > self._due_s

        count = max(0, bisect_left(range(len(rises) + 1), True, key=is_late) - 1)
        actions = raised(count)
        ready_s = self._ready_s(actions, bytes_per_s)
        return Plan(tuple(actions), ready_s, ready_s <= self._due_s)
