"""Deadlines for the first token over links that change: our controller against fixed choices.

The clock, the link, the decoder and the engine (an 8B-class model) are simulated, so a run gives
the same figures anywhere. The client's get with a deadline is the real one, and so are the sizes of
the levels: those of kvq:layered on the KV of a trained model (data/tinylm).
"""

from __future__ import annotations

import random
import threading
from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from statistics import mean
from types import SimpleNamespace
from typing import Any, NamedTuple

from bench.lib.report import Report, parser_of
from bench.lib.workload import TINY
from kvstore.client.deadline import LevelledGet, _ranges
from kvstore.client.decode import fresh
from kvstore.client.options import ClientOptions
from kvstore.client.planning import (
    Fetch,
    LevelledChunk,
    LinkMeter,
    Meters,
    PlanTerms,
    PrefillModel,
)
from kvstore.client.server_link import FIRST_GUESS_BYTES_PER_S
from kvstore.proto.types import Accuracy, ChunkKey, Stated

RTT_S = 0.001
"""Round trip of a request on the link."""
EXCHANGES = 2
"""Round trips before the first bytes: a lookup, and the headers of frames or the get itself."""
STALL_S = 0.05
"""How far a read that is cut short may run beyond its end while no bytes arrive."""
GBPS = 1e9 / 8


class Trace:
    """A link whose bandwidth changes step by step and repeats."""

    def __init__(self, steps: Sequence[tuple[float, float]]) -> None:
        """*steps*: (seconds, bytes a second) each."""
        self._ends_s = list(accumulate(seconds for seconds, _ in steps))
        self._speeds = [max(1.0, speed) for _, speed in steps]
        paired = zip(steps, self._speeds, strict=True)
        self._ends_bytes = list(accumulate(seconds * speed for (seconds, _), speed in paired))

    @classmethod
    def uniform(cls, seed: int, low_gbps: float = 0.1, high_gbps: float = 10.0) -> Trace:
        draw = random.Random(seed)
        return cls([(0.1, draw.uniform(low_gbps, high_gbps) * GBPS) for _ in range(4096)])

    @classmethod
    def jumping(cls, seed: int, mean_s: float) -> Trace:
        draw = random.Random(seed)
        kinds = [(5, 10), (0.1, 0.5)] * 512
        return cls([(draw.uniform(0.5, 1.5) * mean_s, draw.uniform(*k) * GBPS) for k in kinds])

    def arrival_s(self, size_bytes: float, at_s: float) -> float:
        """Return when *size_bytes* have arrived that are sent from *at_s* on."""
        turns, at_s = divmod(at_s, self._ends_s[-1])
        at = bisect_left(self._ends_s, at_s)
        size_bytes += self._ends_bytes[at] - (self._ends_s[at] - at_s) * self._speeds[at]
        more, size_bytes = divmod(size_bytes, self._ends_bytes[-1])
        at = bisect_left(self._ends_bytes, size_bytes)
        within_s = self._ends_s[at] - (self._ends_bytes[at] - size_bytes) / self._speeds[at]
        return (turns + more) * self._ends_s[-1] + within_s


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt that arrives at ``at_s``; all its ``chunks`` are stored."""

    at_s: float
    chunks: tuple[LevelledChunk, ...]
    terms: PlanTerms


class Outcome(NamedTuple):
    """Time to the first token, and the level of each chunk."""

    ttft_s: float
    levels: tuple[int, ...] = ()


Replay = Callable[[Request, Trace], Outcome]


def recompute(request: Request, _: Trace) -> Outcome:
    return Outcome(request.terms.compute_s(request.chunks))


def load_all(level: int) -> Replay:
    """Load every chunk at *level*, then compute the rest."""

    def replay(request: Request, trace: Trace) -> Outcome:
        chunks, terms = request.chunks, request.terms
        sent_s = request.at_s + EXCHANGES * RTT_S
        size_bytes, decoded_s = 0, sent_s
        for chunk in chunks:
            size_bytes += chunk.end_bytes[level]
            arrived_s = trace.arrival_s(size_bytes, sent_s)
            decoded_s = max(decoded_s, arrived_s) + chunk.raw_bytes / terms.decode_bytes_per_s
        rest_s = terms.compute_s(chunks, len(chunks))
        return Outcome(decoded_s + rest_s - request.at_s, (level,) * len(chunks))

    return replay


# --- the controller in simulated time


def controlled() -> Replay:
    """Replay the client's get, which keeps its measurements of the link between requests."""
    clock = _Clock()
    meter = LinkMeter(FIRST_GUESS_BYTES_PER_S, clock)

    def replay(request: Request, trace: Trace) -> Outcome:
        clock.now_s = request.at_s
        return _SimulatedGet(request, trace, meter, clock).outcome()

    return replay


