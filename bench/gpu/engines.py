"""A real vLLM on one CUDA device: ``python -m bench.gpu engines [--json] [--lengths 8192,32768]``.

Time to first token of prompts that are computed, loaded from our store's tiers, or from vLLM's own
offloading; decoding with stores and without. Random weights; one engine at a time, each in its own
process.
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
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from bench.lib import ROOT
from bench.lib.report import Report

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
"""Tokens of a prompt, untimed steps, and timed steps."""
DECODE_CHUNKS = (DECODE_PROMPT + DECODE_FIRST + DECODE_STEPS - 1) // CHUNK_TOKENS
NONE, KVSTORE, OFFLOADING = "none", "kvstore", "offloading"
DECODE, RECOMPUTE, OFFLOAD, TOKENS = KEYS = (
    "decode_with_store", "ttft_hit_vs_recompute", "ttft_hit_vs_offload", "tokens_identical",
)  # fmt: skip
TIERS = ("cpu", "gpu,cpu", "cpu,disk")
LEAST_S = 60.0
"""Least time left of the budget to start an engine."""
SHARED_MEMORY, MODEL_BYTES = Path("/dev/shm"), 40 << 30
"""Folder for the weights if it has space for twice the largest model."""
_ENVIRONMENT = (
    # One process: the connector's state is readable, and nothing starts twice.
    "VLLM_ENABLE_V1_MULTIPROCESSING=0", "VLLM_USE_FLASHINFER_SAMPLER=0", "VLLM_NO_USAGE_STATS=1",
    "VLLM_LOGGING_LEVEL=WARNING", "HF_HUB_OFFLINE=1",
)  # fmt: skip
_ON_CPU = (
    "VLLM_CPU_OMP_THREADS_BIND=nobind", "VLLM_CPU_KVCACHE_SPACE=1", "OMP_NUM_THREADS=1",
    "TORCH_COMPILE_DISABLE=1",
)  # fmt: skip
Result: TypeAlias = Mapping[str, Any]
Row: TypeAlias = tuple[float, str, str]


def prompt(tokens: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(tokens)]


def token_bytes(size: str) -> int:
    _, _, layers, heads = SIZES[size]
    return 2 * 2 * layers * min(KV_HEADS, heads) * HEAD_DIM


def capacity_bytes(size: str, lengths: Sequence[int]) -> int:
    """Return 1.5 times the bytes that one engine stores."""
    decoded = DECODE_REQUESTS * DECODE_ROUNDS * (DECODE_PROMPT + DECODE_FIRST + DECODE_STEPS)
    tokens = sum(lengths) + min(lengths) + 2 * WARM_UP_TOKENS + decoded
    return tokens * token_bytes(size) * 3 // 2 + (512 << 20)


# --- results


class NoValueError(Exception):
    """The reason why a key has no value."""


class Summary:
    """The values of a run. *ours*: the engine for the keys; others are only in the table."""

    def __init__(self, results: Mapping[str, Result], failed: Mapping[str, str], ours: str) -> None:
        self._results, self._failed, self._ours = results, failed, ours

    def _result(self, name: str) -> Result:
        if name not in self._results:
            raise NoValueError(f"{name}: {self._failed.get(name, 'not run')}")
        return self._results[name]

    def _times(self, name: str) -> dict[int, float]:
        """Return the median ms by length, of full hits or without a store."""
        found = {}
        for run in self._result(name)["prompts"]:
            share = share_of(run)
            if share != (0.0 if name == NONE else 1.0):
                raise NoValueError(f"{name}: hit share {share:.2f} at {run['tokens']} tokens")
            found[run["tokens"]] = median(run["hit_ms"])
        return found

    def hit_vs(self, theirs: str) -> Row:
        ours, other = self._times(self._ours), self._times(theirs)
        tokens = max(ours)
        against = f"{theirs}: {other[tokens]:.1f} ms"
        return ours[tokens] / other[tokens], f"{ours[tokens]:.1f} ms at {tokens} tokens", against

    def decode(self) -> Row:
        with_store = self._result(self._ours)
        stored = with_store["decode_stored"]
        wanted = DECODE_REQUESTS * DECODE_ROUNDS * DECODE_CHUNKS
        if stored != wanted:
            raise NoValueError(f"{stored} of {wanted} chunks were stored while decoding")
        ours, plain = (median(one["decode_ms"]) for one in (with_store, self._result(NONE)))
        return ours / plain, f"{ours:.3f} ms a step, {stored} chunks stored", f"{plain:.3f} ms"

    def tokens(self) -> Row:
        runs = [(name, run) for name, one in self._results.items() for run in one["prompts"]]
        controls = [run["control_apart"] for _, run in runs if "control_apart" in run]
        if not controls or 0.0 in controls:
            raise NoValueError("the control, with other KV, gave the same result")
        plain = {run["tokens"]: run["own_tokens"] for run in self._result(NONE)["prompts"]}
        # Partial hits give other tokens now and then.
        whole = [(name, run) for name, run in runs if name == NONE or share_of(run) == 1.0]
        wrong = [
            f"{name} at {run['tokens']}"
            for name, run in whole
            if not run["hit_tokens"] == run["own_tokens"] == plain[run["tokens"]]
        ]
        compared = sum(name != NONE for name, _ in whole)
        if not compared:
            raise NoValueError("no full hit")
        text = f"different: {', '.join(wrong)}" if wrong else f"{compared} full hits"
        return float(not wrong), text, "vLLM's own cache, and no store"


def share_of(run: Mapping[str, Any]) -> float:
    """Return the least share of a prompt's whole chunks that was cached."""
    return float(min(run["cached"]) / run["tokens"])


