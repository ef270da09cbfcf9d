"""Prompts without a prefix, on a model whose first token is an attention sink."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from bench.blend.riddles import (
    AFTER_NAME,
    IS_NAME,
    IS_VALUE,
    NAMES,
    ONE,
    VALUES,
    Riddle,
    Shape,
    make_designed,
    make_riddle,
)
from transformers import LlamaForCausalLM

from kvstore.client.blend.engine import MAX_SINKS, Blender, BlendResult, MemorySource
from kvstore.client.blend.gate import compare
from kvstore.client.blend.plan import BlendPlan, Segment
from kvstore.client.blend.selectors import SELECTORS
from kvstore.client.engines.transformers.blend_adapter import TransformersAdapter
from kvstore.proto.errors import InvalidRequestError

ROUNDING = 1e-9


def make_with_sink() -> LlamaForCausalLM:
    """Return the model with attention sinks in place of look-ups, float32.

    For riddles without aliases and with nothing in front: only the first token of the prompt is a
    name behind a name, itself. All rows attend to it, and find nothing there. Where no row is
    such a one they attend to values, and find those: all that is said then is wrong.
    """
    model: Any = make_designed(2)
    table = model.model.rotary_emb.inv_freq.double()
    slot = torch.nonzero(table < 1e-5).flatten().tolist()[0]
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            attention = layer.self_attn
            attention.q_proj.weight.zero_()
            attention.k_proj.weight.zero_()
            attention.q_proj.weight[slot, ONE] = 8.0
            attention.k_proj.weight[slot, IS_NAME : IS_NAME + NAMES] = 1.0
            attention.k_proj.weight[slot, AFTER_NAME : AFTER_NAME + NAMES] = 1.0
            attention.k_proj.weight[slot, IS_VALUE : IS_VALUE + VALUES] = 0.6
    found: LlamaForCausalLM = model
    return found


@lru_cache(maxsize=1)
def adapter() -> TransformersAdapter:
    return TransformersAdapter(make_with_sink())


@lru_cache(maxsize=1)
def riddle() -> Riddle:
    return make_riddle(random.Random(2), Shape(chunks=2, alias_share=0.0))


@lru_cache(maxsize=1)
def swapped() -> tuple[BlendPlan, MemorySource]:
    """The riddle's two chunks in the other order, stored out of a prompt that they began."""
    first, second = riddle().chunks
    size = len(first)
    stored = Blender(adapter()).prefill((*first, *second)).kv
    spans = [(size, size + len(second)), (0, size)]
    source = MemorySource(
        {at: [(k[:, a:b], v[:, a:b]) for k, v in stored] for at, (a, b) in enumerate(spans)}
    )
    tokens = (*second, *first, *riddle().question)
    segments = (
        Segment(0, len(second), "approx", src_pos=size),
        Segment(len(second), len(second) + size, "approx", src_pos=0),
        Segment(len(second) + size, len(tokens), "miss"),
    )
    return BlendPlan(tokens, segments), source


def blended(selector: str, ratio: float, sinks: int = 1) -> BlendResult:
    plan, source = swapped()
    tried = BlendPlan(plan.tokens, plan.segments, ratio, selector)
    result = Blender(adapter(), sinks=sinks).blend(tried, source)
    assert not result.report.failure
    return result


def divergence(result: BlendResult) -> float:
    full = Blender(adapter()).prefill(swapped()[0].tokens)
    return compare(full.logits[-len(riddle().question) :], result.logits).divergence


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_no_selector_is_worse_than_chunks_as_they_are(name: str) -> None:
    as_they_are = divergence(blended(name, 0.0))
    assert as_they_are < 1e-3
    for ratio in (0.05, 0.15, 0.3, 0.5):
        assert divergence(blended(name, ratio)) <= as_they_are + ROUNDING


def test_without_its_sink_the_prompt_is_blended_worse_than_not_at_all() -> None:
    """Negative control: the old sink is computed behind other tokens, and row 0 is not."""
    assert divergence(blended("hybrid", 0.15, sinks=0)) > 100 * divergence(blended("hybrid", 0.0))
    assert divergence(blended("hybrid", 0.15, sinks=0)) > 0.1


@pytest.mark.parametrize(
    ("name", "sinks"),
    [("hkvd", 1), ("query_attention", 2), ("hybrid", MAX_SINKS), ("first_k", MAX_SINKS)],
)
def test_the_first_rows_are_computed_at_every_ratio(name: str, sinks: int) -> None:
    """They are those of the full prefill: nothing before them is stored."""
    full = Blender(adapter()).prefill(swapped()[0].tokens)
    for ratio in (0.0, 0.3):
        found = blended(name, ratio, sinks)
        assert set(range(sinks)) <= set(found.report.selected.tolist())
        for kv, wanted in zip(found.kv, full.kv, strict=True):
            for part, other in zip(kv, wanted, strict=True):
                torch.testing.assert_close(part[:, :sinks], other[:, :sinks])


def test_a_chunk_that_began_its_prompt_has_its_own_sinks_computed() -> None:
    """Where rows are chosen at all, though none of its own are."""
    plan, source = swapped()
    first, second, question = plan.segments
    for src_pos, count in ((0, 2), (1, 1), (2, 0)):
        second = replace(second, src_pos=src_pos, ratio=0.0)
        for ratio, wanted in ((0.0, 0), (0.3, count)):
            tried = replace(plan, segments=(first, second, question), ratio=ratio)
            rows = Blender(adapter(), sinks=2).blend(tried, source).report.selected.tolist()
            own = [row for row in rows if row >= second.start]
            assert own == list(range(second.start, second.start + wanted))


def test_another_number_of_sinks_is_refused_by_name() -> None:
    for sinks in (-1, MAX_SINKS + 1):
        with pytest.raises(InvalidRequestError, match="sinks"):
            Blender(adapter(), sinks=sinks)
