"""Time to first token of a prompt that only Redis holds, over a link, by codec, with its quality.

Redis runs in a network of its own behind a link of so many Gbit/s (Linux' tbf; needs root). The
server that reads is another than the one that stored, as on another node: it has nothing. Each
prompt is asked for once. The model is SmolLM2-135M (``make real-model``), in transformers, in the
float32 that it is installed in unless ``--dtype`` says otherwise.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from redis import Redis
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from bench.codecs.texts import held_out
from bench.lib.processes import serving_peer
from bench.lib.report import Report, parser_of, timed
from bench.lib.workload import connect, serving
from bench.real_model import FOLDER, why_missing
from kvstore.client.blend.gate import ShadowEval, compare
from kvstore.client.engines.transformers import TransformersConnector, representation_of
from kvstore.client.engines.transformers.cache import as_argument

LOSSLESS = "lossless"
CODECS = (LOSSLESS, "kvq:0", "kvq:2", "kvq:3")
PROMPTS, TOKENS = 7, 2048
HOST, GATEWAY, PORT = "10.99.8.1", "10.99.8.254", 6379
JUDGED = 64
"""Tokens behind a loaded prefix whose logits are compared."""
COMPILED_S = 30.0
"""Within that a server has measured its codecs."""


class Hits(NamedTuple):
    """Of one codec and link: seconds of each hit, bytes that Redis holds, what quality is left."""

    seconds: list[float]
    stored_bytes: int
    divergence: float
    agreement: float


@contextmanager
def redis_behind(gbits: int, folder: Path) -> Iterator[Redis]:
    """Run a Redis whose answers pass a link of *gbits*."""
    name, link = "kvbench", "kvbench0"
    inside = f"ip -n {name}"
    removes = (f"ip link del {link}", f"ip netns del {name}")
    with suppress(OSError):
        _run(*removes)  # of a run that was killed
    _run(f"ip netns add {name}")
    try:
        _run(
            f"ip link add {link} type veth peer name eth0 netns {name}",
            f"ip addr add {GATEWAY}/24 dev {link}",
            f"ip link set {link} up",
            f"{inside} addr add {HOST}/24 dev eth0",
            f"{inside} link set eth0 up",
            f"tc -n {name} qdisc add dev eth0 root "
            f"tbf rate {gbits}gbit burst {gbits * 128}kb latency 20ms",
        )
        command = (
            f"ip netns exec {name} redis-server --bind {HOST} --port {PORT} --protected-mode no "
            f"--save '' --dir {folder}"
        )
        with serving_peer(["sh", "-c", f"exec {command}"], [], folder / "redis.log"):
            client = Redis(HOST, PORT)
            until = time.monotonic() + 60.0
            while not _answers(client):
                if time.monotonic() > until:
                    raise TimeoutError("Redis does not answer")
                time.sleep(0.05)
            yield client
    finally:
        for words in removes:
            with suppress(OSError):
                _run(words)


def _answers(client: Redis) -> bool:
    with suppress(OSError, ConnectionError):
        return bool(client.ping())
    return False


def _run(*commands: str) -> None:
    for words in commands:
        done = subprocess.run(words.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{words}: {done.stderr.strip()}")


class Bench:
    """The model, and prompts that share nothing."""

    def __init__(self, dtype: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(FOLDER)
        dtype = getattr(torch, dtype)
        self.model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype)
        self.representation = representation_of(self.model, tokenizer)
        texts = chain(held_out("score"), held_out("calibrate"))
        ids = tokenizer("\n".join(texts), return_tensors="pt").input_ids
        self.prompts = [ids[:, at * TOKENS : (at + 1) * TOKENS] for at in range(PROMPTS)]
        if self.prompts[-1].shape[1] < TOKENS:
            raise ValueError(f"the texts are {ids.shape[1]} tokens, not {PROMPTS * TOKENS}")

    @contextmanager
    def connector(self, codec: str) -> Iterator[TransformersConnector]:
        """Run a server without anything in its memory, and connect to it."""
        flags = ("--cpu", "1GiB", "--tiers", "cpu,redis", "--redis", f"redis://{HOST}:{PORT}/0")
        with (
            serving(*flags, "--codec", f"redis={codec}") as (address, _),
            connect(address, self.representation, deadline_ms=60_000) as client,
        ):
            yield TransformersConnector(client, self.model, accuracy="bounded")

    def measure(self, codec: str, gbits: int) -> Hits:
        """Store the prompts by one server, and ask another for each."""
        with TemporaryDirectory() as folder, redis_behind(gbits, Path(folder)) as redis:
            with self.connector(codec) as writes:
                for ids in self.prompts:
                    writes.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
                _settle(redis)
            stored = int(redis.info("memory")["used_memory_dataset"])
            with self.connector(codec) as reads:
                time.sleep(COMPILED_S)
                seconds = [self._hit(reads, ids) for ids in self.prompts][1:]
            with self.connector(codec) as judges:
                judged = [self._judge(judges, ids) for ids in self.prompts[:3]]
        divergence = mean(one.divergence for one in judged)
        return Hits(seconds, stored, divergence, mean(one.agreement for one in judged))

    def _hit(self, connector: TransformersConnector, ids: torch.Tensor) -> float:
        """Return the seconds to the first token."""
        began = time.perf_counter()
        found = connector.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
        seconds = time.perf_counter() - began
        if found.hit_tokens != ids.shape[1] - 1:
            raise ValueError(f"{found.hit_tokens} tokens were loaded: {connector.stats()}")
        return seconds

    def _judge(self, connector: TransformersConnector, ids: torch.Tensor) -> ShadowEval:
        """Compare what the last tokens make of a loaded prefix with a full prefill."""
        cache, hit = connector.load(ids[:, :-JUDGED])
        wanted = self._logits(ids, DynamicCache(config=self.model.config))
        return compare(wanted, self._logits(ids[:, hit:], cache))

    def _logits(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        with torch.inference_mode():
            found = self.model(ids, **as_argument(cache), logits_to_keep=JUDGED)
        logits: torch.Tensor = found.logits[0]
        return logits

    def computed_s(self) -> float:
        """Return the best seconds to the first token without a store."""
        more = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
        works = [lambda ids=ids: self.model.generate(ids, **more) for ids in self.prompts[:3]]
        return min(map(timed, works))


def _settle(redis: Redis) -> None:
    """Wait until nothing more is written."""
    held = -1
    while held != (held := int(redis.info("stats")["total_net_input_bytes"]) // 100_000):
        time.sleep(1.5)


def measure(report: Report, bench: Bench, links: Sequence[int], codecs: Sequence[str]) -> None:
    """Add what a lossy hit takes of a lossless one's time, for each codec and link."""
    report.note("recompute", f"{bench.computed_s():.3f}", f"s to the first token of {TOKENS}")
    for gbits in links:
        found = {codec: bench.measure(codec, gbits) for codec in codecs}
        took_s = {codec: median(hits.seconds) for codec, hits in found.items()}
        for codec, hits in found.items():
            words = (
                f"s, {min(hits.seconds):.3f} to {max(hits.seconds):.3f}; "
                f"{hits.stored_bytes / 1e6 / PROMPTS:.1f} MB a prompt; "
                f"KL {hits.divergence:.4f}, agreement {hits.agreement:.3f}"
            )
            report.note(f"{codec}@{gbits}Gbps", f"{took_s[codec]:.3f}", words)
        for codec in codecs[1:]:
            ratio, against = took_s[codec] / took_s[codecs[0]], f"the same in {codecs[0]}"
            report.add(f"{codec}_vs_lossless@{gbits}", ratio, "time to first token", against)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--links", default="1,10", help="Gbit/s")
    parser.add_argument("--codecs", default=",".join(CODECS), help="the lossless one first")
    options = parser.parse_args(argv)
    report = Report("lossy_hits")
    codecs, links = options.codecs.split(","), list(map(int, options.links.split(",")))
    missing = why_missing()
    if missing is None and (os.geteuid() or not shutil.which("tc")):
        missing = "a link of its own needs root and Debian's iproute2"
    if missing:
        keys = [f"{codec}_vs_lossless@{gbits}" for gbits in links for codec in codecs[1:]]
        report.skip(keys, missing)
    else:
        measure(report, Bench(options.dtype), links, codecs)
    report.print(only_json=options.json)


if __name__ == "__main__":
    main()
