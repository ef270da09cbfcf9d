"""Makes model assets: from a model and a text, or from dumps of its KV.

A dump holds the tensors of a whole prompt. ``.npy``: one array (layers, parts, kv_heads, tokens,
head_dim), parts being K and V, or one latent; uint16 stands for bfloat16. ``.safetensors``:
tensors named ``layer.N.key`` and ``layer.N.value``, or ``layer.N.latent``, each (kv_heads, tokens,
head_dim). Nothing in either is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.assets import (
    SUFFIX,
    Asset,
    AssetKind,
    asset_name,
    pack_asset,
    parse_asset,
    read_asset,
)
from kvstore.codecs.base import ChunkTensors, Part
from kvstore.codecs.cachegen_profile import CachegenProfile
from kvstore.codecs.kvqs_profile import KvqsProfile
from kvstore.codecs.kvt_profile import KvtProfile
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.keys import representation_digest
from kvstore.proto.types import (
    DIGEST_BYTES,
    MIN_CHUNK_TOKENS,
    Component,
    DType,
    LayerKind,
    RopeParameters,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_TOKENS = 256
CONTEXT_TOKENS = 1024
"""Of the prompts in which a model reads its text, at most."""
_NPY_TYPES = {"uint16": DType.bfloat16, "float16": DType.float16, "float32": DType.float32}
_SAFETENSORS_TYPES = {"BF16": DType.bfloat16, "F16": DType.float16, "F32": DType.float32}
_NAME = re.compile(r"layer\.(\d+)\.(key|value|latent)")
_KINDS = {("key", "value"): LayerKind.attention, ("latent",): LayerKind.mla}

Layers: TypeAlias = Sequence[Sequence[Part]]
Tables: TypeAlias = Mapping[str, NDArray[Any]]


def check_extras(source: Path, *needs: str) -> None:
    """Raise InvalidRequestError where what runs a model or reads a file is not installed."""
    missing = [name for name in needs or ("torch", "transformers") if find_spec(name) is None]
    if missing:
        fix = f"needs {' and '.join(missing)}: pip install 'kvstore-server[transformers]'"
        raise InvalidRequestError("model", str(source), fix)


def read_text(option: str, path: Path) -> str:
    """Return the text in the file *path* that *option* names. Raises InvalidRequestError."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(option, str(path), str(error)) from None


@dataclass(frozen=True, slots=True)
class Samples:
    """What a calibration learns from: chunks of one model, with their places in their prompts.

    ``component`` says what a layer keeps, its tokens aside; ``rope`` is the rotary embedding
    that the keys carry, where that is known.
    """

    model_digest: bytes
    component: Component
    chunks: Sequence[tuple[ChunkTensors, int]]
    rope: RopeParameters | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """What to make an asset from. ``text`` belongs to a model, ``representation`` to dumps.

    ``sources`` is a folder of a transformers model or files of KV; at most ``tokens`` tokens
    of the text are used.
    """

    kind: str
    sources: Sequence[Path]
    folder: Path
    text: Path | None = None
    representation: str | None = None
    tokens: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in _MAKERS:
            raise InvalidRequestError("kind", self.kind, f"use one of {', '.join(_MAKERS)}")
        if self.tokens < CHUNK_TOKENS:
            raise InvalidRequestError("tokens", self.tokens, "give at least a chunk's")

    def samples(self) -> Samples:
        """Read or compute the samples. Raises InvalidRequestError that says what is missing."""
        first = self.sources[0]
        if not first.is_dir():
            if not re.fullmatch(f"[0-9a-fA-F]{{{2 * DIGEST_BYTES}}}", self.representation or ""):
                fix = f"dumps need the model's representation digest, {2 * DIGEST_BYTES} hex digits"
                raise InvalidRequestError("representation", self.representation, fix)
            digest = bytes.fromhex(self.representation or "")
            return read_dumps(self.sources, digest)
        if len(self.sources) > 1:
            raise InvalidRequestError("sources", len(self.sources), "give one model, or dumps")
        if self.text is None:
            raise InvalidRequestError("text", None, "a model needs a text to read")
        check_extras(first)
        return run_model(first, read_text("text", self.text), self.tokens)


