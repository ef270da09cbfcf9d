"""The AccessLog: what is told late is told in order, and is the same as what is told at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from contracts.policy import everyone, key, rows
from typing_extensions import override

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.policy import EvictionPolicy, Rows, make_policy
from kvstore.server.eviction.quotas import LEAST_SAMPLED, MissRatioCurve
from kvstore.server.index.access_log import MAX_EVENTS, MAX_ROWS, AccessLog, Lookup, Stored
from kvstore.server.index.hints import ChunkMetadata

FULL = InsertInfo()


class Listening(EvictionPolicy):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    @override
    def insert(self, row: int, parent: int, size_bytes: int, now_s: float) -> None:
        self.heard.append((row, parent, size_bytes, now_s))

    @override
    def insert_chain(self, rows: Rows, parent: int, size_bytes: int, now_s: float) -> None:
        self.heard.append((rows.tolist(), parent, size_bytes, now_s))

    @override
    def touch(self, rows: Rows, now_s: float) -> None:
        self.heard.append((rows.tolist(), now_s))

    @override
    def remove(self, row: int) -> None:
        raise AssertionError

    @override
    def victims(self, keep: Callable[[int], bool], now_s: float) -> Iterator[int]:
        raise AssertionError

    @override
    def __len__(self) -> int:
        raise AssertionError


def stored(row: int, parent: int, now_s: float = 1.0, facts: InsertInfo | None = FULL) -> Stored:
    return Stored(0, [row], parent, 100, facts, [0.0], now_s)


def requested(numbers: list[int], now_s: float = 1.0) -> Lookup:
    return Lookup(rows(numbers), [key(number) for number in numbers], now_s)


def heard(*events: Lookup | Stored) -> list[object]:
    policy = Listening()
    access_log = AccessLog(ChunkMetadata(), {"cpu": policy})
    for event in events:
        access_log.note(event)
    assert policy.heard == []
    access_log.apply_all()
    assert len(access_log) == 0
    return policy.heard


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
    policy = Listening()
    access_log = AccessLog(ChunkMetadata(), {"cpu": policy})
    for number in range(MAX_EVENTS + 10):
        access_log.note(stored(10 * number + 1, NO_ROW))
    assert (len(access_log), len(policy.heard)) == (MAX_EVENTS, 10)


def test_few_rows_wait_as_each_takes_time_to_apply() -> None:
    policy, many = Listening(), list(range(1, MAX_ROWS // 4 + 1))
    access_log = AccessLog(ChunkMetadata(), {"cpu": policy})
    for _ in range(14):
        access_log.note(requested(many))
    assert (len(access_log), len(policy.heard)) == (4, 10)
    access_log.note(Stored(0, many, NO_ROW, 100, FULL, [0.0] * len(many), 1.0))
    assert (len(access_log), len(policy.heard)) == (4, 11)
    access_log.apply_all()
    access_log.note(requested([2]))
    assert len(access_log) == 1


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "partial"])
def test_a_chain_is_told_as_its_chunks_are(is_full: bool) -> None:
    facts = InsertInfo(tokens_full=is_full)
    flops = [3.0, 0.0, 5.0]
    told = []
    for events in (
        [Stored(0, [1, 2, 3], 7, 100, facts, flops, 1.0)],
        [
            Stored(0, [row], parent, 100, facts, [each], 1.0)
            for row, parent, each in zip((1, 2, 3), (7, 1, 2), flops, strict=True)
        ],
    ):
        history, policy = AccessHistory(), Listening()
        access_log = AccessLog(ChunkMetadata(history), {"cpu": policy})
        for event in events:
            access_log.note(event)
        access_log.apply_all()
        seen = [(history.is_partial(row), history.flops_of(row)) for row in (1, 2, 3)]
        told.append((policy.heard, seen))
    assert told[0] == told[1]


def test_a_lookup_asked_again_touches_and_is_not_counted() -> None:
    history, policy = AccessHistory(), Listening()
    history.seen_chain(np.array([1]), NO_ROW, FULL, 0.0)
    access_log = AccessLog(ChunkMetadata(history), {"cpu": policy})
    access_log.note(Lookup(np.array([1]), [key(0)], 1.0, is_again=True))
    access_log.apply_all()
    assert (history.hits_of(1), policy.heard) == (1, [([1], 1.0)])


def test_lookups_are_told_to_what_wonders_about_sizes() -> None:
    what_if = MissRatioCurve(1_000)
    access_log = AccessLog(ChunkMetadata(what_ifs={"cpu": what_if}), {"cpu": Listening()})
    access_log.note(stored(1, NO_ROW))
    for number in range(3 * LEAST_SAMPLED):
        access_log.note(requested([number % 5]))
    access_log.apply_all()
    ratios = list(what_if.points().values())
    assert ratios[-1] is not None
    assert ratios[-1] > 0.9, "five chunks of a hundred bytes fit"


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
