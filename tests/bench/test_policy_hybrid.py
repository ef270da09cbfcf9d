"""The bars of hybrid models hold on the traces of the checkout."""

from __future__ import annotations

import numpy as np
import pytest
from bench.policy_hybrid import (
    BARS,
    TRACES,
    HybridRow,
    hybrid_keys,
    hybrid_rows,
    learn_prior,
    read_segments,
)
from bench.report import Report
from bench.state_caches import state_requests

from kvstore.server.eviction.states.ranks import read_prior


@pytest.fixture(scope="module")
def rows() -> list[HybridRow]:
    return list(hybrid_rows())


@pytest.mark.slow
def test_every_point_is_at_most_a_quarter_of_a_point_below_its_bar(rows: list[HybridRow]) -> None:
    assert len(rows) == 18
    assert min(row.difference for row in rows) >= -0.25


@pytest.mark.slow
def test_the_mean_is_two_and_a_half_points_above_the_bars(rows: list[HybridRow]) -> None:
    assert sum(row.difference for row in rows) / len(rows) >= 2.5


@pytest.mark.slow
def test_the_prior_that_is_shipped_is_the_one_that_is_learnt() -> None:
    assert np.array_equal(learn_prior(), read_prior())


def test_traces_are_read_as_the_tokens_their_lines_count() -> None:
    requests = list(state_requests(read_segments("dev_ragshared_qps2_n900")))

    assert len(requests) == 1160
    first = requests[0]
    assert (first.time_s, first.prompt_tokens, len(first.tokens)) == (0.312, 3360, 3360 + 86)
    assert min(one.tokens.min() for one in requests) == 3


def test_the_report_has_the_keys_and_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [HybridRow("a", 2, 10.0, 13.0), HybridRow("b", 5, 10.0, 9.9)]
    monkeypatch.setattr("bench.policy_hybrid.hybrid_rows", lambda policy: iter(found))
    report = Report("policy")

    hybrid_keys(report)

    assert report.values == {"hybrid_mean_vs_bar": 1.45, "hybrid_worst_vs_bar": -0.1}
    assert len(report.rows) == 2 + len(found)


def test_the_bars_name_traces_that_are_here() -> None:
    assert all((TRACES / f"{trace}.jsonl").exists() for trace in BARS)
