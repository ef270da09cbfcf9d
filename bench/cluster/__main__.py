"""One to a thousand nodes: what they hit, what they ask of Redis and of each other, what breaks.

Prompts of copies of a trace are routed to simulated nodes; all memory together stays the same,
so that a cluster of any size sees one workload and only its division differs. What an operation
costs is measured in the same run, on this machine, over the loopback. ``--only nodes``: what
another node has in memory, read from there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import structlog

from bench.cluster.costs import LOOKUP_CHUNKS, Costs, measure
from bench.cluster.nodes import add_nodes
from bench.cluster.simulation import (
    AFFINITY,
    ROUTINGS,
    Chain,
    Cluster,
    ClusterCounts,
    ClusterTerms,
    prompts,
)
from bench.lib.report import Report, line_chart, parser_of
from bench.lib.traces import read_blocks

BLOCK_BYTES = 512 * 131_072
"""512 tokens of a model of 8 billion parameters: 32 layers, 8 KV heads of 128, bfloat16."""
RATE = 1.0
"""Prompts a second that each node gets: 12,000 tokens of the conversation trace."""
NODE_BLOCKS = 4096
"""Blocks in a node's memory: 256 GiB."""
REDIS_SHARE = 4
"""Times as many blocks in Redis, for each node."""
CONVERSATION = "mooncake_conversation_trace"
DOCUMENTS = "dev_ragshared_qps2_n900"
NODES = (1, 3, 10, 30, 100, 300, 1000)
FAILING = (10, 100)
"""Of NODES, those that lose some of them, or a Redis master."""
KEPT = (1, 10, 100, 1000)
"""Of NODES, those whose figures are among the values."""
COPIES = {CONVERSATION: 4, DOCUMENTS: 24}
MEMORY_SHARE = 0.08
"""Of the footprint, what the memory of all nodes holds together: 250 s of its prompts."""
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
class Measured:
    """What one simulated cluster counted; mean and largest number of copies of a block."""

    nodes: int
    counts: ClusterCounts
    copies: tuple[float, int]

    def share(self, blocks: int) -> float:
        return blocks / max(1, self.counts.blocks)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a cluster asks for in a second, ``peer_bytes`` of each node, and what share that is.

    ``directory``, ``chunks``: of the one thread of a Redis; ``peers``: of the wire of a node, if
    nodes give as much as they take.
    """

    redis_ops: float
    redis_bytes: float
    peer_bytes: float
    shares: Mapping[str, float]


def demand(measured: Measured, costs: Costs) -> Demand:
    """Return what *measured* asks of a machine with *costs*, at RATE prompts a node."""
    counts = measured.counts
    each = RATE * measured.nodes / max(1, counts.prompts)
    questions, keys = each * counts.questions, each * counts.asked_keys
    notes = each * (counts.noted + counts.dropped)
    read, written = (each * n * BLOCK_BYTES for n in (counts.redis, counts.redis_written))
    peer = each / measured.nodes * counts.peer * BLOCK_BYTES
    asked_s = questions * costs.question_s + max(0.0, keys - questions) * costs.asked_key_s
    shares = {
        "directory": asked_s + notes * costs.note_s,
        "chunks": read * costs.read_byte_s + written * costs.write_byte_s,
        "peers": peer / costs.peer_bytes_per_s,
    }
    return Demand(keys + notes, read + written, peer, shares)


def full_at(points: Sequence[tuple[int, float]]) -> float:
    """Return at how many nodes a share, known at *points*, is 1.

    Between two points the share is a power of the nodes; past the last one it goes on as
    between the last two, before the first it is in proportion. Infinite where it does not grow,
    or not to 1 among a million nodes.
    """
    (nodes, share), *_ = points
    if share >= 1:
        return nodes / share
    for (low, below), (high, above) in pairwise(points):
        if 0 < below < above and (above >= 1 or high == points[-1][0]):
            slope = math.log(above / below) / math.log(high / low)
            at = low * (1 / below) ** (1 / slope)
            return at if at < 1e6 else math.inf
    return math.inf


@dataclass(frozen=True, slots=True)
class Setback:
    """Shares of the blocks that prompts found, minute by minute from a failure on.

    Of those in the memory of nodes when nodes fail; anywhere when a master does.
    """

    steady: tuple[float, ...]
    failed: tuple[float, ...]

    @property
    def lost(self) -> float:
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
    cluster.replay(chains[:half])
    minute = max(1, round(MINUTE_S * RATE * terms.nodes))
    coming = chains[half : half + MOST_MINUTES * minute]
    steady = _minutes(deepcopy(cluster), coming, minute)
    found = {}
    for at, failure in enumerate(FAILURES):
        hurt = deepcopy(cluster)
        if failure == NODES_DOWN:
            for node in range(max(1, round(DOWN_NODES * terms.nodes))):
                hurt.fail_node(node)
        else:
            hurt.lost_master = (0, MASTERS)
        failed = _minutes(hurt, coming, minute)
        found[failure] = Setback(*(tuple(one[at] for one in rows) for rows in (steady, failed)))
    return found


def _minutes(cluster: Cluster, chains: Sequence[Chain], minute: int) -> list[tuple[float, float]]:
    """Return what each minute found, in memory and anywhere; what failed is back in the second."""
    rows = []
    for start in range(0, len(chains) - minute + 1, minute):
        counts = cluster.replay(chains[start : start + minute])
        cluster.recover()
        blocks = max(1, counts.blocks)
        rows.append(((counts.local + counts.peer) / blocks, 1 - counts.computed / blocks))
    return rows


def terms_of(footprint: int, nodes: int, routing: str) -> ClusterTerms:
    """Return a cluster of *nodes* that together hold MEMORY_SHARE of *footprint* blocks."""
    blocks = max(1, round(MEMORY_SHARE * footprint / nodes))
    return ClusterTerms(nodes, blocks, REDIS_SHARE * blocks * nodes, routing)


def add_failures(report: Report) -> None:
    chains, footprint = chains_of(CONVERSATION)
    for nodes in FAILING:
        for failure, found in setbacks(chains, terms_of(footprint, nodes, AFFINITY)).items():
            usual = f"of blocks, first minute; {found.steady[0]:.1%} without the failure"
            report.add(f"affinity_{nodes}_{failure}_lost", found.lost, usual)
            until = "until one found as much, to a point"
            report.add(f"affinity_{nodes}_{failure}_minutes", found.minutes, until)


def chains_of(trace: str) -> tuple[list[list[int]], int]:
    """Return the chains of COPIES of *trace*, and their footprint in blocks."""
    chains = list(prompts(read_blocks(trace), COPIES[trace]))
    return chains, len({block for chain in chains for block in chain})


def simulate_all(trace: str, sizes: Iterable[int]) -> dict[tuple[str, int], Measured]:
    """Return what each routing and number of nodes counted of the second half."""
    chains, footprint = chains_of(trace)
    half, found = len(chains) // 2, {}
    for routing, nodes in product(ROUTINGS, sizes):
        cluster = Cluster(terms_of(footprint, nodes, routing))
        cluster.replay(chains[:half])
        counts = cluster.replay(chains[half:])
        found[routing, nodes] = Measured(nodes, counts, cluster.copies())
    return found


def add_costs(report: Report, costs: Costs) -> None:
    of = f"{LOOKUP_CHUNKS} chunks"
    ask_s = costs.question_s + (LOOKUP_CHUNKS - 1) * costs.asked_key_s
    size_mb = 1e-6 * NODE_BLOCKS * costs.entry_bytes
    report.add("lookup_us", 1e6 * costs.lookup_s, f"a node's processor, a lookup of {of}")
    report.add("directory_ask_us", 1e6 * costs.round_trip_s, f"what a node waits, {of}")
    report.add("directory_ask_redis_us", 1e6 * ask_s, f"Redis' processor for it, {of}")
    report.add("directory_note_redis_us", 1e6 * costs.note_s, "for an entry written or removed")
    report.add("directory_entry_bytes", costs.entry_bytes, "Redis' memory for an entry")
    report.add("redis_read_gbps", 1e-9 * costs.redis_bytes_per_s, "parts of 1 MiB, one reader")
    report.add("redis_cpu_read_gbps", 1e-9 / costs.read_byte_s, "what its processor could read")
    report.add("redis_cpu_write_gbps", 1e-9 / costs.write_byte_s, "and write")
    report.add("peer_gbps", 1e-9 * costs.peer_bytes_per_s, "a hit in a peer's memory, verified")
    report.add("directory_mb_per_node", size_mb, f"{NODE_BLOCKS} blocks")


def add_hits(report: Report, measured: Measured, routing: str, asks: Demand) -> None:
    counts, share, nodes = measured.counts, measured.share, measured.nodes
    copies, most = measured.copies
    report.add(f"{routing}_{nodes}_local", share(counts.local), "of blocks: in the node's memory")
    report.add(f"{routing}_{nodes}_peer", share(counts.peer), "in that of another")
    report.add(f"{routing}_{nodes}_redis", share(counts.redis), "in Redis alone")
    report.add(f"{routing}_{nodes}_redis_ops", asks.redis_ops, "keys and entries, a second")
    report.add(f"{routing}_{nodes}_redis_mb", 1e-6 * asks.redis_bytes, "read and written, MB/s")
    report.add(f"{routing}_{nodes}_peer_mb", 1e-6 * asks.peer_bytes, "each from peers, MB/s")
    report.add(f"{routing}_{nodes}_copies", copies, f"of a block; at most {most}")


def add_limits(report: Report, routing: str, asked: Sequence[tuple[int, Demand]]) -> None:
    """At how many nodes a Redis is full, and what is used of each part at the most nodes."""
    chunks, directory = (
        min(full_at([(nodes, asks.shares[part]) for nodes, asks in asked]), 1e6)
        for part in ("chunks", "directory")
    )
    report.add(f"{routing}_chunks_nodes", chunks, "nodes that fill a Redis with chunks")
    report.add(f"{routing}_directory_nodes", directory, "nodes that fill one without")
    shares = asked[-1][1].shares
    report.add(f"{routing}_peer_share", shares["peers"], "of a node's wire, for peers")
    report.add(f"{routing}_redis_share", shares["directory"], "of a Redis, for the directory")
    report.add(f"{routing}_redis_masters", shares["chunks"], "Redis masters, for the chunks")


def add_simulation(report: Report) -> dict[str, list[tuple[float, float]]]:
    """Measure and simulate; return what is drawn."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    costs = measure()
    add_costs(report, costs)
    series: dict[str, list[tuple[float, float]]] = {}
    found = simulate_all(CONVERSATION, NODES)
    for routing in ROUTINGS:
        rows = [found[routing, nodes] for nodes in NODES]
        asked = [(one.nodes, demand(one, costs)) for one in rows]
        for one, (_, asks) in zip(rows, asked, strict=True):
            if one.nodes in KEPT:
                add_hits(report, one, routing, asks)
        add_limits(report, routing, asked)
        for words, peers in (("own memory", 0), ("or a peer's", 1)):
            series[f"{routing.replace('_', ' ')}: {words}"] = [
                (m.nodes, 100 * m.share(m.counts.local + peers * m.counts.peer)) for m in rows
            ]
    for (routing, nodes), one in simulate_all(DOCUMENTS, KEPT[1:3]).items():
        (copies, most), local = one.copies, one.share(one.counts.local)
        report.add(f"{routing}_{nodes}_documents_local", local, "prompts about documents")
        report.add(f"{routing}_{nodes}_documents_copies", copies, f"of a block; at most {most}")
    add_failures(report)
    return series


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, ("simulation", "nodes"))
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the hits as an SVG")
    flags = parser.parse_args(argv)
    report = Report("cluster")
    if "simulation" in flags.only:
        series = add_simulation(report)
        if flags.plot is not None:
            title = "Blocks found in memory, percent, as one memory is divided among nodes"
            line_chart(flags.plot, title, ("nodes", "percent of the blocks asked for"), series)
    if "nodes" in flags.only:
        add_nodes(report)
    report.print(only_json=flags.json)


if __name__ == "__main__":
    main()
