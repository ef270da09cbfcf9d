"""SkippedRows: runs of rows, what they leave, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.row_mask import MAX_RUNS, RUN, SkippedRows

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
