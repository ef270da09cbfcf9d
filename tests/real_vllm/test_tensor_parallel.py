"""Two tensor-parallel workers share one server, each with names of its own."""

from __future__ import annotations

from bench.vllm_engine import EngineProcess
from local_server import eventually
from real_vllm.prompts import EngineMaker, assert_same, prompt


def test_two_ranks_load_what_both_stored_and_one_alone_does_not(
    make_engine: EngineMaker, engine: EngineProcess
) -> None:
    one = prompt(200, 300)
    two = make_engine({}, tensor_parallel_size=2, distributed_executor_backend="mp")
    computed = two.generate(one, max_tokens=40)
    assert computed[0]["cached"] == 0

    def is_loaded() -> bool:
        two.forget()
        found = two.generate(one, max_tokens=40)
        assert_same(found, computed)
        return bool(found[0]["cached"] == 256)

    assert eventually(is_loaded)
    assert engine.generate(one)[0]["cached"] == 0
    two.close()