def _compute(_: range) -> None:
    """Computing takes simulated time only."""


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _WaitsError(Exception):
    """The engine's thread waits for the seconds in the argument."""


class _Changed(threading.Condition):
    """The condition of a get; the engine waits for it, simulated by this thread."""

    def __init__(self, notify: Callable[[], None]) -> None:
        super().__init__()
        self._notify = notify

    def wait(self, timeout: float | None = None) -> bool:
        raise _WaitsError(timeout)

    def notify_all(self) -> None:
        self._notify()


class _DoneAt(Future[Any]):
    """A decode that ends at *at_s*."""

    def __init__(self, clock: _Clock, at_s: float) -> None:
        super().__init__()
        self._clock, self._at_s = clock, at_s

    def done(self) -> bool:
        return self._clock.now_s >= self._at_s


class _SimulatedGet(LevelledGet):
    """The client's get; each wait for the link, a decoder or the engine advances the clock."""

    def __init__(self, request: Request, trace: Trace, meter: LinkMeter, clock: _Clock) -> None:
        link: Any = SimpleNamespace(
            model=TINY,
            options=ClientOptions(),
            meters=Meters(meter, meter, clock),
            reader=SimpleNamespace(submit=self._submit),
        )
        keys = [ChunkKey(bytes(32))] * len(request.chunks)
        compute = None if request.terms.loads_first else _compute
        super().__init__(link, keys, request.terms, fresh, compute)
        for frame, chunk in zip(self._frames, request.chunks, strict=True):
            frame.chunk = chunk
        self._now, self._trace, self._chunks = clock, trace, request.chunks
        self._changed = _Changed(self._wake)
        self._next_step_s = self._started_s
        """When the engine next looks for a chunk to compute."""
        self._computed = 0
        self._is_idle = compute is None
        """Whether the engine computes no more chunks until the loads are over."""
        self._decoded_s = self._ready_s = self._started_s

    def outcome(self) -> Outcome:
        self._load()
        while not self._is_idle:
            self._pass(self._next_step_s)
        chunks, terms = self._chunks, self._plain_terms
        engine_s = self._started_s + self._engine_s
        if self._computed == len(chunks):  # the loads are not needed
            levels, ready_s = self._levelled({}).levels, engine_s
        else:
            levels, ready_s = self._result.result().levels, max(engine_s, self._ready_s)
        rest = [c.tokens for c, level in zip(chunks, levels, strict=True) if level < 0]
        left = sum(rest) - sum(chunk.tokens for chunk in chunks[: self._computed])
        before = sum(chunk.tokens for chunk in chunks) - left
        rest_s = terms.span_s(left + terms.tail_tokens, before)
        return Outcome(ready_s - self._started_s + rest_s, levels)

    # --- time

    def _pass(self, until_s: float) -> None:
        """Advance the clock to *until_s* and run the engine until then."""
        while self._compute is not None and self._next_step_s <= until_s:
            self._now.now_s = max(self._now.now_s, self._next_step_s)
            self._step()
        self._now.now_s = max(self._now.now_s, until_s)

    def _step(self) -> None:
        """Run one step of the engine's thread, as ``_run_beside`` does."""
        if self._is_idle:
            self._next_step_s = float("inf")
            self._finish()
            return
        try:
            some = self._claim()
        except _WaitsError as error:
            self._next_step_s = self._now.now_s + error.args[0]
            return
        self._computed = max(self._computed, some.stop)
        self._next_step_s = self._started_s + self._engine_s
        if not some:
            self._is_idle = True
            self._next_step_s = self._now.now_s + max(0.0, self._left_s())
            if self._computed == len(self._chunks):
                self._end()

    def _wake(self) -> None:
        if not self._is_idle:
            self._next_step_s = max(self._now.now_s, self._started_s + self._engine_s)

    # --- waits

    def _leased(self) -> tuple[Any, int]:
        self._pass(self._started_s + EXCHANGES * RTT_S)
        return None, 0  # no headers: the chunks are given

    def _pieces(
        self, transport: Any, batch: Sequence[Fetch], left_s: float
    ) -> Generator[Any, None, None]:
        end_s = self._now.now_s + left_s + STALL_S
        arrived_s = self._now.now_s + RTT_S
        for piece in _ranges(batch):
            arrived_s = self._trace.arrival_s(piece.stop - piece.start, arrived_s)
            self._pass(min(arrived_s, end_s))
            if arrived_s > end_s:
                return
            yield piece

    def _add(self, transport: Any, piece: Any) -> int:
        self._frames[piece.index].arrived_bytes = piece.stop
        return int(piece.stop - piece.start)

    def _submit(self, _: object, at: int, reached: int, after: object) -> Future[Any]:
        took_s = self._chunks[at].raw_bytes / self._plain_terms.decode_bytes_per_s
        self._decoded_s = max(self._decoded_s, self._now.now_s) + took_s
        done = _DoneAt(self._now, self._decoded_s)
        done.set_result((reached, Stated(Accuracy.exact)))
        return done

    def _await_decodes(self) -> None:
        self._ready_s = max(self._now.now_s, self._decoded_s)


