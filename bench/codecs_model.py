"""What a decoded prefix does to a trained model: divergence, greedy tokens, attention, facts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import log_softmax, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils.logging import disable_progress_bar

from bench.codecs_curve import Quality
from bench.codecs_kv import Bits, to_bits, to_floats
from bench.codecs_texts import TINYLM, Context, Lengths, contexts, windows
from kvstore.client.engines.transformers.cache import CacheShape, as_argument, notes_of
from kvstore.client.engines.transformers.generation import noting_attention
from kvstore.proto.types import RopeParameters


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
    """A trained model with the KV of some prefixes, in bfloat16.

    ``bits``: the KV of prefixes whose texts go on, (windows, layers, 2, prefix, kv_heads,
    head_dim); ``told_bits``: that of prefixes which tell facts. What the model makes of the
    former is computed once. ``importance`` and ``told_importance``, f32 (windows, prefix), are
    what the connector sends of their tokens.
    """

    def __init__(self, lengths: Lengths | None = None, folder: Path = TINYLM) -> None:
        self._lengths = lengths or Lengths()
        disable_progress_bar()  # type: ignore[no-untyped-call]
        torch.set_num_threads(1)  # more only wait for each other at this size
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = model.eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        measured = self._lengths
        self._tokens = self._windows("score", measured.windows)
        self._contexts = contexts(folder, self._tokenizer, measured.contexts, measured.told)
        with torch.no_grad():
            self.bits = self._prefill(self._tokens[:, : measured.prefix])
            told = torch.tensor([c.prefix for c in self._contexts])
            self.told_bits, self.told_importance = self._prefill(told), self._weighed(told)
            self.importance = self._weighed(self._tokens[:, : measured.prefix])
            self._base = self._run_base()

    @property
    def rope(self) -> RopeParameters:
        """How its keys are rotated; the prefixes start at position 0."""
        config = self._model.config
        theta = float(config.rope_parameters["rope_theta"])
        return RopeParameters(theta, int(config.head_dim))

    @torch.no_grad()
    def calibration(self) -> Bits:
        """Return the KV of other texts, to fit tables to."""
        tokens = self._windows("calibrate", self._lengths.calibrate)
        return self._prefill(tokens[:, : self._lengths.prefix])

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

    @torch.no_grad()
    def answered(self, decoded: Bits) -> float:
        """Return the share of facts whose answer is right to its last token.

        *decoded* stands in the place of ``told_bits``.
        """
        right = [
            hit
            for bits, context in zip(decoded, self._contexts, strict=True)
            for hit in self._answers(bits, context)
        ]
        return sum(right) / len(right)

    def _answers(self, bits: Bits, context: Context) -> list[bool]:
        """Return for each question whether every token of its answer is the likeliest.

        The questions run as one batch; padding behind a row changes nothing before it.
        """
        asked = context.asked
        rows = [torch.tensor(question + answer) for question, answer in asked]
        cache = self._cache(np.repeat(bits[None], len(asked), 0))
        logits = self._model(pad_sequence(rows, batch_first=True), **as_argument(cache)).logits
        likeliest = logits.argmax(-1).tolist()
        return [
            tuple(row[len(question) - 1 : len(question) + len(answer) - 1]) == answer
            for row, (question, answer) in zip(likeliest, asked, strict=True)
        ]

    def _windows(self, use: str, count: int) -> Tensor:
        tokens = self._lengths.prefix + self._lengths.rest
        return torch.tensor(windows(self._tokenizer, use, count, tokens))

    def _prefill(self, tokens: Tensor) -> Bits:
        cache = DynamicCache(config=self._model.config)
        self._model.model(tokens, **as_argument(cache))
        layers = [torch.stack(_kv(layer), 1) for layer in cache.layers]
        kv = torch.stack(layers, 1).transpose(3, 4)  # (windows, layers, 2, tokens, heads, dim)
        return to_bits(kv.numpy())

    def _weighed(self, tokens: Tensor) -> NDArray[np.float32]:
        shape, count = CacheShape.of(self._model), tokens.shape[1]
        found = []
        for row in tokens:
            cache = DynamicCache(config=self._model.config)
            with noting_attention(self._model, cache, shape, count):
                self._model.model(row[None], **as_argument(cache))
            weights = notes_of(cache).importance
            assert weights is not None
            found.append(weights)
        return np.stack(found)

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
