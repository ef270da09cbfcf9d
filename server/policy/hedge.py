"""How far to trust each of several, by what each of them gained so far."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvstore.proto.errors import InvalidRequestError

_KEPT = 1 - 1 / 256
"""The weight that gains keep from round to round: what is best may change."""

_NO_GAP = 1e-9


class Hedge:
    """Weights of several experts, which add up to 1.

    AdaHedge (de Rooij, van Erven, Gruenwald and Koolen, "Follow the leader if you can, hedge if
    you must", J. Machine Learning Research 15, 2014, section 2): a weight is the prior one times
    exp(rate x gains), where the rate falls with what was lost so far to not having known better
    (the mixability gap). So nothing is to be set by hand: where one is always ahead all weight is
    soon on it, and where they take turns the weights stay near each other. Ours departs in two
    ways. The first experts, the *leaders*, have as much weight to begin with as all others
    together; and what was gained and lost counts a 256th less with every round.
    """

    def __init__(self, experts: int, leaders: int = 1) -> None:
        """Raises InvalidRequestError for no experts, no leaders, or more leaders than experts."""
        if experts < 1:
            raise InvalidRequestError("experts", experts, "at least 1")
        if not 1 <= leaders <= experts:
            raise InvalidRequestError("leaders", leaders, f"1 to {experts}")
        others = experts - leaders
        half = 0.5 if others else 1.0
        self.weights = [half / leaders] * leaders + [half / max(1, others)] * others
        self._priors = tuple(self.weights)
        self._scale = -math.log(min(self._priors))
        self._gains = [0.0] * experts
        self._gap = 0.0

    def learn(self, gains: Sequence[float]) -> None:
        """Take note of what each gained in a round, in any unit, and weigh them anew."""
        if len(gains) != len(self._gains):
            raise InvalidRequestError("gains", len(gains), f"one for each of {len(self._gains)}")
        mine = sum(weight * gain for weight, gain in zip(self.weights, gains, strict=True))
        self._gap = _KEPT * self._gap + max(0.0, self._mix(gains) - mine)
        self._gains = [_KEPT * old + new for old, new in zip(self._gains, gains, strict=True)]
        best = max(self._gains)
        parts = [
            prior * self._trust(gain - best)
            for prior, gain in zip(self._priors, self._gains, strict=True)
        ]
        self.weights = [part / sum(parts) for part in parts]

    def _mix(self, gains: Sequence[float]) -> float:
        """Return what the weights gained as the rate has it: the best, where that has no end."""
        alive = [pair for pair in zip(self.weights, gains, strict=True) if pair[0] > 0.0]
        best = max(gain for _, gain in alive)
        if self._gap <= _NO_GAP or not self._scale:
            return best
        shares = sum(weight * self._trust(gain - best) for weight, gain in alive)
        return best + math.log(shares) * self._gap / self._scale

    def _trust(self, behind: float) -> float:
        """Return how much is left of a weight that is *behind* the best, 0 or less."""
        if self._gap <= _NO_GAP:
            return float(not behind)
        return math.exp(self._scale * behind / self._gap)
