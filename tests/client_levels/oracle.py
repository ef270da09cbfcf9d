"""The best plan there is, by going through all of them: for a handful of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.client.levels import RECOMPUTE, LevelledChunk, PlanTerms


class State(NamedTuple):
    """After some chunks: when link, decoder and engine are free, all is there, and the loss."""

    link_s: float
    decoded_s: float
    engine_s: float
    there_s: float
    distortion: float


class Best(NamedTuple):
    """The soonest end of any plan, and the least distortion of those in time, if there are."""

    soonest_s: float
    distortion: float | None


def best(chunks: Sequence[LevelledChunk], terms: PlanTerms, bytes_per_s: float) -> Best:
    """Dynamic programming over chunks in order; of states only those worse in no way are kept."""
    states = [State(0.0, 0.0, 0.0, 0.0, 0.0)]
    context = 0
    for chunk in chunks:
        floor = chunk.floor(terms.least)
        levels = range(len(chunk.end_bytes)) if floor is not None else ()
        actions = [RECOMPUTE, *(level for level in levels if level >= (floor or 0))]
        after = [_after(s, chunk, a, context, terms, bytes_per_s) for s in states for a in actions]
        states = _front(after)
        context += chunk.tokens
    in_time = [state.distortion for state in states if state.there_s <= terms.deadline_s]
    return Best(min(s.there_s for s in states), min(in_time, default=None))


def _after(
    state: State,
    chunk: LevelledChunk,
    action: int,
    context: int,
    terms: PlanTerms,
    bytes_per_s: float,
) -> State:
    link_s, decoded_s, engine_s, there_s, distortion = state
    if action == RECOMPUTE:
        engine_s = max(engine_s, there_s) + terms.prefill.seconds(chunk.tokens, context)
        return State(link_s, decoded_s, engine_s, max(there_s, engine_s), distortion)
    link_s += chunk.end_bytes[action] / bytes_per_s
    decoded_s = max(link_s, decoded_s) + chunk.raw_bytes / terms.decode_bytes_per_s
    distortion += chunk.tokens * chunk.distortion[action]
    return State(link_s, decoded_s, engine_s, max(there_s, decoded_s), distortion)


def _front(states: list[State]) -> list[State]:
    kept: list[State] = []
    for state in sorted(set(states)):
        if not any(all(a <= b for a, b in zip(one, state, strict=True)) for one in kept):
            kept.append(state)
    return kept
