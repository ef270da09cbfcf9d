"""A cache of recurrent states: admission, ghosts and eviction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.policy.state_tree import CheckpointTree, HybridModel, Node, Tokens
from kvstore.server.eviction.reuse_statistics import AGE_BINS, DensityTable, bins_of

TOKENS_PER_KEPT = 16
"""Ghost tokens for each token whose KV fits the capacity: 64 bytes against 65,536."""
NODES_PER_STATE = 64
"""Ghost nodes for each state that fits the capacity: 300 bytes each against 26.8 MB."""
GHOST_NODES = 1 << 18
"""Limit of ghost nodes at any capacity."""
STATE_CLASSES = 21
PRIOR = Path(__file__).with_name("prior.txt")
"""Initial counts of a warm cache, as ``read_prior`` returns them.

Learned by ``python -m bench.policy --learn`` from the token traces data/traces/dev_* (ours,
synthetic except one cut from Mooncake's conversation trace, Apache-2.0): counts of a cache without
a prior at the end of each trace, the mean over three capacities, summed over six traces, times 0.3.
Observed requests outweigh them after some thousand.
"""
_STRENGTH = 20.0
"""Lower than for chunks, as there are far fewer states to learn from."""
_REFRESH_REQUESTS = 20
_TURNS = (0, 1, 2, 3, 3, 3, 4)
_ONE_CHILD, _BRANCH = 5, 6
_HITS = 3


def read_prior() -> NDArray[np.float64]:
    """Return the counts of states reused and not reused: (2, STATE_CLASSES, AGE_BINS)."""
    counts = np.array(PRIOR.read_text().split(), np.float64)
    return counts.reshape(2, STATE_CLASSES, AGE_BINS)


def state_class(node: Node) -> int:
    """Return the class of a position, below STATE_CLASSES.

    The end of a sequence is classed by its turn (0, 1, 2, 3 to 5, more), another position by
    whether sequences branch there; both by the number of hits (0, 1, more).
    """
    if children := node.children:
        kind = _ONE_CHILD if len(children) == 1 else _BRANCH
    else:
        kind = _TURNS[min(max(node.next_turn - 1, 0), len(_TURNS) - 1)]
    return kind * _HITS + min(node.hits, _HITS - 1)


class GhostLimits(NamedTuple):
    """Limits of ghosts; 0 of either means none. A token costs four bytes.

    The reference has no limits.
    """

    nodes: int
    tokens: int

    @classmethod
    def of(cls, model: HybridModel, capacity_bytes: int) -> GhostLimits:
        """Return the limits for a capacity."""
        nodes = NODES_PER_STATE * capacity_bytes // model.state_bytes
        tokens = TOKENS_PER_KEPT * capacity_bytes // model.kv_bytes_per_token
        return cls(min(nodes, GHOST_NODES), tokens)


class Ghosts:
    """The nodes of a tree without a state, ordered by last use.

    A node with two or more children always stays, as it separates them; there are fewer of those
    than leaves. Each ghost has at most one entry in the queue.
    """

    def __init__(self, tree: CheckpointTree, limits: GhostLimits) -> None:
        self._tree = tree
        self._limits = limits
        self._queue: list[Node] = []
        """A heap."""

    def touch(self, nodes: Iterable[Node]) -> None:
        """Record a use of *nodes*."""
        for node in nodes:
            node.tick = self._tree.tick
            self.enter(node)

    def enter(self, node: Node) -> None:
        """Queue a node that may have lost its state; its age stays."""
        if node.parent and not node.held and not node.queued:
            node.queued = node.tick
            heappush(self._queue, node)

    def trim(self, forgot: Callable[[Node], None]) -> None:
        """Remove the oldest ghosts beyond the limits; *forgot* is called before each."""
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
        tree, limits = self._tree, self._limits
        ghosts = tree.nodes - len(tree.held)
        return ghosts > limits.nodes or tree.tokens - tree.kept_tokens > limits.tokens


class StateCache:
    """Keeps states of positions within a capacity; evicts those with the fewest expected hits.

    At most two states of each request are kept: the judicious admission of Marconi (Pan et al.,
    MLSys 2025, section 4.2). A prefix that many share ends where a sequence leaves another; a
    conversation continues after the last decoded token. Evicted sequences stay as ghosts, so a
    shared prefix is found at its second occurrence even if nothing of the first is resident.

    The worth of a state is ``hits a second (class, age) x tokens that only this state saves /
    bytes freed with it``, from our DensityTable over resident and evicted states. A new state is
    evicted at once if all others are worth more. *warm* starts with the counts of PRIOR; else all
    classes are equal at first.
    """

    def __init__(
        self,
        model: HybridModel,
        capacity_bytes: int,
        limits: GhostLimits | None = None,
        *,
        warm: bool = True,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.tree = CheckpointTree(model)
        self.ghosts = Ghosts(self.tree, limits or GhostLimits.of(model, capacity_bytes))
        self.table = DensityTable(np.zeros(STATE_CLASSES, np.intp), _STRENGTH)
        if warm:
            self.table.learned(*read_prior())
            self.table.refresh(0.0, STATE_CLASSES)
        self._requests = 0

    def request(self, tokens: Tokens, prompt_tokens: int, now_s: float) -> int:
        """Serve a request: *tokens* [n] are its prompt (*prompt_tokens*) and the answer.

        Returns how many tokens of the prompt need no prefill. *now_s* never decreases.
        """
        tree = self.tree
        tree.tick += 1
        match = tree.match(tokens)
        known = [node for node in match.path if node.depth <= prompt_tokens]
        start = next((node for node in reversed(known) if node.held), tree.root)
        if start.held:
            start.used = tree.tick
        reused = next((node for node in reversed(known) if node.last_s is not None), None)
        fork, end = tree.extend(match, tokens)
        end.next_turn = reused.next_turn + 1 if reused else 1
        path = [node for node in dict.fromkeys((*match.path, fork, end)) if node is not tree.root]
        self.ghosts.touch(path)
        # States exist only where the request computes.
        is_fork = fork is not end and len(fork.children) > 1
        wanted = [fork] if is_fork and not fork.held else []
        kept = [one for one in (*wanted, end) if one.depth > start.depth and self._keep(one)]
        self._count(path, reused, kept, now_s)
        while tree.size_bytes > self.capacity_bytes:
            victim = self.victim(now_s)
            tree.drop(victim)
            self.ghosts.enter(victim)
        self.ghosts.trim(lambda node: self._forgot(node, now_s))
        self._requests += 1
        if self._requests % _REFRESH_REQUESTS == 0:
            self.table.refresh(now_s, STATE_CLASSES)
        return start.depth

    def _keep(self, node: Node) -> bool:
        """Keep the state of a position if it fits alone; return whether it does."""
        tree, model = self.tree, self.tree.model
        if not node.held:
            least_bytes = model.state_bytes + node.depth * model.kv_bytes_per_token
            if least_bytes > self.capacity_bytes:
                return False
            tree.hold(node)
        node.used = tree.tick
        return True

    def _count(
        self, path: Sequence[Node], reused: Node | None, kept: Sequence[Node], now_s: float
    ) -> None:
        """Count a request along *path*: a hit of *reused*, and new states at *kept*."""
        if reused is not None:
            reused.hits += 1
            self.table.requested(*_waits(reused), now_s)
        for node in kept:
            if node is not reused:  # not reused, but as new as if it were
                self._forgot(node, now_s)
        new = []
        for node in path:
            kind = state_class(node)
            if node is reused or node in kept:
                new.append(kind)
            elif node.last_s is not None and node.kind != kind:
                classes, last_s = _waits(node)
                self.table.moved(classes, np.array([kind], np.uint16), last_s, now_s)
            node.kind = kind
        if new:
            self.table.wait(np.array(new, np.uint16), now_s)
        for node in (*kept, *([reused] if reused else [])):
            node.last_s = now_s

    def _forgot(self, node: Node, now_s: float) -> None:
        if node.last_s is not None:
            self.table.forgotten(*_waits(node), now_s)

    def victim(self, now_s: float) -> Node:
        """Return the node to evict: the least worth, then the least recently used."""
        nodes = list(self.tree.held)
        worth = self.worth(nodes, now_s)
        equal = np.flatnonzero(worth == worth.min())
        return min((nodes[at] for at in equal.tolist()), key=lambda node: node.used)

    def worth(self, nodes: Sequence[Node], now_s: float) -> NDArray[np.float64]:
        """Return the worth of each state; the scale is arbitrary."""
        model = self.tree.model
        bins = bins_of(now_s - np.array([node.last_s for node in nodes]))
        density = self.table.values[[node.kind for node in nodes], bins]
        marginal, alone = np.array([(node.marginal, node.alone) for node in nodes]).T
        freed = model.state_bytes + model.kv_bytes_per_token * alone
        worth: NDArray[np.float64] = density * marginal / freed
        return worth


def _waits(node: Node) -> tuple[NDArray[np.uint16], NDArray[np.float64]]:
    return np.array([node.kind], np.uint16), np.array([node.last_s])
