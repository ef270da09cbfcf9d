"""The catalog: copies, leases, pins and victims in step; what is told late is told in order."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from itertools import count
from unittest.mock import Mock

import numpy as np
import pytest
from contracts.policy import ALL, everyone, info, key, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.clock import FakeClock
from typing_extensions import override

from kvstore.proto.errors import QuotaExceededError
from kvstore.proto.key_table import NO_ROW
from kvstore.proto.types import Accuracy, ChunkInfo
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.policy import EvictionPolicy, make_policy
from kvstore.server.index.access_log import MAX_EVENTS, MAX_ROWS, AccessLog, Lookup, Stored
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.hints import ChunkMetadata
from kvstore.server.index.holds import Leases, LeaseTerms

SESSION = 7


def make_catalog(clock: FakeClock, pin_limit_bytes: int = 1_000) -> Catalog:
    ids = count(1)
    policies: dict[str, EvictionPolicy] = {tier: LruEviction() for tier in ("cpu", "disk", "peer")}
    return Catalog(policies, Leases(10, lambda: next(ids)), pin_limit_bytes, clock)


@pytest.fixture
def catalog(clock: FakeClock) -> Catalog:
    """A infos of three in CPU memory, the first two on disk as well."""
    catalog = make_catalog(clock)
    for number in range(3):
        catalog.note_sealed("cpu", info(number, number - 1 if number else None))
    for number in range(2):
        catalog.note_sealed("disk", info(number, number - 1 if number else None, 60))
    return catalog


CHAIN = [key(number) for number in range(5)]
TIERS = ("cpu", "disk")


def test_a_match_is_the_longest_prefix_and_what_is_being_put_behind_it(catalog: Catalog) -> None:
    assert not catalog.in_flight.begin(key(0)), "it exists"
    assert [catalog.in_flight.begin(key(3)) for _ in range(2)] == [True, True]
    catalog.in_flight.end(key(3))
    assert catalog.in_flight.writers.total() == 1
    found = catalog.match(CHAIN, Accuracy.exact, TIERS)
    assert (found.known, found.pending) == (3, 1)
    assert found.sources.tolist() == [0, 0, 0]
    assert found.sizes.tolist() == [100, 100, 100]
    catalog.note_sealed("cpu", info(4, 3))
    assert catalog.match(CHAIN, Accuracy.exact, TIERS).pending == 2, "and what is there behind"
    catalog.in_flight.end(key(3))
    assert catalog.match(CHAIN, Accuracy.exact, TIERS).pending == 0


def test_each_chunk_of_a_match_comes_from_the_first_tier_that_may_be_read(catalog: Catalog) -> None:
    slow_first = catalog.match(CHAIN, Accuracy.exact, ("disk", "cpu"))
    assert (slow_first.sources.tolist(), slow_first.sizes.tolist()) == ([0, 0, 1], [60, 60, 100])
    barred = catalog.match(CHAIN, Accuracy.exact, (None, "disk"))
    assert (barred.known, barred.sources.tolist(), barred.sizes.tolist()) == (3, [1, 1], [60, 60])
    none = catalog.match(CHAIN, Accuracy.exact, (None, None))
    assert (none.known, none.sources.tolist()) == (3, [])
    catalog.forget("disk", key(1))
    catalog.note_sealed("disk", replace(info(1, 0, 60), accuracy=Accuracy.bounded))
    by_disk = ("disk", "cpu")
    assert catalog.match(CHAIN, Accuracy.exact, by_disk).sources.tolist() == [0, 1, 1]
    assert catalog.match(CHAIN, Accuracy.bounded, by_disk).sources.tolist() == [0, 0, 1]


def test_what_is_held_is_neither_claimed_nor_cast_out(catalog: Catalog) -> None:
    catalog.grant([key(0)], LeaseTerms(SESSION, 10.0))
    catalog.hold(key(2))  # it moves
    assert catalog.eviction.claim_victims("cpu", ALL, ALL) == []
    catalog.release_hold(key(2))
    assert catalog.eviction.claim_victims("cpu", ALL, ALL) == [key(2), key(1)]
    assert not catalog.drop_copy("cpu", key(0), even_if_held=False)
    assert catalog.copies(key(0)).keys() == {"cpu", "disk"}
    assert catalog.drop_copy("cpu", key(0))
    assert catalog.copies(key(0)).keys() == {"disk"}


class AskedClock(FakeClock):
    """Tells when somebody reads it, which a waiter does under the catalog's lock."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    @override
    def __call__(self) -> float:
        self.asked.set()
        return super().__call__()


