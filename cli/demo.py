"""The demo: the store's main job on this machine, with real processes, checked and timed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from kvstore.cli.output import Grid, open_console
from kvstore.cli.server_child import ServerChild
from kvstore.proto.errors import KVStoreError

ENGINE_S = 300.0
NEW_TOKENS_ROOM = 64
_NEEDS = ("torch", "transformers")
_WEIGHTS = ("*.safetensors", "*.bin")


class DemoError(KVStoreError):
    """The demo cannot run, or a part of it broke."""

    def __init__(self, reason: str, exit_status: int) -> None:
        super().__init__(reason)
        self.exit_status = exit_status


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo saw; ``problems`` is empty when everything held.

    Times to the first token are medians in milliseconds, the client's connecting included;
    ``ttft_ratio`` is with over without the store.
    """

    tokens_identical: bool
    hit_tokens: int
    disk_hit_tokens_after_kill: int
    ttft_ratio: float
    problems: Sequence[str]
    prompt_tokens: int
    new_tokens: int
    hit_tokens_by_tier: Mapping[str, int]
    hit_tokens_by_tier_after_kill: Mapping[str, int]
    ttft_without_ms: float
    ttft_with_ms: float
    load_ms: float
    ttft_from_disk_ms: float
    samples_without_ms: Sequence[float]
    samples_with_ms: Sequence[float]
    duration_s: float

    @classmethod
    def of(cls, reports: Mapping[str, Mapping[str, Any]], duration_s: float) -> Outcome:
        """Judge the reports of the three engine processes."""
        first, second, restarted = (reports[name] for name in ("first", "second", "restarted"))
        runs = [first["tokens"], second["tokens"], restarted["tokens"]]
        identical = all(tokens == first["plain_tokens"] for tokens in runs)
        disk_hit_tokens = restarted["hit_tokens_by_tier"].get("disk", 0)
        ratio = second["ttft_with_ms"] / second["ttft_without_ms"]
        checks = {
            "the first process found its prompt in an empty store": not first["hit_tokens"],
            "the tokens differ with and without the store": identical,
            "the second process loaded nothing": second["hit_tokens"] > 0,
            "nothing came from disk after the kill": disk_hit_tokens > 0,
            "loading was not faster than computing": ratio < 1,
        }
        problems = [sentence for sentence, held in checks.items() if not held]
        problems += [
            f"errors in the {name} process: {report['errors']}"
            for name, report in reports.items()
            if report["errors"]
        ]
        return cls(
            tokens_identical=identical,
            hit_tokens=second["hit_tokens"],
            disk_hit_tokens_after_kill=disk_hit_tokens,
            ttft_ratio=ratio,
            problems=problems,
            prompt_tokens=first["prompt_tokens"],
            new_tokens=len(first["tokens"]),
            hit_tokens_by_tier=second["hit_tokens_by_tier"],
            hit_tokens_by_tier_after_kill=restarted["hit_tokens_by_tier"],
            ttft_without_ms=second["ttft_without_ms"],
            ttft_with_ms=second["ttft_with_ms"],
            load_ms=second["load_ms"],
            ttft_from_disk_ms=restarted["ttft_with_ms"],
            samples_without_ms=second["samples_without_ms"],
            samples_with_ms=second["samples_with_ms"],
            duration_s=duration_s,
        )


def run_demo(model: Path | None, prompt_tokens: int, json_file: Path | None) -> bool:
    """Run it, print what happened and write it to *json_file*; return whether all held.

    Raises DemoError, or the server's own KVStoreError when that does not start.
    """
    started = time.monotonic()
    folder = check_model(model, prompt_tokens)
    console = open_console()
    console.print(f"model: {folder}")
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as scratch:
        reports = _play(console, Path(scratch), [str(folder), str(prompt_tokens)])
    outcome = Outcome.of(reports, time.monotonic() - started)
    _show(console, outcome)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    return not outcome.problems


def check_model(model: Path | None, prompt_tokens: int) -> Path:
    """Return the folder of the model to use. Raises DemoError saying what to give instead."""
    usage = 2
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        fix = "pip install 'kvstore-server[transformers]'"
        raise DemoError(f"{' and '.join(missing)} not installed: {fix}", usage)
    folder = model or Path(__file__).resolve().parents[1] / "data" / "tinylm"
    config = _config(folder)
    absent = [
        what
        for what, held in {
            "config.json": config is not None,
            "weights (*.safetensors or *.bin)": any(map(any, map(folder.glob, _WEIGHTS))),
            "tokenizer (tokenizer*)": any(folder.glob("tokenizer*")),
        }.items()
        if not held
    ]
    if config is None or absent:
        raise DemoError(
            f"--model {folder}: no {', no '.join(absent)} there: give a folder that transformers"
            " loads, such as data/tinylm of a checkout, or build/real-model after make real-model",
            usage,
        )
    longest = config.get("max_position_embeddings", prompt_tokens) - NEW_TOKENS_ROOM
    if prompt_tokens > longest:
        raise DemoError(f"--tokens {prompt_tokens}: the model takes {longest} at most", usage)
    return folder


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _play(console: Console, scratch: Path, arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    reports = {}
    with ServerChild(scratch) as server:
        console.print(f"1. {server.greeting}")
        console.print("2. one engine process computes the prompt and stores it ...")
        reports["first"] = _engine(console, "first", server.address, arguments)
        console.print("3. another loads it, and times its first token both ways ...")
        reports["second"] = _engine(console, "second", server.address, arguments)
        server.kill()
        server.start()
        console.print(f"4. kill -9, started again: {server.greeting}")
        console.print("5. a third engine process loads what the disk kept ...")
        reports["restarted"] = _engine(console, "restarted", server.address, arguments)
    return reports


def _engine(console: Console, role: str, address: str, arguments: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvstore.cli.demo_engine", role, address, *arguments]
    with console.status(f"engine process: {role}"):
        try:
            done = subprocess.run(  # noqa: S603 - our own interpreter and module
                command, capture_output=True, text=True, timeout=ENGINE_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise DemoError(f"the {role} engine process took over {ENGINE_S:.0f} s", 1) from None
    if done.returncode:
        last_words = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise DemoError(f"the {role} engine process failed: {last_words}", 1)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _show(console: Console, outcome: Outcome) -> None:
    table = Grid("", "without the store", "with it", "from disk after kill -9")
    table.add_row(
        "time to first token (ms)",
        f"{outcome.ttft_without_ms:.1f}",
        f"{outcome.ttft_with_ms:.1f}",
        f"{outcome.ttft_from_disk_ms:.1f}",
    )
    table.add_row(
        f"tokens not computed, of {outcome.prompt_tokens}",
        "0",
        _tiers(outcome.hit_tokens_by_tier),
        _tiers(outcome.hit_tokens_by_tier_after_kill),
    )
    same = "the same" if outcome.tokens_identical else "DIFFERENT"
    table.add_row(f"{outcome.new_tokens} generated tokens", "the reference", same, same)
    console.print(table)
    console.print(
        f"with the store the first token takes {outcome.ttft_ratio:.2f} of the time"
        f" (load {outcome.load_ms:.1f} ms; {len(outcome.samples_with_ms)} times each, medians);"
        f" the demo took {outcome.duration_s:.0f} s"
    )
    for problem in outcome.problems:
        console.print(f"NOT AS IT SHOULD BE: {problem}")


def _tiers(tokens: Mapping[str, int]) -> str:
    return ", ".join(f"{count} from {tier}" for tier, count in tokens.items()) or "0"
