"""The catalog: copies, leases, pins and victims kept in step."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import count

import pytest
from contracts.policy import ALL, info, key
from simulation.clock import FakeClock
from typing_extensions import override

from kvstore.proto.errors import LeaseExpiredError, QuotaExceededError
from kvstore.proto.types import Accuracy, Namespace
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.policy import EvictionPolicy
from kvstore.server.index.catalog import Catalog
from kvstore.server.index.holds import Leases, LeaseTerms

SESSION = 7


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def make_catalog(clock: FakeClock, pin_limit_bytes: int = 1_000) -> Catalog:
    ids = count(1)
    policies: dict[str, EvictionPolicy] = {"cpu": LruEviction(), "disk": LruEviction()}
    return Catalog(policies, Leases(10, lambda: next(ids)), pin_limit_bytes, clock)


@pytest.fixture
def catalog(clock: FakeClock) -> Catalog:
    """A chain of three in CPU memory, the first two on disk as well."""
    catalog = make_catalog(clock)
    for number in range(3):
        catalog.note_sealed("cpu", info(number, number - 1 if number else None))
    for number in range(2):
        catalog.note_sealed("disk", info(number, number - 1 if number else None, 60))
    return catalog


CHAIN = [key(number) for number in range(5)]
TIERS = ("cpu", "disk")


def test_a_match_is_the_longest_prefix_and_what_is_being_put_behind_it(catalog: Catalog) -> None:
    assert catalog.in_flight.begin(key(3))
    found = catalog.match(CHAIN, Accuracy.exact, TIERS)
    assert (found.known, found.pending) == (3, 1)
    assert found.sources.tolist() == [0, 0, 0]
    assert found.sizes.tolist() == [100, 100, 100]
    catalog.in_flight.end(key(3))
    assert catalog.match(CHAIN, Accuracy.exact, TIERS).pending == 0


def test_a_match_leases_what_it_found_and_nothing_when_it_found_nothing(catalog: Catalog) -> None:
    found = catalog.match(CHAIN, Accuracy.exact, TIERS, LeaseTerms(SESSION, 2.0))
    assert catalog.leases.get(found.lease_id, SESSION, 0.0).keys == CHAIN[:3]
    unknown = catalog.match([key(99)], Accuracy.exact, TIERS, LeaseTerms(SESSION, 2.0))
    assert (unknown.lease_id, len(catalog.leases)) == (0, 1)


def test_each_chunk_of_a_match_comes_from_the_first_tier_that_may_be_read(
    catalog: Catalog,
) -> None:
    slow_first = catalog.match(CHAIN, Accuracy.exact, ("disk", "cpu"))
    assert (slow_first.sources.tolist(), slow_first.sizes.tolist()) == ([0, 0, 1], [60, 60, 100])
    barred = catalog.match(CHAIN, Accuracy.exact, (None, "disk"))
    assert (barred.known, barred.sources.tolist(), barred.sizes.tolist()) == (3, [1, 1], [60, 60])
    none = catalog.match(CHAIN, Accuracy.exact, (None, None))
    assert (none.known, none.sources.tolist()) == (3, [])


def test_a_copy_of_too_low_accuracy_is_not_what_a_match_reads(catalog: Catalog) -> None:
    catalog.forget("disk", key(1))
    catalog.note_sealed("disk", replace(info(1, 0, 60), accuracy=Accuracy.bounded))
    by_disk = ("disk", "cpu")
    assert catalog.match(CHAIN, Accuracy.exact, by_disk).sources.tolist() == [0, 1, 1]
    assert catalog.match(CHAIN, Accuracy.bounded, by_disk).sources.tolist() == [0, 0, 1]


def test_pending_counts_go_on_through_chunks_that_exist_behind_one_that_does_not(
    catalog: Catalog,
) -> None:
    catalog.note_sealed("cpu", info(4, 3))
    catalog.in_flight.begin(key(3))
    assert catalog.match(CHAIN, Accuracy.exact, TIERS).pending == 2


def test_a_match_makes_its_chain_the_last_to_go(catalog: Catalog) -> None:
    catalog.note_sealed("cpu", info(9))
    assert catalog.eviction.claim_victims("cpu", 1, ALL) == [key(2)]
    catalog.eviction.unclaim([key(2)])
    catalog.match(CHAIN, Accuracy.exact, TIERS)
    assert catalog.eviction.claim_victims("cpu", 1, ALL) == [key(9)]


def test_a_chunk_that_exists_needs_no_put_and_writers_are_counted(catalog: Catalog) -> None:
    assert not catalog.in_flight.begin(key(0))
    assert catalog.in_flight.writers.total() == 0
    assert [catalog.in_flight.begin(key(3)) for _ in range(2)] == [True, True]
    catalog.in_flight.end(key(3))
    assert catalog.in_flight.writers.total() == 1
    catalog.in_flight.end(key(3))
    assert catalog.in_flight.writers.total() == 0


def test_a_lease_covers_the_prefix_that_exists_and_ends_by_the_clock(
    catalog: Catalog, clock: FakeClock
) -> None:
    lease, known = catalog.grant(CHAIN, LeaseTerms(SESSION, 2.0))
    assert (known, lease.keys) == (3, CHAIN[:3])
    assert (catalog.leases.pins.total(), len(catalog.leases)) == (3, 1)
    clock.advance(2.0)
    with pytest.raises(LeaseExpiredError):
        catalog.leases.get(lease.lease_id, SESSION, clock())
    assert catalog.expire() == 1
    assert (catalog.leases.pins.total(), len(catalog.leases)) == (0, 0)


def test_what_is_held_is_neither_claimed_nor_cast_out(catalog: Catalog) -> None:
    catalog.grant([key(0)], LeaseTerms(SESSION, 10.0))
    assert catalog.eviction.claim_victims("cpu", ALL, ALL) == [key(2), key(1)]
    assert not catalog.cast_out("cpu", key(0), even_if_held=False)
    assert catalog.copies(key(0)).keys() == {"cpu", "disk"}
    assert catalog.cast_out("cpu", key(0))
    assert catalog.copies(key(0)).keys() == {"disk"}


def test_a_moving_chunk_is_held_until_it_is_let_go(catalog: Catalog) -> None:
    assert catalog.hold(key(2)).keys() == {"cpu"}
    assert catalog.eviction.claim_victims("cpu", ALL, ALL) == []
    assert not catalog.cast_out("cpu", key(2), even_if_held=False)
    catalog.let_go(key(2))
    assert catalog.eviction.claim_victims("cpu", 1, ALL) == [key(2)]


def test_a_victim_is_handed_out_once(catalog: Catalog) -> None:
    assert catalog.eviction.claim_victims("cpu", 100, ALL) == [key(2)]
    assert catalog.eviction.claim_victims("cpu", ALL, ALL) == []
    assert catalog.eviction.claim_victims("disk", ALL, ALL) == [key(1), key(0)]
    catalog.eviction.unclaim([key(2)])
    assert catalog.eviction.claim_victims("cpu", 100, ALL) == [key(2)]


def test_among_names_all_of_a_piece_that_may_go(catalog: Catalog) -> None:
    catalog.grant([key(0)], LeaseTerms(SESSION, 10.0))
    assert catalog.eviction.claim("cpu", CHAIN[:3]) == [key(1), key(2)]


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


def test_the_policy_knows_what_the_index_knows(catalog: Catalog) -> None:
    assert catalog.forget("cpu", key(1))
    assert not catalog.forget("cpu", key(1))
    assert set(catalog.eviction.claim_victims("cpu", ALL, ALL)) == {key(0), key(2)}
    assert catalog.forget("disk", key(1))
    assert catalog.copies(key(1)) == {}
    assert len(catalog) == 2


def test_what_was_cast_out_is_an_orphan_until_it_is_purged_or_sealed_anew(catalog: Catalog) -> None:
    assert catalog.cast_out("disk", key(0))
    assert catalog.orphans["disk"] == {key(0)}
    assert catalog.orphans["cpu"] == set()
    catalog.purged("disk", key(0))
    assert catalog.orphans["disk"] == set()
    catalog.cast_out("disk", key(1))
    catalog.note_sealed("disk", info(1, 0, 60))
    assert catalog.orphans["disk"] == set()


def test_holders_sizes_and_orphans_are_asked_for_one_by_one(catalog: Catalog) -> None:
    assert catalog.holders(key(0)) == ["cpu", "disk"]
    assert (catalog.size_bytes("cpu", key(0)), catalog.size_bytes("disk", key(0))) == (100, 60)
    assert catalog.size_bytes("disk", key(2)) == catalog.size_bytes("cpu", key(4)) == 0
    catalog.cast_out("cpu", key(0))
    assert catalog.holders(key(0)) == ["disk"]
    assert (key(0) in catalog.orphans["cpu"], key(0) in catalog.orphans["disk"]) == (True, False)
    assert catalog.holders(key(4)) == []


def test_what_is_lost_or_was_never_there_is_no_orphan(catalog: Catalog) -> None:
    catalog.forget("disk", key(0))
    assert not catalog.cast_out("disk", key(0))
    assert not catalog.cast_out("disk", key(4))
    assert catalog.orphans["disk"] == set()


def test_pins_keep_known_chunks_until_they_end_or_are_ended(
    catalog: Catalog, clock: FakeClock
) -> None:
    assert catalog.pin([key(2), key(4)], ttl_s=5.0) == 1
    assert catalog.eviction.claim_victims("cpu", ALL, ALL) == []
    holding = catalog.queries.details(key(2))
    assert holding is not None
    assert holding.is_pinned
    assert catalog.unpin([key(2), key(4)]) == 1
    catalog.pin([key(2)], ttl_s=5.0)
    clock.advance(5.0)
    assert catalog.expire() == 0
    assert catalog.eviction.claim_victims("cpu", 100, ALL) == [key(2)]


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


def test_holdings_are_those_of_one_namespace(catalog: Catalog) -> None:
    lease, _ = catalog.grant([key(0)], LeaseTerms(SESSION, 10.0))
    catalog.match([key(0)], Accuracy.exact, TIERS)
    holdings = catalog.queries.page(Namespace(bytes(16)))
    assert [holding.key for holding in holdings] == CHAIN[:3]
    assert (holdings[0].leases, holdings[0].hits) == (1, 1)
    assert (holdings[1].leases, holdings[1].hits) == (0, 0)
    assert catalog.queries.page(Namespace(b"x" * 16)) == []
    assert catalog.queries.details(key(4)) is None
    assert catalog.release(lease.lease_id, SESSION)


def test_only_on_names_what_would_be_lost_with_a_tier(catalog: Catalog) -> None:
    assert catalog.queries.only_on("cpu") == [key(2)]
    assert catalog.queries.only_on("disk") == []


def test_a_session_that_ends_releases_its_leases(catalog: Catalog) -> None:
    for _ in range(2):
        catalog.grant(CHAIN, LeaseTerms(SESSION, 10.0))
    catalog.grant(CHAIN, LeaseTerms(SESSION + 1, 10.0))
    assert catalog.release_session(SESSION) == 2
    assert catalog.leases.pins.total() == 3


# --- what policies are told later


def test_who_catches_up_tells_the_policies_and_the_history() -> None:
    catalog = make_catalog(FakeClock())
    for number in range(3):
        catalog.note_sealed("cpu", info(number, number - 1 if number else None))
    catalog.match(CHAIN, Accuracy.exact, TIERS)
    history = catalog.state.metadata.history
    row = catalog.state.index.row(key(0))
    assert history.hits_of(row) == 0
    assert catalog.drain(0.0)
    assert history.hits_of(row) == 2
    assert not catalog.drain(0.0)


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


def test_evicted_chunks_are_counted_by_lookups(catalog: Catalog) -> None:
    catalog.forget("cpu", key(2))
    found = catalog.match(CHAIN, Accuracy.exact, TIERS)
    assert (found.known, found.evicted) == (2, 1)
    assert catalog.evicted_count() == 1
    catalog.note_sealed("cpu", info(2, 1))
    assert catalog.match(CHAIN, Accuracy.exact, TIERS).evicted == 0


def test_the_same_lookup_asked_again_is_counted_once(catalog: Catalog) -> None:
    catalog.match(CHAIN, Accuracy.exact, TIERS)
    catalog.match(CHAIN, Accuracy.exact, TIERS, again=True)
    holding = catalog.queries.details(key(0))
    assert holding is not None
    assert holding.hits == 1


def test_a_chunk_that_may_not_be_read_and_nobody_writes_is_missing_and_not_pending(
    catalog: Catalog,
) -> None:
    catalog.note_sealed("cpu", replace(info(3, 2), accuracy=Accuracy.bounded))
    found = catalog.match(CHAIN, Accuracy.exact, TIERS)
    assert (found.known, found.pending, found.first_missing) == (3, 0, 3)