def test_waiting_for_an_eviction_ends_with_it_and_not_without_one() -> None:
    clock = AskedClock()
    catalog = make_catalog(clock)
    catalog.note_sealed("cpu", info(0))
    assert not catalog.eviction.await_unclaimed("cpu", clock.now + 60)
    victims = catalog.eviction.claim_victims("cpu", 1, ALL)
    assert not catalog.eviction.await_unclaimed("disk", clock.now + 60)
    assert not catalog.eviction.await_unclaimed("cpu", clock.now)
    clock.asked.clear()

    def end_it() -> None:
        clock.asked.wait()
        catalog.eviction.unclaim(victims)

    over = threading.Thread(target=end_it)
    over.start()
    assert catalog.eviction.await_unclaimed("cpu", clock.now + 60)
    over.join()


def test_pins_have_a_limit_that_pinning_again_does_not_use_up(clock: FakeClock) -> None:
    catalog = make_catalog(clock, pin_limit_bytes=250)
    for number in range(3):
        catalog.note_sealed("cpu", info(number))
    assert catalog.pin([key(0), key(1)], 5.0) == 2
    assert catalog.pin([key(0), key(1)], 9.0) == 2
    with pytest.raises(QuotaExceededError, match="pin_limit_bytes=250"):
        catalog.pin([key(2)], 5.0)
    catalog.unpin([key(0)])
    assert catalog.pin([key(2)], 5.0) == 1


def test_who_has_answered_one_of_many_lookups_tells_of_an_earlier_one() -> None:
    catalog = make_catalog(FakeClock())
    for number in range(3):
        catalog.note_sealed("cpu", info(number, number - 1 if number else None))
    catalog.drain(0.0)
    history, row = catalog.state.metadata.history, catalog.state.index.row(key(0))
    before = history.hits_of(row)
    catalog.match(CHAIN, Accuracy.exact, TIERS)
    catalog.drain_some()
    assert history.hits_of(row) == before  # left to who waits for a pause
    catalog.match(CHAIN, Accuracy.exact, TIERS)
    catalog.drain_some()
    assert history.hits_of(row) == before + 1


def test_catching_up_ends_though_requests_never_pause() -> None:
    catalog = make_catalog(FakeClock())
    busy, is_over = threading.Event(), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            catalog.match(CHAIN, Accuracy.exact, TIERS)
            busy.set()

    asker = threading.Thread(target=ask)
    asker.start()
    busy.wait()
    assert catalog.drain(1.0)
    is_over.set()
    asker.join()


PLACES = st.tuples(st.integers(0, 11), st.sampled_from([None, -1, -1, -1, -1, -2]))
"""A chunk, and how far before it the one is that it continues."""


def infos(first: int, stop: int) -> list[ChunkInfo]:
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
    together, alone = make_catalog(FakeClock()), make_catalog(FakeClock())
    for catalog in (together, alone):
        for number in sorted(ours):
            catalog.note_sealed("cpu", info(number, number - 1 if number else None))
    for answer in asked:
        infos = [info(n, None if step is None else max(0, n + step)) for n, step in answer]
        found = together.note_found("peer", infos)
        assert found == [one for each in infos for one in alone.note_found("peer", [each])]
    assert state(together, 12) == state(alone, 12)


def test_what_a_tier_has_is_told_in_the_order_of_the_question() -> None:
    catalog = make_catalog(FakeClock())
    for one in infos(0, 4):
        catalog.note_sealed("cpu", one)
    catalog.note_found("peer", infos(4, 6))
    catalog.forget("cpu", key(1))
    asked = [key(number) for number in (0, 1, 2, 4, 3, 99, 0)]
    there = [info(0, None), None, info(2, 1), None, info(3, 2), None, info(0, None)]
    assert catalog.infos_on("cpu", asked) == there
    assert catalog.infos_on("cpu", []) == []


FULL = InsertInfo()


def listening() -> tuple[Mock, list[object]]:
    """A policy, and what it is told."""
    told: list[object] = []
    policy = Mock(spec=EvictionPolicy)
    policy.insert_chain = lambda rows, *facts: told.append((rows.tolist(), *facts))
    policy.touch = lambda rows, now_s: told.append((rows.tolist(), now_s))
    return policy, told


