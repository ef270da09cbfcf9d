"""Prompts, pairs of engines whose answers have to be the same, and what engines start with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Pair:
    """An engine with the store and one without, over one model."""

    engine: EngineProcess
    oracle: EngineProcess

    def same(self, *prompts: list[int], **arguments: Any) -> list[int]:
        """Generate with the store and without; return how many tokens were cached."""
        found = self.engine.generate(*prompts, **arguments)
        expected = self.oracle.generate(*prompts, **arguments)
        self.oracle.forget()
        assert_same(found, expected)
        return [one["cached"] for one in found]

    def again(self, *prompts: list[int], **arguments: Any) -> list[int]:
        """Do the same once everything is stored and the engine has forgotten it."""
        self.engine.fresh()
        return self.same(*prompts, **arguments)

    def count(self, name: str) -> int:
        return int(self.engine.request("counts").get(name, 0))

    def close(self) -> None:
        for one in (self.engine, self.oracle):
            one.close()
