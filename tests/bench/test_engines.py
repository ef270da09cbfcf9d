"""The benchmark of engines where there is no vLLM to run: its prompts, and how it compares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import engines, engines_hang, engines_prompts, engines_stores
from bench.engines_samples import Samples, in_turn, interval
from bench.engines_sides import Side, Taken
from bench.peer_process import PeerSkippedError
from bench.report import Report


def test_without_its_environment_it_says_how_to_make_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(engines, "PYTHON", tmp_path / "python")
    assert engines.main(["--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["values"] == {}
    assert set(line["skipped"]) == set(engines.KEYS)
    assert "make vllm-env" in line["skipped"]["miss_overhead"]


def test_so_does_the_one_figure_that_can_be_had_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(engines_stores, "PYTHON", tmp_path / "python")
    assert engines_stores.main(["--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert "make vllm-env" in line["skipped"]["store_overhead"]


def test_so_does_what_a_server_that_hangs_costs_by_transport(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(engines_hang, "PYTHON", tmp_path / "python")
    assert engines_hang.main(["--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["skipped"]) == set(engines_hang.KEYS)


def side(name: str, *, has_store: bool = True) -> Side:
    return Side(name, None, has_store)  # type: ignore[arg-type]


def samples(ours: list[float], theirs: list[float], cached: int = 128) -> Samples:
    made = Samples()
    plain = side("plain", has_store=False)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        made.take(side("ours"), "again", number, Taken(one, 0.0, cached, []), (128, 256))
        made.take(plain, "again", number, Taken(other, 0.0, 0, []), (128, 256))
    return made


def test_a_ratio_is_that_of_rounds_and_not_of_times() -> None:
    made = samples([9.0, 9.0, 1.0, 20.0, 3.0, 5.0], [1.0, 1.0, 2.0, 40.0, 3.0, 10.0])
    assert made.ratio(("ours", "again"), ("plain", "again")) == 0.5


@pytest.mark.parametrize("cached", [127, 257])
def test_a_hit_that_did_not_come_counts_nowhere(cached: int) -> None:
    made = samples([1.0] * 9, [2.0] * 9, cached)
    assert made.lost == {"ours": 9}
    with pytest.raises(PeerSkippedError, match="0 rounds"):
        made.ratio(("ours", "again"), ("plain", "again"))
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


def test_every_contestant_is_first_in_turn() -> None:
    sides = [side(name) for name in "abc"]
    orders = ["".join(one.name for one in in_turn(sides, n)) for n in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]


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


def test_questions_about_a_document_differ_in_the_question_alone() -> None:
    turn = engines_prompts.turns(2)[1]
    earlier, prompt = turn.prompts(1)
    assert len(earlier) > turn.history_tokens
    assert earlier[turn.history_tokens :] != prompt[turn.history_tokens :]


def test_chats_are_cut_to_what_was_asked_for() -> None:
    found = engines_prompts.chats(640)
    lengths = {engines_prompts.length(one) for one in found}
    assert max(lengths) == 640
    assert min(lengths) >= 160
