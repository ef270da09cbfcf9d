"""Settings of a vLLM engine and of a request, and block tables where vLLM does not tell them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.vllm_pages import HYBRID, SHAPE, SLIDING
from helpers.vllm_stand_ins import FakeRequest

from kvstore.client.engines.vllm.messages import (
    FlopsModel,
    FollowedTables,
    VllmSettings,
    WorkerReport,
    deadline_ms_of,
    hints_of,
)
from kvstore.client.planning import PrefillModel
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import NO_HINTS, Hints, Reuse

# --- block tables


def step(
    new: dict[str, list[int]] | None = None,
    more: dict[str, list[int] | None] | None = None,
    resumed: Sequence[str] = (),
    over: Sequence[str] = (),
) -> Any:
    """vllm.v1.core.sched.output.SchedulerOutput of 0.26, for one block table a request."""
    more = more or {}
    cached = SimpleNamespace(
        req_ids=list(more), resumed_req_ids=set(resumed),
        new_block_ids=[None if blocks is None else (blocks,) for blocks in more.values()],
    )  # fmt: skip
    first = [SimpleNamespace(req_id=a, block_ids=(b,)) for a, b in (new or {}).items()]
    return SimpleNamespace(
        finished_req_ids=set(over), scheduled_new_reqs=first, scheduled_cached_reqs=cached
    )


def test_a_request_has_the_blocks_of_all_its_steps_and_none_once_it_is_over() -> None:
    given, tables = [1, 2], FollowedTables()
    tables.follow(step(new={"a": given, "b": [7]}))
    tables.follow(step(more={"a": [3], "b": None, "unknown": [4]}))
    assert (tables.of("a"), tables.of("b")) == ([[1, 2, 3]], [[7]])
    assert given == [1, 2], "vLLM's own list is left as it is"
    assert list(tables.of("unknown")) == []
    tables.follow(step(over=["a"]))
    assert (list(tables.of("a")), tables.of("b")) == ([], [[7]])


def test_a_request_that_was_preempted_has_the_blocks_it_was_given_anew() -> None:
    tables = FollowedTables()
    tables.follow(step(new={"a": [1, 2]}))
    tables.follow(step(more={"a": [8, 9, 4]}, resumed=["a"]))
    assert tables.of("a") == [[8, 9, 4]]


def test_ranks_of_which_one_read_lossy_have_read_lossy() -> None:
    one, other = WorkerReport(lossy_loads={"a": 3}), WorkerReport(lossy_loads={"a": 1, "b": 2})
    assert one.joined(other).lossy_loads == other.joined(one).lossy_loads == {"a": 1, "b": 2}


# --- settings of an engine


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"adress": "x"}, "kv_connector_extra_config has address"),
        ({"deadline_ms": "50"}, "deadline_ms"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"durable": 1}, "durable"),
        ({"accuracy": "lossy"}, "accuracy"),
        ({"prefill_token_us": -1}, "prefill_token_us=-1: give 0 to"),
        ({"first_token_ms": -1}, "first_token_ms=-1: give 0 to"),
        ({"handover_ms": -1}, "handover_ms"),
        ({"handover_ms": 600_001}, "handover_ms"),
        ({"wait_ms": 600_001}, "wait_ms"),
    ],
)
def test_settings_that_nobody_knows_or_that_are_none_are_refused_by_name(
    extra: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        VllmSettings.of(extra)


def test_the_speed_of_an_engine_is_a_setting() -> None:
    assert VllmSettings.of({}).prefill is None
    assert VllmSettings.of({"prefill_token_us": 50}).prefill == PrefillModel(0.0, 50e-6)


def test_chunks_are_whole_blocks_and_others_are_refused() -> None:
    for chosen, block, expected in ((0, 16, 256), (0, 96, 288), (64, 32, 64)):
        assert VllmSettings(chunk_tokens=chosen).chunk_tokens_for(block) == expected
    with pytest.raises(InvalidRequestError, match="multiple of the block size, 32"):
        VllmSettings(chunk_tokens=100).chunk_tokens_for(32)


def test_lossy_copies_are_loaded_into_plain_pages_in_cpu_memory_only() -> None:
    settings = VllmSettings.of({"accuracy": "bounded"})
    assert settings.accuracy_for(SHAPE, "cpu") == "bounded"
    for shape, device in ((SHAPE, "cuda"), (HYBRID, "cpu"), (SLIDING, "cpu")):
        assert settings.accuracy_for(shape, device) == "exact"


LLAMA = SimpleNamespace(
    hidden_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=2,
    intermediate_size=16,
)  # fmt: skip


def test_a_token_costs_two_operations_a_weight_and_more_the_more_is_before_it() -> None:
    cost = FlopsModel.of(LLAMA)
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    assert cost.token_flops == 2 * 2 * weights
    assert cost.context_flops == 4 * 2 * 4 * 2
    assert cost.of_chunk(0, 4) == 4 * (cost.token_flops + 2 * cost.context_flops)
    assert cost.of_chunk(1000, 4) - cost.of_chunk(0, 4) == 4000 * cost.context_flops
    many = SimpleNamespace(**vars(LLAMA), num_experts_per_tok=2, moe_intermediate_size=4)
    assert FlopsModel.of(many).token_flops < cost.token_flops, "of experts those a token meets"
    assert FlopsModel.of(SimpleNamespace(hidden_size=8)).of_chunk(10, 10) == 0.0


# --- of a request


def stating(stated: object) -> FakeRequest:
    request = FakeRequest("a", [1] * 30)
    request.kv_transfer_params = {"kvstore": stated}  # type: ignore[attr-defined]
    request.num_prompt_tokens = 20  # type: ignore[attr-defined]
    return request


def test_hints_are_what_the_user_states_and_how_long_the_prompt_is() -> None:
    assert hints_of(FakeRequest("a", [1])) == NO_HINTS
    assert hints_of(stating(None)) == Hints(prompt_tokens=20)
    stated = {"reuse": 2, "category": "chat", "priority": 70, "first_token_ms": 300}
    assert hints_of(stating(stated)) == Hints(Reuse.keep, 70, 0, 0, "chat", 20)


@pytest.mark.parametrize(
    "stated", [{"reuze": 1}, {"priority": 500}, "keep", {"prompt_tokens": 3}, {"category": []}]
)
def test_what_is_no_hint_is_refused(stated: object) -> None:
    with pytest.raises(InvalidRequestError):
        hints_of(stating(stated))


def test_a_deadline_is_the_requests_own_or_the_usual_one() -> None:
    assert deadline_ms_of(stating({"first_token_ms": 300}), 900) == 300
    assert deadline_ms_of(FakeRequest("a", [1]), 900) == 900


@pytest.mark.parametrize("stated", [-1, 1.5, True, 1 << 40])
def test_what_is_no_deadline_is_refused_by_name(stated: object) -> None:
    with pytest.raises(InvalidRequestError, match="first_token_ms"):
        deadline_ms_of(stating({"first_token_ms": stated}), 0)
