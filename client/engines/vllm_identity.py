"""The identity of a vLLM engine's KV: what makes it interchangeable, and what is refused by name.

Works on vLLM's VllmConfig and KVCacheConfig by their fields, without importing vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.client.engines.identity import (
    TOKENIZERS,
    Departures,
    Weights,
    computed_in,
    files_digest,
    identity_of,
    in_words,
    is_exact,
    short_name,
    stated,
    weights_of,
)
from kvstore.client.engines.vllm_shape import EngineShape
from kvstore.proto.errors import ModelError
from kvstore.proto.hf_config import OWN_TOKENIZER, rope_parameters
from kvstore.proto.types import Model

_TERMS = {
    "model_config": (
        *("quantization", "quantization_config", "code_revision", "model_impl"),
        *("model_class_overrides", "disable_sliding_window"),
    ),
    "load_config": ("load_format",),
    "lora_config": ("lora_dtype", "enable_tower_connector_lora"),
    "multimodal_config": (
        *("language_model_only", "mm_processor_kwargs", "mm_device_do_normalize"),
        *("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
        *("video_pruning_rate", "video_pruning_method"),
    ),
}
"""Settings of VllmConfig that KV depends on; a hash of an image does not say how it is prepared."""


def representation_of(config: Any, shape: EngineShape, model_revision: str = "") -> Model:
    """Return what makes the KV of the model interchangeable with other KV: the same for all ranks.

    Without a *model_revision* that is a commit or a digest it is the commit the model was
    downloaded at, or a digest of the weights in its folder, which reads all of them once. Raises
    ModelError for what has no name.
    """
    model = config.model_config
    groups = tuple(group.layer_group for group in shape.groups)
    departures = Departures(
        "vllm",
        _settings(config) | computed_in(model.dtype, groups),
        quantization=shape.quantization,
        tokenizer=_tokenizer(model),
    )
    rope = rope_parameters(model.hf_text_config)
    weights = _weights(config, model_revision)
    return identity_of(weights, groups, rope, model.hf_config, departures)


def _weights(config: Any, revision: str = "") -> Weights:
    """Return which weights the engine runs; *revision*: by the user."""
    model = config.model_config
    if config.load_config.load_format == "dummy":
        # What is in the folder is not what runs: somebody else brings the weights.
        if not is_exact(revision):
            fix = "give model_revision in kv_connector_extra_config: a commit or a digest"
            raise ModelError("load_format", "dummy", fix)
        return Weights(short_name(model.model), revision)
    commit = getattr(model.hf_config, "_commit_hash", None)
    return weights_of(model.model, revision, str(commit or ""))


def _settings(config: Any) -> dict[str, str]:
    """Return the settings that KV depends on, beside weights and shapes, and that somebody gave."""
    model = config.model_config
    parts = {
        "model_config": model,
        "load_config": config.load_config,
        "lora_config": getattr(config, "lora_config", None),
        "multimodal_config": getattr(model, "multimodal_config", None),
    }
    found = {
        part: {f"{part}.{name}": getattr(parts[part], name, None) for name in names}
        for part, names in _TERMS.items()
        if parts[part] is not None
    }
    plain = stated(found.pop("model_config") | found.pop("load_config"))
    # Of the others a setting that is off may be another than that of an engine without them.
    return plain | {
        name: in_words(value) for each in found.values() for name, value in each.items()
    }


def _tokenizer(model: Any) -> str:
    revision = getattr(model, "tokenizer_revision", None)
    is_weights = revision in (None, getattr(model, "revision", None))
    if str(model.tokenizer) == str(model.model) and is_weights:
        return OWN_TOKENIZER
    folder = Path(str(model.tokenizer))
    files = [folder / name for name in TOKENIZERS if (folder / name).is_file()]
    if files:
        return f"files:{files_digest(files).hex()}"
    return f"{model.tokenizer}@{revision or 'unstated'}"
