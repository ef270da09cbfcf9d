"""One to a thousand nodes: what they hit, what they ask of Redis and of each other, what breaks.

Prompts of copies of a trace are routed to simulated nodes; all memory together stays the same,
so that a cluster of any size sees one workload and only its division differs. What an operation
costs is measured in the same run, on this machine, over the loopback.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import structlog

from bench.charts import line_chart
from bench.cluster_costs import LOOKUP_CHUNKS, Costs, measure
from bench.cluster_failures import setbacks
from bench.cluster_limits import (
    BLOCK_BYTES,
    NODE_BLOCKS,
    REDIS_SHARE,
    Demand,
    Measured,
    demand,
    full_at,
)
from bench.cluster_nodes import AFFINITY, ROUTINGS, Cluster, ClusterTerms
from bench.cluster_prompts import load, prompts
from bench.report import Report

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


def simulate(chains: Sequence[Sequence[int]], footprint: int, nodes: int, routing: str) -> Measured:
    """Return what *nodes* count in the second half of *chains*."""
    cluster = Cluster(terms_of(footprint, nodes, routing))
    for chain in chains[: len(chains) // 2]:
        cluster.request(chain)
    before = cluster.counts.copy()
    for chain in chains[len(chains) // 2 :]:
        cluster.request(chain)
    return Measured(nodes, cluster.counts.since(before), cluster.imbalance(), cluster.copies())


def terms_of(footprint: int, nodes: int, routing: str) -> ClusterTerms:
    """Return a cluster of *nodes* that together hold MEMORY_SHARE of *footprint* blocks."""
    blocks = max(1, round(MEMORY_SHARE * footprint / nodes))
    return ClusterTerms(nodes, blocks, REDIS_SHARE * blocks * nodes, routing)


def add_failures(report: Report) -> None:
    """What is found less of while nodes, or a Redis master, are gone."""
    chains = list(prompts(load(CONVERSATION), COPIES[CONVERSATION]))
    footprint = len({block for chain in chains for block in chain})
    for nodes in FAILING:
        for failure, found in setbacks(chains, terms_of(footprint, nodes, AFFINITY)).items():
            usual = f"of blocks; {found.steady[0]:.1%} without the failure"
            report.add(f"affinity_{nodes}_{failure}_lost", found.lost, f"first minute, {usual}")
            report.add(
                f"affinity_{nodes}_{failure}_minutes",
                found.minutes,
                "until one found as much, to a point",
            )


def simulate_all(trace: str, sizes: Iterable[int]) -> dict[tuple[str, int], Measured]:
    """Return every routing at every size."""
    copies = COPIES[trace]
    chains = list(prompts(load(trace), copies))
    footprint = len({block for chain in chains for block in chain})
    return {
        (routing, nodes): simulate(chains, footprint, nodes, routing)
        for routing in ROUTINGS
        for nodes in sizes
    }


def add_costs(report: Report, costs: Costs) -> None:
    """What was measured."""
    of = f"{LOOKUP_CHUNKS} chunks"
    report.add("lookup_us", 1e6 * costs.lookup_s, f"a node's processor, a lookup of {of}")
    report.add("directory_ask_us", 1e6 * costs.round_trip_s, f"what a node waits, {of}")
    ask_s = costs.question_s + (LOOKUP_CHUNKS - 1) * costs.asked_key_s
    report.add("directory_ask_redis_us", 1e6 * ask_s, f"Redis' processor for it, {of}")
    report.add("directory_note_redis_us", 1e6 * costs.note_s, "for an entry written or removed")
    report.add("directory_entry_bytes", costs.entry_bytes, "Redis' memory for an entry")
    report.add("redis_read_gbps", 1e-9 * costs.redis_bytes_per_s, "parts of 1 MiB, one reader")
    report.add("redis_cpu_read_gbps", 1e-9 / costs.read_byte_s, "what its processor could read")
    report.add("redis_cpu_write_gbps", 1e-9 / costs.write_byte_s, "and write")
    report.add("peer_gbps", 1e-9 * costs.peer_bytes_per_s, "a hit in a peer's memory, verified")


def add_hits(report: Report, measured: Measured, routing: str, asks: Demand) -> None:
    """The row of one size, and its values if it is among those kept."""
    counts, share = measured.counts, measured.share
    if measured.nodes in KEPT:
        nodes = measured.nodes
        report.add(
            f"{routing}_{nodes}_local", share(counts.local), "of blocks: in the node's memory"
        )
        report.add(f"{routing}_{nodes}_peer", share(counts.peer), "in that of another")
        report.add(f"{routing}_{nodes}_redis", share(counts.redis), "in Redis alone")
        report.add(
            f"{routing}_{nodes}_redis_ops", asks.redis_ops, "keys asked for and entries, a second"
        )
        report.add(
            f"{routing}_{nodes}_redis_mb", 1e-6 * asks.redis_bytes, "chunks read and written, MB/s"
        )
        report.add(
            f"{routing}_{nodes}_peer_mb", 1e-6 * asks.peer_bytes, "each node from peers, MB/s"
        )
        report.add(
            f"{routing}_{nodes}_copies",
            measured.copies[0],
            f"of a block; at most {measured.copies[1]}",
        )
    else:
        found = ", ".join(
            f"{name} {share(getattr(counts, name)):.1%}" for name in ("local", "peer", "redis")
        )
        report.note(f"{routing}_{measured.nodes}", found, f"{asks.redis_ops:.0f} Redis keys/s")


def add_limits(report: Report, routing: str, asked: Sequence[tuple[int, Demand]]) -> None:
    """At how many nodes each part is full, and which is the first."""
    parts = {
        part: full_at([(nodes, asks.shares[part]) for nodes, asks in asked])
        for part in asked[0][1].shares
    }
    for part, nodes in parts.items():
        words = f"at {nodes:.3g} nodes" if nodes < math.inf else "at no size"
        last = f"{asked[-1][1].shares[part]:.2f} of it is used at {asked[-1][0]} nodes"
        report.note(f"{routing}: {part} full", words, last)
    report.add(
        f"{routing}_chunks_nodes", min(parts["chunks"], 1e6), "nodes that fill a Redis with chunks"
    )
    report.add(
        f"{routing}_directory_nodes", min(parts["directory"], 1e6), "nodes that fill one without"
    )
    _, asks = asked[-1]
    report.add(f"{routing}_peer_share", asks.shares["peers"], "of a node's wire, for peers")
    report.add(f"{routing}_redis_share", asks.shares["directory"], "of a Redis, for the directory")
    report.add(f"{routing}_redis_masters", asks.shares["chunks"], "Redis masters, for the chunks")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, simulate, print, and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the hits as an SVG")
    flags = parser.parse_args(argv)
    report = Report("cluster")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    costs = measure()
    add_costs(report, costs)
    series: dict[str, list[tuple[float, float]]] = {}
    found = simulate_all(CONVERSATION, NODES)
    for routing in ROUTINGS:
        asked = [(nodes, demand(found[routing, nodes], costs)) for nodes in NODES]
        for nodes, asks in asked:
            add_hits(report, found[routing, nodes], routing, asks)
        add_limits(report, routing, asked)
        name = routing.replace("_", " ")
        rows = [(nodes, found[routing, nodes]) for nodes in NODES]
        series[f"{name}: own memory"] = [(n, 100 * m.share(m.counts.local)) for n, m in rows]
        series[f"{name}: or a peer's"] = [
            (n, 100 * m.share(m.counts.local + m.counts.peer)) for n, m in rows
        ]
    size = 1e-6 * NODE_BLOCKS * costs.entry_bytes
    report.add("directory_mb_per_node", size, f"{NODE_BLOCKS} blocks of {BLOCK_BYTES >> 20} MiB")
    for (routing, nodes), measured in simulate_all(DOCUMENTS, KEPT[1:3]).items():
        report.add(
            f"{routing}_{nodes}_documents_local",
            measured.share(measured.counts.local),
            "prompts about documents",
        )
        report.add(
            f"{routing}_{nodes}_documents_copies",
            measured.copies[0],
            f"of a block; at most {measured.copies[1]}",
        )
    add_failures(report)
    if flags.plot is not None:
        title = "Blocks found in memory, percent, as one memory is divided among nodes"
        line_chart(flags.plot, title, ("nodes", "percent of the blocks asked for"), series)
    report.print(only_json=flags.json)


if __name__ == "__main__":
    main()
