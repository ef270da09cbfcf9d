"""The tree of sequences: examples, and random schedules against sets of prefixes."""

from __future__ import annotations

import numpy as np
from contracts.states import edge, recounted_bytes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.server.eviction.states.tree import (
    HYBRID_7B,
    CheckpointTree,
    HybridModel,
    Node,
    Tokens,
)

SMALL = HybridModel("small", 1, 1, 1, 8, 4)
STATE, KV = SMALL.state_bytes, SMALL.kv_bytes_per_token

Sequence = tuple[int, ...]


def tokens(*values: int) -> Tokens:
    return np.array(values, np.int32)


def insert(tree: CheckpointTree, *values: int) -> tuple[Node, Node]:
    sequence = tokens(*values)
    return tree.extend(tree.match(sequence), sequence)


def test_a_split_copies_its_edges_so_that_nothing_of_the_whole_stays_alive() -> None:
    tree = CheckpointTree(SMALL)
    _, end = insert(tree, *range(1000))

    parts, _ = insert(tree, 0, 5)

    assert [len(one.edge) for one in (parts, end)] == [4, 4 * 999]


def test_a_node_that_is_forgotten_gives_its_edge_to_its_only_child() -> None:
    tree = CheckpointTree(SMALL)
    _, middle = insert(tree, 1, 2)
    _, end = insert(tree, 1, 2, 3)
    tree.hold(end)

    tree.forget(middle)

    assert edge(end) == [1, 2, 3]
    assert end.parent == tree.root
    assert tree.size_bytes == STATE + 3 * KV
    assert tree.match(tokens(1, 2, 3)).path == [end]


def prefixes(sequence: Sequence) -> set[Sequence]:
    return {sequence[:end] for end in range(1, len(sequence) + 1)}


class TreeMachine(RuleBasedStateMachine):
    """The tree beside a set of known positions and a set of those with states."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = CheckpointTree(SMALL)
        self.known: set[Sequence] = set()
        self.held: set[Sequence] = set()

    def node(self, at: Sequence) -> Node:
        path = self.tree.match(tokens(*at)).path
        assert path[-1].depth == len(at)
        return path[-1]

    def children(self, at: Sequence) -> set[int]:
        return {one[len(at)] for one in self.known if one[: len(at)] == at and len(one) > len(at)}

    sequences = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)

    @rule(sequence=sequences)
    def insert(self, sequence: Sequence) -> None:
        leaves, end = insert(self.tree, *sequence)

        shared = prefixes(sequence) & {p for one in self.known for p in prefixes(one)}
        at = max(shared, key=len, default=())
        assert leaves.depth == len(at)
        assert end.depth == len(sequence)
        self.known |= {sequence, at} - {()}

    @precondition(lambda self: self.known - self.held)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(sorted(self.known - self.held)))
        self.tree.hold(self.node(at))
        self.held.add(at)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(sorted(self.held)))
        self.tree.drop(self.node(at))
        self.held.remove(at)

    @precondition(lambda self: self.known - self.held)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(sorted(self.known - self.held)))
        if len(self.children(at)) <= 1:
            self.tree.forget(self.node(at))
            self.known.remove(at)

    @rule(prompt=sequences)
    def match(self, prompt: Sequence) -> None:
        path = self.tree.match(tokens(*prompt)).path

        assert [node.depth for node in path] == sorted(map(len, self.known & prefixes(prompt)))
        with_state = [node.depth for node in path if node.held]
        assert with_state == sorted(map(len, self.held & prefixes(prompt)))

    @invariant()
    def sizes_are_exact(self) -> None:
        kept = {p for one in self.held for p in prefixes(one)}
        everything = {p for one in self.known for p in prefixes(one)}
        assert self.tree.size_bytes == len(self.held) * STATE + len(kept) * KV
        assert (self.tree.kept_tokens, self.tree.tokens) == (len(kept), len(everything))
        assert (self.tree.nodes, self.tree.resident) == (len(self.known), len(self.held))
        assert recounted_bytes(self.tree) == self.tree.size_bytes

    @invariant()
    def nodes_say_what_each_state_is_worth(self) -> None:
        assert {node.depth for node in self.tree.held()} == set(map(len, self.held))
        for at in self.held:
            node = self.node(at)
            above = max((len(one) for one in self.held & prefixes(at) - {at}), default=0)
            others = {p for one in self.held - {at} for p in prefixes(one)}
            below = [one for one in self.held if at in prefixes(one) - {one}]
            assert node.marginal == len(at) - above
            assert node.alone == len(prefixes(at) - others)
            assert node.branches == len({one[len(at)] for one in below})


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- what a hybrid model takes


def test_a_state_of_the_7_b_hybrid_is_as_large_as_the_kv_of_408_tokens() -> None:
    assert HYBRID_7B.state_bytes == 26_787_840
    assert HYBRID_7B.kv_bytes_per_token == 65_536
    assert HYBRID_7B.state_bytes // HYBRID_7B.kv_bytes_per_token == 408


def test_flops_are_the_sum_over_layers_of_the_published_formulas() -> None:
    tokens, wide, states = 1000, 4096, 128
    attention = 8 * tokens * wide**2 + 4 * tokens**2 * wide
    mlp = 16 * tokens * wide**2
    mamba = 12 * tokens * wide**2 + 16 * tokens * wide * states + 10 * tokens * wide
    assert HYBRID_7B.flops(tokens) == 4 * attention + 28 * mlp + 24 * mamba
    assert HYBRID_7B.flops(0) == 0
