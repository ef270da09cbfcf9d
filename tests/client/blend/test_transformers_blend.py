"""The adapter of transformers: what it refuses, and what becomes of a blended cache."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers.blend_world import World, make_model, make_world
from helpers.torch_engine import greedy
from transformers import GPT2Config, GPT2LMHeadModel

from kvstore.client.blend import engine as blend_engine
from kvstore.client.blend import layer_pass, selectors
from kvstore.client.blend.engine import Blender
from kvstore.client.blend.selectors import SELECTORS
from kvstore.client.engines.transformers import blend_adapter as transformers_blend
from kvstore.client.engines.transformers.blend_adapter import BlendedCache, TransformersAdapter
from kvstore.client.engines.transformers.cache import as_argument
from kvstore.proto.errors import ModelError


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(dtype=torch.float32)


def generated(world: World, cache: BlendedCache | None) -> list[int]:
    ids = torch.tensor([world.tokens])
    engine: Any = world.model
    output = engine.generate(
        ids,
        generation_config=greedy(6),
        attention_mask=torch.ones_like(ids),
        **as_argument(cache),
    )
    found: list[int] = output[0].tolist()
    return found


def test_generating_from_a_blend_is_generating_without_one_where_all_rows_are_computed(
    world: World,
) -> None:
    for ratio, is_same in ((1.0, True), (0.0, False)):
        result = world.blender.blend(world.plan(ratio), world.source)
        found = generated(world, BlendedCache.of(world.model, result))
        assert (found == generated(world, None)) == is_same


def test_a_model_that_cannot_be_blended_is_refused_by_name() -> None:
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16))
    with pytest.raises(ModelError, match="GPT2LMHeadModel"):
        TransformersAdapter(other)
    adapted: Any = make_model()
    adapted.peft_config = {"default": object()}
    with pytest.raises(ModelError, match="give its digest"):
        TransformersAdapter(adapted)
    assert TransformersAdapter(adapted, "blake3:of it").origin.adapter_digest == "blake3:of it"
    rounded: Any = make_model(dtype=torch.float32)
    with pytest.raises(ModelError, match="do not cast it"):
        TransformersAdapter(rounded.to(torch.bfloat16))


# The same test for every device: nothing of the path is of one alone.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_blend_on_a_device_is_that_of_float64_on_the_cpu(world: World, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device: its twin on the CPU runs the same code")
    exact = make_world()
    engine: Any = make_model(dtype=torch.float32)
    blender = Blender(TransformersAdapter(engine.to(device)))
    for name in SELECTORS:
        wanted = exact.blender.blend(exact.plan(0.3, selector=name), exact.source)
        found = blender.blend(world.plan(0.3, selector=name), world.source)
        assert found.logits.device.type == device
        assert {part.device.type for kv in found.kv for part in kv} == {device}
        assert set(found.report.selected.tolist()) == set(wanted.report.selected.tolist())
        assert torch.allclose(found.logits.cpu().double(), wanted.logits, atol=1e-3)


def test_no_tensor_of_the_path_leaves_its_device_for_numpy() -> None:
    """What would fail on a device is not called at all: rows go to the source as numbers."""
    for module in (blend_engine, layer_pass, selectors, transformers_blend):
        assert ".numpy()" not in inspect.getsource(module)
