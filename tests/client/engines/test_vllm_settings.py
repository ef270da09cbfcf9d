"""What is said to the store of a prefill's cost and of a request's reuse, and which settings are
refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers.vllm_stand_ins import FakeRequest

from kvstore.client.engines.vllm.messages import FlopsModel, VllmSettings, hints_of
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import NO_HINTS, Hints, Reuse

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


def test_of_experts_those_count_that_one_token_meets() -> None:
    many = SimpleNamespace(**vars(LLAMA), num_experts_per_tok=2, moe_intermediate_size=4)
    assert FlopsModel.of(many).token_flops < FlopsModel.of(LLAMA).token_flops


def test_settings_that_say_too_little_cost_nothing() -> None:
    assert FlopsModel.of(SimpleNamespace(hidden_size=8)).of_chunk(10, 10) == 0.0


def with_hints(stated: object) -> FakeRequest:
    request = FakeRequest("a", [1] * 30)
    request.kv_transfer_params = {"kvstore": stated}  # type: ignore[attr-defined]
    request.num_prompt_tokens = 20  # type: ignore[attr-defined]
    return request


def test_hints_are_what_the_user_states_and_how_long_the_prompt_is() -> None:
    assert hints_of(FakeRequest("a", [1])) == NO_HINTS
    assert hints_of(with_hints(None)) == Hints(prompt_tokens=20)
    stated = {"reuse": 2, "category": "chat", "priority": 70}
    assert hints_of(with_hints(stated)) == Hints(Reuse.keep, 70, 0, 0, "chat", 20)


@pytest.mark.parametrize(
    "stated", [{"reuze": 1}, {"priority": 500}, "keep", {"prompt_tokens": 3}, {"category": []}]
)
def test_what_is_no_hint_is_refused(stated: object) -> None:
    with pytest.raises(InvalidRequestError):
        hints_of(with_hints(stated))


def test_another_unknown_setting_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidRequestError, match="kv_connector_extra_config has address"):
        VllmSettings.of({"bleed": True})
