"""The identity of a vLLM engine's KV: what makes it interchangeable, and what is refused by name.

Works on vLLM's VllmConfig and KVCacheConfig by their fields, without importing vLLM.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvstore.client.engines.transformers_identity import rope_parameters
from kvstore.client.engines.vllm_names import files_digest
from kvstore.proto.errors import RepresentationError
from kvstore.proto.types import DType, LayerGroup, LayerKind, Representation, RopeParameters

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tekken.json")
_VOLATILE_SETTINGS = ("_name_or_path", "architectures", "transformers_version", "use_cache")
_PLAIN_CACHE = ("auto", "float16", "bfloat16", "float32")
_UNSHARDED = (
    "pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The attention KV of one engine: ``kv_heads`` are those of one tensor-parallel rank."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: DType
    ranks: int


def shape_of(config: Any, cache: Any) -> EngineShape:
    """Return the shape of what the engine of *config* keeps in *cache*.

    *config*: vLLM's VllmConfig, *cache* its KVCacheConfig. Raises RepresentationError naming
    what cannot be stored.
    """
    model, parallel = config.model_config, config.parallel_config
    if model.is_encoder_decoder:
        raise RepresentationError("is_encoder_decoder", True, "cross-attention is not stored")
    if config.cache_config.cache_dtype not in _PLAIN_CACHE:
        raise RepresentationError(
            "kv_cache_dtype", config.cache_config.cache_dtype, "quantised caches are not stored"
        )
    for name in _UNSHARDED:
        if getattr(parallel, name, 1) != 1:
            raise RepresentationError(name, getattr(parallel, name), "only 1 is stored")
    spec = _only_spec(cache)
    names = [name for group in cache.kv_cache_groups for name in group.layer_names]
    layers = model.get_total_num_hidden_layers()
    if len(names) != layers:
        raise RepresentationError(
            "layers", len(names), f"the model has {layers}; draft and shared layers are not stored"
        )
    return EngineShape(
        layers, spec.num_kv_heads, spec.head_size, spec.block_size,
        DType.parse(str(spec.dtype)), parallel.tensor_parallel_size,
    )  # fmt: skip


def _only_spec(cache: Any) -> Any:
    """Return what the one group of layers keeps. Raises RepresentationError for anything else."""
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        raise RepresentationError(
            "kv_cache_groups", len(groups),
            "only one is stored: --disable-hybrid-kv-cache-manager where the model allows it",
        )  # fmt: skip
    spec = groups[0].kv_cache_spec
    if type(spec).__name__ != "FullAttentionSpec":
        raise RepresentationError(
            "kv_cache_spec", type(spec).__name__, "only full attention is stored"
        )
    if getattr(spec, "non_causal", False):
        raise RepresentationError("non_causal", True, "its KV depends on what comes later")
    packed = (
        getattr(spec, "num_head_slots", None) is not None
        or getattr(spec, "tokens_per_state", 1) != 1
        or getattr(spec, "head_size_v", None) not in (None, spec.head_size)
    )
    if packed:
        raise RepresentationError("kv_cache_spec", "packed", "only plain K and V are stored")
    return spec


def representation_of(
    config: Any, shape: EngineShape, rank: int, model_revision: str = ""
) -> Representation:
    """Return what makes the KV of tensor-parallel *rank* interchangeable with other KV.

    Without *model_revision* it is the commit the model was downloaded at, or a digest of the
    weights in its folder, which reads all of them once. A rank of several holds some heads
    only, so it has an identity of its own. Raises RepresentationError for what has no name.
    """
    model = config.model_config
    revision = model_revision or weights_revision(config)
    if shape.ranks > 1:
        revision += f"+tp={rank}/{shape.ranks}"
    group = LayerGroup(
        LayerKind.attention, shape.dtype, tuple(range(shape.layers)), shape.kv_heads, shape.head_dim
    )
    return Representation(
        model_id=_model_id(model.model),
        model_revision=f"{revision}+settings={_settings_digest(config)}",
        adapter_digest="none",
        quantization="none",
        layer_groups=(group,),
        rope=_rope(model.hf_text_config),
        tokenizer_digest=_tokenizer_digest(model),
    )


def _model_id(name: str) -> str:
    # Two machines keep one model under different paths.
    return Path(name).resolve().name if Path(name).is_dir() else name


def weights_revision(config: Any) -> str:
    """Return a name of the model's weights that changes when they do."""
    model = config.model_config
    fix = "give model_revision in kv_connector_extra_config"
    if config.load_config.load_format == "dummy":
        raise RepresentationError("load_format", "dummy", fix)
    folder = Path(model.model)
    if not folder.is_dir():
        commit = getattr(model.hf_config, "_commit_hash", None)
        if not commit:
            raise RepresentationError("model", model.model, fix)
        return str(commit)
    files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
    if not files:
        raise RepresentationError("model", model.model, fix)
    marks = tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return f"weights={_weights_digest(marks).hex()}"


@lru_cache(maxsize=8)
def _weights_digest(marks: tuple[tuple[Path, int, int], ...]) -> bytes:
    return files_digest([file for file, *_ in marks])


def _settings_digest(config: Any) -> str:
    """Return a digest of the settings that KV depends on, beside weights and shapes."""
    model = config.model_config
    settings = {k: v for k, v in model.hf_config.to_dict().items() if k not in _VOLATILE_SETTINGS}
    stated = {
        "config": settings,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization or "none"),
    }
    return blake3(json.dumps(stated, sort_keys=True, default=str).encode()).hexdigest()


def _rope(config: Any) -> RopeParameters:
    stated = getattr(config, "rope_parameters", None)
    if not stated:
        return RopeParameters(0.0, 0, "none")
    if any(isinstance(value, dict) for value in stated.values()):
        raise RepresentationError("rope_parameters", stated, "one rotation for all layers")
    return rope_parameters(config)


def _tokenizer_digest(model: Any) -> str:
    folder = Path(str(model.tokenizer))
    files = [folder / name for name in _TOKENIZERS if (folder / name).is_file()]
    if files:
        return f"files:{files_digest(files).hex()}"
    revision = getattr(model, "tokenizer_revision", None) or "unstated"
    return f"{model.tokenizer}@{revision}"
