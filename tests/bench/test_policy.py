"""bench.policy with small sizes; the bars of hybrid models; two tiers of blocks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bench.lib.traces import read_blocks, tokens_of
from bench.policy import __main__ as policy
from bench.policy import hybrid
from bench.policy.hybrid import BARS, differences, learn_prior
from bench.policy.state_cache import read_prior
from bench.policy.tiers import TierReplay

from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.access_history import AccessHistory
from kvstore.server.eviction.lru import LruEviction
from kvstore.server.eviction.reuse_statistics import ReuseForecast
from kvstore.server.tiering.admission import ADMISSIONS

SMALL = "dev_chat_lmsyslike_sps1_n100"
KEYS = {
    "mooncake_conversation_1pct", "mooncake_conversation_5pct", "mooncake_conversation_10pct",
    "mooncake_conversation_25pct", "hybrid_mean_vs_bar", "hybrid_worst_vs_bar", "worst_vs_lru",
    "evict_us_mean", "evict_us_p99", "bytes_per_node", "hint_90_5pct", "hint_none",
    "hint_50_cost", "two_tier_bytes_ratio", "two_tier_hit_diff", "blocks_per_s",
    "state_bytes_per_node",
}  # fmt: skip


def test_every_key_is_printed_last_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    blocks = read_blocks(SMALL)
    for name in (policy.CONVERSATION, SMALL):
        (tmp_path / f"{name}.jsonl").touch()
    monkeypatch.setattr(policy, "TRACES", tmp_path)
    monkeypatch.setattr(policy, "read_blocks", lambda _: blocks)
    monkeypatch.setattr(hybrid, "BARS", {SMALL: BARS[SMALL]})
    monkeypatch.setattr(policy, "MEMORY_CHUNKS", 2_000)
    monkeypatch.setattr(hybrid, "PROMPTS", 200)
    policy.main([])
    *_, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["bench"] == "policy"
    assert set(found["values"]) == KEYS
    assert found["values"]["worst_vs_lru"] > -0.5
    assert 0 < found["values"]["two_tier_bytes_ratio"] <= 1


def test_a_stopwatch_changes_nothing_and_has_a_figure_for_each_victim() -> None:
    timed, plain = LruEviction(), LruEviction()
    spent_us = policy.stopwatch(timed)
    names = []
    for made in (timed, plain):
        made.insert_chain(np.array([1, 2, 3]), NO_ROW, 100, 0.0)
        made.insert(5, NO_ROW, 100, 1.0)
        made.touch(np.array([1]), 2.0)
        victims = made.victims(lambda row: row == 5, 3.0)
        names.append([next(victims) for _ in range(2)])
    assert names[0] == names[1]
    for row in (*names[0], 5):
        timed.remove(row)
    assert len(spent_us) == 2
    assert min(spent_us) > 0
    assert len(timed) == 1


@pytest.mark.slow
def test_no_point_is_a_quarter_below_its_bar_and_the_mean_is_two_and_a_half_above() -> None:
    found = [difference for difference, _ in differences()]
    assert len(found) == 18
    assert min(found) >= -0.25
    assert sum(found) / len(found) >= 2.5


@pytest.mark.slow
def test_the_shipped_prior_is_the_learned_one() -> None:
    assert np.array_equal(learn_prior(), read_prior())


@pytest.mark.parametrize(
    ("rule", "written"), [("through", [2, 4, 4]), ("evict", [0, 2, 4]), ("selective", [0, 0, 2])]
)
def test_each_rule_writes_at_its_moment_and_a_clean_copy_is_free(
    rule: str, written: list[int]
) -> None:
    replay = TierReplay((2, 10), ADMISSIONS[rule], ReuseForecast(AccessHistory()))
    found = []
    for now_s, chain in enumerate(([1, 2], [3, 4], [1, 2])):
        last = replay.request(chain, float(now_s))
        found.append(replay.counts.written)
    assert found == written
    assert last == (0 if rule == "selective" else 2)


def splitmix64(state: int) -> int:
    """Steele, Lea and Flood's, in Python integers."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_tokens_are_those_of_the_formula() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF, "the published one"
    joined = tokens_of([(1001, 3), (5, 0), (0xFFFF_FFFF, 2)])
    places = [(1001, 0), (1001, 1), (1001, 2), (0xFFFF_FFFF, 0), (0xFFFF_FFFF, 1)]
    assert joined.tolist() == [3 + splitmix64((s << 32) + j) % 31997 for s, j in places]
    assert tokens_of([]).tolist() == []
