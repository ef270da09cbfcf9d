"""What a decoded prefix does to a trained model: divergence, loss, greedy tokens, attention.

The model is the checkout's own; the texts are held out from its training (data/tinylm).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils.logging import disable_progress_bar

from bench.codecs_curve import Quality
from bench.codecs_kv import Bits, to_bits, to_floats
from kvstore.client.engines.transformers_cache import as_argument
from kvstore.proto.types import RopeParameters

FOLDER = Path(__file__).resolve().parents[1] / "data" / "tinylm"
GREEDY_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Lengths:
    """How much text is measured: windows of a stored prefix and the tokens behind it."""

    windows: int = 16
    prefix: int = 256
    rest: int = 256
    greedy: int = GREEDY_TOKENS


@dataclass(frozen=True, slots=True)
class _Base:
    """What the model computes from the prefix as it was."""

    log_probabilities: Tensor
    """(windows, rest, vocabulary)."""
    loss: float
    greedy: Tensor
    queries: list[Tensor]
    """A layer each: (windows, heads, rest, head_dim), rotated."""
    rest: list[tuple[Tensor, Tensor]]
    """A layer each: K and V of the tokens behind the prefix."""
    read: list[Tensor]
    """A layer each: the attention outputs."""


class PrefixModel:
    """The trained model with the KV of some prefixes, in bfloat16.

    ``bits``: the prefixes' KV, (windows, layers, 2, prefix, kv_heads, head_dim). What the
    model makes of them is computed once.
    """

    def __init__(self, lengths: Lengths | None = None, folder: Path = FOLDER) -> None:
        self._lengths = lengths or Lengths()
        disable_progress_bar()  # type: ignore[no-untyped-call]
        torch.set_num_threads(1)  # more only wait for each other at this size
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = model.eval()
        self._folder = folder
        self._tokens = _windows(folder, "score", self._lengths)
        with torch.no_grad():
            self.bits = self._prefill(self._tokens)
            self._base = self._run_base()

    @property
    def rope(self) -> RopeParameters:
        """How its keys are rotated; the prefixes start at position 0."""
        config = self._model.config
        theta = float(config.rope_parameters["rope_theta"])
        return RopeParameters(theta, int(config.head_dim))

    @torch.no_grad()
    def calibration(self, windows: int) -> Bits:
        """Return the KV of other texts, as many as *windows*, to fit tables to."""
        lengths = replace(self._lengths, windows=windows)
        return self._prefill(_windows(self._folder, "calibrate", lengths))

    @torch.no_grad()
    def score(self, decoded: Bits) -> Quality:
        """Return what *decoded* in the place of ``bits`` changes."""
        log_probabilities = self._continue(decoded)
        kv, wanted = to_floats(decoded), to_floats(self.bits)
        errors = np.square(kv - wanted).sum((0, 1, 3, 4, 5), dtype=np.float64)
        squares = np.square(wanted).sum((0, 1, 3, 4, 5), dtype=np.float64)
        return Quality(
            kl_per_token(self._base.log_probabilities, log_probabilities),
            self._loss(log_probabilities) - self._base.loss,
            float((self._greedy(decoded) == self._base.greedy).double().mean()),
            self._attention_error(decoded),
            *(errors / squares).tolist(),
        )

    def _prefill(self, tokens: Tensor) -> Bits:
        cache = DynamicCache(config=self._model.config)
        self._model.model(tokens[:, : self._lengths.prefix], **as_argument(cache))
        layers = [torch.stack(_kv(layer), 1) for layer in cache.layers]
        kv = torch.stack(layers, 1).transpose(3, 4)  # (windows, layers, 2, tokens, heads, dim)
        return to_bits(kv.numpy())

    def _run_base(self) -> _Base:
        cache = self._cache(self.bits)
        with _projected_queries(self._model) as projected:
            log_probabilities = self._log_probabilities(cache)
        prefix = self._lengths.prefix
        rest = [(k[:, :, prefix:], v[:, :, prefix:]) for k, v in map(_kv, cache.layers)]
        queries = [self._rotated(query) for query in projected]
        read = self._read(self.bits, queries, rest)
        loss, greedy = self._loss(log_probabilities), self._greedy(self.bits)
        return _Base(log_probabilities, loss, greedy, queries, rest, read)

    def _cache(self, bits: Bits) -> DynamicCache:
        cache = DynamicCache(config=self._model.config)
        kv = torch.from_numpy(to_floats(bits)).transpose(3, 4)
        for layer in range(kv.shape[1]):
            cache.update(kv[:, layer, 0].contiguous(), kv[:, layer, 1].contiguous(), layer)
        return cache

    def _continue(self, bits: Bits) -> Tensor:
        return self._log_probabilities(self._cache(bits))

    def _log_probabilities(self, cache: DynamicCache) -> Tensor:
        rest = self._tokens[:, self._lengths.prefix :]
        return log_softmax(self._model(rest, **as_argument(cache)).logits, -1)

    def _loss(self, log_probabilities: Tensor) -> float:
        wanted = self._tokens[:, self._lengths.prefix + 1 :, None]
        return -float(log_probabilities[:, :-1].gather(2, wanted).double().mean())

    def _greedy(self, bits: Bits) -> Tensor:
        cache = self._cache(bits)
        token = self._tokens[:, self._lengths.prefix, None]
        found = []
        for _ in range(self._lengths.greedy):
            token = self._model(token, **as_argument(cache)).logits[:, -1:].argmax(-1)
            found.append(token)
        return torch.cat(found, 1)

    def _rotated(self, projected: Tensor) -> Tensor:
        prefix, head_dim = self._lengths.prefix, self._model.config.head_dim
        queries = projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)
        positions = torch.arange(prefix, prefix + queries.shape[2])[None]
        cos, sin = self._model.model.rotary_emb(queries, positions)
        a, b = queries.chunk(2, -1)
        rotated: Tensor = queries * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]
        return rotated

    def _read(
        self, bits: Bits, queries: list[Tensor], rest: list[tuple[Tensor, Tensor]]
    ) -> list[Tensor]:
        kv = torch.from_numpy(to_floats(bits)).transpose(3, 4)
        count, prefix = self._lengths.rest, self._lengths.prefix
        mask = torch.ones(count, prefix + count, dtype=torch.bool).tril(prefix)
        return [
            scaled_dot_product_attention(
                query,
                torch.cat([kv[:, layer, 0], keys], 2),
                torch.cat([kv[:, layer, 1], values], 2),
                mask,
                enable_gqa=True,
            )
            for layer, (query, (keys, values)) in enumerate(zip(queries, rest, strict=True))
        ]

    def _attention_error(self, decoded: Bits) -> float:
        """Return the relative squared error of the outputs, the mean over the layers.

        Each layer gets the queries and the later tokens' KV of the base: only its own prefix
        differs.
        """
        found = self._read(decoded, self._base.queries, self._base.rest)
        pairs = zip(found, self._base.read, strict=True)
        return float(np.mean([_relative(got, wanted) for got, wanted in pairs]))


def kl_per_token(wanted: Tensor, found: Tensor) -> float:
    """Return the mean over tokens of KL(wanted || found), in nats.

    Both are log-probabilities, (windows, tokens, vocabulary). Summed in float64: what 8 bits
    change is a millionth of a nat.
    """
    windows = [
        (p.double().exp() * (p.double() - q.double())).sum(-1).mean()
        for p, q in zip(wanted, found, strict=True)
    ]
    return max(0.0, float(torch.stack(windows).mean()))


def _kv(layer: Any) -> tuple[Tensor, Tensor]:
    """Return K and V of one layer of a cache: (windows, kv_heads, tokens, head_dim)."""
    return layer.keys, layer.values


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().sum() / wanted.square().sum())


def _windows(folder: Path, use: str, lengths: Lengths) -> Tensor:
    """Return the first tokens of each held-out text, the beginning of a sequence before them."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    count = lengths.prefix + lengths.rest
    rows = []
    for text in held_out(folder, use)[: lengths.windows]:
        ids = tokenizer(text, add_special_tokens=False, truncation=True, max_length=count - 1)
        rows.append([tokenizer.bos_token_id, *ids.input_ids])
    if len(rows) < lengths.windows or any(len(row) < count for row in rows):
        raise ValueError(f"heldout.jsonl: fewer than {lengths.windows} texts of {count} tokens")
    return torch.tensor(rows)


def held_out(folder: Path, use: str) -> list[str]:
    """Return the texts of *folder* that are there to ``score``, or to ``calibrate``."""
    lines = (folder / "heldout.jsonl").read_text().splitlines()
    return [row["text"] for row in map(json.loads, lines) if row["use"] == use]


@contextmanager
def _projected_queries(model: Any) -> Iterator[list[Tensor]]:
    """Collect what each layer's query projection returns."""
    found: list[Tensor] = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda _m, _i, out: found.append(out))
        for layer in model.model.layers
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
