"""Pains 6, 7, 9, 19 and 21: gone before it is read, waits without an end, slower than nothing.

Also what is slow only where others are served, and a shared tier that somebody else empties.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from conftest import ServerMaker
from contracts.chunks import make_representation
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.plain_engine import PlainEngine
from helpers.prompts import MEDIUM, chunks_of, is_right, keys_of, outcomes, store, tokens
from helpers.redis_process import RedisProcess
from helpers.server_process import ServerProcess

from kvstore.client import ClientOptions
from kvstore.client.client import Client
from kvstore.client.planning import PrefillModel
from kvstore.proto.plans import EngineTerms
from kvstore.proto.types import PutOutcome

CHUNKS = 8
OPTIONS = ClientOptions("auto", chunk_tokens=64, deadline_ms=DEADLINE_MS)
RANKS = [replace(MEDIUM, adapter_digest=f"none+tp={rank}/2") for rank in range(2)]


def test_lmcache_1467_what_two_ranks_were_promised_both_read_under_pressure(
    make_server: ServerMaker,
) -> None:
    """LMCache#1467, #4133, Mooncake#4239: between a lookup and the loads chunks were evicted, or a
    lease of a fixed time ended; ranks found prefixes of different lengths and the engine ended."""
    server = make_server("--tiers", "cpu", "--cpu", "16MiB")
    ranks = [server.connect("auto", kind, OPTIONS) for kind in RANKS]
    prompts = [store(rank, 1, CHUNKS) for rank in ranks]
    leases = [rank.lease(keys=keys) for rank, keys in zip(ranks, prompts, strict=True)]
    other = server.connect("auto", MEDIUM, OPTIONS)
    for seed in range(2, 22):
        assert PutOutcome.refused not in outcomes(
            other, chunks_of(other, keys_of(other, seed, CHUNKS))
        )
    assert server.counter("evicted_chunks") > 64
    for rank, keys, lease in zip(ranks, prompts, leases, strict=True):
        found = lease.get()
        assert len(found) == lease.match.ready == CHUNKS
        assert all(is_right(rank, *pair) for pair in zip(keys, found, strict=True))
        lease.release()


def test_lmcache_4133_a_load_without_a_lease_is_a_shorter_prefix_and_never_a_wrong_one(
    make_server: ServerMaker,
) -> None:
    """The same race for who takes no lease: the load itself says how far it came."""
    server = make_server("--tiers", "cpu", "--cpu", "16MiB")
    client = server.connect("auto", MEDIUM, OPTIONS)
    keys = store(client, 1, CHUNKS)
    assert client.lookup(keys=keys).ready == CHUNKS
    for seed in range(2, 22):
        store(client, seed, CHUNKS)
    assert client.get_chunks(keys) == []
    assert PlainEngine(client).load(tokens(1, 64 * CHUNKS)).stored_tokens == 0


def test_lmcache_4676_a_server_that_hangs_costs_one_deadline_and_then_nothing(
    server_process: Callable[..., ServerProcess],
) -> None:
    """LMCache#4676, #4642, #4670, vllm#45387: a server locked itself up for good, and engines
    waited for an answer without an end, until a watchdog killed them."""
    process = server_process("--tiers", "cpu", "--cpu", "16MiB")
    process.start()
    prompt = tokens(1, 64)
    options = ClientOptions("shm", 16, deadline_ms=1000, retry_after_ms=60_000)
    with Client(process.address, MEDIUM, options) as client:
        engine = PlainEngine(client)
        assert engine.store(prompt) == 4
        process.send_signal(signal.SIGSTOP)
        for _ in range(50):
            assert engine.load(prompt).stored_tokens == 0
        errors = engine.connector.stats().load_errors
        assert sum(errors.values()) == 50
        assert errors.get("TierUnavailableError", 0) >= 48, "told at once, without a wait"
    options = replace(options, retry_after_ms=20)
    with Client(process.address, MEDIUM, options) as client:
        engine = PlainEngine(client)
        assert engine.load(prompt).stored_tokens == 0
        process.send_signal(signal.SIGCONT)
        assert eventually(lambda: engine.load(prompt).stored_tokens == 64)


def test_lmcache_1938_what_is_sooner_computed_than_loaded_is_computed(server: LocalServer) -> None:
    """LMCache#1938, #4797, sglang#31398: whatever was found was loaded, whatever that took, and the
    time to the first token doubled with the cache."""
    prompt = tokens(1, 64)
    client = server.connect()
    PlainEngine(client).store(prompt)
    for slot in server.node.store.tiers.slots.values():
        slot.round_trip_s = 1e-3
    before = server.counter("get_chunks")
    fast = PlainEngine(client, PrefillModel(0.0, 1e-9))
    assert fast.load(prompt).stored_tokens == 0
    assert fast.connector.stats().slow_chunks == 4
    assert server.counter("get_chunks") == before
    assert PlainEngine(client, PrefillModel(0.0, 1.0)).load(prompt).stored_tokens == 64
    for token_s in (1e-9, 1e-5, 1e-4, 1e-3, 1.0):
        plan = client.lookup(
            keys=client.keys(prompt), engine=EngineTerms(PrefillModel(0.0, token_s), 70)
        ).plan
        assert plan is not None
        assert plan.plan_ms <= plan.recompute_ms


def test_lmcache_4797_a_miss_is_one_question_and_no_byte(server: LocalServer) -> None:
    """LMCache#4797: prompts that no cache had paid for the cache. Here a miss asks once."""
    client = server.connect()
    engine = PlainEngine(client)
    lookups = server.counter("lookups")
    assert engine.load(tokens(7, 64)).stored_tokens == 0
    counts = {
        name: server.counter(name) for name in ("get_chunks", "get_bytes", "get_missed_chunks")
    }
    assert server.counter("lookups") == lookups + 1
    assert not any(counts.values())


