"""The eviction interface: told what happens on one tier, asked whom to give up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvstore.proto.types import ChunkInfo, ChunkKey


class EvictionPolicy(ABC):
    """Whom to evict from one tier.

    A policy sees keys, sizes and the order of events, never a tier or a clock. Its caller
    holds a lock. ``victims`` only answers: nothing changes until ``remove`` is called.
    """

    @abstractmethod
    def insert(self, info: ChunkInfo) -> None:
        """Take note of a chunk that was sealed on the tier."""

    @abstractmethod
    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Take note that a chain was used, its first chunk first. Unknown keys are skipped."""

    @abstractmethod
    def remove(self, key: ChunkKey) -> None:
        """Forget a chunk. Unknown keys are ignored."""

    @abstractmethod
    def victims(
        self, need_bytes: int, keep: Callable[[ChunkKey], bool], limit: int
    ) -> list[ChunkKey]:
        """Return whom to evict, in order, to free *need_bytes*, at most *limit* chunks.

        *keep* says which chunks cannot go now (leased, pinned, on their way out). The answer
        frees less than asked when nothing else is left.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Chunks known."""
