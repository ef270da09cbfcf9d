"""kvstore trace: what is written down, what is refused, and a replay against a server."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from conftest import ServerMaker
from helpers.prompts import keys_of

from kvstore.cli import trace
from kvstore.cli.__main__ import main
from kvstore.cli.app import EXIT_STORE, EXIT_USAGE
from kvstore.cli.simulate import BlockLine, TraceWriter, read_trace
from kvstore.cli.trace import replay_trace
from kvstore.proto import kvstore_pb2 as pb

NOBODY = "127.0.0.1:1"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["trace", *argv])
    shown = capsys.readouterr()
    return int(stop.value.code or 0), shown.out, shown.err


def names(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "big") for number in numbers)


def written(tmp_path: Path, *records: pb.TraceRecord, block_tokens: int = 100) -> list[BlockLine]:
    text = io.BytesIO()
    writer = TraceWriter(text, block_tokens)
    for one in records:
        writer.write(one)
    (tmp_path / "t.jsonl").write_bytes(text.getvalue())
    lines = read_trace(tmp_path / "t.jsonl")
    return [line for line in lines if isinstance(line, BlockLine)]


def test_chunks_become_numbers_in_the_order_of_their_first_appearance(tmp_path: Path) -> None:
    first = pb.TraceRecord(at_us=1500, chunks=names(77, 5))
    second = pb.TraceRecord(at_us=2_000_000, chunks=names(77, 9, 5))
    assert written(tmp_path, first, second) == [
        BlockLine(1.5, 200, 0, (0, 1), 100),
        BlockLine(2000, 300, 0, (0, 2, 1), 100),
    ]


def test_a_prompt_that_is_known_to_be_longer_or_shorter_is_so(tmp_path: Path) -> None:
    known = [pb.TraceRecord(chunks=names(1, 2), tokens=n) for n in (150, 900, 3)]
    nothing = pb.TraceRecord(tokens=40)
    assert [line.input_tokens for line in written(tmp_path, *known, nothing)] == [150, 900, 101, 0]


def test_nothing_of_the_servers_names_is_in_the_file(tmp_path: Path) -> None:
    written(tmp_path, pb.TraceRecord(chunks=names(0xABCDEF0123456789)))
    text = (tmp_path / "t.jsonl").read_text()
    assert str(0xABCDEF0123456789) not in text
    assert set(json.loads(text)) == {
        "timestamp", "input_length", "output_length", "hash_ids", "block_tokens",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("record", "out.jsonl", "--seconds", "0"), "'--seconds'"),
        (("record", "out.jsonl", "--block-tokens", "0"), "'--block-tokens'"),
        (("replay", "none.jsonl"), "none.jsonl"),
        (("replay", "none.jsonl", "--chunk-bytes", "10"), "chunk_bytes=10"),
    ],
)
def test_wrong_usage_is_refused_with_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *argv, "--address", NOBODY)
    assert (status, out) == (EXIT_USAGE, "")
    assert words in err


def test_a_file_that_exists_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.jsonl").write_text("mine")
    status, _, err = run(capsys, "record", str(tmp_path / "out.jsonl"), "--address", NOBODY)
    assert (status, "out.jsonl" in err) == (EXIT_USAGE, True)
    assert (tmp_path / "out.jsonl").read_text() == "mine"


def test_a_server_that_does_not_answer_is_the_stores_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(
        capsys, "record", str(tmp_path / "o.jsonl"), "--address", NOBODY, "--seconds", "1"
    )
    assert status == EXIT_STORE
    assert "kvstore:" in err
    assert not (tmp_path / "o.jsonl").exists()


def test_a_replay_counts_what_the_server_had(make_server: ServerMaker, tmp_path: Path) -> None:
    server = make_server()
    path = tmp_path / "t.jsonl"
    prompts = [[0, 1, 2], [0, 1, 2, 3], [7], [0, 7], []]
    lines = [
        {"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for ids in prompts
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = replay_trace(server.address, path, 16 << 10)
    assert (done.requests, done.blocks, done.hit_blocks) == (5, 10, 4)
    assert (done.stored, done.refused) == (6, 0)
    again = replay_trace(server.address, path, 16 << 10)
    assert (again.requests, again.hit_blocks, again.stored) == (5, 10, 0)


def test_a_recording_ends_with_the_names_there_may_be(
    make_server: ServerMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MAX_NAMES", 3)
    server = make_server()
    client = server.connect()
    prompts = iter([1, 2])

    def look_up(_: float) -> None:
        client.lookup(keys=keys_of(client, next(prompts), 2))

    made = trace.record(server.address, tmp_path / "t.jsonl", 60, 16, lambda: 0.0, look_up)
    assert (made.chunks, made.lookups) == (4, 2)
