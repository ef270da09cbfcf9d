from __future__ import annotations

import math

import numpy as np
import pytest

from kvstore.codecs.rope import inverse_frequencies, rotate, rotation
from kvstore.proto.types import RopeParameters

LLAMA3 = (
    ("factor", 8.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0),
    ("original_max_position_embeddings", 8192.0),
)  # fmt: skip
YARN = (("factor", 4.0), ("original_max_position_embeddings", 32768.0))


def frequencies(*rope: object) -> np.ndarray:
    found = inverse_frequencies(RopeParameters(*rope), 128)  # type: ignore[arg-type]
    assert found is not None
    assert found.dtype == np.float32
    return found


def test_plain_frequencies_fall_from_one_by_the_base() -> None:
    found = frequencies(10000.0, 64)
    assert found == pytest.approx([10000.0 ** (-i / 32) for i in range(32)], rel=1e-6)


def test_linear_scaling_divides_all() -> None:
    plain = frequencies(5e5, 128)
    assert frequencies(5e5, 128, "linear", (("factor", 4.0),)) == pytest.approx(plain / 4)


def test_llama3_keeps_the_fast_divides_the_slow_and_blends_between() -> None:
    plain, found = frequencies(5e5, 128), frequencies(5e5, 128, "llama3", LLAMA3)
    turns = 8192 * plain / (2 * math.pi)
    assert (found[turns > 4] == plain[turns > 4]).all()
    assert found[turns < 1] == pytest.approx(plain[turns < 1] / 8, rel=1e-6)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((found < plain) & (found > plain / 8))[between].all()


def test_yarn_keeps_the_fast_and_divides_the_slow() -> None:
    plain, found = frequencies(1e6, 128), frequencies(1e6, 128, "yarn", YARN)
    assert (found[:20] == plain[:20]).all()
    assert found[-10:] == pytest.approx(plain[-10:] / 4, rel=1e-6)
    assert (np.diff(found) < 0).all()


@pytest.mark.parametrize(
    ("scaling", "factors"),
    [("llama3", LLAMA3), ("yarn", YARN), ("linear", (("factor", 4.0),)), ("default", ())],
)
def test_frequencies_are_those_of_transformers(
    scaling: str, factors: tuple[tuple[str, float], ...]
) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if scaling not in ROPE_INIT_FUNCTIONS:
        return  # its plain ones are computed by each model
    config = transformers.LlamaConfig(
        hidden_size=4096, num_attention_heads=32, head_dim=128, max_position_embeddings=131072,
        rope_parameters={"rope_type": scaling, "rope_theta": 5e5, **dict(factors)},
    )  # fmt: skip
    theirs, _ = ROPE_INIT_FUNCTIONS[scaling](config, "cpu")
    assert frequencies(5e5, 128, scaling, factors) == pytest.approx(theirs.numpy(), rel=2e-6)


def test_what_is_not_known_is_not_guessed() -> None:
    for rope in [
        None,
        RopeParameters(10000.0, 64, "none"),
        RopeParameters(10000.0, 64, "dynamic", (("factor", 2.0),)),
        RopeParameters(10000.0, 64, "llama3"),
        RopeParameters(10000.0, 64, "linear", (("factor", 0.0),)),
        RopeParameters(10000.0, 64, "llama3", tuple((n, 1.0) for n, _ in LLAMA3)),
        RopeParameters(10000.0, 63),
        RopeParameters(10000.0, 0),
        RopeParameters(10000.0, 256),
        RopeParameters(0.0, 64),
        RopeParameters(math.inf, 64),
    ]:
        assert inverse_frequencies(rope, 128) is None


def test_turning_is_the_complex_product_and_turning_back_undoes_it() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, 10, 24), np.float32)
    cosine, sine = rotation(frequencies(10000.0, 16), 1000, 10)
    turned = rows.copy()
    rotate(turned, cosine, sine)
    before = rows[..., :8] + 1j * rows[..., 8:16]
    angles = (1000 + np.arange(10))[:, None] * frequencies(10000.0, 16).astype(float)
    after = turned[..., :8] + 1j * turned[..., 8:16]
    assert np.abs(after - before * np.exp(1j * angles)).max() < 1e-5
    assert (turned[..., 16:] == rows[..., 16:]).all()
    rotate(turned, cosine, -sine)
    assert np.abs(turned - rows).max() < 1e-5


def test_turning_by_two_positions_is_turning_by_their_sum() -> None:
    rows = np.random.default_rng(1).standard_normal((1, 1, 16), np.float32)
    found = frequencies(10000.0, 16)
    twice = rows.copy()
    for position in (700, 31):
        rotate(twice, *rotation(found, position, 1))
    once = rows.copy()
    rotate(once, *rotation(found, 731, 1))
    assert np.abs(once - twice).max() < 1e-5
