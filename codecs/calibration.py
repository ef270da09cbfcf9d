"""Makes the assets of codecs, offline, from chunks of a model or dumps of its KV.

A dump holds the tensors of a whole prompt. ``.npy``: one array (layers, parts, kv_heads, tokens,
head_dim), parts being K and V, or one latent; uint16 stands for bfloat16. ``.safetensors``:
tensors named ``layer.N.key`` and ``layer.N.value``, or ``layer.N.latent``, each (kv_heads, tokens,
head_dim). Neither format can execute code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from kvstore.codecs.base import ChunkTensors, Part, check_tensors
from kvstore.codecs.cachegen import (
    ANCHOR_SYMBOLS,
    DELTA_SYMBOLS,
    GROUP_TOKENS,
    MAX_BOOK,
    QUALITIES,
    split,
)
from kvstore.codecs.floats import Floats, has_floats, is_finite, to_float32
from kvstore.codecs.kvq_models import RATIOS, SHAPES
from kvstore.codecs.kvq_static import MIDDLE, SCALES_AN_OCTAVE
from kvstore.codecs.kvq_tiles import LARGEST_MEAN
from kvstore.codecs.kvtc import MAX_CHANNELS, SINK_TOKENS
from kvstore.codecs.rans import SLOTS
from kvstore.codecs.rope import inverse_frequencies, rotate, rotation
from kvstore.proto.errors import InvalidRequestError, LayoutMismatchError
from kvstore.proto.keys import chunk_spans
from kvstore.proto.types import (
    MIN_CHUNK_TOKENS,
    Component,
    DType,
    KVLayout,
    LayerKind,
    RopeParameters,
)

CHUNK_TOKENS = 256
DUMPS = (".npy", ".safetensors")
"""Suffixes of dumps."""
_NPY_TYPES = {"uint16": DType.bfloat16, "float16": DType.float16, "float32": DType.float32}
_SAFETENSORS_TYPES = {"BF16": DType.bfloat16, "F16": DType.float16, "F32": DType.float32}
_NAME = re.compile(r"layer\.(\d+)\.(key|value|latent)")
_KINDS = {("key", "value"): LayerKind.attention, ("latent",): LayerKind.mla}

Layers: TypeAlias = Sequence[Sequence[Part]]
Chunk: TypeAlias = tuple[ChunkTensors, int]
"""Tensors of a chunk, and its position in the prompt."""
Tables: TypeAlias = dict[str, NDArray[Any]]
Counts: TypeAlias = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of a calibration: chunks of one model.

    ``component`` describes a layer, except its tokens; ``rope`` is the rotary embedding of the
    keys, if known.
    """

    model_digest: bytes
    component: Component
    chunks: Sequence[Chunk]
    rope: RopeParameters | None = None


def make_asset(kind: AssetKind, samples: Samples, folder: Path) -> tuple[Path, Asset]:
    """Make an asset, write it to *folder* as the next edition, return path and asset.

    Raises InvalidRequestError, also for a damaged asset in the folder.
    """
    if kind is not AssetKind.cachegen and samples.rope is None and samples.component.parts == 2:
        fix = "it needs the rotary embedding, which dumps lack: give the model and a text"
        raise InvalidRequestError("sources", "dumps", fix)
    tables = learn(kind, [samples.component], samples.chunks, samples.rope)
    model = samples.model_digest
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = map(read_asset, sorted(folder.glob(f"*{SUFFIX}")))
        editions = [a.edition for a in known if (a.kind, a.representation) == (kind, model)]
        data = pack_asset(kind, model, 1 + max(editions, default=0), tables)
        asset = parse_asset(data)
        path = folder / asset_name(asset)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:  # readers of the folder never see a partial file
            draft.write_bytes(data)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidRequestError("out", str(folder), str(error)) from None
    return path, asset


def cut_prompt(layers: Layers) -> Iterator[Chunk]:
    """Yield the chunks of a prompt, as views of its *layers*; a short rest is left out."""
    for start, stop in chunk_spans(layers[0][0].shape[1], CHUNK_TOKENS):
        yield [[[part[:, start:stop] for part in parts] for parts in layers]], start


# --- dumps


def read_dumps(paths: Sequence[Path], model_digest: bytes) -> Samples:
    """Return the chunks in the dumps *paths*. Raises InvalidRequestError, naming the file."""
    component: Component | None = None
    chunks: list[Chunk] = []
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


# --- statistics


