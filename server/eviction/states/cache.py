"""One cache of states: which positions get one, what is remembered, and the limits of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.access_history import SteadyClock
from kvstore.server.eviction.states.ranks import LruRank
from kvstore.server.eviction.states.tree import CheckpointTree, HybridModel, Match, Node, Tokens

TOKENS_PER_KEPT = 16
"""Tokens remembered for each one that the capacity has KV for: 64 bytes beside 65,536."""

NODES_PER_STATE = 64
"""Nodes remembered for each state that the capacity has room for: 300 bytes each beside 26.8 MB."""

GHOST_NODES = 1 << 18
"""The same, whatever the capacity."""


class GhostLimits(NamedTuple):
    """What may be remembered beyond resident states; 0 of anything is no ghosts at all.

    The ghosts of the reference are without limit. Tokens are what they cost: four bytes each.
    """

    nodes: int
    tokens: int

    @classmethod
    def of(cls, model: HybridModel, capacity_bytes: int) -> GhostLimits:
        """Return the limits that go with a capacity."""
        nodes = NODES_PER_STATE * capacity_bytes // model.state_bytes
        tokens = TOKENS_PER_KEPT * capacity_bytes // model.kv_bytes_per_token
        return cls(min(nodes, GHOST_NODES), tokens)


NO_GHOSTS = GhostLimits(0, 0)


class Ghosts:
    """The nodes of a tree without a state, in the order of their last use.

    A node with two children or more stays whatever its age, as only it keeps them apart; there
    are fewer of those than there are leaves. Each ghost has at most one entry in the queue.
    """

    def __init__(self, tree: CheckpointTree, limits: GhostLimits) -> None:
        self._tree = tree
        self.limits = limits
        self._queue: list[Node] = []
        """A heap."""

    def touch(self, nodes: Iterable[Node]) -> None:
        """Take note that *nodes* were used just now."""
        for node in nodes:
            node.tick = self._tree.tick
            self.enter(node)

    def enter(self, node: Node) -> None:
        """Take note of a node that may have no state any more; its age is what it was."""
        if node.parent and not node.held and not node.queued:
            node.queued = node.tick
            heappush(self._queue, node)

    def trim(self, forgot: Callable[[Node], None]) -> None:
        """Forget the oldest within the limits; *forgot* is called with each just before."""
        while self._queue and self._is_over():
            node = heappop(self._queue)
            queued, node.queued = node.queued, 0
            above = node.parent
            if above is None or node.held or len(node.children) > 1:
                continue
            if queued != node.tick:
                self.enter(node)
                continue
            forgot(node)
            self._tree.forget(node)
            self.enter(above)

    def _is_over(self) -> bool:
        tree, limits = self._tree, self.limits
        ghosts = tree.nodes - tree.resident
        return ghosts > limits.nodes or tree.tokens - tree.kept_tokens > limits.tokens


class Checkpoints(NamedTuple):
    """The positions of one request whose states are to be kept: two at most."""

    leaves: Node
    """Where the request leaves what was known; the root if it shares nothing."""
    last: Node
    """Where it ends."""
    branch: Node | None
    """The first of these, if it is a position the request computes and has no state yet."""
    end: Node | None
    """The second, after the last decoded token; None if that was reused itself."""


def insert_speculatively(
    tree: CheckpointTree, match: Match, tokens: Tokens, reused: int
) -> Checkpoints:
    """Make *tokens*, input and output, known, and return which states the request should leave.

    The judicious admission of Marconi (Pan et al., MLSys 2025, section 4.2): input that many
    requests share is found where a sequence leaves another, so the state there is kept; a
    conversation goes on after the last decoded token, so that state is kept; no other is.
    Sequences whose states went are in the tree as well, which finds a shared part at its second
    sight even if nothing of the first is resident. A state can be had only where the request
    computes: deeper than the *reused* tokens it did not.
    """
    leaves, end = tree.extend(match, tokens)
    parts = leaves != end and len(leaves.children) > 1
    computed = leaves.depth > reused and leaves != tree.root
    branch = leaves if parts and computed and not leaves.held else None
    return Checkpoints(leaves, end, branch, end if end.depth > reused else None)


MakeRank = Callable[[CheckpointTree], LruRank]


class StateCache:
    """Keeps states of the positions that admission names, until the rank gives them up.

    The size is at most the capacity whenever a call returns. A state that cannot fit is refused
    and takes nothing with it.
    """

    def __init__(
        self, model: HybridModel, capacity_bytes: int, ghosts: GhostLimits, make_rank: MakeRank
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.tree = CheckpointTree(model)
        self.rank = make_rank(self.tree)
        self.ghosts = Ghosts(self.tree, ghosts)
        self.refused = 0
        """States that were not kept as they would not have fitted."""
        self._clock = SteadyClock()

    def request(self, tokens: Tokens, prompt_tokens: int, now_s: float) -> int:
        """Serve a request: *tokens* [n] are its prompt, *prompt_tokens* of them, and the answer.

        Returns how many tokens of the prompt need no prefill. ``now_s`` may jump, either way.
        Raises InvalidRequestError for more prompt than tokens, and for times that are no numbers.
        """
        if not 0 <= prompt_tokens <= len(tokens):
            fix = f"at least 0 and at most the {len(tokens)} tokens there are"
            raise InvalidRequestError("prompt_tokens", prompt_tokens, fix)
        if not math.isfinite(now_s):
            raise InvalidRequestError("now_s", now_s, "finite seconds")
        tree, rank, now_s = self.tree, self.rank, self._clock.time_s(now_s)
        tree.tick += 1
        match = tree.match(tokens)
        known = [node for node in match.path if node.depth <= prompt_tokens]
        start = next((node for node in reversed(known) if node.held), None)
        reused = 0
        if start is not None:
            start.used = tree.tick
            reused = start.depth
        asked = next((node for node in reversed(known) if node.last_s is not None), None)
        turn = asked.next_turn if asked else 0
        if len(tokens):
            found = insert_speculatively(tree, match, tokens, reused)
            found.last.next_turn = turn + 1
            nodes = dict.fromkeys((*match.path, found.leaves, found.last))
            path = [node for node in nodes if node is not tree.root]
            self.ghosts.touch(path)
            wanted = (found.branch, found.end)
            kept = [node for node in wanted if node and self._keep(node)]
            if asked:
                asked.hits += 1
            rank.served(path, asked, kept, now_s)
            for node in (*kept, *([asked] if asked else [])):
                node.last_s = now_s
            self._make_room(kept, now_s)
        self.ghosts.trim(partial(rank.forgot, now_s=now_s))
        rank.answered(now_s)
        return reused

    def _keep(self, node: Node) -> bool:
        tree, model = self.tree, self.tree.model
        if not node.held:
            least_bytes = model.state_bytes + node.depth * model.kv_bytes_per_token
            if least_bytes > self.capacity_bytes:
                self.refused += 1
                return False
            tree.hold(node)
        node.used = tree.tick
        return True

    def _make_room(self, kept: list[Node], now_s: float) -> None:
        tree, rank = self.tree, self.rank
        spared = kept[-1] if kept and rank.spares_new else None
        while tree.size_bytes > self.capacity_bytes:
            node = rank.victim(spared, now_s)
            assert node is not None, "what was kept fits alone"
            tree.drop(node)
            self.ghosts.enter(node)
