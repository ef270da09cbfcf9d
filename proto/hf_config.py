"""The Model of a Hugging Face config: its layers and its rotary embedding.

Reads the config's fields without importing transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from kvstore.proto.errors import ModelError
from kvstore.proto.types import DType, LayerGroup, LayerKind, Model, RopeParameters

OWN_TOKENIZER = "of the weights"
"""The tokenizer is in the folder or commit of the weights, so their name covers it."""

_KINDS = {
    "full_attention": LayerKind.attention,
    "attention": LayerKind.attention,
    "sliding_attention": LayerKind.window,
}
_STATES = ("linear_attention", "mamba", "conv", "hybrid", "recurrent")
"""Layer types with a state, alone or beside their attention."""
_NOTHING = ("mlp", "moe")
"""Layer types without a cache."""
_UNKNOWN = (
    "is_encoder_decoder", "cross_attention_layers", "attention_chunk_size",
    "num_kv_shared_layers", "index_topk",
)  # fmt: skip
"""Settings of models whose caches these fields do not describe."""

# The rotation depends on the length of the whole prompt, so a prefix's keys cannot be reused.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def rope_parameters(config: Any) -> RopeParameters:
    """Return the rotation that *config* states. Raises ModelError for an unsupported one.

    If layers rotate differently, the result only distinguishes models: no codec can undo it.
    """
    stated = dict(getattr(config, "rope_parameters", None) or {})
    if not stated:
        return RopeParameters(0.0, 0, "none")
    if "rope_type" in stated:
        return _rotation(stated, head_dim(config))
    factors: dict[str, float] = {}
    for kind, each in stated.items():
        if isinstance(each, dict):
            rope = _rotation(dict(each), 0)  # heads may differ in size, too
            named = {"theta": rope.theta, f"is_{rope.scaling}": 1.0, **dict(rope.factors)}
            factors.update({f"{kind}.{name}": value for name, value in named.items()})
    return RopeParameters(0.0, 0, "by_layer_type", tuple(sorted(factors.items())))


def _rotation(stated: dict[str, Any], dim: int) -> RopeParameters:
    scaling = str(stated.pop("rope_type", "default"))
    theta = float(stated.pop("rope_theta", 0.0))
    if scaling in _LENGTH_DEPENDENT_ROPE:
        raise ModelError("rope_type", scaling, "its keys depend on the length of the whole prompt")
    factors = {name: value for name, value in stated.items() if value is not None}
    factors.pop("type", None)
    for name, value in factors.items():
        if not isinstance(value, int | float):
            raise ModelError(f"rope.{name}", value, "only numbers are supported")
    rotary_dim = int(dim * factors.pop("partial_rotary_factor", 1.0))
    numbers = sorted((name, float(value)) for name, value in factors.items())
    return RopeParameters(theta, rotary_dim, scaling, tuple(numbers))


def head_dim(config: Any) -> int:
    """Return the size of an attention head in elements."""
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


def model_of(config: Any, revision: str, dtype: str = "") -> Model:
    """Return the Model of *config*, whose layers keep K and V of all tokens or of a window.

    MLA layers keep one latent, as in paged engines: (1, tokens, kv_lora_rank + qk_rope_head_dim).
    *revision* names the weights and the tokenizer. *dtype* is the KV's, by default that of the
    weights. Raises ModelError for what the config does not state, such as the size of states.
    """
    if isinstance(config, str | dict | PurePath):
        fix = "give what transformers' AutoConfig.from_pretrained returns"
        raise ModelError("config", type(config).__name__, fix)
    get_text = getattr(config, "get_text_config", None)
    name = str(getattr(config, "name_or_path", "") or getattr(config, "model_type", ""))
    text = get_text() if callable(get_text) else config
    for field in _UNKNOWN:
        if getattr(text, field, None):
            fix = "this model's cache is of another kind: state its layer groups by Model(...)"
            raise ModelError(field, getattr(text, field), fix)
    dtype = dtype or str(getattr(text, "dtype", None) or getattr(text, "torch_dtype", None) or "")
    if not dtype:
        raise ModelError("dtype", dtype, "the config states none: give it, as dtype='bfloat16'")
    groups = _groups(text, DType.parse(dtype))
    return Model(name, revision, "none", "none", groups, rope_parameters(text), OWN_TOKENIZER)


def _groups(config: Any, dtype: DType) -> tuple[LayerGroup, ...]:
    ids = _layers_by_kind(config)
    try:
        heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        dim = head_dim(config)
        if latent := int(getattr(config, "kv_lora_rank", None) or 0):
            ids = {LayerKind.mla: ids.pop(LayerKind.attention, []), **ids}
            heads, dim = 1, latent + int(config.qk_rope_head_dim)
    except (AttributeError, TypeError, ZeroDivisionError, RuntimeError) as error:
        raise ModelError("config", type(config).__name__, f"states no heads: {error}") from None
    if latent and LayerKind.window in ids:
        fix = "latents of a window are not stored: state the layer groups by Model(...)"
        raise ModelError("kv_lora_rank", latent, fix)
    window = _window(config)
    return tuple(
        LayerGroup(kind, dtype, tuple(some), heads, dim, window * (kind is LayerKind.window))
        for kind, some in sorted(ids.items())
    )


def _layers_by_kind(config: Any) -> dict[LayerKind, list[int]]:
    """Return the layer numbers by kind. Raises ModelError."""
    try:
        layers = int(config.num_hidden_layers)
    except (AttributeError, TypeError) as error:
        raise ModelError("config", type(config).__name__, f"states no layers: {error}") from None
    types: Sequence[str] = (
        getattr(config, "layer_types", None)
        or getattr(config, "layers_block_type", None)
        or ["sliding_attention" if _window(config) else "full_attention"] * layers
    )
    states = [layer for layer, kind in enumerate(types) if kind in _STATES]
    if states:
        fix = (
            f"configs do not state the size of the states of layers {states}: state it by "
            "Model(...), or use representation_of(model, tokenizer) of the transformers connector"
        )
        raise ModelError("layer_types", types[states[0]], fix)
    unknown = sorted(set(types) - _KINDS.keys() - set(_NOTHING))
    if unknown or len(types) != layers:
        fix = "state the layer groups of this model by Model(...)"
        raise ModelError("layer_types", unknown or len(types), fix)
    ids: dict[LayerKind, list[int]] = {}
    for layer, kind in enumerate(types):
        if kind in _KINDS:
            ids.setdefault(_KINDS[kind], []).append(layer)
    return ids


def _window(config: Any) -> int:
    """Return the length of the attention window in tokens; 0 for none."""
    if getattr(config, "use_sliding_window", True) is False:
        return 0
    return int(getattr(config, "sliding_window", None) or 0)
