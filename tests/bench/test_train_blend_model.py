"""Stories read by hand, and a training that is stopped and taken up again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bench.blend_riddles import BEGIN, FIRST_NAME, FIRST_VALUE, Shape, make_riddle
from bench.train_blend_model import Recipe, Training, make_model

TINY = Recipe(steps=4, stories=2, queries=4)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_answers_are_what_a_reader_finds_who_reads_from_the_start() -> None:
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
        asked = [known[FIRST_NAME + name] for name in story.asked]
        assert asked == list(story.answers)
        assert resolved == list(story.resolved[: len(resolved)])
        assert set(story.resolved[len(resolved) :]) == {-1}
        assert len(story.resolved) == len(story.tokens)
        assert story.tokens[0] == BEGIN
    assert again > 50


def test_a_story_of_nothing_is_refused() -> None:
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


def test_another_seed_starts_elsewhere() -> None:
    first, second = (make_model(seed).lm_head.weight for seed in (1, 2))
    assert not torch.equal(first, second)
    assert torch.equal(first, make_model(1).lm_head.weight)


def test_nothing_is_resumed_where_nothing_was_saved(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Training(TINY, tmp_path).resume()
