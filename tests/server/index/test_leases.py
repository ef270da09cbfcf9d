"""Leases and the pins they add up to."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from contracts.policy import key
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.proto.errors import LeaseExpiredError, QuotaExceededError
from kvstore.server.index.holds import Leases


@pytest.fixture
def table() -> Leases:
    ids = count(1)
    return Leases(3, lambda: next(ids))


def expire(table: Leases, now: float) -> int:
    return table.drop(lambda lease: lease.deadline <= now)


def end(table: Leases, session_id: int) -> int:
    return table.drop(lambda lease: lease.session_id == session_id)


def test_a_lease_pins_what_it_names_until_it_is_released(table: Leases) -> None:
    lease = table.grant(1, [key(1), key(2)], deadline=10.0)
    assert table.get(lease.lease_id, 1, now=9.0) is lease
    assert table.pins == {key(1): 1, key(2): 1}
    assert table.release(lease.lease_id, 1)
    assert table.pins == {}
    assert len(table) == 0


def test_a_lease_is_released_once(table: Leases) -> None:
    first, second = (table.grant(1, [key(1)], 10.0) for _ in range(2))
    assert [table.release(first.lease_id, 1) for _ in range(2)] == [True, False]
    assert table.pins == {key(1): 1}
    assert table.release(second.lease_id, 1)


def test_a_chunk_named_twice_is_pinned_twice_and_let_go_whole(table: Leases) -> None:
    lease = table.grant(1, [key(1), key(1)], 10.0)
    assert table.pins == {key(1): 2}
    table.release(lease.lease_id, 1)
    assert table.pins == {}


def test_an_expired_lease_is_refused_by_name(table: Leases) -> None:
    lease = table.grant(1, [key(1)], deadline=10.0)
    with pytest.raises(LeaseExpiredError, match=rf"lease_id={lease.lease_id}:.*lookup"):
        table.get(lease.lease_id, 1, now=10.0)
    assert table.pins == {key(1): 1}, "only expire lets go of the pins"
    assert expire(table, 10.0) == 1
    assert table.pins == {}
    assert not table.release(lease.lease_id, 1)


@pytest.mark.parametrize("lease_id", [0, 99])
def test_a_lease_that_never_was_is_refused_by_name(table: Leases, lease_id: int) -> None:
    with pytest.raises(LeaseExpiredError, match=f"lease_id={lease_id}"):
        table.get(lease_id, 1, now=0.0)
    assert not table.release(lease_id, 1)


def test_a_lease_belongs_to_its_session_alone(table: Leases) -> None:
    lease = table.grant(1, [key(1)], 10.0)
    with pytest.raises(LeaseExpiredError):
        table.get(lease.lease_id, 2, now=0.0)
    assert not table.release(lease.lease_id, 2)
    assert end(table, 2) == 0
    assert table.pins == {key(1): 1}


def test_a_session_reaches_its_limit_and_others_do_not(table: Leases) -> None:
    leases = [table.grant(1, [key(1)], 10.0) for _ in range(3)]
    with pytest.raises(QuotaExceededError, match="session 1 reached max_leases_per_session=3"):
        table.grant(1, [key(2)], 10.0)
    assert key(2) not in table.pins
    table.grant(2, [key(2)], 10.0)
    table.release(leases[0].lease_id, 1)
    table.grant(1, [key(3)], 10.0)


def test_a_session_that_ends_lets_go_of_all_it_had(table: Leases) -> None:
    for number in range(3):
        table.grant(1, [key(0), key(number)], 10.0)
    table.grant(2, [key(0)], 10.0)
    assert end(table, 1) == 3
    assert table.pins == {key(0): 1}
    assert end(table, 1) == 0


def test_only_what_is_late_expires(table: Leases) -> None:
    table.grant(1, [key(1)], 10.0)
    table.grant(1, [key(2)], 11.0)
    assert expire(table, 9.9) == 0
    assert expire(table, 10.5) == 1
    assert table.pins == {key(2): 1}


class LeaseMachine(RuleBasedStateMachine):
    """Leases and moves of a few chunks by a few sessions, in any order."""

    def __init__(self) -> None:
        super().__init__()
        ids = count(1)
        self.table = Leases(4, lambda: next(ids))
        self.live: dict[int, tuple[int, list[int], int]] = {}
        self.moves: list[int] = []
        self.now = 0

    def owned(self, session_id: int) -> list[int]:
        return [lease_id for lease_id, lease in self.live.items() if lease[0] == session_id]

    @rule(session_id=st.integers(1, 3), numbers=st.lists(st.integers(0, 4), max_size=4))
    def grant(self, session_id: int, numbers: list[int]) -> None:
        if len(self.owned(session_id)) == 4:
            with pytest.raises(QuotaExceededError):
                self.table.grant(session_id, map(key, numbers), self.now + 5)
            return
        lease = self.table.grant(session_id, map(key, numbers), self.now + 5)
        self.live[lease.lease_id] = session_id, numbers, self.now + 5

    @rule(session_id=st.integers(1, 3), lease_id=st.integers(1, 30))
    def release(self, session_id: int, lease_id: int) -> None:
        owns = lease_id in self.owned(session_id)
        assert self.table.release(lease_id, session_id) == owns
        if owns:
            del self.live[lease_id]

    @rule(session_id=st.integers(1, 3))
    def end_session(self, session_id: int) -> None:
        owned = self.owned(session_id)
        assert end(self.table, session_id) == len(owned)
        for lease_id in owned:
            del self.live[lease_id]

    @rule(seconds=st.integers(0, 6))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        late = [lease_id for lease_id, lease in self.live.items() if lease[2] <= self.now]
        assert expire(self.table, self.now) == len(late)
        for lease_id in late:
            del self.live[lease_id]

    @rule(number=st.integers(0, 4))
    def move(self, number: int) -> None:
        self.table.pin(key(number))
        self.moves.append(number)

    @precondition(lambda self: self.moves)
    @rule()
    def end_move(self) -> None:
        self.table.unpin(key(self.moves.pop()))

    @invariant()
    def pins_add_up(self) -> None:
        leased = [number for lease in self.live.values() for number in lease[1]]
        expected = Counter(self.moves + leased)
        assert self.table.pins == {key(number): times for number, times in expected.items()}
        assert len(self.table) == len(self.live)

    def teardown(self) -> None:
        for session_id in range(1, 4):
            end(self.table, session_id)
        for number in self.moves:
            self.table.unpin(key(number))
        assert self.table.pins == {}


TestPinsAddUp = LeaseMachine.TestCase
