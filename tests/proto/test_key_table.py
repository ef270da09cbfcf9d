"""The KeyTable: rows by key, against a dictionary."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.proto import key_table
from kvstore.proto.key_table import NO_ROW, KeyTable
from kvstore.proto.types import ChunkKey


def crowded(key: bytes) -> int:
    """A hash of few values: keys have the same tags and fight for slots."""
    return (key[0] % 3) << 32


@pytest.fixture(autouse=True)
def _crowd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.cls is TestTableAgainstDictionary:
        monkeypatch.setattr(key_table, "hash", crowded, raising=False)


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(2, "little") * 16)


class TableAgainstDictionary(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = KeyTable()
        self.model: dict[int, int] = {}

    @rule(number=st.integers(0, 40))
    def add(self, number: int) -> None:
        row = self.table.add(key(number))
        assert row != NO_ROW
        assert self.model.setdefault(number, row) == row
        assert len(set(self.model.values())) == len(self.model), "a row has two keys"

    @rule(number=st.integers(0, 40))
    def remove(self, number: int) -> None:
        if number in self.model:
            self.table.remove(self.model.pop(number))

    @rule(numbers=st.lists(st.integers(0, 40), max_size=12))
    def prefix(self, numbers: list[int]) -> None:
        run = 0
        while run < len(numbers) and numbers[run] in self.model:
            run += 1
        rows = self.table.prefix([key(number) for number in numbers])
        assert rows.tolist() == [self.model[number] for number in numbers[:run]]

    @invariant()
    def all_are_found_and_no_others(self) -> None:
        for number in range(41):
            assert self.table.find(key(number)) == self.model.get(number, NO_ROW)
        assert len(self.table) == len(self.model)
        assert all(row <= 41 for row in self.model.values()), "a free row was not given again"


TestTableAgainstDictionary = TableAgainstDictionary.TestCase
TestTableAgainstDictionary.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)


@pytest.fixture
def filled() -> tuple[KeyTable, list[ChunkKey]]:
    table, draw = KeyTable(), random.Random(1)
    keys = [ChunkKey(draw.randbytes(32)) for _ in range(20_000)]
    for one in keys:
        table.add(one)
    return table, keys


def test_many_keys_are_found_after_the_table_grew(
    filled: tuple[KeyTable, list[ChunkKey]],
) -> None:
    table, keys = filled
    assert [table.find(one) for one in keys] == list(range(1, len(keys) + 1))
    assert [table.key(row) for row in (1, 777)] == [keys[0], keys[776]]
    assert table.find(ChunkKey(bytes(32))) == NO_ROW


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(1, 70)), max_size=8))
def test_a_prefix_of_runs_is_that_of_its_keys(pieces: list[tuple[int, int]]) -> None:
    table = KeyTable()
    keys = [ChunkKey(number.to_bytes(32, "big")) for number in range(1, 501)]
    for one in keys:
        table.add(one)
    asked = [n for start, length in pieces for n in range(start, start + length)]
    known = next((at for at, n in enumerate(asked) if not 1 <= n <= 500), len(asked))
    rows = table.prefix([ChunkKey(n.to_bytes(32, "big")) for n in asked])
    assert rows.tolist() == asked[:known]


def test_a_freed_row_is_found_by_no_key(filled: tuple[KeyTable, list[ChunkKey]]) -> None:
    table, keys = filled
    for row in range(101, 201):
        table.remove(row)
    assert table.prefix(keys[:300]).tolist() == list(range(1, 101))
    assert table.find(keys[150]) == NO_ROW
    assert table.key(150) == bytes(32)
    assert sorted(table.add(one) for one in keys[100:200]) == list(range(101, 201))


def test_the_rows_of_keys_that_begin_alike(filled: tuple[KeyTable, list[ChunkKey]]) -> None:
    table, keys = filled
    start = keys[5][:2]
    expected = [row for row, one in enumerate(keys, 1) if one.startswith(start)]
    assert table.rows_of(start).tolist() == expected
    assert KeyTable().rows_of(b"x").tolist() == []
