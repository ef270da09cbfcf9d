"""Fit the scorer of ``LearnedEviction``.

    python -m data.traces.train_scorer TRACE... --out FILE

Replays traces on a tier of each of a few sizes, under LRU, and looks at the oldest leaves
whenever some have to go: was the chunk used again before one is evicted on average, twice over?
Boosted stumps are fitted to the answers (Friedman, Annals of Statistics 29(5), 2001, algorithm 5).
The same traces give the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from kvstore.cli.simulate import BlockReplay, BlockTrace, make_blocks, read_trace
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.learned import (
    FEATURES,
    VERSION,
    Features,
    LearnedEviction,
    Stump,
    StumpScorer,
    weights_checksum,
)
from kvstore.server.eviction.policy import Rows

SHARES = (0.02, 0.05, 0.1, 0.25)
"""Sizes of the tier, as shares of the trace's blocks."""

BLOCK_BYTES = 1 << 16
"""Any number will do: sizes are all the same, so no stump asks for them."""

STUMPS = 48
BINS = 32
RATE = 0.3
MOST_SAMPLES = 60_000
_SHRINK = 10.0

Labels = NDArray[np.float64]
Samples = tuple[Features, Labels]


class _Recorder(LearnedEviction):
    """LRU that takes down the features of its candidates and when each row was used."""

    def __init__(self, history: AccessHistory) -> None:
        super().__init__(history)
        self.uses: dict[int, list[float]] = {}
        self.seen: list[tuple[Features, list[int], float]] = []
        self.ages_s: list[float] = []

    @override
    def _inserted(self, rows: Rows, size_bytes: int, now_s: float) -> None:
        super()._inserted(rows, size_bytes, now_s)
        for row in rows.tolist():
            self.uses.setdefault(row, []).append(now_s)

    @override
    def _use(self, rows: Rows, now_s: float) -> None:
        super()._use(rows, now_s)
        for row in rows.tolist():
            self.uses[row].append(now_s)

    @override
    def _decide(self, pool: list[int], now_s: float) -> list[int] | None:
        found = self.features(pool, now_s)
        self.seen.append((found, pool, now_s))
        self.ages_s.append(float(found[0, 0]))
        return pool[: max(1, len(pool) // 4)]


def flops_of_blocks(count: int, tokens: int) -> NDArray[np.float64]:
    """Return the prefill FLOPs of blocks 0 to *count* - 1 of a model like Llama-3.1-8B."""
    middle = tokens * np.arange(count, dtype=np.float64) + tokens / 2
    return tokens * (1.6e10 + 524_288.0 * middle)


def record(trace: BlockTrace, share: float) -> Samples:
    """Return features and labels, 1 for a chunk that is used again in time."""
    history = AccessHistory(trace.block_tokens)
    policy = _Recorder(history)
    places = max(1, int(trace.blocks * share))
    replay = BlockReplay(policy, history, places, BLOCK_BYTES, ghosts=trace.blocks)
    longest = max(len(one.chain) for one in trace.requests)
    flops = flops_of_blocks(longest, trace.block_tokens)
    for one in trace.requests:
        facts = InsertInfo(one.is_full, prompt_chunks=len(one.chain))
        replay.request(one.chain, one.time_s, facts, flops[: len(one.chain)])
    if not policy.seen:
        return np.empty((0, len(FEATURES))), np.empty(0)
    patience_s = 2.0 * float(np.mean(policy.ages_s))
    features = np.concatenate([found for found, _, _ in policy.seen])
    labels = [
        _is_used(policy.uses[row], now_s, patience_s)
        for _, rows, now_s in policy.seen
        for row in rows
    ]
    return features, np.array(labels, np.float64)


def _is_used(uses_s: Sequence[float], after_s: float, within_s: float) -> bool:
    at = bisect_right(uses_s, after_s)
    return at < len(uses_s) and uses_s[at] <= after_s + within_s


def thin(samples: Samples, most: int) -> Samples:
    """Return at most *most* samples, evenly taken."""
    features, labels = samples
    at = np.linspace(0, len(labels) - 1, min(most, len(labels))).astype(np.intp)
    return features[at], labels[at]


def fit(samples: Samples, stumps: int = STUMPS) -> StumpScorer:
    """Boost stumps on the logistic loss; limits are quantiles of each feature."""
    features, labels = samples
    if not 0.0 < labels.mean() < 1.0:
        raise SystemExit("give a trace in which some chunks are used again and some are not")
    limits = [_limits(features[:, column]) for column in range(len(FEATURES))]
    chance = float(labels.mean())
    fitted = [Stump(0, 0.0, *[float(np.log(chance / (1.0 - chance)))] * 2)]
    odds = np.full(len(labels), fitted[0].low)
    for _ in range(stumps):
        found = 1.0 / (1.0 + np.exp(-odds))
        stump = _best_stump(features, limits, labels - found, found * (1.0 - found))
        if stump is None:
            break
        fitted.append(stump)
        odds += np.where(features[:, stump.feature] <= stump.limit, stump.low, stump.high)
    return StumpScorer(fitted)


def _limits(column: NDArray[np.float64]) -> NDArray[np.float64]:
    finite = column[np.isfinite(column)]
    if not len(finite):
        return np.empty(0)
    found = np.unique(np.quantile(finite, np.linspace(0.0, 1.0, BINS + 1), method="lower"))
    return found if len(finite) < len(column) else found[:-1]


def _best_stump(
    features: Features,
    limits: list[NDArray[np.float64]],
    slope: NDArray[np.float64],
    curve: NDArray[np.float64],
) -> Stump | None:
    """Return the stump that lowers the loss most, one Newton step on either side."""
    best_gain, best = 1e-9, None
    for column, candidates in enumerate(limits):
        if not len(candidates):
            continue
        bins = np.searchsorted(candidates, features[:, column])
        slopes = np.bincount(bins, slope, len(candidates) + 1).cumsum()
        curves = np.bincount(bins, curve, len(candidates) + 1).cumsum()
        low, low_curve = slopes[:-1], curves[:-1] + _SHRINK
        high, high_curve = slopes[-1] - low, curves[-1] - curves[:-1] + _SHRINK
        gains = low**2 / low_curve + high**2 / high_curve - slopes[-1] ** 2 / (curves[-1] + _SHRINK)
        at = int(gains.argmax())
        if gains[at] > best_gain:
            best_gain = float(gains[at])
            steps = RATE * low[at] / low_curve[at], RATE * high[at] / high_curve[at]
            best = Stump(column, *(float(f"{value:.6g}") for value in (candidates[at], *steps)))
    return best


def train(traces: Sequence[Path], block_tokens: int) -> StumpScorer:
    """Fit a scorer to all of *traces*, each with the same number of samples at most."""
    parts = []
    for path in traces:
        trace = make_blocks(read_trace(path), block_tokens)
        found = [record(trace, share) for share in SHARES]
        most = MOST_SAMPLES // (len(traces) * len(SHARES))
        parts += [thin(samples, most) for samples in found if len(samples[1])]
    features, labels = zip(*parts, strict=True)
    return fit((np.concatenate(features), np.concatenate(labels)))


def to_json(scorer: StumpScorer) -> str:
    """Return the weights as text, with their version and a checksum."""
    body = {"version": VERSION, "features": list(FEATURES), "stumps": list(scorer.stumps)}
    text = json.dumps({"sha256": weights_checksum(body), **body})
    return text.replace("], [", "],\n[").replace(', "', ',\n"')


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line, train, and write the weights as JSON."""
    parser = argparse.ArgumentParser(prog="python -m data.traces.train_scorer", description=__doc__)
    parser.add_argument("trace", type=Path, nargs="+", help="JSONL, as kvstore simulate reads it")
    parser.add_argument("--out", type=Path, required=True, help="where the weights go")
    parser.add_argument("--block-tokens", type=int, default=256)
    options = parser.parse_args(argv)
    scorer = train(options.trace, options.block_tokens)
    options.out.write_text(to_json(scorer) + "\n")


if __name__ == "__main__":
    main()
