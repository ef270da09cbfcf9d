"""KV dumps as samples for calibration: files that hold the tensors of whole prompts.

``.npy``: one array (layers, parts, kv_heads, tokens, head_dim), parts being K and V, or one
latent; uint16 stands for bfloat16. ``.safetensors``: tensors named ``layer.N.key`` and
``layer.N.value``, or ``layer.N.latent``, each (kv_heads, tokens, head_dim). Nothing in either
is run, and every size is checked against the file's before it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import ChunkTensors, Part
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import MIN_CHUNK_TOKENS, Component, DType, LayerKind, RopeParameters

MAX_HEADER_BYTES = 16 << 20
_NPY_TYPES = {"uint16": DType.bfloat16, "float16": DType.float16, "float32": DType.float32}
_SAFETENSORS_TYPES = {"BF16": DType.bfloat16, "F16": DType.float16, "F32": DType.float32}
_NAME = re.compile(r"layer\.(\d+)\.(key|value|latent)")
_KINDS = {("key", "value"): LayerKind.attention, ("latent",): LayerKind.mla}


@dataclass(frozen=True, slots=True)
class Sample:
    """The tensors of one chunk, whose first token stands at ``position`` of its prompt."""

    tensors: ChunkTensors
    position: int


@dataclass(frozen=True, slots=True)
class Samples:
    """What a calibration learns from: chunks of one model.

    ``component`` says what a layer keeps, its tokens aside; ``rope`` is the rotary embedding
    that the keys carry, where that is known.
    """

    representation: bytes
    component: Component
    chunks: Sequence[Sample]
    rope: RopeParameters | None = None

    @property
    def depths(self) -> list[float]:
        """Where in the model each layer is: 0 for the first, below 1 for the last."""
        return [layer / self.component.layers for layer in range(self.component.layers)]


def read_dumps(paths: Sequence[Path], representation: bytes, chunk_tokens: int) -> Samples:
    """Return the chunks in the dumps *paths*. Raises InvalidRequestError that names the file."""
    component: Component | None = None
    chunks: list[Sample] = []
    for path in paths:
        dtype, kind, layers = _read(path)
        heads, tokens, dim = layers[0][0].shape
        found = Component(kind, dtype, len(layers), heads, dim, chunk_tokens)
        if component is not None and found != component:
            raise InvalidRequestError("dump", str(path), "of another model than the first")
        component = found
        chunks += cut(layers, tokens, chunk_tokens)
    if component is None or not chunks:
        fix = f"give dumps of at least {MIN_CHUNK_TOKENS} tokens"
        raise InvalidRequestError("dumps", len(paths), fix)
    return Samples(representation, component, chunks)


def cut(layers: Sequence[Sequence[Part]], tokens: int, chunk_tokens: int) -> list[Sample]:
    """Return the chunks of a prompt's *layers*, views of them; a short rest is left out."""
    found = []
    for start in range(0, tokens, chunk_tokens):
        stop = min(tokens, start + chunk_tokens)
        if stop - start >= MIN_CHUNK_TOKENS:
            found.append(Sample([[[p[:, start:stop] for p in parts] for parts in layers]], start))
    return found


def _read(path: Path) -> tuple[DType, LayerKind, list[list[Part]]]:
    try:
        if path.suffix == ".npy":
            return _read_npy(path)
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError("dump", str(path), f"cannot be read: {error}") from None
    raise InvalidRequestError("dump", str(path), "give .npy or .safetensors files")


def _read_npy(path: Path) -> tuple[DType, LayerKind, list[list[Part]]]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    dtype = _NPY_TYPES.get(array.dtype.name)
    if dtype is None or array.ndim != 5 or array.shape[1] not in (1, 2) or 0 in array.shape:
        fix = "give (layers, 1 or 2 parts, kv_heads, tokens, head_dim), float or uint16"
        raise InvalidRequestError(f"dump {path}", (array.dtype.name, array.shape), fix)
    kind = LayerKind.mla if array.shape[1] == 1 else LayerKind.attention
    bits = array.astype(array.dtype.newbyteorder("<"), copy=False)
    bits = bits.view(f"<u{dtype.item_bytes}")
    return dtype, kind, [list(layer) for layer in bits]


def _read_safetensors(path: Path) -> tuple[DType, LayerKind, list[list[Part]]]:
    data = np.memmap(path, np.uint8, "r")
    size = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or not 2 <= size <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise InvalidRequestError("dump", str(path), "no safetensors file")
    rows = json.loads(data[8 : 8 + size].tobytes())
    body = data[8 + size :]
    layers: dict[int, dict[str, tuple[str, Part]]] = {}
    for name, row in rows.items():
        matched = _NAME.fullmatch(name)
        if matched:
            layers.setdefault(int(matched[1]), {})[matched[2]] = _tensor(row, body, path)
    if sorted(layers) != list(range(len(layers))) or not layers:
        raise InvalidRequestError("dump", str(path), "name tensors layer.N.key and layer.N.value")
    parts = {tuple(sorted(layer)) for layer in layers.values()}
    types = {kind for layer in layers.values() for kind, _ in layer.values()}
    shapes = {part.shape for layer in layers.values() for _, part in layer.values()}
    if len(parts) != 1 or len(types) != 1 or len(shapes) != 1 or not parts <= set(_KINDS):
        raise InvalidRequestError("dump", str(path), "layers differ in parts, dtype or shape")
    (names,), (kind,) = parts, types
    found = [[layers[number][name][1] for name in names] for number in range(len(layers))]
    return _SAFETENSORS_TYPES[kind], _KINDS[names], found


def _tensor(row: dict[str, Any], body: NDArray[np.uint8], path: Path) -> tuple[str, Part]:
    kind, shape, (start, stop) = row["dtype"], row["shape"], row["data_offsets"]
    dtype = _SAFETENSORS_TYPES.get(kind)
    numbers = [*shape, start, stop]
    if dtype is None or len(shape) != 3 or not all(type(number) is int for number in numbers):
        raise InvalidRequestError(f"dump {path}", row, "give BF16, F16 or F32 of 3 extents")
    heads, tokens, dim = shape
    size = heads * tokens * dim * dtype.item_bytes
    if min(shape) < 1 or not 0 <= start <= stop <= len(body) or stop - start != size:
        raise InvalidRequestError(f"dump {path}", row, "lies outside of the file")
    return kind, body[start:stop].view(f"<u{dtype.item_bytes}").reshape(heads, tokens, dim)
