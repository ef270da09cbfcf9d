"""Nodes with a memory tier each, a Redis below all of them, and prompts that are routed to them.

A simulation without bytes or time: who finds a prompt's blocks where, and what goes over which
wire. The directory is exact and at once here; that of the server is neither, and costs misses.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from random import Random

import numpy as np

from kvstore.cli.simulate import BlockTrace

SHARED = 0.01
"""Blocks that more of a trace's prompts have than this share are the same in every copy."""
SHIFT_S = 60.0
"""Copies begin within so many seconds of each other."""
AFFINITY, ROUND_ROBIN = "affinity", "round_robin"
ROUTINGS = (AFFINITY, ROUND_ROBIN)
FAIR_SHARE = 1.25
"""What a node may have of the latest prompts, times the mean, before others are asked."""
TRIED = 4
"""Nodes whose loads a router compares, of those that would do."""
RECENT = 16
"""The latest prompts that a router weighs nodes by: so many for each node."""
Chain = Sequence[int]


def prompts(trace: BlockTrace, copies: int, seed: int = 1) -> Iterator[list[int]]:
    """Yield the chains of *copies* of a trace in the order of their times, each shifted a little.

    A chain has the blocks that its prompt can name: its answer is none of them.
    """
    random = Random(seed)
    counts = Counter(row for one in trace.requests for row in one.chain)
    shared = {row for row, n in counts.items() if n > SHARED * len(trace.requests)}
    shifts = [random.uniform(0, SHIFT_S) for _ in range(copies)]
    times_s = np.array([one.time_s for one in trace.requests])
    times = np.concatenate([times_s + shift for shift in shifts])
    for place in np.argsort(times, kind="stable").tolist():
        copy, at = divmod(place, len(trace.requests))
        chain = trace.requests[at].chain[: trace.requests[at].known]
        if chain and copy:
            past = copy * (trace.blocks + 1)
            chain = [row if row in shared else row + past for row in chain]
        if chain:
            yield chain


@dataclass(frozen=True, slots=True)
class ClusterTerms:
    """Nodes, blocks that the memory of each holds, blocks that Redis holds (0: none is there)."""

    nodes: int
    node_blocks: int
    redis_blocks: int = 0
    routing: str = AFFINITY


@dataclass(slots=True)
class ClusterCounts:
    """Blocks by where prompts found them, and what the directory was asked and told.

    *questions*: prompts of which the node lacked blocks. *asked_keys*: the blocks they asked
    for. *noted*, *dropped*: entries that came to the directory and left it. *redis_written*:
    blocks written to Redis.
    """

    prompts: int = 0
    blocks: int = 0
    local: int = 0
    peer: int = 0
    redis: int = 0
    computed: int = 0
    questions: int = 0
    asked_keys: int = 0
    noted: int = 0
    dropped: int = 0
    redis_written: int = 0

    def since(self, before: ClusterCounts) -> ClusterCounts:
        return ClusterCounts(
            *(getattr(self, one.name) - getattr(before, one.name) for one in fields(self))
        )


