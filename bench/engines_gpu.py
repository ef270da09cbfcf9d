"""A real vLLM on one CUDA device: ``python -m bench.engines_gpu [--json] [--lengths 8192,32768]``.

Time to first token of prompts that are computed, that come from our store's tiers and from vLLM's
own offloading; decoding with stores and without. Random weights; one engine at a time, in a
process of its own. Without a CUDA device or vLLM it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.engines_gpu_sizes import CHUNK_TOKENS, SIZES, model_bytes, room_bytes
from bench.engines_gpu_summary import KVSTORE, NONE, OFFLOADING, summarize
from bench.report import Report

ROOT = Path(__file__).resolve().parents[1]
TIERS = ("cpu", "gpu,cpu", "cpu,disk")
OLDEST, NEWEST = (0, 26), (0, 33)
"""Releases of vLLM that the connector is written for."""
LEAST_S = 60.0
"""What an engine needs at least: with less left of the budget it is not started."""
SHARED_MEMORY = Path("/dev/shm")

_ENVIRONMENT = {
    # In one process: what the connector says can be read, and nothing is started twice.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
_ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}


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
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--json", action="store_true", help="print the JSON line alone")
        parser.add_argument("--lengths", default="8192,32768", help="tokens of prompts")
        parser.add_argument("--model-size", default="small", choices=SIZES)
        parser.add_argument(
            "--tiers", action="append", choices=TIERS, help="of a server; may be repeated"
        )
        parser.add_argument("--backend", default="", help="vLLM's attention backend")
        parser.add_argument(
            "--budget-s", type=float, default=540.0, help="start no engine that ends later"
        )
        parser.add_argument(
            "--device", default="cuda", choices=("cuda", "cpu"), help=argparse.SUPPRESS
        )
        args = parser.parse_args(argv)
        try:
            lengths = tuple(sorted({int(one) for one in args.lengths.split(",")}))
        except ValueError:
            parser.error("--lengths are numbers with commas between them")
        if any(one < 1024 or one % CHUNK_TOKENS for one in lengths):
            parser.error(f"--lengths are multiples of {CHUNK_TOKENS} from 1024 on")
        return cls(
            lengths, args.model_size, tuple(args.tiers or TIERS), args.device, args.backend,
            args.budget_s, args.json,
        )  # fmt: skip

    def engines(self) -> list[tuple[str, str, str]]:
        """Return each engine to run: its name, its kind and its server's tiers.

        What the values are made of comes first.
        """
        ours = [(f"{KVSTORE} {tiers}", KVSTORE, tiers) for tiers in self.tiers]
        theirs = [(OFFLOADING, OFFLOADING, "")] if self.device == "cuda" else []
        return [(NONE, NONE, ""), ours[0], *theirs, *ours[1:]]


def skip_text(device: str) -> str:
    """Return why nothing can be measured here, or nothing."""
    if device == "cuda" and not has_cuda():
        return "no CUDA device"
    if find_spec("vllm") is None:
        return "no vLLM"
    return unsupported(vllm_version())


def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def vllm_version() -> str:
    """Return what is installed; "" where its metadata is not."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def unsupported(found: str) -> str:
    """Return what is wrong with vLLM *found*, or nothing."""
    numbers = found.split(".")[:2]
    if len(numbers) < 2 or not all(one.isdigit() for one in numbers):
        return ""  # a build of one's own
    major, minor = map(int, numbers)
    if OLDEST <= (major, minor) <= NEWEST:
        return ""
    return f"vLLM {found}, where 0.{OLDEST[1]} to 0.{NEWEST[1]} are supported"


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
        began = time.monotonic()
        words = [sys.executable, "-m", "bench.engines_gpu_model"]
        subprocess.run([*words, str(self.model), self.plan.size], cwd=ROOT, check=True)
        self.say(f"model {self.plan.size}: {time.monotonic() - began:.1f} s")

    def run_all(self) -> None:
        """Run every engine that there is time for."""
        for name, kind, tiers in self.plan.engines():
            if self.left_s < LEAST_S:
                self.failed[name] = f"not started: {max(0.0, self.left_s):.0f} s were left"
                self.say(f"{name}: {self.failed[name]}")
                continue
            began = time.monotonic()
            self.run(name, kind, tiers)
            took = f"{time.monotonic() - began:.1f} s"
            self.say(f"{name}: {self.failed.get(name, 'measured')}, {took}")

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

    def say(self, text: str) -> None:
        """Print how far it is."""
        if not self.plan.only_json:
            print(text, flush=True)


def ask_child(order: Mapping[str, Any], log: Path, within_s: float) -> tuple[str, str]:
    """Have a process do *order*; return its line, and what went wrong, if anything did."""
    settled = _ENVIRONMENT | (_ON_CPU if order["device"] == "cpu" else {})
    words = [f"{name}={value}" for name, value in settled.items()]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            ["env", *words, sys.executable, "-m", "bench.engines_gpu_child"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as child,
    ):
        said, is_late = "", False
        try:
            said, _ = child.communicate(json.dumps(order) + "\n", timeout=within_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            end_group(child)
    lines = said.splitlines()
    if child.returncode == 0 and lines:
        return lines[-1], ""
    sys.stderr.write(log.read_text(errors="replace")[-4000:])
    return "", "the budget was over" if is_late else f"ended with {child.returncode}"


def end_group(child: subprocess.Popen[str]) -> None:
    """End a process and whatever it started, its server above all."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def model_place(size: str) -> str | None:
    """Return where weights are read fastest, None for where temporary files go."""
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * model_bytes(size):
        return str(SHARED_MEMORY)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    plan = Plan.parse(argv)
    report = Report("engines_gpu")
    if why := skip_text(plan.device):
        print(f"skipped: {why}")
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
    report.note("total_s", f"{time.monotonic() - runs.began:.0f}", "all engines and the model")
    report.print(only_json=plan.only_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
