"""The identity of a transformers model's KV: what makes it interchangeable, and what is refused."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch.utils.weak import WeakIdRef
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from kvstore.client.engines import identity as shared
from kvstore.client.engines.identity import Departures, Weights
from kvstore.client.engines.transformers import cache as caches
from kvstore.client.engines.transformers.cache import CacheReader, CacheShape, Held, TokenShape
from kvstore.proto.errors import ModelError
from kvstore.proto.hf_config import OWN_TOKENIZER, head_dim, rope_parameters
from kvstore.proto.types import MIN_CHUNK_TOKENS, KVLayout, Model

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose caches the connector is tested with."""
KERNELS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Implementations of attention that compute the same but for rounding."""
SAMPLED = 64
"""Elements of each tensor that stand for it where a commit names the rest."""
ROUNDINGS = 64
"""Of the largest number, what two ways to the same one may differ by in float32."""
WATCHED = 8
"""Elements of each tensor that are looked at before each prompt."""


def representation_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    model_revision: str | None = None,
    adapter_digest: str = "none",
) -> Model:
    """Return what makes KV of *model* interchangeable with other KV.

    Weights that are those of the files they were loaded from have the files' name, which every
    engine gives them. Others are named by *model_revision*, a commit or a digest, or else by the
    commit the model was downloaded at, and a sample of them; without either by a digest of all of
    them. A model that carries an adapter needs *adapter_digest*, a digest of the active one's
    weights. Raises ModelError for models whose KV cannot be stored.
    """
    for name, given, has in (("model", model, "config"), ("tokenizer", tokenizer, "get_vocab")):
        if not hasattr(given, has):
            fix = f"give the {name} that transformers loaded: KV of other tokens is another's"
            raise ModelError(name, given, fix)
    check_adapter(model, adapter_digest)
    config = model.config
    shape, rope = cache_shape(model), rope_parameters(config)
    weights = _weights(model, model_revision or "")
    departures = Departures(
        "transformers",
        shared.computed_in(model.dtype, shape.groups) | _departures(model),
        adapter_digest=adapter_digest,
        tokenizer=_tokenizer(tokenizer, weights),
    )
    return shared.identity_of(weights, shape.groups, rope, config, departures)


def _departures(model: PreTrainedModel) -> dict[str, str]:
    """Return what the model's code and numbers are that no setting says."""
    found, attention = dict[str, str](), str(model.config._attn_implementation)
    if not type(model).__module__.startswith("transformers.models."):
        found["class"] = str(type(model))
    if attention not in KERNELS:
        found["attention"] = attention
    table: Any = getattr(model.base_model, "rotary_emb", None)
    if isinstance(getattr(table, "inv_freq", None), torch.Tensor):
        tables = (table, type(table)(config=model.config))
        own, named = (one.inv_freq.double().cpu() for one in tables)
        # A cast rounds them.
        if own.shape != named.shape or not torch.allclose(own, named, rtol=1e-5, atol=0.0):
            found["rope"] = str(own.tolist())
    return found


def check_adapter(model: PreTrainedModel, adapter_digest: str) -> None:
    """Raise ModelError where an adapter changes what *model* computes, and nobody names it."""
    carries = getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False)
    if carries and adapter_digest == "none":
        fix = "this model carries an adapter: give its digest"
        raise ModelError("adapter_digest", adapter_digest, fix)


def check_device(model: PreTrainedModel) -> None:
    """Raise ModelError for a model that is not on one device."""
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise ModelError("device", sorted(devices), "load the model onto one device")


def cache_shape(model: PreTrainedModel) -> CacheShape:
    """Return what *model* keeps of a prompt. Raises ModelError naming what it refuses."""
    config = model.config
    for name in ("is_encoder_decoder", "add_cross_attention", "cross_attention_layers"):
        if getattr(config, name, None):
            fix = "cross-attention layers keep another input's KV, not the prompt's"
            raise ModelError(name, getattr(config, name), fix)
    check_device(model)
    rope_parameters(config)
    layers = DynamicCache(config=config).layers
    if config.model_type not in MODEL_TYPES or any(type(x) is not DynamicLayer for x in layers):
        return CacheShape.of(model)
    dim = head_dim(config)
    shapes = [
        TokenShape(layer, config.num_key_value_heads, (dim, dim), model.dtype)
        for layer in range(config.num_hidden_layers)
    ]
    return CacheShape(len(shapes), tuple(shapes), (), is_probed=False)


