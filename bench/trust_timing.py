"""Whether the time of an answer tells one tenant what another has stored.

Lookups of prompts, half of them stored by a victim, half by nobody: how well their times tell the
halves apart, as the area under the ROC curve (0.5: not at all). By another tenant, and by the
victim itself as the control that shows that this could tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from bench.report import Report
from bench.trust_callers import Tenants
from bench.workload import TINY, make_chunks, serving
from kvstore.client import Client
from kvstore.proto.types import ChunkKey

PROBES = 2000
CHUNKS = 512
"""Of a prompt: what is there costs a lookup more than what is not, by the chunk."""
TRIES = 9
"""Times that each probe is asked: the shortest counts, as whoever is curious would have it."""
STORED = 20
"""Prompts of the victim: each is probed several times, as many others as often."""


def measure(report: Report, folder: Path) -> None:
    """Add ``cross_tenant_auc`` and ``same_tenant_auc``, over PROBES lookups each."""
    tenants = Tenants(folder, "victim", "curious")
    with ExitStack() as stack:
        flags = ("--tiers", "cpu", "--cpu", "256MiB", *tenants.flags)
        address, _ = stack.enter_context(serving(*flags, disk=folder / "d"))
        victim = stack.enter_context(tenants.client("victim", address, TINY))
        curious = stack.enter_context(tenants.client("curious", address, TINY))
        for seed in range(STORED):
            victim.put_chunks(make_chunks(victim, CHUNKS, seed)[1])
        for name, client in (("cross_tenant_auc", curious), ("same_tenant_auc", victim)):
            area, stored_us, other_us = _probe(client)
            told = f"median {stored_us:.0f} us stored, {other_us:.0f} us not; {PROBES} probes"
            against = "0.45 to 0.55" if name.startswith("cross") else "far from 0.5: the control"
            report.add(name, area, told, against)


def _probe(client: Client) -> tuple[float, float, float]:
    rng = np.random.default_rng(7)
    is_stored = rng.permutation(np.arange(PROBES) % 2 == 0)
    keys = {
        seed: client.keys(np.random.default_rng(seed).integers(0, 1 << 31, 256 * CHUNKS).tolist())
        for seed in (*range(STORED), *range(10_000, 10_000 + STORED))
    }
    asked = rng.integers(0, STORED, PROBES) + np.where(is_stored, 0, 10_000)
    taken = np.empty(PROBES)
    for at, seed in enumerate(asked.tolist()):
        taken[at] = min(_lookup_us(client, keys[seed]) for _ in range(TRIES))
    area = auc(taken[is_stored], taken[~is_stored])
    return area, float(np.median(taken[is_stored])), float(np.median(taken[~is_stored]))


def _lookup_us(client: Client, keys: Sequence[ChunkKey]) -> float:
    started = perf_counter_ns()
    client.lookup(keys=keys)
    return (perf_counter_ns() - started) / 1000


def auc(stored: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Return the chance that one of *stored* is larger than one of *others*; ties count half."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, stored, "left")
    up_to = np.searchsorted(ordered, stored, "right")
    return float((below + up_to).mean() / 2 / len(others))
