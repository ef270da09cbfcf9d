"""Token traces replayed against a cache of states: the simulator of hybrid models."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.states.cache import MakeRank, StateCache, States
from kvstore.server.eviction.states.density import HitDensityRank
from kvstore.server.eviction.states.ghosts import NO_GHOSTS, GhostLimits
from kvstore.server.eviction.states.hybrid_model import HybridModel
from kvstore.server.eviction.states.ranks import LeafLruRank, LruRank
from kvstore.server.eviction.states.tree import Tokens
from kvstore.server.eviction.states.tuning import MarconiStates


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
