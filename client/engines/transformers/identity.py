"""The identity under which a transformers model's KV is interchangeable, and its refusals."""

from __future__ import annotations

import copy
import json
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch.utils.weak import WeakIdRef
from transformers import (
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer

from kvstore.client.engines import identity as shared
from kvstore.client.engines.identity import Departures, Weights
from kvstore.client.engines.transformers import cache as caches
from kvstore.client.engines.transformers.cache import CacheReader, CacheShape, Held, TokenShape
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.hf_config import OWN_TOKENIZER, head_dim, rope_parameters
from kvstore.proto.types import MIN_CHUNK_TOKENS, KVLayout, Model

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose caches the connector is tested with."""
KERNELS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Attention implementations that agree up to rounding for MODEL_TYPES; the default is first."""
SAMPLED = 64
"""Elements sampled from each tensor where a commit names the weights."""
ROUNDINGS = 64
"""Allowed difference between two computations, in rounding errors of the largest value."""
WATCHED = 8
"""Elements of each tensor that are checked before each prompt."""
PADDING = 8
"""Tokens of padding that a model is tried with."""
_NO_SETTINGS = {*vars(torch.nn.Module()), "_output_capturing_hooks_installed"}
"""Attributes of modules that say nothing of what they compute."""
_NO_NUMBERS = ("training", "name_or_path", "gradient_checkpointing")
"""Plain ones that a model evaluates the same with."""
_PLAIN = (bool, int, float, str)
_Facts: TypeAlias = tuple[str, dict[str, Any]]
"""A module's class and its plain numbers."""


def representation_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    model_revision: str | None = None,
    adapter_digest: str = "none",
) -> Model:
    """Return the identity under which KV of *model* is interchangeable.

    Weights equal to the files they were loaded from have the files' name, as in every engine.
    Others are named by *model_revision*, a commit or a digest, or else by the downloaded commit,
    and a sample of them; without either by a digest of all of them. A model with an adapter needs
    *adapter_digest*, a digest of the active adapter's weights. Raises ModelError for models whose
    KV cannot be stored.
    """
    for name, given, has in (("model", model, "config"), ("tokenizer", tokenizer, "get_vocab")):
        if not hasattr(given, has):
            fix = f"give the {name} loaded by transformers: KV depends on it"
            raise ModelError(name, given, fix)
    model = uncompiled(model)
    check_adapter(model, adapter_digest)
    config = model.config
    shape, rope = cache_shape(model), rope_parameters(config)
    weights = _weights(model, model_revision or "")
    departures = Departures(
        "transformers",
        shared.computed_in(model.dtype, shape.groups) | departures_of(model),
        adapter_digest=adapter_digest,
        tokenizer=_tokenizer(tokenizer, weights),
    )
    return shared.identity_of(weights, shape.groups, rope, config, departures)


