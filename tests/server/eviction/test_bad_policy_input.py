"""What no honest engine does, over sockets: lies, clocks that jump, chunks too large, gaps."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ServerMaker
from helpers.local_server import DEADLINE_MS, LocalServer
from helpers.prompts import LARGE, MEDIUM, chunks_of, keys_of, outcomes

from kvstore.client import ClientOptions
from kvstore.proto.plans import Hints, Reuse
from kvstore.proto.types import PutOutcome

STORED, REFUSED = PutOutcome.stored, PutOutcome.refused
SMALL_CPU = ("--cpu", "4MiB", "--limits", "cpu_slab_bytes=1MiB", "--write", "evict")
PROMPT = 4
MEDIUM_CHUNKS = ClientOptions("auto", chunk_tokens=64, deadline_ms=DEADLINE_MS)
LARGE_CHUNKS = ClientOptions("auto", chunk_tokens=1024, deadline_ms=DEADLINE_MS)
"""Of 8 MiB."""


LIES = {
    "hit_density": Hints(pin_ms=3_600_000),
    "marconi": Hints(priority=100, reuse=Reuse.keep),
    "discard_hint": Hints(reuse=Reuse.discard),
}


def start(make_server: ServerMaker, policy: str) -> LocalServer:
    return make_server(*SMALL_CPU, "--policy", policy, "--write-budget", "disk=1MiB")


@pytest.mark.parametrize("policy", LIES)
def test_an_engine_that_lies_of_all_it_puts_keeps_nobody_out(
    make_server: ServerMaker, policy: str
) -> None:
    server, lie = start(make_server, policy), LIES[policy]
    client = server.connect("auto", MEDIUM, MEDIUM_CHUNKS)
    for seed in range(1, 13):
        puts = client.put_chunks(chunks_of(client, keys_of(client, seed, PROMPT)), hints=lie)
        assert {one.outcome for one in puts} == {STORED}, f"put {seed}"
    if lie.pin_ms:
        assert server.counter("ignored_pins") > 0
    honest = keys_of(client, 100, PROMPT)
    assert outcomes(client, chunks_of(client, honest)) == [STORED] * PROMPT
    assert client.lookup(keys=honest).ready == PROMPT
    usage = dict(server.settled().tiers)
    assert usage["cpu"].used_bytes <= usage["cpu"].capacity_bytes
    assert usage["cpu"].reservations == 0


def test_a_chunk_larger_than_the_disk_stays_in_memory(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    server = make_server(
        "--cpu", "64MiB", "--limits", "cpu_slab_bytes=16MiB", "--disk", f"4MiB:{tmp_path / 'disk'}"
    )
    client = server.connect("auto", LARGE, LARGE_CHUNKS)
    keys = keys_of(client, 1, 2)
    assert outcomes(client, chunks_of(client, keys)) == [STORED] * 2
    server.settled()
    assert client.lookup(keys=keys).tiers == ("cpu", "cpu")
    assert dict(server.usage().tiers)["disk"].chunks == 0
    durable = client.put_chunks(chunks_of(client, keys_of(client, 2, 1)), durable=True)
    assert [one.outcome for one in durable] == [REFUSED]
