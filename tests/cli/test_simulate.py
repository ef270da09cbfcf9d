"""kvstore simulate: what is printed, what is refused, and figures worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.__main__ import main
from kvstore.cli.app import EXIT_USAGE
from kvstore.cli.simulate import Terms, parse_capacity
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import POLICIES

TRACES = Path(__file__).resolve().parents[2] / "data" / "traces"
AGENTS = TRACES / "dev_agentappend_sps0.25_art7.5_n60.jsonl"
CONVERSATION = TRACES / "mooncake_conversation_trace.jsonl"
SMALL = TRACES / "dev_chat_lmsyslike_sps1_n100.jsonl"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["simulate", *argv])
    shown = capsys.readouterr()
    return int(stop.value.code or 0), shown.out, shown.err


def blocks(path: Path, *prompts: tuple[int, ...], tokens: int = 512) -> Path:
    file = path / "blocks.jsonl"
    lines = [
        {
            "timestamp": 1000 * at,
            "input_length": tokens * len(ids),
            "output_length": 1,
            "hash_ids": list(ids),
        }
        for at, ids in enumerate(prompts)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    status, out, err = run(capsys, *argv, "--json")
    assert status == 0, err
    return json.loads(out)


def test_the_figures_of_one_policy_are_one_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three blocks fit: the third prompt finds 1 and 2, the last finds 7 but not 1."""
    file = blocks(tmp_path, (1, 2), (3,), (1, 2, 4), (7,), (7, 8), (1,))
    found = as_json(capsys, str(file), "--policy", "lru", "--capacity", "3MiB",
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


def test_several_policies_and_sizes_are_a_list_and_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = blocks(tmp_path, (1, 2), (1, 2, 3), (9,), (1, 2))
    argv = (str(file), "--policy", "lru,hit_density", "--size", "50%,100%")
    found = as_json(capsys, *argv)
    assert [(one["policy"], one["capacity_bytes"]) for one in found] == [
        ("lru", 2 * 512 * 131_072), ("hit_density", 2 * 512 * 131_072),
        ("lru", 4 * 512 * 131_072), ("hit_density", 4 * 512 * 131_072),
    ]  # fmt: skip
    assert found[2]["token_hit_rate"] == found[3]["token_hit_rate"] == 4 / 8
    status, out, _ = run(capsys, *argv)
    assert status == 0
    assert out.count("hit_density") == 2
    assert "50.00%" in out


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_of_the_registry_can_be_simulated(
    capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    found = as_json(capsys, str(SMALL), "--policy", policy, "--capacity", "10%")
    assert 0.05 < found["block_hit_rate"] < 0.97


def test_leaf_lru_hits_what_was_published_of_the_conversation_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = as_json(capsys, str(CONVERSATION), "--policy", "lru", "--capacity", "1%,5%")
    assert [round(100 * one["block_hit_rate"], 2) for one in found] == [5.25, 19.58]
    (half,) = [as_json(capsys, str(CONVERSATION), "--policy", "lru", "--from", "half")]
    assert round(100 * half["block_hit_rate"], 2) == 20.00


def test_a_few_early_losses_do_not_keep_hit_density_from_hitting_more_than_lru(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = (str(AGENTS), "--policy", "lru,hit_density", "--capacity", "5%")
    lru, ours = (one["block_hit_rate"] for one in as_json(capsys, *argv))
    assert ours > lru + 0.08


def test_the_same_trace_gives_the_same_hits(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (str(SMALL), "--policy", "hit_density,marconi", "--capacity", "5%")
    runs = [as_json(capsys, *argv) for _ in range(2)]
    for one in (row for rows in runs for row in rows):
        del one["requests_per_s"]
    assert runs[0] == runs[1]


def test_blocks_of_token_traces_are_cut_to_the_size_that_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [
        as_json(capsys, str(SMALL), "--policy", "lru", "--size", "100%", "--block-tokens", size)
        for size in ("64", "256")
    ]
    assert found[0]["token_hit_rate"] > found[1]["token_hit_rate"] > 0.8


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--policy", "best"), "policy='best'"),
        (("--policy", "adaptive"), "policy='adaptive': hit_density, which replaces adaptive"),
        (("--policy", "gdsf"), "policy='gdsf': hit_density, which replaces gdsf"),
        (("--policy", "lru,"), "policy=''"),
        (("--capacity", "-1"), "capacity='-1'"),
        (("--capacity", "5"), "written as 5%"),
        (("--capacity", "5 %%"), "5% of the trace"),
        (("--from", "end"), "'start', 'half'"),
        (("--kv-bytes-per-token", "0"), "'--kv-bytes-per-token'"),
        (("--block-tokens", "-3"), "'--block-tokens'"),
    ],
)
def test_wrong_usage_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str
) -> None:
    status, out, err = run(capsys, str(blocks(tmp_path, (1,))), *argv)
    assert (status, out) == (EXIT_USAGE, "")
    assert words in err


def test_a_trace_that_cannot_be_read_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, str(tmp_path / "none.jsonl"))
    assert (status, "none.jsonl" in err) == (EXIT_USAGE, True)
    (tmp_path / "bad.jsonl").write_text('{"hash_ids": [1]}\n')
    status, _, err = run(capsys, str(tmp_path / "bad.jsonl"))
    assert status == EXIT_USAGE
    assert "bad.jsonl:1 line=" in err
    assert "timestamp" in err


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("5%", 50), ("0.1 %", 1), ("100%", 1000), ("250%", 2500), ("1KiB", 1024), (" 77 ", 77)],
)
def test_a_capacity_is_a_size_or_a_share(text: str, bytes_: int) -> None:
    assert parse_capacity(text, 1000) == bytes_


@pytest.mark.parametrize("text", ["", "%", "1e3%", "five", "5%%", "-5%", "1.5GiB"])
def test_a_capacity_that_is_neither_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="capacity"):
        Terms("lru", text)


def test_a_cache_of_nothing_hits_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = blocks(tmp_path, (1, 2), (1, 2))
    for size in ("0", "1%"):
        found = as_json(capsys, str(file), "--policy", "lru", "--capacity", size)
        assert (found["token_hit_rate"], found["flops_saved"]) == (0.0, 0.0)
