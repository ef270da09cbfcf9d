"""What an AccessHistory remembers, and which class a chunk is of."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction import access_history
from kvstore.server.eviction.access_history import (
    MAX_CLASSES,
    MAX_GROUPS,
    NO_INFO,
    AccessHistory,
    ChunkClasses,
    InsertInfo,
    RefreshReport,
    SteadyClock,
)

CHUNK_TOKENS = 512


def rows(*numbers: int) -> NDArray[np.intp]:
    return np.array(numbers, np.intp)


def prompt(
    history: AccessHistory, *numbers: int, at_s: float = 0.0, facts: InsertInfo = NO_INFO
) -> None:
    """Look a prompt up and store what is not known of it, as a store does."""
    known = [row for row in numbers if history.hits_of(row)]
    history.requested(rows(*known), len(numbers), at_s)
    fresh = [row for row in numbers if row not in known]
    history.seen_chain(rows(*fresh), known[-1] if known else NO_ROW, facts, at_s)


def test_the_first_sight_is_an_asking_and_storing_again_is_none() -> None:
    history = AccessHistory()
    prompt(history, 1, 2, at_s=5.0)
    assert (history.hits_of(1), history.last_s[1]) == (1, 5.0)
    history.seen_chain(np.array([1]), NO_ROW, NO_INFO, 7.0)
    assert (history.hits_of(1), history.last_s[1]) == (1, 5.0)
    prompt(history, 1, 2, 3, at_s=9.0)
    assert [history.hits_of(row) for row in (1, 2, 3, 4, 9_999)] == [2, 2, 1, 0, 0]
    assert history.last_s[3] == 9.0


def test_chunks_one_by_one_are_remembered_as_the_chain_would_be() -> None:
    one, chain = AccessHistory(), AccessHistory()
    facts = InsertInfo(tokens_full=False, flops=7.0, group=3, reuse=2, prompt_chunks=4)
    whole = InsertInfo(flops=7.0, group=3, reuse=2, prompt_chunks=4)
    chain.seen_chain(rows(1, 2, 3), NO_ROW, facts, 1.0)
    for row in (1, 2, 3):
        one.seen_chain(rows(row), row - 1, facts if row == 3 else whole, 1.0)
    for name in access_history._COLUMNS:
        assert np.array_equal(getattr(one, name)[:4], getattr(chain, name)[:4])


def test_a_count_of_askings_stops_and_does_not_turn_over() -> None:
    history = AccessHistory()
    for step in range(300):
        prompt(history, 1, at_s=float(step))
    assert history.hits_of(1) == 255


def test_a_prompt_that_begins_with_all_of_another_is_its_next_turn() -> None:
    for second, turn in [
        ((1, 2, 3, 4, 5, 6), 1),  # all of the first, and more
        ((1, 2, 3, 7, 8), 1),  # all but its end, which filled no chunk
        ((1, 2, 7, 8), 0),  # something else from the middle on
        ((1, 7), 0),
        ((7, 8), 0),
        ((1, 2, 3, 4), 1),  # the same again
    ]:
        history = AccessHistory()
        prompt(history, 1, 2, 3, 4, facts=InsertInfo(tokens_full=False))
        prompt(history, *second, at_s=1.0)
        assert {history.turns[row] for row in second} == {turn}
        assert {history.chunks[row] for row in second} == {len(second)}


def test_a_prompt_of_one_chunk_is_nobodys_next_turn() -> None:
    history = AccessHistory()
    prompt(history, 1)
    prompt(history, 1, 2)
    assert history.turns[2] == 0


def class_of(kinds: ChunkClasses, own: int, hits: int, context: int) -> int:
    return kinds.of(np.array([own], np.uint8), np.array([hits], np.uint8), context).item()


def test_classes_tell_apart_what_they_are_said_to() -> None:
    kinds = ChunkClasses(CHUNK_TOKENS)

    def of(own: int = 0, hits: int = 1, turn: int = 0, chunks: int = 3) -> int:
        return class_of(kinds, own, hits, kinds.context(turn, chunks))

    base = of()
    assert of(hits=2) != base
    assert of(hits=3) == of(hits=200) != of(hits=2)
    assert [of(turn=turn) == of(turn=3) for turn in (2, 4, 5, 6)] == [False, True, True, False]
    assert of(turn=6) == of(turn=255)
    assert of(chunks=1) != base == of(chunks=31) != of(chunks=32)
    assert len({of(own=own) for own in range(12)}) == 12
    assert kinds.count < 18 + 30


def test_classes_of_many_are_those_of_each() -> None:
    kinds = ChunkClasses(CHUNK_TOKENS)
    own, hits = np.array([0, 1, 5, 7], np.uint8), np.array([1, 2, 9, 3], np.uint8)
    turns, chunks = np.array([0, 3, 1, 7], np.uint8), np.array([1, 2, 40, 900], np.uint16)
    many = kinds.of(own, hits, kinds.contexts(turns, chunks))
    for at, number in enumerate(many.tolist()):
        context = kinds.context(int(turns[at]), int(chunks[at]))
        assert class_of(kinds, int(own[at]), int(hits[at]), context) == number


def test_where_numbers_run_out_a_chunk_is_of_its_coarser_class() -> None:
    kinds = ChunkClasses(CHUNK_TOKENS)
    contexts = [kinds.context(turn, chunks) for turn in (0, 1, 2, 3, 6) for chunks in (1, 9, 99)]
    found = {
        (own, hits, context): class_of(kinds, own, hits, context)
        for own in range(60)
        for hits in (1, 2, 3)
        for context in contexts
    }
    assert kinds.count == MAX_CLASSES
    assert max(found.values()) == MAX_CLASSES - 1
    (own, hits, _), number = list(found.items())[-1]
    assert number == own % 6 * 3 + hits - 1
    assert all(kinds.coarse[kinds.coarse] == kinds.coarse)


def test_groups_beyond_the_limit_are_one() -> None:
    kinds = ChunkClasses(CHUNK_TOKENS)
    numbers = [kinds.group(group) for group in range(100, 100 + 2 * MAX_GROUPS)]
    assert numbers == [*range(1, MAX_GROUPS + 1), *[MAX_GROUPS + 1] * MAX_GROUPS]
    assert kinds.group(0) == 0
    assert kinds.group(100) == 1


def test_a_hint_changes_the_class_and_followers_hear_of_it_once() -> None:
    history, heard = AccessHistory(), []
    history.on_hint.append(lambda changed: heard.append(changed.tolist()))
    prompt(history, 1, 2, 3)
    before = history.classes[2]
    history.hint(rows(2, 3, 77), 1)
    history.hint(rows(2, 3), 1)
    assert heard == [[2, 3]]
    assert history.classes[2] != before == history.classes[1]
    assert [history.reuse_of(row) for row in (1, 2, 77)] == [0, 1, 0]
    history.hint(rows(2), 0)
    assert history.classes[2] == before


def test_what_was_forgotten_is_met_as_new() -> None:
    history = AccessHistory()
    prompt(history, 1, 2, facts=InsertInfo(flops=5.0, group=2, reuse=2))
    prompt(history, 1, 2, at_s=10.0)
    history.forget_all(np.array([2]))
    history.forget_all(np.array([2]))
    assert not history.hits_of(2)
    assert (history.flops_of(2), history.reuse_of(2), history.hits_of(2)) == (0.0, 0, 0)
    prompt(history, 2, at_s=11.0)
    assert history.hits_of(2) == 1
    history.table.refresh(12.0, history.kinds.count)
    asked, ends = history.table.counts(12.0, history.kinds.count)
    assert asked.sum() == 2
    assert ends.sum() == 3  # two wait, and one was forgotten while it did


def test_everybody_known_waits_in_just_one_class_whatever_happened() -> None:
    draw = np.random.default_rng(3)
    history = AccessHistory()
    for step in range(600):
        numbers = draw.integers(1, 60, 6)
        match step % 4:
            case 0 | 1:
                prompt(history, *dict.fromkeys(numbers.tolist()), at_s=float(draw.normal(step, 9)))
            case 2:
                history.requested(numbers, 6, float(step))  # some twice, some unknown
                history.hint(numbers, int(draw.integers(3)))
            case 3:
                history.forget_all(numbers[:2])
    history.table.settle(700.0)
    history.table.refresh(700.0, history.kinds.count)
    _, ends = history.table.counts(700.0, history.kinds.count)
    known = np.flatnonzero(history.hits)
    waiting = ends - history.table._forgotten[: len(ends)]
    counted = np.bincount(history.classes[known], minlength=len(ends))
    assert waiting.sum(axis=1).tolist() == counted.tolist()


def test_watchers_are_told_what_was_asked_for_since_the_last_refresh() -> None:
    history, reports = AccessHistory(), list[RefreshReport]()
    history.on_refresh.append(reports.append)
    for step in range(20):
        prompt(history, 1, 2 + step, at_s=40.0 * step)
    assert len(reports) == 2
    assert sum(report.requests for report in reports) == 20
    assert sum(report.chunks for report in reports) == 40
    assert set(reports[1].rows.tolist()) == {1}
    assert set(reports[1].ages_s.tolist()) == {40.0}


def test_a_chunk_of_no_size_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="chunk_tokens"):
        AccessHistory(0)


def test_a_steady_clock_stands_while_the_callers_goes_back() -> None:
    clock = SteadyClock()

    assert [clock.time_s(at) for at in (5.0, 7.0, 1.0, 1.5, 2.0)] == [5.0, 7.0, 7.0, 7.5, 8.0]
