"""One engine process of the demo: ``python -m kvstore.cli.demo_engine ROLE ADDRESS MODEL N``.

Computes in float32, so that the tokens can be compared to the last bit that matters, and
prints what it saw as one line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

from kvstore.cli.demo_prompt import prompt_tokens
from kvstore.client.client import Client
from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.client.engines.transformers.cache import as_argument

NEW_TOKENS = 32
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """One first token with the prefix loaded: milliseconds, of which the load's, and its hits."""

    ttft_ms: float
    load_ms: float
    hit_tokens_by_tier: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What one engine process saw. Times are medians, 0 where the role measures none.

    ``plain_tokens`` were generated without the store, ``tokens`` with it.
    """

    role: str
    prompt_tokens: int
    tokens: Sequence[int]
    hit_tokens: int
    hit_tokens_by_tier: Mapping[str, int]
    stored_chunks: int
    errors: Mapping[str, int]
    plain_tokens: Sequence[int] = ()
    ttft_without_ms: float = 0.0
    ttft_with_ms: float = 0.0
    load_ms: float = 0.0
    samples_without_ms: Sequence[float] = ()
    samples_with_ms: Sequence[float] = ()


class DemoEngine:
    """A model with its prompt; each use of the store opens a client of its own."""

    def __init__(self, address: str, folder: str, prompt_length: int) -> None:
        self._address = address
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._representation = representation_of(self._model, tokenizer)
        self.prompt = torch.tensor([prompt_tokens(tokenizer, prompt_length)])
        self._settings = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )

    def warm_up(self) -> None:
        """Run the model's code over other tokens, whole and by one token."""
        cache = DynamicCache(config=self._model.config)
        other = self.prompt.flip(1)
        self._first_token(other[:, :-1], cache)
        self._first_token(other[:, -1:], cache)

    def _first_token(self, input_ids: torch.Tensor, cache: DynamicCache) -> int:
        with torch.inference_mode():
            output = self._model(input_ids, **as_argument(cache), logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    def time_without(self) -> float:
        """Return the milliseconds from the prompt to its first token, all of it computed."""
        start = time.perf_counter()
        self._first_token(self.prompt, DynamicCache(config=self._model.config))
        return 1e3 * (time.perf_counter() - start)

    def time_with(self) -> Sample:
        """Time the first token with the prefix loaded, from before the client connects."""
        start = time.perf_counter()
        with Client(self._address, self._representation) as client:
            connector = TransformersConnector(client, self._model)
            cache, hit_tokens = connector.load(self.prompt)
            loaded = time.perf_counter()
            self._first_token(self.prompt[:, hit_tokens:], cache)
            end = time.perf_counter()
            tiers = connector.stats().hit_tokens_by_tier
        return Sample(1e3 * (end - start), 1e3 * (loaded - start), tiers)

    def generate_plain(self) -> list[int]:
        """Return the tokens that the model generates by itself."""
        model: Any = self._model
        output = model.generate(
            self.prompt,
            generation_config=self._settings,
            attention_mask=torch.ones_like(self.prompt),
        )
        tokens: list[int] = output[0, self.prompt.shape[1] :].tolist()
        return tokens

    def generate(self, role: str) -> EngineReport:
        """Generate through the store, leave there durably what it lacks, and report."""
        with Client(self._address, self._representation) as client:
            connector = TransformersConnector(client, self._model, durable=True)
            generation = connector.generate(self.prompt, self._settings)
            stats = connector.stats()
        return EngineReport(
            role=role,
            prompt_tokens=self.prompt.shape[1],
            tokens=generation.output.sequences[0, self.prompt.shape[1] :].tolist(),
            hit_tokens=stats.hit_tokens,
            hit_tokens_by_tier=stats.hit_tokens_by_tier,
            stored_chunks=stats.stored_chunks,
            errors={**stats.load_errors, **stats.store_errors},
        )


def first(engine: DemoEngine) -> EngineReport:
    """Compute the prompt, without the store and then through it, which stores it."""
    plain_tokens = engine.generate_plain()
    return replace(engine.generate("first"), plain_tokens=plain_tokens)


def second(engine: DemoEngine) -> EngineReport:
    """Load what another process computed; time both ways in turn, so that noise meets both."""
    report = engine.generate("second")
    without: list[float] = []
    samples: list[Sample] = []
    for _ in range(REPEATS):
        without.append(engine.time_without())
        samples.append(engine.time_with())
    return replace(
        report,
        ttft_without_ms=statistics.median(without),
        ttft_with_ms=statistics.median(sample.ttft_ms for sample in samples),
        load_ms=statistics.median(sample.load_ms for sample in samples),
        samples_without_ms=without,
        samples_with_ms=[sample.ttft_ms for sample in samples],
    )


def restarted(engine: DemoEngine) -> EngineReport:
    """Load what is on disk since before the server was killed; only the first load is timed."""
    sample = engine.time_with()
    return replace(
        engine.generate("restarted"),
        hit_tokens=sum(sample.hit_tokens_by_tier.values()),
        hit_tokens_by_tier=sample.hit_tokens_by_tier,
        ttft_with_ms=sample.ttft_ms,
        load_ms=sample.load_ms,
    )


ROLES: Mapping[str, Callable[[DemoEngine], EngineReport]] = {
    "first": first,
    "second": second,
    "restarted": restarted,
}


def main(argv: Sequence[str]) -> None:
    """Play the role in *argv* and print its report."""
    role, address, folder, prompt_length = argv
    engine = DemoEngine(address, folder, int(prompt_length))
    engine.warm_up()
    print(json.dumps(asdict(ROLES[role](engine))))


if __name__ == "__main__":
    main(sys.argv[1:])