def uncompiled(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model in ``torch.compile(model)``, whose ``generate`` is that model's own."""
    return getattr(model, "_orig_mod", model)


def departures_of(model: PreTrainedModel) -> dict[str, str]:
    """Return departures of the model's code and numbers that no setting states."""
    found, plain = dict[str, str](), dict[str, _Facts]()
    if type(model).__module__.startswith("transformers.models."):
        # What the settings make; models whose weights torch draws on the CPU would use its seed.
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            plain = _facts_of(type(model)(copy.deepcopy(model.config)))
    else:
        found["class"] = str(type(model))
    if attention := _attention_of(model.config):
        found["attention"] = attention
    if any(map(_patches, model.modules())):
        found["hooks"] = os.urandom(shared.EPOCH_BYTES).hex()
    own = _facts_of(model)
    for name in sorted(own.keys() | plain.keys()):
        kind, numbers = own.get(name, ("none", {}))
        other, stated = plain.get(name, ("none", numbers))
        if kind != other or any(numbers.get(one) != number for one, number in stated.items()):
            found[f"module {name}"] = f"{kind} {sorted(numbers.items())}"
    return found | _tables_of(model)


def _facts_of(model: PreTrainedModel) -> dict[str, _Facts]:
    """Return the facts of each of *model*'s modules, by name."""
    found = {}
    for name, module in model.named_modules():
        if name:  # the model itself has settings of loading and generation
            own = [(k, v) for k, v in vars(module).items() if k[0] != "_" and k not in _NO_NUMBERS]
            numbers = {key: plain for key, value in own if (plain := _plain(value)) is not None}
            numbers["drops"] = module.training and not model.training
            found[name] = (str(type(module)), numbers)
    return found


def _tables_of(model: PreTrainedModel) -> dict[str, str]:
    """Return digests of the buffers that are not among the weights.

    Rotation tables that are as the settings make them are left out.
    """
    found = dict[str, str]()
    for path, module in model.named_modules():
        stated = dict[str, torch.Tensor]()
        if any("inv_freq" in name for name in module._buffers):
            with suppress(AttributeError, TypeError):  # custom modules are made from numbers
                stated = dict(type(module)(config=module.config).named_buffers())
        for name in sorted(module._non_persistent_buffers_set):
            own, named = module._buffers.get(name), stated.get(name)
            if own is not None and (named is None or not _is_alike(own, named)):
                found[f"buffer {path}.{name}"] = blake3(_bytes(own)).hexdigest()
    return found


def _is_alike(own: torch.Tensor, stated: torch.Tensor) -> bool:
    """Return whether the tables are the same up to rounding: a cast rounds them."""
    tables = (own.double().cpu(), stated.double().cpu())
    return own.shape == stated.shape and torch.allclose(*tables, rtol=1e-5, atol=0.0)


def _attention_of(config: Any) -> str:
    """Return the attention of *config*, "" for one that gives the KV of transformers' default."""
    # Other models may differ by it: Falcon scales its biases in one of them only.
    alike = KERNELS if config.model_type in MODEL_TYPES else KERNELS[:1]
    attention = str(config._attn_implementation)
    return "" if attention in alike else attention


def _patches(module: torch.nn.Module) -> list[Any]:
    """Return *module*'s own forward and the numbers of its hooks, none of which is reused.

    Both may change its output.
    """
    hooks = (*module._forward_hooks.items(), *module._forward_pre_hooks.items())
    # transformers' own only copy outputs.
    found = [key for key, hook in hooks if not str(hook.__module__).startswith("transformers.")]
    forward: Any = vars(module).get("forward")
    forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    is_own = getattr(forward, "__func__", None) is not type(module).forward
    return [*found, forward] if forward is not None and is_own else found


def check_adapter(model: PreTrainedModel, adapter_digest: str) -> None:
    """Raise ModelError if *model* has an adapter and *adapter_digest* is not given."""
    carries = getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False)
    if carries and adapter_digest == "none":
        fix = "this model has an adapter: give its digest"
        raise ModelError("adapter_digest", adapter_digest, fix)


def check_model(model: PreTrainedModel) -> None:
    """Raise ModelError for KV that depends on later tokens, and for all but one device."""
    # Models of other types are tried.
    modules = model.modules() if model.config.model_type in MODEL_TYPES else ()
    if any(getattr(one, "is_causal", True) is False for one in (model.config, *modules)):
        raise ModelError("is_causal", False, "its KV depends on later tokens: use a causal model")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise ModelError("device", sorted(devices), "load the model onto one device")


def cache_shape(model: PreTrainedModel) -> CacheShape:
    """Return what *model* keeps of a prompt. Raises ModelError for unsupported models."""
    config = model.config
    for name in ("is_encoder_decoder", "add_cross_attention", "cross_attention_layers"):
        if getattr(config, name, None):
            fix = "cross-attention layers keep another input's KV, not the prompt's"
            raise ModelError(name, getattr(config, name), fix)
    check_model(model)
    rope_parameters(config)
    layers = DynamicCache(config=config).layers
    numbers = {getattr(one, "layer_idx", None) for one in model.modules()} - {None}
    is_known = config.model_type in MODEL_TYPES and numbers == {*range(len(layers))}
    if not is_known or any(type(x) is not DynamicLayer for x in layers):
        return CacheShape.of(model)
    dim = head_dim(config)
    shapes = [
        TokenShape(layer, config.num_key_value_heads, (dim, dim), model.dtype)
        for layer in range(config.num_hidden_layers)
    ]
    return CacheShape(len(shapes), tuple(shapes), (), is_probed=False)


