"""Traces, recordings and replays, and kvstore simulate on a cache without bytes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ServerMaker
from helpers.kvstore_command import Kvstore
from helpers.prompts import keys_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.cli import bench, simulate
from kvstore.cli.app import EXIT_STORE, EXIT_USAGE
from kvstore.cli.bench import replay_trace
from kvstore.cli.simulate import (
    BlockLine,
    BlockReplay,
    SegmentLine,
    TraceWriter,
    make_blocks,
    parse_capacity,
    read_trace,
)
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import POLICIES
from kvstore.server.eviction.access_history import AccessHistory, InsertInfo
from kvstore.server.eviction.policy import make_policy

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


def blocks(path: Path, *prompts: tuple[int, ...]) -> Path:
    """Write prompts of whole blocks, a second from each to the next."""
    lines = [
        {"timestamp": 1000 * at, "input_length": 512 * len(ids), "hash_ids": ids}
        for at, ids in enumerate(prompts)
    ]
    return write(path, *(BLOCKS | line for line in lines))


def complaint(path: Path, *lines: object) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        read_trace(write(path, *lines))
    return str(caught.value)


def test_a_line_is_a_chain_of_blocks_or_a_prompt_of_segments(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, BLOCKS)) == [BlockLine(1500, 1030, 7, (0, 4, 9), 512)]
    assert read_trace(write(tmp_path, {**BLOCKS, "block_tokens": 400})) == [
        BlockLine(1500, 1030, 7, (0, 4, 9), 400)
    ]
    assert read_trace(write(tmp_path, SEGMENTS)) == [
        SegmentLine(2.5, 3, 1, ((1, 6), (1001, 9)), (1002, 4), 15, 4)
    ]
    assert len(read_trace(write(tmp_path, BLOCKS, "", BLOCKS, "  "))) == 2
    assert "trace.jsonl" in complaint(tmp_path, "", " ")
    assert "use one kind" in complaint(tmp_path, BLOCKS, SEGMENTS)
    assert "hash_ids" in complaint(tmp_path, {"prompt": "hello"})
    assert len(read_trace(write(tmp_path, {**SEGMENTS, "from": {"hash_ids": 1}}))) == 1
    assert "malformed" in complaint(tmp_path, '{"ts": 2.5, "inp')


def test_a_field_that_is_missing_is_named_with_its_line(tmp_path: Path) -> None:
    for field in sorted({*BLOCKS, *SEGMENTS} - {"hash_ids", "input_segs"}):
        good = BLOCKS if field in BLOCKS else SEGMENTS
        text = complaint(tmp_path, good, {name: good[name] for name in good if name != field})
        assert text.startswith("trace.jsonl:2 ")
        assert f"missing required field `{field}`" in text


def test_a_value_that_is_wrong_is_named_with_its_line(tmp_path: Path) -> None:
    for field, value in (
        ("timestamp", -1), ("timestamp", "0"), ("timestamp", True), ("input_length", 1.5),
        ("input_length", 1 << 40), ("output_length", None), ("hash_ids", [0, -1]),
        ("hash_ids", [0, 1, 2, 3]), ("hash_ids", [1 << 63]), ("block_tokens", 0),
        ("ts", None), ("session_id", -1), ("turn_id", "a"), ("num_input_tokens", 16),
        ("num_output_tokens", 5), ("input_segs", [[1, 6], [1001]]),
        ("input_segs", [[1 << 32, 15]]), ("input_segs", [[1, -15]]), ("output_seg", [1002, True]),
    ):  # fmt: skip
        good = BLOCKS if field in {*BLOCKS, "block_tokens"} else SEGMENTS
        text = complaint(tmp_path, good, good, {**good, field: value})
        where, _, reason = text.partition("': ")
        assert where.startswith("trace.jsonl:3 line="), (field, value)
        assert field in reason
    for line in ("{", '{"ts": NaN}', "[]", '"x"', "\x00", "[" * 100_000):
        assert complaint(tmp_path, BLOCKS, line).startswith("trace.jsonl:2 line=")


def test_files_lines_and_counts_have_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "MAX_REQUESTS", 2)
    assert "cut the trace" in complaint(tmp_path, BLOCKS, BLOCKS, BLOCKS)
    monkeypatch.setattr(simulate, "MAX_LINE_BYTES", 60)
    assert "keep lines under 60 bytes" in complaint(tmp_path, " " * 70)


@settings(max_examples=100, deadline=None)
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


# --- blocks


def line(*ids: int, tokens: int | None = None, size: int = 512) -> BlockLine:
    return BlockLine(0.0, size * len(ids) if tokens is None else tokens, 5, ids, size)


def test_a_block_is_what_it_is_with_all_that_comes_before_it() -> None:
    trace = make_blocks([line(7, 3), line(7, 9), line(7, 3, 2)])
    assert [one.chain for one in trace.requests] == [[1, 2], [1, 3], [1, 2, 4]]
    assert trace.blocks == 4
    trace = make_blocks([line(1, 5), line(2, 5), line(5)])
    assert [one.chain for one in trace.requests] == [[1, 2], [3, 4], [5]]
    trace = make_blocks([line(1, 2, tokens=700)])
    assert [(one.known, one.is_full) for one in trace.requests] == [(2, False)]
    assert make_blocks([line(1, 2, tokens=1024)]).requests[0].is_full


def turn(inputs: list[tuple[int, int]], output: tuple[int, int]) -> SegmentLine:
    tokens = sum(count for _, count in inputs)
    return SegmentLine(0.0, 0, 0, tuple(inputs), output, tokens, output[1])


def test_prompts_that_share_segments_share_their_full_blocks() -> None:
    first = turn([(1, 8), (2, 4)], (3, 4))
    second = turn([(1, 8), (2, 4), (3, 4), (4, 1)], (5, 2))
    trace = make_blocks([first, second, turn([(1, 8), (9, 8)], (3, 0))], 8)
    assert [one.chain for one in trace.requests] == [[1, 2], [1, 2, 3], [1, 4]]
    assert [one.is_full for one in trace.requests] == [True, False, True]


def test_blocks_are_the_same_where_their_tokens_and_all_before_are() -> None:
    """A stream's tokens are the same wherever it is named, and however its segment is cut."""
    lines = [turn([(1, 6), (2, 10)], (0, 0)), turn([(1, 6), (0, 0), (2, 4), (3, 6)], (0, 0))]
    lines += [turn([(1, 8)], (0, 0)), turn([(2, 8)], (0, 0)), turn([(1, 6), (2, 2)], (4, 0))]
    trace = make_blocks(lines, 8)
    assert [one.chain for one in trace.requests] == [[1, 2], [1, 3], [4], [5], [1]]


