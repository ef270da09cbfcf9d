"""The RadixIndex: which chunks exist, what they continue, and which tiers hold copies.

Chain digests already name a whole prefix, so the tree needs no edges to be walked: the
longest cached prefix of a key chain is its longest run of known keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.proto.types import ChunkInfo, ChunkKey, Fidelity


@dataclass(slots=True)
class Node:
    """One chunk: its sealed copies by tier name, and what is known of its use."""

    key: ChunkKey
    copies: dict[str, ChunkInfo] = field(default_factory=dict)
    hits: int = 0

    @property
    def info(self) -> ChunkInfo:
        """Any copy's description: key, parent and layout are the same in all."""
        return next(iter(self.copies.values()))


class RadixIndex:
    """Nodes by key. Not thread-safe: the manager's lock guards it."""

    def __init__(self) -> None:
        self._nodes: dict[ChunkKey, Node] = {}

    def add(self, tier: str, info: ChunkInfo) -> Node:
        """Take note of a sealed copy on *tier* and return the chunk's node."""
        node = self._nodes.get(info.key)
        if node is None:
            node = self._nodes[info.key] = Node(info.key)
        node.copies[tier] = info
        return node

    def discard(self, tier: str, key: ChunkKey) -> ChunkInfo | None:
        """Forget the copy on *tier*; the node goes with its last copy."""
        node = self._nodes.get(key)
        if node is None:
            return None
        info = node.copies.pop(tier, None)
        if not node.copies:
            del self._nodes[key]
        return info

    def get(self, key: ChunkKey) -> Node | None:
        """Return the node of *key*, None when no tier holds it."""
        return self._nodes.get(key)

    def longest_prefix(
        self, keys: Sequence[ChunkKey], min_fidelity: Fidelity = Fidelity.exact
    ) -> list[Node]:
        """Return the nodes of the longest run of *keys* with a copy of at least *min_fidelity*."""
        nodes = []
        get = self._nodes.get
        for key in keys:
            node = get(key)
            if node is None or not _has_fidelity(node, min_fidelity):
                break
            nodes.append(node)
        return nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes


def _has_fidelity(node: Node, least: Fidelity) -> bool:
    return any(info.fidelity >= least for info in node.copies.values())
