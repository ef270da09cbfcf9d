"""What is said to the store of a prefill's cost and of a request's reuse; blending is refused by
name, and what vLLM lacks for it is declared and documented."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_stand_ins import FakeRequest

from kvstore.client.engines.vllm.settings import (
    MISSING_HOOKS,
    VLLM_VERSION,
    FlopsModel,
    VllmSettings,
    hints_of,
)
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import NO_HINTS, Hints, Reuse

PAGE = Path(__file__).parents[3] / "docs" / "blend.md"
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


# --- blending


@pytest.mark.parametrize("name", ["blend", "blend_tag", "blending"])
def test_a_setting_that_asks_for_blending_is_refused_by_name_with_what_is_lacking(
    name: str,
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        VllmSettings.of({name: True})
    said = str(refused.value)
    assert said.startswith(f"kv_connector_extra_config={name!r}")
    assert all(hook in said for hook in MISSING_HOOKS)
    assert "docs/blend.md" in said


def test_a_request_that_asks_for_blending_is_refused_by_name() -> None:
    """Its hints are passed over then, and it is served."""

    hints = {"kvstore": {"blend": "rag"}}
    request = SimpleNamespace(num_prompt_tokens=20, kv_transfer_params=hints)
    with pytest.raises(InvalidRequestError, match=r"kv_transfer_params\.kvstore=.*no hook for"):
        hints_of(request)


def test_another_unknown_setting_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidRequestError, match="kv_connector_extra_config has address"):
        VllmSettings.of({"bleed": True})


def test_the_page_says_of_each_hook_what_is_lacking() -> None:
    _, _, page = PAGE.read_text().partition("### vLLM")
    page = page.partition("\n## ")[0]
    rows = [row.split("|")[1].strip() for row in page.splitlines() if row.startswith("| ")]
    assert rows[1:] == [*MISSING_HOOKS]
    assert VLLM_VERSION in page
