"""What no honest engine does, over sockets: lies, clocks that jump, chunks too large, gaps."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ServerMaker
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import LARGE, MEDIUM, chunks_of, keys_of, outcomes, store

from kvstore.client import ClientOptions
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.plans import Hints, Reuse
from kvstore.proto.types import PutOutcome

STORED, REFUSED = PutOutcome.stored, PutOutcome.refused
SMALL_CPU = ("--cpu", "4MiB", "--limits", "cpu_slab_bytes=1MiB", "--write", "evict")
PROMPT = 4
MEDIUM_CHUNKS = ClientOptions("auto", chunk_tokens=64, deadline_ms=DEADLINE_MS)
LARGE_CHUNKS = ClientOptions("auto", chunk_tokens=1024, deadline_ms=DEADLINE_MS)
"""Of 8 MiB."""


@pytest.fixture(params=["hit_density", "marconi", "discard_hint"])
def server(request: pytest.FixtureRequest, make_server: ServerMaker) -> LocalServer:
    return make_server(*SMALL_CPU, "--policy", request.param, "--write-budget", "disk=1MiB")


@pytest.mark.parametrize(
    "lie",
    [Hints(reuse=Reuse.discard), Hints(pin_ms=3_600_000), Hints(priority=100, reuse=Reuse.keep)],
    ids=["discard", "pin", "keep"],
)
def test_an_engine_that_lies_of_all_it_puts_keeps_nobody_out(
    server: LocalServer, lie: Hints
) -> None:
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


def test_where_everything_is_leased_puts_are_refused_at_once_and_nothing_leaks(
    server: LocalServer,
) -> None:
    client = server.connect("auto", MEDIUM, MEDIUM_CHUNKS)
    stored = [keys_of(client, seed, PROMPT) for seed in range(1, 9)]
    leases = []
    for keys in stored:
        if REFUSED in outcomes(client, chunks_of(client, keys)):
            break
        leases.append(client.lease(keys=keys))
    else:
        pytest.fail("nothing was refused although all of memory is leased")
    refused = server.counter("put_refused_chunks")
    assert refused > 0
    assert server.usage().pending_puts == server.usage().open_puts == 0
    for lease in leases:
        lease.release()
    fresh = keys_of(client, 200, PROMPT)
    assert eventually(lambda: REFUSED not in outcomes(client, chunks_of(client, fresh)))
    assert server.settled().leases == 0


def test_a_chain_with_a_missing_middle_is_hit_up_to_there_and_mended(server: LocalServer) -> None:
    client = server.connect("auto", MEDIUM, MEDIUM_CHUNKS)
    keys = keys_of(client, 1, PROMPT)
    chunks = chunks_of(client, keys)
    client.put_chunks(chunks[:2] + chunks[3:])
    match = client.lookup(keys=keys)
    assert (match.ready, match.missing) == (2, PROMPT - 2)
    assert len(client.get_chunks(keys)) == 2
    for seed in range(2, 8):
        store(client, seed, PROMPT)
    client.put_chunks(chunks)
    assert client.lookup(keys=keys).ready == PROMPT
    server.settled()


def test_a_chunk_larger_than_memory_is_refused_by_name(make_server: ServerMaker) -> None:
    server = make_server(*SMALL_CPU)
    client = server.connect("auto", LARGE, LARGE_CHUNKS)
    with server.unchanged(), pytest.raises(InvalidRequestError, match="frame_bytes"):
        client.put_chunks(chunks_of(client, keys_of(client, 1, 1)))


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


def test_clocks_that_jump_leave_a_server_that_works(make_server: ServerMaker) -> None:
    server = make_server("--policy", "hit_density", "--write-budget", "disk=1GiB")
    client = server.connect("grpc")
    for seed, jump_s in enumerate((0.0, 3600.0, -7200.0, 1e7, -2e7, 5.0), 1):
        server.settled()
        server.skip(jump_s)
        server.node.sessions.expire()
        server.node.store.tick()
        keys = keys_of(client, seed, PROMPT)
        assert set(outcomes(client, chunks_of(client, keys))) == {STORED}
        assert client.lookup(keys=keys).ready == PROMPT
        assert len(client.get_chunks(keys)) == PROMPT
    assert server.settled().leases == 0
    assert server.node.store.moves.placement.budgets()["disk"][1] <= (1 << 30) / 24
