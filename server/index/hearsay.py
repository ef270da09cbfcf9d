"""Hearsay: the part of the Catalog that learns what others have, and says to others what is here.

Both a chain at a time, which costs a fraction of its chunks one by one: somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.proto.types import ChunkInfo, ChunkKey, Fidelity
from kvstore.server.index.knowledge import Origin
from kvstore.server.index.looks import Looks
from kvstore.server.policy.journal import StoredChain

AT_ONCE = 32
"""Chunks noted, or told of, without letting go of the lock."""

_OTHERS = Origin()


class Hearsay(Looks):
    """Notes copies that others made, on tiers that are not memory. Thread-safe."""

    def note_found(self, tier: str, infos: Sequence[ChunkInfo]) -> list[ChunkInfo]:
        """Others have copies on *tier*: note those that are not known, return those that say
        otherwise than what is here does.
        """
        others: list[ChunkInfo] = []
        for start in range(0, len(infos), AT_ONCE):
            with self._lock:
                for chain in _chains(infos[start : start + AT_ONCE]):
                    others += self._note(tier, chain)
        self._news.set()
        return others

    def _note(self, tier: str, chain: Sequence[ChunkInfo]) -> list[ChunkInfo]:
        """Note a chain at once if nobody knows any of it, else its chunks one by one."""
        index = self._index
        is_told = self.uses or (self.events is not None and self.events.covers(tier))
        if len(chain) > 1 and not is_told and not any(index.row(info.key) for info in chain):
            self._note_chain(tier, chain)
            return []
        others = []
        for info in chain:
            if self._contradicts(info):
                others.append(info)
            elif tier not in index.holders(index.row(info.key)):
                self._sealed(tier, info, None)
        return others

    def _note_chain(self, tier: str, chain: Sequence[ChunkInfo]) -> None:
        """As ``_sealed`` of each chunk of a chain that nobody knows."""
        index, known = self._index, self.knowledge
        if self._strays[tier]:
            self._strays[tier].difference_update([info.key for info in chain])
        rows = index.add_chain(tier, chain)
        facts, flops = known.facts_of_chain(rows, chain, _OTHERS)
        for row in rows:
            known.hints.arrived(row)
        number, parent = index.tiers.index(tier), index.parent(rows[0])
        size_bytes = chain[0].size_bytes
        stored = StoredChain(number, rows, parent, size_bytes, facts, flops, self._clock())
        self._journal.note(stored)

    def infos_on(self, tier: str, keys: Sequence[ChunkKey]) -> list[ChunkInfo | None]:
        """Return what *tier* has of each of *keys*, of one namespace; None where it has nothing."""
        found: list[ChunkInfo | None] = []
        for start in range(0, len(keys), AT_ONCE):
            with self._lock:
                found += self._infos(tier, keys[start : start + AT_ONCE])
        return found

    def _infos(self, tier: str, keys: Sequence[ChunkKey]) -> Iterator[ChunkInfo | None]:
        index = self._index
        rows = index.known_prefix(keys)
        held, _ = index.sizes(tier, rows, Fidelity.none)
        for row, is_here in zip(rows.tolist(), held.tolist(), strict=True):
            yield index.info(tier, row) if is_here else None
        for key in keys[len(rows) :]:
            row = index.row(key)
            yield index.info(tier, row) if row and tier in index.holders(row) else None


def _chains(infos: Sequence[ChunkInfo]) -> Iterator[list[ChunkInfo]]:
    """Cut *infos* where one does not continue the one before, or is of another layout or size."""
    chain: list[ChunkInfo] = []
    seen: set[ChunkKey] = set()
    for info in infos:
        if chain and not (_continues(chain[-1], info) and info.key not in seen):
            yield chain
            chain, seen = [], set()
        chain.append(info)
        seen.add(info.key)
    if chain:
        yield chain


def _continues(last: ChunkInfo, info: ChunkInfo) -> bool:
    is_next = info.parent_key == last.key and info.size_bytes == last.size_bytes
    return is_next and (info.layout is last.layout or info.layout == last.layout)
