"""A real vLLM on one CUDA device: ``python -m bench.engines_gpu [--json] [--lengths 8192,32768]``.

Time to first token of prompts that are computed, that come from our store's tiers and from vLLM's
own offloading; decoding with stores and without. Random weights; one engine at a time, in a
process of its own. Without a CUDA device or vLLM it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from bench.gpu import has_cuda
from bench.lib import ROOT
from bench.lib.report import Report, parser_of

HEAD_DIM, KV_HEADS, VOCABULARY = 128, 8, 32000
SIZES = {
    # hidden, intermediate, layers, heads
    "tiny": (512, 1024, 2, 4),  # for a CPU
    "small": (2048, 5632, 24, 16),  # 1.2 B parameters, 96 KiB of KV a token
    "8b": (4096, 14336, 32, 32),  # Llama 3's 8 B, 128 KiB of KV a token
}
CHUNK_TOKENS = 256
WARM_UP_TOKENS = 4096
DECODE_REQUESTS, DECODE_ROUNDS = 8, 8
"""The first round warms up."""
DECODE_PROMPT, DECODE_FIRST, DECODE_STEPS = 257, 8, 512
"""Tokens of a prompt, steps that are not timed, and steps that are."""
DECODE_CHUNKS = (DECODE_PROMPT + DECODE_FIRST + DECODE_STEPS - 1) // CHUNK_TOKENS


def prompt(tokens: int, seed: int) -> list[int]:
    """Return tokens of noise."""
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(tokens)]


def token_bytes(size: str) -> int:
    """Bytes of KV of a token, in bfloat16."""
    _, _, layers, heads = SIZES[size]
    return 2 * 2 * layers * min(KV_HEADS, heads) * HEAD_DIM


def room_bytes(size: str, lengths: Sequence[int]) -> int:
    """Bytes that hold all that one engine stores, and half as much again."""
    decoded = DECODE_REQUESTS * DECODE_ROUNDS * (DECODE_PROMPT + DECODE_FIRST + DECODE_STEPS)
    tokens = sum(lengths) + min(lengths) + 2 * WARM_UP_TOKENS + decoded
    return tokens * token_bytes(size) * 3 // 2 + (512 << 20)


def model_bytes(size: str) -> int:
    """Bytes of a model's weights, norms aside."""
    hidden, inner, layers, heads = SIZES[size]
    attention = 2 * hidden * HEAD_DIM * (heads + min(KV_HEADS, heads))
    return 2 * (2 * VOCABULARY * hidden + layers * (attention + 3 * hidden * inner))


NONE, KVSTORE, OFFLOADING = "none", "kvstore", "offloading"
DECODE, RECOMPUTE, OFFLOAD, TOKENS = KEYS = (
    "decode_with_store", "ttft_hit_vs_recompute", "ttft_hit_vs_offload", "tokens_identical",
)  # fmt: skip
Result: TypeAlias = Mapping[str, Any]
Row: TypeAlias = tuple[float, str, str]


class NoValueError(Exception):
    """Why a key has no value."""


class Summary:
    """The values of a run. ``ours`` is the engine whose hits count; others are in the table.

    Each raises NoValueError where there is none.
    """

    def __init__(self, results: Mapping[str, Result], failed: Mapping[str, str], ours: str) -> None:
        self._results, self._failed, self._ours = results, failed, ours

    def _result(self, name: str) -> Result:
        if name not in self._results:
            raise NoValueError(f"{name}: {self._failed.get(name, 'not run')}")
        return self._results[name]

    def _times(self, name: str) -> dict[int, float]:
        """Return the median ms of each length: of full hits, or computed without a store."""
        found = {}
        for run in self._result(name)["prompts"]:
            share = share_of(run)
            if share != (0.0 if name == NONE else 1.0):
                raise NoValueError(f"{name}: hit share {share:.2f} at {run['tokens']} tokens")
            found[run["tokens"]] = median(run["hit_ms"])
        return found

    def hit_vs(self, theirs: str) -> Row:
        """Return the ratio at the greatest length, and both times."""
        ours, other = self._times(self._ours), self._times(theirs)
        tokens = max(ours)
        against = f"{theirs}: {other[tokens]:.1f} ms"
        return ours[tokens] / other[tokens], f"{ours[tokens]:.1f} ms at {tokens} tokens", against

    def decode(self) -> Row:
        """Return the time of a step with stores over that without, and both."""
        with_store = self._result(self._ours)
        stored = with_store["decode_stored"]
        wanted = DECODE_REQUESTS * DECODE_ROUNDS * DECODE_CHUNKS
        if stored != wanted:
            raise NoValueError(f"{stored} of {wanted} chunks were stored while decoding")
        ours, plain = (median(one["decode_ms"]) for one in (with_store, self._result(NONE)))
        return ours / plain, f"{ours:.3f} ms a step, {stored} chunks stored", f"{plain:.3f} ms"

    def tokens(self) -> Row:
        """Return whether full hits gave what the engine's own cache gave, in all engines."""
        runs = [(name, run) for name, one in self._results.items() for run in one["prompts"]]
        controls = [run["control_apart"] for _, run in runs if "control_apart" in run]
        if not controls or 0.0 in controls:
            raise NoValueError("the control, whose KV is another, did not differ")
        plain = {run["tokens"]: run["own_tokens"] for run in self._result(NONE)["prompts"]}
        # Where part was computed, that gives other tokens now and then.
        whole = [(name, run) for name, run in runs if name == NONE or share_of(run) == 1.0]
        wrong = [
            f"{name} at {run['tokens']}"
            for name, run in whole
            if not run["hit_tokens"] == run["own_tokens"] == plain[run["tokens"]]
        ]
        compared = sum(name != NONE for name, _ in whole)
        if not compared:
            raise NoValueError("there was no full hit")
        text = f"others: {', '.join(wrong)}" if wrong else f"{compared} full hits"
        return float(not wrong), text, "vLLM's own cache, and no store"


