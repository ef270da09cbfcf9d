"""Traces of tokens replayed on a cache of states: hybrid models, whose prefixes match exactly.

No server has this cache: it is what bench.policy_hybrid compares with published systems.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from kvstore.cli.simulate import SegmentLine, Tokens, tokens_of
from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.states.cache import NO_GHOSTS, GhostLimits, MakeRank, StateCache
from kvstore.server.eviction.states.ranks import HitDensityRank, LeafLruRank, LruRank, MarconiRank
from kvstore.server.eviction.states.tree import HYBRID_7B, HybridModel

DEFAULT_HYBRID_POLICY = "hit_density"
RING_REQUESTS = 2048
RING_TOKENS = 1 << 23
_ALPHAS = tuple(step / 10 for step in range(21))
_WINDOW_PER_REQUEST = 5
_SCORED_REQUESTS = 500


class StateRequest(NamedTuple):
    """One request of a trace: its prompt and then its answer, int32 [n]."""

    tokens: Tokens
    prompt_tokens: int
    time_s: float


class MarconiStates:
    """Marconi as published: no memory of what was evicted, and alpha 0 until it is tuned.

    After its first eviction, at n requests, it goes on to 5 n, replays what it recorded from an
    empty cache with each alpha of 0, 0.1, ..., 2, and keeps the one that saved most FLOPs over
    the last 500 requests, the smallest of equals (Pan et al., MLSys 2025, section 4.3). It is
    tuned once. At most the last 2048 requests and 2^23 tokens of them are recorded, where the
    paper records all. The request that tunes takes as long as 21 replays.
    """

    def __init__(self, model: HybridModel, capacity_bytes: int) -> None:
        self._model = model
        self._capacity_bytes = capacity_bytes
        self.cache = self._cache(0.0)
        self.alpha = 0.0
        """The weight of FLOPs saved per byte, now."""
        self._recent: deque[StateRequest] = deque()
        self._recent_tokens = 0
        self._requests = 0
        self._tune_at = 0
        self.tuned = False

    def _cache(self, alpha: float) -> StateCache:
        return StateCache(
            self._model, self._capacity_bytes, NO_GHOSTS, lambda tree: MarconiRank(tree, alpha)
        )

    def request(self, tokens: Tokens, prompt_tokens: int, now_s: float) -> int:
        """Serve a request, as ``StateCache.request`` does."""
        reused = self.cache.request(tokens, prompt_tokens, now_s)
        if self.tuned:
            return reused
        self._requests += 1
        self._recent.append(StateRequest(tokens, prompt_tokens, now_s))
        self._recent_tokens += len(tokens)
        while len(self._recent) > RING_REQUESTS or self._recent_tokens > RING_TOKENS:
            self._recent_tokens -= len(self._recent.popleft().tokens)
        if not self._tune_at and self.cache.evicted:
            self._tune_at = _WINDOW_PER_REQUEST * self._requests
        if self._requests == self._tune_at:
            self.alpha = max(_ALPHAS, key=self._saved_flops)  # of equals, the first
            rank = self.cache.rank
            assert isinstance(rank, MarconiRank)
            rank.alpha = self.alpha
            self.tuned = True
            self._recent.clear()
        return reused

    def _saved_flops(self, alpha: float) -> int:
        cache = self._cache(alpha)
        saved = [self._model.flops(cache.request(*one)) for one in self._recent]
        return sum(saved[-_SCORED_REQUESTS:])


States: TypeAlias = StateCache | MarconiStates


def _ranked(make_rank: MakeRank) -> Callable[[HybridModel, int], States]:
    return lambda model, size: StateCache(model, size, GhostLimits.of(model, size), make_rank)


_MAKERS: dict[str, Callable[[HybridModel, int], States]] = {
    "lru": _ranked(LruRank),
    "sglang": lambda model, size: StateCache(model, size, NO_GHOSTS, LeafLruRank),
    "marconi": MarconiStates,
    "hit_density": _ranked(HitDensityRank),
}

HYBRID_POLICIES = tuple(_MAKERS)
"""The policies that have a form for states."""


def make_states(policy: str, model: HybridModel, capacity_bytes: int) -> States:
    """Return an empty cache of states. Raises InvalidRequestError."""
    if policy not in _MAKERS:
        fix = f"has no form for states of a hybrid model; one of {', '.join(_MAKERS)} has"
        raise InvalidRequestError("policy", policy, fix)
    if capacity_bytes < 0:
        raise InvalidRequestError("capacity_bytes", capacity_bytes, "at least 0")
    return _MAKERS[policy](model, capacity_bytes)


def state_requests(lines: Iterable[SegmentLine]) -> Iterator[StateRequest]:
    """Yield the requests of a trace of token segments."""
    for line in lines:
        tokens = tokens_of((*line.inputs, line.output))
        yield StateRequest(tokens, line.input_tokens, line.time_s)


def play(requests: Iterable[StateRequest], states: States) -> tuple[list[int], float]:
    """Return the tokens hit of each prompt, and the seconds that the cache took."""
    hits: list[int] = []
    spent_s = 0.0
    for one in requests:
        started = time.perf_counter()
        hits.append(states.request(*one))
        spent_s += time.perf_counter() - started
    return hits, spent_s


def replay_states(lines: Iterable[SegmentLine], policy: str, capacity_bytes: int) -> float:
    """Return the share of the prompts' tokens hit in a trace of tokens, on ``HYBRID_7B``."""
    lines = list(lines)
    hits, _ = play(state_requests(lines), make_states(policy, HYBRID_7B, capacity_bytes))
    return sum(hits) / max(1, sum(line.input_tokens for line in lines))
