"""A real vLLM that loads lossy copies stores nothing that was computed behind them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.lib.vllm import EngineProcess
from helpers.server_process import ServerProcess
from real_vllm.prompts import EngineMaker, prompt

from kvstore.client.connection import Connection
from kvstore.proto import kvstore_pb2 as pb

SHARED = prompt(71, 192)
"""Three chunks of which the store has lossy copies."""


@pytest.fixture(scope="module")
def lossy_store(home: Path) -> Iterator[ServerProcess]:
    """A server whose disk has a lossy codec: what memory lost by a restart is lossy."""
    folder = home / "lossy"
    folder.mkdir(mode=0o700)
    flags = ("--cpu", "64MiB", "--disk", f"256MiB:{folder / 'disk'}", "--codec", "disk=kvq:2")
    process = ServerProcess(folder, *flags, "--log-level", "error")
    process.start()
    yield process
    process.kill()


def on_disk(store: ServerProcess) -> int:
    connection = Connection(store.address, retry_after_ms=1)
    status = connection.call("Status", pb.StatusRequest(), 5000, pb.StatusResponse)
    connection.close()
    return next(tier.chunks for tier in status.tiers if tier.name == "disk")


def counted(engine: EngineProcess, name: str) -> int:
    return int(engine.ask("counts").get(name, 0))


def test_nothing_is_stored_behind_a_lossy_load_nor_behind_vllms_own_copy_of_it(
    make_engine: EngineMaker, lossy_store: ServerProcess
) -> None:
    extra = {"address": lossy_store.address, "durable": False, "accuracy": "bounded"}
    engine = make_engine(extra)
    engine.generate([*SHARED, *prompt(72, 20)])
    engine.fresh()
    until = time.monotonic() + 60.0
    while on_disk(lossy_store) < 3:
        assert time.monotonic() < until
        time.sleep(0.1)
    lossy_store.terminate()
    lossy_store.start()
    assert lossy_store.recovered_chunks == 3
    time.sleep(0.5)  # until the engine asks again
    engine.generate(prompt(70, 20))
    time.sleep(0.5)

    stored = counted(engine, "worker_stored_chunks")
    (loaded,) = engine.generate([*SHARED, *prompt(73, 140)])
    assert loaded["cached"] == 192
    assert engine.ask("settle")
    (cached,) = engine.generate([*SHARED, *prompt(74, 140)])
    assert cached["cached"] == 192, "in vLLM's own cache"
    assert engine.ask("settle")
    assert counted(engine, "worker_stored_chunks") == stored
    assert counted(engine, "event_lossy_hit_tokens") == 192
    assert counted(engine, "event_lossy_unstored_chunks") == 4

    engine.generate(prompt(75, 140))
    assert engine.ask("settle")
    assert counted(engine, "worker_stored_chunks") == stored + 2
