"""One engine process of the demo: ``python -m kvstore.cli.demo.engine ROLE ADDRESS MODEL N``.

Computes in float32, so that tokens are comparable, and prints its report as one line of JSON:
times in milliseconds, medians of several.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

from kvstore.client.client import Client
from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.client.engines.transformers.cache import as_argument

NEW_TOKENS = 32
REPEATS = 5
PROMPT = Path(__file__).with_name("prompt.txt")


class DemoEngine:
    """A model with its prompt; each use of the store opens a new client."""

    def __init__(self, address: str, folder: str, prompt_tokens: int) -> None:
        self._address = address
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._representation = representation_of(self._model, tokenizer)
        once: list[int] = tokenizer(PROMPT.read_text())["input_ids"]
        repeated = once * -(-prompt_tokens // len(once))
        self._prompt = torch.tensor([repeated[:prompt_tokens]])
        end, most = tokenizer.eos_token_id, NEW_TOKENS
        self._settings = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=most, min_new_tokens=most, do_sample=False,
            eos_token_id=end, pad_token_id=end,
        )  # fmt: skip

    def run(self, role: str) -> dict[str, Any]:
        """Run *role*: ``first`` computes and stores the prompt; ``second`` loads it and times
        both ways; ``restarted`` times one load from disk.
        """
        other, cache = self._prompt.flip(1), self._empty()
        self._first_token(other[:, :-1], cache)  # warm up the model's code for many tokens
        self._first_token(other[:, -1:], cache)  # and for one
        if role == "first":
            mask = torch.ones_like(self._prompt)
            plain = self._model.generate(
                self._prompt, generation_config=self._settings, attention_mask=mask
            )
            return {"plain_tokens": self._new(plain)} | self._generate()
        if role == "restarted":
            times = self._time_with()
            return self._generate() | times
        report = self._generate()
        # Alternate, so that noise affects both.
        pairs = [(self._time_without(), self._time_with()) for _ in range(REPEATS)]
        without = [ms for ms, _ in pairs]
        with_store = [times["ttft_with_ms"] for _, times in pairs]
        return report | {
            "ttft_without_ms": statistics.median(without),
            "ttft_with_ms": statistics.median(with_store),
            "load_ms": statistics.median(times["load_ms"] for _, times in pairs),
            "samples_without_ms": without,
            "samples_with_ms": with_store,
        }

    def _empty(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    @torch.inference_mode()
    def _first_token(self, input_ids: torch.Tensor, cache: DynamicCache) -> None:
        self._model(input_ids, **as_argument(cache), logits_to_keep=1)

    def _time_without(self) -> float:
        start = time.perf_counter()
        self._first_token(self._prompt, self._empty())
        return 1e3 * (time.perf_counter() - start)

    def _time_with(self) -> dict[str, Any]:
        """Return the times, including the client's connection, and the tokens hit."""
        start = time.perf_counter()
        with Client(self._address, self._representation) as client:
            connector = TransformersConnector(client, self._model)
            cache, hit_tokens = connector.load(self._prompt)
            loaded = time.perf_counter()
            self._first_token(self._prompt[:, hit_tokens:], cache)
            times = {"load_ms": loaded - start, "ttft_with_ms": time.perf_counter() - start}
            tiers = dict(connector.stats().hit_tokens_by_tier)
        hits = {"hit_tokens": hit_tokens, "hit_tokens_by_tier": tiers}
        return {name: 1e3 * seconds for name, seconds in times.items()} | hits

    def _new(self, sequences: torch.Tensor) -> list[int]:
        return list(map(int, sequences[0, self._prompt.shape[1] :]))

    def _generate(self) -> dict[str, Any]:
        """Generate through the store, store new chunks durably, and report."""
        with Client(self._address, self._representation) as client:
            connector = TransformersConnector(client, self._model, durable=True)
            generation = connector.generate(self._prompt, self._settings)
            stats = connector.stats()
        return {
            "prompt_tokens": self._prompt.shape[1],
            "tokens": self._new(generation.output.sequences),
            "hit_tokens": stats.hit_tokens,
            "hit_tokens_by_tier": dict(stats.hit_tokens_by_tier),
            "errors": {**stats.load_errors, **stats.store_errors},
        }


if __name__ == "__main__":
    role, address, folder, prompt_tokens = sys.argv[1:]
    print(json.dumps(DemoEngine(address, folder, int(prompt_tokens)).run(role)))
