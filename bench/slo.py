"""Deadlines for the first token over links that change: our controller beside fixed choices.

A simulation: the clock, the link, the decoder and the engine (an 8B-class model) are numbers, so
that a run gives the same figures anywhere. Real are the controller, and the sizes of the levels:
those of kvq:layered on the KV of a trained model (data/tinylm).
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import mean
from typing import NamedTuple

from bench.lib.report import Report, parser_of
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
    PrefillModel,
    Progress,
)
from kvstore.client.server_link import FIRST_GUESS_BYTES_PER_S

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
        *starts, end_s = accumulate((seconds for seconds, _ in steps), initial=0.0)
        return cls(name, tuple(starts), tuple(max(1.0, speed) for _, speed in steps), end_s)

    @classmethod
    def uniform(cls, seed: int, low_gbps: float = 0.1, high_gbps: float = 10.0) -> Trace:
        draw = random.Random(seed)
        steps = [(0.1, draw.uniform(low_gbps, high_gbps) * GBPS) for _ in range(4096)]
        return cls.of(f"uniform {low_gbps:g}-{high_gbps:g} Gbps, seed {seed}", steps)

    @classmethod
    def jumping(cls, seed: int, mean_s: float) -> Trace:
        draw = random.Random(seed)
        kinds = [(5, 10), (0.1, 0.5)] * 512
        steps = [(draw.uniform(0.5, 1.5) * mean_s, draw.uniform(*kind) * GBPS) for kind in kinds]
        return cls.of(f"jumping every {mean_s:g} s, seed {seed}", steps)

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
        for start_s, end_s, speed in self._pieces(at_s):
            if (end_s - start_s) * speed >= size_bytes:
                return start_s + size_bytes / speed
            size_bytes -= (end_s - start_s) * speed
        raise AssertionError

    def passed_bytes(self, at_s: float, until_s: float) -> float:
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
        progress = self._progress()
        if self._engine_s is not None and MISSING not in progress.levels:
            there_s = self._there_s.items()
            last_s = max((at_s for n, at_s in there_s if n >= self._computed), default=0.0)
            until_s = self._start_s + progress.wait_until_s()
            self._at_s = max(self._engine_s, last_s, min(self._at_s, until_s))

    def _is_here(self, index: int) -> bool:
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


CHUNK_TOKENS = 256
VALUES_A_TOKEN = 32 * 2 * 8 * 128
"""Of an 8B-class model with grouped heads: 128 KiB in bfloat16."""
ENGINE = PrefillModel(0.005, 1e-4, 3e-9)
"""About what such a model takes on one H100."""
DECODE_BYTES_PER_S = 10e9
"""Decoded bytes, by all threads of a client: seven cores of kvq."""
PROMPT_TOKENS = (2048, 16384)
DEADLINES_S = (0.75, 1.0, 1.5)
GAP_S = 1.0
"""Between requests, in the mean."""
OURS = ("controller", "controller, loads first")
"""Beside an engine that computes from the first chunk on meanwhile, as transformers' connector has
it; and before one that computes when the loads are over, as vLLM has it."""
COST_S = 0.06
"""Beside ``later_s``, what a decision may cost: the exchanges before bytes come, and how late a
read that is cut short may end."""


@dataclass(frozen=True, slots=True)
class Levels:
    """Bits a value of each level, and of a lossless copy."""

    bits: tuple[float, ...]
    exact_bits: float

    def chunk(self, tokens: int, *, exact: bool = False) -> LevelledChunk:
        """Return a chunk of them, as client/deadline.py has it; or one without loss."""
        bits = (self.exact_bits,) if exact else self.bits
        ends = tuple(int(tokens * VALUES_A_TOKEN * each / 8) for each in bits)
        return LevelledChunk(tokens, 2 * tokens * VALUES_A_TOKEN, ends)


def measured(windows: int = 4) -> Levels:
    """Return the levels of kvq:layered on the KV of a trained model."""
    from bench.codecs.__main__ import LOSSLESS
    from bench.codecs.model import PrefixModel
    from bench.codecs.ours import Chunks, Coder
    from bench.codecs.texts import Lengths

    model = PrefixModel(Lengths(windows))
    chunks = Chunks.of("bench/tinylm", model.bits, model.rope)
    coded = Coder("kvq:layered", chunks).code(chunks.bits)
    (exact,) = Coder(LOSSLESS, chunks).code(chunks.bits)
    return Levels(tuple(one.bits_per_value for one in coded), exact.bits_per_value)


def requests(levels: Levels, seed: int, count: int, *, exact: bool) -> list[Request]:
    """Return prompts of 2 to 16 thousand tokens, evenly by their logarithm."""
    draw = random.Random(seed)
    low, high = PROMPT_TOKENS
    found, at_s = [], 0.0
    for _ in range(count):
        at_s += draw.expovariate(1 / GAP_S)
        tokens = int(low * (high / low) ** draw.random())
        deadline_s, tail = draw.choice(DEADLINES_S), 1 + tokens % CHUNK_TOKENS
        one = levels.chunk(CHUNK_TOKENS, exact=exact)
        terms = PlanTerms(
            deadline_s, ENGINE, DECODE_BYTES_PER_S, tail_tokens=tail, loads_first=False
        )
        found.append(Request(at_s, (one,) * (tokens // CHUNK_TOKENS), terms))
    return found


class Score(NamedTuple):
    """Of one way over one trace: share of late requests, seconds to the first token, and requests
    later than computing everything, by more than a decision may cost.
    """

    late: float
    ttft_s: float
    worse: int


def score(replay: Replay, asked: Sequence[Request], trace: Trace) -> Score:
    pairs = [(request.terms, request.chunks, replay(request, trace).ttft_s) for request in asked]
    return Score(
        mean(ttft_s > terms.deadline_s for terms, _, ttft_s in pairs),
        mean(ttft_s for _, _, ttft_s in pairs),
        sum(
            ttft_s > terms.compute_s(chunks) + terms.later_s(chunks) + COST_S
            for terms, chunks, ttft_s in pairs
        ),
    )


def compare(
    levels: Levels, trace: Trace, count: int, *, exact: bool, seed: int = 1
) -> dict[str, Score]:
    """Return the score of every way over *trace*, ours first; *seed* is that of the prompts."""
    asked = requests(levels, seed, count, exact=exact)
    loading_first = [replace(one, terms=replace(one.terms, loads_first=True)) for one in asked]

    def ours() -> Replay:
        return controlled(lambda clock: LinkMeter(FIRST_GUESS_BYTES_PER_S, clock))

    found = {
        OURS[0]: score(ours(), asked, trace),
        OURS[1]: score(ours(), loading_first, trace),
        "recompute": score(recompute, asked, trace),
    }
    for level in range(1 if exact else len(levels.bits)):
        found[f"level {level}"] = score(load_all(level), asked, trace)
    return found


def together(scores: Sequence[dict[str, Score]]) -> dict[str, Score]:
    """Return the score of every way over all traces of a kind, each with as many requests."""
    found = {}
    for name in scores[0]:
        late, ttft_s, worse = zip(*(one[name] for one in scores), strict=True)
        found[name] = Score(mean(late), mean(ttft_s), sum(worse))
    return found


def _ratios(scores: dict[str, Score]) -> tuple[float, float]:
    """Return our late requests, and time to first token, over those of the best fixed choice."""
    ours, fixed = scores[OURS[0]], [one for name, one in scores.items() if name not in OURS]
    late, ttft_s = min(one.late for one in fixed), min(one.ttft_s for one in fixed)
    return ours.late / late if late else float(ours.late > 0), ours.ttft_s / ttft_s


def run(report: Report, levels: Levels, traces: Sequence[Trace],
        jumping: Sequence[Sequence[Trace]], count: int) -> None:  # fmt: skip
    replayed = [
        together(
            [compare(levels, one, count, exact=False, seed=n) for n, one in enumerate(kind, 1)]
        )
        for kind in jumping
    ]
    replayed += [
        compare(levels, trace, count, exact=exact)
        for trace in (*traces, *(kind[0] for kind in jumping))
        for exact in (False, True)
    ]
    worse = sum(scores[name].worse for scores in replayed for name in OURS)
    for trace, scores in zip(jumping, replayed, strict=False):
        for way, one in scores.items():
            figures = f"late, {one.ttft_s:.3f} s to the first token"
            report.note(f"  {trace[0].name}: {way}", f"{one.late:.3f}", figures)
    late, ttft = map(max, zip(*map(_ratios, replayed[: len(jumping)]), strict=True))
    bars = "the best of recompute and each level, on the worst kind of jumping traces"
    report.add("violations_vs_best_fixed", late, "late requests, over those of", bars)
    report.add("mean_ttft_vs_best_fixed", ttft, "mean time to first token, over that of", bars)
    said = f"requests later than without a store by over {COST_S} s and a chunk's or batch's time"
    report.add("worse_than_recompute", worse, said, "all traces, bar 0")


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=60, help="over each trace; default 60")
    parser.add_argument("--seeds", type=int, default=20, help="of each jumping trace; default 20")
    flags = parser.parse_args(argv)
    seeds = range(1, flags.seeds + 1)
    uniform = [Trace.uniform(1), Trace.uniform(2), Trace.uniform(3, 0.1, 1.0)]
    jumping = [[Trace.jumping(seed, dwell_s) for seed in seeds] for dwell_s in (0.5, 2, 8)]
    report = Report("slo")
    run(report, measured(), uniform, jumping, flags.requests)
    report.print(only_json=flags.json)


if __name__ == "__main__":
    main()
