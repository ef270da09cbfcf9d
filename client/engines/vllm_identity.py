"""The identity of a vLLM engine's KV: what makes it interchangeable, and what is refused by name.

Works on vLLM's VllmConfig and KVCacheConfig by their fields, without importing vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvstore.client.engines.rope_settings import rope_parameters
from kvstore.client.engines.vllm_shape import EngineShape
from kvstore.client.engines.weights import files_digest, is_exact, weights_name
from kvstore.proto.errors import RepresentationError
from kvstore.proto.types import Representation

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tekken.json")
_VOLATILE_SETTINGS = ("_name_or_path", "transformers_version", "use_cache")
_TERMS = {
    "model_config": (
        *("dtype", "quantization", "quantization_config", "code_revision", "model_impl"),
        *("model_class_overrides", "disable_sliding_window"),
    ),
    "lora_config": ("lora_dtype", "enable_tower_connector_lora"),
    "multimodal_config": (
        *("language_model_only", "mm_processor_kwargs", "mm_device_do_normalize"),
        *("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
        *("video_pruning_rate", "video_pruning_method"),
    ),
}
"""Settings of VllmConfig that KV depends on; a hash of an image does not say how it is prepared."""


def representation_of(config: Any, shape: EngineShape, model_revision: str = "") -> Representation:
    """Return what makes the KV of the model interchangeable with other KV: the same for all ranks.

    Without a *model_revision* that is a commit or a digest it is the commit the model was
    downloaded at, or a digest of the weights in its folder, which reads all of them once. Raises
    RepresentationError for what has no name.
    """
    model = config.model_config
    revision = weights_revision(config, model_revision)
    return Representation(
        model_id=_model_id(model.model),
        model_revision=f"{revision}+settings={_settings_digest(config)}",
        adapter_digest="none",
        quantization=shape.quantization,
        layer_groups=tuple(group.layer_group for group in shape.groups),
        rope=rope_parameters(model.hf_text_config),
        tokenizer_digest=_tokenizer_digest(model),
    )


def _model_id(name: str) -> str:
    # Two machines keep one model under different paths.
    return Path(name).resolve().name if Path(name).is_dir() else name


def weights_revision(config: Any, stated: str = "") -> str:
    """Return a name of the model's weights that changes when they do; *stated*: by the user."""
    model = config.model_config
    if config.load_config.load_format == "dummy":
        # What is in the folder is not what runs: somebody else brings the weights.
        if not is_exact(stated):
            fix = "give model_revision in kv_connector_extra_config: a commit or a digest"
            raise RepresentationError("load_format", "dummy", fix)
        return stated
    commit = getattr(model.hf_config, "_commit_hash", None)
    return weights_name(model.model, stated, str(commit or ""))


def _settings_digest(config: Any) -> str:
    """Return a digest of the settings that KV depends on, beside weights and shapes."""
    model = config.model_config
    settings = {k: v for k, v in model.hf_config.to_dict().items() if k not in _VOLATILE_SETTINGS}
    parts = {
        "model_config": model,
        "lora_config": getattr(config, "lora_config", None),
        "multimodal_config": getattr(model, "multimodal_config", None),
    }
    stated = {
        f"{part}.{name}": _stated(getattr(parts[part], name, None))
        for part, names in _TERMS.items()
        for name in names
    }
    words = json.dumps([settings, stated], sort_keys=True, default=str)
    return blake3(words.encode()).hexdigest()


def _stated(value: Any) -> str:
    """Return *value* in words; of a file, which may change under its path, what it holds."""
    if isinstance(value, str) and value and Path(value).is_file():
        return f"file:{files_digest([Path(value)]).hex()}"
    return str(value)


def _tokenizer_digest(model: Any) -> str:
    folder = Path(str(model.tokenizer))
    files = [folder / name for name in _TOKENIZERS if (folder / name).is_file()]
    if files:
        return f"files:{files_digest(files).hex()}"
    revision = getattr(model, "tokenizer_revision", None) or "unstated"
    return f"{model.tokenizer}@{revision}"
