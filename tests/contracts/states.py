"""What a test reads off a CheckpointTree: its nodes, their edges, and sizes counted anew."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.server.eviction.states.tree import CheckpointTree, Node


def nodes(tree: CheckpointTree) -> Iterator[Node]:
    """Yield every node but the root."""
    left = list(tree.root.children)
    while left:
        node = left.pop()
        left.extend(node.children)
        yield node


def edge(node: Node) -> list[int]:
    """Return the tokens from the parent to *node*."""
    tokens: list[int] = np.frombuffer(node.edge, np.int32).tolist()
    return tokens


def spelt(node: Node) -> list[int]:
    """Return all tokens up to *node*."""
    return [token for one in reversed(list(node.path_up())) for token in edge(one)]


def recounted_bytes(tree: CheckpointTree) -> int:
    """Return what ``size_bytes`` has to be: states, and KV of edges above any of them."""
    model, kept = tree.model, {one for node in nodes(tree) if node.held for one in node.path_up()}
    tokens = sum(len(edge(node)) for node in kept)
    states = sum(node.held for node in nodes(tree))
    return model.state_bytes * states + model.kv_bytes_per_token * tokens
