"""What engines of ``bench.engines_gpu`` measured, made into its table and its values."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any, TypeAlias

from bench.engines_gpu_sizes import DECODE_CHUNKS, DECODE_REQUESTS, DECODE_ROUNDS
from bench.report import Report

NONE, KVSTORE, OFFLOADING = "none", "kvstore", "offloading"
DECODE, RECOMPUTE, OFFLOAD, TOKENS = KEYS = (
    "decode_with_store", "ttft_hit_vs_recompute", "ttft_hit_vs_offload", "tokens_identical",
)  # fmt: skip
Result: TypeAlias = Mapping[str, Any]


class NoValueError(Exception):
    """Why a key has no value."""


class Summary:
    """The values of a run. ``ours`` is the engine whose hits count; others are in the table."""

    def __init__(self, results: Mapping[str, Result], failed: Mapping[str, str], ours: str) -> None:
        self._results = results
        self._failed = failed
        self._ours = ours

    def result(self, name: str) -> Result:
        """Return what an engine measured. Raises NoValueError where it has not."""
        if name not in self._results:
            raise NoValueError(f"{name}: {self._failed.get(name, 'not run')}")
        return self._results[name]

    def times(self, name: str) -> dict[int, float]:
        """Return the median ms of each length: of full hits, or computed without a store.

        Raises NoValueError where hits were not full.
        """
        found = {}
        for run in self.result(name)["prompts"]:
            wanted = 0.0 if name == NONE else 1.0
            share = share_of(run)
            if share != wanted:
                raise NoValueError(f"{name}: hit share {share:.2f} at {run['tokens']} tokens")
            found[run["tokens"]] = median(run["hit_ms"])
        return found

    def hit_vs(self, theirs: str) -> tuple[float, str, str]:
        """Return the ratio at the greatest length, and both times."""
        ours, other = self.times(self._ours), self.times(theirs)
        tokens = max(ours)
        against = f"{theirs}: {other[tokens]:.1f} ms"
        return ours[tokens] / other[tokens], f"{ours[tokens]:.1f} ms at {tokens} tokens", against

    def decode(self) -> tuple[float, str, str]:
        """Return the time of a step with stores over that without, and both."""
        with_store = self.result(self._ours)
        stored = with_store["decode_stored"]
        wanted = DECODE_REQUESTS * DECODE_ROUNDS * DECODE_CHUNKS
        if stored != wanted:
            raise NoValueError(f"{stored} of {wanted} chunks were stored while decoding")
        ours, plain = (median(one["decode_ms"]) for one in (with_store, self.result(NONE)))
        return ours / plain, f"{ours:.3f} ms a step, {stored} chunks stored", f"{plain:.3f} ms"

    def tokens(self) -> tuple[float, str, str]:
        """Return whether full hits gave what the engine's own cache gave, in all engines."""
        controls = [
            run["control_apart"]
            for one in self._results.values()
            for run in one["prompts"]
            if "control_apart" in run
        ]
        if not controls or 0.0 in controls:
            raise NoValueError("the control, whose KV is another, did not differ")
        plain = {run["tokens"]: run["own_tokens"] for run in self.result(NONE)["prompts"]}
        compared, wrong = 0, []
        for name, result in self._results.items():
            for run in result["prompts"]:
                if name != NONE and share_of(run) != 1.0:
                    continue  # part was computed, which gives others now and then
                compared += name != NONE
                if not run["hit_tokens"] == run["own_tokens"] == plain[run["tokens"]]:
                    wrong.append(f"{name} at {run['tokens']}")
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
        if any(run["load_ms"]):
            parts.append(f"{median(run['load_ms']):.1f} of it loading")
        parts.append(differing("log-probabilities", run["apart"]))
        if "control_apart" in run:
            parts.append(differing("control", run["control_apart"]))
        figure = f"{median(run['hit_ms']):.1f}"
        report.note(f"{name} {run['tokens']}", figure, "; ".join(parts))
    if result["decode_ms"]:
        steps = ", ".join(f"{ms:.3f}" for ms in result["decode_ms"])
        stored = f"{result['decode_stored']} chunks stored, {result['dropped']} dropped in all"
        figure = f"{median(result['decode_ms']):.3f}"
        report.note(f"{name} decode", figure, f"ms a step: {steps}; {stored}")
    report.note(f"{name} start_s", f"{result['start_s']:.1f}", "vLLM's start")


def differing(what: str, apart: float) -> str:
    """Say how far log probabilities are apart."""
    return f"{what}: other tokens" if apart < 0 else f"{what} {apart:.4f} apart"


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
