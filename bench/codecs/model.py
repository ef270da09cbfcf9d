"""What a decoded prefix does to a trained model: divergence, and facts that it still tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils.logging import disable_progress_bar

from bench.codecs.kv import Bits, to_bits, to_floats
from bench.codecs.texts import Context, Lengths, contexts, windows
from bench.lib.traces import TINYLM
from kvstore.client.blend.gate import compare
from kvstore.client.engines.transformers.cache import CacheShape, as_argument, notes_of
from kvstore.client.engines.transformers.generation import noting_attention
from kvstore.proto.types import RopeParameters


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
            self._wanted = self._logits(self.bits)

    @property
    def rope(self) -> RopeParameters:
        """How its keys are rotated; the prefixes start at position 0."""
        config = self._model.config
        theta = float(config.rope_parameters["rope_theta"])
        return RopeParameters(theta, int(config.head_dim))

    @torch.no_grad()
    def calibration(self) -> Bits:
        tokens = self._windows("calibrate", self._lengths.calibrate)
        return self._prefill(tokens[:, : self._lengths.prefix])

    @torch.no_grad()
    def score(self, decoded: Bits) -> float:
        """Return the KL a token of the text behind *decoded* in the place of ``bits``."""
        pairs = zip(self._wanted, self._logits(decoded), strict=True)
        return float(np.mean([compare(wanted, found).divergence for wanted, found in pairs]))

    @torch.no_grad()
    def answered(self, decoded: Bits) -> float:
        """Return the share of facts whose answer is right to its last token.

        *decoded* stands in the place of ``told_bits``.
        """
        found = zip(decoded, self._contexts, strict=True)
        return float(np.mean([hit for bits, one in found for hit in self._answers(bits, one)]))

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
        layers: Any = cache.layers
        layers = [torch.stack((layer.keys, layer.values), 1) for layer in layers]
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

    def _cache(self, bits: Bits) -> DynamicCache:
        cache = DynamicCache(config=self._model.config)
        kv = torch.from_numpy(to_floats(bits)).transpose(3, 4)
        for layer in range(kv.shape[1]):
            cache.update(kv[:, layer, 0].contiguous(), kv[:, layer, 1].contiguous(), layer)
        return cache

    def _logits(self, bits: Bits) -> Tensor:
        rest = self._tokens[:, self._lengths.prefix :]
        logits: Tensor = self._model(rest, **as_argument(self._cache(bits))).logits
        return logits