def learn(
    kind: AssetKind, components: Sequence[Component], chunks: Sequence[Chunk],
    rope: RopeParameters | None,
) -> Tables:  # fmt: skip
    """Return the tables of an asset of *kind* from *chunks* of one model's KV.

    *rope* is the rotary embedding of the keys; None: use them as rotated. Raises
    LayoutMismatchError for another model's chunks, InvalidRequestError for NaN and for components
    that the codec does not code.
    """
    for component in components:
        if not has_floats(component):
            fix = f"{kind.name} codes float KV only, no {component.dtype.name}"
            raise InvalidRequestError("component", component.kind.name, fix)
    if not chunks:
        raise InvalidRequestError("samples", 0, "give at least one")
    if kind is AssetKind.cachegen:
        return _cachegen_tables(components, [tensors for tensors, _ in chunks])
    return _turned_tables(_LEARNERS[kind], components, chunks, rope)


def _layers(
    components: Sequence[Component], chunks: Iterable[ChunkTensors]
) -> Iterator[tuple[int, int, Floats]]:
    """Yield the component, the layer and the values (parts, heads, tokens, dim) of each."""
    for tensors in chunks:
        check_tensors(_layout_like(components, tensors), tensors)
        for number, component in enumerate(components):
            for layer, parts in enumerate(tensors[number]):
                yield number, layer, np.stack([_numbers(part, component) for part in parts])


def _layout_like(components: Sequence[Component], tensors: ChunkTensors) -> KVLayout:
    """Return the layout of *components* with the token count of *tensors*."""
    if len(tensors) != len(components):
        raise LayoutMismatchError("components", len(tensors), f"give {len(components)}")
    tokens = [layers[0][0].shape[1] for layers in tensors]
    return KVLayout(tuple(map(lambda c, n: replace(c, tokens=n), components, tokens)))


def _numbers(part: NDArray[Any], component: Component) -> Floats:
    """Return *part* as float32. Raises InvalidRequestError for NaN and infinity."""
    bits = part.view(f"<u{part.dtype.itemsize}")
    if not is_finite(bits, component.dtype):
        raise InvalidRequestError("samples", "NaN or infinity", "leave this one out")
    return to_float32(bits, component.dtype)


# --- cachegen

THIRDS = (0.5, 1.0, 1.5)
"""Bin widths of the first, middle and last third of the layers (CacheGen, section 5.2)."""

_LEAST_WIDTH = 1e-6
_ROUNDS = 12
_TRAINED_CHANNELS = 1 << 15
_BLOCK_CHANNELS = 1 << 13
_COMMON_SHARE = 0.01
"""Share of the distribution of all channels in each, for symbols without samples."""


def _cachegen_tables(components: Sequence[Component], chunks: Sequence[ChunkTensors]) -> Tables:
    shapes = [(c.layers, c.parts, c.kv_heads, c.head_dim) for c in components]
    anchors = [np.zeros((*shape, ANCHOR_SYMBOLS), np.uint32) for shape in shapes]
    deltas = [np.zeros((len(QUALITIES), *shape, DELTA_SYMBOLS), np.uint32) for shape in shapes]
    widths = cachegen_widths(components, chunks)
    for number, layer, values in _layers(components, chunks):
        for quality, factor in enumerate(QUALITIES):
            symbols = split(values, widths[number][layer] * np.float32(factor))
            if symbols is not None:
                _count(deltas[number][quality, layer], symbols.deltas)
                if quality == 0:
                    _count(anchors[number][layer], symbols.anchors)
    anchor_rows, anchor_picks = _share(_rows(anchors))
    delta_rows, delta_picks = _share(_rows(deltas))
    tables: Tables = {"anchors": anchor_rows, "deltas": delta_rows}
    at = 0
    for number, (shape, width) in enumerate(zip(shapes, widths, strict=True)):
        stop = at + int(np.prod(shape))
        picks = delta_picks[len(QUALITIES) * at : len(QUALITIES) * stop]
        tables[f"{number}.widths"] = width
        tables[f"{number}.anchors"] = anchor_picks[at:stop].reshape(shape)
        tables[f"{number}.deltas"] = picks.reshape(-1, *shape[1:])
        at = stop
    return tables


