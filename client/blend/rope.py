"""Moving keys to other positions: one rotation, one rounding.

A stored key is g R(p w) of what the model projected: gain g, position p, frequencies w. To
stand at p' each of its pairs is turned by p' w - p w. Values are never touched. Both products
are rounded to float32 first, as engines do: their difference is then the one that the engine's
own tables have, at any distance (a delta angle in float64 is off by 4e-3 after 900,000 tokens).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.codecs.rope import KNOWN_RULES, inverse_frequencies, key_gain
from kvstore.proto.errors import ModelError
from kvstore.proto.types import RopeParameters


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How one layer's keys are rotated; channels behind the rotated ones stay as they are.

    *frequencies*: float32 numbers, one for each pair of channels (i, i + pairs), in radians a
    token. *gain*: what rotated keys are longer by. Raises ModelError.
    """

    frequencies: tuple[float, ...]
    gain: float = 1.0

    def __post_init__(self) -> None:
        if not self.frequencies or not all(map(math.isfinite, self.frequencies)):
            raise ModelError("frequencies", self.frequencies[:4], "give finite numbers")
        if not (math.isfinite(self.gain) and self.gain > 0):
            raise ModelError("gain", self.gain, "give a positive number")

    @classmethod
    def of(cls, rope: RopeParameters, head_dim: int) -> RopeSpec | None:
        """Return the rotation that *rope* names; None for models without one.

        Raises ModelError, with its name, for a rule that is not known: keys of
        ``dynamic`` and ``longrope`` depend on the length of the prompt they were computed in.
        """
        if rope.scaling == "none":
            return None
        found = inverse_frequencies(rope, head_dim)
        if found is None:
            known = ", ".join(KNOWN_RULES)
            raise ModelError(
                "rope", (rope.scaling, rope.factors), f"keys can be moved under {known}"
            )
        return cls(tuple(found.tolist()), key_gain(rope))

    @property
    def width(self) -> int:
        """How many channels are rotated."""
        return 2 * len(self.frequencies)

    def angles(self, positions: Tensor) -> Tensor:
        """Return the angles at *positions*, (tokens,): (tokens, pairs), float64 of float32."""
        table = torch.tensor(self.frequencies, dtype=torch.float32, device=positions.device)
        return (positions.float()[:, None] * table).double()


def rerotate(keys: Tensor, old: Tensor, new: Tensor, rope: RopeSpec) -> Tensor:
    """Return *keys*, (heads, tokens, head_dim), turned from their *old* positions to *new* ones.

    Computed in float64 and rounded once to the keys' dtype: within one unit in the last place of
    the exact turn. Raises ModelError for keys with fewer channels than are rotated.
    """
    if rope.width > keys.shape[-1]:
        found = (rope.width, keys.shape[-1])
        raise ModelError("rope", found, "more channels are rotated than there are")
    angles = rope.angles(new) - rope.angles(old)
    cosine, sine = torch.cos(angles), torch.sin(angles)
    pairs = rope.width // 2
    first, second = keys[..., :pairs].double(), keys[..., pairs : rope.width].double()
    moved = keys.clone()
    moved[..., :pairs] = first * cosine - second * sine
    moved[..., pairs : rope.width] = second * cosine + first * sine
    return moved
