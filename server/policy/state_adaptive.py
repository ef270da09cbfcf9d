"""The better of two ranks over states, as shadows of the cache find out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from typing_extensions import override

from kvstore.server.policy.checkpoint_columns import Slots
from kvstore.server.policy.checkpoint_ghosts import GhostLimits
from kvstore.server.policy.checkpoint_ranks import CheckpointRank, Scores
from kvstore.server.policy.checkpoints import CheckpointTree, Node, Tokens
from kvstore.server.policy.hybrid_model import HybridModel
from kvstore.server.policy.state_cache import MakeRank, StateCache, States

_WINDOW_REQUESTS = 400.0
_HYSTERESIS = 0.1


class SwitchRank(CheckpointRank):
    """Tells several ranks of everything and does what the one called ``chosen`` says."""

    def __init__(self, tree: CheckpointTree, ranks: Mapping[str, MakeRank]) -> None:
        super().__init__(tree)
        self._ranks = {name: make(tree) for name, make in ranks.items()}
        self.chosen = next(iter(ranks))

    @property
    def _rank(self) -> CheckpointRank:
        return self._ranks[self.chosen]

    @property
    def spares_new(self) -> bool:  # type: ignore[override]
        """As the chosen rank has it."""
        return self._rank.spares_new

    @override
    def asked(self, node: Node, now_s: float) -> None:
        for rank in self._ranks.values():
            rank.asked(node, now_s)

    @override
    def used(self, node: Node, path: Sequence[Node]) -> None:
        for rank in self._ranks.values():
            rank.used(node, path)

    @override
    def kept(self, node: Node, now_s: float) -> None:
        for rank in self._ranks.values():
            rank.kept(node, now_s)

    @override
    def walked(self, path: Sequence[Node], now_s: float) -> None:
        for rank in self._ranks.values():
            rank.walked(path, now_s)

    @override
    def forgot(self, node: Node, now_s: float) -> None:
        for rank in self._ranks.values():
            rank.forgot(node, now_s)

    @override
    def answered(self, now_s: float) -> None:
        for rank in self._ranks.values():
            rank.answered(now_s)

    @override
    def victim(self, spared: Collection[int], now_s: float) -> Node | None:
        return self._rank.victim(spared, now_s)

    @override
    def scores(self, slots: Slots, now_s: float) -> Scores:
        return self._rank.scores(slots, now_s)


class AdaptiveStates(States):
    """Serves by the rank whose shadow hit more of late, the first one until another is better.

    A shadow is a whole cache of this size without its bytes: a request costs as much as with
    one rank for each of them, and once more. A prompt's tokens count for some 400 requests; the
    rank changes when another's are a tenth more.
    """

    def __init__(
        self, model: HybridModel, capacity_bytes: int, ranks: Mapping[str, MakeRank]
    ) -> None:
        ghosts = GhostLimits.of(model, capacity_bytes)
        self._shadows = {
            name: StateCache(model, capacity_bytes, ghosts, make) for name, make in ranks.items()
        }
        self.recent = dict.fromkeys(ranks, 0.0)
        """Tokens that each shadow hit of late."""
        self.switches = 0
        self._switch: SwitchRank
        self._ranks = ranks
        self.cache = StateCache(model, capacity_bytes, ghosts, self._make_rank)

    def _make_rank(self, tree: CheckpointTree) -> SwitchRank:
        self._switch = SwitchRank(tree, self._ranks)
        return self._switch

    @property
    def chosen(self) -> str:
        """The name of the rank that is followed now."""
        return self._switch.chosen

    @override
    def request(self, tokens: Tokens, prompt_tokens: int, now_s: float) -> int:
        for name, shadow in self._shadows.items():
            hit = shadow.request(tokens, prompt_tokens, now_s)
            self.recent[name] += hit - self.recent[name] / _WINDOW_REQUESTS
        best = max(self.recent, key=self.recent.__getitem__)  # of equals, the first
        if self.recent[best] > self.recent[self.chosen] * (1.0 + _HYSTERESIS):
            self._switch.chosen = best
            self.switches += 1
        return self.cache.request(tokens, prompt_tokens, now_s)
