"""RowHeap against sorting, and the queues against lists."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.server.eviction.queues import ClassQueues, RowHeap

_KINDS, _ROWS = 3, 40


def _queues(order: array[int], limit: int = 1) -> ClassQueues:
    """Return queues with room for as many rows as *order* has."""
    queues = ClassQueues(order, limit)
    for column in queues.columns:
        column.frombytes(bytes((len(order) - 1) * column.itemsize))
    return queues


def _backwards(queues: ClassQueues, kind: int) -> list[int]:
    found = [queues.newest[kind]]
    while found[-1]:
        found.append(queues.older[found[-1]])
    return found[:-1]


class QueuesMachine(RuleBasedStateMachine):
    """Rows come to the end or in between, and go from anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.order = array("Q", bytes(8 * (_ROWS + 1)))
        self.queues = _queues(self.order, _KINDS)
        self.model: dict[int, int] = {}
        self.tick = 1000

    @rule(row=st.integers(1, _ROWS), kind=st.integers(0, _KINDS - 1))
    def append(self, row: int, kind: int) -> None:
        if row not in self.model:
            self.tick += 1
            self.order[row] = self.tick
            self.queues.append(row, kind)
            self.model[row] = kind

    @rule(row=st.integers(1, _ROWS), kind=st.integers(0, _KINDS - 1), at=st.integers(0, 1000))
    def place(self, row: int, kind: int, at: int) -> None:
        taken = {self.order[other] for other in self.model}
        if row not in self.model and at not in taken:
            self.order[row] = at
            self.queues.place(row, kind)
            self.model[row] = kind

    @rule(row=st.integers(1, _ROWS))
    def remove(self, row: int) -> None:
        if self.model.pop(row, None) is not None:
            self.queues.remove(row)

    @invariant()
    def every_queue_is_in_order(self) -> None:
        for kind in range(_KINDS):
            rows = sorted(
                (r for r, k in self.model.items() if k == kind), key=self.order.__getitem__
            )
            assert list(self.queues.walk(kind)) == rows
            assert self.queues.head(kind) == (rows[0] if rows else 0)
            back = _backwards(self.queues, kind)
            assert back == [row for row in reversed(rows) if row in back]
            assert (self.queues.walk_late(kind) is not None) == (len(back) < len(rows))
            assert set(back) <= set(rows)

    @invariant()
    def both_ends_are_those_of_the_queues(self) -> None:
        kinds, first, last = self.queues.ends(_KINDS)
        assert kinds.tolist() == sorted(set(self.model.values()))
        for kind, head, tail in zip(kinds.tolist(), first.tolist(), last.tolist(), strict=True):
            assert head == self.queues.head(kind)
            assert tail == self.queues.newest[kind]


TestQueues = QueuesMachine.TestCase
TestQueues.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_row_far_from_both_ends_waits_aside_and_comes_in_its_turn() -> None:
    order = array("Q", [0, *(10 * row for row in range(1, 101)), 505])
    queues = _queues(order)
    for row in range(1, 101):
        queues.append(row, 0)
    queues.place(101, 0)
    assert list(queues.walk()) == [*range(1, 51), 101, *range(51, 101)]
    assert 101 not in _backwards(queues, 0)
    for row in range(1, 51):
        queues.remove(row)
    assert queues.head(0) == 101
    queues.remove(101)
    assert list(queues.walk()) == list(range(51, 101))


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
