"""The identity of a vLLM engine's KV: what makes it interchangeable, and what is refused by name.

Works on vLLM's VllmConfig and KVCacheConfig by their fields, without importing vLLM.
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
"""Settings of VllmConfig that KV depends on; a hash of an image does not say how it is prepared."""


def model_of(config: Any, shape: KVCacheShape, model_revision: str = "") -> Model:
    """Return what makes the KV of the model interchangeable with other KV: the same for all ranks.

    Without a *model_revision* that is a commit or a digest it is the commit the model was
    downloaded at, or a digest of the weights in its folder, which reads all of them once. Raises
    ModelError for what has no name.
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
        # What is in the folder is not what runs: somebody else brings the weights.
        weights = identity.Weights(identity.short_name(model.model), model_revision)
    else:
        fix = "give model_revision in kv_connector_extra_config: a commit or a digest"
        raise ModelError("load_format", "dummy", fix)
    return identity.identity_of(weights, groups, rope, model.hf_config, departures)


def _settings(config: Any) -> dict[str, str]:
    """Return the settings that KV depends on, beside weights and shapes, and that somebody gave."""
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
        else:  # a setting that is off may be another than that of an engine without such a part
            found |= {name: identity.in_words(value) for name, value in given.items()}
    return found


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
"""Scaled by tensor, with scales that come with the weights, so that what names these names both."""
_UNSHARDED = ("decode_context_parallel_size", "prefill_context_parallel_size")
_SCALED_BY_TENSOR = ("NONE", "FP8_PER_TENSOR")
_KINDS = {
    "FullAttentionSpec": LayerKind.attention,
    "SlidingWindowSpec": LayerKind.window,
    "MLAAttentionSpec": LayerKind.mla,
}


@dataclass(frozen=True, slots=True)
class LayerRef:
    """A layer that keeps KV: vLLM's name of it, its number in the model, and which of a
    request's block tables is its."""

    name: str
    number: int
    table: int