def check_resumable(model: PreTrainedModel, shape: CacheShape, identity: Model) -> None:
    """Raise ModelError unless *model* continues from a stored prefix as from its own.

    Its output must be the same up to rounding, and differ far more without a state: some models
    use theirs only when computing a single token.
    """
    ids, span = caches.probe_ids(model), (0, MIN_CHUNK_TOKENS)
    whole = caches.forward(model, ids, DynamicCache(config=model.config))
    first = DynamicCache(config=model.config)
    caches.forward(model, ids[:, : span[1]], first)
    ends = [Held.of_end(first, shape)]
    chunk = CacheReader(identity, shape, Held.of_row(first, shape), ends).tensors(span)

    def error(without: str = "") -> float:
        """Return the error after a stored chunk, with the states named *without* zeroed."""
        held, cache = Held.empty(shape, [span], model.device), DynamicCache(config=model.config)
        out = shape.chunk(KVLayout.of(identity, span[1]), lambda layer: held.cut(layer, span))
        caches.copy(out, chunk)
        held.fill(cache, shape, span[1])
        for state in shape.states if without else ():
            for tensor in getattr(cache.layers[state.layer], without).values():
                if tensor is not None:
                    tensor.zero_()
        found = caches.forward(model, ids[:, span[1] :], cache)
        return float((found - whole).abs().max())

    rounding, scale = torch.finfo(whole.dtype).eps, float(whole.abs().max())
    bound = min(ROUNDINGS * rounding, math.sqrt(rounding)) * scale
    for name in {piece.states for state in shape.states for piece in state.pieces}:
        bound = min(bound, max(error(name) / 8, 4 * rounding * scale))
    found = error()
    if not found <= bound:
        fix = f"after a stored prefix its error is {found:.2g}, over the {bound:.2g} allowed"
        raise ModelError("model", type(model).__name__, fix)


def check_padding(model: PreTrainedModel) -> None:
    """Raise InvalidRequestError unless *model* computes the same behind padding on the left."""
    engine: Any = model
    ids = caches.probe_ids(model)
    found = []
    for count in (0, PADDING):
        padded, mask = (torch.nn.functional.pad(one, (count, 0)) for one in (ids, ids * 0 + 1))
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        found += engine.generate(padded, attention_mask=mask, generation_config=config).logits
    alone, behind = found
    # ``generate`` returns the logits of every model in float32.
    bound = math.sqrt(torch.finfo(model.dtype).eps) * float(alone.abs().max())
    if not float((behind - alone).abs().max()) <= bound:
        fix = "this model's positions count padding: give prompts of one length"
        raise InvalidRequestError("attention_mask", "zeros", fix)


def _weights(model: PreTrainedModel, stated: str) -> Weights:
    state = model.state_dict()
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            fix = "its weights are packed, so that they cannot be compared: give one of tensors"
            raise ModelError("model", f"{key}: {type(value).__name__}", fix)
    name = model.config.name_or_path or ""
    commit = str(getattr(model.config, "_commit_hash", None) or "")
    weights = None  # without a name their content identifies them
    with suppress(ModelError):
        weights = shared.weights_of(name, stated, commit)
    named = stated if shared.is_exact(stated) else commit
    # Under a commit's name a sample suffices; without one every element is compared. A tensor
    # written since it was loaded may differ anywhere.
    every = not named or any(map(_version, state.values()))
    if weights and weights.folder and _is_in(model, weights.folder, every=every):
        return weights
    found = weights_digest(model, 0 if every else SAMPLED)
    revision = "+".join(filter(None, ["" if stated == named else stated, named, found]))
    return Weights(shared.short_name(name or model.config.model_type), revision)


def _is_in(model: PreTrainedModel, folder: Path, *, every: bool) -> bool:
    """Return whether *folder*'s files hold *model*'s weights, cast: *every* element or a sample."""
    state = model.state_dict()
    found = set()
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in state.keys() & set(opened.keys()):
                    stored, weight = opened.get_tensor(name), state[name].detach()
                    if weight.dtype != model.dtype or stored.shape != weight.shape:
                        return False
                    if not every:
                        stored, weight = _some(stored, SAMPLED), _some(weight, SAMPLED)
                    if not torch.equal(stored.to(weight.device, weight.dtype), weight):
                        return False
                    found.add((_address(state[name]), state[name].shape))
    except (OSError, SafetensorError):
        return False
    # Tied weights are in the files once.
    places = [(_address(weight), weight.shape) for weight in state.values()]
    return all(address and (address, shape) in found for address, shape in places)


def weights_digest(model: PreTrainedModel, sampled: int = 0) -> str:
    """Return a digest of the model's current weights, or of *sampled* elements of each."""
    digest = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes(_some(tensor, sampled) if sampled else tensor))
    return f"{'sample=' if sampled else 'blake3:'}{digest.hexdigest()}"


class WeightsChange(NamedTuple):
    """The weights a model has now."""

    name: bytes = b""
    """Added to the model's identity; empty before any change."""
    changes: int = 0
    """Distinguishes weights whose name returns: KV computed between is not theirs."""
    structures: int = 0
    """Counts the changes of what is not weights: the cache may have other layers then."""

    def named(self, extra: Sequence[bytes]) -> Sequence[bytes]:
        """Return *extra*, preceded by the name of these weights if they have one."""
        return [self.name, *extra] if self.name else extra


NO_CHANGE = WeightsChange()


