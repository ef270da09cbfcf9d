"""Cost and effect of security: TLS, encryption, isolation of tenants, load, faults."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.lib.report import Part, Report, in_turns, run_parts, timed
from bench.lib.workload import (
    MODEL,
    SMALL,
    TINY,
    buffers,
    check,
    chunk_bytes,
    connect,
    joined,
    keys_of,
    make_chunks,
    serving,
)
from bench.trust import load
from kvstore.client import Access, Client
from kvstore.proto.types import ChunkKey, Model
from kvstore.server.security.key_files import make_key, next_key, write_keys

ROUNDS, LOOKUPS, LOOKUP_CHUNKS = 15, 200, 32
DISK_CHUNKS = 16
"""Chunks of 8 MiB; the servers' memory holds half of them, so each get reads the disk."""
PROBES, PROBE_CHUNKS, PROBE_PROMPTS = 2000, 512, 20
PROBE_TRIES = 9
"""Repeats of each probe; the shortest counts."""
VICTIM_PROMPTS, VICTIM_GETS = 12, 400
"""Prompts of one chunk of 1 MiB each: a little less than the victim's guarantee."""
NOISE_CHUNKS = 300
"""Least number of chunks of 1 MiB that the neighbour puts meanwhile."""


class Tenants:
    """API keys of some tenants, in a file for a server."""

    def __init__(self, folder: Path, *tenants: str) -> None:
        created = [make_key(name, ("read", "write"), os.urandom, time()) for name in tenants]
        self._keys = dict(zip(tenants, (text for text, _ in created), strict=True))
        write_keys(folder / "api-keys", [row for _, row in created])
        self.flags = ("--auth-keys", str(folder / "api-keys"))

    def client(
        self, tenant: str, address: str, model: Model, ca: Path | None = None, **options: Any
    ) -> Client:
        access = Access(ca=ca, token=self._keys[tenant])
        address = address.replace("127.0.0.1", "localhost")
        return connect(address, model, access=access, **options)