@dataclass(frozen=True)
class LayerGroupShape:
    """Layers that keep KV of one kind and shape; ``kv_heads`` are those of one rank.

    ``window_tokens`` are those of whole blocks, and one: a block that is only partly loaded
    would be taken for a whole one by vLLM's own cache.
    """

    kind: LayerKind
    dtype: DType
    kv_heads: int
    head_dim: int
    window_tokens: int
    layers: tuple[LayerRef, ...]
    model_kv_heads: int = 0
    """Those of all ranks; 0: the same."""
    model_layers: int = 0
    """Layers of all pipeline stages, which are all alike; 0: there is one stage."""

    @cached_property
    def tables(self) -> tuple[int, ...]:
        """The block tables of its layers."""
        return tuple({layer.table: None for layer in self.layers})

    @property
    def layer_group(self) -> LayerGroup:
        """The same of the whole model, as part of a Model."""
        numbers = tuple(range(self.model_layers)) or tuple(layer.number for layer in self.layers)
        heads = self.model_kv_heads or self.kv_heads
        return LayerGroup(self.kind, self.dtype, numbers, heads, self.head_dim, self.window_tokens)


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """What one of the ``ranks`` of a stage keeps, in groups in the order of the Model's."""

    groups: tuple[LayerGroupShape, ...]
    block_tokens: int
    ranks: int = 1
    stages: int = 1
    quantization: str = "none"
    """Of the KV, as in the Model."""
    continues: bool = True
    """Whether a prefill can go on from a prefix; else all but a prompt's last token has to be."""

    @property
    def own_layers(self) -> tuple[int, int] | None:
        """The span of the model's layers that this stage has; None: all."""
        numbers = [layer.number for group in self.groups for layer in group.layers]
        return None if self.stages == 1 else (min(numbers), max(numbers) + 1)

    @property
    def tables(self) -> int:
        """How many block tables a request has: vLLM's KV cache groups."""
        return 1 + max((table for group in self.groups for table in group.tables), default=0)

    @property
    def has_ends(self) -> bool:
        """Whether layers keep something of a prefix's end only, so that half of one is none."""
        return any(group.kind in END_KINDS for group in self.groups)

    @property
    def all_or_nothing(self) -> bool:
        """Whether vLLM has to compute all of a prompt of which a part could not be loaded."""
        return self.has_ends or self.tables > 1

    @property
    def has_ends_only(self) -> bool:
        """Whether all layers do."""
        return all(group.kind in END_KINDS for group in self.groups)

    def kept_blocks(self, group: LayerGroupShape, chunk_blocks: int) -> int:
        """Return how many of a chunk's *chunk_blocks* blocks, the last ones, *group* keeps."""
        if group.kind is not LayerKind.window:
            return chunk_blocks
        return min(chunk_blocks, (group.window_tokens - 1) // self.block_tokens)


def shape_of(config: Any, cache: Any) -> KVCacheShape:
    """Return the shape of what the engine of vLLM's VllmConfig *config* keeps in its KVCacheConfig
    *cache*. Raises ModelError naming what cannot be stored."""
    model, parallel = config.model_config, config.parallel_config
    if model.is_encoder_decoder:
        raise ModelError("is_encoder_decoder", True, "cross-attention is not stored")
    cache_dtype = config.cache_config.cache_dtype
    if cache_dtype not in _PLAIN_CACHE and cache_dtype not in _FP8_CACHE:
        fix = f"{', '.join((*_PLAIN_CACHE, *_FP8_CACHE))} are stored"
        raise ModelError("kv_cache_dtype", cache_dtype, fix)
    for name in _UNSHARDED:
        if getattr(parallel, name, 1) != 1:
            raise ModelError(name, getattr(parallel, name), "only 1 is stored")
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
        raise ModelError("block_size", sizes, "blocks of all layers need as many tokens")
    if stages > 1:
        groups = (_of_all_stages(groups, layers, stages),)
    elif groups[0].layers[0].number:
        raise ModelError("layers", names[:4], "one number a layer, from 0 on")
    ranks = parallel.tensor_parallel_size
    if ranks > 1:
        total = int(model.get_total_num_kv_heads())
        groups = tuple(_of_all_ranks(group, total, ranks) for group in groups)
    # vLLM's latent attention on CPUs prefills from nothing only, and says so by this setting.
    is_latent = any(group.kind is LayerKind.mla for group in groups)
    continues = not is_latent or bool(config.scheduler_config.enable_chunked_prefill)
    quantization = "none" if fp8 is None else fp8.name
    return KVCacheShape(groups, int(sizes[0]), ranks, stages, quantization, continues)


def _of_all_stages(groups: Sequence[LayerGroupShape], layers: int, stages: int) -> LayerGroupShape:
    """Return the one group of a stage, as one of the model's *layers*: all have to be alike, as no
    stage knows what the others keep."""
    group = groups[0]
    is_alike = len(groups) == 1 and group.kind not in END_KINDS
    if not is_alike or group.layers[-1].number >= layers:
        fix = "stages of models whose layers are all alike are stored, without draft layers"
        raise ModelError("pipeline_parallel_size", stages, fix)
    return replace(group, model_layers=layers)


def _of_all_ranks(group: LayerGroupShape, total: int, ranks: int) -> LayerGroupShape:
    """Return *group* with the model's KV heads, of which the ranks have equal shares or copies."""
    if group.kind is LayerKind.mla:
        return group  # a latent is every rank's
    is_even = not (total % ranks and ranks % total)
    if not is_even or group.kv_heads != max(1, total // ranks):
        fix = f"a rank of {ranks} has {max(1, total // ranks)} of the model's {total}"
        raise ModelError("num_kv_heads", group.kv_heads, fix)
    return replace(group, model_kv_heads=total)


def _groups(cache: Any, fp8: DType | None) -> tuple[LayerGroupShape, ...]:
    """Return groups of all layers of a kind and shape, by their first layers' numbers; pages of
    bytes have *fp8*."""
    layers: list[tuple[LayerRef, LayerGroupShape]] = []
    for table, group in enumerate(cache.kv_cache_groups):
        spec = group.kv_cache_spec
        kind, dtype, window = _kind(spec), DType.parse(str(spec.dtype)), 0
        if fp8 is not None and dtype.item_bytes == 1:
            dtype = fp8
        if kind is LayerKind.window:
            # What a prefix's last token sees, itself among it: of a prompt that is stored to its
            # end vLLM computes that token once more.
            size = int(spec.block_size)
            window = -(-int(spec.sliding_window) // size) * size + 1
        alike = LayerGroupShape(kind, dtype, spec.num_kv_heads, spec.head_size, window, ())
        for name in group.layer_names:
            numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)
            if len(numbers) != 1:
                raise ModelError("layers", group.layer_names[:4], "one number in a layer's name")
            layers.append((LayerRef(name, int(numbers[0]), table), alike))
    layers.sort(key=lambda one: one[0].number)
    first = layers[0][0].number
    if [layer.number for layer, _ in layers] != list(range(first, first + len(layers))):
        names = [layer.name for layer, _ in layers][:4]
        raise ModelError("layers", names, "one number a layer, and none left out")
    found: dict[LayerGroupShape, list[LayerRef]] = {}
    for layer, alike in layers:
        found.setdefault(alike, []).append(layer)
    return tuple(replace(alike, layers=tuple(refs)) for alike, refs in found.items())


def _kind(spec: Any) -> LayerKind:
    name = type(spec).__name__
    if name not in _KINDS:
        fix = f"{', '.join(_KINDS)} are stored"
        raise ModelError("kv_cache_spec", name, fix)
    if getattr(spec, "non_causal", False):
        raise ModelError("non_causal", True, "its KV depends on what comes later")
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