# --- requests, and how late each way is with them

CHUNK_TOKENS = 256
VALUES_A_TOKEN = 32 * 2 * 8 * 128
"""Those of an 8B-class model with grouped heads: 128 KiB in bfloat16."""
ENGINE = PrefillModel(0.005, 1e-4, 3e-9)
"""About that of such a model on one H100."""
DECODE_BYTES_PER_S = 10e9
"""Decoded bytes a second by all threads of a client: kvq on seven cores."""
PROMPT_TOKENS = (2048, 16384)
DEADLINES_S = (0.75, 1.0, 1.5)
GAP_S = 1.0
"""Mean time between requests."""
REQUESTS = 60
"""Requests over each trace."""
OURS = ("controller", "controller, loads first")
"""Beside an engine that computes from the first chunk on, as with transformers; and before one that
computes when the loads are over, as vLLM."""
COST_S = 0.06
"""What a decision may cost besides ``later_s``: the round trips before bytes arrive, and how late a
read that is cut short may end."""


@dataclass(frozen=True, slots=True)
class Levels:
    """Bits a value of each level and of a lossless copy."""

    bits: tuple[float, ...]
    exact_bits: float

    def chunk(self, tokens: int, *, exact: bool = False) -> LevelledChunk:
        """Return a chunk with these levels, or an *exact* one."""
        bits = (self.exact_bits,) if exact else self.bits
        ends = tuple(int(tokens * VALUES_A_TOKEN * each / 8) for each in bits)
        return LevelledChunk(tokens, 2 * tokens * VALUES_A_TOKEN, ends)


def measured(windows: int = 4) -> Levels:
    """Return the levels of kvq:layered on the KV of a trained model."""
    from bench.codecs.__main__ import LOSSLESS
    from bench.codecs.kv import Lengths
    from bench.codecs.model import PrefixModel
    from bench.codecs.ours import Chunks, Coder

    model = PrefixModel(Lengths(windows))
    chunks = Chunks.of("bench/tinylm", model.bits, model.rope)
    coded = Coder("kvq:layered", chunks).code(chunks.bits)
    (exact,) = Coder(LOSSLESS, chunks).code(chunks.bits)
    return Levels(tuple(one.bits_per_value for one in coded), exact.bits_per_value)


