"""The benchmark of engines where there is no vLLM to run: its prompts, and how it compares."""

from __future__ import annotations

from statistics import median

import pytest
from bench.engines import sides as engines_prompts
from bench.engines.__main__ import Samples, interval
from bench.engines.sides import Side, Taken
from bench.lib.processes import PeerSkippedError
from bench.lib.report import Report


def side(name: str, *, has_store: bool = True) -> Side:
    return Side(name, None, has_store)  # type: ignore[arg-type]


def samples(ours: list[float], theirs: list[float], cached: int = 128) -> Samples:
    made = Samples()
    plain = side("plain", has_store=False)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        made.take(side("ours"), "again", number, Taken(one, cached, []), (128, 256))
        made.take(plain, "again", number, Taken(other, 0, []), (128, 256))
    return made


def test_a_ratio_is_that_of_rounds_and_not_of_times() -> None:
    made = samples([9.0, 9.0, 1.0, 20.0, 3.0, 5.0], [1.0, 1.0, 2.0, 40.0, 3.0, 10.0])
    assert median(made.ratios(("ours", "again"), ("plain", "again"))) == 0.5


def test_a_hit_that_did_not_come_counts_nowhere() -> None:
    for cached in [127, 257]:
        made = samples([1.0] * 9, [2.0] * 9, cached)
        assert made.lost == {"ours": 9}
        with pytest.raises(PeerSkippedError, match="0 rounds"):
            made.ratios(("ours", "again"), ("plain", "again"))
        report = Report("engines")
        made.add(report, "miss_overhead", ("ours", "again"), ("plain", "again"))
        assert "0 rounds" in report.skipped["miss_overhead"]


def test_an_overhead_is_what_is_above_one() -> None:
    report = Report("engines")
    made = samples([1.1] * 9, [1.0] * 9)
    made.add(report, "miss_overhead", ("ours", "again"), ("plain", "again"))
    made.add(report, "ttft_hit_vs_recompute", ("ours", "again"), ("plain", "again"))
    assert report.values == {"miss_overhead": 0.1, "ttft_hit_vs_recompute": 1.1}


def test_what_a_median_might_have_been_is_as_wide_as_its_rounds_are_apart() -> None:
    assert interval([1.0] * 9) == (1.0, 1.0)
    near, far = ([1.0 + step * (number - 20) for number in range(41)] for step in (0.001, 0.01))
    assert interval(near)[0] < 1.0 < interval(near)[1] < 1.01
    assert interval(far)[1] - interval(far)[0] > 5 * (interval(near)[1] - interval(near)[0])
    report = Report("engines")
    samples([1.1] * 9, [1.0] * 9).add(
        report, "miss_overhead", ("ours", "again"), ("plain", "again")
    )
    assert [row[1] for row in report.rows] == ["0.100", "0.100 to 0.100"]


def test_turns_share_a_long_prefix_with_the_prompt_before_and_nothing_with_other_rounds() -> None:
    found = engines_prompts.turns(12)
    assert [turn.kind for turn in found] == ["chat", "document"] * 6
    for turn in found:
        earlier, prompt = turn.prompts(3)
        shared = turn.history_tokens
        assert shared >= engines_prompts.LEAST_TOKENS
        assert len(prompt) <= engines_prompts.MOST_TOKENS
        assert earlier[:shared] == prompt[:shared]
        assert len(prompt) > shared
        assert min(prompt) >= 3
        assert max(prompt) < 3 + engines_prompts.VOCABULARY
        assert turn.prompts(4)[1][:shared] != prompt[:shared]
