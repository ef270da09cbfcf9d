"""What a cluster asks of its parts each second, and which of them is the first to be too slow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.cluster_costs import Costs
from bench.cluster_nodes import ClusterCounts

BLOCK_BYTES = 512 * 131_072
"""512 tokens of a model of 8 billion parameters: 32 layers, 8 KV heads of 128, bfloat16."""

RATE = 1.0
"""Prompts a second that each node gets: 12,000 tokens of the conversation trace."""

NODE_BLOCKS = 4096
"""Blocks in a node's memory: 256 GiB."""

REDIS_SHARE = 4
"""Times as many blocks in Redis, for each node."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One simulated cluster: what it counted, and how unlike its nodes were.

    *imbalance*: the prompts of the busiest node over the mean; *copies*: mean and largest number
    of copies of a block in memory.
    """

    nodes: int
    counts: ClusterCounts
    imbalance: float
    copies: tuple[float, int]

    def share(self, blocks: int) -> float:
        """Return *blocks* as a share of those asked for."""
        return blocks / max(1, self.counts.blocks)

    def each(self, number: int) -> float:
        """Return *number* for each prompt."""
        return number / max(1, self.counts.prompts)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a cluster asks for in a second, and what share of each part's time that takes.

    ``directory``, ``chunks``: of the one thread of a Redis; ``lookups``: of one core of the
    busiest node; ``peers``: of the wire of a node, if nodes give as much as they take.
    """

    redis_ops: float
    redis_bytes: float
    peer_bytes: float
    """Of each node."""
    shares: Mapping[str, float]


def demand(measured: Measured, costs: Costs) -> Demand:
    """Return what *measured* asks of a machine with *costs*, at RATE prompts a node."""
    counts, prompts = measured.counts, RATE * measured.nodes
    questions = prompts * measured.each(counts.questions)
    keys = prompts * measured.each(counts.asked_keys)
    notes = prompts * measured.each(counts.noted + counts.dropped)
    read = prompts * measured.each(counts.redis) * BLOCK_BYTES
    written = prompts * measured.each(counts.redis_written) * BLOCK_BYTES
    peer = RATE * measured.each(counts.peer) * BLOCK_BYTES
    directory_s = (
        questions * costs.question_s
        + max(0.0, keys - questions) * costs.asked_key_s
        + notes * costs.note_s
    )
    chunks_s = read * costs.read_byte_s + written * costs.write_byte_s
    return Demand(
        redis_ops=keys + notes,
        redis_bytes=read + written,
        peer_bytes=peer,
        shares={
            "directory": directory_s,
            "chunks": chunks_s,
            "lookups": RATE * measured.imbalance * costs.lookup_s,
            "peers": peer / costs.peer_bytes_per_s,
        },
    )


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
        last = high == points[-1][0]
        if below <= 0 or above <= below:
            continue
        if above >= 1 or last:
            slope = math.log(above / below) / math.log(high / low)
            at = low * (1 / below) ** (1 / slope)
            return at if at < 1e6 else math.inf
    return math.inf
