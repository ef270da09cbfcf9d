"""What a cluster misses while some of its nodes, or one of its Redis masters, are gone.

Two clusters get the same prompts; one of them loses a part at the half. What counts is how much
less of them it finds, minute by minute, until it finds as much again.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

from bench.cluster_limits import RATE
from bench.cluster_nodes import Chain, Cluster, ClusterTerms

MINUTE_S = 60.0
DOWN_NODES = 0.1
"""Of the nodes, those that fail at once; one at least. A minute later they are back, empty."""
MASTERS = 3
"""Of a Redis Cluster: each has a share of the blocks. One is gone for a minute, and comes back
with what it had."""
SAME = 0.01
"""Of the blocks: as much less as this is as many."""

NODES_DOWN, MASTER_DOWN = "nodes_down", "master_down"
FAILURES = (NODES_DOWN, MASTER_DOWN)


MOST_MINUTES = 20
"""That are looked at."""


@dataclass(frozen=True, slots=True)
class Setback:
    """Shares of the blocks that prompts found, minute by minute from a failure on.

    Of those in the memory of nodes when nodes fail; anywhere when a master does.
    """

    steady: tuple[float, ...]
    failed: tuple[float, ...]

    @property
    def lost(self) -> float:
        """What the first minute found less, as a share of the blocks."""
        return self.steady[0] - self.failed[0]

    @property
    def minutes(self) -> int:
        """How many minutes passed until one found as much; routing alone moves one by a point."""
        pairs = zip(self.steady, self.failed, strict=True)
        same = (at for at, (steady, failed) in enumerate(pairs) if steady - failed <= SAME)
        return next(same, len(self.steady))


def setbacks(chains: Sequence[Chain], terms: ClusterTerms) -> dict[str, Setback]:
    """Return what each of FAILURES costs behind the first half of *chains*."""
    half = len(chains) // 2
    cluster = Cluster(terms)
    for chain in chains[:half]:
        cluster.request(chain)
    minute = max(1, round(MINUTE_S * RATE * terms.nodes))
    coming = chains[half : half + MOST_MINUTES * minute]
    steady = _minutes(deepcopy(cluster), coming, minute)
    found = {}
    for failure in FAILURES:
        hurt = deepcopy(cluster)
        if failure == NODES_DOWN:
            for node in range(max(1, round(DOWN_NODES * terms.nodes))):
                hurt.fail_node(node)
        else:
            hurt.lost_master = (0, MASTERS)
        failed = _minutes(hurt, coming, minute)
        at = FAILURES.index(failure)
        found[failure] = Setback(*(tuple(one[at] for one in rows) for rows in (steady, failed)))
    return found


def _minutes(cluster: Cluster, chains: Sequence[Chain], minute: int) -> list[tuple[float, float]]:
    """Return what each minute found, in memory and anywhere; what failed is back in the second."""
    rows = []
    for start in range(0, len(chains) - minute + 1, minute):
        before = cluster.counts.copy()
        for chain in chains[start : start + minute]:
            cluster.request(chain)
        cluster.recover()
        counts = cluster.counts.since(before)
        blocks = max(1, counts.blocks)
        rows.append(((counts.local + counts.peer) / blocks, 1 - counts.computed / blocks))
    return rows
