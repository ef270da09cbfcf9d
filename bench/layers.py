"""Time to the first token over a slow link: a prefix loaded whole against layer by layer.

A real language model (``make real-model``) in bfloat16 on one thread computes the last tokens of a
prompt whose prefix is stored. The server and the link are processes of their own. Both ways run in
turns; medians.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import Mock

from bench.lib.report import Report, run_parts
from bench.lib.workload import connect, serving, slow_link
from bench.real_model import FOLDER, why_missing
from kvstore.client import Client

STORED_TOKENS, CHUNK_TOKENS = 2048, 256
SUFFIX_TOKENS = (1, 64, 512)
GBPS = (1, 10)
ROUNDS = 5
KEYS = [f"ttft_{gbps}gbps_{left}" for gbps in GBPS for left in SUFFIX_TOKENS]


class Engine:
    """The model, and prompts of random tokens."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from kvstore.client.engines.transformers import TransformersConnector, representation_of

        torch.set_num_threads(1)
        self.connector, self._torch = TransformersConnector, torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16)
        self.identity = representation_of(self.model, AutoTokenizer.from_pretrained(FOLDER))
        self._draw = torch.Generator().manual_seed(1)
        self.prefix = self._tokens(STORED_TOKENS)
        self._first_token_s = 0.0
        self.model.lm_head.register_forward_hook(self._record_first_token)

    def _tokens(self, count: int) -> Any:
        return self._torch.randint(3, 40_000, (1, count), generator=self._draw)

    def _record_first_token(self, *_: object) -> None:
        self._first_token_s = self._first_token_s or time.perf_counter()

    def prompt(self, left: int) -> Any:
        return self._torch.cat([self.prefix, self._tokens(left)], 1)

    def generate(self, connector: Any, prompt: Any) -> tuple[float, int]:
        """Return the seconds to the first token, and the token; then delete the new chunks."""
        self._first_token_s, began_s = 0.0, time.perf_counter()
        found = connector.generate(prompt, max_new_tokens=1, do_sample=False, pad_token_id=0)
        assert found.hit_tokens == STORED_TOKENS, connector.stats()
        keys = connector.client.keys(prompt[0].tolist())
        connector.client.delete(keys=keys[STORED_TOKENS // CHUNK_TOKENS :])
        return self._first_token_s - began_s, int(found.output.sequences[0, -1])


def measure_link(report: Report, engine: Engine, client: Client, gbps: int) -> bool:
    """Measure over one link; return whether both ways gave the same tokens."""
    is_same = True
    by_layer = Mock(wraps=client.get_chunk_layers)
    client.get_chunk_layers = by_layer  # type: ignore[method-assign]
    layered = engine.connector(client, engine.model)
    for _ in range(2):  # measures the link and the model
        engine.generate(layered, engine.prompt(max(SUFFIX_TOKENS)))
    for left in SUFFIX_TOKENS:
        times: list[tuple[float, float]] = []
        by_layer.reset_mock()
        for number in range(ROUNDS):
            # A connector without measurements loads whole.
            prompt, whole = engine.prompt(left), engine.connector(client, engine.model)
            turn = -1 if number % 2 else 1
            one, other = [engine.generate(side, prompt) for side in (whole, layered)[::turn]][
                ::turn
            ]
            is_same &= one[1] == other[1]
            times.append((one[0], other[0]))
        whole_s, layered_s = (median(each) for each in zip(*times, strict=True))
        text = f"{1000 * layered_s:.0f} ms, {by_layer.call_count} of {ROUNDS} layer by layer"
        against = f"loaded whole {1000 * whole_s:.0f} ms"
        report.add(f"ttft_{gbps}gbps_{left}", layered_s / whole_s, text, against)
    return is_same


def measure(report: Report, _folder: Path) -> None:
    if (why := why_missing()) is not None:
        report.skip([*KEYS, "same_tokens"], why)
        return
    engine, is_same = Engine(), True
    options = {"transport": "grpc", "chunk_tokens": CHUNK_TOKENS, "deadline_ms": 60_000}
    with serving("--cpu", "512MiB", "--tiers", "cpu") as (address, _):
        with connect(address, engine.identity, **options) as client:
            one = engine.connector(client, engine.model)
            one.generate(engine.prefix, max_new_tokens=1, pad_token_id=0)
        for gbps in GBPS:
            with (
                slow_link(int(address.rpartition(":")[2]), gbps) as port,
                connect(f"127.0.0.1:{port}", engine.identity, **options) as client,
            ):
                is_same &= measure_link(report, engine, client, gbps)
    report.add("same_tokens", float(is_same), "both ways gave the same tokens", "bar 1")


def main(argv: Sequence[str] | None = None) -> None:
    run_parts("layers", {"ttft": measure}, argv, __doc__)


if __name__ == "__main__":
    main()