def calibrate(calibration: Calibration) -> tuple[Path, Asset]:
    """Make the asset, write it into the folder under the next edition, return both.

    Raises InvalidRequestError, for a damaged asset in the folder, too.
    """
    samples = calibration.samples()
    tables = _MAKERS[calibration.kind](samples)
    kind, model = AssetKind[calibration.kind], samples.model_digest
    folder = calibration.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = map(read_asset, sorted(folder.glob(f"*{SUFFIX}")))
        editions = [a.edition for a in known if (a.kind, a.representation) == (kind, model)]
        data = pack_asset(kind, model, 1 + max(editions, default=0), tables)
        asset = parse_asset(data)
        path = folder / asset_name(asset)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:  # a reader of the folder sees all of it or nothing
            draft.write_bytes(data)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidRequestError("out", str(folder), str(error)) from None
    return path, asset


def _cachegen(samples: Samples) -> Tables:
    layers = samples.component.layers
    depths = [layer / layers for layer in range(layers)]  # 0 for the first, below 1 for the last
    profile = CachegenProfile([samples.component], depths)
    for tensors, _ in samples.chunks:
        profile.measure(tensors)
    for tensors, _ in samples.chunks:
        profile.count(tensors)
    return profile.tables()


def _turned_by(kind: type[KvtProfile | KvqsProfile]) -> Callable[[Samples], Tables]:
    """Return the maker of *kind*, which turns keys back to position 0."""

    def make(samples: Samples) -> Tables:
        if samples.rope is None and samples.component.parts == 2:
            fix = "it turns keys back, and dumps do not say by what: give the model and a text"
            raise InvalidRequestError("sources", "dumps", fix)
        profile = kind([samples.component], samples.rope)
        for tensors, position in samples.chunks:
            profile.add(tensors, position)
        return profile.tables()

    return make


_MAKERS: dict[str, Callable[[Samples], Tables]] = {
    "cachegen": _cachegen,
    "kvt": _turned_by(KvtProfile),
    "kvqs": _turned_by(KvqsProfile),
}


def _cut(layers: Layers) -> Iterator[tuple[ChunkTensors, int]]:
    """Yield the chunks of a prompt, views of its *layers*; a short rest is left out."""
    tokens = layers[0][0].shape[1]
    for start in range(0, tokens, CHUNK_TOKENS):
        stop = min(tokens, start + CHUNK_TOKENS)
        if stop - start >= MIN_CHUNK_TOKENS:
            yield [[[part[:, start:stop] for part in parts] for parts in layers]], start


# --- dumps


def read_dumps(paths: Sequence[Path], model_digest: bytes) -> Samples:
    """Return the chunks in the dumps *paths*. Raises InvalidRequestError that names the file."""
    component: Component | None = None
    chunks: list[tuple[ChunkTensors, int]] = []
    for path in paths:
        dtype, kind, layers = _read(path)
        heads, _, dim = layers[0][0].shape
        found = Component(kind, dtype, len(layers), heads, dim, CHUNK_TOKENS)
        if component is not None and found != component:
            raise InvalidRequestError("dump", str(path), "of another model than the first")
        component = found
        chunks += _cut(layers)
    if component is None or not chunks:
        fix = f"give dumps of at least {MIN_CHUNK_TOKENS} tokens"
        raise InvalidRequestError("dumps", len(paths), fix)
    return Samples(model_digest, component, chunks)


