"""The identity under which a vLLM engine's KV is interchangeable, and its refusals.

Reads vLLM's VllmConfig and KVCacheConfig by their fields, without importing vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvstore.client.engines import identity
from kvstore.proto.errors import ModelError
from kvstore.proto.hf_config import OWN_TOKENIZER, rope_parameters
from kvstore.proto.types import END_KINDS, DType, LayerGroup, LayerKind, Model

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
"""Settings of VllmConfig that KV depends on; an image's hash does not cover its preprocessing."""


def model_of(config: Any, shape: KVCacheShape, model_revision: str = "") -> Model:
    """Return the identity under which the model's KV is interchangeable: the same for all ranks.

    Unless *model_revision* is a commit or a digest, the revision is the downloaded commit or a
    digest of the folder's weights, which reads all of them once. Raises ModelError for weights
    without a name.
    """
    model = config.model_config
    groups = tuple(group.layer_group for group in shape.groups)
    departures = identity.Departures(
        "vllm",
        _settings(config) | identity.computed_in(model.dtype, groups),
        quantization=shape.quantization,
        tokenizer=_tokenizer(model),
    )
    rope = rope_parameters(model.hf_text_config)
    if config.load_config.load_format != "dummy":
        commit = getattr(model.hf_config, "_commit_hash", None)
        weights = identity.weights_of(model.model, model_revision, str(commit or ""))
    elif identity.is_exact(model_revision):
        # The folder's weights do not run: they are supplied otherwise.
        weights = identity.Weights(identity.short_name(model.model), model_revision)
    else:
        fix = "give model_revision in kv_connector_extra_config: a commit or a digest"
        raise ModelError("load_format", "dummy", fix)
    return identity.identity_of(weights, groups, rope, model.hf_config, departures)


def _settings(config: Any) -> dict[str, str]:
    """Return the given settings that KV depends on, beside weights and shapes."""
    model = config.model_config
    parts = {
        "model_config": model,
        "load_config": config.load_config,
        "lora_config": getattr(config, "lora_config", None),
        "multimodal_config": getattr(model, "multimodal_config", None),
    }
    found: dict[str, str] = {}
    for part, names in _TERMS.items():
        if parts[part] is None:
            continue
        given = {f"{part}.{name}": getattr(parts[part], name, None) for name in names}
        if part in ("model_config", "load_config"):
            found |= identity.stated(given)
        else:  # a setting that is off may differ from an engine without such a part
            found |= {name: identity.in_words(value) for name, value in given.items()}
    return found


def hashes_inputs(config: Any) -> bool:
    """Return whether vLLM names images and other inputs by their content. With both of its caches
    off it numbers them from 0 on, in every process."""
    inputs = getattr(config.model_config, "multimodal_config", None)
    is_caching = bool(config.cache_config.enable_prefix_caching)
    return is_caching or inputs is None or inputs.mm_processor_cache_gb > 0


def _tokenizer(model: Any) -> str:
    revision = getattr(model, "tokenizer_revision", None)
    is_weights = revision in (None, getattr(model, "revision", None))
    if str(model.tokenizer) == str(model.model) and is_weights:
        return OWN_TOKENIZER
    folder = Path(str(model.tokenizer))
    files = [folder / name for name in identity.TOKENIZERS if (folder / name).is_file()]
    if files:
        return f"files:{identity.files_digest(files).hex()}"
    return f"{model.tokenizer}@{revision or 'unstated'}"


_PLAIN_CACHE = ("auto", "float16", "bfloat16", "float32")
_FP8_CACHE = {
    "fp8": DType.float8_e4m3fn,
    "fp8_e4m3": DType.float8_e4m3fn,
    "fp8_e5m2": DType.float8_e5m2,
}
"""Scaled per tensor, by scales in the weights, so that the weights' name covers both."""
_UNSHARDED = ("decode_context_parallel_size", "prefill_context_parallel_size")
_SCALED_BY_TENSOR = ("NONE", "FP8_PER_TENSOR")
_KINDS = {
    "FullAttentionSpec": LayerKind.attention,
    "SlidingWindowSpec": LayerKind.window,
    "MLAAttentionSpec": LayerKind.mla,
}


@dataclass(frozen=True, slots=True)
class LayerRef:
    """A layer that keeps KV: vLLM's name, its number in the model, the index of its block table in
    a request's."""

    name: str
    number: int
    table: int