LONG = 512
"""Chunks of a prompt."""


def test_a_prompt_stored_among_others_is_looked_up_as_soon_as_one_stored_alone(
    make_server: ServerMaker,
) -> None:
    """Of prompts whose chunks were put in turns with those of others, a lookup of 512 took 13 to 17
    ms of processor time. Here the first lookup of each is timed."""
    server = make_server("--tiers", "cpu", "--cpu", "64MiB")
    kind = make_representation(1, 1, 4)
    client = server.connect(representation=kind, options=ClientOptions(chunk_tokens=16))
    prompts = [chunks_of(client, keys_of(client, seed, LONG)) for seed in range(4)]
    for some in zip(*prompts, strict=True):
        client.put_chunks(some)
    server.settled()
    times_s = []
    for prompt in prompts:
        keys = [chunk.key for chunk in prompt]
        started = time.process_time()
        match = client.lookup(keys=keys)
        times_s.append(time.process_time() - started)
        assert match.ready == LONG
    assert min(times_s) < 6e-3


PROMPT = tokens(1, 64)
OTHER = tokens(2, 64)
NAMES = 16
"""In Redis, of eight chunks: each has a manifest and a part."""


def test_redis_flushall_leaves_no_server_that_says_a_chunk_is_there_and_does_not_bring_it(
    make_server: ServerMaker, own_redis: RedisProcess, tmp_path: Path
) -> None:
    """Of FLUSHALL, a restart without its file or a failover to an empty replica: puts were answered
    ``exists`` out of memory, Redis stayed without them, and other nodes never saw them."""
    own_redis.start()
    shared = ("--tiers", "cpu,redis", "--redis", own_redis.url, "--redis-size", "64MiB")
    first = PlainEngine(make_server(*shared).connect())
    assert first.store(PROMPT) == first.store(OTHER) == 4

    assert eventually(lambda: len(own_redis.names()) == NAMES)
    own_redis.command("FLUSHALL")
    assert first.store(PROMPT) == 0, "they exist, in memory"
    assert eventually(lambda: len(own_redis.names()) == NAMES)
    second = make_server(*shared, "--socket", str(tmp_path / "second.sock"))
    other = PlainEngine(second.connect())
    assert other.load(PROMPT).stored_tokens == other.load(OTHER).stored_tokens == 64
