"""Traces: what is read, what is wrong with a line, and which blocks are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.cli import simulate
from kvstore.cli.simulate import BlockLine, SegmentLine, make_blocks, read_trace, tokens_of
from kvstore.proto.errors import InvalidRequestError

TRACES = Path(__file__).resolve().parents[2] / "data" / "traces"

BLOCKS: dict[str, Any] = {
    "timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [0, 4, 9],
}  # fmt: skip
SEGMENTS: dict[str, Any] = {
    "session_id": 3, "turn_id": 1, "ts": 2.5, "num_input_tokens": 15, "num_output_tokens": 4,
    "input_segs": [[1, 6], [1001, 9]], "output_seg": [1002, 4],
}  # fmt: skip


def write(path: Path, *lines: object) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return file


def complaint(path: Path, *lines: object) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        read_trace(write(path, *lines))
    return str(caught.value)


def test_a_line_of_mooncakes_is_a_chain_of_blocks(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, BLOCKS)) == [BlockLine(1500, 1030, 7, (0, 4, 9), 512)]


def test_a_line_may_say_how_many_tokens_its_blocks_have(tmp_path: Path) -> None:
    (line,) = read_trace(write(tmp_path, {**BLOCKS, "block_tokens": 400}))
    assert isinstance(line, BlockLine)
    assert line.block_tokens == 400


def test_a_line_of_ours_is_a_prompt_of_segments(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, SEGMENTS)) == [
        SegmentLine(2.5, 3, 1, ((1, 6), (1001, 9)), (1002, 4), 15, 4)
    ]


def test_empty_lines_are_skipped_and_empty_files_are_refused(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path, BLOCKS, "", BLOCKS, "  "))) == 2
    assert "trace.jsonl" in complaint(tmp_path, "", " ")


@pytest.mark.parametrize("field", sorted({*BLOCKS, *SEGMENTS} - {"hash_ids", "input_segs"}))
def test_a_field_that_is_missing_is_named_with_its_line(tmp_path: Path, field: str) -> None:
    good = BLOCKS if field in BLOCKS else SEGMENTS
    bad = {name: value for name, value in good.items() if name != field}
    text = complaint(tmp_path, good, bad)
    assert text.startswith("trace.jsonl:2 ")
    assert f"missing required field `{field}`" in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timestamp", -1), ("timestamp", "0"), ("timestamp", True),
        ("input_length", -5), ("input_length", 1.5), ("input_length", 1 << 40),
        ("output_length", None), ("hash_ids", 7), ("hash_ids", [0, -1]), ("hash_ids", [0, 1.0]),
        ("hash_ids", [0, 1, 2, 3]), ("hash_ids", [1 << 63]), ("hash_ids", [[0]]),
        ("block_tokens", 0), ("block_tokens", "512"),
        ("ts", None), ("session_id", -1), ("turn_id", "a"), ("num_input_tokens", 16),
        ("num_output_tokens", 5), ("input_segs", {}), ("input_segs", [[1, 6], [1001]]),
        ("input_segs", [[1 << 32, 15]]), ("input_segs", [[1, -15]]), ("input_segs", [15]),
        ("output_seg", 4), ("output_seg", [1002, 4, 0]), ("output_seg", [1002, True]),
    ],
)  # fmt: skip
def test_a_value_that_is_wrong_is_named_with_its_line(
    tmp_path: Path, field: str, value: object
) -> None:
    good = BLOCKS if field in {*BLOCKS, "block_tokens"} else SEGMENTS
    text = complaint(tmp_path, good, good, {**good, field: value})
    where, _, reason = text.partition("': ")
    assert where.startswith("trace.jsonl:3 line=")
    assert field in reason


@pytest.mark.parametrize("line", ["{", '{"ts": NaN}', "[]", "7", '"x"', "\x00", "[" * 100_000])
def test_what_is_no_object_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    assert complaint(tmp_path, BLOCKS, line).startswith("trace.jsonl:2 line=")


def test_kinds_do_not_mix_and_unknown_ones_are_named(tmp_path: Path) -> None:
    assert "keep to one kind" in complaint(tmp_path, BLOCKS, SEGMENTS)
    assert "hash_ids" in complaint(tmp_path, {"prompt": "hello"})


def test_files_lines_and_counts_have_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "MAX_REQUESTS", 2)
    assert "cut the trace" in complaint(tmp_path, BLOCKS, BLOCKS, BLOCKS)
    monkeypatch.setattr(simulate, "MAX_LINE_BYTES", 60)
    assert "keep lines under 60 bytes" in complaint(tmp_path, " " * 70)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*BLOCKS, *SEGMENTS]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=6,
        ),
    ),
    st.booleans(),
)
def test_any_object_is_read_or_refused_with_a_reason(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any], ours: bool
) -> None:
    line = {**(SEGMENTS if ours else BLOCKS), **fields}
    file = write(tmp_path_factory.mktemp("any"), line)
    told = ""
    try:
        (found,) = read_trace(file)
        assert found.time_s >= 0
    except InvalidRequestError as error:
        told = str(error)
    assert told.startswith("trace.jsonl:1 ") or not told


def test_the_traces_of_the_checkout_are_what_their_readme_says() -> None:
    lines = read_trace(TRACES / "mooncake_conversation_trace.jsonl")
    blocks = [one for line in lines if isinstance(line, BlockLine) for one in line.block_ids]
    assert (len(lines), len(blocks), len(set(blocks))) == (12_031, 288_500, 182_790)
    readme = (TRACES / "README.md").read_text()
    for file in TRACES.glob("*.jsonl"):
        assert f"`{file.name}`" in readme or "dev_*" in readme
        assert read_trace(file)


# --- tokens


def splitmix64(state: int) -> int:
    """Steele, Lea and Flood's, in whole numbers."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_splitmix64_is_the_published_one() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF


