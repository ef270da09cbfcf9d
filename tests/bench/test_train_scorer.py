"""The trainer of the scorer, on traces that are made up here."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from bench.train_scorer import fit, main, thin

from kvstore.server.eviction.learned import FEATURES, StumpScorer


def write_trace(path: Path, seed: int) -> Path:
    """Prompts of two blocks: ten that come again and again, and as many that come once."""
    draw = random.Random(seed)
    lines = []
    for number in range(600):
        again = draw.random() < 0.5
        first = draw.randrange(10) if again else 1000 + number
        lines.append(
            {"timestamp": 1000 * number, "input_length": 1024, "output_length": 1}
            | {"hash_ids": [first * 2, first * 2 + 1]}
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_same_trace_gives_the_same_weights_and_other_traces_others(tmp_path: Path) -> None:
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        out = tmp_path / f"{name}.json"
        main([str(write_trace(tmp_path / f"{name}.jsonl", seed)), "--out", str(out)])
        texts.append(out.read_text())
    assert texts[0] == texts[1] != texts[2]


def test_what_came_again_before_is_learnt_to_come_again(tmp_path: Path) -> None:
    out = tmp_path / "weights.json"
    main([str(write_trace(tmp_path / "trace.jsonl", 1)), "--out", str(out)])
    scorer = StumpScorer.from_json(out.read_text())
    features = np.array(
        [[10.0, 65536.0, hits, gap_s, np.inf, 1.0] for hits, gap_s in ((1.0, np.inf), (9.0, 20.0))]
    )
    once, often = scorer.score(features)
    assert often > once + 1.0


def test_stumps_find_the_feature_that_the_answer_hangs_on() -> None:
    draw = np.random.default_rng(1)
    features = draw.random((4000, len(FEATURES)))
    labels = (features[:, 3] > 0.4).astype(np.float64)
    scorer = fit((features, labels), stumps=20)
    assert {stump.feature for stump in scorer.stumps[1:]} == {3}
    assert ((scorer.score(features) > 0) == labels).mean() > 0.95


def test_an_infinite_feature_can_be_told_from_all_others() -> None:
    features = np.ones((1000, len(FEATURES)))
    features[::2, 3] = np.inf
    labels = np.isfinite(features[:, 3]).astype(np.float64)
    scores = fit((features, labels), stumps=5).score(features)
    assert (scores[1::2] > scores[0::2] + 1).all()


def test_answers_that_are_all_the_same_teach_nothing_and_are_refused() -> None:
    with pytest.raises(SystemExit, match="again"):
        fit((np.ones((10, len(FEATURES))), np.ones(10)))


@pytest.mark.parametrize("most", [1, 7, 100, 1000])
def test_samples_are_thinned_evenly(most: int) -> None:
    features = np.arange(100.0)[:, None].repeat(len(FEATURES), axis=1)
    thinned, labels = thin((features, np.arange(100.0)), most)
    assert len(labels) == min(most, 100)
    assert (thinned[:, 0] == labels).all()
    assert len(labels) < 2 or (labels[0], labels[-1]) == (0.0, 99.0)
