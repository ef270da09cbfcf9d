"""The RowHints: priorities, lifetimes and partitions by row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from contracts.policy import keep_none, rows
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.index.hints import LOOK_AHEAD, LOOK_AHEAD_SHARE, NEVER, RowHints

MANY = 1_000


def table_of_rows() -> RowHints:
    table = RowHints()
    for column in table.columns:
        column.frombytes(bytes(100 * column.itemsize))
    return table


def no_parent(_: int) -> int:
    return NO_ROW


def ordered(table: RowHints, victims: list[int]) -> list[int]:
    return list(table.in_order(iter(victims), no_parent, MANY))


def test_without_priorities_victims_come_as_the_policy_names_them() -> None:
    table = table_of_rows()
    asked: list[int] = []

    def victims() -> Iterator[int]:
        for row in range(1, 100):
            asked.append(row)
            yield row

    assert next(table.in_order(victims(), no_parent, MANY)) == 1
    assert asked == [1], "nothing is looked at that is not needed"


def test_the_lower_priority_goes_first_and_no_word_counts_as_fifty() -> None:
    table = table_of_rows()
    table.set_priority(1, 90)
    table.set_priority(3, 10)
    table.set_priority(4, 50)
    assert ordered(table, [1, 2, 3, 4]) == [3, 2, 4, 1]
    table.set_priority(3, 0)
    assert ordered(table, [1, 2, 3, 4]) == [2, 3, 4, 1]


def test_priorities_reach_no_further_than_the_next_to_go() -> None:
    table = table_of_rows()
    table.set_priority(1, 100)
    table.set_priority(LOOK_AHEAD + 5, 1)
    order = ordered(table, list(range(1, 3 * LOOK_AHEAD)))
    assert order.index(LOOK_AHEAD + 5) == 5
    assert order[-1] == 1, "a chunk that everybody passes is the last of those asked for"


def test_priorities_order_no_more_than_a_sixteenth_of_a_tier() -> None:
    table = table_of_rows()
    for row in range(1, 10):
        table.set_priority(row, 100)
    few = list(table.in_order(iter([1, 2, 20, 3, 21]), no_parent, 3 * LOOK_AHEAD_SHARE))
    assert few == [20, 1, 21, 2, 3]
    none = list(table.in_order(iter([1, 20]), no_parent, LOOK_AHEAD_SHARE))
    assert none == [1, 20]


def test_chunks_that_are_all_of_the_highest_priority_go_all_the_same() -> None:
    table = table_of_rows()
    for row in range(1, 50):
        table.set_priority(row, 100)
    assert ordered(table, list(range(1, 50))) == list(range(1, 50))


@given(st.lists(st.integers(0, 100), min_size=30, max_size=30))
def test_a_chunk_never_goes_before_what_continues_it(priorities: list[int]) -> None:
    table, policy = table_of_rows(), LruEviction()
    parents = {row: row // 2 for row in range(1, 31)}
    for row, parent in parents.items():
        policy.insert(row, parent, 1, 0.0)
        table.set_priority(row, priorities[row - 1])
    order = list(table.in_order(policy.victims(keep_none, 0.0), parents.__getitem__, MANY))
    assert sorted(order) == list(parents)
    for row, parent in parents.items():
        assert parent == NO_ROW or order.index(row) < order.index(parent)


def test_rows_count_up_to_the_first_whose_time_is_up() -> None:
    table = table_of_rows()
    chain = rows(range(6))
    assert not table.expiring
    table.set_expiry(3, 10.0)
    table.set_expiry(5, 8.0)
    assert len(table.unexpired(chain, 7.9)) == 6
    assert len(table.unexpired(chain, 8.0)) == 4
    assert len(table.unexpired(chain, 10.0)) == 2
    table.set_expiry(3, NEVER)
    assert len(table.unexpired(chain, 10.0)) == 4
    table.forget(5)
    assert table.unexpired(chain, 10.0) is chain
    assert not table.expiring
    assert len(table.unexpired(np.array([], np.intp), 1.0)) == 0


def test_the_first_to_expire_are_named_first_until_they_are_forgotten() -> None:
    table = table_of_rows()
    for row, expiry in ((1, 5.0), (2, 3.0), (3, 9.0), (4, 4.0)):
        table.set_expiry(row, expiry)
    assert table.expired(2.9, 10) == []
    assert table.expired(5.0, 10) == table.expired(5.0, 10) == [2, 4, 1]
    assert table.expired(5.0, 2) == [2, 4]
    table.forget(2)
    table.set_expiry(4, 20.0)
    assert table.expired(5.0, 10) == [1]
    assert table.expired(50.0, 10) == [1, 3, 4]


def test_a_life_that_is_prolonged_again_and_again_takes_no_more_room() -> None:
    table = table_of_rows()
    for second in range(20_000):
        table.set_expiry(1 + second % 3, 1.0 + second)
    assert len(table._times) < 2_000
    assert table.expired(1e9, 10) == [3, 1, 2][:3]
    assert table.expiring == 3


def test_a_chunk_that_is_forgotten_leaves_its_partition() -> None:
    table = table_of_rows()
    table.partitions[7] = 3
    table.forget(7)
    assert table.partitions[7] == 0
