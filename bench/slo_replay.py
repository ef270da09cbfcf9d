"""Requests for prompts whose KV is stored, over a link that changes, on a clock of its own.

The controller is the client's own (client/planning.py), used as client/deadline.py does; link,
decoder and engine are numbers.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.client.planning import (
    BATCH_GROWTH,
    BATCH_S,
    FIRST_BATCH_BYTES,
    MISSING,
    QUIET_S,
    RECOMPUTE,
    Fetch,
    LevelledChunk,
    LinkMeter,
    Plan,
    PlanTerms,
    Progress,
)

RTT_S = 0.001
"""Of every request on the link."""
EXCHANGES = 2
"""Before bytes come: a lookup, and the headers of frames or the get itself."""
STALL_S = 0.05
"""What a read that is cut short may take beyond its end, if nothing comes meanwhile."""
PIECE_BYTES = 256 << 10
GBPS = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Trace:
    """Bandwidth: from each of ``starts_s`` on so many bytes a second; then again from the start."""

    name: str
    starts_s: tuple[float, ...]
    bytes_per_s: tuple[float, ...]
    length_s: float

    @classmethod
    def of(cls, name: str, steps: Sequence[tuple[float, float]]) -> Trace:
        """Return a trace of *steps*, (seconds, bytes a second) each."""
        starts, at_s = [], 0.0
        for seconds, _ in steps:
            starts.append(at_s)
            at_s += seconds
        return cls(name, tuple(starts), tuple(max(1.0, speed) for _, speed in steps), at_s)

    @classmethod
    def uniform(cls, seed: int, low_gbps: float = 0.1, high_gbps: float = 10.0) -> Trace:
        """Return steps of 0.1 s, drawn evenly, as those of CacheGen's artifact."""
        draw = random.Random(seed)
        steps = [(0.1, draw.uniform(low_gbps, high_gbps) * GBPS) for _ in range(4096)]
        return cls.of(f"uniform {low_gbps:g}-{high_gbps:g} Gbps, seed {seed}", steps)

    @classmethod
    def jumping(cls, seed: int, mean_s: float) -> Trace:
        """Return 5 to 10 Gbps and 0.1 to 0.5 Gbps in turns, each for *mean_s* in the mean."""
        draw = random.Random(seed)
        steps = [
            (
                draw.uniform(0.5, 1.5) * mean_s,
                (draw.uniform(0.1, 0.5) if number % 2 else draw.uniform(5, 10)) * GBPS,
            )
            for number in range(1024)
        ]
        return cls.of(f"jumping every {mean_s:g} s, seed {seed}", steps)

    @classmethod
    def recorded(cls, path: Path) -> Trace:
        """Return what *path* has: lines of seconds from the start and Mbit/s, as Pensieve's."""
        rows = [tuple(map(float, line.split()[:2])) for line in path.read_text().splitlines()]
        times = [row[0] for row in rows]
        steps = [
            (later - at, mbit * 1e6 / 8)
            for (at, mbit), later in zip(rows, times[1:], strict=False)
            if later > at
        ]
        if not steps:
            raise ValueError(f"--trace: {path}: give lines of seconds and Mbit/s, two or more")
        return cls.of(path.name, steps)

    def _pieces(self, at_s: float) -> Iterator[tuple[float, float, float]]:
        """Yield (from, to, bytes a second), from *at_s* on."""
        turns, within_s = divmod(at_s, self.length_s)
        number = bisect_right(self.starts_s, within_s) - 1
        base_s = turns * self.length_s
        while True:
            last = number + 1 == len(self.starts_s)
            end_s = base_s + (self.length_s if last else self.starts_s[number + 1])
            yield at_s, end_s, self.bytes_per_s[number]
            at_s, number = end_s, 0 if last else number + 1
            base_s += self.length_s if last else 0.0

    def arrival_s(self, size_bytes: float, at_s: float) -> float:
        """Return when *size_bytes* that set out at *at_s* are there."""
        for start_s, end_s, speed in self._pieces(at_s):
            if (end_s - start_s) * speed >= size_bytes:
                return start_s + size_bytes / speed
            size_bytes -= (end_s - start_s) * speed
        raise AssertionError

    def passed_bytes(self, at_s: float, until_s: float) -> float:
        """Return what comes between two moments."""
        found = 0.0
        for start_s, end_s, speed in self._pieces(at_s):
            found += max(0.0, min(end_s, until_s) - start_s) * speed
            if end_s >= until_s:
                break
        return found


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt whose ``chunks`` are stored, as it comes at ``at_s``."""

    at_s: float
    chunks: tuple[LevelledChunk, ...]
    terms: PlanTerms


@dataclass(frozen=True, slots=True)
class Outcome:
    """When the first token is there, from the request on; the level of each chunk that came."""

    ttft_s: float
    levels: tuple[int, ...]


Replay = Callable[[Request, Trace], Outcome]


def recompute(request: Request, _: Trace) -> Outcome:
    """Compute everything, as if there were no store."""
    return Outcome(request.terms.compute_s(request.chunks), ())


def load_all(level: int) -> Replay:
    """Load every chunk at *level*, whatever comes, then compute the rest."""

    def replay(request: Request, trace: Trace) -> Outcome:
        chunks, terms = request.chunks, request.terms
        sent_s = request.at_s + EXCHANGES * RTT_S
        size_bytes, decoded_s = 0, sent_s
        for chunk in chunks:
            size_bytes += chunk.end_bytes[level]
            there_s = trace.arrival_s(size_bytes, sent_s)
            decoded_s = max(decoded_s, there_s) + chunk.raw_bytes / terms.decode_bytes_per_s
        rest_s = terms.compute_s(chunks, len(chunks))
        return Outcome(decoded_s + rest_s - request.at_s, (level,) * len(chunks))

    return replay


def knowing(request: Request, trace: Trace) -> Outcome:
    """Do what ends soonest, by the trace itself: what no controller can beat."""
    chunks, terms = request.chunks, request.terms
    sizes, best_s = [chunk.tokens for chunk in chunks], terms.compute_s(chunks)
    tail_s = terms.span_s(terms.tail_tokens, sum(sizes))
    sent_s = decoded_s = request.at_s + (EXCHANGES + 1) * RTT_S
    size_bytes = 0
    for count, chunk in enumerate(chunks if terms.loads_first else reversed(chunks), start=1):
        size_bytes += chunk.end_bytes[0]
        there_s = trace.arrival_s(size_bytes, sent_s)
        decoded_s = max(decoded_s, there_s) + chunk.raw_bytes / terms.decode_bytes_per_s
        loaded_s, rest = decoded_s - request.at_s, len(chunks) - count
        if terms.loads_first:
            found_s = loaded_s + terms.compute_s(chunks, count)
        else:
            found_s = max(loaded_s, terms.span_s(sum(sizes[:rest]), 0)) + tail_s
        best_s = min(best_s, found_s)
    return Outcome(best_s, ())


def controlled(meter: Callable[[Callable[[], float]], LinkMeter]) -> Replay:
    """Do what the controller says. *meter* makes one on the clock that it is given; it goes on
    learning from one request to the next.
    """
    now_s = 0.0
    link = meter(lambda: now_s)

    def replay(request: Request, trace: Trace) -> Outcome:
        nonlocal now_s
        one = _Controlled(request, trace, link)
        for at_s in one.run():
            now_s = at_s
        return one.outcome()

    return replay


class _Controlled:
    """One request under the controller, as LevelledGet runs it. Times are those of the trace."""

    def __init__(self, request: Request, trace: Trace, link: LinkMeter) -> None:
        self._chunks, self._terms, self._start_s = request.chunks, request.terms, request.at_s
        self._trace, self._link = trace, link
        self._at_s = request.at_s + EXCHANGES * RTT_S
        self._arrived = [0] * len(self._chunks)
        self._there_s: dict[int, float] = {}
        """When each chunk that came was there at some level."""
        self._decoded_s = self._at_s
        self._decoded: dict[int, int] = {}
        """Chunks that are decoded, or will be, by the level."""
        self._computed = 0
        """The first chunks, that the engine has begun."""
        self._engine_s: float | None = None
        """When it can begin another; None before it begins at all."""
        self._found: Plan | None = None
        self._planned_s = 0.0

    def run(self) -> Iterator[float]:
        """Go on until the loads are over; yield the time of the link's answers."""
        batch_bytes: float = FIRST_BATCH_BYTES
        yield self._at_s
        while True:
            progress, estimate = self._progress(), self._link.estimate()
            found = progress.plan(estimate)
            until_s = self._start_s + progress.wait_until_s()
            if not self._terms.loads_first:
                until_s = self._begin(found, until_s)
            budget = min(BATCH_S * estimate.mean_bytes_per_s, batch_bytes)
            batch = self._progress().next_batch(found, self._arrived, budget)
            if not batch or until_s <= self._at_s:
                return
            batch_bytes *= BATCH_GROWTH
            self._fetch(found, batch, until_s)
            if self._engine_s is not None:
                self._compute()
                self._meet()
            yield self._at_s

    def _begin(self, found: Plan, until_s: float) -> float:
        """Have the engine begin, now or at *until_s*, if nothing comes; return until when it can
        matter what comes: then it has computed all that did not.
        """
        progress = self._progress()
        if MISSING not in progress.levels:
            return until_s
        self._found, self._planned_s = found, self._at_s
        if self._engine_s is None:
            is_wanted = RECOMPUTE in found.actions or until_s <= self._at_s
            self._engine_s = self._at_s if is_wanted else until_s
        self._compute()
        return max(self._at_s, self._engine_s) + self._progress().left_s()

    def _compute(self) -> None:
        """Have the engine begin all that it had time for by now."""
        assert self._engine_s is not None
        tokens = [chunk.tokens for chunk in self._chunks]
        assert self._found is not None
        while self._engine_s <= self._at_s:
            first = stop = self._computed
            levels = [
                RECOMPUTE if n < first else self._level(n) if self._is_here(n) else MISSING
                for n in range(len(tokens))
            ]
            is_quiet = self._engine_s - self._planned_s > QUIET_S
            elapsed_s = self._engine_s - self._start_s
            progress = Progress(self._chunks, self._terms, tuple(levels), elapsed_s)
            count = max(1, progress.to_compute(self._found, is_quiet=is_quiet))
            while stop < min(first + count, len(tokens)) and not self._is_here(stop):
                stop += 1
            if stop == first:
                return
            self._engine_s += self._terms.span_s(sum(tokens[first:stop]), sum(tokens[:first]))
            self._computed = stop

    def _meet(self) -> None:
        """End a batch that brings what the engine has computed, if nothing else is missing."""
        progress = self._progress()
        if self._engine_s is not None and MISSING not in progress.levels:
            there_s = self._there_s.items()
            last_s = max((at_s for n, at_s in there_s if n >= self._computed), default=0.0)
            until_s = self._start_s + progress.wait_until_s()
            self._at_s = max(self._engine_s, last_s, min(self._at_s, until_s))

    def _is_here(self, index: int) -> bool:
        """Whether a chunk was there when the engine could have begun it."""
        assert self._engine_s is not None
        return self._there_s.get(index, self._engine_s + 1) <= self._engine_s

    def _fetch(self, found: Plan, batch: Sequence[Fetch], until_s: float) -> None:
        began_s, size_bytes = self._at_s, sum(one.stop - one.start for one in batch)
        sent_s = began_s + RTT_S
        whole_s = self._trace.arrival_s(size_bytes, sent_s)
        came = float(size_bytes)
        if whole_s > until_s:
            next_s = self._trace.arrival_s(PIECE_BYTES, max(until_s, sent_s))
            whole_s = min(whole_s, until_s + STALL_S, next_s)
            came = self._trace.passed_bytes(sent_s, whole_s)
        self._at_s = whole_s
        self._link.observe(int(came), self._at_s - began_s)
        asked = 0.0
        for one in batch:
            part = min(one.stop - one.start, max(0.0, came - asked))
            asked += one.stop - one.start
            self._arrived[one.chunk] = max(self._arrived[one.chunk], int(one.start + part))
            level = self._level(one.chunk)
            there_s = self._trace.arrival_s(min(asked, came), sent_s)
            if level >= 0:
                self._there_s.setdefault(one.chunk, there_s)
            if level >= found.actions[one.chunk]:
                self._decode(one.chunk, level, there_s)

    def _decode(self, index: int, level: int, there_s: float) -> None:
        if level >= 0 and self._decoded.get(index) != level:
            self._decoded[index] = level
            took_s = self._chunks[index].raw_bytes / self._terms.decode_bytes_per_s
            self._decoded_s = max(self._decoded_s, there_s) + took_s

    def _level(self, index: int) -> int:
        return self._chunks[index].reached(self._arrived[index])

    def _progress(self) -> Progress:
        levels = [
            RECOMPUTE if index < self._computed else self._level(index)
            for index in range(len(self._chunks))
        ]
        engine_s = (self._engine_s or self._start_s) - self._start_s
        undecoded_bytes = sum(
            chunk.raw_bytes
            for index, (chunk, level) in enumerate(zip(self._chunks, levels, strict=True))
            if level >= 0 and self._decoded.get(index) != level
        )
        elapsed_s = self._at_s - self._start_s
        return Progress(
            self._chunks, self._terms, tuple(levels), elapsed_s, engine_s, undecoded_bytes
        )

    def outcome(self) -> Outcome:
        """Decode what is left and compute the rest."""
        chunks, terms = self._chunks, self._terms
        levels = self._progress().levels
        first = self._computed
        stop = next((n for n in range(first, len(levels)) if levels[n] < 0), len(levels))
        if not terms.loads_first and stop < len(levels):  # it computes on, to what has come
            first = next((n for n in range(len(levels) - 1, -1, -1) if levels[n] < 0), -1) + 1
            stop = len(levels)
        for index in range(first, stop):
            self._decode(index, levels[index], self._at_s)
        tokens = [chunk.tokens for chunk in chunks]
        engine_s = self._engine_s or 0.0
        if self._computed < len(chunks):  # else nobody waits for the loads
            engine_s = max(engine_s, self._at_s)
        if self._computed < first:
            engine_s += terms.span_s(
                sum(tokens[self._computed : first]), sum(tokens[: self._computed])
            )
        decoded_s = self._decoded_s if first < stop else 0.0
        ready_s = max(engine_s, decoded_s) - self._start_s
        rest_s = terms.span_s(sum(tokens[stop:]) + terms.tail_tokens, sum(tokens[:stop]))
        return Outcome(ready_s + rest_s, levels[:stop])
