"""What TLS and authentication cost lookups: the same ones, with both and with neither."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import numpy as np

from bench.report import Report, in_turns
from bench.trust_callers import Tenants, own_certificate
from bench.workload import TINY, make_chunks, serving
from kvstore.client import Client, ClientOptions
from kvstore.proto.types import ChunkKey

CHUNKS = 32
LOOKUPS = 200
ROUNDS = 15


def measure(report: Report, folder: Path) -> None:
    """Add ``tls_auth_cost_on_lookups``: the share of a lookup's time that both add, over gRPC."""
    tenants = Tenants(folder, "acme")
    with ExitStack() as stack:
        memory = ("--tiers", "cpu", "--cpu", "64MiB")
        (folder / "plain").mkdir()
        (folder / "secure").mkdir()
        plain_address, _ = stack.enter_context(serving(*memory, disk=folder / "plain" / "d"))
        flags = (*own_certificate(folder), *tenants.flags)
        address, _ = stack.enter_context(serving(*memory, *flags, disk=folder / "secure" / "d"))
        options = ClientOptions("grpc", deadline_ms=20_000)
        plain = stack.enter_context(Client(plain_address, TINY, options))
        ca = folder / "server.crt"
        secure = stack.enter_context(tenants.client("acme", address, TINY, "grpc", ca))
        works = []
        for client in (plain, secure):
            keys, chunks = make_chunks(client, CHUNKS, seed=1)
            client.put_chunks(chunks)
            works.append((client, keys))
        ratio, plain_s, secure_s = in_turns(
            lambda: _look_up(*works[0]), lambda: _look_up(*works[1]), ROUNDS
        )
        told = "{:.0f} us plain, {:.0f} with both".format(
            *(1e6 * taken_s / LOOKUPS for taken_s in (plain_s, secure_s))
        )
        report.add("tls_auth_cost_on_lookups", ratio - 1, told, "at most 0.10")


def _look_up(client: Client, keys: list[ChunkKey]) -> float:
    started = perf_counter()
    ready = [client.lookup(keys=keys).ready for _ in range(LOOKUPS)]
    taken_s = perf_counter() - started
    assert np.array_equal(ready, [CHUNKS] * LOOKUPS)
    return taken_s
