"""What a batch of prompts has in common, and the order in which it is in need of least.

The global prefix information of BatchLLM (arXiv 2412.03594): prompts that share a prefix go one
after the other, and a chunk is kept for as long as prompts to come use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class BatchPlan(Generic[Name]):
    """``order``: the chains by number. ``uses``: in how many of them each chunk is.

    ``peak_chunks`` are kept at once when the chains are asked for in this order, each chunk from
    its first use to its last: the cache that finds all that an endless one does.
    """

    order: tuple[int, ...]
    uses: dict[Name, int]
    peak_chunks: int


@dataclass(slots=True)
class _Node(Generic[Name]):
    """A chunk in the tree of prefixes: what continues it, and the chains that end with it."""

    children: dict[Name, None] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)


def plan_batch(chains: Sequence[Sequence[Name]]) -> BatchPlan[Name]:
    """Plan *chains* of chunks; a chunk's name stands for all before it, too.

    The order is depth first through the tree of prefixes, its branches as they come in the
    batch. Then nothing but the chunks of one chain is in need at a time: the peak is the longest
    chain. Chains that contradict each other (a chunk behind two others) or themselves are
    ordered somehow, each once.
    """
    nodes: dict[Name | None, _Node[Name]] = {None: _Node()}
    uses: Counter[Name] = Counter()
    for number, chain in enumerate(chains):
        above: Name | None = None
        for name in chain:
            if name not in nodes:
                nodes[name] = _Node()
                nodes[above].children[name] = None
            above = name
        nodes[above].ends.append(number)
        uses.update(set(chain))
    order = _depth_first(nodes)
    return BatchPlan(tuple(order), dict(uses), _peak(chains, order, uses))


def _depth_first(nodes: dict[Name | None, _Node[Name]]) -> list[int]:
    order: list[int] = []
    waiting: list[Name | None] = [None]
    while waiting:
        node = nodes[waiting.pop()]
        order += node.ends
        waiting += reversed(node.children)
    return order


def _peak(chains: Sequence[Sequence[Name]], order: Sequence[int], uses: Counter[Name]) -> int:
    left = dict(uses)
    kept: set[Name] = set()
    peak = 0
    for number in order:
        kept.update(chains[number])
        peak = max(peak, len(kept))
        for name in set(chains[number]):
            left[name] -= 1
            if not left[name]:
                kept.discard(name)
    return peak
