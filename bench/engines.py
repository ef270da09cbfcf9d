"""A real vLLM on this machine's CPU: without a store, with ours, and with vLLM's own offloading.

The same small model in a process each, asked in turns, medians compared. Needs the environment of
``make vllm-env``. For each byte of KV a small model computes far less than a large one, so what a
store adds weighs more here than anywhere else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TypeAlias

import numpy as np

from bench.report import Report, parse_flags
from bench.vllm_engine import PYTHON, EngineProcess, make_model
from kvstore.server.config import load_config
from kvstore.server.node import Node

MODEL_SCALE = 2
PROMPT_TOKENS = 1536
CHUNK_TOKENS = 128
ROUNDS = 12
WARM_UP = 2
"""Rounds that do not count: first requests wait for what is made once."""

BATCH, BATCH_TOKENS, GENERATED = 8, 512, 64
BATCH_ROUNDS = 6
KEYS = (
    "tokens_identical", "ttft_hit_vs_recompute", "ttft_hit_vs_vllm_offload", "miss_overhead",
    "store_overhead",
)  # fmt: skip
LMCACHE_KEYS = ("ttft_hit_vs_lmcache",)

Prompt: TypeAlias = list[int]
Times: TypeAlias = dict[str, list[float]]


def prompt(seed: int, tokens: int) -> Prompt:
    """Return random byte tokens that no other seed has."""
    return [int(one) for one in np.random.default_rng(seed).integers(3, 250, tokens)]


def first_token_s(engine: EngineProcess, one: Prompt, cached: int = 0) -> float:
    """Return the time to the first token. Raises RuntimeError unless *cached* were loaded."""
    (answer,) = engine.generate(one, max_tokens=1)
    if answer["cached"] < cached or (not cached and answer["cached"]):
        raise RuntimeError(f"{answer['cached']} tokens were cached, not {cached}")
    return float(answer["took_s"])


def compare_first_tokens(
    report: Report, plain: EngineProcess, ours: EngineProcess, offload: EngineProcess
) -> None:
    """Prompts that nobody knows, then the same ones from each store."""
    times: Times = {"computed": [], "miss": [], "hit": [], "offload": []}
    whole = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
    for number in range(WARM_UP + ROUNDS):
        one = prompt(number, PROMPT_TOKENS)
        times["computed"].append(first_token_s(plain, one))
        plain.forget()
        times["miss"].append(first_token_s(ours, one))
        ours.fresh()
        times["hit"].append(first_token_s(ours, one, whole - 1))
        ours.forget()
        offload.generate(one, max_tokens=1)
        offload.forget()
        times["offload"].append(first_token_s(offload, one, whole - CHUNK_TOKENS))
        offload.forget()
    ms = {name: f"{1e3 * median(one[WARM_UP:]):.1f} ms" for name, one in times.items()}
    hit = f"a hit, {ms['hit']}"
    report.add(KEYS[1], ratio(times, "hit", "computed", WARM_UP), hit, ms["computed"])
    report.add(KEYS[2], ratio(times, "hit", "offload", WARM_UP), hit, ms["offload"])
    miss = ratio(times, "miss", "computed", WARM_UP) - 1
    report.add(KEYS[3], miss, f"a miss, {ms['miss']}", ms["computed"])


def ratio(times: Times, ours: str, theirs: str, warm_up: int) -> float:
    """Return the median of the rounds' ratios: what is slow for a while is slow for both."""
    pairs = zip(times[ours][warm_up:], times[theirs][warm_up:], strict=True)
    return median(one / other for one, other in pairs)


def compare_batches(report: Report, plain: EngineProcess, ours: EngineProcess) -> None:
    """Batches that nobody knows, stored by ours while they run; and whether tokens are the same."""
    times: Times = {"plain": [], "ours": []}
    same = True
    for number in range(1 + BATCH_ROUNDS):
        seeds = range(1000 + BATCH * number, 1000 + BATCH * (number + 1))
        prompts = [prompt(seed, BATCH_TOKENS) for seed in seeds]
        answers = [engine.generate(*prompts, max_tokens=GENERATED) for engine in (plain, ours)]
        ours.fresh()
        plain.forget()
        answers.append(ours.generate(*prompts, max_tokens=GENERATED))
        ours.forget()
        same &= all(
            [a["tokens"] for a in one] == [a["tokens"] for a in answers[0]] for one in answers
        )
        times["plain"].append(answers[0][0]["took_s"])
        times["ours"].append(answers[1][0]["took_s"])
    took = {name: median(one[1:]) for name, one in times.items()}
    overhead = ratio(times, "ours", "plain", 1) - 1
    report.add(KEYS[0], float(same), f"{BATCH_ROUNDS + 1} batches, computed and loaded", "no store")
    report.add(
        KEYS[4], overhead,
        f"{BATCH} prompts, {took['ours']:.2f} s", f"{took['plain']:.2f} s",
    )  # fmt: skip


def measure(report: Report, folder: Path) -> None:
    """Start a server and three engines, and compare them."""
    with ExitStack() as stack:
        node = Node(load_config([
            "--listen", "127.0.0.1:0", "--socket", str(folder / "s.sock"), "--tiers", "cpu",
            "--cpu", "512MiB", "--log-level", "error",
        ]))  # fmt: skip
        node.start()
        stack.callback(node.stop, 5.0)
        make_model(folder / "model", MODEL_SCALE)

        def start(name: str, **settings: object) -> EngineProcess:
            engine = EngineProcess(folder / "model", folder / f"{name}.log", **settings)  # type: ignore[arg-type]
            stack.callback(engine.close)
            return engine

        store = {"address": f"127.0.0.1:{node.port}", "chunk_tokens": CHUNK_TOKENS}
        extra = {
            "spec_name": "CpuTieringSpec", "spec_module_path": "bench.vllm_offloading",
            "cpu_bytes_to_use": 512 << 20, "secondary_tiers": [],
            "block_size": CHUNK_TOKENS,
        }  # fmt: skip
        theirs = {
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }  # fmt: skip
        plain, ours = start("plain"), start("ours", store={**store, "lookup_deadline_ms": 2000})
        offload = start("offload", kv_transfer_config=theirs)
        compare_first_tokens(report, plain, ours, offload)
        compare_batches(report, plain, ours)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it all; return the exit status."""
    only_json = parse_flags(argv, __doc__ or "")
    report = Report("engines")
    if PYTHON.exists():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o700)
            measure(report, Path(folder))
    else:
        report.skip(KEYS, "no build/vllm: run make vllm-env")
    report.skip(LMCACHE_KEYS, "its connector is not run by this benchmark yet")
    report.print(only_json=only_json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