class WeightsWatch:
    """Detects changes of a model's weights. Thread-safe.

    torch counts in-place writes to a tensor, except through ``.data``: those are detected by
    sampling elements of each tensor of torch's own classes. Keeps no weights alive.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._lock = threading.Lock()  # guards the two below
        self._seen = self._mark()
        self._now = NO_CHANGE

    def current(self) -> WeightsChange:
        """Return the weights and autocast of now. Raises InvalidRequestError in training."""
        if self._model.training:
            fix = "call model.eval(): dropout makes its KV random"
            raise InvalidRequestError("model", "in training mode", fix)
        with self._lock:
            before, self._seen = self._seen, self._mark()
            if before != self._seen:
                self._change(is_structure=before[0] != self._seen[0])
            now, kind = self._now, self._model.device.type
        if not torch.is_autocast_enabled(kind):
            return now
        name = f"{torch.get_autocast_dtype(kind)} "  # its KV is rounded otherwise
        return now._replace(name=name.encode() + now.name)

    def reset(self, revision: str | None = None) -> None:
        """Treat the current weights as changed, and name them *revision* if given."""
        with self._lock:
            self._seen = self._mark()
            self._change(revision)

    def after_fork(self) -> None:
        """In a child: another thread may have held the lock amid a change."""
        if self._lock.locked():
            self._change()
        self._lock = threading.Lock()

    def _change(self, revision: str | None = None, *, is_structure: bool = True) -> None:
        name = revision.encode() if revision else os.urandom(shared.EPOCH_BYTES)
        structures = self._now.structures + is_structure
        self._now = WeightsChange(b"weights:" + name, self._now.changes + 1, structures)

    def _mark(self) -> tuple[Any, ...]:
        """Return what all of the model computes with, first what is not weights."""
        modules = list(self._model.modules())  # one walk over them: there are hundreds
        tensors: list[torch.Tensor] = []
        for module in modules:
            tensors += (one for one in module._parameters.values() if one is not None)
            tensors += (one for one in module._buffers.values() if one is not None)
        # Freed memory is reused, so an address alone is not enough.
        marks = [(WeakIdRef(one), _address(one), _version(one)) for one in tensors]
        alike: dict[torch.dtype, list[torch.Tensor]] = {}
        with torch.no_grad():
            for tensor in tensors:
                is_own = type(tensor) in (torch.Tensor, torch.nn.Parameter)
                # Quantised tensors may not store their elements as such.
                if is_own and tensor.numel() and tensor.is_contiguous():
                    # One torch call, not the four of _some: there are hundreds of tensors.
                    step = max(1, tensor.numel() // WATCHED)
                    size, start = min(tensor.numel(), WATCHED), tensor.storage_offset()
                    some = tensor.as_strided((size,), (step,), start)
                    alike.setdefault(tensor.dtype, []).append(some)
            seen = [torch.cat(some).view(torch.uint8).cpu().numpy() for some in alike.values()]
        settings = tuple(self._settings(modules))
        return (settings, *marks, *(elements.tobytes() for elements in seen))

    def _settings(self, modules: Sequence[torch.nn.Module]) -> Iterator[Any]:
        """Yield what else of the model KV depends on: its settings, numbers and hooks."""
        config = self._model.config
        yield shared._facts(config)
        yield _attention_of(config)
        for module in modules:
            yield type(module)
            yield module.training
            yield from _patches(module)
            for name, value in vars(module).items():
                if name not in _NO_SETTINGS and (plain := _plain(value)) is not None:
                    yield name, plain


def _plain(value: Any) -> Any:
    """Return a copy of a number, a name or some, as of the active adapters; else None."""
    if isinstance(value, _PLAIN):
        return value
    items = (*value, *value.values()) if isinstance(value, dict) else value
    is_plain = isinstance(items, list | tuple) and all(isinstance(one, _PLAIN) for one in items)
    return tuple(items) if is_plain else None


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # composed of other tensors, as in some quantisations
        return 0


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _some(tensor: torch.Tensor, count: int) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // count)][:count]


def _tokenizer(tokenizer: PreTrainedTokenizerBase, weights: Weights) -> str:
    vocabulary = tokenizer.get_vocab()
    if weights.folder is not None:
        offline = {"local_files_only": True, "trust_remote_code": False}
        with suppress(OSError, ValueError, KeyError):
            if AutoTokenizer.from_pretrained(weights.folder, **offline).get_vocab() == vocabulary:
                return OWN_TOKENIZER
    words = json.dumps(sorted(vocabulary.items(), key=lambda item: (item[1], item[0])))
    return f"blake3:{blake3(words.encode()).hexdigest()}"
