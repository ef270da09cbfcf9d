"""Which tokens are worth recomputing: ranks, moving means, and a limit in bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.server.blending.token_priority import OVERHEAD_BYTES, Scores, TokenPriorities, ranks

NAME = b"n" * 32


def scores(*values: float) -> Scores:
    return np.array(values, np.float32)


def levels(known: TokenPriorities, name: bytes = NAME) -> list[int]:
    return list(known.levels(name))


def test_scores_become_ranks_whatever_their_unit() -> None:
    assert ranks(scores(5.0, 0.0, 100.0, 7.0)).tolist() == [85, 0, 255, 170]
    assert ranks(scores(5e-9, 0.0, 1e-7, 7e-9)).tolist() == [85, 0, 255, 170]
    assert ranks(scores(3.0)).tolist() == [0]


def test_nothing_is_known_before_the_first_report() -> None:
    assert TokenPriorities().levels(NAME) == b""


def test_reports_enter_a_moving_mean() -> None:
    known = TokenPriorities()
    known.note(NAME, scores(0.0, 1.0))
    known.note(NAME, scores(1.0, 0.0))
    assert levels(known) == [64, 191]
    for _ in range(60):
        known.note(NAME, scores(1.0, 0.0))
    assert levels(known) == [254, 2]


def test_tokens_that_were_not_measured_keep_what_they_had() -> None:
    known = TokenPriorities()
    known.note(NAME, scores(0.0, 1.0, 2.0, 3.0))
    before = levels(known)
    known.note(NAME, scores(-1.0, 9.0, -1.0, 4.0))
    after = levels(known)
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] > before[1]
    assert after[3] < before[3]


def test_a_partial_report_says_nothing_of_a_content_that_is_new() -> None:
    known = TokenPriorities()
    known.note(NAME, scores(-1.0, 9.0))
    assert len(known) == 0


def test_scores_of_another_length_are_passed_over() -> None:
    known = TokenPriorities()
    known.note(NAME, scores(0.0, 1.0))
    known.note(NAME, scores(0.0, 1.0, 2.0))
    assert levels(known) == [0, 255]


def test_the_limit_holds_and_the_longest_unreported_goes() -> None:
    room = 3 * (16 + OVERHEAD_BYTES)
    known = TokenPriorities(room)
    names: Sequence[bytes] = [bytes([number]) * 32 for number in range(4)]
    for name in names[:3]:
        known.note(name, np.arange(16, dtype=np.float32))
    known.note(names[0], np.arange(16, dtype=np.float32))
    known.note(names[3], np.arange(16, dtype=np.float32))
    assert known.size_bytes <= room
    assert [bool(known.levels(name)) for name in names] == [True, False, True, True]
    known.forget(names[0])
    known.forget(names[0])
    assert known.size_bytes == 2 * (16 + OVERHEAD_BYTES)