def test_a_lookup_knows_the_blocks_of_the_prompt_and_not_the_one_in_which_it_ends() -> None:
    lines = [turn([(1, 12)], (2, 9)), turn([(1, 12)], (2, 0)), turn([(1, 16)], (2, 1))]
    assert [one.known for one in make_blocks(lines, 8).requests] == [1, 2, 2]
    trace = make_blocks([turn([], (1, 0)), turn([(1, 3)], (1, 0))], 8)
    assert [len(one.chain) for one in trace.requests] == [0, 1], "a prompt of nothing has none"


def test_blocks_have_a_limit_and_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="block_tokens=256"):
        make_blocks([line(1), line(1, size=256)])
    with pytest.raises(InvalidRequestError, match="block_tokens=0"):
        make_blocks([turn([(1, 3)], (1, 0))], 0)
    monkeypatch.setattr(simulate, "MAX_BLOCKS", 3)
    with pytest.raises(InvalidRequestError, match="cut the trace to 3"):
        make_blocks([line(1, 2), line(3, 4)])


# --- recordings and replays


def names(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "big") for number in numbers)


def written(tmp_path: Path, *records: pb.TraceRecord) -> list[BlockLine]:
    """Return what is read of a recording of *records* in blocks of 100 tokens."""
    path = tmp_path / "t.jsonl"
    with path.open("wb") as file:
        writer = TraceWriter(file, 100)
        for one in records:
            writer.write(one)
    return [line for line in read_trace(path) if isinstance(line, BlockLine)]


