"""The RadixIndex: runs of known keys, and copies by tier."""

from __future__ import annotations

from dataclasses import replace

import pytest
from contracts.policy import info, key
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.types import Fidelity
from kvstore.server.policy.radix import RadixIndex

TIERS = ("cpu", "disk", "redis")


def test_an_empty_index_matches_nothing() -> None:
    index = RadixIndex()
    assert index.longest_prefix([key(1)]) == []
    assert index.get(key(1)) is None
    assert index.discard("cpu", key(1)) is None
    assert (len(index), list(index), key(1) in index) == (0, [], False)


@pytest.mark.parametrize(
    ("known", "asked", "ready"),
    [
        ([0, 1, 2], [0, 1, 2], 3),
        ([0, 1], [0, 1, 2], 2),
        ([0, 2], [0, 1, 2], 1),
        ([1, 2], [0, 1, 2], 0),
        ([0, 1, 2], [1, 2], 2),
        ([0], [], 0),
    ],
)
def test_the_longest_prefix_ends_before_the_first_gap(
    known: list[int], asked: list[int], ready: int
) -> None:
    index = RadixIndex()
    for number in known:
        index.add("cpu", info(number))
    nodes = index.longest_prefix([key(number) for number in asked])
    assert [node.key for node in nodes] == [key(number) for number in asked[:ready]]


def test_a_chunk_goes_with_its_last_copy() -> None:
    index = RadixIndex()
    index.add("cpu", info(1))
    index.add("disk", info(1, size_bytes=60))
    assert index.discard("cpu", key(1)) == info(1)
    assert key(1) in index
    assert index.discard("cpu", key(1)) is None
    assert index.discard("disk", key(1)) == info(1, size_bytes=60)
    assert key(1) not in index


def test_a_copy_that_is_not_near_enough_to_the_original_does_not_count() -> None:
    index = RadixIndex()
    index.add("cpu", info(0))
    index.add("disk", replace(info(1), fidelity=Fidelity.bounded))
    chain = [key(0), key(1)]
    assert len(index.longest_prefix(chain)) == 1
    assert len(index.longest_prefix(chain, Fidelity.bounded)) == 2
    index.add("cpu", info(1))
    assert len(index.longest_prefix(chain, Fidelity.exact)) == 2


_EVENTS = st.lists(st.tuples(st.booleans(), st.sampled_from(TIERS), st.integers(0, 5)), max_size=60)


@given(_EVENTS)
def test_any_events_leave_exactly_the_copies_that_were_not_discarded(
    events: list[tuple[bool, str, int]],
) -> None:
    index = RadixIndex()
    model: dict[tuple[str, int], None] = {}
    for adds, tier, number in events:
        if adds:
            node = index.add(tier, info(number))
            assert node.info == info(number)
            model[tier, number] = None
        else:
            was_there = (tier, number) in model
            assert (index.discard(tier, key(number)) is not None) == was_there
            model.pop((tier, number), None)
    found = {(tier, node.key) for node in index for tier in node.copies}
    assert found == {(tier, key(number)) for tier, number in model}
    assert len(index) == len({number for _, number in model})
    run = 0
    while any(number == run for _, number in model):
        run += 1
    assert len(index.longest_prefix([key(number) for number in range(6)])) == run
