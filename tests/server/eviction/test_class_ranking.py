"""QueueRanks: what is ranked bit by bit is what ranking all at once gives."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from kvstore.server.eviction.access_history import History
from kvstore.server.eviction.class_ranking import QueueRanks, Rank
from kvstore.server.eviction.queues import ClassQueues
from kvstore.server.eviction.reuse_statistics import AGE_BINS

_ROWS, _KINDS = 60, 5


class Ends:
    """Rows in queues, used at random times, and their ranks."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.history = History()
        self.history.reach(_ROWS)
        self.history.table.values[:] = np.random.default_rng(seed).random((1024, AGE_BINS))
        self.used = array("Q", bytes(8 * (_ROWS + 1)))
        self.worth = array("f", [0.0, *(1.0 + row % 3 for row in range(1, _ROWS + 1))])
        self.queues = ClassQueues(self.used, _KINDS)
        self.queues.extend(_ROWS)
        self.queued: dict[int, int] = {}
        self.now_s = 0.0
        self.tick = 0
        self.ranks = self.fresh()

    def fresh(self) -> QueueRanks:
        return QueueRanks(self.history, self.queues, self.used, self.worth)

    def step(self) -> None:
        """Something happens to one row, or time goes on."""
        self.now_s += self.draw.choice((0.0, 0.0, 0.3, 7.0))
        row = self.draw.randrange(1, _ROWS + 1)
        if row in self.queued:
            self.queues.remove(row)
        if row in self.queued and self.draw.random() < 0.5:
            del self.queued[row]
            return
        kind = self.queued[row] = self.draw.randrange(_KINDS)
        if self.used[row] and self.draw.random() < 0.3:
            self.queues.place(row, kind)  # as one that was bared, by its own last use
            return
        self.tick += 1
        self.used[row] = self.tick
        self.history.last_s[row] = self.now_s
        self.queues.append(row, kind)

    def all(self, ranks: QueueRanks) -> list[Rank]:
        """Take everything there is, which is ranked again by the next ``bring_up``."""
        ranks.bring_up(self.now_s)
        found = []
        while ranks.least() is not None:
            found.append(ranks.take())
        return found


@pytest.mark.parametrize("seed", range(4))
def test_ranks_kept_up_to_date_are_those_of_ranking_all(seed: int) -> None:
    ends = Ends(seed)
    for at in range(400):
        ends.step()
        if at == 200:
            ends.history.table.values *= 0.5
            ends.history.table.version += 1
        if at % 3 == 0:
            found = ends.all(ends.ranks)
            assert found == sorted(found) == ends.all(ends.fresh())


def test_an_end_that_was_taken_counts_again_once_ranks_are_brought_up() -> None:
    ends = Ends(1)
    for _ in range(20):
        ends.step()
    before = ends.all(ends.ranks)
    assert before
    assert ends.all(ends.ranks) == before


def test_what_is_stale_takes_no_more_than_a_few_times_what_counts() -> None:
    ends = Ends(2)
    ends.ranks.bring_up(0.0)
    for _ in range(5_000):
        ends.step()
        ends.ranks.bring_up(ends.now_s)
    assert len(ends.ranks._ranks) < 600
    assert len(ends.ranks._due) < 600
