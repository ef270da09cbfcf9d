"""Traces as chains of blocks: which blocks are the same, and what a lookup can know."""

from __future__ import annotations

import pytest

from kvstore.cli import trace_blocks
from kvstore.cli.trace_blocks import make_blocks
from kvstore.cli.trace_files import BlockLine, SegmentLine
from kvstore.proto.errors import InvalidRequestError


def line(*ids: int, tokens: int | None = None, size: int = 512) -> BlockLine:
    return BlockLine(0.0, size * len(ids) if tokens is None else tokens, 5, ids, size)


def test_blocks_have_rows_in_the_order_of_their_first_appearance() -> None:
    trace = make_blocks([line(7, 3), line(7, 9), line(7, 3, 2)])
    assert [trace.chain(i).tolist() for i in range(3)] == [[1, 2], [1, 3], [1, 2, 4]]
    assert trace.parents.tolist() == [0, 0, 1, 1, 2]
    assert (trace.requests, trace.blocks) == (3, 4)


def test_the_same_number_after_another_prefix_is_another_block() -> None:
    trace = make_blocks([line(1, 5), line(2, 5), line(5)])
    assert trace.blocks == 5
    assert trace.parents.tolist() == [0, 0, 1, 0, 3, 0]


def test_blocks_take_room_alike_and_the_tail_knows_its_tokens() -> None:
    trace = make_blocks([line(1, 2, tokens=700)])
    assert trace.tokens.tolist() == [0, 512, 188]
    assert trace.footprint_tokens == 1024
    assert trace.known.tolist() == [2]


def test_a_trace_keeps_to_one_size_of_blocks() -> None:
    with pytest.raises(InvalidRequestError, match="block_tokens=256"):
        make_blocks([line(1), line(1, size=256)])


def turn(inputs: list[tuple[int, int]], output: tuple[int, int]) -> SegmentLine:
    return SegmentLine(0.0, 0, 0, tuple(inputs), output)


def test_prompts_that_share_segments_share_their_full_blocks() -> None:
    first = turn([(1, 8), (2, 4)], (3, 4))
    second = turn([(1, 8), (2, 4), (3, 4), (4, 1)], (5, 2))
    trace = make_blocks([first, second, turn([(1, 8), (9, 8)], (3, 0))], 8)
    assert [trace.chain(i).tolist() for i in range(3)] == [[1, 2], [1, 2, 3], [1, 4]]
    assert trace.tokens.tolist() == [0, 8, 8, 3, 8]
    assert trace.footprint_tokens == 32


def test_a_lookup_knows_the_blocks_of_the_prompt_and_not_the_one_in_which_it_ends() -> None:
    lines = [turn([(1, 12)], (2, 9)), turn([(1, 12)], (2, 0)), turn([(1, 16)], (2, 1))]
    assert make_blocks(lines, 8).known.tolist() == [1, 2, 2]


def test_a_prompt_of_nothing_has_no_blocks() -> None:
    trace = make_blocks([turn([], (1, 0)), turn([(1, 3)], (1, 0))], 8)
    assert [len(trace.chain(i)) for i in range(2)] == [0, 1]


def test_blocks_have_a_limit_and_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="block_tokens=0"):
        make_blocks([turn([(1, 3)], (1, 0))], 0)
    monkeypatch.setattr(trace_blocks, "MAX_BLOCKS", 3)
    with pytest.raises(InvalidRequestError, match="cut the trace to 3"):
        make_blocks([line(1, 2), line(3, 4)])
