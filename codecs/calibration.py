"""Makes the assets of codecs that need one: from chunks of a model, or dumps of its KV.

A dump holds the tensors of a whole prompt. ``.npy``: one array (layers, parts, kv_heads, tokens,
head_dim), parts being K and V, or one latent; uint16 stands for bfloat16. ``.safetensors``:
tensors named ``layer.N.key`` and ``layer.N.value``, or ``layer.N.latent``, each (kv_heads, tokens,
head_dim). Nothing in either is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

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
from kvstore.codecs.profiles import KvtcProfile, StaticKvqProfile, cachegen_tables
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import chunk_spans
from kvstore.proto.types import MIN_CHUNK_TOKENS, Component, DType, LayerKind, RopeParameters

CHUNK_TOKENS = 256
DUMPS = (".npy", ".safetensors")
"""How the names of dumps end."""
_NPY_TYPES = {"uint16": DType.bfloat16, "float16": DType.float16, "float32": DType.float32}
_SAFETENSORS_TYPES = {"BF16": DType.bfloat16, "F16": DType.float16, "F32": DType.float32}
_NAME = re.compile(r"layer\.(\d+)\.(key|value|latent)")
_KINDS = {("key", "value"): LayerKind.attention, ("latent",): LayerKind.mla}

Layers: TypeAlias = Sequence[Sequence[Part]]


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

    def tables(self, kind: AssetKind) -> Mapping[str, NDArray[Any]]:
        """Return what codecs of *kind* learn of them. Raises InvalidRequestError."""
        if kind is AssetKind.cachegen:
            return cachegen_tables([self.component], [tensors for tensors, _ in self.chunks])
        if self.rope is None and self.component.parts == 2:
            fix = "it turns keys back, and dumps do not say by what: give the model and a text"
            raise InvalidRequestError("sources", "dumps", fix)
        make = KvtcProfile if kind is AssetKind.kvtc else StaticKvqProfile
        profile = make([self.component], self.rope)
        for tensors, position in self.chunks:
            profile.add(tensors, position)
        return profile.tables()


def make_asset(kind: AssetKind, samples: Samples, folder: Path) -> tuple[Path, Asset]:
    """Make an asset, write it into *folder* under the next edition, return both.

    Raises InvalidRequestError, for a damaged asset in the folder, too.
    """
    tables, model = samples.tables(kind), samples.model_digest
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


def cut_prompt(layers: Layers) -> Iterator[tuple[ChunkTensors, int]]:
    """Yield the chunks of a prompt, views of its *layers*; a short rest is left out."""
    for start, stop in chunk_spans(layers[0][0].shape[1], CHUNK_TOKENS):
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
        chunks += cut_prompt(layers)
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
    try:
        from safetensors import SafetensorError, deserialize
    except ImportError:
        fix = "needs safetensors: pip install 'kvstore-server[transformers]'"
        raise InvalidRequestError("model", str(path), fix) from None
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
