"""What a model's settings say of its rotary embedding, as the Model has it.

Works on a transformers config by its fields, without importing transformers.
"""

from __future__ import annotations

from typing import Any

from kvstore.proto.errors import ModelError
from kvstore.proto.types import RopeParameters

# Their rotation depends on the length of the whole prompt, so a prefix has no keys of its own.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def rope_parameters(config: Any) -> RopeParameters:
    """Return the rotation that *config* states. Raises ModelError for what it refuses.

    Where layers rotate differently it is one that no codec undoes, and still tells models apart.
    """
    stated = dict(getattr(config, "rope_parameters", None) or {})
    if not stated:
        return RopeParameters(0.0, 0, "none")
    if "rope_type" in stated:
        return _rotation(config, stated)
    factors: dict[str, float] = {}
    for kind, each in stated.items():
        if isinstance(each, dict):
            rope = _rotation(config, dict(each))
            named = {"theta": rope.theta, f"is_{rope.scaling}": 1.0, **dict(rope.factors)}
            factors.update({f"{kind}.{name}": value for name, value in named.items()})
    return RopeParameters(0.0, 0, "by_layer_type", tuple(sorted(factors.items())))


def _rotation(config: Any, stated: dict[str, Any]) -> RopeParameters:
    scaling = str(stated.pop("rope_type", "default"))
    theta = float(stated.pop("rope_theta", 0.0))
    if scaling in _LENGTH_DEPENDENT_ROPE:
        raise ModelError("rope_type", scaling, "its keys depend on the length of the whole prompt")
    factors = {name: value for name, value in stated.items() if value is not None}
    factors.pop("type", None)
    for name, value in factors.items():
        if not isinstance(value, int | float):
            raise ModelError(f"rope.{name}", value, "only numbers are understood")
    rotary_dim = int(head_dim(config) * factors.pop("partial_rotary_factor", 1.0))
    numbers = sorted((name, float(value)) for name, value in factors.items())
    return RopeParameters(theta, rotary_dim, scaling, tuple(numbers))


def head_dim(config: Any) -> int:
    """Return the elements of an attention head."""
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)
