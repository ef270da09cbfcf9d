"""One cache of states: which positions get one, what is remembered, and the limits of both."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import spare_rows
from kvstore.server.eviction.access_history import SteadyClock
from kvstore.server.eviction.queues import RowHeap
from kvstore.server.eviction.states.ranks import CheckpointRank
from kvstore.server.eviction.states.tree import (
    ROOT,
    CheckpointTree,
    HybridModel,
    Match,
    Node,
    Tokens,
)

TOKENS_PER_KEPT = 16
"""Tokens remembered for each one that the capacity has KV for: 64 bytes beside 65,536."""

NODES_PER_STATE = 64
"""Nodes remembered for each state that the capacity has room for: 130 bytes each beside 26.8 MB."""

GHOST_NODES = 1 << 18
"""The same, whatever the capacity."""

_DEPTH_BITS = 24
_MOST_DEPTH = (1 << _DEPTH_BITS) - 1
"""Deeper ones count as this deep, where it matters which of one request goes first."""


@dataclass(frozen=True)
class GhostLimits:
    """What may be remembered beyond resident states; 0 of anything is no ghosts at all.

    The ghosts of the reference are without limit. Tokens are what they cost: four bytes each.
    """

    nodes: int
    tokens: int

    def __post_init__(self) -> None:
        for name in ("nodes", "tokens"):
            if getattr(self, name) < 0:
                raise InvalidRequestError(name, getattr(self, name), "at least 0")

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
    are fewer of those than there are leaves. Each ghost has at most one entry in the queue, which
    is a heap of numbers: 16 bytes a node.
    """

    def __init__(self, tree: CheckpointTree, limits: GhostLimits) -> None:
        self._tree = tree
        self.limits = limits
        self._ages = array("Q", [0])
        """What each node was queued by: its tick then, and of one tick the deeper first."""
        self._queue = RowHeap(self._ages)

    def touch(self, nodes: Iterable[Node], tick: int) -> None:
        """Take note that *nodes* were used just now."""
        ticks = self._tree.known.ticks
        for node in nodes:
            ticks[node.number] = tick
            self.enter(node)

    def enter(self, node: Node) -> None:
        """Take note of a node that may have no state any more; its age is what it was."""
        if node.number != ROOT and not node.held:
            self._enter(node.number)

    def _enter(self, number: int) -> None:
        if number >= len(self._ages):
            count = number + 1 - len(self._ages) + spare_rows(number)
            self._ages.frombytes(bytes(count * self._ages.itemsize))
            self._queue.extend(count)
        if number not in self._queue:
            known = self._tree.known
            # Of one age the deeper goes first: what is above may be shared.
            rise = _MOST_DEPTH - min(known.depths[number], _MOST_DEPTH)
            self._ages[number] = known.ticks[number] << _DEPTH_BITS | rise
            self._queue.push(number)

    def trim(self, forgot: Callable[[Node], None]) -> None:
        """Forget the oldest within the limits; *forgot* is called with each just before."""
        tree, queue = self._tree, self._queue
        while len(queue) and self._is_over():
            number = queue.first()
            queue.remove(number)
            node = Node(tree, number)
            if node.held or node.children > 1:
                continue
            if self._ages[number] >> _DEPTH_BITS != tree.known.ticks[number]:
                self._enter(number)
                continue
            above = Node(tree, tree.known.parents[number])
            forgot(node)
            tree.forget(node)
            self.enter(above)

    def _is_over(self) -> bool:
        tree, limits = self._tree, self.limits
        ghosts = tree.nodes - len(tree.held)
        return ghosts > limits.nodes or tree.tokens - tree.kept_tokens > limits.tokens

    def __len__(self) -> int:
        """Entries in the queue, those included that turned out to be no ghosts."""
        return len(self._queue)


@dataclass(frozen=True)
class Checkpoints:
    """The positions of one request whose states are to be kept: two at most."""

    leaves: Node
    """Where the request leaves what was known; the root if it shares nothing."""
    last: Node
    """Where it ends."""
    branch: Node | None
    """The first of these, if it is a position the request computes and has no state yet."""
    end: Node | None
    """The second, after the last decoded token; None if that was reused itself."""

    @property
    def nodes(self) -> list[Node]:
        """Those that there are, the deeper one last."""
        return [node for node in (self.branch, self.end) if node is not None]


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
    parts = leaves != end and leaves.children > 1
    computed = leaves.depth > reused and leaves != tree.root
    branch = leaves if parts and computed and not leaves.held else None
    return Checkpoints(leaves, end, branch, end if end.depth > reused else None)


MakeRank = Callable[[CheckpointTree], CheckpointRank]


class StateCache:
    """Keeps states of the positions that admission names, until the rank gives them up.

    The size is at most the capacity whenever a call returns. A state that cannot fit, be it
    alone or beside what is pinned, is refused and takes nothing with it.
    """

    def __init__(
        self, model: HybridModel, capacity_bytes: int, ghosts: GhostLimits, make_rank: MakeRank
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
        tick = tree.next_tick()
        match = tree.match(tokens)
        known = [node for node in match.path if node.depth <= prompt_tokens]
        start = next((node for node in reversed(known) if node.held), None)
        turn = self._ask(known, now_s)
        reused = 0
        if start is not None:
            tree.use(start)
            reused = start.depth
        if len(tokens):
            found = insert_speculatively(tree, match, tokens, reused)
            found.last.end(turn)
            path = match.path.copy()
            path += [
                node
                for node in dict.fromkeys((found.leaves, found.last))
                if node != tree.root and node not in path[-1:]
            ]
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
        self.rank.requested(node, now_s)
        node.hit()
        known.last_s[node.number] = now_s
        return node.turn + 1 if node.ends else 0

    def _keep(self, node: Node, now_s: float) -> bool:
        tree = self.tree
        if not node.held:
            if tree.least_bytes(node) > self.capacity_bytes:
                self.refused += 1
                return False
            tree.hold(node)
        tree.use(node)
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