def check_resumable(model: PreTrainedModel, shape: CacheShape, identity: Model) -> None:
    """Raise ModelError unless *model* goes on from a stored prefix as it would have by itself.

    What it computes has to be the same but for rounding, and far less the same with a state left
    out: some models look at theirs for a single token only.
    """
    ids, span = caches.probe_ids(model), (0, MIN_CHUNK_TOKENS)
    whole = caches.forward(model, ids, DynamicCache(config=model.config))
    first = DynamicCache(config=model.config)
    caches.forward(model, ids[:, : span[1]], first)
    ends = [Held.of_end(first, shape)]
    chunk = CacheReader(identity, shape, Held.of_row(first, shape), ends).tensors(span)

    def error(without: str = "") -> float:
        """Return how far it is off behind a chunk, and without states of that name."""
        held, cache = Held.empty(shape, [span], model.device), DynamicCache(config=model.config)
        caches.copy(held.chunk(shape, KVLayout.of(identity, span[1]), span), chunk)
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
        fix = f"behind a stored prefix it is {found:.2g} off, more than the {bound:.2g} allowed"
        raise ModelError("model", type(model).__name__, fix)


def _weights(model: PreTrainedModel, stated: str) -> Weights:
    name = model.config.name_or_path or ""
    commit = str(getattr(model.config, "_commit_hash", None) or "")
    try:
        weights = shared.weights_of(name, stated, commit)
    except ModelError:  # they have no name, so what they are has to say
        weights = None
    named = stated if shared.is_exact(stated) else commit
    # A commit names what else is in the files; a digest of them does once nothing differs. What
    # was written to since it was loaded may differ anywhere.
    every = not named or any(map(_version, model.state_dict().values()))
    if weights and weights.folder and _is_in(model, weights.folder, every=every):
        return weights
    found = weights_digest(model, 0 if every else SAMPLED)
    revision = f"{named}+{found}" if named else found
    if stated not in ("", named):
        revision = f"{stated}+{revision}"
    return Weights(shared.short_name(name or model.config.model_type), revision)


def _is_in(model: PreTrainedModel, folder: Path, *, every: bool) -> bool:
    """Return whether *folder*'s files have each weight of *model*, cast to the type it computes in.

    All elements are looked at, or without *every* some.
    """
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
    """Return a digest of the model's weights, as they are now, or of so many elements of each."""
    digest = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        some = _some(tensor.detach(), sampled) if sampled else tensor.detach()
        flat: Any = some.cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy())
    return f"{'sample=' if sampled else 'blake3:'}{digest.hexdigest()}"


class WeightsChange(NamedTuple):
    """Which weights a model has by now."""

    name: bytes = b""
    """Beside that of the model's identity; empty before any change."""
    changes: int = 0
    """A name may come again: what was computed between does not belong to it."""

    def named(self, extra: Sequence[bytes]) -> Sequence[bytes]:
        """Return what else names a prompt of these weights."""
        return [self.name, *extra] if self.name else extra


NO_CHANGE = WeightsChange()


class WeightsWatch:
    """Notices that the weights of a model are not those it saw last. Thread-safe.

    torch counts what is written to a tensor in place, but for writes through ``.data``: those are
    seen by a few elements of each tensor of torch's own classes. Keeps no weights alive.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._lock = threading.Lock()  # guards the two below
        self._seen = self._mark()
        self._now = NO_CHANGE

    def current(self) -> WeightsChange:
        """Look at the weights, and return which they are."""
        with self._lock:
            before, self._seen = self._seen, self._mark()
            if before != self._seen:
                self._change()
            return self._now

    def reset(self, revision: str | None = None) -> None:
        """Take the weights of this moment for others than before, called *revision* if given."""
        with self._lock:
            self._seen = self._mark()
            self._change(revision)

    def after_fork(self) -> None:
        """Go on in a child: another thread may have had the lock, and not named what it saw."""
        if self._lock.locked():
            self._change()
        self._lock = threading.Lock()

    def _change(self, revision: str | None = None) -> None:
        name = revision.encode() if revision else os.urandom(shared.EPOCH_BYTES)
        self._now = WeightsChange(b"weights:" + name, self._now.changes + 1)

    def _mark(self) -> tuple[Any, ...]:
        tensors = list(self._tensors())
        # Memory that was freed is given out again, so an address alone is not enough.
        marks = [(WeakIdRef(one), _address(one), _version(one)) for one in tensors]
        alike: dict[torch.dtype, list[torch.Tensor]] = {}
        with torch.no_grad():
            for tensor in tensors:
                is_own = type(tensor) in (torch.Tensor, torch.nn.Parameter)
                # Elements of a quantisation may not lie in memory as they are.
                if is_own and tensor.numel() and tensor.is_contiguous():
                    # One call of torch, not the four of _some: there are hundreds of tensors.
                    step = max(1, tensor.numel() // WATCHED)
                    size, start = min(tensor.numel(), WATCHED), tensor.storage_offset()
                    some = tensor.as_strided((size,), (step,), start)
                    alike.setdefault(tensor.dtype, []).append(some)
            seen = [torch.cat(some).view(torch.uint8).cpu().numpy() for some in alike.values()]
        return (*marks, *(elements.tobytes() for elements in seen))

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self._model.parameters()
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield buffer


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # it is made of others, as some quantisations' are
        return 0


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
