"""Simulated nodes with a memory tier each, one Redis below them, and a router.

Without bytes or time: it counts where a prompt's blocks are found and what is transferred. The
directory is exact and immediate; the server's is not, which costs misses.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from random import Random

import numpy as np

from kvstore.cli.simulate import BlockTrace

SHARED = 0.01
"""Blocks in more than this share of a trace's prompts are common to all copies."""
SHIFT_S = 60.0
"""Copies start within this time."""
AFFINITY, ROUND_ROBIN = "affinity", "round_robin"
ROUTINGS = (AFFINITY, ROUND_ROBIN)
FAIR_SHARE = 1.25
"""Limit of a node's recent prompts, times the mean, before the router skips it."""
TRIED = 4
"""Candidates whose loads a router compares."""
RECENT = 16
"""Prompts for each node after which a router halves its counts."""
Chain = Sequence[int]


def prompts(trace: BlockTrace, copies: int, seed: int = 1) -> Iterator[list[int]]:
    """Yield the chains of *copies* of a trace, ordered by time, each copy shifted.

    A chain has the blocks of its prompt, not of the answer.
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
    """Nodes, blocks in the memory of each, blocks in Redis (0: no Redis)."""

    nodes: int
    node_blocks: int
    redis_blocks: int = 0
    routing: str = AFFINITY


@dataclass(slots=True)
class ClusterCounts:
    """Blocks by the place where they were found, and operations of the directory.

    *queries*: prompts for which the node lacked blocks. *queried_keys*: these blocks. *added*,
    *dropped*: entries of the directory. *redis_written*: blocks written to Redis.
    """

    prompts: int = 0
    blocks: int = 0
    local: int = 0
    peer: int = 0
    redis: int = 0
    computed: int = 0
    queries: int = 0
    queried_keys: int = 0
    added: int = 0
    dropped: int = 0
    redis_written: int = 0

    def since(self, before: ClusterCounts) -> ClusterCounts:
        return ClusterCounts(
            *(getattr(self, one.name) - getattr(before, one.name) for one in fields(self))
        )


class LruBlocks:
    """A limited set of blocks with leaf-LRU eviction, as in server/eviction/lru.py.

    A chain is used from its end to its head, so no block is older than its children.
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
        """Insert or refresh the first blocks of *chain*, as many as fit.

        Return the added and the evicted blocks; none of *chain* is evicted.
        """
        used, added = self._used, []
        for block in reversed(chain[: self._places]):
            if block not in used:
                used[block] = None
                added.append(block)
            else:
                used.move_to_end(block)
        evicted = [used.popitem(last=False)[0] for _ in range(len(used) - self._places)]
        return added, evicted


class Cluster:
    """The nodes, their blocks, and a router. Deterministic for a seed."""

    def __init__(self, terms: ClusterTerms, seed: int = 1) -> None:
        self.terms = terms
        self.counts = ClusterCounts()
        self.routed = [0] * terms.nodes
        """Number of prompts of each node."""
        self._random = Random(seed)
        self._nodes = [LruBlocks(terms.node_blocks) for _ in range(terms.nodes)]
        self._redis = LruBlocks(terms.redis_blocks)
        self._holders: dict[int, set[int]] = {}
        """The directory: the nodes that have a block in memory."""
        self._recent = [0.0] * terms.nodes
        """Recent prompts of each node, halved at intervals."""
        self._routings = 0
        self._down: set[int] = set()
        self.lost_master: tuple[int, int] | None = None
        """(number, count of masters): the Redis master that is down."""

    # --- failures

    def fail_node(self, node: int) -> None:
        """Stop *node* and clear its memory; no prompt is routed to it until ``recover``."""
        assert len(self._down) + 1 < self.terms.nodes, "the last node cannot fail"
        self._down.add(node)
        self._update_directory(node, (), self._nodes[node])
        self._nodes[node] = LruBlocks(self.terms.node_blocks)

    def recover(self) -> None:
        """End all failures: nodes have empty memory, a master its old data."""
        self._down.clear()
        self.lost_master = None

    def replay(self, chains: Iterable[Chain]) -> ClusterCounts:
        """Request *chains*; return their counts."""
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
            counts.queries += 1
            counts.queried_keys += len(chain) - local
        self._update_directory(node, *memory.use(chain))
        if self.terms.redis_blocks:
            added, _ = self._redis.use([block for block in chain if self._is_reached(block)])
            counts.redis_written += len(added)

    def _is_reached(self, block: int) -> bool:
        """Whether the master of *block* is up; the blocks of a chain are spread over all."""
        lost = self.lost_master
        return lost is None or block * 0x9E3779B1 % 0x100000000 * lost[1] >> 32 != lost[0]

    def _stored_blocks(self, chain: Chain) -> int:
        known = self._redis.prefix(chain)
        return next((at for at in range(known) if not self._is_reached(chain[at])), known)

    def _peer_blocks(self, chain: Chain, local: int) -> int:
        """Return how many blocks after the local ones one peer has.

        A node with a block has all before it, so the node with the last one has all.
        """
        holders, rest = self._holders, range(local, len(chain))
        return next((at for at in rest if chain[at] not in holders), len(chain)) - local

    def _update_directory(self, node: int, added: Iterable[int], evicted: Iterable[int]) -> None:
        holders, counts = self._holders, self.counts
        for block in added:
            holders.setdefault(block, set()).add(node)
            counts.added += 1
        for block in evicted:
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
        """Return the node with the longest prefix that is below its limit, else an idle one."""
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

    # --- state

    def entries(self) -> int:
        """Return the entries of the directory: one for each copy in a node's memory."""
        return sum(map(len, self._nodes))

    def copies(self) -> tuple[float, int]:
        numbers = [len(nodes) for nodes in self._holders.values()]
        return (sum(numbers) / len(numbers), max(numbers)) if numbers else (0.0, 0)
