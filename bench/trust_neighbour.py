"""What a noisy neighbour costs a tenant that keeps within its guarantee: hits, with and without."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench.report import Report
from bench.trust_callers import Tenants
from bench.workload import SMALL, make_chunks, serving
from kvstore.client import Client

PROMPTS = 12
"""Of one chunk of 1 MiB each: what the victim works with, a bit less than it is guaranteed."""
ASKED = 400
NOISE = 300
"""Chunks of the same size that the neighbour puts meanwhile, at least: none is put twice."""


def measure(report: Report, folder: Path) -> None:
    """Add ``noisy_neighbour_hit_loss``: the share of the victim's hits that the noise costs."""
    tenants = Tenants(folder, "victim", "noisy")
    with ExitStack() as stack:
        flags = (
            *("--tiers", "cpu", "--cpu", "36MiB", "--limits", "cpu_slab_bytes=6MiB"),
            *("--tenant-quotas", "victim=18MiB:18MiB", *tenants.flags),
        )
        address, _ = stack.enter_context(serving(*flags, disk=folder / "d"))
        victim = stack.enter_context(tenants.client("victim", address, SMALL))
        noisy = stack.enter_context(tenants.client("noisy", address, SMALL))
        _work(victim)  # fills
        alone = _work(victim)
        stop = threading.Event()
        puts = [0]
        noise = threading.Thread(target=_make_noise, args=(noisy, stop, puts))
        noise.start()
        shares = [_work(victim)]
        while puts[0] < NOISE and noise.is_alive():
            shares.append(_work(victim))
        beside = float(np.mean(shares))
        stop.set()
        noise.join()
        loss = 1 - beside / alone
        told = f"{alone:.3f} of lookups hit alone, {beside:.3f} beside {puts[0]} puts of another"
        report.add("noisy_neighbour_hit_loss", loss, told, "at most 0.05")


def _work(client: Client) -> float:
    """Ask for the victim's prompts, putting what is missing; return the share that was there."""
    made = [make_chunks(client, 1, seed) for seed in range(PROMPTS)]
    hits = 0
    for number in np.random.default_rng(3).integers(0, PROMPTS, ASKED).tolist():
        keys, chunks = made[number]
        if client.get_chunks(keys):
            hits += 1
        else:
            client.put_chunks(chunks)
    return hits / ASKED


def _make_noise(client: Client, stop: threading.Event, puts: list[int]) -> None:
    seed = 1000
    while not stop.is_set():
        seed += 1
        client.put_chunks(make_chunks(client, 1, seed)[1])
        puts[0] += 1
