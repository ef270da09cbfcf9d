"""Prompts, answers that have to be the same, and what engines are started with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
from bench.lib.vllm import EngineProcess

from kvstore.client.engines.vllm.connector import TransferResults

CHUNK_TOKENS = 64
"""Of the connector in these tests: two blocks."""

EngineMaker: TypeAlias = Callable[..., EngineProcess]
"""Starts an engine with these settings of the connector, or None, and of the engine."""

Answers: TypeAlias = list[dict[str, Any]]


def skip_where_windows_are_refused() -> None:
    """Skip a test of models with windows where this vLLM's are refused."""
    if TransferResults is None:
        pytest.skip("such models are refused: this vLLM cannot be told of a load that failed")


def prompt(seed: int, tokens: int) -> list[int]:
    """Return a prompt that shares nothing with that of another seed."""
    return [3 + seed, *map(int, np.random.default_rng(seed).integers(3, 250, tokens - 1))]


def assert_same(found: Answers, expected: Answers) -> None:
    """Fail unless tokens are identical and log probabilities are as near as another batch's."""
    assert [one["tokens"] for one in found] == [one["tokens"] for one in expected]
    assert {one["finish"] for one in found} == {"length"}
    for one, other in zip(found, expected, strict=True):
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)