def test_chunks_become_numbers_in_the_order_of_their_first_appearance(tmp_path: Path) -> None:
    first = pb.TraceRecord(at_us=1500, chunks=names(77, 5))
    second = pb.TraceRecord(at_us=2_000_000, chunks=names(77, 9, 5))
    assert written(tmp_path, first, second) == [
        BlockLine(1.5, 200, 0, (0, 1), 100),
        BlockLine(2000, 300, 0, (0, 2, 1), 100),
    ]
    known = [pb.TraceRecord(chunks=names(1, 2), tokens=n) for n in (150, 900, 3)]
    nothing = pb.TraceRecord(tokens=40)  # a prompt may be known to be longer or shorter
    assert [line.input_tokens for line in written(tmp_path, *known, nothing)] == [150, 900, 101, 0]


def test_what_cannot_be_recorded_or_replayed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvstore: Kvstore
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine.jsonl"
    mine.write_text("mine")
    for argv, wanted, words in (
        (("record", "out.jsonl", "--seconds", "0"), EXIT_USAGE, "'--seconds'"),
        (("record", "out.jsonl", "--block-tokens", "0"), EXIT_USAGE, "'--block-tokens'"),
        (("record", "mine.jsonl"), EXIT_USAGE, "mine.jsonl"),
        (("replay", "none.jsonl"), EXIT_USAGE, "none.jsonl"),
        (("replay", "none.jsonl", "--chunk-bytes", "10"), EXIT_USAGE, "chunk_bytes=10"),
        (("record", "out.jsonl", "--seconds", "1"), EXIT_STORE, "kvstore: no kvstore-server"),
    ):
        status, out, err = kvstore("trace", *argv, "--address", "127.0.0.1:1")
        assert (status, out, words in err) == (wanted, "", True), err
    assert [file.name for file in tmp_path.iterdir()] == [mine.name]
    assert mine.read_text() == "mine"


def test_a_replay_counts_what_the_server_had(make_server: ServerMaker, tmp_path: Path) -> None:
    server = make_server()
    path = blocks(tmp_path, (0, 1, 2), (0, 1, 2, 3), (7,), (0, 7), ())
    done = replay_trace(server.address, path, 16 << 10)
    assert (done.requests, done.blocks, done.hit_blocks) == (5, 10, 4)
    assert (done.stored, done.refused) == (6, 0)
    again = replay_trace(server.address, path, 16 << 10)
    assert (again.requests, again.hit_blocks, again.stored) == (5, 10, 0)


def test_a_recording_ends_with_the_names_there_may_be(
    make_server: ServerMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "MAX_NAMES", 3)
    server = make_server()
    client = server.connect()
    prompts = iter([1, 2])

    def look_up(_: float) -> None:
        client.lookup(keys=keys_of(client, next(prompts), 2))

    made = bench.record(server.address, tmp_path / "t.jsonl", 60, 16, lambda: 0.0, look_up)
    assert (made.chunks, made.lookups) == (4, 2)


Trace = list[tuple[list[int], float]]
CONVERSATION = TRACES / "mooncake_conversation_trace.jsonl"
SMALL = TRACES / "dev_chat_lmsyslike_sps1_n100.jsonl"


def as_json(kvstore: Kvstore, *argv: str) -> Any:
    status, out, err = kvstore("simulate", *argv, "--json")
    assert status == 0, err
    return json.loads(out)


