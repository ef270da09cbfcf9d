"""The RowHeap, against sorting."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvstore.server.eviction.row_heap import RowHeap


@given(
    st.permutations(range(1, 30)),
    st.lists(st.tuples(st.booleans(), st.integers(1, 29)), max_size=80),
)
def test_rows_come_in_the_order_of_the_column_whatever_went_in_and_out(
    ranks: list[int], events: list[tuple[bool, int]]
) -> None:
    order = array("Q", [0, *ranks])
    heap, model = RowHeap(order), set[int]()
    heap.extend(len(ranks))
    for puts, row in events:
        assert (row in heap) == (row in model)
        if puts and row not in model:
            heap.push(row)
            model.add(row)
        elif not puts and row in model:
            heap.remove(row)
            model.remove(row)
        expected = sorted(model, key=order.__getitem__)
        assert list(heap.sorted()) == expected
        assert len(heap) == len(model)
