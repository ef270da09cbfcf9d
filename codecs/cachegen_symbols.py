"""A layer as cachegen's symbols, and back: quantisation alone, no entropy coding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.codecs.base import Part
from kvstore.codecs.cachegen_tables import ANCHOR_ZERO, DELTA_ZERO, ESCAPE, GROUP_TOKENS
from kvstore.codecs.floats import Floats, from_float32, half_up
from kvstore.proto.types import Component

MAX_ESCAPED = 8
"""A layer of which more than one delta in so many has no bin is kept as it is."""

_LARGEST_STEP = 32767
_BOX_ITEMS = 1 << 15


@dataclass(frozen=True, slots=True)
class Split:
    """A layer as symbols: scales f2 (parts, heads, groups), anchors u8 (parts, heads, groups,
    dim), deltas u8 (parts, heads, other tokens, dim); the steps i2 of escaped deltas, by their
    ascending places u32 among the deltas in C order.
    """

    scales: Part
    anchors: NDArray[np.uint8]
    deltas: NDArray[np.uint8]
    escape_places: NDArray[np.uint32]
    escape_steps: NDArray[np.int16]


def split(values: Floats, widths: Part) -> Split | None:
    """Quantise *values* f4 (parts, heads, tokens, dim); None where the fields cannot hold it."""
    tokens = np.arange(values.shape[2])
    leads = values[:, :, ::GROUP_TOKENS]
    scales = half_up(np.abs(leads).max(3) / np.float32(127))
    if not np.isfinite(scales).all():
        return None
    scale = scales.astype(np.float32)[..., None]
    steps = np.rint(leads / np.where(scale == 0, np.float32(1), scale))
    np.clip(steps, -127, 127, out=steps)
    anchors = (steps + ANCHOR_ZERO).astype(np.uint8)
    others = tokens[tokens % GROUP_TOKENS != 0]
    steps *= scale
    deltas = np.take(values, others, 2)
    deltas -= np.take(steps, others // GROUP_TOKENS, 2)
    with np.errstate(over="ignore"):  # infinity is larger than any step
        deltas /= widths[..., None, None]
    np.rint(deltas, out=deltas)
    size = np.abs(deltas)
    if size.max(initial=np.float32(0)) > _LARGEST_STEP:
        return None
    places = np.flatnonzero(size >= DELTA_ZERO)
    if len(places) > deltas.size // MAX_ESCAPED:
        return None
    escape_steps = deltas.reshape(-1)[places].astype("<i2")
    deltas += DELTA_ZERO
    deltas.reshape(-1)[places] = ESCAPE
    return Split(scales, anchors, deltas.astype(np.uint8), places.astype("<u4"), escape_steps)


def join(symbols: Split, widths: Part, component: Component, out: Sequence[Part]) -> None:
    """Write the numbers that *split* stands for into *out*, box by box."""
    for part in range(component.parts):
        for head in range(component.kv_heads):
            _join_head(symbols, float(widths[part, head]), (part, head), component, out[part][head])


def _join_head(
    symbols: Split, width: float, at: tuple[int, int], component: Component, out: Part
) -> None:
    tokens, dim = out.shape
    scales = symbols.scales[at].astype(np.float32)
    anchors, deltas = symbols.anchors[at], symbols.deltas[at]
    first = (at[0] * component.kv_heads + at[1]) * deltas.size
    step = max(1, _BOX_ITEMS // (GROUP_TOKENS * dim))
    rest = GROUP_TOKENS - 1
    for group in range(0, len(anchors), step):
        lead = anchors[group : group + step].astype(np.float32)
        lead -= np.float32(ANCHOR_ZERO)
        lead *= scales[group : group + step, None]
        piece = deltas[group * rest : (group + step) * rest]
        steps = np.zeros((len(lead) * rest, dim), np.float32)
        np.subtract(piece, np.float32(DELTA_ZERO), out=steps[: len(piece)])
        start = first + group * rest * dim
        low, high = np.searchsorted(symbols.escape_places, (start, start + piece.size))
        steps.reshape(-1)[symbols.escape_places[low:high] - start] = symbols.escape_steps[low:high]
        steps *= np.float32(width)
        values = np.empty((len(lead), GROUP_TOKENS, dim), np.float32)
        values[:, 0] = lead
        np.add(steps.reshape(len(lead), rest, dim), lead[:, None], out=values[:, 1:])
        token = group * GROUP_TOKENS
        stop = min(tokens, token + values.shape[0] * GROUP_TOKENS)
        flat = values.reshape(-1, dim)[: stop - token]
        from_float32(flat, component.dtype, out[token:stop])
