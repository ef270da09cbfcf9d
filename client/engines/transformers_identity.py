"""The identity of a transformers model's KV: what makes it interchangeable, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from blake3 import blake3
from transformers import (
    Cache,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer

from kvstore.proto.errors import RepresentationError
from kvstore.proto.types import DType, LayerGroup, LayerKind, Representation, RopeParameters

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose caches the connector is tested with."""

# Their rotation depends on the length of the whole prompt, so a prefix has no keys of its own.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_VOLATILE_SETTINGS = (
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip


def representation_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    model_revision: str | None = None,
    adapter_digest: str = "none",
) -> Representation:
    """Return what makes KV of *model* interchangeable with other KV.

    Without *model_revision* it is the commit the model was downloaded at, or else a digest of
    its weights and settings, which reads all of them once. A model that carries an adapter
    needs *adapter_digest*, a digest of the active adapter's weights.
    Raises RepresentationError for models whose KV cannot be stored.
    """
    has_adapter = _has_adapter(model)
    if has_adapter and adapter_digest == "none":
        raise RepresentationError(
            "adapter_digest", adapter_digest, "this model carries an adapter: give its digest"
        )
    config = model.config
    group, rope = layer_group(model), rope_parameters(config)
    quantized = getattr(config, "quantization_config", None)
    revision = model_revision or getattr(config, "_commit_hash", None) or weights_digest(model)
    if quantized is not None and not model_revision:
        # The same commit computes other KV once its weights are quantised at load time.
        revision += f"+weights={_settings_digest(config)}"
    return Representation(
        model_id=_model_id(config),
        model_revision=revision,
        adapter_digest=adapter_digest,
        quantization="none",
        layer_groups=(group,),
        rope=rope,
        tokenizer_digest=tokenizer_digest(tokenizer),
    )


def _has_adapter(model: PreTrainedModel) -> bool:
    return bool(
        getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False)
    )


def _model_id(config: PreTrainedConfig) -> str:
    name: str = config.name_or_path or config.model_type
    # Two machines keep one model under different paths.
    return Path(name).resolve().name if Path(name).is_dir() else name


def layer_group(model: PreTrainedModel) -> LayerGroup:
    """Return what the layers of *model* keep. Raises RepresentationError naming what it refuses."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise RepresentationError("model_type", config.model_type, "encoder-decoder caches differ")
    if getattr(config, "kv_lora_rank", None):
        raise RepresentationError("kv_lora_rank", config.kv_lora_rank, "MLA layers are not stored")
    full_layers(DynamicCache(config=config))
    if config.model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise RepresentationError("model_type", config.model_type, f"this connector knows {known}")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise RepresentationError("device", sorted(devices), "load the model onto one device")
    return LayerGroup(
        LayerKind.attention,
        DType.parse(str(model.dtype)),
        tuple(range(config.num_hidden_layers)),
        config.num_key_value_heads,
        _head_dim(config),
    )


def _head_dim(config: PreTrainedConfig) -> int:
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


def full_layers(cache: Cache) -> list[DynamicLayer]:
    """Return the layers of a DynamicCache of full attention. Raises RepresentationError."""
    if type(cache) is not DynamicCache:
        raise RepresentationError("cache", type(cache).__name__, "use a DynamicCache")
    layers: list[DynamicLayer] = []
    for index, layer in enumerate(cache.layers):
        # Subclasses keep less than every token, or keep it otherwise.
        if type(layer) is not DynamicLayer:
            raise RepresentationError(
                f"layers[{index}]", type(layer).__name__, "only full-attention layers are stored"
            )
        layers.append(layer)
    return layers


def rope_parameters(config: PreTrainedConfig) -> RopeParameters:
    """Return the rotation that *config* states. Raises RepresentationError for what it refuses."""
    stated = dict(config.rope_parameters)
    scaling = str(stated.pop("rope_type"))
    theta = float(stated.pop("rope_theta"))
    if scaling in _LENGTH_DEPENDENT_ROPE:
        raise RepresentationError(
            "rope_type", scaling, "its keys depend on the length of the whole prompt"
        )
    factors = {name: value for name, value in stated.items() if value is not None}
    factors.pop("type", None)
    for name, value in factors.items():
        if not isinstance(value, int | float):
            raise RepresentationError(f"rope.{name}", value, "only numbers are understood")
    rotary_dim = int(_head_dim(config) * factors.pop("partial_rotary_factor", 1.0))
    numbers = sorted((name, float(value)) for name, value in factors.items())
    return RopeParameters(theta, rotary_dim, scaling, tuple(numbers))


def weights_digest(model: PreTrainedModel) -> str:
    """Return a digest of the model's weights, as loaded, and of the settings they run with."""
    digest = blake3(_settings_digest(model.config).encode(), max_threads=blake3.AUTO)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy())
    return f"blake3:{digest.hexdigest()}"


def _settings_digest(config: PreTrainedConfig) -> str:
    settings = {k: v for k, v in config.to_dict().items() if k not in _VOLATILE_SETTINGS}
    return blake3(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of what each token id stands for."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return f"blake3:{blake3(json.dumps(vocabulary).encode()).hexdigest()}"
