"""What a test reads off a CheckpointTree: its nodes, their edges, and sizes counted anew."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.server.eviction.states.tree import ROOT, CheckpointTree, Node


def nodes(tree: CheckpointTree) -> Iterator[Node]:
    """Yield every node but the root."""
    left = list(tree.known.children(ROOT))
    while left:
        number = left.pop()
        left.extend(tree.known.children(number))
        yield Node(tree, number)


def edge(tree: CheckpointTree, node: Node) -> list[int]:
    """Return the tokens from the parent to *node*."""
    tokens: list[int] = np.frombuffer(tree.known.edges[node.number], np.int32).tolist()
    return tokens


def parent(tree: CheckpointTree, node: Node) -> Node:
    return Node(tree, tree.known.parents[node.number])


def spelt(tree: CheckpointTree, node: Node) -> list[int]:
    """Return all tokens up to *node*."""
    path = reversed(list(tree.path_up(node.number)))
    return [token for number in path for token in edge(tree, Node(tree, number))]


def recounted_bytes(tree: CheckpointTree) -> int:
    """Return what ``size_bytes`` has to be: states, and KV of edges above any of them."""
    model = tree.model
    return sum(
        model.state_bytes * node.held
        + model.kv_bytes_per_token * len(edge(tree, node)) * (tree.known.below[node.number] > 0)
        for node in nodes(tree)
    )
