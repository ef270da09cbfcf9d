"""Blending with vLLM is refused by name, and what vLLM lacks for it is declared and documented."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore.client.engines.vllm.settings import MISSING_HOOKS, VLLM_VERSION, VllmSettings, hints_of
from kvstore.proto.errors import InvalidRequestError

PAGE = Path(__file__).parents[3] / "docs" / "blend.md"


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
