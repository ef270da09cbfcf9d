"""A burst of puts far larger than memory: none is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.prompts import LARGE, chunks_of, is_right, keys_of
from helpers.server_process import ServerProcess

from kvstore.client import Client, ClientOptions
from kvstore.proto.types import PutOutcome

CHUNKS = 2000
BATCH = 20
NEEDED_BYTES = 4 << 30


@pytest.mark.slow
def test_burst_of_two_thousand_chunks_of_a_megabyte_loses_none(
    server_process: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    free_bytes = shutil.disk_usage(tmp_path).free
    if free_bytes < NEEDED_BYTES:
        pytest.skip(f"needs {NEEDED_BYTES} bytes of disk and {free_bytes} are free")
    process = server_process("--cpu", "128MiB", "--disk", "2560MiB:disk")
    process.start()
    options = ClientOptions("shm", chunk_tokens=128, deadline_ms=60_000)
    with Client(process.address, LARGE, options) as client:
        prompts = [keys_of(client, seed, BATCH) for seed in range(CHUNKS // BATCH)]
        for keys in prompts:
            puts = client.put_chunks(chunks_of(client, keys))
            assert [put.outcome for put in puts] == [PutOutcome.stored] * BATCH, puts
        for keys in prompts:
            found = client.get_chunks(keys)
            assert len(found) == BATCH
            assert all(is_right(client, *pair) for pair in zip(keys, found, strict=True))
        counters = client.status().counters
        assert counters["put_stored_chunks"] == counters["get_chunks"] == CHUNKS
        assert counters["dropped_victims"] == counters["put_refused_chunks"] == 0
        # Reading them evicts nothing: what lies on disk is read there.
        assert counters["evicted_chunks"] >= CHUNKS - 128
    assert process.terminate() == 0
