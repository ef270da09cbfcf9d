"""Moving keys: every family of rotation, the size of the error, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.blend_world import LLAMA3, MODELS, YARN, make_model
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


def numbers(settings: dict[str, object]) -> dict[str, float]:
    return {k: float(str(v)) for k, v in settings.items() if k not in ("rope_type", "rope_theta")}


FAMILIES = {
    "default": named("default"),
    "linear": named("linear", factor=4.0),
    "ntk": named("ntk", factor=4.0),
    "yarn": named("yarn", **numbers(YARN)),
    "llama3": named("llama3", **numbers(LLAMA3)),
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
@pytest.mark.parametrize("shift", [0, 5000, 4_000_000])
def test_moved_keys_are_those_computed_at_the_new_place(name: str, shift: int) -> None:
    rope, bare = spec(name), some_keys()
    old = torch.arange(32)
    stored, wanted = keys_at(rope, bare, old), keys_at(rope, bare, old + shift)
    assert (rerotate(stored, old, old + shift, rope) - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(
    seed=st.integers(0, 1 << 30),
    old=st.integers(0, 1 << 20),
    new=st.integers(0, 1 << 20),
)
@settings(max_examples=6, deadline=None)
def test_the_error_is_at_most_two_units_in_the_last_place(
    name: str, dtype: torch.dtype, seed: int, old: int, new: int
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


def test_a_delta_angle_would_be_wrong_far_from_home() -> None:
    """Negative control: why the products are rounded before they are subtracted."""
    rope, bare = spec("default"), some_keys()
    old = torch.arange(32)
    new = old + 900_001
    wanted = keys_at(rope, bare, new)
    table = torch.tensor(rope.frequencies, dtype=torch.float32).double()
    delta = ((new - old).double()[:, None] * table).float().double()
    stored = keys_at(rope, bare, old)
    turned = torch.complex(stored[..., :32], stored[..., 32:]) * torch.polar(
        torch.ones_like(delta), delta
    )
    assert (turned.real - wanted[..., :32]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "llama-linear", "llama-yarn", "llama-llama3", "qwen3"])
def test_the_rules_are_those_of_transformers(name: str) -> None:
    model = make_model(name)
    rope = RopeSpec.of(rope_parameters(model.config), 16)
    table = model.model.rotary_emb
    assert rope is not None
    assert rope.frequencies == pytest.approx(table.inv_freq.tolist(), rel=1e-6)
    assert rope.gain == pytest.approx(table.attention_scaling, rel=1e-9)
    assert name in MODELS


@pytest.mark.parametrize("scaling", ["dynamic", "longrope", "of my own"])
def test_a_rule_that_is_not_known_is_refused_by_name(scaling: str) -> None:
    with pytest.raises(ModelError, match=scaling):
        RopeSpec.of(named(scaling, factor=2.0), HEAD_DIM)


def test_models_without_a_rotation_have_none() -> None:
    assert RopeSpec.of(named("none"), HEAD_DIM) is None


def test_keys_with_fewer_channels_than_are_rotated_are_refused() -> None:
    with pytest.raises(ModelError, match="more channels"):
        rerotate(some_keys()[..., :32], torch.arange(32), torch.arange(32), spec("default"))


@pytest.mark.parametrize(("numbers", "gain"), [((), 1.0), ((math.nan,), 1.0), ((1.0,), 0.0)])
def test_a_table_is_checked_at_birth(numbers: tuple[float, ...], gain: float) -> None:
    with pytest.raises(ModelError):
        RopeSpec(numbers, gain)
