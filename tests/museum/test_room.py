"""Pains 3, 4, 5 and 14: eviction that stops, disks and tables that grow, leases that leak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ServerMaker
from contracts.chunks import make_representation
from local_server import DEADLINE_MS, LocalServer, eventually
from plain_engine import PlainEngine
from prompts import MEDIUM, assert_reads, chunks_of, keys_of, outcomes, store, tokens
from server_process import ServerProcess

from kvstore.client import Client, ClientOptions
from kvstore.proto.types import PutOutcome

MIB = 1 << 20
CHUNKS = 16
"""Chunks of a batch; of MEDIUM, a quarter of a megabyte each."""
OPTIONS = ClientOptions("auto", chunk_tokens=64, deadline_ms=DEADLINE_MS, retry_after_ms=20)


def test_lmcache_4817_puts_past_the_size_of_memory_all_find_room(
    make_server: ServerMaker, tmp_path: Path
) -> None:
    """LMCache#4817: one of the documented eviction policies raised in the eviction thread, the
    thread died, memory filled up and froze, and every later store was skipped without an error;
    #3187: the same from an allocator that eviction could not keep up with.

    Here whoever needs room makes it: a burst of many times the memory is stored whole.
    """
    server = make_server(
        "--cpu", "16MiB", "--disk", f"64MiB:{tmp_path / 'disk'}", "--disk-write", "evict"
    )
    client = server.connect("auto", MEDIUM, OPTIONS)
    prompts = [store(client, seed, CHUNKS) for seed in range(10)]
    assert server.counter("evicted_chunks") >= 10 * CHUNKS - 64
    assert server.counter("put_refused_chunks") == server.counter("dropped_victims") == 0
    for keys in prompts:
        assert_reads(client, keys)


def test_lmcache_4817_a_worker_that_died_fails_health(server: LocalServer) -> None:
    """The other half of LMCache#4817: that thread's death showed nowhere. Here it fails health."""
    assert server.node.is_alive()
    server.node.manager.transfers.mover.close()
    assert not server.node.is_alive()


def disk_bytes(folder: Path) -> int:
    """What the files below *folder* take on the disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def test_lmcache_4725_the_disk_stays_within_its_size_over_kills(
    server_process: Callable[..., ServerProcess],
) -> None:
    """LMCache#4725: a disk limited to 4 TB held 14 TB after two days, as the limit was a figure
    for reports unless a second setting was made; #1454: after a restart what lay there already
    did not count.

    Here all room is taken at the first start: three times the disk's size is written, the server
    is killed with -9 and started again, and the folder takes the same at every look.
    """
    process = server_process("--cpu", "16MiB", "--disk", "32MiB:disk")
    folder = process.socket_path.parent / "disk"
    looks, counts = [], []
    for start in range(2):
        process.start()
        with Client(process.address, MEDIUM, OPTIONS) as client:
            looks.append(disk_bytes(folder))
            (disk,) = [tier for tier in client.status().tiers if tier.name == "disk"]
            assert disk.chunks == process.recovered_chunks
            for seed in range(6 * start, 6 * start + 6):
                keys = store(client, seed, CHUNKS)
            looks.append(disk_bytes(folder))
            (disk,) = [tier for tier in client.status().tiers if tier.name == "disk"]
            counts.append(disk.used_bytes)
            assert disk.used_bytes <= disk.capacity_bytes == 32 * MIB
            client.put(chunks_of(client, keys), durable=True)
        process.kill()
    assert process.recovered_chunks > 0
    assert max(looks) - min(looks) < 2 * MIB, looks
    assert max(looks) < (32 + 256 + 16) * MIB, "the disk, its index and their slack"


@pytest.mark.parametrize(("way", "lease_ttl_ms"), [("time", 60_000), ("session", 600_000)])
def test_lmcache_1034_a_prompt_that_was_found_and_never_loaded_is_let_go(
    make_server: ServerMaker, way: str, lease_ttl_ms: int
) -> None:
    """LMCache#1034: a lookup pinned chunks, and those that were then not loaded (the engine had
    them, or gave the request up) stayed pinned for ever; #3381: others were let go twice, and a
    count went below nothing.

    Here what a session found is the session's: let go once by a release however often it is
    called, at the end of its time, or with the session. Memory is then free to the last chunk.
    """
    server = make_server("--tiers", "cpu", "--cpu", "16MiB", "--lease-ttl-ms", str(lease_ttl_ms))
    client = server.connect("auto", MEDIUM, OPTIONS)
    keys = store(client, 1, CHUNKS)
    kept, twice = client.lease(keys), client.lease(keys)
    twice.release()
    twice.release()
    assert (server.usage().leases, len(kept.get())) == (1, CHUNKS)
    if way == "session":
        client.close()
    else:
        server.skip(lease_ttl_ms / 1000 + 1)
    assert eventually(lambda: (server.usage().leases, server.usage().held) == (0, 0))
    other = server.connect("auto", MEDIUM, OPTIONS)
    for seed in range(2, 12):
        assert outcomes(other, chunks_of(other, keys_of(other, seed, CHUNKS))) == (
            [PutOutcome.stored] * CHUNKS
        )


def test_mooncake_3452_prompts_that_never_return_cost_a_bounded_memory(
    make_server: ServerMaker,
) -> None:
    """Mooncake#3452: with random prompts the master kept metadata of every page it ever saw, some
    25 million of them, and was killed for its memory; #834 the same.

    Here chunks in tables are those on tiers, and twice as many ghosts or as many as the setting
    says: many times the prompts leave the tables as they were.
    """
    server = make_server("--tiers", "cpu", "--cpu", "4MiB", "--ghost-limit", "200")
    kind = make_representation(layers=2, kv_heads=2, head_dim=64)
    client = server.connect("auto", kind)
    catalog = server.node.manager.catalog
    sizes = []
    for seed in range(40):
        store(client, seed, 50)
        sizes.append(len(catalog) + catalog.ghost_count())
    here = len(catalog)
    assert server.counter("put_stored_chunks") == 2000
    assert max(sizes) <= 3 * here + 200 + 16 < 1200
    assert max(sizes[-10:]) <= max(sizes[20:30]) + 16, "no more at the end than half way"
    assert PlainEngine(client).load(tokens(39, 50 * 16)).stored_tokens == 50 * 16