def test_tokens_are_those_of_the_formula() -> None:
    joined = tokens_of([(1001, 3), (0xFFFF_FFFF, 2)])
    places = [(1001, 0), (1001, 1), (1001, 2), (0xFFFF_FFFF, 0), (0xFFFF_FFFF, 1)]
    assert joined.tolist() == [3 + splitmix64((s << 32) + j) % 31997 for s, j in places]


def test_the_tokens_of_nothing_are_none() -> None:
    assert tokens_of([]).tolist() == tokens_of([(5, 0)]).tolist() == []


# --- blocks


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
    assert trace.known.tolist() == [2]


def test_a_trace_keeps_to_one_size_of_blocks() -> None:
    with pytest.raises(InvalidRequestError, match="block_tokens=256"):
        make_blocks([line(1), line(1, size=256)])


def turn(inputs: list[tuple[int, int]], output: tuple[int, int]) -> SegmentLine:
    tokens = sum(count for _, count in inputs)
    return SegmentLine(0.0, 0, 0, tuple(inputs), output, tokens, output[1])


def test_prompts_that_share_segments_share_their_full_blocks() -> None:
    first = turn([(1, 8), (2, 4)], (3, 4))
    second = turn([(1, 8), (2, 4), (3, 4), (4, 1)], (5, 2))
    trace = make_blocks([first, second, turn([(1, 8), (9, 8)], (3, 0))], 8)
    assert [trace.chain(i).tolist() for i in range(3)] == [[1, 2], [1, 2, 3], [1, 4]]
    assert trace.tokens.tolist() == [0, 8, 8, 3, 8]


def test_a_lookup_knows_the_blocks_of_the_prompt_and_not_the_one_in_which_it_ends() -> None:
    lines = [turn([(1, 12)], (2, 9)), turn([(1, 12)], (2, 0)), turn([(1, 16)], (2, 1))]
    assert make_blocks(lines, 8).known.tolist() == [1, 2, 2]


def test_a_prompt_of_nothing_has_no_blocks() -> None:
    trace = make_blocks([turn([], (1, 0)), turn([(1, 3)], (1, 0))], 8)
    assert [len(trace.chain(i)) for i in range(2)] == [0, 1]


def test_blocks_have_a_limit_and_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="block_tokens=0"):
        make_blocks([turn([(1, 3)], (1, 0))], 0)
    monkeypatch.setattr(simulate, "MAX_BLOCKS", 3)
    with pytest.raises(InvalidRequestError, match="cut the trace to 3"):
        make_blocks([line(1, 2), line(3, 4)])
