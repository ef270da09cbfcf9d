"""Time to first token of a prompt that only Redis holds, over a slow link, by codec, and quality.

Redis' replies pass a link of some Gbit/s. The server that reads is not the one that stored, as on
another node, so its memory is empty. Each prompt is requested once. The model is SmolLM2-135M
(``make real-model``) in float32, in transformers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from redis import Redis
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from bench.lib.report import Report, parser_of, timed
from bench.lib.traces import held_out
from bench.lib.workload import joined, redis_server, slow_link
from bench.real_model import FOLDER, why_missing
from kvstore.client.blend.gate import ShadowEval, compare
from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.client.engines.transformers.cache import as_argument

CODECS = ("lossless", "kvq:0", "kvq:2", "kvq:3")
PROMPTS, TOKENS = 7, 2048
JUDGED = 64
"""Tokens after a loaded prefix whose logits are compared."""
COMPILED_S = 30.0
"""A server has measured its codecs by then."""
ONE: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}


class Hits(NamedTuple):
    """Results of one codec and link: seconds of each hit, bytes in Redis, quality."""

    seconds: list[float]
    stored_bytes: int
    divergence: float
    agreement: float


class Bench:
    """The model, and prompts without a common prefix."""

    def __init__(self) -> None:
        tokenizer = AutoTokenizer.from_pretrained(FOLDER)
        self.model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
        self.representation = representation_of(self.model, tokenizer)
        texts = chain(held_out("score"), held_out("calibrate"))
        ids = tokenizer("\n".join(texts), return_tensors="pt").input_ids
        self.prompts = [ids[:, at * TOKENS : (at + 1) * TOKENS] for at in range(PROMPTS)]
        if self.prompts[-1].shape[1] < TOKENS:
            raise ValueError(f"the texts have {ids.shape[1]} tokens, not {PROMPTS * TOKENS}")

    @contextmanager
    def connector(self, codec: str, port: int) -> Iterator[TransformersConnector]:
        flags = ("--cpu", "1GiB", "--tiers", "cpu,redis", "--redis", f"redis://127.0.0.1:{port}/0")
        coded, model = ("--codec", f"redis={codec}"), self.representation
        with joined(*flags, *coded, model=model, deadline_ms=60_000) as client:
            yield TransformersConnector(client, self.model, accuracy="bounded")

    def measure(self, codec: str, gbits: int) -> Hits:
        with redis_server() as near, slow_link(near, gbits) as port, Redis(port=near) as redis:
            with self.connector(codec, port) as writer:
                for ids in self.prompts:
                    writer.generate(ids, **ONE)
                _settle(redis)
            stored = int(redis.info("memory")["used_memory_dataset"])
            with self.connector(codec, port) as reader:
                time.sleep(COMPILED_S)
                seconds = [self._hit(reader, ids) for ids in self.prompts][1:]
            with self.connector(codec, port) as judge:
                judged = [self._judge(judge, ids) for ids in self.prompts[:3]]
        divergence = mean(one.divergence for one in judged)
        return Hits(seconds, stored, divergence, mean(one.agreement for one in judged))

    def _hit(self, connector: TransformersConnector, ids: torch.Tensor) -> float:
        """Return the seconds to the first token."""
        began = time.perf_counter()
        found = connector.generate(ids, **ONE)
        seconds = time.perf_counter() - began
        if found.hit_tokens != ids.shape[1] - 1:
            raise ValueError(f"{found.hit_tokens} tokens were hit: {connector.stats()}")
        return seconds

    def _judge(self, connector: TransformersConnector, ids: torch.Tensor) -> ShadowEval:
        cache, hit = connector.load(ids[:, :-JUDGED])
        wanted = self._logits(ids, DynamicCache(config=self.model.config))
        return compare(wanted, self._logits(ids[:, hit:], cache))

    def _logits(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        with torch.inference_mode():
            found = self.model(ids, **as_argument(cache), logits_to_keep=JUDGED)
        logits: torch.Tensor = found.logits[0]
        return logits


def _settle(redis: Redis) -> None:
    held = -1
    while held != (held := int(redis.info("stats")["total_net_input_bytes"]) // 100_000):
        time.sleep(1.5)


def measure(report: Report, bench: Bench, links: Sequence[int], codecs: Sequence[str]) -> None:
    """Add the time of a lossy hit over that of a lossless one, for each codec and link."""
    computed_s = min(timed(partial(bench.model.generate, ids, **ONE)) for ids in bench.prompts[:3])
    report.note("recompute", f"{computed_s:.3f}", f"s to the first token of {TOKENS}")
    for gbits in links:
        found = {codec: bench.measure(codec, gbits) for codec in codecs}
        ttft_s = {codec: median(hits.seconds) for codec, hits in found.items()}
        for codec, hits in found.items():
            words = (
                f"s, {min(hits.seconds):.3f} to {max(hits.seconds):.3f}; "
                f"{hits.stored_bytes / 1e6 / PROMPTS:.1f} MB a prompt; "
                f"KL {hits.divergence:.4f}, agreement {hits.agreement:.3f}"
            )
            report.note(f"{codec}@{gbits}Gbps", f"{ttft_s[codec]:.3f}", words)
        for codec in codecs[1:]:
            ratio, against = ttft_s[codec] / ttft_s[codecs[0]], f"the same in {codecs[0]}"
            report.add(f"{codec}_vs_lossless@{gbits}", ratio, "time to first token", against)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--links", default="1,10", help="Gbit/s")
    parser.add_argument("--codecs", default=",".join(CODECS), help="the lossless one first")
    options = parser.parse_args(argv)
    report = Report("lossy_hits")
    codecs, links = options.codecs.split(","), list(map(int, options.links.split(",")))
    if missing := why_missing():
        keys = [f"{codec}_vs_lossless@{gbits}" for gbits in links for codec in codecs[1:]]
        report.skip(keys, missing)
    else:
        measure(report, Bench(), links, codecs)
    report.print(only_json=options.json)


if __name__ == "__main__":
    main()
