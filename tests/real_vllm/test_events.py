"""What a real vLLM publishes of the store: events that name blocks as those of its own cache do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from bench.lib.vllm import EngineProcess
from golden.samples import FOLDER
from helpers.local_server import eventually
from helpers.server_process import ServerProcess
from real_vllm.prompts import CHUNK_TOKENS, EngineMaker, prompt
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

PROMPT = prompt(200, 300)
CHUNKS = 300 // CHUNK_TOKENS
BLOCK_TOKENS = 32


@pytest.fixture
def forgetful(home: Path) -> Iterator[ServerProcess]:
    """A server that keeps nothing when it ends."""
    folder = home / "forgetful"
    folder.mkdir(mode=0o700)
    server = ServerProcess(folder, "--tiers", "cpu", "--cpu", "64MiB", "--log-level", "error")
    server.start()
    yield server
    server.kill()


class Router:
    """Who listens to an engine's events; vLLM connects to where it listens."""

    def __init__(self) -> None:
        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._socket.subscribe("")
        self._decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self.heard: list[Any] = []

    def hears(self, kind: Any, medium: str, count: int, within_s: float = 5.0) -> list[Any]:
        """Return the events of a kind about a medium, once there are so many."""
        deadline = time.monotonic() + within_s
        while len(found := self.known(kind, medium)) < count and time.monotonic() < deadline:
            if self._socket.poll(100):
                self.heard += self._decoder.decode(self._socket.recv_multipart()[-1]).events
        return found

    def known(self, kind: Any, medium: str) -> list[Any]:
        return [one for one in self.heard if isinstance(one, kind) and one.medium == medium]

    def close(self) -> None:
        self._socket.close(0)


@pytest.fixture
def router() -> Iterator[Router]:
    made = Router()
    yield made
    made.close()


def stepped(engine: EngineProcess) -> None:
    """Have all stored, and the engine make a step: events go out with one."""
    engine.fresh()
    engine.generate(prompt(201, 8), max_tokens=2)


def test_routers_learn_what_the_store_holds_and_what_it_lost(
    make_engine: EngineMaker, forgetful: ServerProcess, router: Router
) -> None:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": router.endpoint}
    store = {"address": forgetful.address, "durable": False}
    engine = make_engine(store, kv_events_config=events)
    assert eventually(lambda: heard_anything(engine, router))
    engine.generate(PROMPT)
    stepped(engine)
    stored = router.hears(BlockStored, "STORAGE", CHUNKS, 30.0)
    assert stored, engine.request("counts")
    assert [len(one.block_hashes) for one in stored] == [CHUNK_TOKENS // BLOCK_TOKENS] * CHUNKS
    assert [token for one in stored for token in one.token_ids] == PROMPT[: CHUNKS * CHUNK_TOKENS]
    assert {(one.locality, one.group_idx) for one in stored} == {("REMOTE", 0)}
    owners = {getattr(one, "ownership", "kvstore") for one in stored}  # 0.26 has no such field
    assert owners == {"kvstore"}
    own = router.known(BlockStored, "GPU")
    named = {
        tuple(one.token_ids[at * BLOCK_TOKENS :][:BLOCK_TOKENS]): name
        for one in own
        for at, name in enumerate(one.block_hashes)
    }
    for one in stored:
        blocks = [one.token_ids[:BLOCK_TOKENS], one.token_ids[BLOCK_TOKENS:]]
        assert one.block_hashes == [named[tuple(block)] for block in blocks]
        assert one.kv_cache_spec_kind == own[0].kv_cache_spec_kind
    assert [one.parent_block_hash for one in stored] == [
        None, *(one.block_hashes[-1] for one in stored[:-1])
    ]  # fmt: skip

    forgetful.kill()
    forgetful.start()

    def is_missed() -> bool:
        engine.fresh()
        engine.generate(PROMPT)
        return bool(router.hears(BlockRemoved, "STORAGE", 1))

    assert eventually(is_missed), engine.request("counts")
    removed = [name for one in router.known(BlockRemoved, "STORAGE") for name in one.block_hashes]
    assert removed == [name for one in stored for name in one.block_hashes]


def heard_anything(engine: EngineProcess, router: Router) -> bool:
    """Whether the router is connected: what is published before that is not heard."""
    engine.generate(prompt(202, 40), max_tokens=1)
    engine.forget()
    return bool(router.heard or router.hears(BlockStored, "GPU", 1))


def test_vllms_own_decoder_reads_what_the_store_writes() -> None:
    batch = msgspec.msgpack.Decoder(KVEventBatch).decode(
        (FOLDER / "events-v1.msgpack").read_bytes()
    )
    cleared, stored, removed = batch.events
    assert isinstance(cleared, AllBlocksCleared)
    assert isinstance(stored, BlockStored)
    assert (stored.medium, stored.block_size, stored.token_ids) == ("CPU", 256, [])
    assert [len(name) for name in stored.block_hashes] == [32, 32]
    assert (stored.parent_block_hash, stored.locality) == (None, "LOCAL")
    assert isinstance(removed, BlockRemoved)
    assert (removed.medium, len(removed.block_hashes)) == ("STORAGE", 1)
    if hasattr(stored, "session_id"):  # below 0.30 it has fewer fields to write
        assert msgspec.msgpack.encode(batch) == (FOLDER / "events-v1.msgpack").read_bytes()
