"""The KeyTable: rows by key, against a dictionary; masks of rows, against sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.proto import key_table
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW, KeyTable
from kvstore.proto.row_mask import MAX_RUNS, RUN, SkippedRows
from kvstore.proto.types import ChunkKey


def crowded(key: bytes) -> int:
    """A hash of few values: keys have the same tags and fight for slots, past the last one."""
    return -1 - (key[0] % 3 << 32)


@pytest.fixture(autouse=True)
def _crowd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.cls is TestTableAgainstDictionary:
        monkeypatch.setattr(key_table, "hash", crowded, raising=False)
        monkeypatch.setattr(key_table, "_FIRST_SLOTS", 8)


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


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(1, 70)), max_size=8))
def test_rows_of_a_table_that_grew_and_shrank_are_found_by_key_prefix_and_beginning(
    runs: list[tuple[int, int]],
) -> None:
    table, keys = KeyTable(), [ChunkKey(b"k" + n.to_bytes(31, "big")) for n in range(700)]
    assert table.rows_of(keys[1][:2]).tolist() == []
    assert [table.add(keys[n]) for n in range(1, 501)] == list(range(1, 501))
    asked = [n for start, count in runs for n in range(start, min(start + count, 700))]
    known = next((at for at, n in enumerate(asked) if not 1 <= n <= 500), len(asked))
    assert table.prefix([keys[n] for n in asked]).tolist() == asked[:known]
    assert table.prefix(keys[7:300]).tolist() == list(range(7, 300))
    for row in range(101, 201):
        table.remove(row)
    assert table.prefix(keys[1:300]).tolist() == list(range(1, 101))
    assert (table.find(keys[150]), table.key(150), table.key(77)) == (NO_ROW, bytes(32), keys[77])
    assert sorted(table.add(keys[n]) for n in range(101, 201)) == list(range(101, 201))
    alike = sorted(table.find(keys[n]) for n in range(256, 501))
    assert table.rows_of(keys[256][:31]).tolist() == alike


TOKENS = 40
rows_by_chunk = st.dictionaries(
    st.integers(0, 5), st.sets(st.integers(0, TOKENS - 1)).map(sorted), max_size=6
)


def packed(*runs: tuple[int, int, int]) -> bytes:
    return np.array(list(runs), RUN).tobytes()


@given(rows_by_chunk)
def test_what_is_not_skipped_is_kept_on_both_sides(rows: dict[int, list[int]]) -> None:
    skipped = SkippedRows.of(rows)
    there = SkippedRows.unpack(skipped.pack(), 6)
    for chunk in range(6):
        gone = set(rows.get(chunk, []))
        for side in (skipped, there) if there is not None else (skipped,):
            kept = side.kept(chunk, TOKENS)
            if not gone:
                assert kept is None
            else:
                assert kept is not None
                assert kept.tolist() == [row for row in range(TOKENS) if row not in gone]


@given(st.binary(max_size=120))
def test_any_bytes_are_runs_in_order_or_refused(data: bytes) -> None:
    try:
        found = SkippedRows.unpack(data, 4)
    except InvalidRequestError:
        return
    assert (b"" if found is None else found.pack()) == data


def test_a_run_is_twelve_bytes() -> None:
    found = SkippedRows.of({1: [3, 4, 5, 9], 0: [0]})
    assert found.pack().hex() == (
        "000000000000000001000000010000000300000006000000"
        "01000000090000000a000000"
    )  # fmt: skip


def test_rows_past_the_end_of_a_chunk_mean_nothing() -> None:
    assert SkippedRows.of({0: [30, 31]}).kept(0, 20) is None


def test_of_too_many_runs_the_longest_are_kept() -> None:
    single = {chunk: list(range(0, 8000, 2)) for chunk in range(5)}
    found = SkippedRows.of({**single, 5: list(range(100))})
    assert len(found) == MAX_RUNS
    kept = found.kept(5, 200)
    assert kept is not None
    assert kept.tolist() == list(range(100, 200))


@pytest.mark.parametrize(
    ("data", "chunks"),
    [
        (b"x", 1),
        (packed((0, 5, 5)), 1),
        (packed((0, 5, 8193)), 1),
        (packed((1, 0, 5)), 1),
        (packed((0, 5, 9), (0, 2, 3)), 1),
        (packed((0, 5, 9), (0, 9, 12)), 1),
        (packed((1, 5, 9), (0, 0, 1)), 2),
        (bytes(12 * (MAX_RUNS + 1)), 1),
    ],
    ids=["cut", "empty", "long", "chunk", "order", "touching", "chunks back", "too many"],
)
def test_what_are_no_runs_is_refused_by_name(data: bytes, chunks: int) -> None:
    with pytest.raises(InvalidRequestError, match="skip_rows="):
        SkippedRows.unpack(data, chunks)
