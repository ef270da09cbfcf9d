"""Pains 2, 8 and 10: what a name leaves out, names that differ by process, versions that differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace

import grpc
import pytest
from conftest import ServerMaker
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.plain_engine import PlainEngine
from helpers.prompts import SMALL, tokens

from kvstore.client import Client, ClientOptions
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import kvstore_pb2_grpc
from kvstore.proto.errors import ModelError
from kvstore.proto.messages import FEATURE_SHARED_MEMORY
from kvstore.proto.types import DType, RopeParameters

PROMPT = tokens(1, 64)
(GROUP,) = SMALL.layer_groups
OTHERS = {
    "adapter": replace(SMALL, adapter_digest="sha256:5f"),
    "dtype": replace(SMALL, layer_groups=(replace(GROUP, dtype=DType.float16),)),
    "heads": replace(SMALL, layer_groups=(replace(GROUP, kv_heads=1, head_dim=16),)),
    "revision": replace(SMALL, model_revision="f" * 40),
    "quantization": replace(SMALL, quantization="awq-4"),
    "tokenizer": replace(SMALL, tokenizer_digest="2" * 64),
    "rope": replace(SMALL, rope=RopeParameters(10_000.0, 8, "linear", (("factor", 4.0),))),
    "layout": replace(SMALL, layout_version=SMALL.layout_version + 1),
}


def test_vllm_44250_kv_of_another_identity_is_a_miss(server: LocalServer) -> None:
    """vllm#44250, #42119, LMCache#2961: chunks were named by tokens and salt alone, and a second
    LoRA adapter was given what the first had stored; so were other types, layouts and revisions."""
    one = PlainEngine(server.connect())
    assert one.store(PROMPT) == 4
    for field, kind in OTHERS.items():
        other = PlainEngine(server.connect("auto", kind))
        assert other.load(PROMPT).stored_tokens == 0, field
        assert other.store(PROMPT) == 4, field
        assert one.load(PROMPT).stored_tokens == other.load(PROMPT).stored_tokens == 64, field
        other.client.close()


@pytest.mark.parametrize("field", ["model_id", "model_revision", "adapter_digest"])
def test_lmcache_4086_an_identity_that_leaves_something_out_is_refused(field: str) -> None:
    """LMCache#4086, dynamo#14416: what was not given was taken for equal. Here it is refused."""
    with pytest.raises(ModelError, match=field):
        replace(SMALL, **{field: ""})  # type: ignore[arg-type]


CHILD = """
import json, sys
from helpers.plain_engine import PlainEngine
from helpers.prompts import SMALL, tokens
from kvstore.client import Client, ClientOptions

with Client(sys.argv[1], SMALL, ClientOptions(chunk_tokens=16, deadline_ms=20_000)) as client:
    stored = PlainEngine(client).store(tokens(1, 64))
    print(json.dumps([stored, hash("x"), [key.hex() for key in client.keys(tokens(1, 64))]]))
"""


def test_lmcache_1139_processes_with_other_hash_seeds_share_chunks(server: LocalServer) -> None:
    """LMCache#1139, #2136: names began with Python's own hash, of a random seed in each process, so
    no process found what another had stored."""
    env = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, server.address]
    run = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    stored, other_hash, names = json.loads(run.stdout)
    client = server.connect()
    assert stored == 4
    assert other_hash != hash("x"), "the seeds do differ"
    assert names == [key.hex() for key in client.keys(PROMPT)]
    assert PlainEngine(client).load(PROMPT).stored_tokens == 64


class OtherVersion(kvstore_pb2_grpc.KVStoreServicer):
    """A server of another version: features and fields nobody knows, methods that it lacks."""

    calls = 0

    def OpenSession(
        self, request: pb.OpenSessionRequest, context: grpc.ServicerContext
    ) -> pb.OpenSessionResponse:
        reply = pb.OpenSessionResponse(
            server=pb.Server(boot_id=1, features=~FEATURE_SHARED_MEMORY & (1 << 64) - 1),
            session_id=1, key_namespace=bytes(16), heartbeat_ms=15_000,
            max_message_bytes=1 << 20, max_frame_bytes=1 << 28, max_batch_chunks=4096,
            codecs=["raw", "codec-of-tomorrow"],
        )  # fmt: skip
        reply.MergeFromString(b"\xa2\x3f\x08tomorrow")  # field 1012, of a later version
        return reply

    def Lookup(self, request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupResponse:
        self.calls += 1
        return super().Lookup(request, context)  # type: ignore[no-any-return, no-untyped-call]


@pytest.fixture
def other_version(no_leaks: None) -> Iterator[tuple[str, OtherVersion]]:
    workers = futures.ThreadPoolExecutor(4)
    server = grpc.server(workers)
    service = OtherVersion()
    kvstore_pb2_grpc.add_KVStoreServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", service
    server.stop(None).wait()
    workers.shutdown()


def test_vllm_33440_a_server_of_another_version_costs_hits_and_no_request(
    other_version: tuple[str, OtherVersion],
) -> None:
    """vllm#33440, #34136, LMCache#2570: a store and an engine of versions that do not fit could be
    imported together, and failed once requests moved KV."""
    address, service = other_version
    with Client(address, SMALL, ClientOptions("auto", 16, DEADLINE_MS)) as client:
        engine = PlainEngine(client)
        assert engine.load(PROMPT).stored_tokens == 0
        assert engine.store(PROMPT) == 0
        stats = engine.connector.stats()
    assert service.calls == 1
    assert (sum(stats.load_errors.values()), sum(stats.store_errors.values())) == (1, 1)
    assert (stats.lookups, stats.hit_tokens, stats.miss_tokens) == (1, 0, 64)


def test_lmcache_2570_a_session_of_an_earlier_start_is_opened_again(
    make_server: ServerMaker, server: LocalServer
) -> None:
    """The same after an upgrade under a running engine: another start has another boot id."""
    client = server.connect(options=ClientOptions("auto", 16, DEADLINE_MS, retry_after_ms=20))
    engine = PlainEngine(client)
    engine.store(PROMPT)
    first = client.boot_id
    port = server.node.port
    server.stop()
    assert engine.load(PROMPT).stored_tokens == 0
    assert make_server("--listen", f"127.0.0.1:{port}").node.recovered_chunks == 4
    assert eventually(lambda: engine.load(PROMPT).stored_tokens == 64)
    assert client.boot_id != first
