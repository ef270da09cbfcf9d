"""What others have is noted a chain at a time, and nothing is told apart by that."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
from contracts.chunks import make_representation
from contracts.policy import info, key
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.clock import FakeClock

from kvstore.proto.types import Accuracy, ChunkInfo, KVLayout
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.policy import EvictionPolicy
from kvstore.server.index.catalog import AT_ONCE, Catalog
from kvstore.server.index.holds import Leases

PLACES = st.tuples(st.integers(0, 11), st.sampled_from([None, -1, -1, -1, -1, -2]))
"""A chunk, and how far before it the one is that it continues."""


def make_catalog() -> Catalog:
    ids = count(1)
    policies: dict[str, EvictionPolicy] = {"cpu": LruEviction(), "peer": LruEviction()}
    return Catalog(policies, Leases(10, lambda: next(ids)), 1000, FakeClock())


def chain(first: int, stop: int) -> list[ChunkInfo]:
    return [info(number, number - 1 if number else None) for number in range(first, stop)]


def state(catalog: Catalog, keys: int) -> list[object]:
    """Return all that may be asked about each key, and what would be saved of it.

    But for the length of the prompt, which is guessed by what came together.
    """
    saved = catalog.save().chunks
    saved = saved[np.argsort(saved["key"])][["key", "flops", "hits", "turns", "own", "priority"]]
    told: list[object] = [
        (catalog.copies(key(n)), catalog.eviction.rank("peer", key(n)), catalog.is_held(key(n)))
        for n in range(keys)
    ]
    return [*told, catalog.eviction.count_on("peer"), saved.tolist()]


@given(st.lists(st.lists(PLACES, max_size=12), max_size=4), st.sets(st.integers(0, 11)))
@settings(max_examples=60, deadline=None)
def test_chunks_noted_together_are_known_as_chunks_noted_one_by_one(
    asked: list[list[tuple[int, int | None]]], ours: set[int]
) -> None:
    together, alone = make_catalog(), make_catalog()
    for catalog in (together, alone):
        for number in sorted(ours):
            catalog.note_sealed("cpu", info(number, number - 1 if number else None))
    for answer in asked:
        infos = [info(n, None if step is None else max(0, n + step)) for n, step in answer]
        found = together.note_found("peer", infos)
        assert found == [one for each in infos for one in alone.note_found("peer", [each])]
    assert state(together, 12) == state(alone, 12)


def test_a_chunk_of_another_layout_is_told_back_and_not_noted() -> None:
    catalog = make_catalog()
    catalog.note_sealed("cpu", info(1, 0))
    other = replace(info(1, 0), layout=KVLayout.of(make_representation(3), 16))
    assert catalog.note_found("peer", [info(0, None), other, info(2, 1)]) == [other]
    assert [list(catalog.copies(key(n))) for n in range(3)] == [["peer"], ["cpu"], ["peer"]]


def test_a_chain_longer_than_is_noted_at_once_is_noted_whole() -> None:
    catalog = make_catalog()
    length = 3 * AT_ONCE + 1
    assert catalog.note_found("peer", chain(0, length)) == []
    keys = [key(number) for number in range(length)]
    assert len(catalog.match(keys, Accuracy.exact, ("cpu", "peer")).sources) == length
    assert catalog.eviction.count_on("peer") == length


def test_what_a_tier_has_is_told_in_the_order_of_the_question() -> None:
    catalog = make_catalog()
    for one in chain(0, 4):
        catalog.note_sealed("cpu", one)
    catalog.note_found("peer", chain(4, 6))
    catalog.forget("cpu", key(1))
    asked = [key(number) for number in (0, 1, 2, 4, 3, 99, 0)]
    there = [info(0, None), None, info(2, 1), None, info(3, 2), None, info(0, None)]
    assert catalog.infos_on("cpu", asked) == there
    assert catalog.infos_on("cpu", []) == []
