"""Marconi's alpha, tuned once while it serves: what would have saved most, replayed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from typing_extensions import override

from kvstore.server.eviction.states.cache import StateCache, States
from kvstore.server.eviction.states.ghosts import NO_GHOSTS
from kvstore.server.eviction.states.hybrid_model import HybridModel
from kvstore.server.eviction.states.ranks import MarconiRank
from kvstore.server.eviction.states.tree import CheckpointTree, Tokens

_ALPHAS = tuple(step / 10 for step in range(21))
_WINDOW_PER_REQUEST = 5
_SCORED_REQUESTS = 500
RING_REQUESTS = 2048
RING_TOKENS = 1 << 23


@dataclass(frozen=True)
class _Recorded:
    tokens: Tokens
    prompt_tokens: int
    now_s: float


class MarconiStates(States):
    """Marconi as published: no memory of what was evicted, and alpha 0 until it is tuned.

    After its first eviction, at n requests, it goes on to 5 n, replays what it recorded from an
    empty cache with each alpha of 0, 0.1, ..., 2, and keeps the one that saved most FLOPs over
    the last 500 requests, the smallest of equals (Pan et al., MLSys 2025, section 4.3). It is
    tuned once. At most the last 2048 requests and 2^23 tokens of them are recorded, where the
    paper records all. The request that tunes takes as long as 21 replays.
    """

    def __init__(self, model: HybridModel, capacity_bytes: int) -> None:
        self._rank: MarconiRank
        self._model = model
        self._capacity_bytes = capacity_bytes
        self.cache = StateCache(model, capacity_bytes, NO_GHOSTS, self._make_rank)
        self._ring: deque[_Recorded] = deque()
        self._ring_tokens = 0
        self._requests = 0
        self._tune_at = 0
        self.tuned = False

    def _make_rank(self, tree: CheckpointTree) -> MarconiRank:
        self._rank = MarconiRank(tree)
        return self._rank

    @property
    def alpha(self) -> float:
        """The weight of FLOPs saved per byte, now."""
        return self._rank.alpha

    @override
    def request(self, tokens: Tokens, prompt_tokens: int, now_s: float) -> int:
        reused = self.cache.request(tokens, prompt_tokens, now_s)
        if self.tuned:
            return reused
        self._requests += 1
        self._record(_Recorded(tokens, prompt_tokens, now_s))
        if not self._tune_at and self.cache.evicted:
            self._tune_at = _WINDOW_PER_REQUEST * self._requests
        if self._requests == self._tune_at:
            self._rank.alpha = max(_ALPHAS, key=self._saved_flops)  # of equals, the first
            self.tuned = True
            self._ring.clear()
        return reused

    def _record(self, one: _Recorded) -> None:
        self._ring.append(one)
        self._ring_tokens += len(one.tokens)
        while len(self._ring) > RING_REQUESTS or self._ring_tokens > RING_TOKENS:
            self._ring_tokens -= len(self._ring.popleft().tokens)

    def _saved_flops(self, alpha: float) -> int:
        model = self._model
        cache = StateCache(
            model, self._capacity_bytes, NO_GHOSTS, lambda tree: MarconiRank(tree, alpha)
        )
        saved = [
            model.flops(cache.request(one.tokens, one.prompt_tokens, one.now_s))
            for one in self._ring
        ]
        return sum(saved[-_SCORED_REQUESTS:])
