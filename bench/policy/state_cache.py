"""A cache of recurrent states: which positions get one, what is remembered, which goes next."""

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
"""Tokens remembered for each one that the capacity has KV for: 64 bytes beside 65,536."""
NODES_PER_STATE = 64
"""Nodes remembered for each state that the capacity has room for: 300 bytes each beside 26.8 MB."""
GHOST_NODES = 1 << 18
"""The same, whatever the capacity."""
STATE_CLASSES = 21
PRIOR = Path(__file__).with_name("prior.txt")
"""What a warm cache starts from: counts of other runs, as ``read_prior`` returns them.

Learnt by ``python -m bench.policy --learn`` on the token traces in data/traces named dev_*
(all our own, synthetic but for one cut from Mooncake's conversation trace, Apache-2.0): the counts
that a cache without a prior had at the end of each trace, the mean over three capacities, summed
over six traces and times 0.3, so that what is seen outweighs them after some thousand requests.
"""
_STRENGTH = 20.0
"""Far fewer states than chunks are seen, so a class counts for itself sooner."""
_REFRESH_REQUESTS = 20
_TURNS = (0, 1, 2, 3, 3, 3, 4)
_ONE_CHILD, _BRANCH = 5, 6
_HITS = 3


def read_prior() -> NDArray[np.float64]:
    """Return states asked for again and not: (2, STATE_CLASSES, AGE_BINS)."""
    counts = np.array(PRIOR.read_text().split(), np.float64)
    return counts.reshape(2, STATE_CLASSES, AGE_BINS)


def state_class(node: Node) -> int:
    """Return the class of a position, below STATE_CLASSES.

    The end of a sequence is classed by its turn (0, 1, 2, 3 to 5, more), another position by
    whether sequences part there; each by how often it was asked for (0, 1, more).
    """
    if children := node.children:
        kind = _ONE_CHILD if len(children) == 1 else _BRANCH
    else:
        kind = _TURNS[min(max(node.next_turn - 1, 0), len(_TURNS) - 1)]
    return kind * _HITS + min(node.hits, _HITS - 1)


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


class Ghosts:
    """The nodes of a tree without a state, in the order of their last use.

    A node with two children or more stays whatever its age, as only it keeps them apart; there
    are fewer of those than there are leaves. Each ghost has at most one entry in the queue.
    """

    def __init__(self, tree: CheckpointTree, limits: GhostLimits) -> None:
        self._tree = tree
        self._limits = limits
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
        tree, limits = self._tree, self._limits
        ghosts = tree.nodes - len(tree.held)
        return ghosts > limits.nodes or tree.tokens - tree.kept_tokens > limits.tokens


class StateCache:
    """Keeps states of positions within a capacity; those go first that promise the fewest hits.

    Of each request two states at most are kept: the judicious admission of Marconi (Pan et al.,
    MLSys 2025, section 4.2). Input that many share is found where a sequence leaves another; a
    conversation goes on after the last decoded token. Sequences whose states went are remembered,
    which finds a shared part at its second sight even if nothing of the first is resident.

    A state is worth ``hits a second (class, age) x tokens that only this state saves / bytes that
    go with it``: the table is our DensityTable, of states that were evicted as of those that were
    not. One that has just been made goes at once when all others are worth more. *warm* starts
    from the counts of PRIOR; else all classes are alike at first.
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
        """Serve a request: *tokens* [n] are its prompt, *prompt_tokens* of them, and the answer.

        Returns how many tokens of the prompt need no prefill. Times never go back.
        """
        tree = self.tree
        tree.tick += 1
        match = tree.match(tokens)
        known = [node for node in match.path if node.depth <= prompt_tokens]
        start = next((node for node in reversed(known) if node.held), tree.root)
        if start.held:
            start.used = tree.tick
        asked = next((node for node in reversed(known) if node.last_s is not None), None)
        leaves, end = tree.extend(match, tokens)
        end.next_turn = asked.next_turn + 1 if asked else 1
        path = [node for node in dict.fromkeys((*match.path, leaves, end)) if node is not tree.root]
        self.ghosts.touch(path)
        # A state can be had only where the request computes.
        parts = leaves is not end and len(leaves.children) > 1
        wanted = [leaves] if parts and not leaves.held else []
        kept = [one for one in (*wanted, end) if one.depth > start.depth and self._keep(one)]
        self._count(path, asked, kept, now_s)
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
        """Have the state of a position, if it fits alone; return whether it does."""
        tree, model = self.tree, self.tree.model
        if not node.held:
            least_bytes = model.state_bytes + node.depth * model.kv_bytes_per_token
            if least_bytes > self.capacity_bytes:
                return False
            tree.hold(node)
        node.used = tree.tick
        return True

    def _count(
        self, path: Sequence[Node], asked: Node | None, kept: Sequence[Node], now_s: float
    ) -> None:
        """Count a request that ran through *path*: *asked* had a state once and counts as its hit,
        those of *kept* have one now.
        """
        if asked is not None:
            asked.hits += 1
            self.table.requested(*_waits(asked), now_s)
        for node in kept:
            if node is not asked:  # it was not asked for, but is as new as if it had been
                self._forgot(node, now_s)
        came = []
        for node in path:
            kind = state_class(node)
            if node is asked or node in kept:
                came.append(kind)
            elif node.last_s is not None and node.kind != kind:
                classes, last_s = _waits(node)
                self.table.moved(classes, np.array([kind], np.uint16), last_s, now_s)
            node.kind = kind
        if came:
            self.table.wait(np.array(came, np.uint16), now_s)
        for node in (*kept, *([asked] if asked else [])):
            node.last_s = now_s

    def _forgot(self, node: Node, now_s: float) -> None:
        if node.last_s is not None:
            self.table.forgotten(*_waits(node), now_s)

    def victim(self, now_s: float) -> Node:
        """Return whose state goes next: of equal worth the one used longest ago."""
        nodes = list(self.tree.held)
        worth = self.worth(nodes, now_s)
        equal = np.flatnonzero(worth == worth.min())
        return min((nodes[at] for at in equal.tolist()), key=lambda node: node.used)

    def worth(self, nodes: Sequence[Node], now_s: float) -> NDArray[np.float64]:
        """Return what each state is worth, to be compared among each other only."""
        model = self.tree.model
        bins = bins_of(now_s - np.array([node.last_s for node in nodes]))
        density = self.table.values[[node.kind for node in nodes], bins]
        marginal, alone = np.array([(node.marginal, node.alone) for node in nodes]).T
        freed = model.state_bytes + model.kv_bytes_per_token * alone
        worth: NDArray[np.float64] = density * marginal / freed
        return worth


def _waits(node: Node) -> tuple[NDArray[np.uint16], NDArray[np.float64]]:
    return np.array([node.kind], np.uint16), np.array([node.last_s])
