"""Least recently used, leaves of the prefix tree first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from typing_extensions import override

from kvstore.proto.types import ChunkInfo, ChunkKey
from kvstore.server.policy.base import EvictionPolicy

_SPARE_ENTRIES = 64


@dataclass(slots=True)
class _Node:
    parent: ChunkKey | None
    size_bytes: int
    used: int
    children: int = 0


class LruEviction(EvictionPolicy):
    """Evict the leaf that was used longest ago.

    A chunk is of no use without those before it, so only leaves (chunks none of whose
    continuations are on the tier) are candidates: this is the leaf-LRU of SGLang's
    RadixAttention (Zheng et al., arXiv 2312.07104, section 3.1), over chunks instead of tokens.

    The heap holds (used, key) of leaves and is cleaned lazily: an entry counts only while its
    number is still the node's and the node is still a leaf.
    """

    def __init__(self) -> None:
        self._nodes: dict[ChunkKey, _Node] = {}
        self._waiting: dict[ChunkKey, int] = {}
        """Children on the tier of chunks that are not."""
        self._heap: list[tuple[int, ChunkKey]] = []
        self._ticks = count()

    @override
    def insert(self, info: ChunkInfo) -> None:
        if info.key in self._nodes:
            self.touch([info.key])
            return
        parent = info.parent_key
        if self._closes_circle(info.key, parent):
            parent = None
        node = _Node(parent, info.size_bytes, next(self._ticks), self._waiting.pop(info.key, 0))
        self._nodes[info.key] = node
        if parent is not None:
            self._count_child(parent, 1)
        self._push(info.key, node)

    def _closes_circle(self, key: ChunkKey, parent: ChunkKey | None) -> bool:
        """Whether *key* is among its own ancestors, as a client that lies about parents can
        make it. A circle has no leaf and would never be evicted.
        """
        if parent != key and key not in self._waiting:
            return False  # nothing continues it, so nothing leads back to it
        above = parent
        while above is not None and above != key:
            node = self._nodes.get(above)
            above = None if node is None else node.parent
        return above == key

    @override
    def touch(self, keys: Sequence[ChunkKey]) -> None:
        for key in reversed(keys):
            node = self._nodes.get(key)
            if node is not None:
                node.used = next(self._ticks)
                self._push(key, node)

    @override
    def remove(self, key: ChunkKey) -> None:
        node = self._nodes.pop(key, None)
        if node is None:
            return
        if node.children:
            self._waiting[key] = node.children
        if node.parent is not None:
            self._count_child(node.parent, -1)

    def _count_child(self, parent: ChunkKey, step: int) -> None:
        node = self._nodes.get(parent)
        if node is not None:
            node.children += step
            self._push(parent, node)
            return
        left = self._waiting.get(parent, 0) + step
        if left:
            self._waiting[parent] = left
        else:
            del self._waiting[parent]

    def _push(self, key: ChunkKey, node: _Node) -> None:
        if node.children:
            return
        heapq.heappush(self._heap, (node.used, key))
        if len(self._heap) > 2 * len(self._nodes) + _SPARE_ENTRIES:
            leaves = ((n.used, k) for k, n in self._nodes.items() if not n.children)
            self._heap = list(leaves)
            heapq.heapify(self._heap)

    @override
    def victims(
        self, need_bytes: int, keep: Callable[[ChunkKey], bool], limit: int
    ) -> list[ChunkKey]:
        chosen: list[ChunkKey] = []
        taken: list[tuple[int, ChunkKey]] = []
        orphaned: dict[ChunkKey, int] = {}
        bared: set[ChunkKey] = set()
        seen: set[ChunkKey] = set()  # lazy cleaning may leave one entry twice
        freed_bytes = 0
        while self._heap and freed_bytes < need_bytes and len(chosen) < limit:
            entry = heapq.heappop(self._heap)
            key = entry[1]
            node = self._nodes.get(key)
            if node is None or node.used != entry[0] or (node.children and key not in bared):
                continue
            if key in seen:
                continue
            seen.add(key)
            if key not in bared:
                taken.append(entry)
            if keep(key):
                continue
            chosen.append(key)
            freed_bytes += node.size_bytes
            self._bare_parent(node, orphaned, bared)
        for entry in taken:
            heapq.heappush(self._heap, entry)
        return chosen

    def _bare_parent(
        self, node: _Node, orphaned: dict[ChunkKey, int], bared: set[ChunkKey]
    ) -> None:
        """Make the parent a candidate once every child of it is chosen."""
        parent = None if node.parent is None else self._nodes.get(node.parent)
        if parent is None or node.parent is None:
            return
        orphaned[node.parent] = orphaned.get(node.parent, 0) + 1
        if orphaned[node.parent] == parent.children:
            bared.add(node.parent)
            heapq.heappush(self._heap, (parent.used, node.parent))

    @override
    def __len__(self) -> int:
        return len(self._nodes)