def _read(path: Path) -> tuple[DType, LayerKind, Layers]:
    readers = {".npy": _read_npy, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise InvalidRequestError("dump", str(path), "give .npy or .safetensors files")
    try:
        return readers[path.suffix](path)
    except (OSError, ValueError) as error:
        raise InvalidRequestError("dump", str(path), f"cannot be read: {error}") from None


def _read_npy(path: Path) -> tuple[DType, LayerKind, Layers]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    dtype = _NPY_TYPES.get(array.dtype.name)
    if dtype is None or array.ndim != 5 or array.shape[1] not in (1, 2) or 0 in array.shape:
        found = f"(layers, 1 or 2 parts, kv_heads, tokens, head_dim), not {array.shape}"
        raise ValueError(f"give {found}, float or uint16, not {array.dtype.name}")
    kind = LayerKind.mla if array.shape[1] == 1 else LayerKind.attention
    bits = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return dtype, kind, [list(layer) for layer in bits.view(f"<u{dtype.item_bytes}")]


def _read_safetensors(path: Path) -> tuple[DType, LayerKind, Layers]:
    data = path.read_bytes()
    check_extras(path, "safetensors")
    from safetensors import SafetensorError, deserialize

    try:
        tensors = deserialize(data)  # type: ignore[no-untyped-call]  # checks all offsets
    except SafetensorError as error:
        raise ValueError(error) from None
    layers: dict[int, dict[str, Part]] = {}
    forms = set()
    for name, row in tensors:
        if matched := _NAME.fullmatch(name):
            dtype, shape = _SAFETENSORS_TYPES.get(row["dtype"]), tuple(row["shape"])
            if dtype is None or len(shape) != 3 or 0 in shape:
                raise ValueError(f"{name} is {row['dtype']} {shape}: use BF16, F16 or F32")
            forms.add((dtype, shape))
            bits = np.frombuffer(row["data"], f"<u{dtype.item_bytes}").reshape(shape)
            layers.setdefault(int(matched[1]), {})[matched[2]] = bits
    if sorted(layers) != list(range(len(layers))) or not layers:
        raise ValueError("name tensors layer.N.key and layer.N.value")
    parts = {tuple(sorted(layer)) for layer in layers.values()}
    if len(parts) != 1 or len(forms) != 1 or not parts <= set(_KINDS):
        raise ValueError("layers differ in parts, dtype or shape")
    (names,), ((dtype, _),) = parts, forms
    return dtype, _KINDS[names], [[layers[at][name] for name in names] for at in range(len(layers))]


# --- a model


def load_model(folder: Path) -> tuple[PreTrainedModel, Any]:
    """Return the model in *folder* and its tokenizer. Raises InvalidRequestError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    except (OSError, ValueError) as error:
        raise InvalidRequestError("model", str(folder), str(error).splitlines()[0]) from None
    return model, tokenizer


def run_model(folder: Path, text: str, tokens: int) -> Samples:
    """Return the KV that the model in *folder* computes of the first *tokens* of *text*.

    The model runs as its configuration says, in prompts of CONTEXT_TOKENS at most. Raises
    InvalidRequestError for a folder or a text that will not do, ModelError for a
    model whose KV cannot be stored.
    """
    from kvstore.client.engines.transformers.identity import representation_of

    model, tokenizer = load_model(folder)
    named = representation_of(model, tokenizer)
    group, *others = named.layer_groups
    if others or group.kind is not LayerKind.attention:
        raise ModelError("layers", group.kind.name, "only full-attention layers are stored")
    ids = tokenizer(text)["input_ids"][:tokens]
    if len(ids) < MIN_CHUNK_TOKENS:
        raise InvalidRequestError("text", len(ids), f"give at least {MIN_CHUNK_TOKENS} tokens")
    component = Component(
        group.kind, group.dtype, len(group.layer_ids), group.kv_heads, group.head_dim, CHUNK_TOKENS
    )
    limit = getattr(model.config, "max_position_embeddings", None) or CONTEXT_TOKENS
    context = max(min(CONTEXT_TOKENS, limit), MIN_CHUNK_TOKENS)
    chunks: list[tuple[ChunkTensors, int]] = []
    for start in range(0, len(ids), context):
        prompt = ids[start : start + context]
        if len(prompt) >= MIN_CHUNK_TOKENS:
            chunks += _cut(_computed(model, prompt))
    return Samples(representation_digest(named), component, chunks, named.rope)


def _computed(model: PreTrainedModel, prompt: Sequence[int]) -> Layers:
    """Return the KV of *prompt* as its bits."""
    import torch
    from transformers import DynamicCache

    from kvstore.client.engines.transformers.cache import as_argument
    from kvstore.client.tensors import to_array

    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([prompt], device=model.device), **as_argument(cache), use_cache=True)
    found = []
    layers: Sequence[Any] = cache.layers
    for layer in layers:
        arrays = [to_array(part[0].cpu().contiguous()) for part in (layer.keys, layer.values)]
        found.append([array.view(f"<u{array.dtype.itemsize}") for array in arrays])
    return found