def own_certificate(folder: Path) -> tuple[str, ...]:
    """Write a self-signed certificate for localhost; return the server's flags."""
    certificate, key = folder / "server.crt", folder / "server.key"
    arguments = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    )
    names = ("-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate)
    subprocess.run(["openssl", *arguments.split(), *names], check=True, capture_output=True)
    key.chmod(0o600)
    return ("--tls-cert", str(certificate), "--tls-key", str(key))


def measure_tls(report: Report, folder: Path) -> None:
    """Add ``tls_auth_cost_on_lookups``: the share that both add to a lookup over gRPC."""
    tenants = Tenants(folder, "acme")
    with ExitStack() as stack:
        memory = ("--tiers", "cpu", "--cpu", "64MiB")
        secured = (*memory, *own_certificate(folder), *tenants.flags)
        (plain, _), (address, _) = (stack.enter_context(serving(*f)) for f in (memory, secured))
        works = []
        for client in (
            connect(plain, TINY, transport="grpc"),
            tenants.client("acme", address, TINY, folder / "server.crt", transport="grpc"),
        ):
            stack.enter_context(client)
            keys, chunks = make_chunks(client, LOOKUP_CHUNKS, seed=1)
            client.put_chunks(chunks)
            works.append(partial(timed, partial(_look_up, client, keys)))
        ratio, *taken_s = in_turns(works[0], works[1], ROUNDS)
    figures = "{:.0f} us plain, {:.0f} with both".format(*(1e6 * s / LOOKUPS for s in taken_s))
    report.add("tls_auth_cost_on_lookups", ratio - 1, figures, "at most 0.10")


def _look_up(client: Client, keys: Sequence[ChunkKey]) -> None:
    for _ in range(LOOKUPS):
        assert client.lookup(keys=keys).ready == LOOKUP_CHUNKS


def measure_encryption(report: Report, folder: Path) -> None:
    """Add ``encryption_cost_on_disk_gets``: the share that encryption adds to a get.

    Two servers, with and without keys, alternate; the page cache holds their files. Over gRPC they
    differ in decryption only.
    """
    write_keys(folder / "keys", [next_key([], np.random.bytes, time())])
    secret = ("--encryption-keys", str(folder / "keys"))
    with (
        _disk_gets(folder / "plain") as (plain, size),
        _disk_gets(folder / "hidden", *secret) as (hidden, _),
    ):
        ratio, *taken_s = in_turns(plain, hidden, ROUNDS)
    figures = "{:.2f} GB/s plain, {:.2f} encrypted".format(*(size / s / 1e9 for s in taken_s))
    report.add("encryption_cost_on_disk_gets", ratio - 1, figures, "at most 0.15")


@contextmanager
def _disk_gets(disk: Path, *flags: str) -> Iterator[tuple[Callable[[], float], int]]:
    """Yield a timed get of all chunks of a server, and the number of bytes."""
    memory = ("--cpu", "88MiB", "--limits", "cpu_slab_bytes=44MiB", "--policy", "lru")
    with joined(*memory, "--disk", f"1GiB:{disk}", *flags, transport="grpc") as client:
        made = [make_chunks(client, 1, seed) for seed in range(DISK_CHUNKS)]
        keys, chunks = ([one for (one,) in column] for column in zip(*made, strict=True))
        for chunk in chunks:
            client.put_chunks([chunk], durable=True)
        out = buffers(MODEL, DISK_CHUNKS)

        def get() -> None:
            for half in (slice(0, DISK_CHUNKS // 2), slice(DISK_CHUNKS // 2, DISK_CHUNKS)):
                assert len(client.get_chunks(keys[half], out[half])) == DISK_CHUNKS // 2

        get()
        check(chunks, out)
        yield partial(timed, get), chunk_bytes(chunks)


def measure_timing(report: Report, folder: Path) -> None:
    """Add ``cross_tenant_auc`` and ``same_tenant_auc``: how well lookup times reveal what is
    stored, to another tenant and, as the control, to the tenant who stored it.

    Half of the probes are for prompts that the victim stored. The figure is the area under the
    ROC curve; 0.5 is chance.
    """
    tenants = Tenants(folder, "victim", "curious")
    flags = ("--tiers", "cpu", "--cpu", "256MiB", *tenants.flags)
    with (
        serving(*flags) as (address, _),
        tenants.client("victim", address, TINY) as victim,
        tenants.client("curious", address, TINY) as curious,
    ):
        for seed in range(PROBE_PROMPTS):
            victim.put_chunks(make_chunks(victim, PROBE_CHUNKS, seed)[1])
        for name, client, bar in (
            ("cross_tenant_auc", curious, "0.45 to 0.55"),
            ("same_tenant_auc", victim, "far from 0.5: the control"),
        ):
            area, stored_us, other_us = _probe(client)
            figures = f"median {stored_us:.0f} us stored, {other_us:.0f} us not; {PROBES} probes"
            report.add(name, area, figures, bar)


def _probe(client: Client) -> tuple[float, float, float]:
    rng = np.random.default_rng(7)
    is_stored = rng.permutation(np.arange(PROBES) % 2 == 0)
    known = (*range(PROBE_PROMPTS), *range(10_000, 10_000 + PROBE_PROMPTS))
    keys = {seed: keys_of(client, PROBE_CHUNKS, seed) for seed in known}
    seeds = rng.integers(0, PROBE_PROMPTS, PROBES) + np.where(is_stored, 0, 10_000)
    taken_us = np.empty(PROBES)
    for at, seed in enumerate(seeds.tolist()):
        look_up = partial(client.lookup, keys=keys[seed])
        taken_us[at] = 1e6 * min(timed(look_up) for _ in range(PROBE_TRIES))
    stored, others = taken_us[is_stored], taken_us[~is_stored]
    return auc(stored, others), float(np.median(stored)), float(np.median(others))


def auc(stored: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Return the probability that one of *stored* exceeds one of *others*; ties count half."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, stored, "left")
    up_to = np.searchsorted(ordered, stored, "right")
    return float((below + up_to).mean() / 2 / len(others))


def measure_neighbour(report: Report, folder: Path) -> None:
    """Add ``noisy_neighbour_hit_loss``: the share of hits that a tenant within its guarantee loses
    while another puts far more than fits.
    """
    tenants = Tenants(folder, "victim", "noisy")
    flags = (
        *("--tiers", "cpu", "--cpu", "36MiB", "--limits", "cpu_slab_bytes=6MiB"),
        *("--tenant-quotas", "victim=18MiB:18MiB", *tenants.flags),
    )
    with (
        serving(*flags) as (address, _),
        tenants.client("victim", address, SMALL) as victim,
        tenants.client("noisy", address, SMALL) as noisy,
    ):
        _hit_share(victim)  # fills
        alone = _hit_share(victim)
        stop, puts = threading.Event(), [0]
        noise = threading.Thread(target=_make_noise, args=(noisy, stop, puts))
        noise.start()
        shares = [_hit_share(victim)]
        while puts[0] < NOISE_CHUNKS and noise.is_alive():
            shares.append(_hit_share(victim))
        beside = float(np.mean(shares))
        stop.set()
        noise.join()
    figures = f"{alone:.3f} of lookups hit alone, {beside:.3f} beside {puts[0]} puts of another"
    report.add("noisy_neighbour_hit_loss", 1 - beside / alone, figures, "at most 0.05")


def _hit_share(client: Client) -> float:
    """Get the victim's prompts and put missing ones; return the share of hits."""
    made = [make_chunks(client, 1, seed) for seed in range(VICTIM_PROMPTS)]
    hits = 0
    for number in np.random.default_rng(3).integers(0, VICTIM_PROMPTS, VICTIM_GETS).tolist():
        keys, chunks = made[number]
        if client.get_chunks(keys):
            hits += 1
        else:
            client.put_chunks(chunks)
    return hits / VICTIM_GETS


def _make_noise(client: Client, stop: threading.Event, puts: list[int]) -> None:
    seed = 1000
    while not stop.is_set():
        seed += 1
        client.put_chunks(make_chunks(client, 1, seed)[1])
        puts[0] += 1


PARTS: dict[str, Part] = {
    "tls": measure_tls,
    "encryption": measure_encryption,
    "timing": measure_timing,
    "neighbour": measure_neighbour,
    "load": load.measure_load,
    "faults": load.measure_faults,
}


def main(argv: Sequence[str] | None = None) -> None:
    run_parts("trust", PARTS, argv, __doc__)


if __name__ == "__main__":
    main()