def share_of(run: Mapping[str, Any]) -> float:
    """Return the least share of a prompt's whole chunks that was not computed."""
    return float(min(run["cached"]) / run["tokens"])


def add_notes(report: Report, name: str, result: Result) -> None:
    """Add what one engine measured to the table."""
    for run in result["prompts"]:
        times = ", ".join(f"{ms:.1f}" for ms in run["hit_ms"])
        parts = [f"ms: {times}; cold {run['cold_ms']:.1f}", f"hit share {share_of(run):.2f}"]
        if run["filled"]:
            parts.append(f"{run['filled'][0] / run['tokens']:.2f} stored at once")
        parts.append(f"{median(run['load_ms']):.1f} of it loading")
        parts.append(f"log probabilities {run['apart']:.4f} apart (-1: other tokens)")
        figure = f"{median(run['hit_ms']):.1f}"
        report.note(f"{name} {run['tokens']}", figure, "; ".join(parts))
    if result["decode_ms"]:
        stored = f"{result['decode_stored']} chunks stored, {result['dropped']} dropped in all"
        report.note(f"{name} decode", f"{median(result['decode_ms']):.3f}", f"ms a step; {stored}")


def summarize(
    report: Report, results: Mapping[str, Result], failed: Mapping[str, str], ours: str
) -> None:
    """Add all values that can be had, and say why others cannot."""
    for name, result in results.items():
        add_notes(report, name, result)
    for name, why in failed.items():
        report.note(name, "failed", why)
    summary = Summary(results, failed, ours)
    for key, work in (
        (DECODE, summary.decode),
        (RECOMPUTE, lambda: summary.hit_vs(NONE)),
        (OFFLOAD, lambda: summary.hit_vs(OFFLOADING)),
        (TOKENS, summary.tokens),
    ):
        try:
            report.add(key, *work())
        except NoValueError as error:
            report.skip([key], str(error))


TIERS = ("cpu", "gpu,cpu", "cpu,disk")
LEAST_S = 60.0
"""What an engine needs at least: with less left of the budget it is not started."""
SHARED_MEMORY = Path("/dev/shm")
_ENVIRONMENT = (
    # In one process: what the connector says can be read, and nothing is started twice.
    "VLLM_ENABLE_V1_MULTIPROCESSING=0", "VLLM_USE_FLASHINFER_SAMPLER=0", "VLLM_NO_USAGE_STATS=1",
    "VLLM_LOGGING_LEVEL=WARNING", "HF_HUB_OFFLINE=1",
)  # fmt: skip
_ON_CPU = (
    "VLLM_CPU_OMP_THREADS_BIND=nobind", "VLLM_CPU_KVCACHE_SPACE=1", "OMP_NUM_THREADS=1",
    "TORCH_COMPILE_DISABLE=1",
)  # fmt: skip