def requests(levels: Levels, seed: int, count: int, *, exact: bool) -> list[Request]:
    """Return prompts of 2,048 to 16,384 tokens, log-uniform."""
    draw = random.Random(seed)
    low, high = PROMPT_TOKENS
    one = levels.chunk(CHUNK_TOKENS, exact=exact)
    found, at_s = [], 0.0
    for _ in range(count):
        at_s += draw.expovariate(1 / GAP_S)
        tokens = int(low * (high / low) ** draw.random())
        terms = PlanTerms(
            draw.choice(DEADLINES_S),
            ENGINE,
            DECODE_BYTES_PER_S,
            tail_tokens=1 + tokens % CHUNK_TOKENS,
            loads_first=False,
        )
        found.append(Request(at_s, (one,) * (tokens // CHUNK_TOKENS), terms))
    return found


class Score(NamedTuple):
    """One way over one trace: share of late requests, mean seconds to the first token, and requests
    later than computing everything by more than a decision may cost.
    """

    late: float
    ttft_s: float
    worse: int


Scores = dict[str, Score]


def score(replay: Replay, prompts: Sequence[Request], trace: Trace) -> Score:
    pairs = [(request.terms, request.chunks, replay(request, trace).ttft_s) for request in prompts]
    return Score(
        mean(ttft_s > terms.deadline_s for terms, _, ttft_s in pairs),
        mean(ttft_s for _, _, ttft_s in pairs),
        sum(
            ttft_s > terms.compute_s(chunks) + terms.later_s(chunks) + COST_S
            for terms, chunks, ttft_s in pairs
        ),
    )


def compare(levels: Levels, trace: Trace, count: int, *, exact: bool, seed: int = 1) -> Scores:
    """Return the score of every way over *trace*, ours first; *seed* makes the prompts."""
    prompts = requests(levels, seed, count, exact=exact)
    loading_first = [replace(one, terms=replace(one.terms, loads_first=True)) for one in prompts]
    found = {
        OURS[0]: score(controlled(), prompts, trace),
        OURS[1]: score(controlled(), loading_first, trace),
        "recompute": score(recompute, prompts, trace),
    }
    for level in range(1 if exact else len(levels.bits)):
        found[f"level {level}"] = score(load_all(level), prompts, trace)
    return found


def _ratios(kind: Sequence[Scores]) -> tuple[float, float]:
    """Return late requests and time to first token, ours over those of the best fixed choice."""
    means = {
        way: (mean(one[way].late for one in kind), mean(one[way].ttft_s for one in kind))
        for way in kind[0]
    }
    ours = means[OURS[0]]
    late, ttft_s = map(min, zip(*(m for way, m in means.items() if way not in OURS), strict=True))
    return ours[0] / late if late else float(ours[0] > 0), ours[1] / ttft_s


def run(
    report: Report,
    levels: Levels,
    traces: Sequence[Trace],
    jumping: Sequence[Sequence[Trace]],
    count: int = REQUESTS,
) -> None:
    kinds = [
        [compare(levels, one, count, exact=False, seed=n) for n, one in enumerate(kind, 1)]
        for kind in jumping
    ]
    others = [compare(levels, trace, count, exact=False) for trace in traces]
    others += [
        compare(levels, trace, count, exact=True)
        for trace in (*traces, *(kind[0] for kind in jumping))
    ]
    worse = sum(scores[way].worse for scores in chain(*kinds, others) for way in OURS)
    late, ttft = map(max, zip(*map(_ratios, kinds), strict=True))
    bars = "the best of recompute and each level, on the worst kind of jumping traces"
    report.add("violations_vs_best_fixed", late, "late requests, over those of", bars)
    report.add("mean_ttft_vs_best_fixed", ttft, "mean time to first token, over that of", bars)
    what = f"requests later than without a store by over {COST_S} s and a chunk's or batch's time"
    report.add("worse_than_recompute", worse, what, "all traces, bar 0")


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="of each jumping trace; default 20")
    flags = parser.parse_args(argv)
    uniform = [Trace.uniform(1), Trace.uniform(2), Trace.uniform(3, 0.1, 1.0)]
    seeds = range(1, flags.seeds + 1)
    jumping = [[Trace.jumping(seed, dwell_s) for seed in seeds] for dwell_s in (0.5, 2, 8)]
    report = Report("slo")
    run(report, measured(), uniform, jumping)
    report.print(only_json=flags.json)


if __name__ == "__main__":
    main()
