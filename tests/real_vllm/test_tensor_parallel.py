"""Engines of one worker, of two tensor-parallel ones and of two stages share what each stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.lib.vllm import EngineProcess
from helpers.local_server import eventually
from real_vllm import models
from real_vllm.prompts import EngineMaker, assert_same, prompt, skip_where_windows_are_refused

RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


STAGES = {
    "pipeline_parallel_size": 2, "distributed_executor_backend": "mp",
    "worker_extension_cls": "bench.lib.vllm_child.Stage",
}  # fmt: skip


@pytest.fixture(scope="module")
def two(make_engine: EngineMaker) -> Iterator[EngineProcess]:
    """An engine of two workers, each with half of the model's heads."""
    engine = make_engine({}, **RANKS)
    yield engine
    engine.close()


@pytest.mark.parametrize("is_one_first", [False, True], ids=["two_then_one", "one_then_two"])
def test_what_ranks_stored_is_loaded_by_any_number_of_ranks(
    two: EngineProcess, engine: EngineProcess, is_one_first: bool
) -> None:
    share(*((engine, two) if is_one_first else (two, engine)), prompt(200 + is_one_first, 300))


@pytest.fixture(scope="module")
def stages(make_engine: EngineMaker) -> Iterator[EngineProcess]:
    """An engine of two workers, each with half of the model's layers."""
    engine = make_engine({}, **STAGES)
    assert engine.ask("make_room") == [True, True]
    yield engine
    engine.close()


@pytest.mark.parametrize("is_one_first", [False, True], ids=["stages_then_one", "one_then_stages"])
def test_what_stages_stored_is_loaded_by_one_worker_and_the_other_way_round(
    stages: EngineProcess, engine: EngineProcess, is_one_first: bool
) -> None:
    share(
        *((engine, stages) if is_one_first else (stages, engine)), prompt(220 + is_one_first, 300)
    )


@pytest.fixture(scope="module")
def hybrids(make_engine: EngineMaker, home: Path) -> Iterator[dict[int, EngineProcess]]:
    """Engines of one worker and of two over a model with windows beside full attention."""
    skip_where_windows_are_refused()
    model = models.save(models.hybrid(), home / "hybrid-of-ranks")
    room = {"model": model, "num_gpu_blocks_override": 200}
    engines = {1: make_engine({}, **room), 2: make_engine({}, **room, **RANKS)}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("first", [2, 1], ids=["two_then_one", "one_then_two"])
def test_windows_that_ranks_stored_are_loaded_by_any_number_of_ranks(
    hybrids: dict[int, EngineProcess], first: int
) -> None:
    share(hybrids[first], hybrids[3 - first], prompt(210 + first, 300))


def share(first: EngineProcess, second: EngineProcess, one: list[int]) -> None:
    """Have *first* compute a prompt, and both load it then: the same tokens every time."""
    computed = first.generate(one, max_tokens=40)
    assert computed[0]["cached"] == 0

    def is_loaded_by(reader: EngineProcess) -> bool:
        reader.forget()
        found = reader.generate(one, max_tokens=40)
        assert_same(found, computed)
        return bool(found[0]["cached"] == 256)

    assert eventually(lambda: is_loaded_by(second))
    assert eventually(lambda: is_loaded_by(first))
