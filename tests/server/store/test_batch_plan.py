"""Batches: how often each chunk comes, and an order in which few are in need at once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvstore.server.store.batch_plan import plan_batch

Names = tuple[object, ...]
CHAINS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=30)


def chain(path: Iterable[object]) -> list[Names]:
    """Return the chain along a path: each name stands for all before it, too."""
    path = tuple(path)
    return [path[: at + 1] for at in range(len(path))]


def replay(
    chains: Sequence[Sequence[Names]],
    order: Sequence[int],
    uses: dict[Names, int],
) -> tuple[int, int]:
    """Ask for chains through a cache that drops a chunk after its last use; hits and peak."""
    left, hits, peak = dict(uses), 0, 0
    here: set[Names] = set()
    for number in order:
        hits += sum(name in here for name in chains[number])
        here.update(chains[number])
        peak = max(peak, len(here))
        for name in chains[number]:
            left[name] -= 1
            if not left[name]:
                here.discard(name)
    assert not here, "something was kept past its last use"
    return hits, peak


def test_uses_count_the_chains_that_a_chunk_is_in() -> None:
    plan = plan_batch([chain("ab"), chain("ac"), chain("ab")])
    assert plan.uses == {("a",): 3, ("a", "b"): 2, ("a", "c"): 1}


def test_chains_that_share_a_prefix_go_together() -> None:
    chains = [chain("abx"), chain("cd"), chain("aby"), chain("ce"), chain("ab")]
    assert plan_batch(chains).order == (4, 0, 2, 1, 3)


@given(CHAINS)
def test_every_chain_comes_once_and_the_peak_is_the_longest_of_them(
    paths: list[list[int]],
) -> None:
    chains = [chain(path) for path in paths]
    plan = plan_batch(chains)
    assert sorted(plan.order) == list(range(len(chains)))
    assert plan.uses == dict(Counter(name for one in chains for name in one))
    assert plan.peak_chunks == max(map(len, chains), default=0)


@given(CHAINS)
def test_a_cache_of_the_peak_finds_what_an_endless_one_does(paths: list[list[int]]) -> None:
    chains = [chain(path) for path in paths]
    plan = plan_batch(chains)
    hits, peak = replay(chains, plan.order, plan.uses)
    everything = sum(map(len, chains))
    assert hits == everything - len(plan.uses)
    assert peak == plan.peak_chunks


def test_another_order_needs_a_larger_cache() -> None:
    chains = [chain((group, leaf)) for group in range(20) for leaf in range(20)]
    random.Random(1).shuffle(chains)
    plan = plan_batch(chains)
    assert plan.peak_chunks == 2
    assert replay(chains, range(len(chains)), plan.uses)[1] > 10


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=12))
def test_chains_that_contradict_each_other_are_ordered_somehow(chains: list[list[int]]) -> None:
    plan = plan_batch(chains)
    assert sorted(plan.order) == list(range(len(chains)))
    assert all(1 <= uses <= len(chains) for uses in plan.uses.values())


def test_a_chain_of_thousands_needs_no_stack() -> None:
    assert plan_batch([list(range(20_000))]).peak_chunks == 20_000