@dataclass(frozen=True)
class LayerGroupShape:
    """Layers that keep KV of one kind and shape; ``kv_heads`` are those of one rank.

    ``window_tokens`` is the window rounded up to whole blocks, plus one: vLLM's own cache would
    take a partly loaded block for a whole one.
    """

    kind: LayerKind
    dtype: DType
    kv_heads: int
    head_dim: int
    window_tokens: int
    layers: tuple[LayerRef, ...]
    model_kv_heads: int = 0
    """Heads of all ranks; 0: as ``kv_heads``."""
    model_layers: int = 0
    """Layers of all pipeline stages, all alike; 0: one stage."""

    @cached_property
    def tables(self) -> tuple[int, ...]:
        """The block tables of its layers."""
        return tuple({layer.table: None for layer in self.layers})

    @property
    def layer_group(self) -> LayerGroup:
        """The group of the whole model, as in its Model."""
        numbers = tuple(range(self.model_layers)) or tuple(layer.number for layer in self.layers)
        heads = self.model_kv_heads or self.kv_heads
        return LayerGroup(self.kind, self.dtype, numbers, heads, self.head_dim, self.window_tokens)


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """What one of a stage's ``ranks`` keeps, in groups in the Model's order."""

    groups: tuple[LayerGroupShape, ...]
    block_tokens: int
    ranks: int = 1
    stages: int = 1
    quantization: str = "none"
    """Of the KV, as in the Model."""
    continues: bool = True
    """Whether a prefill can continue from a prefix; else only all but the last token is a hit."""

    @property
    def own_layers(self) -> tuple[int, int] | None:
        """The range of the model's layers in this stage; None: all."""
        numbers = [layer.number for group in self.groups for layer in group.layers]
        return None if self.stages == 1 else (min(numbers), max(numbers) + 1)

    @property
    def tables(self) -> int:
        """The number of a request's block tables: vLLM's KV cache groups."""
        return 1 + max((table for group in self.groups for table in group.tables), default=0)

    @property
    def has_ends(self) -> bool:
        """Whether some layers keep only a prefix's end, so that a partial prefix is useless."""
        return any(group.kind in END_KINDS for group in self.groups)

    @property
    def all_or_nothing(self) -> bool:
        """Whether vLLM has to recompute a whole prompt after a partial load."""
        return self.has_ends or self.tables > 1

    @property
    def has_ends_only(self) -> bool:
        """Whether all layers keep only a prefix's end."""
        return all(group.kind in END_KINDS for group in self.groups)

    def kept_blocks(self, group: LayerGroupShape, chunk_blocks: int) -> int:
        """Return how many of a chunk's *chunk_blocks* blocks *group* keeps: the last ones."""
        if group.kind is not LayerKind.window:
            return chunk_blocks
        return min(chunk_blocks, (group.window_tokens - 1) // self.block_tokens)


def _check_model(model: Any) -> None:
    if model.is_encoder_decoder:
        raise ModelError("is_encoder_decoder", True, "cross-attention is not stored")
    pooler = model.pooler_config
    if pooler is not None and not model.is_prefix_caching_supported:
        fix = "it pools what all tokens of a prompt give: vLLM has to compute them"
        raise ModelError("pooler_config", pooler.seq_pooling_type, fix)


def shape_of(config: Any, cache: Any) -> KVCacheShape:
    """Return the shape of the KV of an engine with VllmConfig *config* and KVCacheConfig *cache*.
    Raises ModelError for KV that cannot be stored."""
    model, parallel = config.model_config, config.parallel_config
    _check_model(model)
    cache_dtype = config.cache_config.cache_dtype
    if cache_dtype not in _PLAIN_CACHE and cache_dtype not in _FP8_CACHE:
        fix = f"use one of {', '.join((*_PLAIN_CACHE, *_FP8_CACHE))}"
        raise ModelError("kv_cache_dtype", cache_dtype, fix)
    for name in _UNSHARDED:
        if getattr(parallel, name, 1) != 1:
            raise ModelError(name, getattr(parallel, name), "only 1 is supported")
    names = [name for group in cache.kv_cache_groups for name in group.layer_names]
    layers = model.get_total_num_hidden_layers()
    stages = parallel.pipeline_parallel_size
    if len(names) != layers and stages == 1:
        raise ModelError(
            "layers", len(names), f"the model has {layers}; draft and shared layers are not stored"
        )
    fp8 = _FP8_CACHE.get(cache_dtype)
    groups = _groups(cache, fp8)
    sizes = sorted({group.kv_cache_spec.block_size for group in cache.kv_cache_groups})
    if len(sizes) != 1:
        raise ModelError("block_size", sizes, "all layers need the same block size")
    if stages > 1:
        groups = (_of_all_stages(groups, layers, stages),)
    elif groups[0].layers[0].number:
        raise ModelError("layers", names[:4], "number the layers from 0")
    ranks = parallel.tensor_parallel_size
    if ranks > 1:
        total = int(model.get_total_num_kv_heads())
        groups = tuple(_of_all_ranks(group, total, ranks) for group in groups)
    # vLLM's latent attention on CPUs cannot prefill from a prefix, and clears this setting.
    is_latent = any(group.kind is LayerKind.mla for group in groups)
    continues = not is_latent or bool(config.scheduler_config.enable_chunked_prefill)
    quantization = "none" if fp8 is None else fp8.name
    return KVCacheShape(groups, int(sizes[0]), ranks, stages, quantization, continues)


def _of_all_stages(groups: Sequence[LayerGroupShape], layers: int, stages: int) -> LayerGroupShape:
    """Return a stage's only group, extended to the model's *layers*: all must be alike, because a
    stage does not know what the others keep."""
    group = groups[0]
    is_alike = len(groups) == 1 and group.kind not in END_KINDS
    if not is_alike or group.layers[-1].number >= layers:
        fix = "stages need a model whose layers are all alike, without draft layers"
        raise ModelError("pipeline_parallel_size", stages, fix)
    return replace(group, model_layers=layers)


def _of_all_ranks(group: LayerGroupShape, total: int, ranks: int) -> LayerGroupShape:
    """Return *group* with the model's KV heads, which ranks share equally or replicate."""
    if group.kind is LayerKind.mla:
        return group  # every rank has the latents
    is_even = not (total % ranks and ranks % total)
    if not is_even or group.kv_heads != max(1, total // ranks):
        fix = f"each of {ranks} ranks needs {max(1, total // ranks)} of the model's {total}"
        raise ModelError("num_kv_heads", group.kv_heads, fix)
    return replace(group, model_kv_heads=total)


def _groups(cache: Any, fp8: DType | None) -> tuple[LayerGroupShape, ...]:
    """Return the layers by kind and shape, ordered by first layer; byte pages have dtype *fp8*."""
    layers: list[tuple[LayerRef, LayerGroupShape]] = []
    for table, group in enumerate(cache.kv_cache_groups):
        spec = group.kv_cache_spec
        kind, dtype, window = _kind(spec), DType.parse(str(spec.dtype)), 0
        if fp8 is not None and dtype.item_bytes == 1:
            dtype = fp8
        if kind is LayerKind.window:
            # The window of a prefix's last token, including itself: vLLM recomputes that token of
            # a prompt that is stored to its end.
            size = int(spec.block_size)
            window = -(-int(spec.sliding_window) // size) * size + 1
        alike = LayerGroupShape(kind, dtype, spec.num_kv_heads, spec.head_size, window, ())
        for name in group.layer_names:
            numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
            if len(numbers) != 1:
                raise ModelError("layers", group.layer_names[:4], "a name needs exactly one number")
            layers.append((LayerRef(name, int(numbers[0]), table), alike))
    layers.sort(key=lambda one: one[0].number)
    first = layers[0][0].number
    if [layer.number for layer, _ in layers] != list(range(first, first + len(layers))):
        names = [layer.name for layer, _ in layers][:4]
        raise ModelError("layers", names, "number the layers without gaps")
    found: dict[LayerGroupShape, list[LayerRef]] = {}
    for layer, alike in layers:
        found.setdefault(alike, []).append(layer)
    return tuple(replace(alike, layers=tuple(refs)) for alike, refs in found.items())


def _kind(spec: Any) -> LayerKind:
    name = type(spec).__name__
    if name not in _KINDS:
        fix = f"use one of {', '.join(_KINDS)}"
        raise ModelError("kv_cache_spec", name, fix)
    if getattr(spec, "non_causal", False):
        raise ModelError("non_causal", True, "its KV depends on later tokens")
    kind = _KINDS[name]
    value_dims = (None, 0) if kind is LayerKind.mla else (None, spec.head_size)
    packed = (
        getattr(spec, "num_head_slots", None) is not None
        or getattr(spec, "tokens_per_state", 1) != 1
        or getattr(spec, "head_size_v", None) not in value_dims
        or getattr(spec, "model_version", None) is not None
        or getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE") not in _SCALED_BY_TENSOR
        or getattr(spec, "cache_dtype_str", None) not in (None, *_PLAIN_CACHE)
    )
    if packed:
        raise ModelError("kv_cache_spec", "packed", "only plain K and V are stored")
    return kind
