"""Traces of tokens replayed on a cache of states: hybrid models, whose prefixes match exactly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from kvstore.cli.simulate.simulator import Outcome, Terms, parse_capacity
from kvstore.cli.simulate.state_replay import HYBRID_POLICIES, States, make_states
from kvstore.cli.trace_files import SegmentLine
from kvstore.cli.trace_tokens import TokenStreams
from kvstore.server.eviction.states.cache import NO_GHOSTS, StateCache
from kvstore.server.eviction.states.ranks import LruRank
from kvstore.server.eviction.states.tree import HYBRID_7B

STATE_POLICIES = HYBRID_POLICIES

_NO_LIMIT_BYTES = 1 << 60


class StateSimulator:
    """A trace of tokens, for the model of policy.md's constants (``HYBRID_7B``)."""

    def __init__(self, lines: Sequence[SegmentLine]) -> None:
        self._lines = lines

    @cached_property
    def footprint_bytes(self) -> int:
        """What a cache without a limit holds in the end."""
        cache = StateCache(HYBRID_7B, _NO_LIMIT_BYTES, NO_GHOSTS, LruRank)
        self._play(cache)
        return cache.tree.size_bytes

    def run(self, terms: Terms) -> Outcome:
        """Replay the trace. Raises InvalidRequestError for a policy that has no form for states."""
        footprint_bytes = self.footprint_bytes if "%" in terms.capacity else 0
        capacity_bytes = parse_capacity(terms.capacity, footprint_bytes)
        states = make_states(terms.policy, HYBRID_7B, capacity_bytes)
        hits, spent_s = self._play(states)
        first = len(self._lines) // 2 if terms.from_half else 0
        asked = sum(line.input_tokens for line in self._lines[first:])
        return Outcome(
            policy=terms.policy,
            capacity_bytes=capacity_bytes,
            token_hit_rate=sum(hits[first:]) / asked if asked else 0.0,
            flops_saved=float(sum(HYBRID_7B.flops(hit) for hit in hits[first:])),
            requests_per_s=len(hits) / max(spent_s, 1e-9),
        )

    def _play(self, states: States) -> tuple[list[int], float]:
        """Return the tokens hit of each prompt, and the seconds that the cache took."""
        streams = TokenStreams()
        hits: list[int] = []
        spent_s = 0.0
        for line in self._lines:
            tokens = streams.join((*line.inputs, line.output)).astype(np.int32, copy=False)
            started = time.perf_counter()
            hits.append(states.request(tokens, line.input_tokens, line.time_s))
            spent_s += time.perf_counter() - started
        return hits, spent_s
