"""Simulation of one to a thousand nodes: hits, load on Redis and between nodes, failures.

Prompts of copies of a trace are routed to simulated nodes. Total memory is constant, so clusters of
any size have one workload, divided differently. Costs of operations are measured in the same run,
on this machine over the loopback. ``--only nodes``: reads from the memory of another node.
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

from bench.cluster.costs import LOOKUP_CHUNKS, Costs, add_nodes, measure
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
"""Prompts a second for each node: 12,000 tokens of the conversation trace."""
NODE_BLOCKS = 4096
"""Blocks in a node's memory: 256 GiB."""
REDIS_SHARE = 4
"""Blocks in Redis for each block of memory."""
CONVERSATION = "mooncake_conversation_trace"
DOCUMENTS = "dev_ragshared_qps2_n900"
NODES = (1, 3, 10, 30, 100, 300, 1000)
FAILING = (10, 100)
"""Cluster sizes that lose nodes, or a Redis master."""
KEPT = (1, 10, 100, 1000)
"""Cluster sizes with figures in the report."""
COPIES = {CONVERSATION: 4, DOCUMENTS: 24}
MEMORY_SHARE = 0.08
"""Memory of all nodes together, as a share of the footprint: 250 s of its prompts."""
MINUTE_S = 60.0
DOWN_NODES = 0.1
"""Share of nodes that fail at once, at least one. A minute later they are back, empty."""
MASTERS = 3
"""Masters of a Redis Cluster: each has a share of the blocks. One is down for a minute and keeps
its data."""
SAME = 0.01
"""Tolerance, as a share of the blocks."""
NODES_DOWN, MASTER_DOWN = "nodes_down", "master_down"
FAILURES = (NODES_DOWN, MASTER_DOWN)
MOST_MINUTES = 20
"""Length of the comparison."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Counts of one simulated cluster; mean and largest number of copies of a block."""

    nodes: int
    counts: ClusterCounts
    copies: tuple[float, int]

    def share(self, blocks: int) -> float:
        return blocks / max(1, self.counts.blocks)


@dataclass(frozen=True, slots=True)
class Demand:
    """The load of a cluster a second (``peer_bytes``: of each node), and ``shares`` of capacity.

    ``directory``, ``chunks``: of the thread of one Redis. ``peers``: of a node's link, if nodes
    send as much as they receive.
    """

    redis_ops: float
    redis_bytes: float
    peer_bytes: float
    shares: Mapping[str, float]


def demand(measured: Measured, costs: Costs) -> Demand:
    """Return the load of *measured* on machines with *costs*, at RATE prompts a node."""
    counts = measured.counts
    each = RATE * measured.nodes / max(1, counts.prompts)
    queries, keys = each * counts.queries, each * counts.queried_keys
    entries = each * (counts.added + counts.dropped)
    read, written = (each * n * BLOCK_BYTES for n in (counts.redis, counts.redis_written))
    peer = each / measured.nodes * counts.peer * BLOCK_BYTES
    queried_s = queries * costs.query_s + max(0.0, keys - queries) * costs.extra_key_s
    shares = {
        "directory": queried_s + entries * costs.entry_s,
        "chunks": read * costs.read_byte_s + written * costs.write_byte_s,
        "peers": peer / costs.peer_bytes_per_s,
    }
    return Demand(keys + entries, read + written, peer, shares)


