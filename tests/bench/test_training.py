"""The training scripts in data/: stories read by hand, and reproducible runs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from bench.blend.riddles import BEGIN, FIRST_NAME, FIRST_VALUE, Shape, make_riddle
from data.riddlelm.train import Recipe, Training
from data.traces.train_scorer import fit, main

from kvstore.server.eviction.learned import FEATURES, StumpScorer

TINY = Recipe(steps=4, stories=2, queries=4)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_answers_are_those_of_a_reader_from_the_start() -> None:
    again = 0
    for seed in range(20):
        story = make_riddle(random.Random(seed), Shape(chunks=5, again_share=0.3))
        known: dict[int, int] = {}
        resolved = [-1]
        for chunk in story.chunks:
            for name, what, _ in zip(*[iter(chunk)] * 3, strict=True):
                again += name in known
                known[name] = what if what >= FIRST_VALUE else known[what]
                resolved += [-1, -1 if what >= FIRST_VALUE else known[what], -1]
        expected = [known[FIRST_NAME + name] for name in story.queried]
        assert expected == list(story.answers)
        assert resolved == list(story.resolved[: len(resolved)])
        assert set(story.resolved[len(resolved) :]) == {-1}
        assert len(story.resolved) == len(story.tokens)
        assert story.tokens[0] == BEGIN
    assert again > 50
    with pytest.raises(ValueError, match="riddle"):
        Shape(chunks=0)


def test_a_training_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = Training(TINY, tmp_path / "whole")
    losses = [whole.step() for _ in range(4)]
    first = Training(TINY, tmp_path / "parts")
    found = [first.step(), first.step()]
    first.save()
    second = Training(TINY, tmp_path / "parts")
    second.resume()
    found += [second.step(), second.step()]
    assert found == losses
    state = whole.model.state_dict()
    for name, parameter in second.model.state_dict().items():
        assert torch.equal(parameter, state[name]), name


def write_trace(path: Path, seed: int) -> Path:
    """Write prompts of two blocks: half of them ten repeated ones, half requested once."""
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
    scorer = StumpScorer.from_json(texts[0])
    features = [
        [10.0, 65536.0, hits, gap_s, np.inf, 1.0] for hits, gap_s in ((1.0, np.inf), (9.0, 20.0))
    ]
    once, often = scorer.score(np.array(features))
    assert often > once + 1.0


def test_stumps_find_the_decisive_feature_and_separate_infinity_from_other_values() -> None:
    draw = np.random.default_rng(1)
    features = draw.random((4000, len(FEATURES)))
    labels = (features[:, 3] > 0.4).astype(np.float64)
    scorer = fit((features, labels), stumps=20)
    assert {stump.feature for stump in scorer.stumps[1:]} == {3}
    assert ((scorer.score(features) > 0) == labels).mean() > 0.95
    features = np.ones((1000, len(FEATURES)))
    features[::2, 3] = np.inf
    scores = fit((features, np.isfinite(features[:, 3]).astype(np.float64)), stumps=5)
    found = scores.score(features)
    assert (found[1::2] > found[0::2] + 1).all()
    with pytest.raises(SystemExit, match="again"):
        fit((np.ones((10, len(FEATURES))), np.ones(10)))