class LruBlocks:
    """So many blocks at most, those used longest ago first to go, and of a chain its end.

    That is leaf-LRU, as server/eviction/lru.py has it: a chain is used from its end to its head,
    so that no block is older than one that continues it.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._used: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def __iter__(self) -> Iterator[int]:
        return iter(self._used)

    def prefix(self, chain: Chain) -> int:
        used = self._used
        return next((at for at, block in enumerate(chain) if block not in used), len(chain))

    def use(self, chain: Chain) -> tuple[list[int], list[int]]:
        """Have the first blocks of *chain* here, as many as there are places.

        Return those that came and those that had to go; none of the chain's own goes.
        """
        used, came = self._used, []
        for block in reversed(chain[: self._places]):
            if block not in used:
                used[block] = None
                came.append(block)
            else:
                used.move_to_end(block)
        gone = [used.popitem(last=False)[0] for _ in range(len(used) - self._places)]
        return came, gone


class Cluster:
    """The nodes, what lies where, and a router before them. Seeded: the same prompts, the same."""

    def __init__(self, terms: ClusterTerms, seed: int = 1) -> None:
        self.terms = terms
        self.counts = ClusterCounts()
        self.routed = [0] * terms.nodes
        """Prompts of each node."""
        self._random = Random(seed)
        self._nodes = [LruBlocks(terms.node_blocks) for _ in range(terms.nodes)]
        self._redis = LruBlocks(terms.redis_blocks)
        self._holders: dict[int, set[int]] = {}
        """The directory: the nodes that have a block in memory."""
        self._recent = [0.0] * terms.nodes
        """The latest prompts of each node, as a router counts them: halved now and then."""
        self._routings = 0
        self._down: set[int] = set()
        self.lost_master: tuple[int, int] | None = None
        """The number of a Redis master that does not answer, of so many."""

    # --- failures

    def fail_node(self, node: int) -> None:
        """*node* is gone, and what it had in memory; nobody routes to it until ``recover``."""
        assert len(self._down) + 1 < self.terms.nodes, "one has to stay"
        self._down.add(node)
        self._note(node, (), self._nodes[node])
        self._nodes[node] = LruBlocks(self.terms.node_blocks)

    def recover(self) -> None:
        """All that failed is back: nodes with empty memory, a master with what it had."""
        self._down.clear()
        self.lost_master = None

    def replay(self, chains: Iterable[Chain]) -> ClusterCounts:
        """Return what *chains* counted."""
        before = replace(self.counts)
        for chain in chains:
            self.request(chain)
        return self.counts.since(before)

    def request(self, chain: Chain) -> None:
        node = self._route(chain)
        self.routed[node] += 1
        counts, memory = self.counts, self._nodes[node]
        local = memory.prefix(chain)
        peer = self._peer_blocks(chain, local)
        have = local + peer
        stored = self._stored_blocks(chain[have:]) if self.terms.redis_blocks else 0
        counts.prompts += 1
        counts.blocks += len(chain)
        counts.local += local
        counts.peer += peer
        counts.redis += stored
        counts.computed += len(chain) - have - stored
        if local < len(chain):
            counts.questions += 1
            counts.asked_keys += len(chain) - local
        self._note(node, *memory.use(chain))
        if self.terms.redis_blocks:
            came, _ = self._redis.use([block for block in chain if self._is_reached(block)])
            counts.redis_written += len(came)

    def _is_reached(self, block: int) -> bool:
        """Whether the master answers that has *block*; a chain's blocks are on all of them."""
        lost = self.lost_master
        return lost is None or block * 0x9E3779B1 % 0x100000000 * lost[1] >> 32 != lost[0]

    def _stored_blocks(self, chain: Chain) -> int:
        known = self._redis.prefix(chain)
        return next((at for at in range(known) if not self._is_reached(chain[at])), known)

    def _peer_blocks(self, chain: Chain, local: int) -> int:
        """Return how many blocks after the local ones a peer has.

        Who has a block has all before it, so that whoever has the last has them all.
        """
        holders, rest = self._holders, range(local, len(chain))
        return next((at for at in rest if chain[at] not in holders), len(chain)) - local

    def _note(self, node: int, came: Iterable[int], gone: Iterable[int]) -> None:
        holders, counts = self._holders, self.counts
        for block in came:
            holders.setdefault(block, set()).add(node)
            counts.noted += 1
        for block in gone:
            nodes = holders[block]
            nodes.discard(node)
            if not nodes:
                del holders[block]
            counts.dropped += 1

    # --- routing

    def _route(self, chain: Chain) -> int:
        self._routings += 1
        if self.terms.routing == ROUND_ROBIN:
            node = self._routings % self.terms.nodes
            while node in self._down:
                node = (node + 1) % self.terms.nodes
            return node
        node = self._longest_match(chain)
        self._recent[node] += 1.0
        if self._routings % (RECENT * self.terms.nodes) == 0:
            self._recent = [count / 2 for count in self._recent]
        return node

    def _longest_match(self, chain: Chain) -> int:
        """Return the node with the longest prefix that is not over its share, else an idle one."""
        holders, recent = self._holders, self._recent
        known = self._peer_blocks(chain, 0)
        most = FAIR_SHARE * (sum(recent) + 1) / self.terms.nodes + 1
        for block in reversed(chain[:known]):
            nodes = holders[block]
            some = self._random.sample(tuple(nodes), TRIED) if len(nodes) > TRIED else nodes
            best = min(some, key=lambda one: (recent[one], one))
            if recent[best] < most:
                return best
        up: list[int] = []
        while not up:
            some = [self._random.randrange(self.terms.nodes) for _ in range(TRIED)]
            up = [one for one in some if one not in self._down]
        return min(up, key=lambda one: (recent[one], one))

    # --- what is there

    def entries(self) -> int:
        """Return how many entries the directory has: one for each copy in a node's memory."""
        return sum(map(len, self._nodes))

    def copies(self) -> tuple[float, int]:
        numbers = [len(nodes) for nodes in self._holders.values()]
        return (sum(numbers) / len(numbers), max(numbers)) if numbers else (0.0, 0)
