"""Token traces replayed against a cache of states: the simulator of hybrid models."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.states.cache import NO_GHOSTS, GhostLimits, MakeRank, StateCache
from kvstore.server.eviction.states.ranks import HitDensityRank, LeafLruRank, LruRank, MarconiRank
from kvstore.server.eviction.states.tree import HybridModel, Tokens

_ALPHAS = tuple(step / 10 for step in range(21))
_WINDOW_PER_REQUEST = 5
_SCORED_REQUESTS = 500
RING_REQUESTS = 2048
RING_TOKENS = 1 << 23


@dataclass(frozen=True)
class TokenRequest:
    """One request of a trace: what was asked and answered, both int32 [n], and when."""

    ts_s: float
    input_tokens: Tokens
    output_tokens: Tokens

    def __post_init__(self) -> None:
        if not np.isfinite(self.ts_s):
            raise InvalidRequestError("ts_s", self.ts_s, "finite seconds")
        for name in ("input_tokens", "output_tokens"):
            tokens = getattr(self, name)
            if tokens.ndim != 1 or tokens.dtype != np.int32:
                shape = f"{tokens.dtype} {tokens.shape}"
                raise InvalidRequestError(name, shape, "one dimension of int32")

    @property
    def tokens(self) -> Tokens:
        """The input and then the output."""
        return np.concatenate([self.input_tokens, self.output_tokens])


@dataclass(frozen=True)
class StateReplayResult:
    """What came of a replay. The rate is of this machine; the rest is the same everywhere."""

    policy: str
    capacity_bytes: int
    token_hit_rate: float
    """Input tokens that needed no prefill, of all input tokens."""
    flops_saved: float
    requests: int
    requests_per_s: float


class States(Protocol):
    """Whatever keeps states for requests."""

    def request(self, tokens: Tokens, prompt_tokens: int, now_s: float) -> int:
        """Serve a request, as ``StateCache.request`` does."""
        ...


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
        self._recent: deque[tuple[Tokens, int, float]] = deque()
        """What ``request`` was called with."""
        self._recent_tokens = 0
        self._requests = 0
        self._tune_at = 0
        self.tuned = False

    def _cache(self, alpha: float) -> StateCache:
        return StateCache(
            self._model, self._capacity_bytes, NO_GHOSTS, lambda tree: MarconiRank(tree, alpha)
        )

    def request(self, tokens: Tokens, prompt_tokens: int, now_s: float) -> int:
        """See States."""
        reused = self.cache.request(tokens, prompt_tokens, now_s)
        if self.tuned:
            return reused
        self._requests += 1
        self._recent.append((tokens, prompt_tokens, now_s))
        self._recent_tokens += len(tokens)
        while len(self._recent) > RING_REQUESTS or self._recent_tokens > RING_TOKENS:
            self._recent_tokens -= len(self._recent.popleft()[0])
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


def _ranked(model: HybridModel, capacity_bytes: int, make_rank: MakeRank) -> States:
    return StateCache(model, capacity_bytes, GhostLimits.of(model, capacity_bytes), make_rank)


_MAKERS: dict[str, Callable[[HybridModel, int], States]] = {
    "lru": lambda model, size: _ranked(model, size, LruRank),
    "sglang": lambda model, size: StateCache(model, size, NO_GHOSTS, LeafLruRank),
    "marconi": MarconiStates,
    "hit_density": lambda model, size: _ranked(model, size, HitDensityRank),
}

HYBRID_POLICIES = tuple(_MAKERS)
"""The policies that have a form for states."""

DEFAULT_HYBRID_POLICY = "hit_density"


def make_states(policy: str, model: HybridModel, capacity_bytes: int) -> States:
    """Return an empty cache of states. Raises InvalidRequestError."""
    maker = _MAKERS.get(policy)
    if maker is None:
        fix = f"has no form for states of a hybrid model; one of {', '.join(_MAKERS)} has"
        raise InvalidRequestError("policy", policy, fix)
    if capacity_bytes < 0:
        raise InvalidRequestError("capacity_bytes", capacity_bytes, "at least 0")
    return maker(model, capacity_bytes)


class StateReplay:
    """Serves a trace from an empty cache and counts. Raises InvalidRequestError."""

    def __init__(self, model: HybridModel, policy: str, capacity_bytes: int) -> None:
        self._states = make_states(policy, model, capacity_bytes)
        self._model = model
        self._policy = policy
        self._capacity_bytes = capacity_bytes

    def run(self, requests: Iterable[TokenRequest]) -> StateReplayResult:
        """Replay *requests*, in their order, and say what was saved; outputs are not counted.

        A request that asks for nothing is one of the requests, and counts for no tokens.
        """
        hit = asked = flops = count = 0
        spent_s = 0.0
        for one in requests:
            tokens, prompt_tokens = one.tokens, len(one.input_tokens)
            begin_s = time.perf_counter()
            reused = self._states.request(tokens, prompt_tokens, one.ts_s)
            spent_s += time.perf_counter() - begin_s
            hit += reused
            asked += prompt_tokens
            flops += self._model.flops(reused)
            count += 1
        return StateReplayResult(
            policy=self._policy,
            capacity_bytes=self._capacity_bytes,
            token_hit_rate=hit / asked if asked else 0.0,
            flops_saved=float(flops),
            requests=count,
            requests_per_s=count / spent_s if spent_s > 0 else 0.0,
        )