def test_the_figures_of_one_policy_are_one_object(tmp_path: Path, kvstore: Kvstore) -> None:
    """Three blocks fit: the third prompt finds 1 and 2, the last finds 7 but not 1."""
    file = blocks(tmp_path, (1, 2), (3,), (1, 2, 4), (7,), (7, 8), (1,))
    found = as_json(kvstore, str(file), "--policy", "lru", "--capacity", "3MiB",
                    "--kv-bytes-per-token", "2048")  # fmt: skip
    assert found["policy"] == "lru"
    assert found["capacity_bytes"] == 3 << 20
    assert found["token_hit_rate"] == found["block_hit_rate"] == 4 / 10
    flops = (1.6e10 * 1024 + 262_144 * 1024**2) + 2 * (1.6e10 * 512 + 262_144 * 512**2)
    assert found["flops_saved"] == flops
    assert found["requests_per_s"] > 0
    assert set(found) == {
        "policy", "capacity_bytes", "token_hit_rate", "flops_saved", "requests_per_s",
        "block_hit_rate", "evictions",
    }  # fmt: skip


def test_several_policies_and_sizes_are_a_list_and_rows(tmp_path: Path, kvstore: Kvstore) -> None:
    file = blocks(tmp_path, (1, 2), (1, 2, 3), (9,), (1, 2))
    argv = (str(file), "--policy", "lru,hit_density", "--size", "50%,100%")
    found = as_json(kvstore, *argv)
    assert [(one["policy"], one["capacity_bytes"]) for one in found] == [
        ("lru", 2 * 512 * 131_072), ("hit_density", 2 * 512 * 131_072),
        ("lru", 4 * 512 * 131_072), ("hit_density", 4 * 512 * 131_072),
    ]  # fmt: skip
    assert found[2]["token_hit_rate"] == found[3]["token_hit_rate"] == 4 / 8
    status, out, _ = kvstore("simulate", *argv)
    assert status == 0
    assert out.count("hit_density") == 2
    assert "50.00%" in out


def test_every_policy_of_the_registry_can_be_simulated(kvstore: Kvstore) -> None:
    argv = (str(SMALL), "--capacity", "10%", "--policy")
    found = {one["policy"]: one["block_hit_rate"] for one in as_json(kvstore, *argv, "all")}
    assert list(found) == list(POLICIES)
    assert all(0.05 < rate < 0.97 for rate in found.values())
    for one in as_json(kvstore, *argv, "hit_density,marconi"):
        assert one["block_hit_rate"] == found[one["policy"]], "the same trace, the same hits"


def test_leaf_lru_hits_what_was_published_of_the_conversation_trace(kvstore: Kvstore) -> None:
    argv = (str(CONVERSATION), "--policy", "lru", "--capacity", "5%")
    assert round(100 * as_json(kvstore, *argv)["block_hit_rate"], 2) == 19.58
    half = as_json(kvstore, *argv, "--from", "half")
    assert round(100 * half["block_hit_rate"], 2) == 20.00


def test_wrong_usage_is_refused_with_what_to_do(tmp_path: Path, kvstore: Kvstore) -> None:
    trace = blocks(tmp_path, (1,))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"hash_ids": [1]}\n')
    for argv, words in (
        ((trace, "--policy", "best"), "policy='best'"),
        ((trace, "--policy", "gdsf"), "policy='gdsf': hit_density, which replaces gdsf"),
        ((trace, "--policy", "lru,"), "policy=''"),
        ((trace, "--capacity", "-1"), "capacity='-1'"),
        ((trace, "--capacity", "5"), "written as 5%"),
        ((trace, "--capacity", "5 %%"), "5% of the trace"),
        ((trace, "--from", "end"), "'start', 'half'"),
        ((trace, "--kv-bytes-per-token", "0"), "'--kv-bytes-per-token'"),
        ((trace, "--block-tokens", "-3"), "'--block-tokens'"),
        ((tmp_path / "none.jsonl",), "none.jsonl"),
        ((bad,), "bad.jsonl:1 line="),
    ):
        status, out, err = kvstore("simulate", *argv)
        assert (status, out, words in err) == (EXIT_USAGE, "", True), err


def test_a_capacity_is_a_size_or_a_share() -> None:
    for text, size in (
        ("5%", 50), ("0.1 %", 1), ("100%", 1000), ("250%", 2500), ("1KiB", 1024), (" 77 ", 77),
    ):  # fmt: skip
        assert parse_capacity(text, 1000) == size
    for text in ("", "%", "1e3%", "five", "5%%", "-5%", "1.5GiB"):
        with pytest.raises(InvalidRequestError, match="capacity"):
            parse_capacity(text, 1000)