def requested(numbers: list[int], now_s: float = 1.0) -> Lookup:
    return Lookup(rows(numbers), [key(number) for number in numbers], now_s)


def stored(row: int, parent: int, now_s: float = 1.0, facts: InsertInfo | None = FULL) -> Stored:
    return Stored(0, [row], parent, 100, facts, [0.0], now_s)


def heard(*events: Lookup | Stored) -> list[object]:
    policy, told = listening()
    access_log = AccessLog(ChunkMetadata(), {"cpu": policy})
    for event in events:
        access_log.note(event)
    assert told == []
    access_log.apply_all()
    assert len(access_log) == 0
    return told


def test_events_are_told_in_their_order_and_chunks_of_a_chain_together() -> None:
    assert heard(stored(1, NO_ROW), requested([0]), stored(5, 1)) == [
        ([1], NO_ROW, 100, 1.0),
        ([1], 1.0),
        ([5], 1, 100, 1.0),
    ]
    chain = heard(stored(1, NO_ROW, 1.0), stored(2, 1, 1.05), stored(3, 2, 1.1))
    assert chain == [([1, 2, 3], NO_ROW, 100, 1.1)]


def test_what_does_not_continue_a_chain_is_told_alone() -> None:
    other_facts, other_size = InsertInfo(reuse=1), Stored(0, [3], 2, 101, FULL, [0.0], 1.0)
    for other in (
        stored(3, 1),  # not its child
        stored(3, 2, 1.5),  # later
        stored(3, 2, facts=None),  # known before
        stored(3, 2, facts=other_facts),
        other_size,
    ):
        assert len(heard(stored(1, NO_ROW), stored(2, 1), other)) == 2, other
    assert len(heard(stored(1, 1), stored(1, 1))) == 2, "a row that names itself as its parent"


def test_more_events_than_may_wait_are_worked_off_one_by_one() -> None:
    policy, told = listening()
    access_log = AccessLog(ChunkMetadata(), {"cpu": policy})
    for number in range(MAX_EVENTS + 10):
        access_log.note(stored(10 * number + 1, NO_ROW))
    assert (len(access_log), len(told)) == (MAX_EVENTS, 10)


def test_few_rows_wait_as_each_takes_time_to_apply() -> None:
    (policy, told), many = listening(), list(range(1, MAX_ROWS // 4 + 1))
    access_log = AccessLog(ChunkMetadata(), {"cpu": policy})
    for _ in range(14):
        access_log.note(requested(many))
    assert (len(access_log), len(told)) == (4, 10)
    access_log.note(Stored(0, many, NO_ROW, 100, FULL, [0.0] * len(many), 1.0))
    assert (len(access_log), len(told)) == (4, 11)
    access_log.apply_all()
    access_log.note(requested([2]))
    assert len(access_log) == 1


def test_a_lookup_asked_again_touches_and_is_not_counted() -> None:
    history, (policy, told) = AccessHistory(), listening()
    history.seen_chain(np.array([1]), NO_ROW, FULL, 0.0)
    access_log = AccessLog(ChunkMetadata(history), {"cpu": policy})
    access_log.note(Lookup(np.array([1]), [key(0)], 1.0, is_again=True))
    access_log.apply_all()
    assert (history.hits_of(1), told) == (1, [([1], 1.0)])


@pytest.mark.parametrize("name", ["lru", "hit_density", "marconi"])
def test_who_settles_late_decides_as_who_settles_at_once(name: str) -> None:
    def play(seed: int, patience: int) -> list[int]:
        draw = random.Random(seed)
        history = AccessHistory()
        policy = make_policy(name, history)
        access_log = AccessLog(ChunkMetadata(history), {"cpu": policy})
        here: set[int] = set()
        for second in range(150):
            first = 1 + 10 * draw.randrange(8)
            chain = list(range(first, first + draw.randrange(1, 9)))
            known = next((at for at, row in enumerate(chain) if row not in here), len(chain))
            found = np.array(chain[:known], np.intp)
            access_log.note(Lookup(found, [key(row) for row in chain], float(second)))
            for at in range(known, len(chain)):
                parent = chain[at - 1] if at else NO_ROW
                access_log.note(
                    Stored(0, [chain[at]], parent, 100, FULL, [float(at)], float(second))
                )
                here.add(chain[at])
            if len(access_log) > patience:
                access_log.apply_all()
        access_log.apply_all()
        return everyone(policy)

    for seed in range(4):
        assert play(seed, 0) == play(seed, 5) == play(seed, 10_000)
