"""Engines of one tensor-parallel worker and of two share what either of them stored.

Pipelines are not here: vLLM's CPU build does not run them, with a store or without.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench.vllm_engine import EngineProcess
from local_server import eventually
from real_vllm.prompts import EngineMaker, assert_same, prompt


@pytest.fixture(scope="module")
def two(make_engine: EngineMaker) -> Iterator[EngineProcess]:
    """An engine of two workers, each with half of the model's heads."""
    engine = make_engine({}, tensor_parallel_size=2, distributed_executor_backend="mp")
    yield engine
    engine.close()


@pytest.mark.parametrize("is_one_first", [False, True], ids=["two_then_one", "one_then_two"])
def test_what_ranks_stored_is_loaded_by_any_number_of_ranks(
    two: EngineProcess, engine: EngineProcess, is_one_first: bool
) -> None:
    first, second = (engine, two) if is_one_first else (two, engine)
    one = prompt(200 + is_one_first, 300)
    computed = first.generate(one, max_tokens=40)
    assert computed[0]["cached"] == 0

    def is_loaded_by(reader: EngineProcess) -> bool:
        reader.forget()
        found = reader.generate(one, max_tokens=40)
        assert_same(found, computed)
        return bool(found[0]["cached"] == 256)

    assert eventually(lambda: is_loaded_by(second))
    assert eventually(lambda: is_loaded_by(first))
