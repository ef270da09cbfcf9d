"""KL of a trained model's predictions after a decoded prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils.logging import disable_progress_bar

from bench.codecs.kv import Bits, Lengths, to_bits, to_floats
from bench.lib.traces import TINYLM, windows
from kvstore.client.blend.gate import compare
from kvstore.client.engines.transformers.cache import CacheShape, as_argument, notes_of
from kvstore.client.engines.transformers.generation import noting_attention
from kvstore.proto.types import RopeParameters


class PrefixModel:
    """A trained model with the KV of some prefixes, in bfloat16.

    ``bits``: (windows, layers, 2, prefix, kv_heads, head_dim). ``importance``: f32 (windows,
    prefix), the importance of tokens that the connector sends. The logits after each prefix are
    computed once.
    """

    def __init__(self, lengths: Lengths | None = None, folder: Path = TINYLM) -> None:
        self._lengths = lengths or Lengths()
        disable_progress_bar()  # type: ignore[no-untyped-call]
        torch.set_num_threads(1)  # more are slower at this size
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = model.eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        measured = self._lengths
        self._tokens = self._windows("score", measured.windows)
        with torch.no_grad():
            self.bits = self._prefill(self._tokens[:, : measured.prefix])
            self.importance = self._importance(self._tokens[:, : measured.prefix])
            self._expected = self._logits(self.bits)

    @property
    def rope(self) -> RopeParameters:
        """The rotation of its keys; prefixes start at position 0."""
        config = self._model.config
        return RopeParameters(float(config.rope_parameters["rope_theta"]), int(config.head_dim))

    @torch.no_grad()
    def calibration(self) -> Bits:
        tokens = self._windows("calibrate", self._lengths.calibrate)
        return self._prefill(tokens[:, : self._lengths.prefix])

    @torch.no_grad()
    def score(self, decoded: Bits) -> float:
        """Return the KL a token of the text after the prefixes, with *decoded* for ``bits``."""
        pairs = zip(self._expected, self._logits(decoded), strict=True)
        return float(np.mean([compare(expected, found).divergence for expected, found in pairs]))

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

    def _importance(self, tokens: Tensor) -> NDArray[np.float32]:
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