def full_at(points: Sequence[tuple[int, float]]) -> float:
    """Return the number of nodes at which a share, given at *points*, reaches 1.

    Between points the share is a power of the nodes, extrapolated beyond the last two; before the
    first point it is proportional. Infinite if it does not reach 1 below a million nodes.
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
    """Shares of blocks found, minute by minute from a failure on.

    In the memory of nodes if nodes fail; anywhere if a master does.
    """

    steady: tuple[float, ...]
    failed: tuple[float, ...]

    @property
    def lost(self) -> float:
        return self.steady[0] - self.failed[0]

    @property
    def minutes(self) -> int:
        """Minutes until one found as much, within SAME: routing alone moves a share by that."""
        pairs = zip(self.steady, self.failed, strict=True)
        same = (at for at, (steady, failed) in enumerate(pairs) if steady - failed <= SAME)
        return next(same, len(self.steady))


def setbacks(chains: Sequence[Chain], terms: ClusterTerms) -> dict[str, Setback]:
    """Return the cost of each of FAILURES after the first half of *chains*."""
    half = len(chains) // 2
    cluster = Cluster(terms)
    cluster.replay(chains[:half])
    minute = max(1, round(MINUTE_S * RATE * terms.nodes))
    rest = chains[half : half + MOST_MINUTES * minute]
    steady = _minutes(deepcopy(cluster), rest, minute)
    found = {}
    for at, failure in enumerate(FAILURES):
        failing = deepcopy(cluster)
        if failure == NODES_DOWN:
            for node in range(max(1, round(DOWN_NODES * terms.nodes))):
                failing.fail_node(node)
        else:
            failing.lost_master = (0, MASTERS)
        failed = _minutes(failing, rest, minute)
        found[failure] = Setback(*(tuple(one[at] for one in rows) for rows in (steady, failed)))
    return found


def _minutes(cluster: Cluster, chains: Sequence[Chain], minute: int) -> list[tuple[float, float]]:
    """Return the shares found each minute, in memory and anywhere; failures end after the first."""
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
            until = "until one found as much, within a point"
            report.add(f"affinity_{nodes}_{failure}_minutes", found.minutes, until)


def chains_of(trace: str) -> tuple[list[list[int]], int]:
    """Return the chains of COPIES of *trace*, and their footprint in blocks."""
    chains = list(prompts(read_blocks(trace), COPIES[trace]))
    return chains, len({block for chain in chains for block in chain})


def simulate_all(trace: str, sizes: Iterable[int]) -> dict[tuple[str, int], Measured]:
    """Return the counts over the second half, by routing and number of nodes."""
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
    query_s = costs.query_s + (LOOKUP_CHUNKS - 1) * costs.extra_key_s
    size_mb = 1e-6 * NODE_BLOCKS * costs.entry_bytes
    report.add("lookup_us", 1e6 * costs.lookup_s, f"processor time of a node, a lookup of {of}")
    report.add("directory_ask_us", 1e6 * costs.round_trip_s, f"latency at a node, {of}")
    report.add("directory_ask_redis_us", 1e6 * query_s, f"Redis' processor time for it, {of}")
    report.add("directory_note_redis_us", 1e6 * costs.entry_s, "for an entry written or removed")
    report.add("directory_entry_bytes", costs.entry_bytes, "Redis' memory for an entry")
    report.add("redis_read_gbps", 1e-9 * costs.redis_bytes_per_s, "parts of 1 MiB, one reader")
    report.add("redis_cpu_read_gbps", 1e-9 / costs.read_byte_s, "limit of its processor")
    report.add("redis_cpu_write_gbps", 1e-9 / costs.write_byte_s, "the same for writes")
    report.add("peer_gbps", 1e-9 * costs.peer_bytes_per_s, "a hit in a peer's memory, verified")
    report.add("directory_mb_per_node", size_mb, f"{NODE_BLOCKS} blocks")


def add_hits(report: Report, measured: Measured, routing: str, load: Demand) -> None:
    counts, share, nodes = measured.counts, measured.share, measured.nodes
    copies, most = measured.copies
    report.add(f"{routing}_{nodes}_local", share(counts.local), "of blocks: in the node's memory")
    report.add(f"{routing}_{nodes}_peer", share(counts.peer), "in that of another")
    report.add(f"{routing}_{nodes}_redis", share(counts.redis), "in Redis alone")
    report.add(f"{routing}_{nodes}_redis_ops", load.redis_ops, "keys and entries, a second")
    report.add(f"{routing}_{nodes}_redis_mb", 1e-6 * load.redis_bytes, "read and written, MB/s")
    report.add(f"{routing}_{nodes}_peer_mb", 1e-6 * load.peer_bytes, "each from peers, MB/s")
    report.add(f"{routing}_{nodes}_copies", copies, f"of a block; at most {most}")


def add_limits(report: Report, routing: str, loads: Sequence[tuple[int, Demand]]) -> None:
    """Add the nodes that fill a Redis, and the used share of each part at the most nodes."""
    chunks, directory = (
        min(full_at([(nodes, load.shares[part]) for nodes, load in loads]), 1e6)
        for part in ("chunks", "directory")
    )
    report.add(f"{routing}_chunks_nodes", chunks, "nodes that fill a Redis with chunks")
    report.add(f"{routing}_directory_nodes", directory, "nodes that fill one with the directory")
    shares = loads[-1][1].shares
    report.add(f"{routing}_peer_share", shares["peers"], "of a node's link, for peers")
    report.add(f"{routing}_redis_share", shares["directory"], "of a Redis, for the directory")
    report.add(f"{routing}_redis_masters", shares["chunks"], "Redis masters, for the chunks")


def add_simulation(report: Report) -> dict[str, list[tuple[float, float]]]:
    """Measure and simulate; return the series of the plot."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    costs = measure()
    add_costs(report, costs)
    series: dict[str, list[tuple[float, float]]] = {}
    found = simulate_all(CONVERSATION, NODES)
    for routing in ROUTINGS:
        rows = [found[routing, nodes] for nodes in NODES]
        loads = [(one.nodes, demand(one, costs)) for one in rows]
        for one, (_, load) in zip(rows, loads, strict=True):
            if one.nodes in KEPT:
                add_hits(report, one, routing, load)
        add_limits(report, routing, loads)
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
            line_chart(flags.plot, title, ("nodes", "percent of the requested blocks"), series)
    if "nodes" in flags.only:
        add_nodes(report)
    report.print(only_json=flags.json)


if __name__ == "__main__":
    main()
