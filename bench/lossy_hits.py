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
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from redis import Redis
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from bench.codecs.texts import held_out
from bench.lib.report import Report, parser_of
from bench.real_model import FOLDER, why_missing

sys.path[:0] = ["src", "tests"]
from helpers.server_process import ServerProcess  # noqa: E402

from kvstore.client import Client, ClientOptions  # noqa: E402
from kvstore.client.blend.gate import ShadowEval, compare  # noqa: E402
from kvstore.client.engines.transformers import (  # noqa: E402
    TransformersConnector,
    representation_of,
)
from kvstore.client.engines.transformers.cache import as_argument  # noqa: E402

LOSSLESS = "lossless"
CODECS = (LOSSLESS, "kvq:0", "kvq:2", "kvq:3")
GBITS = (1, 10)
PROMPTS = 7
TOKENS = 2048
HOST, GATEWAY, PORT = "10.99.8.1", "10.99.8.254", 6379
JUDGED = 64
"""Tokens behind a loaded prefix whose logits are compared."""
SETTLE_S = 120.0
COMPILED_S = 30.0
"""Within that a server has compiled its codecs and measured them; until then numpy stands in."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Prompts and their tokens; the model's dtype; Gbit/s of the links."""

    tokens: int
    prompts: int
    dtype: str
    links: tuple[int, ...] = GBITS


@dataclass(frozen=True, slots=True)
class Hits:
    """Of one codec and link: seconds of each hit, bytes that Redis holds, what quality is left."""

    seconds: tuple[float, ...]
    stored_bytes: int
    divergence: float
    agreement: float


@contextmanager
def redis_behind(gbits: int, folder: Path) -> Iterator[Redis]:
    """Run a Redis whose answers pass a link of *gbits*."""
    name, link = "kvbench", "kvbench0"
    _remove(name, link)  # of a run that was killed
    _ip("netns", "add", name)
    try:
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("addr", "add", f"{GATEWAY}/24", "dev", link)
        _ip("link", "set", link, "up")
        for words in (f"addr add {HOST}/24 dev eth0", "link set eth0 up"):
            _ip("-n", name, *words.split())
        rate = f"tbf rate {gbits}gbit burst {gbits * 128}kb latency 20ms".split()
        _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *rate)
        server = subprocess.Popen(
            [
                *("ip", "netns", "exec", name, "redis-server", "--bind", HOST, "--save", ""),
                *("--port", str(PORT), "--protected-mode", "no", "--dir", str(folder)),
            ],
            stdout=subprocess.DEVNULL,
        )
        try:
            client = Redis(HOST, PORT)
            _wait(lambda: _answers(client))
            yield client
        finally:
            server.kill()
            server.wait()
    finally:
        _remove(name, link)


def _remove(name: str, link: str) -> None:
    for words in (("link", "del", link), ("netns", "del", name)):
        with suppress(OSError):
            _ip(*words)


def _answers(client: Redis) -> bool:
    with suppress(OSError, ConnectionError):
        return bool(client.ping())
    return False


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SETTLE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("Redis did not get there in time")
        time.sleep(0.05)


