"""kvstore simulate, and the cache without bytes that it replays traces on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.kvstore_command import Kvstore
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.cli.app import EXIT_USAGE
from kvstore.cli.simulate import BlockReplay, Terms, parse_capacity
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import POLICIES
from kvstore.server.eviction.access_history import NO_INFO, AccessHistory, InsertInfo
from kvstore.server.eviction.policy import make_policy

Trace = list[tuple[list[int], float]]
TRACES = Path(__file__).resolve().parents[2] / "data" / "traces"
AGENTS = TRACES / "dev_agentappend_sps0.25_art7.5_n60.jsonl"
CONVERSATION = TRACES / "mooncake_conversation_trace.jsonl"
SMALL = TRACES / "dev_chat_lmsyslike_sps1_n100.jsonl"


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


def test_a_few_early_losses_do_not_keep_hit_density_from_hitting_more_than_lru(
    kvstore: Kvstore,
) -> None:
    argv = (str(AGENTS), "--policy", "lru,hit_density", "--capacity", "5%")
    lru, ours = (one["block_hit_rate"] for one in as_json(kvstore, *argv))
    assert ours > lru + 0.08


def test_blocks_of_token_traces_are_cut_to_the_size_that_is_asked_for(
    kvstore: Kvstore,
) -> None:
    found = [
        as_json(kvstore, str(SMALL), "--policy", "lru", "--size", "100%", "--block-tokens", size)
        for size in ("64", "256")
    ]
    assert found[0]["token_hit_rate"] > found[1]["token_hit_rate"] > 0.8


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
            Terms("lru", text)


def test_a_cache_of_nothing_hits_nothing(tmp_path: Path, kvstore: Kvstore) -> None:
    file = blocks(tmp_path, (1, 2), (1, 2))
    for size in ("0", "1%"):
        found = as_json(kvstore, str(file), "--policy", "lru", "--capacity", size)
        assert (found["token_hit_rate"], found["flops_saved"]) == (0.0, 0.0)


# --- the replay


def make(name: str, capacity_bytes: int, min_rows: int = 1 << 18) -> BlockReplay:
    history = AccessHistory(512)
    return BlockReplay(make_policy(name, history), history, capacity_bytes, min_rows=min_rows)


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


def hits(replay: BlockReplay, trace: Trace, size_bytes: int = 10) -> list[int]:
    return [replay.request(blocks, size_bytes, now_s) for blocks, now_s in trace]


def test_a_hit_is_the_longest_prefix_that_is_here() -> None:
    replay = make("lru", 100)
    assert replay.request([1, 2, 3], 10, 0.0) == 0
    assert replay.request([1, 2, 4], 10, 1.0) == 2
    assert replay.request([5, 2, 3], 10, 2.0) == 0
    assert replay.request([1, 2, 3, 9], 10, 3.0) == 3
    assert (replay.blocks, replay.hit_blocks) == (13, 5)


def test_a_prompt_does_not_evict_its_own_blocks() -> None:
    replay = make("lru", 40)
    replay.request([1, 2, 3, 4], 10, 0.0)
    assert replay.request([1, 2, 5, 6, 7, 8], 10, 1.0) == 2
    assert replay.request([1, 2, 5, 6, 7, 8], 10, 2.0) == 4
    assert replay.used_bytes == 40


def test_a_block_larger_than_the_tier_is_looked_up_and_not_stored() -> None:
    replay = make("hit_density", 99)
    replay.request([1], 50, 0.0)
    assert replay.request([2], 100, 1.0) == 0
    assert replay.request([2], 100, 2.0) == 0
    assert replay.request([1], 50, 3.0) == 1
    assert replay.used_bytes == 50


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
    assert hits(make("lru", 10 * places), trace) == wanted
    assert hits(make("lru", 10 * places, min_rows=60), trace) == wanted


@pytest.mark.parametrize("name", ["lru", "hit_density"])
def test_bytes_add_up_after_every_request_of_any_size_hint_and_time(name: str) -> None:
    draw, replay = random.Random(7), make(name, 1_000)
    for number, (blocks, now_s) in enumerate(tree_trace(2)):
        if number % 3 == 0:  # blocks that come twice, or behind others
            blocks = [draw.randrange(60) for _ in range(draw.randrange(12))]
        facts = InsertInfo(tokens_full=draw.random() < 0.5, reuse=draw.randrange(3))
        at_s = draw.choice((now_s, now_s, 1e12, -1e12))
        hit = replay.request(blocks, draw.choice((10, 25, 60)), at_s, facts)
        assert 0 <= hit <= len(blocks)
        assert sum(replay._sizes) == replay.used_bytes <= 1_000


@pytest.mark.parametrize("name", ["lru", "hit_density"])
def test_what_is_remembered_is_bounded_and_the_oldest_goes_first(name: str) -> None:
    replay = make(name, 200, min_rows=100)
    for step in range(500):
        replay.request([1, 10 * step + 2, 10 * step + 3], 10, float(step))
        assert len(replay) <= 110
    assert replay.request([1, 4992, 4993], 10, 500.0) == 3
    assert replay.request([1, 12, 13], 10, 501.0) == 1


def test_a_tier_that_holds_many_remembers_twice_as_many() -> None:
    replay = make("lru", 4_000, min_rows=100)
    for step in range(300):
        replay.request([3 * step, 3 * step + 1, 3 * step + 2], 10, float(step))
    assert 400 < len(replay) <= 803


def test_flops_given_with_a_prompt_are_remembered() -> None:
    history = AccessHistory()
    replay = BlockReplay(make_policy("marconi", history), history, 100)
    replay.request([7, 8], 10, 0.0, NO_INFO, np.array([3.0, 4.0]))
    assert [history.flops_of(row) for row in (1, 2)] == [3.0, 4.0]


def test_a_capacity_or_a_size_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="capacity_bytes"):
        make("lru", -1)
    with pytest.raises(InvalidRequestError, match="block_bytes"):
        make("lru", 10).request([1], 0, 0.0)
