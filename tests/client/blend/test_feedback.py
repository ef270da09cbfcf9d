"""What is told of a blend, on numbers done by hand, and a source that gives up by itself."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstore.client.blend.engine import LayerLoader, MemorySource
from kvstore.client.blend.gate import ShadowEval, compare, deviations, worse
from kvstore.proto.errors import DeadlineError, InvalidRequestError
from kvstore.server.settings.values import GateTerms

TINYLM = Path(__file__).parents[3] / "data" / "tinylm"


def test_a_comparison_is_divergence_and_agreement_of_the_likeliest_token() -> None:
    full = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    blended = torch.tensor([[math.log(3.0), 0.0], [3.0, 0.0]])
    found = compare(full, blended)
    one = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert found.divergence == pytest.approx(one / 2)
    assert (found.agreement, found.tokens) == (1.0, 2)
    assert compare(full, torch.tensor([[3.0, 0.0], [0.0, 1.0]])).agreement == 0.0
    assert compare(full, full).divergence == 0


def test_logits_that_are_no_numbers_are_the_worst_there_is_and_masked_tokens_are_left_out() -> None:
    """A gate is told so: a mean of them would be none, and a report of it refused."""
    full = torch.tensor([[9.0, 0.0, 0.0]])
    for wrong in (math.nan, -math.inf):
        found = compare(full, torch.tensor([[wrong, 0.0, 0.0]]))
        assert found.divergence > 100
        assert math.isfinite(found.divergence)
        assert found.agreement == 0.0
    masked = torch.tensor([[9.0, 0.0, -math.inf]])
    assert compare(masked, masked).divergence == 0
    assert compare(masked, torch.tensor([[0.0, 9.0, -math.inf]])).divergence > 8
    for rows, width in ((0, 3), (2, 4)):
        with pytest.raises(InvalidRequestError, match="the same rows"):
            compare(torch.zeros(rows, 3), torch.zeros(rows, width))


def test_agreement_is_that_of_tokens_of_which_the_full_prefill_is_sure() -> None:
    """Of two that are as likely to a few hundredths either may come first."""
    full = torch.tensor([[0.05, 0.0], [3.0, 0.0], [0.0, 2.0]])
    blended = torch.tensor([[0.0, 0.05], [3.0, 0.0], [2.0, 0.0]])
    found = compare(full, blended)
    assert (found.clear_tokens, found.agreement) == (2, 0.5)
    assert found.agreement_of_all == pytest.approx(1 / 3)
    unclear = compare(full[:1], blended[:1])
    assert (unclear.clear_tokens, unclear.agreement, unclear.agreement_of_all) == (0, 0.0, 0.0)


def test_of_two_comparisons_the_larger_divergence_counts_and_all_their_tokens() -> None:
    question, answer = ShadowEval(0.01, 1.0, 30, 0.9, 20), ShadowEval(0.04, 0.5, 10, 0.6, 10)
    found = worse(question, answer)
    assert (found.divergence, found.tokens, found.clear_tokens) == (0.04, 40, 30)
    assert found.agreement == pytest.approx(25 / 30)
    assert found.agreement_of_all == pytest.approx(33 / 40)


def test_a_models_own_other_dtype_is_well_within_what_a_gate_asks_for() -> None:
    """What the bars refuse is more than rounding: bfloat16 is not refused at a tenth of them."""
    rows = (TINYLM / "heldout.jsonl").read_text().splitlines()[:2]
    tokenizer = AutoTokenizer.from_pretrained(TINYLM)
    ids = [tokenizer(json.loads(row)["text"])["input_ids"][:384] for row in rows]
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(TINYLM, dtype=dtype)
        with torch.inference_mode():
            logits[dtype] = torch.cat([model(torch.tensor([one])).logits[0] for one in ids])
    found, terms = compare(logits[torch.float32], logits[torch.bfloat16]), GateTerms()
    assert found.divergence < 0.1 * terms.max_divergence
    assert 1 - found.agreement < 0.2 * (1 - terms.min_agreement)
    assert found.agreement_of_all < found.agreement
    assert found.clear_tokens > 0.3 * found.tokens


def test_deviations_add_up_over_layers_each_in_its_own_size() -> None:
    small = torch.tensor([[[1.0], [1.0]]])
    wrong = torch.tensor([[[1.0], [0.0]]])
    layers = [(small, small), (small, 10 * small)]
    stored = [(small, wrong), (small, 10 * wrong)]
    assert deviations(layers, stored).tolist() == [0.0, 2.0]


def test_a_sources_own_deadline_is_told_as_it_said_it() -> None:
    class Late(MemorySource):
        def layer(self, i: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
            raise DeadlineError("redis took too long")

    with (
        LayerLoader(Late({}), [0], math.inf) as loader,
        pytest.raises(DeadlineError, match="redis"),
    ):
        loader.take()


def test_no_layer_is_taken_that_was_not_asked_for() -> None:
    with LayerLoader(MemorySource({0: []}), [], math.inf) as loader:
        assert loader.take() == {}