def add_notes(report: Report, name: str, result: Result) -> None:
    for run in result["prompts"]:
        times = ", ".join(f"{ms:.1f}" for ms in run["hit_ms"])
        parts = [f"ms: {times}; cold {run['cold_ms']:.1f}", f"hit share {share_of(run):.2f}"]
        if run["filled"]:
            parts.append(f"{run['filled'][0] / run['tokens']:.2f} stored at once")
        parts.append(f"{median(run['load_ms']):.1f} of them loading")
        parts.append(f"log probabilities differ by {run['apart']:.4f} (-1: other tokens)")
        figure = f"{median(run['hit_ms']):.1f}"
        report.note(f"{name} {run['tokens']}", figure, "; ".join(parts))
    if result["decode_ms"]:
        stored = f"{result['decode_stored']} chunks stored, {result['dropped']} dropped in all"
        report.note(f"{name} decode", f"{median(result['decode_ms']):.3f}", f"ms a step; {stored}")


def summarize(
    report: Report, results: Mapping[str, Result], failed: Mapping[str, str], ours: str
) -> None:
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


# --- running engines


def _lengths(text: str) -> tuple[int, ...]:
    found = tuple(sorted({int(one) for one in text.split(",")}))
    if any(one < 1024 or one % CHUNK_TOKENS for one in found):
        raise argparse.ArgumentTypeError(f"use multiples of {CHUNK_TOKENS} from 1024 on")
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=_lengths, default=(8192, 32768), help="of prompts")
    parser.add_argument("--model-size", default="small", choices=SIZES)
    parser.add_argument("--tiers", action="append", choices=TIERS, help="may be repeated")
    parser.add_argument("--backend", default="", help="vLLM's attention backend")
    parser.add_argument("--budget-s", type=float, default=540.0, help="start no engine later")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))


def engines_of(plan: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Return (name, kind, tiers) of each engine, those for the keys first."""
    ours = [(f"{KVSTORE} {tiers}", KVSTORE, tiers) for tiers in plan.tiers or TIERS]
    theirs = [(OFFLOADING, OFFLOADING, "")] if plan.device == "cuda" else []
    return [(NONE, NONE, ""), ours[0], *theirs, *ours[1:]]


def run_all(
    plan: argparse.Namespace, folder: Path, model: Path
) -> tuple[dict[str, Result], dict[str, str]]:
    """Run the engines that fit the budget; return results, and reasons for missing ones."""
    began, results, failed = time.monotonic(), dict[str, Result](), dict[str, str]()
    engines = engines_of(plan)
    for number, (name, kind, tiers) in enumerate(engines):
        left_s = plan.budget_s - (time.monotonic() - began)
        if left_s < LEAST_S:
            failed[name] = f"not started: {max(0.0, left_s):.0f} s left"
            continue
        place = folder / str(number)
        place.mkdir()
        order = {
            "engine": kind, "tiers": tiers, "model": str(model), "folder": str(place),
            "capacity_bytes": capacity_bytes(plan.model_size, plan.lengths),
            "lengths": plan.lengths, "device": plan.device, "backend": plan.backend,
            "decodes": name in (NONE, engines[1][0]),
        }  # fmt: skip
        line, error = run_child(order, place / "log", left_s)
        if error:
            failed[name] = error
        else:
            results[name] = json.loads(line)
        if not plan.json:
            print(f"{name}: {error or 'measured'}", flush=True)
    return results, failed


def run_child(order: Mapping[str, Any], log: Path, within_s: float) -> tuple[str, str]:
    """Run *order* in a child process; return its output line and the error, one of them empty."""
    words = (*_ENVIRONMENT, *(_ON_CPU if order["device"] == "cpu" else ()))
    command = ["env", *words, sys.executable, "-m", "bench.gpu.child"]
    output, is_late = "", False
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, start_new_session=True,
        ) as child,
    ):  # fmt: skip
        try:
            output, _ = child.communicate(json.dumps(order) + "\n", timeout=within_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:  # with its server
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    lines = output.splitlines()
    if child.returncode == 0 and lines:
        return lines[-1], ""
    sys.stderr.write(log.read_text(errors="replace")[-4000:])
    return "", "over the budget" if is_late else f"exited with {child.returncode}"


def measure_engines(report: Report, plan: argparse.Namespace) -> None:
    has_space = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > MODEL_BYTES
    where = str(SHARED_MEMORY) if has_space else None
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="kvstore-model-", dir=where) as model,
    ):
        words = [sys.executable, "-m", "bench.gpu.child", model, plan.model_size]
        subprocess.run(words, cwd=ROOT, check=True)
        results, failed = run_all(plan, Path(folder), Path(model))
    summarize(report, results, failed, engines_of(plan)[1][0])