def _lengths(text: str) -> tuple[int, ...]:
    found = tuple(sorted({int(one) for one in text.split(",")}))
    if any(one < 1024 or one % CHUNK_TOKENS for one in found):
        raise argparse.ArgumentTypeError(f"give multiples of {CHUNK_TOKENS} from 1024 on")
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. ``lengths``: tokens of prompts, each of which has one more."""

    lengths: tuple[int, ...] = (8192, 32768)
    size: str = "small"
    tiers: tuple[str, ...] = TIERS
    device: str = "cuda"
    backend: str = ""
    budget_s: float = 540.0
    only_json: bool = False

    @classmethod
    def parse(cls, argv: Sequence[str] | None) -> Plan:
        """Return what the flags say."""
        parser, plan = parser_of(__doc__), cls()
        parser.add_argument("--lengths", type=_lengths, default=plan.lengths, help="of prompts")
        parser.add_argument("--model-size", default=plan.size, choices=SIZES)
        parser.add_argument("--tiers", action="append", choices=TIERS, help="may be repeated")
        parser.add_argument("--backend", default="", help="vLLM's attention backend")
        parser.add_argument(
            "--budget-s", type=float, default=plan.budget_s, help="start no engine that ends later"
        )
        parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
        args = parser.parse_args(argv)
        return cls(
            args.lengths, args.model_size, tuple(args.tiers or TIERS), args.device, args.backend,
            args.budget_s, args.json,
        )  # fmt: skip

    def engines(self) -> list[tuple[str, str, str]]:
        """Return each engine to run: its name, its kind and its server's tiers.

        What the values are made of comes first.
        """
        ours = [(f"{KVSTORE} {tiers}", KVSTORE, tiers) for tiers in self.tiers]
        theirs = [(OFFLOADING, OFFLOADING, "")] if self.device == "cuda" else []
        return [(NONE, NONE, ""), ours[0], *theirs, *ours[1:]]


@dataclass(slots=True)
class Runs:
    """Runs engines one after another, as long as there is time. ``failed`` says what has not."""

    plan: Plan
    folder: Path
    model: Path
    began: float = field(default_factory=time.monotonic)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """What is left of the budget."""
        return self.plan.budget_s - (time.monotonic() - self.began)

    def make_model(self) -> None:
        """Write the weights."""
        words = [sys.executable, "-m", "bench.engines_gpu_child"]
        subprocess.run([*words, str(self.model), self.plan.size], cwd=ROOT, check=True)

    def run_all(self) -> None:
        """Run every engine that there is time for."""
        for name, kind, tiers in self.plan.engines():
            if self.left_s < LEAST_S:
                self.failed[name] = f"not started: {max(0.0, self.left_s):.0f} s were left"
            else:
                self.run(name, kind, tiers)
            if not self.plan.only_json:
                print(f"{name}: {self.failed.get(name, 'measured')}", flush=True)

    def run(self, name: str, kind: str, tiers: str) -> None:
        """Run one engine."""
        plan = self.plan
        folder = self.folder / name.replace(" ", "-").replace(",", "-")
        folder.mkdir()
        order = {
            "engine": kind, "tiers": tiers, "model": str(self.model),
            "folder": str(folder), "room": room_bytes(plan.size, plan.lengths),
            "lengths": plan.lengths, "device": plan.device, "backend": plan.backend,
            "decodes": kind == NONE or (kind, tiers) == (KVSTORE, plan.tiers[0]),
        }  # fmt: skip
        said, wrong = ask_child(order, folder / "log", self.left_s)
        if wrong:
            self.failed[name] = wrong
        else:
            self.results[name] = json.loads(said)


def ask_child(order: Mapping[str, Any], log: Path, within_s: float) -> tuple[str, str]:
    """Have a process do *order*; return its line, and what went wrong, if anything did."""
    words = (*_ENVIRONMENT, *(_ON_CPU if order["device"] == "cpu" else ()))
    command = ["env", *words, sys.executable, "-m", "bench.engines_gpu_child"]
    said, is_late = "", False
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, start_new_session=True,
        ) as child,
    ):  # fmt: skip
        try:
            said, _ = child.communicate(json.dumps(order) + "\n", timeout=within_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:  # and whatever it started, its server above all
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    lines = said.splitlines()
    if child.returncode == 0 and lines:
        return lines[-1], ""
    sys.stderr.write(log.read_text(errors="replace")[-4000:])
    return "", "the budget was over" if is_late else f"ended with {child.returncode}"


def model_place(size: str) -> str | None:
    """Return where weights are read fastest, None for where temporary files go."""
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * model_bytes(size):
        return str(SHARED_MEMORY)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    plan = Plan.parse(argv)
    report = Report("engines_gpu")
    has_device = plan.device == "cpu" or has_cuda()
    if not has_device or find_spec("vllm") is None:
        print(f"skipped: no {'vLLM' if has_device else 'CUDA device'}")
        report.print(only_json=True)
        return 0
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="kvstore-model-", dir=model_place(plan.size)) as model,
    ):
        runs = Runs(plan, Path(folder), Path(model))
        runs.make_model()
        runs.run_all()
    summarize(report, runs.results, runs.failed, f"{KVSTORE} {plan.tiers[0]}")
    report.print(only_json=plan.only_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