def cachegen_widths(
    components: Sequence[Component], chunks: Sequence[ChunkTensors]
) -> list[Floats]:
    """Return the bin widths of quality 1, per component f4 (layers, parts, heads)."""
    squares = [np.zeros((c.layers, c.parts, c.kv_heads)) for c in components]
    for number, layer, values in _layers(components, chunks):
        _, _, tokens, dim = values.shape
        lead = np.arange(tokens) // GROUP_TOKENS * GROUP_TOKENS
        deltas = values - values[:, :, lead]
        others = max(1, int((lead != np.arange(tokens)).sum()))
        squares[number][layer] += np.square(deltas).sum((2, 3)) / (others * dim)
    total = sum(c.layers for c in components)
    thirds = iter([THIRDS[3 * layer // total] for layer in range(total)])
    found = []
    for square in squares:
        third = np.array([next(thirds) for _ in square])[:, None, None]
        rms = np.sqrt(square / len(chunks))
        found.append(np.maximum(rms * third, _LEAST_WIDTH).astype("<f4"))
    return found


def _count(counts: Counts, symbols: NDArray[np.uint8]) -> None:
    """Add *symbols* (parts, heads, tokens, dim) to *counts* (parts, heads, dim, symbols)."""
    parts, heads, _, dim = symbols.shape
    kinds = counts.shape[-1]
    channel = np.arange(parts * heads * dim).reshape(parts, heads, 1, dim)
    places = channel * kinds + symbols
    found = np.bincount(places.reshape(-1), minlength=counts.size)
    counts += found.reshape(counts.shape).astype(np.uint32)


def _rows(counts: Sequence[Counts]) -> Counts:
    return np.concatenate([count.reshape(-1, count.shape[-1]) for count in counts])


def _share(counts: Counts) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """Return at most MAX_BOOK rows of frequencies for *counts* (channels, symbols), and the row of
    each channel.

    Lloyd's algorithm with coding cost as the distance, seeded with channels over the whole range of
    spread and centre; deterministic.
    """
    sample = counts[:: max(1, len(counts) // _TRAINED_CHANNELS)]
    common = counts.sum(0, dtype=np.float64) + 1.0
    common *= _COMMON_SHARE / common.sum()
    rows = _frequencies(_seeds(sample), common)
    for _ in range(_ROUNDS):
        picks = _cheapest(sample, rows)
        sums = np.stack([sample[picks == pick].sum(0) for pick in np.unique(picks)])
        rows = np.unique(_frequencies(sums.astype(np.float64), common), axis=0)
    return rows, _cheapest(counts, rows)


def _seeds(counts: Counts) -> NDArray[np.float64]:
    """Return the counts of MAX_BOOK channels, evenly spaced in order of spread, then mean."""
    symbol = np.arange(counts.shape[1])
    total = np.maximum(1, counts.sum(1))
    mean = counts @ symbol / total
    spread = counts @ np.square(symbol) / total - np.square(mean)
    order = np.lexsort((mean, np.round(np.log2(np.maximum(spread, 1e-3)) * 2)))
    chosen = order[np.linspace(0, len(order) - 1, min(MAX_BOOK, len(order))).astype(int)]
    seeds: NDArray[np.float64] = counts[np.unique(chosen)].astype(np.float64)
    return seeds


def _frequencies(counts: NDArray[np.float64], common: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Return *counts* as 12-bit frequencies, none of them zero."""
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))
    shares = shares * (1 - _COMMON_SHARE) + common
    shares /= shares.sum(1, keepdims=True)
    symbols = counts.shape[1]
    rows = 1 + np.floor(shares * (SLOTS - symbols)).astype(np.int64)
    rows[np.arange(len(rows)), rows.argmax(1)] += SLOTS - rows.sum(1)
    frequencies: NDArray[np.uint16] = rows.astype(np.uint16)
    return frequencies


def _cheapest(counts: Counts, rows: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Return for each channel of *counts* the index in *rows* that codes it in the fewest bits."""
    bits = -np.log2(rows / SLOTS).astype(np.float32).T
    picks = np.empty(len(counts), np.uint8)
    for at in range(0, len(counts), _BLOCK_CHANNELS):
        block = counts[at : at + _BLOCK_CHANNELS].astype(np.float32)
        picks[at : at + _BLOCK_CHANNELS] = (block @ bits).argmin(1)
    return picks


# --- kvtc and kvq: keys before rotation

_LEAST_DEVIATION = 1e-6
_SHARP = 4.2
"""Kurtosis from which on a channel is coded as a Laplace distribution, which has 6; a normal one
has 3."""


def _turned_tables(
    learner: type[_Covariances | _Moments], components: Sequence[Component],
    chunks: Sequence[Chunk], rope: RopeParameters | None,
) -> Tables:  # fmt: skip
    """Return the tables of *learner*; the first tokens of a prompt are left out."""
    frequencies = [_frequencies_of(component, rope) for component in components]
    learners, counts = [learner(component) for component in components], [0] * len(components)
    for tensors, position in chunks:
        layout = _layout_like(components, tensors)
        check_tensors(layout, tensors)
        skipped = SINK_TOKENS if position == 0 else 0
        for number, component in enumerate(layout.components):
            for at in np.ndindex(component.layers, component.parts):
                values = _numbers(tensors[number][at[0]][at[1]], component)
                turned = None if at[1] else frequencies[number]
                if turned is not None:
                    cosine, sine = rotation(turned, position, component.tokens)
                    rotate(values, cosine, -sine)
                rows = values.transpose(1, 0, 2).reshape(component.tokens, -1)[skipped:]
                learners[number].take(at, rows)
            counts[number] += component.tokens - min(skipped, component.tokens)
    if min(counts) < 2:
        raise InvalidRequestError("samples", min(counts), "give more tokens")
    tables: Tables = {}
    for number, (each, count, turned) in enumerate(zip(learners, counts, frequencies, strict=True)):
        found = each.tables(count) | ({} if turned is None else {"rope": turned})
        tables |= {f"{number}.{name}": table for name, table in found.items()}
    return tables


def _frequencies_of(component: Component, rope: RopeParameters | None) -> Floats | None:
    """Return the frequencies that undo a component's rotation; None: not rotated. Raises."""
    if rope is None or rope.scaling == "none" or component.parts != 2:
        return None
    found = inverse_frequencies(rope, component.head_dim)
    if found is None:
        raise InvalidRequestError("rope", rope.scaling, "this rotation cannot be undone")
    return found


class _Covariances:
    """Means and covariances of a component, for kvtc.

    Takes channels^2 float64 numbers for each part of each layer: 540 MB for a model of 32 layers
    with 8 heads of 128.
    """

    def __init__(self, component: Component) -> None:
        channels = component.kv_heads * component.head_dim
        if channels > MAX_CHANNELS:
            raise InvalidRequestError("channels", channels, "too many for kvtc")
        self._sums = np.zeros((component.layers, component.parts, channels))
        self._products = np.zeros((*self._sums.shape, channels))

    def take(self, at: tuple[int, ...], rows: Floats) -> None:
        """Take *rows* (tokens, channels) of a layer and part."""
        wide = rows.astype(np.float64)
        self._sums[at] += wide.sum(0)
        self._products[at] += wide.T @ wide

    def tables(self, tokens: int) -> Tables:
        """Return what was found in so many tokens."""
        means = self._sums / tokens
        layers, parts, channels = means.shape
        bases = np.empty((layers, parts, channels, channels), np.float32)
        variances = np.empty((layers, parts, channels), np.float32)
        deviations = np.empty((layers, parts), np.float32)
        for at in np.ndindex(layers, parts):
            covariance = self._products[at] / tokens - np.outer(means[at], means[at])
            values, vectors = np.linalg.eigh(covariance)
            values, vectors = np.maximum(values[::-1], 0), vectors[:, ::-1]
            vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(0), np.arange(channels)])
            bases[at], variances[at] = vectors, values
            deviations[at] = max(np.sqrt(values.mean()), _LEAST_DEVIATION)
        # Components far below the finest step are never coded.
        least = (deviations[..., None] * min(RATIOS) / 4) ** 2
        kept = max(1, int((variances >= least).sum(-1).max()))
        return {
            "means": means.astype("<f4"),
            "basis": bases[..., :kept],
            "variances": variances[..., :kept],
            "deviations": deviations,
        }


class _Moments:
    """Four moments of each channel of a component, for kvq."""

    def __init__(self, component: Component) -> None:
        channels = component.kv_heads * component.head_dim
        self._moments = np.zeros((4, component.layers, component.parts, channels))

    def take(self, at: tuple[int, ...], rows: Floats) -> None:
        """Take *rows* (tokens, channels) of a layer and part."""
        power = np.ones(rows.shape)
        for moment in self._moments:
            power *= rows
            moment[at] += power.sum(0)

    def tables(self, tokens: int) -> Tables:
        """Return what was found in so many tokens."""
        mean, second, third, fourth = self._moments / tokens
        variance = np.maximum(second - mean**2, _LEAST_DEVIATION**2)
        peak = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
        deviation = np.sqrt(variance.mean(-1))
        octaves = np.log2(variance / deviation[..., None] ** 2) / 2
        scale = np.clip(np.rint(SCALES_AN_OCTAVE * octaves) + MIDDLE, 0, 2 * MIDDLE - 1)
        limit = float(LARGEST_MEAN)
        return {
            "means": np.clip(mean, -limit, limit).astype("<f2"),
            "scales": (scale * SHAPES + (peak > _SHARP * variance**2)).astype(np.uint8),
            "deviations": deviation.astype("<f4"),
        }


_LEARNERS: dict[AssetKind, type[_Covariances | _Moments]] = {
    AssetKind.kvtc: _Covariances, AssetKind.kvq: _Moments,
}  # fmt: skip
