"""What is remembered of sequences without states, and how much of it."""

from __future__ import annotations

import numpy as np
from contracts.states import edge
from contracts.states import nodes as nodes_of

from kvstore.server.eviction.states.cache import GhostLimits, Ghosts
from kvstore.server.eviction.states.tree import (
    HYBRID_7B,
    CheckpointTree,
    HybridModel,
    Node,
    Tokens,
)

SMALL = HybridModel("small", 1, 1, 1, 8, 4)


class Remembered:
    """A tree with ghosts, and what was forgotten of it."""

    def __init__(self, nodes: int, tokens: int = 1000) -> None:
        self.tree = CheckpointTree(SMALL)
        self.ghosts = Ghosts(self.tree, GhostLimits(nodes, tokens))
        self.forgotten: list[Node] = []

    def see(self, *values: int) -> Node:
        sequence: Tokens = np.array(values, np.int32)
        match = self.tree.match(sequence)
        leaves, end = self.tree.extend(match, sequence)
        self.tree.tick += 1
        self.ghosts.touch([*match.path, leaves, end])
        return end

    def trim(self) -> None:
        self.ghosts.trim(self.forgotten.append)

    def knows(self, *values: int) -> bool:
        path = self.tree.match(np.array(values, np.int32)).path
        return bool(path) and path[-1].depth == len(values)


def test_the_sequence_that_was_seen_longest_ago_is_forgotten_first() -> None:
    one = Remembered(nodes=2)
    for sequence in ((1, 1), (2, 2), (1, 1), (3, 3)):
        one.see(*sequence)

    one.trim()

    assert not one.knows(2, 2)
    assert one.knows(1, 1)
    assert one.knows(3, 3)
    assert len(one.forgotten) == 1


def test_what_resident_states_stand_on_counts_for_nothing_and_stays() -> None:
    one = Remembered(nodes=10, tokens=0)
    one.tree.hold(one.see(1, 1, 1))

    one.trim()

    assert one.knows(1, 1, 1)


def test_a_shared_part_of_two_resident_sequences_stays_without_a_state() -> None:
    one = Remembered(nodes=0)
    one.tree.hold(one.see(1, 2, 3))
    one.tree.hold(one.see(1, 2, 4))

    one.trim()

    assert one.knows(1, 2)


def test_such_a_part_goes_as_well_when_the_state_of_one_of_them_went() -> None:
    one = Remembered(nodes=0)
    ends = [one.see(1, 2, 3), one.see(1, 2, 4)]
    for end in ends:
        one.tree.hold(end)
    one.trim()

    one.tree.drop(ends[0])
    one.ghosts.enter(ends[0])
    one.trim()

    assert one.tree.nodes == 1
    assert edge(ends[1]) == [1, 2, 4]


def test_a_state_that_went_makes_a_ghost_of_the_age_of_its_last_use() -> None:
    one = Remembered(nodes=1)
    old = one.see(1, 1)
    one.tree.hold(old)
    one.see(2, 2)
    one.tree.drop(old)
    one.ghosts.enter(old)

    one.trim()

    assert not one.knows(1, 1)


def test_limits_hold_whatever_comes() -> None:
    for nodes in [1, 7, 50]:
        one = Remembered(nodes, tokens=4 * nodes)
        rng = np.random.default_rng(nodes)
        for _ in range(500):
            one.see(*rng.integers(0, 3, rng.integers(1, 9)).tolist())
            one.trim()

            branches = sum(len(node.children) > 1 for node in nodes_of(one.tree))
            assert one.tree.nodes - branches <= nodes
            assert len(one.ghosts._queue) <= one.tree.nodes
        assert one.forgotten


def test_what_is_remembered_goes_with_the_capacity_up_to_a_limit() -> None:
    limits = GhostLimits.of(HYBRID_7B, 10_000_000_000)

    assert limits.tokens == 16 * 10_000_000_000 // 65_536
    assert limits.nodes == 64 * 10_000_000_000 // 26_787_840
    assert GhostLimits.of(HYBRID_7B, 10**15).nodes == 2**18
