"""Rotary embedding: the angles of a model's keys, and rotation by them.

RoPE (Su et al., RoFormer, arXiv 2104.09864, section 3.4.2), in the half-split order of Llama:
rotated channel i is paired with channel i + pairs. The frequencies follow the rules ``default``,
``linear`` (position interpolation), ``llama3`` and ``yarn`` (arXiv 2309.00071) as in transformers,
and ``ntk``, the fixed change of base that yarn is based on (its section 3.1); ``dynamic``, which
changes the base with the prompt's length, is not supported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.floats import Floats
from kvstore.proto.types import RopeParameters

MAX_PAIRS = 1 << 12

Doubles: TypeAlias = NDArray[np.float64]


def inverse_frequencies(rope: RopeParameters | None, head_dim: int) -> Floats | None:
    """Return the angle per token of each pair, f32 (pairs,), in radians; None for unknown rules.

    Also None for models without rotary embedding. A scaling of the keys' length, as in yarn, is
    left in the keys: it does not depend on the position.
    """
    if rope is None or not 2 <= rope.rotary_dim <= min(head_dim, 2 * MAX_PAIRS):
        return None
    if rope.rotary_dim % 2 or not (math.isfinite(rope.theta) and rope.theta > 1):
        return None
    return _frequencies(rope)


@lru_cache(maxsize=16)
def _frequencies(rope: RopeParameters) -> Floats | None:
    plain = rope.theta ** -(np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim)
    rule = _RULES.get(rope.scaling)
    try:
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = None if rule is None else rule(plain, rope, dict(rope.factors))
    except (KeyError, ZeroDivisionError, ValueError):
        return None
    if scaled is None or not np.isfinite(scaled).all():
        return None
    found = scaled.astype(np.float32)
    found.flags.writeable = False
    return found


def _ntk(plain: Doubles, rope: RopeParameters, factors: dict[str, float]) -> Doubles:
    del plain
    width = rope.rotary_dim
    theta = rope.theta * factors["factor"] ** (width / (width - 2))
    found: Doubles = theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    return found


def _llama3(plain: Doubles, rope: RopeParameters, factors: dict[str, float]) -> Doubles:
    del rope
    length = factors["original_max_position_embeddings"]
    low, high = factors["low_freq_factor"], factors["high_freq_factor"]
    if not high > low:
        raise ValueError("no band to blend in")
    turns = length * plain / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - share) * plain / factors["factor"] + share * plain


def _yarn(plain: Doubles, rope: RopeParameters, factors: dict[str, float]) -> Doubles:
    length = factors["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        return (
            rope.rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = pair_of(factors.get("beta_fast", 32.0)), pair_of(factors.get("beta_slow", 1.0))
    if factors.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low), 0, 1)
    found: Doubles = plain / factors["factor"] * ramp + plain * (1 - ramp)
    return found


Rule: TypeAlias = Callable[[Doubles, RopeParameters, dict[str, float]], Doubles]
_RULES: dict[str, Rule] = {
    "default": lambda plain, _rope, _factors: plain,
    "linear": lambda plain, _rope, factors: plain / factors["factor"],
    "ntk": _ntk,
    "llama3": _llama3,
    "yarn": _yarn,
}
KNOWN_RULES = tuple(_RULES)


def key_gain(rope: RopeParameters) -> float:
    """Return the scaling of rotated keys: yarn's attention temperature, else 1.

    YaRN, section 3.4, as transformers computes it: ``attention_factor`` when stated, else from
    ``mscale`` and ``mscale_all_dim``, else 0.1 ln(factor) + 1.
    """
    factors = dict(rope.factors)
    if rope.scaling != "yarn":
        return 1.0
    if "attention_factor" in factors:
        return factors["attention_factor"]
    factor = factors.get("factor", 1.0)
    over, under = factors.get("mscale", 0.0), factors.get("mscale_all_dim", 0.0)
    if over and under:
        return _temperature(factor, over) / _temperature(factor, under)
    return _temperature(factor, 1.0)


def _temperature(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rotation(frequencies: Floats, position: int, tokens: int) -> tuple[Floats, Floats]:
    """Return cosine and sine of each token's angles, f32 (tokens, pairs).

    Computed in float64, so that every backend on a machine rotates by the same numbers.
    """
    places = np.arange(position, position + tokens, dtype=np.float64)
    angles = places[:, None] * frequencies.astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(rows: Floats, cosine: Floats, sine: Floats) -> None:
    """Rotate *rows*, f32 (heads, tokens, head_dim), by their angles, in place.

    ``-sine`` undoes a rotation. Each product and sum is rounded separately.
    """
    pairs = cosine.shape[1]
    first, second = rows[..., :pairs], rows[..., pairs : 2 * pairs]
    turned = first * cosine
    turned -= second * sine
    second *= cosine
    second += first * sine
    first[...] = turned
