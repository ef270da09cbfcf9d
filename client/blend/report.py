"""What a blend returns: logits, the KV of the whole prompt, and what was done for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kvstore.client.blend.source import LayerKV


@dataclass(frozen=True, slots=True)
class BlendReport:
    """What the engine can tell the store of one blend.

    ``selected``: positions of the ``approx`` rows that were computed through all layers.
    ``deviation``: squared distance of fresh values from stored, (tokens,), by check layer.
    ``rows``: how many rows each layer computed. ``refused``: why a segment was computed
    instead, by its index. ``attention``: what each token got of the prompt's own rows,
    (tokens,), if it was asked for. ``failure``: why the whole prompt was; empty if it was not.
    ``load_s``: what the source took; ``wait_s``: what of it computing waited for.
    """

    selected: Tensor
    rows: tuple[int, ...]
    deviation: Mapping[int, Tensor]
    refused: Mapping[int, str]
    attention: Tensor | None = None
    failure: str = ""
    load_s: float = 0.0
    wait_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BlendResult:
    """Logits of the last segment, (tokens, vocabulary), and K and V of each layer.

    K and V: (kv_heads, tokens, head_dim) of the whole prompt. With ``is_blended`` some of it
    was computed in another context: it may serve this request, and is never to be stored under
    the prompt's own keys nor kept as a prefix. ``weights`` names those that all of it is of, as an
    ``Origin`` does; None: they changed meanwhile, and it is not to be stored either.
    """

    logits: Tensor
    kv: tuple[LayerKV, ...]
    is_blended: bool
    report: BlendReport
    weights: bytes | None
