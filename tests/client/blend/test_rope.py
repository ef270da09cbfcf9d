"""Moving keys: every family of rotation, the size of the error, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.blend_world import LLAMA3, YARN, make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvstore.client.blend.layer_pass import RopeSpec, rerotate
from kvstore.proto.errors import ModelError
from kvstore.proto.hf_config import rope_parameters
from kvstore.proto.types import RopeParameters

HEAD_DIM = 64


def named(scaling: str, **factors: float) -> RopeParameters:
    return RopeParameters(1e4, HEAD_DIM, scaling, tuple(sorted(factors.items())))


def factors_of(settings: dict[str, object]) -> dict[str, float]:
    return {k: float(str(v)) for k, v in settings.items() if k not in ("rope_type", "rope_theta")}


FAMILIES = {
    "default": named("default"),
    "linear": named("linear", factor=4.0),
    "ntk": named("ntk", factor=4.0),
    "yarn": named("yarn", **factors_of(YARN)),
    "llama3": named("llama3", **factors_of(LLAMA3)),
    "partial": RopeParameters(1e4, 24),
}


def spec(name: str) -> RopeSpec:
    found = RopeSpec.of(FAMILIES[name], HEAD_DIM)
    assert found is not None
    return found


def keys_at(rope: RopeSpec, bare: Tensor, positions: Tensor) -> Tensor:
    """Keys as an engine has them, by the rule's own formula: complex numbers, one pair each."""
    table = torch.tensor(rope.frequencies, dtype=torch.float32)
    angles = (positions.float()[:, None] * table).double()
    pairs = len(rope.frequencies)
    turned = torch.complex(bare[..., :pairs], bare[..., pairs : 2 * pairs])
    turned = turned * torch.polar(torch.full_like(angles, rope.gain), angles)
    return torch.cat([turned.real, turned.imag, bare[..., 2 * pairs :]], -1)


def some_keys(tokens: int = 32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, HEAD_DIM, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_moved_keys_are_those_computed_at_the_new_place(name: str) -> None:
    rope, bare, old = spec(name), some_keys(), torch.arange(32)
    for shift in (0, 5000, 4_000_000):
        stored, wanted = keys_at(rope, bare, old), keys_at(rope, bare, old + shift)
        assert (rerotate(stored, old, old + shift, rope) - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(
    name=st.sampled_from(sorted(FAMILIES)),
    seed=st.integers(0, 1 << 30),
    old=st.integers(0, 1 << 20),
    new=st.integers(0, 1 << 20),
)
@settings(max_examples=30, deadline=None)
def test_the_error_is_at_most_two_units_in_the_last_place(
    dtype: torch.dtype, name: str, seed: int, old: int, new: int
) -> None:
    rope = spec(name)
    stored = some_keys(3, seed).to(dtype)
    places = torch.arange(3)
    moved = rerotate(stored, places + old, places + new, rope)
    exact = keys_by_math(stored.double(), places + old, places + new, rope)
    unit = torch.finfo(dtype).eps * 2.0 ** torch.floor(torch.log2(exact.abs()))
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((moved.double() - exact).abs() / unit.clamp_min(least)).max() <= 2


def keys_by_math(stored: Tensor, old: Tensor, new: Tensor, rope: RopeSpec) -> Tensor:
    """The exact turn, number by number, with Python's own cosine and sine."""
    exact, pairs = stored.clone(), len(rope.frequencies)
    table = torch.tensor(rope.frequencies, dtype=torch.float32)
    for token in range(len(new)):
        before = (old[token].float() * table).tolist()
        after = (new[token].float() * table).tolist()
        for pair in range(pairs):
            angle = after[pair] - before[pair]
            x, y = stored[:, token, pair], stored[:, token, pair + pairs]
            exact[:, token, pair] = x * math.cos(angle) - y * math.sin(angle)
            exact[:, token, pair + pairs] = y * math.cos(angle) + x * math.sin(angle)
    return exact


def test_the_rules_are_those_of_transformers() -> None:
    for name in ("llama", "llama-linear", "llama-yarn", "llama-llama3", "qwen3"):
        model = make_model(name)
        rope, table = RopeSpec.of(rope_parameters(model.config), 16), model.model.rotary_emb
        assert rope is not None
        assert rope.frequencies == pytest.approx(table.inv_freq.tolist(), rel=1e-6)
        assert rope.gain == pytest.approx(table.attention_scaling, rel=1e-9)


def test_what_cannot_be_turned_is_refused_by_name() -> None:
    for scaling in ("dynamic", "longrope", "of my own"):
        with pytest.raises(ModelError, match=scaling):
            RopeSpec.of(named(scaling, factor=2.0), HEAD_DIM)
    with pytest.raises(ModelError, match="more channels"):
        rerotate(some_keys()[..., :32], torch.arange(32), torch.arange(32), spec("default"))
    for numbers, gain in (((), 1.0), ((math.nan,), 1.0), ((1.0,), 0.0)):
        with pytest.raises(ModelError):
            RopeSpec(numbers, gain)
    assert RopeSpec.of(named("none"), HEAD_DIM) is None, "a model without a rotation"
