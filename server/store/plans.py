"""Plans: which chunks of a prompt to load rather than compute. Pure: no clock, no I/O.

Loads run one after another while the engine computes; a chunk needs all before it.
Two kinds of plan are compared exactly; computing everything belongs to both:

* compute a head while the chunks after it load, then compute the rest: for chunks of one size on
  one tier no plan is faster (its test compares all plans);
* for a prompt on several tiers: load or compute each of its few stretches of one tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.proto.plans import LoadPlan, PlanRange, PrefillModel

MAX_STRETCHES = 6
"""With more stretches only plans of the first kind are compared: planning takes below 1 ms."""


class _Prompt(NamedTuple):
    """Running sums, from 0 on: tokens, and seconds of loading, before chunk i.

    ``lag_s``: the longest decode of the last chunk after its load.
    """

    starts: NDArray[np.int64]
    loaded_s: NDArray[np.float64]
    lag_s: float
    total: int
    prefill: PrefillModel


def plan_loads(
    tokens: Sequence[int],
    load_s: Sequence[float],
    decode_s: Sequence[float],
    chunks: int,
    total_tokens: int,
    prefill: PrefillModel,
) -> LoadPlan:
    """Return the fastest plan of both kinds; of equals, the one that loads least.

    *tokens[i]* and *load_s[i]* belong to chunk i of the available prefix; its decode takes
    *decode_s[i]* and overlaps the next load. *chunks* is how many were requested, *total_tokens*
    the length of the prompt, at least theirs.
    """
    # A pipeline of load and decode takes at most the sum of the slower stage of each chunk, plus
    # the largest faster one.
    loaded_s = np.concatenate([[0.0], np.cumsum(np.maximum(load_s, decode_s))])
    lag_s = float(np.minimum(load_s, decode_s).max(initial=0.0))
    starts = np.concatenate([[0], np.cumsum(np.array(tokens, np.int64))])
    prompt = _Prompt(starts, loaded_s, lag_s, total_tokens, prefill)
    best_s, choice = _two_cuts(prompt)
    for other in _stretched(list(zip(tokens, load_s, decode_s, strict=True))):
        other_s = _time_s(prompt, other)
        if other_s < best_s:
            best_s, choice = other_s, other
    return LoadPlan(_ranges(prompt, choice, chunks), 1000 * best_s, 1000 * _time_s(prompt, []))


Choice = list[tuple[int, int]]
"""Stretches of chunks to load, ascending, with gaps between them; the rest is computed."""


def _time_s(prompt: _Prompt, choice: Choice) -> float:
    """Return when the whole prompt is ready, in seconds: the reference for other formulas."""
    starts, loaded_s = prompt.starts, prompt.loaded_s
    engine_s = arrived_s = 0.0
    done = 0
    for first, stop in choice:
        begin = int(starts[first])
        if begin > done:
            engine_s = max(engine_s, arrived_s) + prompt.prefill.seconds(begin - done, done)
        already_s = max(0.0, arrived_s - prompt.lag_s)
        arrived_s = already_s + float(loaded_s[stop] - loaded_s[first]) + prompt.lag_s
        done = int(starts[stop])
    # The last token is computed in any case: an engine needs its output.
    rest = max(1, prompt.total - done)
    return max(engine_s, arrived_s) + prompt.prefill.seconds(rest, max(0, prompt.total - rest))


def _two_cuts(prompt: _Prompt) -> tuple[float, Choice]:
    """Return the best plan that computes chunks before *k*, loads up to *m* and computes on.

    For each m the head grows as its load shrinks: the best k is one of the two where they cross.
    """
    starts, loaded_s, prefill = prompt.starts, prompt.loaded_s, prompt.prefill
    heads_s = np.where(starts > 0, prefill.start_s + prefill.token_s * starts, 0.0)
    stops = np.arange(1, len(starts))
    crossed = np.searchsorted(heads_s + loaded_s, loaded_s[1:] + prompt.lag_s)
    rest = np.maximum(1, prompt.total - starts[1:])
    tails_s = prefill.start_s + rest * (prefill.token_s + prefill.pair_s * (prompt.total - rest))
    best_s, best = _time_s(prompt, []), []
    for cuts in (crossed, crossed - 1):
        cuts = np.clip(cuts, 0, stops - 1)
        waits_s = np.maximum(heads_s[cuts], loaded_s[1:] - loaded_s[cuts] + prompt.lag_s)
        times_s = waits_s + tails_s
        if len(times_s) and times_s.min() < best_s:
            at = int(times_s.argmin())
            best_s, best = float(times_s[at]), [(int(cuts[at]), at + 1)]
    return best_s, best


def _stretched(costs: Sequence[tuple[int, float, float]]) -> list[Choice]:
    """Return all choices over stretches of equal chunks; none with too many stretches."""
    if len(costs) <= MAX_STRETCHES:
        edges = list(range(len(costs) + 1))
    else:
        changes = [at for at in range(1, len(costs)) if costs[at] != costs[at - 1]]
        edges = [0, *changes, len(costs)]
    if not 1 < len(edges) - 1 <= MAX_STRETCHES:
        return []
    choices: list[Choice] = []
    for picks in product((False, True), repeat=len(edges) - 1):
        choices.append([])
        for first, stop in compress(pairwise(edges), picks):
            is_next = bool(choices[-1]) and choices[-1][-1][1] == first
            choices[-1].append((choices[-1].pop()[0] if is_next else first, stop))
    return choices


def _ranges(prompt: _Prompt, choice: Choice, chunks: int) -> tuple[PlanRange, ...]:
    ranges: list[PlanRange] = []
    done = 0
    for first, stop in choice:
        if first > done:
            begin, end = int(prompt.starts[done]), int(prompt.starts[first])
            head_s = prompt.prefill.seconds(end - begin, begin)
            ranges.append(PlanRange(done, first, load=False, ms=1000 * head_s))
        load_s = float(prompt.loaded_s[stop] - prompt.loaded_s[first]) + prompt.lag_s
        ranges.append(PlanRange(first, stop, load=True, ms=1000 * load_s))
        done = stop
    if done < chunks:
        begin = int(prompt.starts[done])
        rest_s = prompt.prefill.seconds(max(1, prompt.total - begin), begin)
        ranges.append(PlanRange(done, chunks, load=False, ms=1000 * rest_s))
    return tuple(ranges)