class Bench:
    """The model, and prompts of *tokens* that share nothing."""

    def __init__(self, sizes: Sizes) -> None:
        tokens, prompts = sizes.tokens, sizes.prompts
        tokenizer = AutoTokenizer.from_pretrained(FOLDER)
        dtype = getattr(torch, sizes.dtype)
        self.model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype)
        self.representation = representation_of(self.model, tokenizer)
        texts = chain(held_out("score"), held_out("calibrate"))
        ids = tokenizer("\n".join(texts), return_tensors="pt").input_ids
        self.prompts = [ids[:, at * tokens : (at + 1) * tokens] for at in range(prompts)]
        if self.prompts[-1].shape[1] < tokens:
            raise ValueError(f"the texts are {ids.shape[1]} tokens, not {prompts * tokens}")

    @contextmanager
    def connector(self, folder: Path, codec: str) -> Iterator[TransformersConnector]:
        """Run a server without anything in its memory, and connect to it."""
        folder.mkdir()
        server = ServerProcess(
            folder,
            *("--cpu", "1GiB", "--tiers", "cpu,redis"),
            *("--redis", f"redis://{HOST}:{PORT}/0", "--codec", f"redis={codec}"),
        )
        server.start()
        try:
            options = ClientOptions("auto", 256, 60_000)
            with Client(server.address, self.representation, options) as client:
                yield TransformersConnector(client, self.model, accuracy="bounded")
        finally:
            server.kill()

    def first_token(self, connector: TransformersConnector, ids: torch.Tensor) -> tuple[float, int]:
        """Return the seconds to the first token, and how many were loaded."""
        began = time.perf_counter()
        found = connector.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
        return time.perf_counter() - began, found.hit_tokens

    def measure(self, codec: str, gbits: int, folder: Path) -> Hits:
        """Store the prompts by one server, and ask another for each."""
        with redis_behind(gbits, folder) as redis:
            with self.connector(folder / "writes", codec) as writes:
                for ids in self.prompts:
                    self.first_token(writes, ids)
                _settle(redis)
            stored = int(redis.info("memory")["used_memory_dataset"])
            with self.connector(folder / "reads", codec) as reads:
                time.sleep(COMPILED_S)
                seconds = [self._hit(reads, ids) for ids in self.prompts][1:]
            with self.connector(folder / "judges", codec) as judges:
                judged = [self._judge(judges, ids) for ids in self.prompts[:3]]
        return Hits(
            tuple(seconds), stored,
            mean(one.divergence for one in judged), mean(one.agreement for one in judged),
        )  # fmt: skip

    def _hit(self, connector: TransformersConnector, ids: torch.Tensor) -> float:
        seconds, hit = self.first_token(connector, ids)
        if hit != ids.shape[1] - 1:
            raise ValueError(f"{hit} tokens were loaded, not all: {connector.stats()}")
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


def _settle(redis: Redis) -> None:
    """Wait until nothing more is written."""
    held = -1
    while held != (held := int(redis.info("stats")["total_net_input_bytes"]) // 100_000):
        time.sleep(1.5)


def measure(report: Report, sizes: Sizes, codecs: Sequence[str]) -> None:
    """Add a row for each codec and link; and what a lossy hit takes of a lossless one's time."""
    bench = Bench(sizes)
    recompute = min(_computed(bench, ids) for ids in bench.prompts[:3])
    what = f"s to the first token of {sizes.tokens} tokens, {sizes.dtype}"
    report.note("recompute", f"{recompute:.3f}", what)
    for gbits in sizes.links:
        found = {}
        for codec in codecs:
            with tempfile.TemporaryDirectory() as there:
                hits = found[codec] = bench.measure(codec, gbits, Path(there))
            report.note(
                f"{codec}@{gbits}Gbps", f"{median(hits.seconds):.3f}",
                f"s, {min(hits.seconds):.3f} to {max(hits.seconds):.3f}; "
                f"{hits.stored_bytes / 1e6 / sizes.prompts:.1f} MB a prompt; "
                f"KL {hits.divergence:.4f}, agreement {hits.agreement:.3f}",
            )  # fmt: skip
        for codec in codecs[1:]:
            ratio = median(found[codec].seconds) / median(found[codecs[0]].seconds)
            report.add(
                f"{codec}_vs_lossless@{gbits}", ratio, "time to first token",
                f"the same in {codecs[0]}",
            )  # fmt: skip


def _computed(bench: Bench, ids: torch.Tensor) -> float:
    began = time.perf_counter()
    bench.model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
    return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--links", default="1,10", help="Gbit/s")
    parser.add_argument("--codecs", default=",".join(CODECS), help="the lossless one first")
    options = parser.parse_args(argv)
    report = Report("lossy_hits")
    missing = why_missing()
    if missing is None and (os.geteuid() or not shutil.which("tc")):
        missing = "a link of its own needs root and Debian's iproute2"
    codecs = options.codecs.split(",")
    links = tuple(map(int, options.links.split(",")))
    sizes = Sizes(options.tokens, options.prompts, options.dtype, links)
    if missing:
        keys = [f"{codec}_vs_lossless@{gbits}" for gbits in links for codec in codecs[1:]]
        report.skip(keys, missing)
    else:
        measure(report, sizes, codecs)
    report.print(only_json=options.json)


if __name__ == "__main__":
    main()