# --- the replay


def make(name: str, places: int, ghosts: int = 1 << 18) -> BlockReplay:
    history = AccessHistory(512)
    return BlockReplay(make_policy(name, history), history, places, ghosts=ghosts)


def tree_trace(seed: int, requests: int = 400) -> Trace:
    """Prompts that branch off earlier ones; each block has one parent."""
    draw, trace, fresh = random.Random(seed), [([1], 0.0)], 2
    for step in range(1, requests):
        base = draw.choice(trace[-40:])[0]
        kept = base[: draw.randrange(1, len(base) + 1)][:20]
        new = draw.randrange(6)
        trace.append(([*kept, *range(fresh, fresh + new)], float(draw.randrange(step))))
        fresh += new
    return sorted(trace, key=lambda one: one[1])


def hits(replay: BlockReplay, trace: Trace) -> list[int]:
    return [replay.request(blocks, now_s) for blocks, now_s in trace]


def test_a_prompt_evicts_none_of_its_own_blocks_and_what_is_too_large_is_not_stored() -> None:
    replay = make("lru", 4)
    replay.request([1, 2, 3, 4], 0.0)
    assert replay.request([1, 2, 5, 6, 7, 8], 1.0) == 2
    assert replay.request([1, 2, 5, 6, 7, 8], 2.0) == 4
    assert (replay.used, replay.blocks, replay.hit_blocks) == (4, 16, 6)
    none = make("lru", 0)
    assert none.request([9], 3.0) == none.request([9], 4.0) == none.used == 0


def plain_lru(trace: Trace, places: int) -> list[int]:
    """A leaf-LRU over a tree is an LRU whose prompts are used from the end to the beginning."""
    here: dict[int, None] = {}
    found = []
    for blocks, _ in trace:
        hit = next((at for at, block in enumerate(blocks) if block not in here), len(blocks))
        found.append(hit)
        for block in blocks[:places][::-1]:
            here.pop(block, None)
            here[block] = None
        while len(here) > places:
            del here[next(iter(here))]
    return found


@given(st.integers(0, 1 << 30), st.integers(21, 200))
@settings(max_examples=8, deadline=None)
def test_lru_hits_what_a_list_in_order_of_use_hits_whatever_is_forgotten(
    seed: int, places: int
) -> None:
    trace = [(list(dict.fromkeys(blocks)), now_s) for blocks, now_s in tree_trace(seed)]
    wanted = plain_lru(trace, places)
    assert hits(make("lru", places), trace) == wanted
    assert hits(make("lru", places, ghosts=60), trace) == wanted


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_here_is_whole_chains_and_no_more_than_has_room_whatever_the_hint_and_time(
    name: str,
) -> None:
    draw, replay = random.Random(7), make(name, 40)
    parents: dict[int, int] = {}
    for blocks, now_s in tree_trace(2):
        parents |= zip(blocks, [0, *blocks], strict=False)
        facts = InsertInfo(tokens_full=draw.random() < 0.5, reuse=draw.randrange(3))
        hit = replay.request(blocks, draw.choice((now_s, now_s, 1e12, -1e12)), facts)
        assert 0 <= hit <= len(blocks)
        here = {row for row, is_here in enumerate(replay._here) if is_here}
        assert len(here) == replay.used <= 40
        assert {parents[row] for row in here} <= here | {0}


@pytest.mark.parametrize("name", ["lru", "hit_density"])
def test_what_is_remembered_is_bounded_and_the_oldest_goes_first(name: str) -> None:
    replay = make(name, 20, ghosts=100)
    for step in range(500):
        replay.request([1, 10 * step + 2, 10 * step + 3], float(step))
        assert np.count_nonzero(replay.history.hits) <= 20 + 100
    assert replay.request([1, 4992, 4993], 500.0) == 3
    assert replay.request([1, 12, 13], 501.0) == 1
