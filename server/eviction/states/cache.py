"""One cache of states: a tree, what it remembers, the admission and a rank, under a capacity."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from typing_extensions import override

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.access_history import SteadyClock
from kvstore.server.eviction.states.admission import Checkpoints, insert_speculatively
from kvstore.server.eviction.states.ghosts import GhostLimits, Ghosts
from kvstore.server.eviction.states.hybrid_model import HybridModel
from kvstore.server.eviction.states.ranks import CheckpointRank
from kvstore.server.eviction.states.tree import CheckpointTree, Match, Node, Tokens

MakeRank = Callable[[CheckpointTree], CheckpointRank]


class States(ABC):
    """Whatever keeps states for requests."""

    @abstractmethod
    def request(self, tokens: Tokens, prompt_tokens: int, now_s: float) -> int:
        """Serve a request: *tokens* [n] are its prompt, *prompt_tokens* of them, and the answer.

        Returns how many tokens of the prompt need no prefill. ``now_s`` may jump, either way.
        Raises InvalidRequestError for more prompt than tokens, and for times that are no numbers.
        """


class StateCache(States):
    """Keeps states of the positions that admission names, until the rank gives them up.

    The size is at most the capacity whenever a call returns. A state that cannot fit, be it
    alone or beside what is pinned, is refused and takes nothing with it.
    """

    def __init__(
        self,
        model: HybridModel,
        capacity_bytes: int,
        ghosts: GhostLimits,
        make_rank: MakeRank,
    ) -> None:
        if capacity_bytes < 0:
            raise InvalidRequestError("capacity_bytes", capacity_bytes, "at least 0")
        self.capacity_bytes = capacity_bytes
        self.tree = CheckpointTree(model)
        self.rank = make_rank(self.tree)
        self.ghosts = Ghosts(self.tree, ghosts)
        self.refused = 0
        """States that were not kept as they would not have fitted."""
        self.evicted = 0
        self._clock = SteadyClock()

    @override
    def request(self, tokens: Tokens, prompt_tokens: int, now_s: float) -> int:
        if not 0 <= prompt_tokens <= len(tokens):
            fix = f"at least 0 and at most the {len(tokens)} tokens there are"
            raise InvalidRequestError("prompt_tokens", prompt_tokens, fix)
        if not math.isfinite(now_s):
            raise InvalidRequestError("now_s", now_s, "finite seconds")
        tree, rank, now_s = self.tree, self.rank, self._clock.time_s(now_s)
        tick = tree.next_tick()
        match = tree.match(tokens)
        known = [node for node in match.path if node.depth <= prompt_tokens]
        start = next((node for node in reversed(known) if node.held), None)
        turn = self._ask(known, now_s)
        if start is not None:
            rank.used(start, known)
        reused = start.depth if start is not None else 0
        if len(tokens):
            found = insert_speculatively(tree, match, tokens, reused)
            found.last.end(turn)
            path = self._path(match, found)
            self.ghosts.touch(path, tick)
            kept = [node for node in found.nodes if self._keep(node, now_s)]
            rank.walked(path, now_s)
            self._make_room(kept, now_s)
        self.ghosts.trim(partial(rank.forgot, now_s=now_s))
        rank.answered(now_s)
        return reused

    def _ask(self, path: list[Node], now_s: float) -> int:
        """Count the use of the last position that ever had a state; return the next turn."""
        known = self.tree.known
        node = next((one for one in reversed(path) if known.ever[one.number]), None)
        if node is None:
            return 0
        self.rank.asked(node, now_s)
        node.hit()
        known.last_s[node.number] = now_s
        return node.turn + 1 if node.ends else 0

    def _path(self, match: Match, found: Checkpoints) -> list[Node]:
        path = match.path.copy()
        for node in (found.leaves, found.last):
            if node != self.tree.root and node not in path[-1:]:
                path.append(node)
        return path

    def _keep(self, node: Node, now_s: float) -> bool:
        tree = self.tree
        if not node.held:
            needed = tree.pinned_bytes(node) if tree.pinned else tree.bytes_alone(node)
            if needed > self.capacity_bytes:
                self.refused += 1
                return False
            tree.hold(node)
        self.rank.kept(node, now_s)
        tree.known.ever[node.number] = True
        tree.known.last_s[node.number] = now_s
        return True

    def _make_room(self, kept: list[Node], now_s: float) -> None:
        tree, rank = self.tree, self.rank
        spared = [node.slot for node in kept[-1:]] if rank.spares_new else []
        while tree.size_bytes > self.capacity_bytes:
            node = rank.victim(spared, now_s)
            assert node is not None, "what was kept fits beside what is pinned"
            tree.drop(node)
            self.evicted += 1
            self.ghosts.enter(node)
