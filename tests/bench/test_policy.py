"""bench.policy, with little of everything: the keys it prints, and what they are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from bench import policy, policy_costs, policy_grid
from bench.policy_costs import (
    TimedEviction,
    bare_loop_per_s,
    bytes_per_node,
    eviction_us,
    state_bytes_per_node,
)
from bench.policy_grid import POLICIES, Cell, all_cells, fill, read_blocks, worst_gap
from bench.report import Report

from kvstore.cli.simulate import Outcome
from kvstore.proto.key_table import NO_ROW
from kvstore.server.eviction.lru import LruEviction

SMALL = "dev_chat_lmsyslike_sps1_n100"
KEYS = {
    "mooncake_conversation_1pct", "mooncake_conversation_5pct", "mooncake_conversation_10pct",
    "mooncake_conversation_25pct", "hybrid_mean_vs_bar", "hybrid_worst_vs_bar", "worst_vs_lru",
    "evict_us_mean", "evict_us_p99", "bytes_per_node", "hint_90_5pct",
    "hint_50_cost", "two_tier_bytes_ratio", "two_tier_hit_diff", "blocks_per_s",
    "state_bytes_per_node",
}  # fmt: skip


def outcome(rate: float) -> Outcome:
    return Outcome("any", 1, rate, rate, 0.0, 0, 1.0)


def test_the_worst_gap_is_to_the_best_of_the_others_where_it_is_widest() -> None:
    rates = {
        ("a", "1%"): {"x": 0.30, "y": 0.20, "z": 0.31},
        ("a", "5%"): {"x": 0.30, "y": 0.34, "z": 0.10},
        ("b", "1%"): {"x": 0.90, "y": 0.10, "z": 0.10},
    }
    grid = {
        Cell(trace, size, name): outcome(rate)
        for (trace, size), row in rates.items()
        for name, rate in row.items()
    }
    gap = worst_gap(grid, "x", ("y", "z"))
    assert (round(gap.points, 6), gap.where) == (-4.0, "a at 5%: 30.00 to 34.00")
    assert worst_gap(grid, "x", ("z",)).points == pytest.approx(-1.0)


def test_the_grid_has_every_policy_at_every_size_and_each_is_replayed_alike() -> None:
    cells = all_cells([SMALL], ["1%", "5%"])
    assert {cell.policy for cell in cells} == set(POLICIES)
    assert len(cells) == 2 * 6
    some = [cell for cell in cells if cell.policy in ("lru", "hit_density")]
    ours, others = fill(some, 1), fill(some, 2)
    assert [one.block_hit_rate for one in ours.values()] == [
        one.block_hit_rate for one in others.values()
    ]


def test_a_stopwatch_changes_nothing_and_has_a_figure_for_each_victim() -> None:
    timed, plain = TimedEviction(LruEviction()), LruEviction()

    def keep(row: int) -> bool:
        return row == 5

    def take(victims: Iterator[int], count: int) -> list[int]:
        return [next(victims) for _ in range(count)]

    for made in (timed, plain):
        made.insert_chain(np.array([1, 2, 3]), NO_ROW, 100, 0.0)
        made.insert(5, NO_ROW, 100, 1.0)
        made.touch(np.array([1]), 2.0)
    names = take(timed.victims(keep, 3.0), 2)
    assert names == take(plain.victims(keep, 3.0), 2)
    for row in (*names, 5):
        timed.remove(row)
    assert len(timed.spent_us) == 2
    assert all(spent > 0 for spent in timed.spent_us)
    assert len(timed) == 1


def test_evictions_of_a_replay_are_timed_and_nodes_weighed() -> None:
    mean_us, p99_us, count = eviction_us(read_blocks(SMALL), "lru", "5%")
    assert count > 1000
    assert mean_us > 0
    assert p99_us > 0
    assert 20 < bytes_per_node("hit_density", 20_000) < 400
    assert bare_loop_per_s(read_blocks(SMALL)) > 0


def test_nodes_of_a_cache_of_states_are_weighed_with_states_and_without() -> None:
    for held in (True, False):
        assert 100 < state_bytes_per_node("lru", held, 1_000) < 300


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def shrink() -> None:
        for module in (policy, policy_grid):
            monkeypatch.setattr(module, "SIZES", ("5%",))
        monkeypatch.setattr(policy_grid, "WORKERS", 1)
        monkeypatch.setattr(policy_costs, "MEMORY_CHUNKS", 2_000)
        monkeypatch.setattr(policy_costs, "STATE_PROMPTS", 200)

    return shrink


def test_the_comparison_adds_its_keys(few: Callable[[], None]) -> None:
    few()
    report = Report("policy")
    policy.compare(report, [SMALL])
    assert set(report.values) == {"worst_vs_lru"}
    assert report.values["worst_vs_lru"] > -0.5
    assert any("s3fifo" in measured for _, _, measured, _ in report.rows)


def test_every_key_is_printed_last_in_one_line(
    few: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few()
    rate = {"1%": 0.1, "5%": 0.2, "10%": 0.3, "25%": 0.4}
    monkeypatch.setattr(policy, "SIZES", tuple(rate))
    monkeypatch.setattr(policy, "fill", lambda cells: {c: outcome(rate[c.size]) for c in cells})
    monkeypatch.setattr(policy, "replay", lambda cell: outcome(0.5))
    monkeypatch.setattr(policy, "all_cells", lambda traces: all_cells(traces, tuple(rate)))
    monkeypatch.setattr(policy, "add_tiers", lambda report, _: two_tiers(report))
    monkeypatch.setattr(policy, "hint_keys", hints)
    monkeypatch.setattr(policy, "hybrid_keys", hybrid)
    monkeypatch.setattr(policy, "eviction_us", lambda *_: (9.0, 90.0, 100))
    policy.main([])
    *table, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["bench"] == "policy"
    assert set(found["values"]) == KEYS
    assert found["values"]["mooncake_conversation_10pct"] == 0.3
    assert any("s3fifo" in row for row in table)


def two_tiers(report: Report) -> None:
    report.add("two_tier_bytes_ratio", 0.8, "")
    report.add("two_tier_hit_diff", 0.1, "")


def hints(report: Report) -> None:
    report.add("hint_90_5pct", 0.33, "")
    report.add("hint_50_cost", 0.2, "")


def hybrid(report: Report) -> None:
    report.add("hybrid_mean_vs_bar", 3.0, "")
    report.add("hybrid_worst_vs_bar", 0.1, "")
